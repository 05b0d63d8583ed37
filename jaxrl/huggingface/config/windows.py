"""Windows of the layers in config.json: `sliding_window`, `layer_types` and their switches."""

from typing import Any

from jaxrl.huggingface.config.keys import FULL, SLIDING, ConfigJson, layers_of
from jaxrl.huggingface.files import excerpt

Windows = tuple[int | None, ...]  # see `DecoderConfig.windows`


def read_windows(c: ConfigJson, kind: str) -> Windows:
    """Returns the window of each layer; see `Family.windows` for `kind`.

    Raises:
      ValueError: for windows that the family does not have, or layers without one.
    """
    window, windowed = c.sliding_window, [True] * c.num_hidden_layers
    if kind in ("none", "all"):
        if c.layer_types is not None or (kind == "none" and window is not None):
            raise ValueError(
                f"{c.model_type} with sliding_window={window!r} and layer_types="
                f"{excerpt(c.layer_types)} is not supported: its layers have "
                f"{'no windows' if kind == 'none' else 'one window or none'}"
            )
    elif kind == "switch":
        window = window if c.use_sliding_window else None
        windowed = [i >= c.max_window_layers for i in range(c.num_hidden_layers)]
    else:
        period = c.sliding_window_pattern
        if window is None and period is not None and c.layer_types is None:
            raise ValueError(f"sliding_window=None: most layers of {c.model_type} have a window")
        windowed = [period is None or (i + 1) % period > 0 for i in range(c.num_hidden_layers)]
    if c.layer_types is not None:
        windowed = layers_of(c, SLIDING, c.layer_types)
        if window is None and any(windowed):
            switch = f"use_sliding_window={c.use_sliding_window}, " if kind == "switch" else ""
            raise ValueError(
                "layer_types has 'sliding_attention', but there is no window: "
                f"{switch}sliding_window={c.sliding_window}"
            )
    if window is None or not any(windowed):
        return ()
    return tuple(window if inside else None for inside in windowed)


def write_windows(windows: Windows, kind: str, *, layers: int) -> dict[str, Any]:
    """Builds the keys that `read_windows` reads."""
    window = max((w for w in windows if w is not None), default=None)
    if kind in ("none", "all"):
        return {"sliding_window": window}
    types = [FULL if w is None else SLIDING for w in windows or (None,) * layers]
    content = {"sliding_window": window, "layer_types": types}
    if kind == "switch":
        # transformers 4 supports windows only as "every layer from this one on".
        content["use_sliding_window"] = window is not None
        content["max_window_layers"] = next(
            (i for i, w in enumerate(windows) if w is not None), layers
        )
    return content
