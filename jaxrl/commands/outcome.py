"""What commands that learn from given texts say when they are done."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxrl.training.supervised.fit import Result


def report(result: "Result", learnt: str) -> int:
    """Prints how a run ended, `learnt` if it came to its end; returns the exit status."""
    if result.signum is not None:
        print(f"ended by signal {result.signum} at step {result.step}; the same command goes on")
        return 128 + result.signum
    print(f"{learnt}; model: {result.model}")
    return 0


def report_pairs(result: "Result") -> int:
    """As `report`, of a run that learns from pairs of answers."""
    before, after = result.first.get("accuracy"), result.last.get("eval/accuracy")
    if before is None or after is None:
        return report(result, f"loss {result.last.get('loss', float('nan')):.4f}")
    share = f"{before:.1%} -> {after:.1%}".replace("%", " %")
    return report(result, f"held-out pairs with the chosen answer ahead: {share}")
