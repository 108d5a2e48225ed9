# shellcheck shell=sh
# The steps: NAME_done is a question and changes nothing, NAME_do does it through `run` and `write`. Sourced by install.sh.

# curl fetches, ca-certificates lets it trust; python3-venv is what uv is put into; the compiler builds the gateway's hot
# modules and, while vLLM runs, its kernels; kmod has modinfo.
PACKAGES='ca-certificates curl build-essential python3-venv kmod'
ACCOUNT=warmlane
NVIDIA=https://developer.download.nvidia.com/compute/cuda/repos
# What the gateway is built from.
SOURCES='pyproject.toml setup.py README.md LICENSE gateway workers loadtests'

missing_packages() {
    missing=''
    for package in $PACKAGES; do
        is_installed "$package" || missing="$missing $package"
    done
    echo "${missing# }"
}

apt_install() {
    run env DEBIAN_FRONTEND=noninteractive apt-get install --yes "$@"
}

# -- part 1

packages_done() { [ -z "$(missing_packages)" ]; }

packages_do() {
    run apt-get update
    # shellcheck disable=SC2046 # words
    apt_install $(missing_packages)
}

account_done() { getent passwd "$ACCOUNT" >/dev/null; }

# The services run as this user. Its home is the state directory of the replicas, which systemd makes.
account_do() {
    run useradd --system --user-group --home-dir /var/lib/warmlane --no-create-home --shell /usr/sbin/nologin "$ACCOUNT"
}

# -- part 2

repository_done() { [ -e "$ROOT/usr/share/keyrings/cuda-archive-keyring.gpg" ]; }

repository_do() {
    if [ "$OS_ID" = debian ]; then
        # Some of what the driver's packages depend on is in contrib.
        write "$ROOT/etc/apt/sources.list.d/warmlane-contrib.list" <<'END'
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm contrib
END
    fi
    run curl --fail --silent --show-error --location --output "$FOLDER/cuda-keyring.deb" \
        "$NVIDIA/$NVIDIA_REPOSITORY/x86_64/cuda-keyring_1.1-1_all.deb"
    run dpkg --install "$FOLDER/cuda-keyring.deb"
    run apt-get update
}

wanted_driver() { echo "${DRIVER_BRANCH:-$DRIVER_MINIMUM}"; }

# A driver that runs counts wherever it came from.
driver_done() { reboot_done || at_least "$(installed_driver)" "$(wanted_driver)"; }

driver_do() {
    # The kernel module is compiled here, for this kernel.
    apt_install "linux-headers-$(uname -r)"
    [ -z "$DRIVER_BRANCH" ] || apt_install "nvidia-driver-pinning-$DRIVER_BRANCH"
    apt_install "$DRIVER"
    [ "$MODE" = dry-run ] || rm -f "$STATE/boot"  # an earlier reboot was not for this driver
    if has_secure_boot; then
        say "Secure Boot is on: the module is signed with a key of this machine, which has to be enrolled in the firmware's" \
            "dialogue at the next boot (mokutil --import /var/lib/dkms/mok.pub asks for a password for that)"
    fi
}

reboot_done() { at_least "$(running_driver)" "$(wanted_driver)"; }

reboot_do() {
    this_boot=$(contents "$ROOT/proc/sys/kernel/random/boot_id")
    before=$(contents "$STATE/boot")
    if [ "$MODE" = dry-run ]; then
        echo "# here the machine has to be rebooted; then: sudo $HERE/install.sh --resume"
        return
    fi
    if [ -n "$before" ] && [ "$before" != "$this_boot" ]; then
        refuse 1 "the machine was rebooted, but driver $(wanted_driver) or newer does not run (running: $(running_driver none))." \
            "The reason is in: dkms status; journalctl --dmesg --grep='nvidia|nouveau'; mokutil --sb-state"
    fi
    mkdir -p "$STATE"
    chmod 0700 "$STATE"
    printf '%s\n' "$this_boot" >"$STATE/boot"
    printf '%s\n' "$OPTIONS" >"$STATE/options"
    if [ "$AT_BOOT" = yes ]; then
        resume_at_boot
        say "the new driver runs after a reboot. Next: sudo reboot. The rest follows by itself: journalctl --follow --unit warmlane-install"
    else
        say "the new driver runs after a reboot. Next: sudo reboot, then: sudo $HERE/install.sh --resume"
    fi
    CURRENT=''  # nothing failed
    exit 3
}

resume_at_boot() {
    write "$ROOT/etc/systemd/system/warmlane-install.service" <<END
[Unit]
Description=Warmlane's installation, after the reboot
Wants=network-online.target
After=network-online.target
ConditionPathExists=$STATE/options

[Service]
Type=oneshot
ExecStart=/bin/sh "$HERE/install.sh"${ROOT:+ --root "$ROOT"} --resume
# vLLM is some gigabytes to fetch.
TimeoutStartSec=infinity

[Install]
WantedBy=multi-user.target
END
    systemd enable warmlane-install.service
}

forget_reboot() {
    if [ -e "$ROOT/etc/systemd/system/warmlane-install.service" ]; then
        systemd disable warmlane-install.service
        run rm -f "$ROOT/etc/systemd/system/warmlane-install.service"
    fi
    if [ -d "$STATE" ]; then run rm -r "$STATE"; fi
}

# Units in another root are enabled, but nothing there can be reloaded.
systemd() {
    run systemctl ${ROOT:+--root "$ROOT"} "$@"
    if [ -z "$ROOT" ] && [ -d /run/systemd/system ]; then run systemctl daemon-reload; fi
}

toolkit_done() { [ -x "$ROOT/usr/local/cuda-$CUDA/bin/nvcc" ]; }

toolkit_do() { apt_install "cuda-toolkit-$(echo "$CUDA" | tr . -)"; }

# -- part 3

uv() {
    # Python itself goes beside the environments: the home of root is closed to the services.
    run env UV_PYTHON_INSTALL_DIR="$PREFIX/python" "$PREFIX/uv/bin/uv" "$@"
}

uv_done() { "$PREFIX/uv/bin/uv" --version >/dev/null 2>&1; }

# uv comes from the package index like everything else here, not from a script that is piped into a shell.
uv_do() {
    run python3 -m venv "$PREFIX/uv"
    run "$PREFIX/uv/bin/python" -m pip install --quiet --upgrade uv
}

# A managed Python is the same on all three systems and has its headers, which Triton compiles against.
make_environment() {
    if [ -x "$1/bin/python" ]; then return; fi
    case $PYTHON in
        */*) uv venv --quiet --python "$PYTHON" "$1" ;;
        *) uv venv --quiet --managed-python --python "$PYTHON" "$1" ;;
    esac
}

# The name of the distribution in a requirement such as `vllm>=0.18.0`.
vllm_name() {
    name=${VLLM_PACKAGE:-vllm}
    echo "${name%%[!A-Za-z0-9._-]*}"
}

vllm_done() {
    found=$(version_in "$PREFIX/vllm" "$(vllm_name)")
    if [ -n "$VLLM_VERSION" ]; then
        [ "$found" = "$VLLM_VERSION" ]
    elif [ -n "$VLLM_PACKAGE" ]; then
        [ -n "$found" ]
    else
        at_least "$found" "$VLLM_MINIMUM"
    fi
}

# What to ask the package index for: as told, else the newest that runs with the driver.
vllm_requirement() {
    if [ -n "$VLLM_VERSION" ]; then
        echo "vllm==$VLLM_VERSION"
    elif [ -n "$VLLM_PACKAGE" ]; then
        echo "$VLLM_PACKAGE"
    elif [ -z "$(running_driver)" ] || at_least "$(running_driver)" $DRIVER_CUDA_13; then
        echo "vllm>=$VLLM_MINIMUM"
    else
        echo "vllm>=$VLLM_MINIMUM,<$VLLM_CUDA_13"
    fi
}

# `auto`: uv takes the build of torch that fits the driver.
vllm_do() {
    requirement=$(vllm_requirement)
    case $requirement in
        *,*) say "driver $(running_driver) runs CUDA 12; for vLLM $VLLM_CUDA_13 or newer: --driver-branch $DRIVER_CUDA_13" ;;
    esac
    make_environment "$PREFIX/vllm"
    uv pip install --quiet --upgrade --python "$PREFIX/vllm/bin/python" --torch-backend auto "$requirement"
}

# Another package in the place of vLLM need not have torch.
torch_done() { [ -n "$VLLM_PACKAGE" ] || torch_reaches_gpus; }

torch_do() {
    if [ "$MODE" = dry-run ]; then
        echo "# here vLLM's torch is asked whether it reaches the GPUs"
        return
    fi
    refuse 1 "vLLM's torch reaches no GPU ($(torch_says); driver $(running_driver none)). Builds for CUDA 13 want driver" \
        "$DRIVER_CUDA_13 or newer: --driver-branch $DRIVER_CUDA_13, or --vllm-version with one before $VLLM_CUDA_13"
}

gateway_done() { "$PREFIX/gateway/bin/warmlane" version >/dev/null 2>&1; }

# Built without isolation, with mypy and the dependencies there first: so the build compiles the hot modules. From a copy,
# so that it leaves nothing in the sources.
gateway_do() {
    make_environment "$PREFIX/gateway"
    # shellcheck disable=SC2086 # words
    (cd "$HERE/.." && run cp -r $SOURCES "$FOLDER")
    into="$PREFIX/gateway/bin/python"
    uv pip install --quiet --upgrade --python "$into" 'setuptools>=77' wheel 'mypy>=1.14'
    uv pip install --quiet --python "$into" --requirements "$FOLDER/pyproject.toml"
    uv pip install --quiet --python "$into" --no-build-isolation --no-deps --reinstall-package warmlane "$FOLDER"
}

UNITS='warmlane.service warmlane-replica@.service'
SETTINGS='warmlane.toml gateway.env replica.env'

unit() { sed "s|/opt/warmlane|$PREFIX|g" "$HERE/systemd/$1"; }

services_done() {
    for name in $UNITS; do
        unit "$name" | cmp -s - "$ROOT/etc/systemd/system/$name" || return 1
    done
    for name in $SETTINGS; do
        [ -e "$ROOT/etc/warmlane/$name" ] || return 1
    done
}

# Units are replaced, settings never. Nothing is started: which model runs where is the operator's to say.
services_do() {
    run mkdir -p "$ROOT/etc/systemd/system" "$ROOT/etc/warmlane"
    for name in $UNITS; do
        unit "$name" >"$FOLDER/$name"  # by itself, for in a pipe its failure would be lost
        write "$ROOT/etc/systemd/system/$name" <"$FOLDER/$name"
    done
    for name in $SETTINGS; do
        # systemd reads environment files as root, and keys may be put into them; the gateway reads its own file itself.
        mode=0600
        if [ "$name" = warmlane.toml ]; then mode=0644; fi
        [ -e "$ROOT/etc/warmlane/$name" ] || run install -m $mode "$HERE/systemd/$name" "$ROOT/etc/warmlane/$name"
    done
    if [ -z "$ROOT" ] && [ -d /run/systemd/system ]; then run systemctl daemon-reload; fi
}
