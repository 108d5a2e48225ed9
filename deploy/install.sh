#!/bin/sh
# Installs vLLM and Warmlane on a fresh Ubuntu 22.04, Ubuntu 24.04 or Debian 12:  sudo deploy/install.sh [OPTION]...
#
# It is a table of steps in three parts. Each step is a pair of functions in install/steps.sh: NAME_done says whether
# there is anything left to do, NAME_do does it. So the script may be run again at any time, and after the reboot that a
# new driver needs it goes on where it stopped.
set -eu

# modinfo and useradd are there, which is not in everybody's path.
PATH=$PATH:/usr/sbin:/sbin
HERE=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=deploy/install/host.sh
. "$HERE/install/host.sh"
# shellcheck source=deploy/install/steps.sh
. "$HERE/install/steps.sh"

# Part, name, what it is.
STEPS='1 packages Debian packages that the rest needs
1 account the system user warmlane
2 repository the package repository of NVIDIA
2 driver NVIDIA driver 575 or newer, installed
2 reboot NVIDIA driver 575 or newer, running
2 toolkit CUDA toolkit
3 uv uv, which makes the Python environments
3 vllm vLLM 0.18.0 or newer in an environment of its own
3 torch the GPUs, as vLLM reaches them
3 gateway the gateway in an environment of its own
3 services systemd units, and configuration in /etc/warmlane'

NO_GPU='no NVIDIA GPU was found. For the gateway alone, in front of replicas elsewhere: --only gateway'

usage() {
    cat <<'END'
usage: sudo deploy/install.sh [OPTION]...

Installs on Ubuntu 22.04, Ubuntu 24.04 and Debian 12 (x86_64), in three parts: 1 what the rest needs; 2 NVIDIA driver 575 or
newer and CUDA toolkit 12.9, with a reboot in between; 3 Python environments made by uv: vLLM 0.18.0 or newer, and the gateway.
What is there already is left alone.

  --check               change nothing; say of each step whether it is done
  --dry-run             change nothing; print the commands
  --only vllm           no gateway and no services
  --only gateway        no driver, toolkit and vLLM: for a machine without a GPU
  --part N              only part 1, 2 or 3
  --resume              after the reboot: go on with the options of before
  --resume-at-boot      let systemd do that
  --upgrade             bring uv, vLLM and the gateway up to date although they are there
  --driver KIND         kernel modules: open (default; Turing and newer) or proprietary (older GPUs)
  --driver-branch N     this branch of the driver, 575 or higher, and not an older one that runs; the newest by default
  --cuda X.Y            CUDA toolkit, 12.9 by default
  --python VERSION      Python of the environments, 3.12 by default; or the path of one
  --vllm-version X.Y.Z  instead of the newest that runs with the driver
  --vllm-package SPEC   another package in place of vLLM, as pip names it
  --prefix DIR          where the environments go, /opt/warmlane by default
  --root DIR            look at and write under DIR in place of / (for tests)

Exit codes: 0 done; 1 failed, or with --check: something is missing; 2 wrong usage; 3 reboot, then --resume.
END
}

say() { printf 'install.sh: %s\n' "$*"; }

# refuse CODE MESSAGE
refuse() {
    code=$1
    shift
    printf 'install.sh: %s\n' "$*" >&2
    exit "$code"
}

# What is run is printed first, so that a terminal or a log shows what was done.
run() {
    printf '+%s\n' "$(quoted "$@")"
    [ "$MODE" = dry-run ] || "$@"
}

quoted() {
    for word in "$@"; do
        case $word in
            '' | *[!A-Za-z0-9_./:=,+@%-]*) printf " '%s'" "$(printf %s "$word" | sed "s/'/'\\\\''/g")" ;;
            *) printf ' %s' "$word" ;;
        esac
    done
}

# write PATH, content on standard input
write() {
    printf '+ write %s\n' "$1"
    if [ "$MODE" = dry-run ]; then cat >/dev/null; else cat >"$1"; fi
}

read_options() {
    MODE=install ONLY='' PART='' RESUME=no AT_BOOT=no UPGRADE=no DRIVER=nvidia-open DRIVER_BRANCH='' CUDA=12.9
    PYTHON=3.12 VLLM_VERSION='' VLLM_PACKAGE='' PREFIX=/opt/warmlane ROOT=''
    while [ $# -gt 0 ]; do
        case $1 in
            --check | --dry-run) MODE=${1#--} ;;
            --resume) RESUME=yes ;;
            --resume-at-boot) AT_BOOT=yes ;;
            --upgrade) UPGRADE=yes ;;
            -h | --help) usage && exit 0 ;;
            --only | --part | --driver | --driver-branch | --cuda | --python | --vllm-version | --vllm-package | --prefix | --root)
                [ $# -gt 1 ] || refuse 2 "$1 needs a value"
                read_value "$1" "$2"
                shift
                ;;
            *) refuse 2 "unknown option $1; --help lists them" ;;
        esac
        shift
    done
    [ -z "$VLLM_VERSION" ] || [ -z "$VLLM_PACKAGE" ] || refuse 2 "--vllm-version and --vllm-package exclude each other"
    STATE=$ROOT/var/lib/warmlane-install
}

read_value() {
    case $1=$2 in
        --only=vllm | --only=gateway) ONLY=$2 ;;
        --part=[123]) PART=$2 ;;
        --driver=open) DRIVER=nvidia-open ;;
        --driver=proprietary) DRIVER=cuda-drivers ;;
        --driver-branch=[0-9]*)
            at_least "$2" "$DRIVER_MINIMUM" || refuse 2 "$1 $2: at least $DRIVER_MINIMUM"
            DRIVER_BRANCH=$2
            ;;
        --cuda=[1-9]*.[0-9]*) CUDA=$2 ;;
        --python=?*) PYTHON=$2 ;;
        --vllm-version=[0-9]*)
            at_least "$2" "$VLLM_MINIMUM" || refuse 2 "$1 $2: at least $VLLM_MINIMUM"
            VLLM_VERSION=$2
            ;;
        --vllm-package=?*) VLLM_PACKAGE=$2 ;;
        --prefix=*[!A-Za-z0-9._/+-]*)
            refuse 2 "$1 cannot be '$2': besides letters and digits only . _ / + - are safe in units and scripts"
            ;;
        --prefix=/*) PREFIX=$2 ;;
        --root=/*) ROOT=${2%/} ;;
        *) refuse 2 "$1 cannot be '$2'; --help says what it can be" ;;
    esac
}

is_wanted() { # PART NAME
    [ -z "$PART" ] || [ "$PART" = "$1" ] || return 1
    case $ONLY:$2 in
        vllm:account | vllm:gateway | vllm:services) return 1 ;;
        gateway:repository | gateway:driver | gateway:reboot | gateway:toolkit | gateway:vllm | gateway:torch) return 1 ;;
    esac
}

wants_gpu() { [ "$ONLY" != gateway ] && [ "$PART" != 1 ]; }

# Calls VISIT PART NAME TITLE for each step that is wanted.
each_step() {
    while read -r part name title <&3; do
        if is_wanted "$part" "$name"; then "$1" "$part" "$name" "$title"; fi
    done 3<<END
$STEPS
END
}

report() {
    if "$2_done"; then state='done   '; else state='missing' MISSING=$((MISSING + 1)); fi
    printf '%s  %s %-10s %s\n' "$state" "$1" "$2" "$3$(detail "$2")"
}

is_upgraded() {
    case $UPGRADE:$1 in yes:uv | yes:vllm | yes:gateway) ;; *) return 1 ;; esac
}

perform() {
    if ! is_upgraded "$2" && "$2_done"; then
        say "part $1, $2: done already$(detail "$2")"
    else
        say "part $1, $2: $3"
        CURRENT=$2
        "$2_do"
        CURRENT=''
        [ "$MODE" = dry-run ] || "$2_done" || refuse 1 "step $2 ran without an error, but $3 cannot be found"
    fi
}

check() {
    MISSING=0
    describe_host
    if wants_gpu && [ "$(gpus)" = 0 ]; then say "$NO_GPU"; fi
    each_step report
    if [ "$MISSING" -gt 0 ]; then
        say "$MISSING missing"
        exit 1
    fi
    say "nothing is missing"
}

carry_out() {
    if wants_gpu && [ "$MODE" = install ]; then
        [ "$(gpus)" -gt 0 ] || refuse 1 "$NO_GPU"
        [ "$(uname -m)" = x86_64 ] || refuse 1 "vLLM and its driver are prepared for x86_64 here, this is $(uname -m)"
    fi
    if [ "$MODE" = install ] && [ -z "$ROOT" ] && [ "$(id -u)" != 0 ]; then
        refuse 1 "this changes the system and needs root: sudo $0 (without root: --check and --dry-run)"
    fi
    describe_host
    CURRENT=''
    FOLDER=$(mktemp -d)
    trap 'ended $?' EXIT
    each_step perform
    if [ "$MODE" = install ] && is_wanted 2 reboot; then forget_reboot; fi
    say_what_is_next
}

ended() {
    rm -rf "$FOLDER"
    if [ "$1" != 0 ] && [ -n "$CURRENT" ]; then
        printf 'install.sh: step %s failed. Once its cause is gone, run this again: what is done stays done.\n' "$CURRENT" >&2
        exit 1  # what the command said may mean something else here
    fi
}

say_what_is_next() {
    if [ "$MODE" = dry-run ]; then
        say "nothing was changed"
    elif [ -n "$PART" ] && [ "$PART" != 3 ]; then
        say "part $PART is done; next: part $((PART + 1))"
    elif [ "$ONLY" = vllm ]; then
        say "done. Next: $PREFIX/vllm/bin/vllm serve MODEL --port 8000, then deploy/verify.sh http://127.0.0.1:8000"
    else
        say "done. Next, as docs/install.md says: edit /etc/warmlane, start the services, then deploy/verify.sh http://127.0.0.1:8000"
    fi
}

main() {
    read_options "$@"
    if [ "$RESUME" = yes ]; then
        [ -r "$STATE/options" ] || refuse 1 "there is nothing to resume ($STATE/options does not exist)"
        # The options of before, one word a line.
        while IFS= read -r word; do set -- "$@" "$word"; done <"$STATE/options"
        read_options "$@"
    fi
    OPTIONS=$(printf '%s\n' "$@" | grep -vx -e '' -e --resume) || true
    read_os
    if [ "$MODE" = check ]; then check; else carry_out; fi
}

main "$@"
