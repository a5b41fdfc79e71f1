"""The site of docs/: it has every page, what is named exists, and a broken link ends its build."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from browser import SIZES, looked_at, needs_browser, opened

from fullstride import cli

ROOT = Path(__file__).parents[2]
SITE = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
PAGES = sorted(ROOT.glob("docs/**/*.md"))
LOG = ROOT / "docs/log.md"
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


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/tasks/*.md")), ids=lambda page: page.stem)
def test_the_page_of_a_task_shows_a_prediction(page):
    assert page.stem == "index" or f"]({page.stem}.png)" in page.read_text()


def test_one_sentence_says_everywhere_what_the_project_is_for():
    purpose = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    first = [(ROOT / name).read_text() for name in ("README.md", "docs/index.md")]
    first.append((ROOT / "src/fullstride/__init__.py").read_text())
    for text in (*first, SITE["site_description"], cli.DESCRIPTION):
        assert purpose in " ".join(text.split())


def test_the_commit_that_the_page_of_the_demo_names_is_in_the_history():
    (commit,) = re.findall(r"commit</th><td>([0-9a-f]+)<", (ROOT / "docs/demo.html").read_text())
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True)
    if shallow.stdout.strip() != b"false":
        pytest.skip("there is no history here")
    assert subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"]).returncode == 0


# The log is a record, whose paragraphs are full of numbers.
PLAIN = [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"]


def prose(page: Path) -> list[str]:
    """The paragraphs and the items of lists, without code, tables, headings and addresses."""
    text = re.sub(r"```.*?```|^(?:#|\||!|---|<!--).*?$", "", page.read_text(), flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)|`[^`]*`|arXiv:[\d.]+", "x", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    return [re.sub(r"^(?:[-*]|\d+\.) ", "", " ".join(each.split())) for each in paragraphs]


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: page.name)
def test_sentences_are_short_and_numbers_are_in_tables(page):
    sentences = [
        each.split() for text in prose(page) for each in re.split(r"(?<=[.:;!?])\s+", text)
    ]
    assert sum(len(words) <= 25 for words in sentences) >= 0.9 * len(sentences)
    for paragraph in prose(page) if page != LOG else ():
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


@pytest.mark.slow
@pytest.mark.skipif(BUILDER is None, reason="needs the extra docs")
@needs_browser
@SIZES
def test_every_page_fits_a_phone_and_a_screen_and_asks_nobody(site, width, dark, tmp_path):
    pages = [site / name.replace(".md", ".html") for name in pages_of(SITE["nav"])]
    looks, console = looked_at(pages, width, dark, tmp_path)
    assert console == []
    for page, look in looks.items():
        del look["pictures"]
        assert look == {"overflow": 0, "cut": 0, "asked": 0, "broken": 0, "dark": dark}, page


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
@pytest.mark.skipif(BUILDER is None, reason="needs the extra docs")
@needs_browser
def test_the_search_works_from_disk(site, tmp_path):
    page = site / "search_test.html"
    page.write_text((site / "index.html").read_text().replace("</body>", SEARCH))
    seen, console = opened(page, tmp_path / "profile", 5000)
    assert console == []
    assert "guides/devices.html" in seen["results"]


@pytest.mark.slow
@pytest.mark.skipif(BUILDER is None, reason="needs the extra docs")
def test_the_log_is_not_in_the_search(site):
    index = (site / "search.json").read_text()
    assert "guides/devices.html" in index
    assert "log.html" not in index
