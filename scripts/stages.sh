#!/usr/bin/env bash
# The three stages on one task, each with a config of its own: a base model that adds badly (jaxrl
# sft), a reward model from pairs of right and wrong additions (jaxrl reward-model), and GRPO and PPO,
# each with nothing but that reward model as its reward (jaxrl train). Then DPO on the same pairs,
# without one.
#   ./scripts/stages.sh           everything lies in runs/quickstart
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
