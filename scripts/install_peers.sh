#!/usr/bin/env bash
# Installs the libraries that scripts/bench_iteration.py measures beside jaxrl, TRL and Tunix, each
# into an environment of its own: .venv-peers/trl and .venv-peers/tunix.
set -euo pipefail

cd "$(dirname "$0")/.."
for peer in trl tunix; do
    "${PYTHON:-python3}" -m venv ".venv-peers/$peer"
done
scripts/install_torch.sh .venv-peers/trl
.venv-peers/trl/bin/pip install -q --disable-pip-version-check trl==1.16.0
.venv-peers/tunix/bin/pip install -q --disable-pip-version-check google-tunix==0.1.7
