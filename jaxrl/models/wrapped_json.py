"""Language models inside of models of images and text: config.json has theirs in `text_config`."""

from collections.abc import Mapping
from typing import Any

from jaxrl.models.checkpoint_files import shown

# Model types that wrap the family of their name and "_text", with their architecture.
WRAPPERS = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}

_OUTSIDE = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")


def unwrap(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the language model inside of one in `WRAPPERS`.

    Raises:
      ValueError: if it has none or one of another family, or contradicts what is around it.
    """
    outer = raw["model_type"]
    inner, text = f"{outer}_text", raw.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != inner:
        raise ValueError(f"text_config={shown(text)}: expected an object with model_type={inner!r}")
    if raw.get("architectures") not in (None, [WRAPPERS[outer]]):
        raise ValueError(
            f"architectures={shown(raw['architectures'])} with model_type={outer!r} is not "
            f"supported; only [{WRAPPERS[outer]!r}] is"
        )
    tied = "tie_word_embeddings"
    if raw.get(tied, False) != text.get(tied, False):  # transformers reads one, vLLM the other
        raise ValueError(
            f"{tied}={shown(raw.get(tied, False))} and {shown(text.get(tied, False))} in "
            "text_config contradict each other"
        )
    return {key: raw[key] for key in _OUTSIDE if key in raw} | text


def wrap(text: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the config around that of a language model, but for the keys of images."""
    outer = text["model_type"].removesuffix("_text")
    own = ("dtype", "torch_dtype", "tie_word_embeddings")
    return {
        "architectures": [WRAPPERS[outer]],
        "model_type": outer,
        **{key: text[key] for key in own},
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
    }
