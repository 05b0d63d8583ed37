#!/usr/bin/env bash
# Makes the environments .venv-test, .venv-vllm, .venv-tpu and .venv-gpu, then runs lint, types and tests. Arguments go to
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
# XLA's compilers for TPUs and GPUs, apart from the rest: where jax finds one, it looks for the devices.
for kind in tpu gpu; do
    locked=$("$bin/python" -V && cat "requirements-$kind.txt")
    if [ -z "$fast" ] && [ "$(uname)" = Linux ] && [ "$(cat ".venv-$kind/.locked" 2>/dev/null)" != "$locked" ]; then
        rm -rf ".venv-$kind"
        "$bin/python" -m pip install -q --disable-pip-version-check --no-compile --no-deps \
            --target ".venv-$kind" -r "requirements-$kind.txt"
        echo "$locked" >".venv-$kind/.locked"
    fi
done

"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/lint-imports" --no-logo --no-cache
"$bin/pyright" --pythonpath "$bin/python"
if [ -n "$server" ] && ! wait "$server"; then
    echo "scripts/install_vllm.sh failed; its error is above" >&2
    exit 1
fi

exec "$bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder ${fast:+-m "not whole"} "$@"
