"""The pages of docs/ as blocks of commands, code and output, for the tests that run them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("start", "guides", "tasks", "reproduce", "extend")
PAGES = ["README.md", "docs/index.md"]
PAGES += sorted(str(p.relative_to(ROOT)) for f in FOLDERS for p in ROOT.glob(f"docs/{f}/*.md"))
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*) -->\n)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """What stands between two fences of a page.

    `sh` are commands, which run in order, and `python` runs too. The `text` that follows either is
    what is printed. A block of another language, or with a title, is the file of that name.

    A comment before the fence says what is otherwise: `not run: REASON`, or of an output
    `other numbers: REASON`.
    """

    language: str
    text: str
    title: str
    mark: str

    @property
    def is_run(self) -> bool:
        return not self.mark.startswith("not run: ")

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines() if self.language == "sh" else []
        words = (shlex.split(line, comments=True) for line in lines)
        return [each for each in words if each]


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    found = (match.groupdict("") for match in FENCE.finditer((ROOT / page).read_text()))
    return [Block(**each) for each in found]


def code(page: str) -> list[str]:
    """The Python of a page."""
    return [block.text for block in blocks(page) if block.language == "python"]
