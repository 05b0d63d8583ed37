"""The table of `jaxrl doctor --attribute`: beta by module."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxrl.commands.doctor.measure import both_policies, load_inputs, only_precision, sample
from jaxrl.commands.doctor.text import columns
from jaxrl.config.doctor import DoctorConfig
from jaxrl.core import Precision, cast, short_name
from jaxrl.data import Tokenizer
from jaxrl.diagnostics import MODULES, Attribution, attribute

_WORST = 5  # tokens
_ROWS = MODULES | {
    "weights": "parameters, rounded to wire and sampler",
    "blocks": "operands of 8 bits, in the sampler alone",
    "router": "the choice of other experts",
    "rest": "roundings outside of these",
    "engine": "shadow - sampler: the order of additions, and another program",
}


def show_parts(config: DoctorConfig, *, note: Callable[[str], None]) -> int:
    """Samples completions, divides beta among the modules, prints the table and writes
    attribution.json.

    Raises:
      ConfigError: unless the config names one precision.
      ValueError, ServerFailedError, RefusedError: as `attribute` and `examine`.
    """
    name = only_precision(config, "--attribute")
    inputs = load_inputs(config)
    precisions, served = both_policies(config)
    note(f"sampling {len(inputs.prompts)} x {config.completions} completions")
    samples = sample(inputs, served[name], note=note)
    note(f"scoring them {len(MODULES) + 6} times")
    found = attribute(
        inputs.model,
        cast(inputs.params, precisions[name].params),
        samples.minibatch,
        precision=precisions[name],
        served=served[name],
        param_shardings=inputs.layout.constraints(inputs.model.specs),
    )
    engine = found.shadow - found.sampler
    numbers = found.numbers() | {
        "engine": float(np.nanmean(engine)),
        "engine_std": float(np.nanstd(engine)),
    }
    path = Path(config.out, "attribution.json")
    path.write_text(json.dumps({"precision": name, **numbers}, indent=1) + "\n", encoding="utf-8")
    print(f"{name}: beta of {len(found.whole)} tokens, learner - shadow\n")
    texts = [_table(found, numbers)]
    if config.sampler.name == "vllm":
        texts += [server_settings(numbers, precisions[name], served[name])]
    print(*texts, _worst(found, inputs.checkpoint.tokenizer), path, sep="\n\n")
    return 0


def _table(found: Attribution, numbers: dict[str, float]) -> str:
    lines = [["part", "mean", "std", "share of variance", ""]]
    for part in sorted(found.parts, key=lambda part: -numbers[f"{part}_std"]):
        share = f"{100 * numbers[f'{part}_share']:.1f} %"
        lines.append([part, *_moments(numbers, part), share, _ROWS[part]])
    independent = "what beta is if the parts are independent"
    lines.append(["sum", *_moments(numbers, "sum"), "100.0 %", independent])
    both = numbers["whole_std"] ** 2, numbers["sum_std"] ** 2
    share = f"{100 * both[0] / both[1]:.1f} %" if both[1] else ""
    lines.append(["beta", *_moments(numbers, "whole"), share, "learner - shadow"])
    lines.append(["engine", *_moments(numbers, "engine"), "", _ROWS["engine"]])
    texts = [line.pop() for line in lines]
    table = columns(lines, left=1).splitlines()
    width = max(map(len, table))
    both = zip(table, texts, strict=True)
    return "\n".join(f"{row.ljust(width)}  {text}".rstrip() for row, text in both)


def server_settings(numbers: dict[str, float], own: Precision, served: Precision) -> str:
    """Formats a table of the settings of a vLLM server that remove parts of beta, as options of
    `jaxrl serve`, with the learner's values."""
    parts = [name.removesuffix("_share") for name in numbers if name.endswith("_share")]
    apart = {"head": f"--logits {short_name(own.logits)}", "blocks": f"--blocks {own.blocks}"}
    by_dtype = [part for part in parts if part not in apart]
    rows = [(apart[part], [part]) for part in apart if part in parts]
    rows.append((f"--dtype {short_name(own.compute)}", by_dtype))
    unequal = {
        "--logits": own.logits != served.logits,
        "--blocks": own.blocks != served.blocks,
        "--dtype": (own.compute, own.activations) != (served.sampler, served.sampler),
    }
    lines = [["setting of the server", "removes", "share of variance"]]
    for setting, removed in rows:
        if unequal[setting.partition(" ")[0]]:
            share = sum(numbers[f"{part}_share"] for part in removed)
            lines.append([setting, ", ".join(removed), f"{100 * share:.1f} %"])
    if len(lines) == 1:
        return "The server computes in the learner's dtypes: none of its settings removes a part."
    return columns(lines, left=2)


def _moments(numbers: dict[str, float], part: str) -> list[str]:
    return [f"{numbers[part]:+.1e}", f"{numbers[f'{part}_std']:.1e}"]


def _worst(found: Attribution, tokenizer: Tokenizer) -> str:
    lines = [["worst tokens", "probability", "beta", "largest part", ""]]
    for i in found.worst(_WORST):
        part = max(found.parts, key=lambda name: abs(found.parts[name][i]))
        text = repr(tokenizer.decode([int(found.tokens[i])], skip_special_tokens=False))
        probability, beta = f"{np.exp(found.shadow[i]):.2g}", f"{found.whole[i]:+.1e}"
        lines.append([text, probability, beta, part, f"{found.parts[part][i]:+.1e}"])
    return columns(lines, left=1)
