"""Table and recommendation of `jaxrl doctor`."""

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

from jaxrl.diagnostics import LogRatio

_TOKEN_ERROR, _PHANTOM = 1.01, 1e-3


class Measurement(NamedTuple):
    """Measurements of one dtype policy."""

    precision: str  # its text in the config
    sampler: str  # engine and dtype of the sampler, e.g. "vLLM bf16, head f32"
    # From `agreement_metrics`, `shape_noise` and `log_ratio_parts` (its "policy" is "decoding" here
    # and needs a server); "tokens", "sequences" and, if steps were timed, "seconds_per_step".
    numbers: dict[str, float]
    ratio: LogRatio  # at equal weights: beta is the whole log-ratio
    facts: dict[str, str]  # what the numbers depend on, see `certified_facts`

    def spreads(self) -> dict[int, float]:
        """Maps a number of tokens to the standard deviation of the log-ratio summed over them."""
        lengths = ((name.removeprefix("sequence_std_"), name) for name in self.numbers)
        return {int(length): self.numbers[name] for length, name in lengths if length.isdigit()}


def table(measurements: Sequence[Measurement]) -> str:
    """Formats one line for each precision, in columns."""
    lengths = sorted({length for m in measurements for length in m.spreads()})[-3:]
    timed = all("seconds_per_step" in m.numbers for m in measurements)
    asked = any("decoding_std" in m.numbers for m in measurements)
    head = ["precision", "sampler", "beta mean", "std", "p99", "phantom", "x per token"]
    head += ["dtype std", "engine std", *(["decoding std"] if asked else []), "shape std"]
    head += [f"std of {length}" for length in lengths] + (["step"] if timed else [])
    lines = [head]
    for m in measurements:
        n = m.numbers
        line = [m.precision, m.sampler, f"{n['beta']:+.1e}", f"{n['beta_std']:.1e}"]
        line += [f"{n['beta_p99']:.1e}", f"{100 * n['phantom']:.2f} %"]
        line += [f"{n['token_mult_error']:.5f}", f"{n['dtype_std']:.1e}", f"{n['engine_std']:.1e}"]
        line += [f"{n['decoding_std']:.1e}"] if asked else []
        line += [f"{n['shape_noise_std']:.1e}"]
        line += [f"{m.spreads()[x]:.1e}" if x in m.spreads() else "-" for x in lengths]
        lines.append([*line, f"{n['seconds_per_step']:.2f} s"] if timed else line)
    return columns(lines, left=2)


def columns(lines: Sequence[Sequence[str]], *, left: int) -> str:
    """Formats lines of cells, the first `left` columns to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def recommend(measurements: Sequence[Measurement]) -> str:
    """Recommends a precision and gives the reason.

    A precision is good if the average error factor of its tokens is at most 1.01 and at most one
    token in a thousand would be clipped by numerical error alone. Of the good ones within 10 % of
    the fastest step, the one with the smallest beta wins.
    """
    good = [
        m
        for m in measurements
        if m.numbers["token_mult_error"] <= _TOKEN_ERROR and m.numbers["phantom"] <= _PHANTOM
    ]
    if not good:
        known = [m for m in measurements if not isnan(m.numbers["beta_std"])]  # no overflow
        best = min(known or measurements, key=lambda m: m.numbers["beta_std"])
        return (
            f"No precision is good (token error at most {_TOKEN_ERROR}, phantom at most "
            f"{100 * _PHANTOM:g} %). {best.precision} has the smallest beta: {_reason(best)}. "
            "Measure others, or set loss.ratio = 'shadowed' or 'on_policy'."
        )
    fastest = min(m.numbers.get("seconds_per_step", 0.0) for m in good)
    quick = [m for m in good if m.numbers.get("seconds_per_step", 0.0) <= 1.1 * fastest]
    best = min(quick, key=lambda m: m.numbers["beta_std"])
    others = [m.precision for m in good if m is not best]
    text = f"Use precision = {best.precision!r}: {_reason(best)}."
    if others and fastest:
        text += (
            f" {', '.join(others)} would also work; of those within 10 % of the fastest step this "
            "one has the smallest beta."
        )
    elif others:
        text += f" {', '.join(others)} would also work, with a larger beta."
    return text


def _reason(measurement: Measurement) -> str:
    n = measurement.numbers
    return (
        f"the average error factor of a token is {n['token_mult_error']:.4f}, and numerical error "
        f"alone would clip {100 * n['phantom']:.2f} % of tokens"
    )
