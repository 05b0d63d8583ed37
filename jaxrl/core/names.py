"""The known name that somebody probably meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Returns the known name most like `name`; None if none is like it. The same letters in another
    order are likest.

    Example:
      >>> nearest("gpro", ["gspo", "grpo"])
      'grpo'

    Args:
      name: as it was written.
      known: names that would be right.
      cutoff: least similarity, from 0 to 1, as for difflib.get_close_matches.
    """
    names = list(known)
    same_letters = [each for each in names if sorted(each) == sorted(name)]
    found = same_letters or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return found[0] if found else None
