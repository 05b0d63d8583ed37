#!/usr/bin/env bash
# Makes .venv-vllm-tpu: jaxrl and vLLM's TPU engine in one environment, for sampler.name =
# "vllm_tpu". Linux on x86-64 and Python 3.12 only, as the engine. Takes 10 GB: torch's wheel needs
# CUDA's libraries, also where there is no GPU.
set -euo pipefail

cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-python3.12}
if command -v "$PYTHON" >/dev/null &&
    ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
    echo "$PYTHON is $("$PYTHON" -V 2>&1), and vllm-tpu has wheels for 3.12 only; name a 3.12 with" \
        "PYTHON=..." >&2
    exit 1
fi
scripts/make_venv.sh .venv-vllm-tpu requirements-vllm-tpu.txt
