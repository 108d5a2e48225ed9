# shellcheck shell=sh
# What the host is and has. Nothing here changes anything. Sourced by install.sh.

DRIVER_MINIMUM=575
VLLM_MINIMUM=0.18.0
# From this version on the package index has vLLM for CUDA 13, up to it for CUDA 12.
VLLM_CUDA_13=0.20
DRIVER_CUDA_13=580

# Sets OS_ID, OS_NAME, and NVIDIA_REPOSITORY, the name that NVIDIA gives to its repository for this system.
read_os() {
    release=$ROOT/etc/os-release
    [ -r "$release" ] || refuse 1 "$release cannot be read, so the system is not known"
    OS_ID=$(os_field ID)
    OS_NAME=$(os_field PRETTY_NAME)
    case $OS_ID:$(os_field VERSION_ID) in
        ubuntu:22.04) NVIDIA_REPOSITORY=ubuntu2204 ;;
        ubuntu:24.04) NVIDIA_REPOSITORY=ubuntu2404 ;;
        debian:12) NVIDIA_REPOSITORY=debian12 ;;
        *) refuse 1 "${OS_NAME:-this system} is not supported: Ubuntu 22.04, Ubuntu 24.04 and Debian 12 are. docs/install.md has the Docker path" ;;
    esac
}

os_field() {
    sed -n "s/^$1=//p" "$release" | head -n 1 | tr -d "\"'"
}

describe_host() {
    say "${OS_NAME:-$OS_ID $(os_field VERSION_ID)}, $(uname -m), NVIDIA GPUs: $(gpus), driver running: $(running_driver none)"
}

# at_least VERSION MINIMUM
at_least() {
    [ -n "$1" ] && [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]
}

# How many there are, by what the PCI bus says: that needs no driver and no further program.
gpus() {
    count=0
    for device in "$ROOT"/sys/bus/pci/devices/*; do
        # 0x10de is NVIDIA; class 0x03 is a display controller, which a GPU without a connector is as well.
        if [ "$(contents "$device/vendor")" = 0x10de ]; then
            case $(contents "$device/class") in 0x03*) count=$((count + 1)) ;; esac
        fi
    done
    echo "$count"
}

contents() {
    if [ -r "$1" ]; then cat "$1"; fi
}

# running_driver [OTHERWISE]: the version of the kernel module that is loaded
running_driver() {
    found=$(contents "$ROOT/sys/module/nvidia/version")
    echo "${found:-${1-}}"
}

# The version of the module that the running kernel would load.
installed_driver() {
    modinfo -F version nvidia 2>/dev/null || true
}

torch_reaches_gpus() {
    "$PREFIX/vllm/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1
}

# Which CUDA it was built for, and whether the toolkit is of the same major version.
torch_says() {
    found=$("$PREFIX/vllm/bin/python" -c 'import torch; print(torch.version.cuda)' 2>/dev/null) || return 0
    case $found in
        "${CUDA%%.*}".*) echo "for CUDA $found" ;;
        *) echo "for CUDA $found; kernels that it compiles at its start may want that toolkit: --part 2 --cuda $found" ;;
    esac
}

has_secure_boot() {
    for variable in "$ROOT"/sys/firmware/efi/efivars/SecureBoot-*; do
        # Four bytes of attributes, then the value.
        [ -r "$variable" ] && [ "$(od -An -t u1 -j 4 -N 1 "$variable" | tr -d ' ')" = 1 ] && return 0
    done
    return 1
}

is_installed() { # Debian package
    [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# version_in ENVIRONMENT PACKAGE
version_in() {
    [ ! -x "$1/bin/python" ] ||
        "$1/bin/python" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$2" 2>/dev/null || true
}

# What --check says of a step beside its title.
detail() {
    case $1 in
        packages) found=$(missing_packages) found=${found:+missing: $found} ;;
        driver) found=$(installed_driver) ;;
        reboot) found=$(running_driver) ;;
        vllm) found=$(version_in "$PREFIX/vllm" "$(vllm_name)") ;;
        torch) found=$(torch_says) ;;
        gateway) found=$(version_in "$PREFIX/gateway" warmlane) ;;
        *) found='' ;;
    esac
    echo "${found:+ ($found)}"
}
