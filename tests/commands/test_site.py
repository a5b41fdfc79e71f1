"""The site of docs/: it has every page, what is named exists, and a broken link ends its build."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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


def test_one_sentence_says_everywhere_what_the_project_is_for():
    purpose = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    first = [(ROOT / name).read_text() for name in ("README.md", "docs/index.md")]
    first.append((ROOT / "src/fullstride/__init__.py").read_text())
    for text in (*first, SITE["site_description"], cli.DESCRIPTION):
        assert purpose in " ".join(text.split())


PLAIN = [page for page in PAGES if page.parent.name in ("docs", "start", "guides") and page != LOG]


def prose(page: Path) -> list[str]:
    """The paragraphs and the items of lists, without code, tables, headings and addresses."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(
        r"^(#|\||!|---).*$|\]\([^)]*\)|`[^`]*`|arXiv:[\d.]+", "x", text, flags=re.MULTILINE
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


@pytest.mark.slow
@pytest.mark.skipif(BUILDER is None, reason="needs the extra docs")
def test_the_site_builds_without_a_warning_and_asks_nobody(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    code, printed = build(tmp_path)
    assert code == 0, printed
    for page in (tmp_path / "site").glob("**/*.html"):
        sources = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="([^"]*)"', page.read_text()
        )
        assert not [source for source in sources if source.startswith(("http", "//"))], page.name


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
