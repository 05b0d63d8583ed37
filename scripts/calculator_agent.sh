#!/usr/bin/env bash
# An agent learns when to use its calculator: makes .venv, a small base model that has a calculator
# and mostly answers at once (jaxrl sft), and teaches it with GRPO (jaxrl train) to call it where it
# cannot do without. Needs Python 3.11+, no GPU and no torch.
#   ./scripts/calculator_agent.sh            the run lies in runs/calculator/grpo
#   SEED=1 ./scripts/calculator_agent.sh     another model, other data: runs/calculator-1
set -euo pipefail

cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE  # without byte code every start takes many seconds more
seed=${SEED:-0}
dir=runs/calculator
[ "$seed" = 0 ] || dir=runs/calculator-$seed

scripts/make_venv.sh .venv requirements.txt
SECONDS=0
.venv/bin/python scripts/make_calculator.py "$dir" --seed "$seed"
.venv/bin/jaxrl sft configs/calculator_agent_sft.toml --seed "$seed" --run_dir "$dir/sft" \
    --model.path "$dir/untrained" --data.path "$dir/sft.jsonl"
# The progress display goes to the standard error; the result comes last, after the time.
result=$(.venv/bin/jaxrl train configs/calculator_agent.toml --seed "$seed" \
    --run_dir "$dir/grpo" --model.path "$dir/sft/model" --data.path "$dir/train.jsonl" \
    --data.eval_path "$dir/held_out.jsonl")
for model in sft grpo; do
    .venv/bin/jaxrl eval "$dir/grpo/config.toml" --model.path "$dir/$model/model" \
        --completions "$dir/answers-$model.jsonl" >/dev/null
    .venv/bin/python - "$dir/answers-$model.jsonl" "$model" <<'END'
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
