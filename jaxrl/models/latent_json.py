"""Multi-head latent attention in config.json."""

from typing import Any

from jaxrl.models.components import Latent
from jaxrl.models.config_json import ConfigJson

_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def read_latent(c: ConfigJson) -> tuple[Latent, int]:
    """Returns `DecoderConfig.latent` and the size of queries and keys.

    Raises:
      ValueError: for missing sizes, or keys that contradict each other.
    """
    if missing := [key for key in _SIZES if getattr(c, key) is None]:
        raise ValueError(f"{', '.join(missing)} is missing")
    rope = c.qk_rope_head_dim or 0
    if rope % 2 or c.head_dim not in (rope, None):
        raise ValueError(
            f"qk_rope_head_dim={rope} and head_dim={c.head_dim}: expected the same even number, or "
            "no head_dim"
        )
    if c.num_key_value_heads not in (c.num_attention_heads, None):
        raise ValueError(
            f"num_key_value_heads={c.num_key_value_heads} is not supported for {c.model_type}: all "
            f"of the num_attention_heads={c.num_attention_heads} have keys and values"
        )
    latent = Latent(
        q_rank=c.q_lora_rank,
        kv_rank=c.kv_lora_rank or 0,
        rope_dim=rope,
        value_dim=c.v_head_dim or 0,
        interleaved=c.rope_interleave,
    )
    return latent, rope + (c.qk_nope_head_dim or 0)


def write_latent(latent: Latent, *, head_dim: int) -> dict[str, Any]:
    """Builds the keys that `read_latent` reads."""
    return {
        "head_dim": latent.rope_dim,  # as transformers calls it
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_nope_head_dim": head_dim - latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": latent.interleaved,
    }
