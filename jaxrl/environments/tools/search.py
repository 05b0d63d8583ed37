"""Full-text search: Okapi BM25 (Robertson and Zaragoza, 2009) with an inverted index."""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrl.data.rows import Row, read_column, read_rows

_K1, _B = 1.5, 0.75
_WORD = re.compile(r"\w+")
_RESULTS = 3


class Index:
    """An inverted index of texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Indexes the texts."""
        self._texts = texts
        self._lengths: list[int] = []
        self._found: dict[str, list[tuple[int, int]]] = {}  # word -> (text, number of occurrences)
        for number, text in enumerate(texts):
            words = _WORD.findall(text.lower())
            self._lengths.append(len(words))
            for word, count in Counter(words).items():
                self._found.setdefault(word, []).append((number, count))
        self._mean = sum(self._lengths) / max(len(texts), 1)

    def best(self, query: str, *, most: int) -> list[str]:
        """Returns the texts that match a query best, in order; each has one of its words."""
        scores: dict[int, float] = {}
        for word in set(_WORD.findall(query.lower())):
            places = self._found.get(word, [])
            rare = math.log(1 + (len(self._texts) - len(places) + 0.5) / (len(places) + 0.5))
            for number, count in places:
                length = 1 - _B + _B * self._lengths[number] / self._mean
                weight = rare * count * (_K1 + 1) / (count + _K1 * length)
                scores[number] = scores.get(number, 0.0) + weight
        order = sorted(scores, key=lambda number: (-scores[number], number))
        return [self._texts[number] for number in order[:most]]


@functools.cache
def make_search(path: str) -> Callable[[str], str]:
    """Returns the tool that searches a corpus; raises as `read_corpus`."""
    index = Index(read_corpus(path))

    def search(query: str) -> str:
        """Returns the passages of the corpus that match the words of a query best."""
        return "\n\n".join(index.best(query, most=_RESULTS)) or "(nothing found)"

    return search


def read_corpus(path: str) -> list[str]:
    """Reads passages: of a .txt file, between blank lines; of a .jsonl file, `text` and, if
    present, `title`.

    Raises:
      ValueError: for a missing file, another format, a file without text, or a line without
        `text`; the message names it.
    """
    file = Path(path)
    if file.suffix not in (".txt", ".jsonl") or not file.is_file():
        raise ValueError(f"environment.tools: search:{path} is not a .txt or .jsonl file")
    if file.suffix == ".txt":
        content = file.read_text(encoding="utf-8")
        passages = [part.strip() for part in re.split(r"\n\s*\n", content)]
    else:
        passages = list(map(_passage, read_rows(path)))
    passages = [passage for passage in passages if passage]
    if not passages:
        raise ValueError(f"environment.tools: search:{path}: the file has no text")
    return passages


def _passage(row: Row) -> str:
    text, title = read_column(row.record, "text", where=row.where), row.record.get("title")
    return f"{title}\n{text}" if title else str(text)
