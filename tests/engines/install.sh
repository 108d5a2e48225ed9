#!/bin/sh
# llama.cpp's server for tests:  tests/engines/install.sh VENV
#
# Makes the virtual environment VENV with xllamacpp in it: a wheel of 34 MB that brings llama.cpp's own HTTP server, built
# for any x86-64, and needs nothing else. What is there is kept.
set -eu

VENV=${1:?usage: install.sh VENV}
PYTHON=${PYTHON:-python3}
VERSION=2026.10.11549

if [ "$(cat "$VENV/installed" 2>/dev/null)" != "$VERSION" ]; then
    echo "install.sh: installing xllamacpp $VERSION into $VENV" >&2
    [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: "xllamacpp==$VERSION"
    "$VENV/bin/python" -c 'import xllamacpp'
    echo "$VERSION" >"$VENV/installed"
fi
