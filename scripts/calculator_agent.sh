#!/usr/bin/env bash
# Makes .venv, fine-tunes a small base model that rarely uses its calculator (jaxrl sft), and trains
# it with GRPO (jaxrl train) to call the calculator only on problems it cannot solve alone. Needs
# Python 3.11+, but no GPU and no torch.
#   ./scripts/calculator_agent.sh            writes the run to runs/calculator/grpo
#   SEED=1 ./scripts/calculator_agent.sh     another model, other data: runs/calculator-1
set -euo pipefail

cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE  # byte code saves many seconds at every start
seed=${SEED:-0}
dir=runs/calculator
[ "$seed" = 0 ] || dir=runs/calculator-$seed

scripts/make_venv.sh .venv requirements.txt
SECONDS=0
.venv/bin/python scripts/make_calculator.py "$dir" --seed "$seed"
.venv/bin/jaxrl sft configs/calculator_agent_sft.toml --seed "$seed" --run_dir "$dir/sft" \
    --model.path "$dir/untrained" --data.path "$dir/sft.jsonl"
# The progress display goes to standard error; the result is printed last, after the time.
result=$(.venv/bin/jaxrl train configs/calculator_agent.toml --seed "$seed" \
    --run_dir "$dir/grpo" --model.path "$dir/sft/model" --data.path "$dir/train.jsonl" \
    --data.eval_path "$dir/held_out.jsonl")
for model in sft grpo; do
    .venv/bin/jaxrl eval "$dir/grpo/config.toml" --model.path "$dir/$model/model" \
        --completions "$dir/completions-$model.jsonl" >/dev/null
    .venv/bin/python - "$dir/completions-$model.jsonl" "$model" <<'END'
import json, sys

rows = [json.loads(line) for line in open(sys.argv[1])]
for sign, kind in (("+", "additions"), ("*", "products")):
    of = [row for row in rows if sign in row["prompt"]]
    right = sum(row["numeric_match"] for row in of) / len(of)
    calls = sum("<tool_call>" in row["episode"] for row in of) / len(of)
    print(f"{sys.argv[2]}: {kind}: {right:.1%} right, {calls:.1%} with the calculator")
END
done
echo "$((SECONDS / 60)) min $((SECONDS % 60)) s after the install; curves: $dir/grpo/curves.png"
echo "$result"
