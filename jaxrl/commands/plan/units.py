"""Formats counts, sizes and times in the unit that fits them."""

_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def count_of(number: int, noun: str, plural: str | None = None) -> str:
    """Formats e.g. "1 chip" and "1,024 chips"; `plural` is the noun with an s by default."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def parameter_text(number: int) -> str:
    """Formats a number of parameters as models are named: "928", "17.6K", "135.0M" or "0.6B"."""
    if number < 10_000:
        return f"{number:,}"
    if round(number / 1e3, 1) < 1000:
        return f"{number / 1e3:.1f}K"
    if number < 0.5e9:
        return f"{number / 1e6:.1f}M"
    return f"{number / 1e9:,.1f}B"


def size_text(size: float) -> str:
    """Formats bytes: "928 B", "67.6 KiB", "574.0 MiB" or "2,628.3 GiB"."""
    for unit, name in _SIZES:
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} B"


def percent_text(share: float) -> str:
    """Formats a share, e.g. "39 %" and "0.6 %"."""
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1f} %"


def time_text(seconds: float) -> str:
    """Formats seconds to three digits: "under 1 ms", "3.1 ms", "0.25 s" or "2,258 s"."""
    if seconds < 0.001:
        return "under 1 ms"
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
