"""docs/tasks/index.md: the folders of scenes are as it says."""

import sys
from pathlib import Path

import pytest

from fullstride.examples.__main__ import main

pytest.importorskip("sklearn")
pytest.importorskip("skimage")
FOLDER = Path(__file__).parents[2] / "docs/tasks"


def test_the_page_of_tasks_names_the_folders_of_scenes(tmp_path, monkeypatch):
    words = ["x", str(tmp_path / "s"), "--count", "10", "--side", "32", "--kind", "floor"]
    monkeypatch.setattr(sys, "argv", words)
    main()
    table = (FOLDER / "index.md").read_text().partition("| in the folder |")[2].partition("\n\n")[0]
    for folder in (each.name for each in (tmp_path / "s").iterdir()):
        assert f"`{folder}/" in table
