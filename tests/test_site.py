"""The site of docs/: it builds without a warning, holds every public name and needs no network."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxrl import cli
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from tests.browser import CHROMIUM, open_page
from tests.faces import listed, public

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCES = [path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")]


class Element(NamedTuple):
    """A start tag."""

    tag: str
    attributes: dict[str, str]


class Elements(HTMLParser):
    """The start tags of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[Element] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(Element(tag, {name: value or "" for name, value in attrs}))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    arguments = ["-W", "--keep-going", "-q", "-E", "-d", str(out / "cache"), str(DOCS)]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *arguments, str(out / "html")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


def elements(page: Path) -> list[Element]:
    return Elements(page).found


def ids(site: Path, *tags: str) -> list[str]:
    """The ids on the pages of the reference, such as `jaxrl.losses.clipped`; of some tags alone."""
    pages = (site / "reference").glob("*.html")
    found = [e for page in pages for e in elements(page) if not tags or e.tag in tags]
    return [e.attributes["id"] for e in found if "id" in e.attributes]


def test_reference_has_every_public_name_once(site):
    found = ids(site, "dt")
    inner = tuple(f"{name}." for name in public())  # methods and attributes
    names = [i for i in found if i.startswith("jaxrl.") and not i.startswith(inner)]
    assert sorted(names) == sorted(public())


def test_library_page_links_rooms_and_front(site):
    links = [e.attributes for e in elements(site / "reference" / "library.html") if e.tag == "a"]
    linked = {link["title"].rpartition(".")[2] for link in links if "title" in link}
    pages = {link["href"] for link in links if "href" in link}
    for name, home in listed("jaxrl").items():
        assert f"{name}.html" in pages if home == f"jaxrl.{name}" else name in linked


def test_reference_has_every_key_and_command(site):
    found = set(ids(site))
    assert not {f"confval-{name}" for name in toml_file.keys(Config)} - found
    assert not {f"jaxrl-{command}" for command in cli.COMMANDS} - found


def test_navigation_leads_to_every_page(site):
    start = site / "index.html"
    reached = {start} | {
        (start.parent / e.attributes["href"].partition("#")[0]).resolve()
        for e in elements(start)
        if e.tag == "a" and "internal" in e.attributes.get("class", "")
    }
    assert not {(site / name).with_suffix(".html") for name in SOURCES} - reached


def test_links_lead_somewhere(site):
    pages = {page: elements(page) for page in site.rglob("*.html")}
    anchors = {page: {e.attributes.get("id") for e in found} for page, found in pages.items()}
    for page, found in pages.items():
        for href in [e.attributes.get("href", "#") for e in found if e.tag == "a"]:
            path, _, anchor = href.partition("#")
            if not re.match(r"\w+:", path):
                target = (page.parent / path).resolve() if path else page
                assert target.exists(), f"{page.name}: {href}"
                assert not anchor or target not in anchors or anchor in anchors[target], href


def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.rglob("*.html"):
        for tag, attributes in elements(page):
            loaded = [attributes.get(name, "") for name in ("src", "srcset", "data", "poster")]
            loaded += [attributes.get("href", "")] if tag == "link" else []
            assert not re.search(r"(https?:)?//", " ".join(loaded)), f"{page.name}: {loaded}"
    for sheet in [*site.rglob("*.css"), *site.rglob("*.html")]:
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text()), sheet
    for script in site.rglob("*.js"):
        assert not re.search(r"import\(?\s*[\"'](https?:)?//", script.read_text()), script


def test_search_finds_a_term(site):
    index = (site / "searchindex.js").read_text()
    index = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))
    pages = {index["docnames"][i] for i in index["terms"]["phantom"]}
    assert {"metrics", "alarms"} <= pages


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
def test_pages_work_from_disk_on_a_phone(site, tmp_path):
    with open_page(tmp_path) as page:
        page.open(site / "search.html", width=1200, dark=False)
        page.run("Search.performSearch('phantom')")
        while page.run("document.querySelectorAll('#search-results li').length") < 4:
            pass
        for name in SOURCES:
            page.open((site / name).with_suffix(".html"), width=390, dark=True)
            assert page.run("document.documentElement.scrollWidth") <= 390, name
        page.open(site / "examples.html", width=1400, dark=False)
        scroll = "[...document.querySelectorAll('pre')].filter(e => e.scrollWidth > e.clientWidth)"
        assert page.run(f"{scroll}.length") == 0  # code fits the column
        for dark in (True, False):
            page.open(site / "index.html", width=800, dark=dark)
            seen = page.run("getComputedStyle(document.querySelector('article img')).filter")
            assert ("invert" in seen) == dark  # plots follow the page
        assert not page.errors
        assert all(address.startswith(("file:", "data:")) for address in page.requests)
