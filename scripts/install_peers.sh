#!/usr/bin/env bash
# Installs the libraries that scripts/bench_iteration.py measures beside jaxrl, each into an
# environment of its own:
#   scripts/install_peers.sh DIR
set -euo pipefail

cd "$(dirname "$0")/.."
for peer in trl tunix; do
    "${PYTHON:-python3}" -m venv "$1/$peer"
done
scripts/install_torch.sh "$1/trl"
"$1/trl/bin/pip" install -q --disable-pip-version-check trl==1.16.0
"$1/tunix/bin/pip" install -q --disable-pip-version-check google-tunix==0.1.7
