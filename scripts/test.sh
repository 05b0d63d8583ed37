#!/usr/bin/env bash
# Makes the environments .venv-test, .venv-vllm and .venv-tpu, then runs lint, types and tests. Arguments go to
# pytest:
#   ./scripts/test.sh                       everything
#   ./scripts/test.sh --fast                without servers, second processes and whole runs
#   ./scripts/test.sh tests/losses -k ppo   a part of the tests
set -euo pipefail

fast=
if [ "${1:-}" = --fast ]; then
    fast=1
    shift
fi

cd "$(dirname "$0")/.."
if ! command -v git >/dev/null; then
    echo "git is not installed; a test asks it for the files of the repository" >&2
    exit 1
fi
unset PYTHONDONTWRITEBYTECODE  # without byte code every start takes many seconds more
scripts/make_venv.sh .venv-test requirements-dev.txt requirements-torch.txt
bin=.venv-test/bin
server=
if [ -z "$fast" ] && [ "$(uname)" = Linux ]; then
    scripts/install_vllm.sh &  # beside lint and types, which keep one core busy
    server=$!
    trap wait EXIT
fi
# XLA's compiler for TPUs, apart from the rest: where jax finds it, every process looks for a TPU.
tpu=$("$bin/python" -V && cat requirements-tpu.txt)
if [ -z "$fast" ] && [ "$(uname)" = Linux ] && [ "$(cat .venv-tpu/.locked 2>/dev/null)" != "$tpu" ]; then
    rm -rf .venv-tpu
    "$bin/python" -m pip install -q --disable-pip-version-check --no-compile --no-deps \
        --target .venv-tpu -r requirements-tpu.txt
    echo "$tpu" >.venv-tpu/.locked
fi

"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/lint-imports" --no-logo --no-cache
"$bin/pyright" --pythonpath "$bin/python"
if [ -n "$server" ] && ! wait "$server"; then
    echo "scripts/install_vllm.sh failed; its error is above" >&2
    exit 1
fi

exec "$bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder ${fast:+-m "not whole"} "$@"
