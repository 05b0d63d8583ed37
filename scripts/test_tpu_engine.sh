#!/usr/bin/env bash
# Tests jaxrl with vLLM's TPU engine in one process, on simulated devices; some minutes of CPU time.
# Needs .venv-vllm-tpu (scripts/install_vllm_tpu.sh). Arguments go to pytest.
set -euo pipefail

cd "$(dirname "$0")/.."
exec .venv-vllm-tpu/bin/python -m pytest --noconftest -p tests.tpu_engine.on_cpu \
    -o filterwarnings= -o timeout=900 tests/tpu_engine/check_engine.py "$@"
