"""Full-text search: Okapi BM25 (Robertson and Zaragoza, 2009) with an inverted index."""

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxrl.data.rows import Row, read_column, read_rows

_K1, _B = 1.5, 0.75
_WORD = re.compile(r"\w+")
_RESULTS = 3


class Index:
    """An inverted index of texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Indexes the texts."""
        places, lengths = defaultdict[str, list[tuple[int, int]]](list), np.zeros(len(texts))
        for number, text in enumerate(texts):
            words = _WORD.findall(text.lower())
            lengths[number] = len(words)
            for word, times in Counter(words).items():
                places[word].append((number, times))
        self._texts, self._norms = texts, 1 - _B + _B * lengths / (lengths.mean() or 1)
        self._places = {word: np.array(found).T for word, found in places.items()}

    def best(self, query: str, *, most: int) -> list[str]:
        """Returns the best matches of a query, in order; each has at least one of its words."""
        scores = np.zeros(len(self._texts))
        for word in dict.fromkeys(_WORD.findall(query.lower())):
            if word in self._places:
                texts, times = self._places[word]
                rare = math.log(1 + (len(scores) - len(texts) + 0.5) / (len(texts) + 0.5))
                scores[texts] += rare * times * (_K1 + 1) / (times + _K1 * self._norms[texts])
        order = np.argsort(-scores, kind="stable")[:most]
        return [self._texts[number] for number in order if scores[number]]


@functools.cache
def make_search(path: str) -> Callable[[str], str]:
    """Returns the tool that searches a corpus; raises as `read_corpus`."""
    index = Index(read_corpus(path))

    def search(query: str) -> str:
        """Returns the passages of the corpus that match the words of a query best."""
        return "\n\n".join(index.best(query, most=_RESULTS)) or "(nothing found)"

    return search


def read_corpus(path: str) -> list[str]:
    """Reads the passages of a .txt file, separated by blank lines, or of a .jsonl file with `text`
    and maybe `title`; raises ValueError for a missing file, another format, a file without text or
    a line without `text`."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(
            f"environment.tools: search:{path}: there is no such file; relative paths start at "
            f"{Path.cwd()}, and those in a config also at its folder"
        )
    if file.suffix not in (".txt", ".jsonl"):
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
