"""The shape of docs/: short guides, results apart, code within the column, one name for a page."""

import re

from tests.documented import FENCE, PAGES, ROOT
from tests.test_architecture import tracked

DOCS = ROOT / "docs"
CATALOGUES = {"index.md", "metrics.md"}  # the start page, and a table of every metric
LONGEST, WIDEST = 150, 95  # lines of a guide; characters of code that the site's column holds
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
CITING = (".py", ".toml", ".sh", ".sbatch", ".yaml", ".md", ".ipynb", "Dockerfile")


def test_guides_are_short():
    lines = {page.name: len(page.read_text().splitlines()) for page in DOCS.glob("*.md")}
    long = {name: n for name, n in lines.items() if n > LONGEST and name not in CATALOGUES}
    assert not long, "measurements belong into docs/results, workings into docs/internals"


def test_code_fits_the_column():
    for page in {*PAGES, *DOCS.rglob("*.md")}:
        text = page.read_text()
        blocks = [found[2] for found in FENCE.finditer(text)]
        blocks += INDENTED.findall(FENCE.sub("", text))
        lines = [line for block in blocks for line in block.splitlines()]
        wide = [line for line in lines if len(line) > WIDEST]
        assert not wide, f"{page.name}: {wide}"


def test_a_page_has_one_name():
    titles = {
        str(page.relative_to(DOCS).with_suffix("")): re.findall(r"^# (.+)$", page.read_text(), re.M)
        for page in DOCS.rglob("*.md")
    }
    index = (DOCS / "index.md").read_text()
    assert not re.search(r"^.+ <[\w/]+>$", index, re.M), "the navigation shows a page's title"
    for name, page in re.findall(r"grid-item-card\} (.+)\n:link: (\S+)", index):
        assert titles[page][0] == name


def test_pages_that_are_named_exist():
    for name in tracked():
        ours = name.endswith(CITING) and not name.startswith("docs/")
        for page in re.findall(r"\bdocs/[\w/]+\.md", (ROOT / name).read_text() if ours else ""):
            assert (ROOT / page).exists(), f"{name}: {page}"
