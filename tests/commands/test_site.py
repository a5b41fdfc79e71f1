"""The site of docs/: it has every page, what is named exists, and a broken link ends its build."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from html import unescape
from pathlib import Path

import pytest

from fullstride import cli

ROOT = Path(__file__).parents[2]
SITE = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
PAGES = sorted(ROOT.glob("docs/**/*.md"))
LOG = ROOT / "docs/log.md"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
BUILDER = shutil.which("zensical", path=str(Path(sys.executable).parent)) or shutil.which(
    "zensical"
)


def pages_of(entry) -> list[str]:
    """The pages of a part of the navigation, from its top."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages_of(part)]


def test_the_navigation_has_every_page_once():
    assert sorted(pages_of(SITE["nav"])) == [str(page.relative_to(ROOT / "docs")) for page in PAGES]


def test_every_file_of_docs_that_is_named_anywhere_exists():
    files = [ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml")]
    for folder, ending in (("src", "py"), ("tests", "py"), ("benchmarks", "py"), ("docs", "md")):
        files += ROOT.glob(f"{folder}/**/*.{ending}")
    for file in files:
        for name in re.findall(r"docs/[\w/-]+\.\w+", file.read_text()):
            assert (ROOT / name).is_file(), f"{file.relative_to(ROOT)} names {name}"


def test_what_a_page_links_to_or_shows_is_there():
    """The builder checks links to pages alone."""
    for page in (*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!http|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).is_file(), f"{page.relative_to(ROOT)} links to {target}"


def test_one_sentence_says_everywhere_what_the_project_is_for():
    purpose = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    first = [(ROOT / name).read_text() for name in ("README.md", "docs/index.md")]
    first.append((ROOT / "src/fullstride/__init__.py").read_text())
    for text in (*first, SITE["site_description"], cli.DESCRIPTION):
        assert purpose in " ".join(text.split())


PLAIN_FOLDERS = ("docs", "start", "guides", "tasks", "reproduce")
PLAIN = [page for page in PAGES if page.parent.name in PLAIN_FOLDERS and page != LOG]


def prose(page: Path) -> list[str]:
    """The paragraphs and the items of lists, without code, tables, headings and addresses."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(
        r"^(#|\||!|---|<!--).*$|\]\([^)]*\)|`[^`]*`|arXiv:[\d.]+", "x", text, flags=re.MULTILINE
    )
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    return [re.sub(r"^(?:[-*]|\d+\.) ", "", " ".join(each.split())) for each in paragraphs]


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: page.name)
def test_sentences_are_short_and_numbers_are_in_tables(page):
    sentences = [
        each.split() for text in prose(page) for each in re.split(r"(?<=[.:;!?])\s+", text)
    ]
    assert sum(len(words) <= 25 for words in sentences) >= 0.9 * len(sentences)
    for paragraph in prose(page):
        assert len(re.findall(r"(?<![\w-])\d[\d.,]*", paragraph)) <= 3, paragraph


def build(folder: Path) -> tuple[int, str]:
    """The exit code of a strict build of the site in a folder, and what it printed."""
    assert BUILDER is not None
    words = [BUILDER, "build", "--strict", "--clean"]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    return result.returncode, re.sub(r"\x1b\[[\d;]*m", "", result.stdout + result.stderr)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built from a copy of docs/."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    code, printed = build(folder)
    assert code == 0, printed
    return folder / "site"


@pytest.mark.slow
@pytest.mark.skipif(BUILDER is None, reason="needs the extra docs")
@pytest.mark.parametrize("planted", ["guides/nowhere.md", "guides/fit.md#nowhere", "#nowhere"])
def test_a_broken_link_or_anchor_fails_the_build(planted, tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    with (tmp_path / "docs/index.md").open("a") as page:
        page.write(f"\n[here]({planted})\n")
    code, printed = build(tmp_path)
    assert code != 0
    assert "index.md" in printed


def opened(page: Path, *flags: str) -> dict[str, str]:
    """What the scripts of a page wrote beside its root, in a browser that reads it from disk."""
    assert BROWSER is not None
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    words += ["--enable-logging=stderr", f"--user-data-dir={page.parents[1] / 'profile'}", *flags]
    words += ["--window-size=1400,1000", "--virtual-time-budget=60000", "--dump-dom", page.as_uri()]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert "CONSOLE" not in result.stderr
    root = re.search(r"<html[^>]*>", result.stdout)
    assert root is not None
    return {key: unescape(text) for key, text in re.findall(r'data-(\w+)="([^"]*)"', root[0])}


# Each page in turn in a frame: pixels that run out, requests beyond the disk, broken pictures.
LOOK = """<!DOCTYPE html><iframe style="border: 0; height: 900px; width: WIDTHpx"></iframe><script>
const pages = PAGES, seen = {}, frame = document.querySelector("iframe");
frame.onload = () => setTimeout(() => {
  const page = frame.contentDocument, root = page.documentElement, view = page.defaultView;
  const names = view.performance.getEntriesByType("resource").map((each) => each.name);
  const broken = [...page.images].filter((each) => !each.naturalWidth).length;
  const out = Math.max(0, root.scrollWidth - view.innerWidth);
  const shade = view.getComputedStyle(page.body).backgroundColor.match(/\\d+/g).slice(0, 3);
  const dark = Math.max(...shade.map(Number)) < 100;
  const asked = names.filter((each) => !each.startsWith("file:")).length;
  seen[pages.shift()] = [out, asked, broken, dark];
  if (pages.length) frame.src = pages[0];
  else document.documentElement.dataset.seen = JSON.stringify(seen);
}, 100);
frame.src = pages[0];
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(not BUILDER or not BROWSER, reason="needs the extra docs, and chromium")
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, False)])
def test_every_page_fits_a_phone_and_a_screen_and_asks_nobody(site, width, dark):
    pages = [name.replace(".md", ".html") for name in pages_of(SITE["nav"])]
    frame = site / f"frame{width}.html"
    frame.write_text(LOOK.replace("WIDTH", str(width)).replace("PAGES", json.dumps(pages)))
    colours = f"--blink-settings=preferredColorScheme={int(not dark)}"
    seen = json.loads(opened(frame, "--allow-file-access-from-files", colours)["seen"])
    assert seen == dict.fromkeys(pages, [0, 0, 0, dark])


# The search is in a shadow of the page.
SEARCH = """<script>
const later = (work) => setTimeout(work, 1000);
addEventListener("load", () => later(() => {
  document.querySelector(".md-search__button").click();
  later(() => {
    const field = [...document.querySelectorAll("*")].filter((each) => each.shadowRoot)
      .map((each) => each.shadowRoot.querySelector("input")).find((each) => each);
    field.value = "raspberry";
    field.dispatchEvent(new Event("input", { bubbles: true }));
    later(() => {
      const links = field.getRootNode().querySelectorAll("a[href]");
      document.documentElement.dataset.results = [...links].map((each) => each.href).join(" ");
    });
  });
}));
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(not BUILDER or not BROWSER, reason="needs the extra docs, and chromium")
def test_the_search_works_from_disk(site):
    page = site / "search_test.html"
    page.write_text((site / "index.html").read_text().replace("</body>", SEARCH))
    assert "guides/devices.html" in opened(page)["results"]
