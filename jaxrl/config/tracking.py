"""The `[samples]` and `[tracking]` tables of a config."""

from pydantic import NonNegativeInt, field_validator

from jaxrl.config.hosts import is_address
from jaxrl.config.section import Section


class SamplesConfig(Section):
    """Completions logged to samples.jsonl, for `jaxrl report`."""

    every: NonNegativeInt = 10
    """Log samples every this many steps; 0 logs none. Entropy and |beta| of their tokens are logged
    in steps that probe.every probes."""


class TrackingConfig(Section):
    """Services that receive the metrics besides metrics.jsonl and TensorBoard."""

    wandb: str | None = None
    """Weights & Biases project (pip install wandb)."""

    mlflow: str | None = None
    """MLflow experiment (pip install mlflow), at MLFLOW_TRACKING_URI."""

    prometheus: str | None = None
    """Address at which Prometheus reads the newest metrics, such as 127.0.0.1:9400."""

    @field_validator("prometheus")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None and not is_address(value):
            raise ValueError("expected HOST:PORT, such as 127.0.0.1:9400")
        return value
