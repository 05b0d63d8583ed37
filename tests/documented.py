"""What README.md, CONTRIBUTING.md, docs/ and the headers of configs/ tell a reader to type."""

import re
import shlex
import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
GUIDES = {*(ROOT / "docs").rglob("*.md")} - {*(ROOT / "docs/reference").glob("*.md")}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(GUIDES)]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))

# What a reader has to have, or to wait for.
MARK = re.compile(r"\bneeds?\b|\bminutes?\b|\bhours?\b|\bCPU time\b", re.IGNORECASE)

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
PROGRAM = re.compile(r"(?:\./)?scripts/\S+\.(?:sh|py)|(?:\S+/)?(?:jaxrl|pip|hf|tensorboard)")
BEFORE = re.compile(r"(?:\S+/)?python|srun|--ntasks\S+|[A-Z_]+=\S+")  # stands before a program


class Command(NamedTuple):
    """A program and its arguments, as a page shows them."""

    where: str  # "docs/scale.md:120"
    words: tuple[str, ...]  # ("jaxrl", "train", "configs/quickstart.toml")
    comment: str  # what is said behind and above it
    block: bool  # stands in a block of its own, to be copied; else within a sentence

    @property
    def text(self) -> str:
        """One line, without what stands before the program's name."""
        return " ".join(self.words)

    @property
    def marked(self) -> bool:
        """Whether what is said about it includes what it needs."""
        heads = [header(ROOT / w) for w in self.words if (ROOT / w) in CONFIGS]
        return any(MARK.search(text) for text in (self.comment, *heads))


class Snippet(NamedTuple):
    """A fenced block."""

    where: str
    language: str
    text: str


def header(config: Path) -> str:
    """The comment that a config begins with."""
    return re.split(r"^(?!#)", config.read_text(), maxsplit=1, flags=re.MULTILINE)[0]


def snippets(language: str) -> list[Snippet]:
    """The fenced blocks of all pages that are in a language."""
    texts = {page: page.read_text() for page in PAGES}
    return [
        Snippet(_where(page, text[: found.start()]), *found.groups())
        for page, text in texts.items()
        for found in FENCE.finditer(text)
        if found[1] == language
    ]


def undocumented(metrics: Iterable[str]) -> list[str]:
    """Those of a run's metrics that docs/metrics.md does not name."""
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(.+?)`", row)}
    families = tuple(name.rstrip(string.ascii_uppercase) for name in names if name[-1].isupper())
    return sorted(
        name
        for name in metrics
        if not {name, name.removeprefix("eval/")} & names
        and not name.removeprefix("eval/").startswith(families)
    )


def prose(page: Path) -> str:
    """A page with its fenced blocks blank, on the same lines."""
    return FENCE.sub(lambda found: "\n" * found[0].count("\n"), page.read_text())


def commands() -> Iterator[Command]:
    """Every command of the pages' blocks, of their sentences, and of the configs' headers."""
    for snippet in snippets("bash"):
        yield from _block(snippet.text, snippet.where)
    for page in PAGES:
        text = prose(page)
        for found in INDENTED.finditer(text):
            yield from _block(found[0], _where(page, text[: found.start()]))
        for found in INLINE.finditer(text):
            said = re.sub(r" \[[A-Z]+ \.\.\.\]", "", " ".join(found[1].split()))
            for words in _programs(said) if " " in said else ():
                yield Command(_where(page, text[: found.start()]), words, "", block=False)
    for config in CONFIGS:
        for line in header(config).splitlines():
            if line.startswith("#   "):
                for command in _block(line[1:], str(config.relative_to(ROOT))):
                    yield command._replace(comment=f"{command.comment} {header(config)}")


def _block(text: str, where: str) -> Iterator[Command]:
    above = ""  # the last comment on a line of its own
    for line in re.sub(r" *\\\n\s*", " ", text).splitlines():
        said, comment = [*re.split(r"\s{2,}(?:# *)?", line.strip(), maxsplit=1), ""][:2]
        above = said if said.startswith("#") else above
        for words in _programs(said):
            yield Command(where, words, f"{comment} {above}", block=True)


def _programs(line: str) -> Iterator[tuple[str, ...]]:
    """The commands of a line that are ours, or install and fetch what ours need, each without what
    stands before it."""
    for part in re.split(r"&&|;|\|", line):
        try:
            words = shlex.split(part)
        except ValueError:  # a lone quote: not a command
            continue
        while words and BEFORE.fullmatch(words[0]):
            words = words[1:]
        if words and PROGRAM.fullmatch(words[0]):
            yield (re.sub(r"^\./|^.*/(?=\w+$)", "", words[0]), *words[1:])


def _where(page: Path, before: str) -> str:
    return f"{page.relative_to(ROOT)}:{before.count(chr(10)) + 1}"
