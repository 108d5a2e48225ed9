#!/bin/sh
# What `make test-e2e` needs:  tests/e2e/install.sh FOLDER
#
# Playwright for Python goes into FOLDER, of which the tests take it; the browser is the system's Chromium. Where that is
# missing and this is root on Debian or Ubuntu, it is installed.
set -eu

FOLDER=${1:?usage: install.sh FOLDER}
PYTHON=${PYTHON:-python3}
VERSION=1.65.2

if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "install.sh: installing chromium" >&2
        apt-get update -qq >&2
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >&2
    else
        echo "install.sh: chromium is needed (Debian and Ubuntu: apt-get install chromium)" >&2
        exit 1
    fi
fi
if [ "$(cat "$FOLDER/installed" 2>/dev/null)" != "$VERSION" ]; then
    echo "install.sh: installing playwright $VERSION into $FOLDER" >&2
    rm -rf "$FOLDER"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --target "$FOLDER" "playwright==$VERSION"
    echo "$VERSION" >"$FOLDER/installed"
fi
