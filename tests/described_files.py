"""Compares the files of a folder with what docs/reference/files.md says is in it."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "files.md"


def undescribed(section: str, folder: Path) -> list[str]:
    """The files below `folder` that the rows of a section do not name.

    Names in capitals stand for others, and a name that ends in / for all files below it.
    """
    rows = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in rows.splitlines() if row.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`(.*?)`", cell)]
    assert names, f"{PAGE} has no section {section}"
    patterns = [re.sub("[A-Z]+", "[^/]+", name).replace(".", r"\.") for name in names]
    whole = "|".join(f"{each}.*" if each.endswith("/") else each for each in patterns)
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in files if not re.fullmatch(whole, name))
