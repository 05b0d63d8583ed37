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
    vapo,
)
from jaxrl.losses.recipes.clipping import (
    bnpo,
    clip_cov,
    dapo,
    dr_grpo,
    gmpo,
    grpo,
    grpo_seq_mis,
    grpo_token_tis,
    gspo,
    kl_cov,
    opsm,
    sapo,
)
from jaxrl.losses.recipes.weighting import (
    cispo,
    dppo,
    mlperf,
    pg_seq_is,
    pg_token_is,
    prime,
    prime_ipo,
    vespo,
)

__all__ = [
    "bnpo",
    "cispo",
    "clip_cov",
    "dapo",
    "dppo",
    "dr_grpo",
    "gdpo",
    "gmpo",
    "grpo",
    "grpo_seq_mis",
    "grpo_token_tis",
    "gspo",
    "kl_cov",
    "max_rl",
    "mlperf",
    "opo",
    "opsm",
    "pass_at_k",
    "pg_seq_is",
    "pg_token_is",
    "ppo",
    "prime",
    "prime_ipo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "sapo",
    "vapo",
    "vespo",
]
