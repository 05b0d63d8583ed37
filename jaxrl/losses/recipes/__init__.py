"""Published algorithms, each a few lines of algebra.

A recipe is a function of keyword parameters that returns a `Recipe`. All can be named in a config,
with their parameters as keys, and take the keys of `recipe.Terms` besides. A parameter without a
description of its own is that of `grpo`.
"""

from jaxrl.losses.recipes.baselines import (
    gdpo,
    max_rl,
    opo,
    pass_at_k,
    ppo,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
)
from jaxrl.losses.recipes.clipping import (
    bnpo,
    dapo,
    dr_grpo,
    gmpo,
    grpo,
    grpo_seq_mis,
    grpo_token_tis,
    gspo,
    opsm,
    sapo,
)
from jaxrl.losses.recipes.weighting import cispo, dppo, pg_seq_is, pg_token_is, prime, vespo

__all__ = [
    "bnpo",
    "cispo",
    "dapo",
    "dppo",
    "dr_grpo",
    "gdpo",
    "gmpo",
    "grpo",
    "grpo_seq_mis",
    "grpo_token_tis",
    "gspo",
    "max_rl",
    "opo",
    "opsm",
    "pass_at_k",
    "pg_seq_is",
    "pg_token_is",
    "ppo",
    "prime",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "sapo",
    "vespo",
]
