#!/usr/bin/env bash
# Makes the environments .venv-test, .venv-vllm, .venv-tpu and .venv-gpu, and runs lint, types and tests. Arguments go
# to pytest:
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

# Installs what only the tests marked `whole` need: vLLM, and XLA's compilers for TPUs and GPUs. These are apart from
# the rest: where jax finds one, it looks for the devices.
install_others() {
    scripts/install_vllm.sh
    for kind in tpu gpu; do
        locked=$(.venv-vllm/bin/python -V && cat "requirements-$kind.txt")
        if [ "$(cat ".venv-$kind/.locked" 2>/dev/null)" != "$locked" ]; then
            rm -rf ".venv-$kind"
            .venv-vllm/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps \
                --target ".venv-$kind" -r "requirements-$kind.txt"
            echo "$locked" >".venv-$kind/.locked"
        fi
    done
}

finish_others() {
    if [ -n "$others" ] && ! wait "$others"; then
        echo "the installation failed; its error is above" >&2
        exit 1
    fi
}

others=
trap wait EXIT
if [ -z "$fast" ] && [ "$(uname)" = Linux ]; then
    install_others &
    others=$!
fi
scripts/fetch_tokenizers.sh &
tokenizers=$!
scripts/make_venv.sh .venv-test requirements-dev.txt requirements-torch.txt
bin=.venv-test/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/lint-imports" --no-logo --no-cache
"$bin/pyrefly" check --python-interpreter-path "$bin/python"
wait "$tokenizers"

# Tests marked `whole` wait for servers and processes, so two cores have work for three workers. The others compute.
tests=("$bin/python" -m pytest --dist loadfile --no-loadscope-reorder)
if [ -n "$fast" ]; then
    "${tests[@]}" -n 2 -m "not whole" "$@"
elif [ $# != 0 ]; then
    finish_others
    "${tests[@]}" -n 3 "$@"
else
    "${tests[@]}" -n 2 -m "not whole"
    finish_others
    "${tests[@]}" -n 3 -m whole
fi
