#!/usr/bin/env bash
# Makes .venv, fine-tunes a small base model that adds badly (jaxrl sft), and trains it to add with
# GRPO (jaxrl train). Needs Python 3.11+, but no GPU and no torch.
#   ./scripts/quickstart.sh            writes the run to runs/quickstart/grpo
#   SEED=1 ./scripts/quickstart.sh     another model, other data: runs/quickstart-1
set -euo pipefail

cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE  # byte code saves many seconds at every start
seed=${SEED:-0}
dir=runs/quickstart
[ "$seed" = 0 ] || dir=runs/quickstart-$seed

scripts/make_venv.sh .venv requirements.txt
SECONDS=0
.venv/bin/python scripts/make_arithmetic.py "$dir" --seed "$seed"
.venv/bin/jaxrl sft configs/quickstart_sft.toml --seed "$seed" --run_dir "$dir/sft" \
    --model.path "$dir/untrained" --data.path "$dir/sft.jsonl"
# The progress display goes to standard error; the result is printed last, after the time.
result=$(.venv/bin/jaxrl train configs/quickstart.toml --seed "$seed" --run_dir "$dir/grpo" \
    --model.path "$dir/sft/model" --data.path "$dir/train.jsonl" \
    --data.eval_path "$dir/held_out.jsonl")
echo "$((SECONDS / 60)) min $((SECONDS % 60)) s after the install; curves: $dir/grpo/curves.png"
echo "$result"
