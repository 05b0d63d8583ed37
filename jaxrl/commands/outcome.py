"""Final output of the commands that train on given texts or pairs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxrl.training.supervised.fit import Result


def _print(result: "Result", summary: str) -> int:
    """Prints `summary` if the run finished; returns the exit status."""
    if result.signum is not None:
        print(interrupted(result.signum, step=result.step))
        return 128 + result.signum
    print(f"{summary}; model: {result.model}")
    return 0


def print_loss(result: "Result") -> int:
    """Prints the last loss of a run on texts; returns the exit status."""
    loss = result.last.get("loss", float("nan"))
    return _print(result, f"loss {loss:.4f} nats per token")


def print_accuracy(result: "Result") -> int:
    """Prints the held-out accuracy of a run on preference pairs; returns the exit status."""
    before, after = result.first.get("accuracy"), result.last.get("eval/accuracy")
    if before is None or after is None:
        return _print(result, f"loss {result.last.get('loss', float('nan')):.4f}")
    return _print(result, f"held-out pairs ranked correctly: {change(before, after)}")


def interrupted(signum: int, *, step: int) -> str:
    """Says that a signal ended a run, and how to resume it."""
    return f"ended by signal {signum} at step {step}; rerun the same command to resume"


def change(before: float, after: float) -> str:
    """Formats two shares as "27.5 % -> 98.0 %"."""
    return f"{before:.1%} -> {after:.1%}".replace("%", " %")
