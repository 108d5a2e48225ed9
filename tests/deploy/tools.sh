#!/bin/sh
# The tools of `make test-deploy`:  tests/deploy/tools.sh FOLDER
#
# Prometheus with promtool, and uv, are put into FOLDER. curl, docker-compose and systemd-analyze are used as they are; where they are missing
# and this is root on Debian or Ubuntu, they are installed.
set -eu

FOLDER=${1:?usage: tools.sh FOLDER}
PYTHON=${PYTHON:-python3}

say() { echo "tools.sh: $*" >&2; }

install_package() { # PROGRAM PACKAGE
    command -v "$1" >/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $2"
        apt-get update -qq >&2
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$2" >&2
    else
        say "$1 is needed (Debian and Ubuntu: apt-get install $2)"
        exit 1
    fi
}

# The package would start a server of its own, so the programs are taken out of it. That needs no root.
unpack_prometheus() {
    [ ! -x "$FOLDER/prometheus" ] || return 0
    command -v apt-get >/dev/null || { say "prometheus and promtool are needed in $FOLDER" && exit 1; }
    say "fetching Prometheus"
    # shellcheck disable=SC2012 # no odd names
    (cd "$FOLDER" && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; } } >&2 &&
        dpkg -x "$(ls prometheus_*.deb | head -n 1)" unpacked && mv unpacked/usr/bin/prom* . &&
        rm -r unpacked prometheus_*.deb)
}

mkdir -p "$FOLDER"
install_package curl curl
install_package docker-compose docker-compose
install_package systemd-analyze systemd
unpack_prometheus
if [ ! -x "$FOLDER/uv/bin/uv" ]; then
    say "installing uv"
    "$PYTHON" -m venv "$FOLDER/uv"
    "$FOLDER/uv/bin/python" -m pip install --quiet --disable-pip-version-check uv
fi
