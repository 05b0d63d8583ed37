#!/usr/bin/env bash
# One run on all hosts of a Cloud TPU slice:
#
#   scripts/cluster/tpu_vm.sh NAME ZONE install            # jaxrl from this checkout, on every host
#   scripts/cluster/tpu_vm.sh NAME ZONE train CONFIG.toml  # the same command resumes the run
#
# Checked by shellcheck and with a stand-in for gcloud; not run on a slice. Paths in the config are
# paths on the hosts; run_dir lies on shared storage, such as a bucket mounted with gcsfuse.
#
# jaxrl sets flags of XLA for TPUs itself; --verbose prints them (docs/results/chips.md). A flag that LIBTPU_INIT_ARGS
# names on a host is left to it; JAXRL_COMPILER_FLAGS=0 leaves them out.
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,5p' "$0" >&2
    exit 2
fi
name=$1 zone=$2 what=$3
shift 3
root=$(cd "$(dirname "$0")/../.." && pwd)

on_all() {
    gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}

copy() {
    gcloud compute tpus tpu-vm scp "$1" "$name:$2" --zone="$zone" --worker=all
}

case $what in
install)
    bundle=$(mktemp --suffix=.tar.gz)
    trap 'rm -f "$bundle"' EXIT
    git -C "$root" archive --format=tar.gz -o "$bundle" HEAD
    copy "$bundle" jaxrl.tar.gz
    on_all "rm -rf jaxrl && mkdir jaxrl && tar xzf jaxrl.tar.gz -C jaxrl && cd jaxrl \
&& python3 -m venv ../venv && ../venv/bin/pip install -q -c requirements.txt '.[tpu]'"
    ;;
train)
    config=$1
    shift
    copy "$config" "$(basename "$config")"
    # printf %q keeps the quotes of the arguments through the remote shell.
    on_all "venv/bin/jaxrl train $(printf '%q ' "$(basename "$config")" "$@")--hosts.coordinator auto"
    ;;
*)
    echo "'$what': expected install or train" >&2
    exit 2
    ;;
esac
