"""The charts of the page: which there are, and which metrics each of them draws."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

_QUANTILES = ("min", "p10", "p50", "p90", "max")


class Chart(NamedTuple):
    """One chart.

    Attributes:
      title: what it shows.
      note: in which unit, and what else one has to know.
      metrics: {name of a metric: what it is called on the page}.
      rest: all metrics that begin so and that are not in `left_out` are drawn besides.
      left_out: metrics that begin like `rest`.
      kind: "lines" shows all runs that are chosen; "fan" (quantiles, the lowest first) and "stack"
        (parts that add up) show one.
      log: whether the scale is logarithmic.
      points: whether each value is marked, where there are few.
      right: the metric that has a scale of its own, on the right.
    """

    title: str
    note: str
    metrics: Mapping[str, str]
    rest: str | None = None
    left_out: Sequence[str] = ()
    kind: Literal["lines", "fan", "stack"] = "lines"
    log: bool = False
    points: bool = False
    right: str | None = None

    def names(self, known: Collection[str]) -> dict[str, str]:
        """What it draws of the metrics that are known, as `metrics`."""
        names = {name: label for name, label in self.metrics.items() if name in known}
        if self.rest is not None:
            found = (n for n in known if n.startswith(self.rest) and n not in self.left_out)
            names |= {name: name.removeprefix(self.rest) for name in sorted(found)}
        return names


def _quantiles(metric: str) -> dict[str, str]:
    return {f"{metric}/{q}": q for q in _QUANTILES}


CHARTS = (
    Chart("Reward", "mean of a step", {"reward": "reward"}),
    Chart("Held-out accuracy", "greedy", {"eval/accuracy": "accuracy"}, points=True),
    Chart(
        "Reward, distribution",
        "lowest to highest, 10 % to 90 %, median",
        _quantiles("reward"),
        kind="fan",
    ),
    Chart(
        "Reward, parts",
        "mean of each, before its weight",
        {},
        rest="reward/",
        left_out=("reward/std", "reward/failed", *_quantiles("reward")),
    ),
    Chart("Answer length, distribution", "tokens", _quantiles("completion_length"), kind="fan"),
    Chart(
        "KL", "nats a token, to the reference (to the sampler where there is none)", {"kl": "KL"}
    ),
    Chart("Gradient norm", "before clipping", {"grad_norm": "gradient norm"}),
    Chart(
        "Alpha against beta",
        "spread of what the policy moved and of what the arithmetic added, nats",
        {"probe/alpha_std": "alpha", "probe/beta_std": "beta"},
        log=True,
        points=True,
    ),
    Chart(
        "Phantom clipping",
        "share of tokens that the clip takes, and for arithmetic alone",
        {"probe/clipped": "clipped", "probe/phantom": "phantom"},
        points=True,
    ),
    Chart("The clip's two sides", "share of tokens", {"clip/low": "below", "clip/high": "above"}),
    Chart(
        "Mismatch of whole answers",
        "spread of the log-ratio before any update, nats",
        {"probe/sequence_std": "spread"},
        log=True,
        points=True,
    ),
    Chart(
        "Mismatch of every step",
        "learner against sampler, of sampled tokens; the factor on the right",
        {
            "mismatch/k3_kl": "divergence, nats",
            "mismatch/chi2": "chi-square",
            "mismatch/prob_diff": "difference of probabilities",
            "mismatch/token_mult_error": "factor",
        },
        log=True,
        right="mismatch/token_mult_error",
    ),
    Chart(
        "Variety",
        "distinct 3-grams across prompts, identical answers, repetition within",
        {
            "diversity/distinct": "distinct",
            "diversity/identical": "identical",
            "diversity/repetition": "repetition",
        },
    ),
    Chart("Entropy", "nats a token, of what was sampled", {"entropy/sampled": "entropy"}),
    Chart(
        "Groups without spread",
        "all answers to a prompt earned the same",
        {"groups/zero_std": "without spread", "groups/sampled": "all groups"},
    ),
    Chart(
        "Cut answers", "share that ended at sampling.max_tokens", {"completion/truncated": "cut"}
    ),
    Chart("Learning rate", "", {"learning_rate": "learning rate"}),
    Chart("Loss", "", {"loss": "loss"}),
    Chart(
        "Skipped steps, loss scale",
        "steps whose gradient was not finite, since the start; loss scale on the right",
        {"skipped_steps": "skipped", "loss_scale": "loss scale"},
        right="loss_scale",
    ),
    Chart(
        "Throughput",
        "tokens a second",
        {
            "tokens_per_second": "whole step",
            "tokens_per_second/sample": "sampling",
            "tokens_per_second/learn": "learning",
        },
    ),
    Chart(
        "Where a step's time goes",
        "seconds, without the first step of each start, which compiles",
        {
            f"time/{part}": part
            for part in ("wait", "sample", "reward", "score", "update", "publish")
        },
        kind="stack",
    ),
)


def drawn(known: Collection[str]) -> set[str]:
    """The metrics that some chart draws."""
    return {name for chart in CHARTS for name in chart.names(known)}


def charts_of(known: Collection[str]) -> list[dict[str, Any]]:
    """The charts that draw any of the metrics, as the page takes them."""
    found = [chart._replace(metrics=chart.names(known)) for chart in CHARTS]
    unknown_to_it = ("rest", "left_out")
    return [
        {key: value for key, value in chart._asdict().items() if key not in unknown_to_it}
        for chart in found
        if chart.metrics
    ]
