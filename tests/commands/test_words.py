"""The words of the field instead of private ones, in lines that fit a screen."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = sorted(ROOT.glob("src/**/*.py"))
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"])
COLUMNS = 100

# Participles that say nothing about what a variable holds.
PARTICIPLES = {"asked", "found", "given", "kept", "known", "made", "said", "seen", "told", "took"}
# Private word -> the field's.
DIALECT = {
    r"lean": "memory-efficient",
    r"come by": "measured, estimated or published",
    r"first_does": "on_rank_zero",
    r"even_out": "sync_buffers",
    r"waypoints?": "checkpoints",
    r"KeepLittle": "RecomputePartitioner",
    r"Remembered": "CachedTeacher",
    r"adopts?": "convert",
    r"sober": "clamp to peak",
    r"vocabulary": "key map",
    r"of ours|of theirs|what is told|is told|are told|be told": "a noun",
    r"floors?: one question": "rooms",
    r"entrants?": "networks",
}
# What stands for a noun that the reader has to look for: "those of `batch`", "Of each the first."
ELIDED = re.compile(
    r"\b(?:those|that|the ones?) (?:of|in|for|with|by|from|at|to)\b"
    r"|\bthose (?:that|which|who|it|they|we|whose)\b|\bthe ones? (?:that|which)\b"
    r"|, of which\b|(?:^|[.:;] )(?:Of|Those|Its|Theirs) "
)


def identity(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [*CODE, *PAGES], ids=identity)
def test_lines_have_at_most_a_hundred_columns(path):
    fenced, long = False, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fenced ^= line.startswith("```")
        table = path.suffix == ".md" and (fenced or line.startswith(("|", "!", "```")))
        if len(line) > COLUMNS and not table and "https://" not in line:
            long.append(number)
    assert not long, f"lines {long}"


@pytest.mark.parametrize("path", CODE, ids=identity)
def test_a_variable_is_called_by_what_it_holds(path):
    tree = ast.parse(path.read_text())
    # Fields of a dataclass may be keys of files.
    fields = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    names = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in fields
    }
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    functions = (ast.FunctionDef, ast.ClassDef)
    names |= {node.name for node in ast.walk(tree) if isinstance(node, functions)}
    assert not names & PARTICIPLES


@pytest.mark.parametrize("path", [*CODE, *PAGES], ids=identity)
def test_no_private_word_stands_where_the_field_has_one(path):
    text = path.read_text()
    uses = {
        match[0]: instead
        for word, instead in DIALECT.items()
        for match in re.finditer(rf"\b(?:{word})\b", text, re.IGNORECASE)
    }
    assert not uses


def prose(source: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring and comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


@pytest.mark.parametrize("path", CODE, ids=identity)
def test_docstrings_and_comments_repeat_the_noun(path):
    texts = ((line, " ".join(text.split())) for line, text in prose(path.read_text()))
    assert [(line, match[0]) for line, text in texts if (match := ELIDED.search(text))] == []


LARGE = {
    "MAX_COMPARED",
    "have the size of another one",
    "is cut short",
}  # numbers that are never one
COUNTED = re.compile(r" (?:\w+ )?\w+s (?:are|have|were|do|go|show)\b")


@pytest.mark.parametrize("path", CODE, ids=identity)
def test_a_number_and_its_plural_noun_and_verb_come_from_the_helper(path):
    """`count_of(n, "image", "are")` says "1 image is", and an f-string would say "1 images are"."""
    source = path.read_text()
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        text = ast.unparse(node)
        for value, after in pairwise(node.values):
            is_number = isinstance(value, ast.FormattedValue) and re.search(
                r"len\(|count|number|:,", ast.unparse(value)
            )
            if is_number and isinstance(after, ast.Constant) and COUNTED.match(str(after.value)):
                found += [] if any(word in text for word in LARGE) else [text]
    assert not found
