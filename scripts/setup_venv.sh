#!/bin/sh
# Build or repair .venv so that it holds ddtree with the named extras.
#
#   sh scripts/setup_venv.sh engine        what `make demo` needs
#   sh scripts/setup_venv.sh engine,dev    what `make test` needs
#
# A stamp in .venv remembers what was installed; when it still fits, the script returns at once. A marker shows a build
# in progress: where one is found, the last build was cut off and .venv is made anew.
set -eu

extras=$1
cd "$(dirname "$0")/.."
here=$(pwd)
venv=.venv
marker=$venv/.ddtree-building

say() { printf '%s\n' "[setup] $*" >&2; }
fail() {
    printf '%s\n' "setup: $*" >&2
    exit 2
}

# Usable: Python 3.11 or 3.12 that can make virtual environments (Debian packs ensurepip apart).
usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }

pick_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or 3.12 with venv: name another one"
        printf '%s\n' "$PYTHON"
        return
    fi
    for name in python3.11 python3.12 python3 python; do
        if usable "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 with venv found: install one (Debian and Ubuntu: apt install python3.11-venv;" \
        "macOS: brew install python@3.12) or name it, as in: make demo PYTHON=/path/to/python3.12"
}

venv_works() { "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }

# The stamp is a hash of everything that decides what is installed, this folder included: scripts in .venv/bin name it.
fingerprint() {
    "$venv/bin/python" - "$here" <<'PY'
import hashlib, pathlib, sys
state = hashlib.sha256(sys.argv[1].encode(errors="surrogateescape"))
for name in ("pyproject.toml", "scripts/setup_venv.sh"):
    state.update(pathlib.Path(name).read_bytes())
print(state.hexdigest(), sys.argv[1].encode(errors="backslashreplace").decode("ascii", "backslashreplace"))
PY
}

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check "$@" >&2; }

torch_fits() {
    "$venv/bin/python" - 2>/dev/null <<'PY'
import sys
from importlib.metadata import version
sys.exit(tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2]) < (2, 11))
PY
}

reachable() {
    "$venv/bin/python" - "$1" 2>/dev/null <<'PY'
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=3).close()
PY
}

# torch goes in first and by itself, so that resolving ddtree never pulls a CUDA build onto a laptop.
install_torch() {
    cpu_index=https://download.pytorch.org/whl/cpu
    if [ "$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1; then
        say "installing torch"
        pip_install 'torch>=2.11'
        return
    fi
    if reachable "$cpu_index/torch/"; then
        say "no NVIDIA GPU: installing the CPU build of torch from PyTorch's own index (about 200 MB)"
        pip_install --index-url "$cpu_index" 'torch>=2.11' && return
        say "that did not work; trying the configured package index"
    fi
    if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        say "no NVIDIA GPU: installing torch 2.13.0 from the configured package index"
        pip_install 'torch==2.13.0' && return
    fi
    say "no NVIDIA GPU, and no CPU build of torch found: installing what pip finds (may be large)"
    pip_install 'torch>=2.11'
}

if [ -e "$marker" ]; then
    say "the last set-up was cut off: making $venv anew"
    rm -rf "$venv"
elif [ -e "$venv" ] && ! venv_works; then
    say "$venv does not work with this machine's Python: making it anew"
    rm -rf "$venv"
fi

if [ -d "$venv" ]; then
    wanted=$(fingerprint)
    for stamp in "$venv/.ddtree-$extras" "$venv/.ddtree-engine,dev"; do
        if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
    done
else
    python=$(pick_python)
    say "making $venv with $("$python" --version)"
    mkdir "$venv"
    : >"$marker"
    "$python" -m venv "$venv" || fail "$python could not make $venv: see the message above"
fi

: >"$marker"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >&2 || fail "no pip in $venv: delete that folder"
rm -f "$venv"/.ddtree-engine*
stop() { # pip ended by itself, so .venv is sound and the next run may go on from here
    rm -f "$marker"
    fail "$@"
}
torch_fits || install_torch || stop "torch could not be installed: check the network (pip's own messages are above)"
say "installing ddtree[$extras]"
pip_install --editable ".[$extras]" || stop "pip could not install ddtree[$extras]: see its messages above"
fingerprint >"$venv/.ddtree-$extras"
rm -f "$marker"
say "$venv is ready"
