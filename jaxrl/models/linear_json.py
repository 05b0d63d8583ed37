"""Linear attention in config.json: the sizes of the gated delta rule and `layer_types`."""

from typing import Any

from jaxrl.models.checkpoint_files import shown
from jaxrl.models.components import Linear
from jaxrl.models.config_json import FULL, LINEAR, ConfigJson

_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def read_linear(c: ConfigJson) -> Linear:
    """Returns `DecoderConfig.linear`.

    Raises:
      ValueError: for missing sizes, heads that do not fit each other, or layers that are not
        supported.
    """
    if missing := [key for key in _SIZES if getattr(c, key) is None]:
        raise ValueError(f"{', '.join(missing)} is missing")
    keys, values = c.linear_num_key_heads or 0, c.linear_num_value_heads or 0
    if values % keys:
        raise ValueError(
            f"linear_num_value_heads={values} must be a multiple of linear_num_key_heads={keys}"
        )
    if c.sliding_window is not None:
        raise ValueError(f"sliding_window={c.sliding_window} is not supported for {c.model_type}")
    return Linear(
        key_heads=keys,
        value_heads=values,
        key_dim=c.linear_key_head_dim or 0,
        value_dim=c.linear_value_head_dim or 0,
        width=c.linear_conv_kernel_dim or 0,
        period=_read_period(c),
        split=c.model_type.startswith("qwen3_5"),
    )


def _read_period(c: ConfigJson) -> tuple[bool, ...]:
    """Returns the shortest list that `layer_types` repeats: true for linear layers."""
    layers, every = c.num_hidden_layers, c.full_attention_interval
    kinds = c.layer_types
    if kinds is None:
        kinds = [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    if set(kinds) - {FULL, LINEAR} or len(kinds) != layers:
        raise ValueError(
            f"layer_types={shown(kinds)}: expected {layers} entries, each {FULL!r} or {LINEAR!r}"
        )
    if set(kinds) != {FULL, LINEAR}:
        raise ValueError(
            f"{c.model_type} without layers of {FULL!r} and of {LINEAR!r} is not supported: see "
            f"layer_types, or full_attention_interval={every} and num_hidden_layers={layers}"
        )
    sizes = (n for n in range(1, layers + 1) if layers % n == 0)
    size = next(n for n in sizes if kinds == kinds[:n] * (layers // n))
    return tuple(kind == LINEAR for kind in kinds[:size])


def write_linear(linear: Linear, *, layers: int) -> dict[str, Any]:
    """Builds the keys that `read_linear` reads."""
    period = [LINEAR if one else FULL for one in linear.period]
    content: dict[str, Any] = {
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.width,
        "layer_types": period * (layers // len(period)),
    }
    if linear.period == (True,) * (len(period) - 1) + (False,):
        content["full_attention_interval"] = len(period)
    return content
