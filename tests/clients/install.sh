#!/bin/sh
# The clients of the client matrix:  tests/clients/install.sh VENV CACHE
#
# Makes the virtual environment VENV with the Python SDKs, CACHE/aider with aider (which pins what it needs), and
# CACHE/node_modules with the Node clients and a Node.js that is new enough for them, all at the versions that stand in
# this folder. What is there is kept.
set -eu

VENV=${1:?usage: install.sh VENV CACHE}
CACHE=${2:?usage: install.sh VENV CACHE}
PYTHON=${PYTHON:-python3}
HERE=$(dirname "$0")

say() { echo "install.sh: $*" >&2; }

# A stamp holds the list that was installed: a changed list installs anew.
python_packages() {
    if ! cmp -s "$2" "$1/installed.txt"; then
        say "installing Python clients into $1"
        [ -x "$1/bin/python" ] || "$PYTHON" -m venv "$1"
        "$1/bin/python" -m pip install --quiet --disable-pip-version-check -r "$2"
        cp "$2" "$1/installed.txt"
    fi
}

node_packages() {
    if ! { command -v node && command -v npm; } >/dev/null; then
        say "the client matrix needs node and npm (Debian: apt-get install nodejs npm)"
        exit 1
    fi
    if ! cmp -s "$HERE/package-lock.json" "$CACHE/installed.json"; then
        say "installing Node clients into $CACHE/node_modules"
        cp "$HERE/package.json" "$HERE/package-lock.json" "$CACHE/"
        npm ci --prefix "$CACHE" --ignore-scripts --no-audit --no-fund --loglevel=error >&2
        cp "$HERE/package-lock.json" "$CACHE/installed.json"
    fi
    # Node looks modules up from where the importing file lies.
    ln -sfn "$(cd "$CACHE" && pwd)/node_modules" "$HERE/drivers/node_modules"
}

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || {
    say "aider needs a Python older than 3.13, the gateway one from 3.11 on; name one with PYTHON=..."
    exit 1
}
mkdir -p "$CACHE"
python_packages "$VENV" "$HERE/requirements.txt"
python_packages "$CACHE/aider" "$HERE/requirements-aider.txt"
node_packages
