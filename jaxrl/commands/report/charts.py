"""Charts of the page and the metrics that each one draws."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

_QUANTILES = ("min", "p10", "p50", "p90", "max")


class Chart(NamedTuple):
    """One chart."""

    title: str  # heading
    group: str  # of charts that fold together
    note: str  # unit and remarks
    metrics: Mapping[str, str]  # {name of a metric: its label}
    rest: str | None = None  # prefix of further metrics to draw, except those in `left_out`
    left_out: Sequence[str] = ()  # metrics with the prefix `rest` that are not drawn
    # "fan" (quantiles, lowest first) and "stack" (parts of a sum) show one run, "lines" several.
    kind: Literal["lines", "fan", "stack"] = "lines"
    log: bool = False  # logarithmic scale
    points: Sequence[str] = ()  # metrics of which each value of a short curve is marked
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


# The first chart is drawn large. Metrics of different meaning have charts of their own, because
# runs are compared in them: KL to the reference and divergence from the sampler are two things.
CHARTS = (
    Chart(
        "Reward",
        "",
        "mean of a step, and accuracy by greedy decoding",
        {"reward": "reward", "eval/accuracy": "held-out accuracy"},
        points=("eval/accuracy",),
        right="eval/accuracy",
    ),
    Chart(
        "Reward, distribution",
        "Learning",
        "minimum to maximum, 10 % to 90 %, median",
        _quantiles("reward"),
        kind="fan",
    ),
    Chart(
        "Reward, parts",
        "Learning",
        "mean of each, before weighting",
        {},
        rest="reward/",
        left_out=("reward/std", "reward/failed", *_quantiles("reward")),
    ),
    Chart(
        "Zero-variance groups",
        "Learning",
        "all completions of a prompt earned the same reward",
        {"groups/zero_std": "zero variance", "groups/sampled": "all groups"},
    ),
    Chart("Gradient norm", "Learning", "before clipping", {"grad_norm": "gradient norm"}),
    Chart("Loss", "Learning", "", {"loss": "loss"}),
    Chart("Learning rate", "Learning", "", {"learning_rate": "learning rate"}),
    Chart(
        "Skipped steps, loss scale",
        "Learning",
        "steps skipped so far for a gradient that was not finite; loss scale on the right",
        {"skipped_steps": "skipped", "loss_scale": "loss scale"},
        right="loss_scale",
    ),
    Chart("KL to the reference", "Policy", "nats per token", {"kl/reference": "KL"}),
    Chart(
        "Entropy", "Policy", "nats per token, over sampled tokens", {"entropy/sampled": "entropy"}
    ),
    Chart(
        "Clipping by side", "Policy", "share of tokens", {"clip/low": "below", "clip/high": "above"}
    ),
    Chart(
        "Variety",
        "Policy",
        "distinct 3-grams across prompts, identical completions, repetition within one",
        {
            "diversity/distinct": "distinct",
            "diversity/identical": "identical",
            "diversity/repetition": "repetition",
        },
    ),
    Chart(
        "Alpha against beta",
        "Mismatch of learner and sampler",
        "standard deviation of the policy's change and of numerical error, nats",
        {"probe/alpha_std": "alpha", "probe/beta_std": "beta"},
        log=True,
        points=("probe/alpha_std", "probe/beta_std"),
    ),
    Chart(
        "Phantom clipping",
        "Mismatch of learner and sampler",
        "share of tokens clipped, and clipped because of numerical error alone",
        {"probe/clipped": "clipped", "probe/phantom": "phantom"},
        points=("probe/clipped", "probe/phantom"),
    ),
    Chart(
        "Mismatch of whole completions",
        "Mismatch of learner and sampler",
        "standard deviation of the log-ratio before any update, nats",
        {"probe/sequence_std": "std"},
        log=True,
        points=("probe/sequence_std",),
    ),
    Chart(
        "Mismatch at every step",
        "Mismatch of learner and sampler",
        "on sampled tokens; factor on the right",
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
        "Completion length, distribution",
        "Lengths",
        "tokens",
        _quantiles("completion_length"),
        kind="fan",
    ),
    Chart(
        "Truncated completions",
        "Lengths",
        "share that reached sampling.max_tokens",
        {"completion/truncated": "truncated"},
    ),
    Chart(
        "Throughput",
        "Time",
        "tokens per second",
        {
            "tokens_per_second": "whole step",
            "tokens_per_second/sample": "sampling",
            "tokens_per_second/learn": "learning",
        },
    ),
    Chart(
        "Time per step",
        "Time",
        "seconds; without the first step after each start, which compiles",
        {
            f"time/{part}": part
            for part in ("wait", "sample", "reward", "score", "update", "publish")
        },
        kind="stack",
    ),
)


# Drawn first where there is no reward: texts or pairs are learnt.
_LOSS = Chart(
    "Loss",
    "",
    "mean of a step, and the share of held-out pairs ranked correctly",
    {"loss": "loss", "eval/accuracy": "held-out accuracy"},
    points=("eval/accuracy",),
    right="eval/accuracy",
)


def drawn(known: Collection[str]) -> set[str]:
    """Returns the metrics that any chart draws."""
    return {name for chart in CHARTS for name in chart.names(known)}


def charts_of(known: Collection[str]) -> list[dict[str, Any]]:
    """Returns the charts with at least one known metric, in the page's form."""
    charts = CHARTS
    if "reward" not in known and "loss" in known:
        charts = (_LOSS, *(c for c in CHARTS if not _LOSS.metrics.keys() & c.metrics.keys()))
    found = [chart._replace(metrics=chart.names(known)) for chart in charts]
    internal = ("rest", "left_out")
    return [
        {key: value for key, value in chart._asdict().items() if key not in internal}
        for chart in found
        if chart.metrics
    ]
