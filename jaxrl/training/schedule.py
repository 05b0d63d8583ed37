"""Schedules of a run's periodic work."""


def is_due(every: int, step: int) -> bool:
    """Returns true at multiples of `every`, never for 0."""
    return every > 0 and step % every == 0
