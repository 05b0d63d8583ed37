"""The tables of a config that say what a run writes down besides its metrics, and where to."""

from pydantic import NonNegativeInt, PositiveInt

from jaxrl.config.tables import Section


class SamplesConfig(Section):
    """Answers that are kept in samples.jsonl, for `jaxrl report`."""

    every: NonNegativeInt = 10
    """Keep some after every so many steps; 0 keeps none. |beta| of their tokens is kept in steps
    that probe.every probes."""

    count: PositiveInt = 4
    """So many of a step, spread evenly from the lowest reward to the highest."""

    most_tokens: PositiveInt = 512
    """Of an answer; the rest is left out."""


class TrackingConfig(Section):
    """Services that metrics are sent to besides metrics.jsonl and TensorBoard's files."""

    wandb: str | None = None
    """Project of Weights & Biases (pip install wandb)."""

    mlflow: str | None = None
    """Experiment of MLflow (pip install mlflow), at MLFLOW_TRACKING_URI."""
