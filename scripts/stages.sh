#!/usr/bin/env bash
# Runs the three stages on one task: a base model that adds badly (jaxrl sft), a reward model from
# pairs of right and wrong additions (jaxrl reward-model), and GRPO and PPO with that reward model as
# the only reward (jaxrl train). Then DPO on the same pairs (jaxrl dpo).
#   ./scripts/stages.sh           writes to runs/quickstart
set -euo pipefail

cd "$(dirname "$0")/.."
scripts/make_venv.sh .venv requirements.txt
.venv/bin/python scripts/make_arithmetic.py runs/quickstart --seed 0
.venv/bin/python scripts/make_preferences.py runs/quickstart --seed 0
.venv/bin/jaxrl sft configs/quickstart_sft.toml
.venv/bin/jaxrl reward-model configs/stages_reward_model.toml
.venv/bin/jaxrl train configs/stages_grpo.toml
.venv/bin/jaxrl train configs/stages_ppo.toml
.venv/bin/jaxrl dpo configs/stages_dpo.toml
.venv/bin/jaxrl eval configs/stages_grpo.toml --model.path runs/quickstart/dpo/model
