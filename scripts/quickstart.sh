#!/usr/bin/env bash
# From nothing to a trained model: makes .venv, then a small base model that adds badly (jaxrl sft),
# then teaches it to add with GRPO (jaxrl train). Needs Python 3.11+, no GPU and no torch.
#   ./scripts/quickstart.sh            the run lies in runs/quickstart/grpo
#   SEED=1 ./scripts/quickstart.sh     another model, other data: runs/quickstart-1
set -euo pipefail

cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE  # without byte code every start takes many seconds more
seed=${SEED:-0}
dir=runs/quickstart
[ "$seed" = 0 ] || dir=runs/quickstart-$seed

scripts/make_venv.sh .venv requirements.txt
SECONDS=0
.venv/bin/python scripts/make_arithmetic.py "$dir" --seed "$seed"
.venv/bin/jaxrl sft configs/quickstart_sft.toml --seed "$seed" --run_dir "$dir/sft" \
    --model.path "$dir/untrained" --data.path "$dir/sft.jsonl"
# The progress display goes to the standard error; the result comes last, after the time.
result=$(.venv/bin/jaxrl train configs/quickstart.toml --seed "$seed" --run_dir "$dir/grpo" \
    --model.path "$dir/sft/model" --data.path "$dir/train.jsonl" \
    --data.eval_path "$dir/held_out.jsonl")
echo "$((SECONDS / 60)) min $((SECONDS % 60)) s after the install; curves: $dir/grpo/curves.png"
echo "$result"
