"""Charts of the page and the metrics that each one draws."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

_QUANTILES = ("min", "p10", "p50", "p90", "max")


class Chart(NamedTuple):
    """One chart."""

    title: str  # heading
    note: str  # unit and remarks
    metrics: Mapping[str, str]  # {name of a metric: its label}
    rest: str | None = None  # prefix of further metrics to draw, except those in `left_out`
    left_out: Sequence[str] = ()  # metrics with the prefix `rest` that are not drawn
    # "fan" (quantiles, lowest first) and "stack" (parts of a sum) show one run, "lines" several.
    kind: Literal["lines", "fan", "stack"] = "lines"
    log: bool = False  # logarithmic scale
    points: bool = False  # mark each value of a short curve
    right: str | None = None  # the metric with its own scale on the right

    def names(self, known: Collection[str]) -> dict[str, str]:
        """Selects the known metrics that this chart draws, with their labels."""
        names = {name: label for name, label in self.metrics.items() if name in known}
        if self.rest is not None:
            found = (n for n in known if n.startswith(self.rest) and n not in self.left_out)
            names |= {name: name.removeprefix(self.rest) for name in sorted(found)}
        return names


def _quantiles(metric: str) -> dict[str, str]:
    return {f"{metric}/{q}": q for q in _QUANTILES}


CHARTS = (
    Chart("Reward", "mean of a step", {"reward": "reward"}),
    Chart("Held-out accuracy", "greedy decoding", {"eval/accuracy": "accuracy"}, points=True),
    Chart(
        "Reward, distribution",
        "minimum to maximum, 10 % to 90 %, median",
        _quantiles("reward"),
        kind="fan",
    ),
    Chart(
        "Reward, parts",
        "mean of each, before weighting",
        {},
        rest="reward/",
        left_out=("reward/std", "reward/failed", *_quantiles("reward")),
    ),
    Chart("Completion length, distribution", "tokens", _quantiles("completion_length"), kind="fan"),
    Chart(
        "KL", "nats per token, to the reference model (without one: to the sampler)", {"kl": "KL"}
    ),
    Chart("Gradient norm", "before clipping", {"grad_norm": "gradient norm"}),
    Chart(
        "Alpha against beta",
        "standard deviation of the policy's change and of numerical error, nats",
        {"probe/alpha_std": "alpha", "probe/beta_std": "beta"},
        log=True,
        points=True,
    ),
    Chart(
        "Phantom clipping",
        "share of tokens clipped, and clipped because of numerical error alone",
        {"probe/clipped": "clipped", "probe/phantom": "phantom"},
        points=True,
    ),
    Chart("Clipping by side", "share of tokens", {"clip/low": "below", "clip/high": "above"}),
    Chart(
        "Mismatch of whole completions",
        "standard deviation of the log-ratio before any update, nats",
        {"probe/sequence_std": "std"},
        log=True,
        points=True,
    ),
    Chart(
        "Mismatch at every step",
        "learner against sampler on sampled tokens; factor on the right",
        {
            "mismatch/k3_kl": "divergence, nats",
            "mismatch/chi2": "chi-square",
            "mismatch/prob_diff": "difference in probability",
            "mismatch/token_mult_error": "factor",
        },
        log=True,
        right="mismatch/token_mult_error",
    ),
    Chart(
        "Variety",
        "distinct 3-grams across prompts, identical completions, repetition within one",
        {
            "diversity/distinct": "distinct",
            "diversity/identical": "identical",
            "diversity/repetition": "repetition",
        },
    ),
    Chart("Entropy", "nats per token, over sampled tokens", {"entropy/sampled": "entropy"}),
    Chart(
        "Zero-variance groups",
        "all completions of a prompt earned the same reward",
        {"groups/zero_std": "zero variance", "groups/sampled": "all groups"},
    ),
    Chart(
        "Truncated completions",
        "share that reached sampling.max_tokens",
        {"completion/truncated": "truncated"},
    ),
    Chart("Learning rate", "", {"learning_rate": "learning rate"}),
    Chart("Loss", "", {"loss": "loss"}),
    Chart(
        "Skipped steps, loss scale",
        "steps skipped so far for a gradient that was not finite; loss scale on the right",
        {"skipped_steps": "skipped", "loss_scale": "loss scale"},
        right="loss_scale",
    ),
    Chart(
        "Throughput",
        "tokens per second",
        {
            "tokens_per_second": "whole step",
            "tokens_per_second/sample": "sampling",
            "tokens_per_second/learn": "learning",
        },
    ),
    Chart(
        "Time per step",
        "seconds; without the first step after each start, which compiles",
        {
            f"time/{part}": part
            for part in ("wait", "sample", "reward", "score", "update", "publish")
        },
        kind="stack",
    ),
)


def drawn(known: Collection[str]) -> set[str]:
    """Returns the metrics that any chart draws."""
    return {name for chart in CHARTS for name in chart.names(known)}


def charts_of(known: Collection[str]) -> list[dict[str, Any]]:
    """Returns the charts with at least one known metric, in the page's form."""
    found = [chart._replace(metrics=chart.names(known)) for chart in CHARTS]
    internal = ("rest", "left_out")
    return [
        {key: value for key, value in chart._asdict().items() if key not in internal}
        for chart in found
        if chart.metrics
    ]
