#!/usr/bin/env bash
# Makes a virtual environment with exactly the packages of the given lock files, and jaxrl itself:
#   scripts/make_venv.sh DIR LOCK...
# torch has several builds, so install_torch.sh installs requirements-torch.txt.
# Does nothing where DIR is up to date. PYTHON names the interpreter (python3); it needs venv and
# pip, whose own configuration decides where packages come from.
set -euo pipefail

cd "$(dirname "$0")/.."
venv=$1
shift
python=${PYTHON:-python3}

if ! command -v "$python" >/dev/null; then
    echo "$python is not installed; install Python 3.11 or newer, or name one with PYTHON=..." >&2
    exit 1
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "$python is $("$python" -V 2>&1) and jaxrl needs 3.11 or newer; name one with PYTHON=..." >&2
    exit 1
fi

sum() { "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'; }
same() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }

# The path counts too: an environment does not survive being moved or copied.
locked=$({ pwd; "$python" -c 'import sys; print(sys.version, sys.prefix)'; cat "$@"; } | sum)
if ! same "$venv/.locked" "$locked"; then
    echo "installing $* into $venv"
    "$python" -m venv --clear "$venv"
    locks=()
    torch=
    for lock in "$@"; do
        if [ "$lock" = requirements-torch.txt ]; then
            torch=$lock
        else
            locks+=(-r "$lock")
        fi
    done
    # The locks are complete, so nothing has to be resolved. Byte code is left to the first import:
    # compiling all of it here takes as long as the rest. Older releases of pip, as Python 3.11
    # brings one, compute half as long again.
    pip_install=("$venv/bin/python" -m pip install -q --disable-pip-version-check --no-compile)
    "${pip_install[@]}" 'pip>=26'
    "${pip_install[@]}" --no-deps "${locks[@]}"
    [ -z "$torch" ] || scripts/install_torch.sh "$venv"
    echo "$locked" >"$venv/.locked"
fi

project=$(sum <pyproject.toml)
if ! same "$venv/.project" "$project"; then
    # Built with the locked setuptools, so that nothing is fetched, and for one environment at a
    # time, because setuptools writes into the checkout.
    alone='import fcntl, subprocess, sys
with open("pyproject.toml") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    sys.exit(subprocess.call(sys.argv[1:]))'
    python=$venv/bin/python
    "$python" -c "$alone" "$python" -m pip install -qq --disable-pip-version-check --no-deps \
        --no-build-isolation --editable .
    echo "$project" >"$venv/.project"
fi
