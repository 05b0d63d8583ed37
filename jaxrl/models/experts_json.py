"""Experts with sigmoid scores in config.json: those of DeepSeek V3 and GLM-4 MoE."""

from typing import Any

from jaxrl.models.components import Experts
from jaxrl.models.config_json import ConfigJson

_SIZES = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")


def read_corrected(c: ConfigJson) -> Experts:
    """Returns `DecoderConfig.experts` of a family whose routers have a correction bias.

    Raises:
      ValueError: for a missing key, or numbers that contradict each other.
    """
    if missing := [key for key in _SIZES if getattr(c, key) is None]:
        raise ValueError(f"{', '.join(missing)} is missing")
    count, per_token = c.n_routed_experts or 0, c.num_experts_per_tok or 0
    groups, chosen = c.n_group, c.topk_group
    if count % groups or count < 2 * groups or chosen > groups:
        raise ValueError(
            f"n_group={groups} and topk_group={chosen}: expected groups of at least two of the "
            f"n_routed_experts={count}, all of one size, and at most {groups} chosen ones"
        )
    if per_token > chosen * count // groups:
        raise ValueError(
            f"num_experts_per_tok={per_token} is more than the {chosen * count // groups} experts "
            f"of topk_group={chosen} groups"
        )
    if c.first_k_dense_replace >= c.num_hidden_layers:
        raise ValueError(
            f"first_k_dense_replace={c.first_k_dense_replace} leaves none of the "
            f"num_hidden_layers={c.num_hidden_layers} with experts, which is not supported"
        )
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=c.moe_intermediate_size or 0,
        renormalise=c.norm_topk_prob,
        scores="sigmoid",
        corrected=True,
        groups=groups,
        chosen_groups=chosen,
        scale=c.routed_scaling_factor,
        shared=c.n_shared_experts,
        dense_layers=c.first_k_dense_replace,
    )


def write_corrected(experts: Experts) -> dict[str, Any]:
    """Builds the keys that `read_corrected` reads."""
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.renormalise,
        "n_group": experts.groups,
        "topk_group": experts.chosen_groups,
        "routed_scaling_factor": experts.scale,
        "n_shared_experts": experts.shared,
        "first_k_dense_replace": experts.dense_layers,
        "num_nextn_predict_layers": 0,  # they are not read
        # transformers has no other kind; vLLM reads corrections only where it finds these names.
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
