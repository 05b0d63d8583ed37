"""Iterations of Tunix's GRPOLearner: run_tunix.py MODEL PROMPTS ROWS, where google-tunix is."""

import itertools
import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from pace import ANSWER, GROUP, LEARNING_RATE, PROMPT, PROMPTS, Pace
from transformers import AutoTokenizer
from tunix.models.qwen3 import model as qwen3, params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig


def main() -> None:
    model, prompts, rows = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    actor = params.create_model_from_safe_tensors(str(model), read_config(model), mesh)
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=actor,
        tokenizer=AutoTokenizer.from_pretrained(model),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(LEARNING_RATE),
                eval_every_n_steps=10**6,
                max_steps=10**6,
                mini_batch_size=PROMPTS,
                train_micro_batch_size=rows // GROUP,
                rollout_micro_batch_size=PROMPTS,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=ANSWER,
                max_prompt_length=PROMPT,
                kv_cache_size=PROMPT + ANSWER,
                temperature=1.0,
            ),
        ),
    )
    config = GRPOConfig(num_generations=GROUP, num_iterations=1, beta=0.0)
    learner = GRPOLearner(cluster, algo_config=config, reward_fns=Pace().reward)
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    batches = np.array(texts).reshape(-1, PROMPTS)
    with mesh:
        learner.train({"prompts": batch} for batch in itertools.cycle(batches))


def read_config(model: Path) -> qwen3.ModelConfig:
    """Translates config.json."""
    read = json.loads((model / "config.json").read_text())
    return qwen3.ModelConfig(
        num_layers=read["num_hidden_layers"],
        vocab_size=read["vocab_size"],
        embed_dim=read["hidden_size"],
        hidden_dim=read["intermediate_size"],
        num_heads=read["num_attention_heads"],
        head_dim=read["head_dim"],
        num_kv_heads=read["num_key_value_heads"],
        rope_theta=int(read["rope_theta"]),
        norm_eps=read["rms_norm_eps"],
        use_tied_embedding=read["tie_word_embeddings"],
    )


if __name__ == "__main__":
    main()
