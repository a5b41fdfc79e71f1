"""docs/tasks/: the commands of each page run as they stand, and folders are as it says."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from fullstride import cli
from fullstride.examples.__main__ import main

pytest.importorskip("sklearn")
pytest.importorskip("skimage")
FOLDER = Path(__file__).parents[2] / "docs/tasks"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "index.md")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_as_they_stand(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (commands,) = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    scenes, *calls = [shlex.split(line) for line in commands.splitlines()]
    monkeypatch.setattr(sys, "argv", scenes[2:])
    main()
    for words in calls:
        assert words[0] == "fullstride"
        assert cli.run(words[1:]) == 0, capsys.readouterr().err


def test_the_page_of_tasks_names_the_folders_of_scenes(tmp_path, monkeypatch):
    words = ["x", str(tmp_path / "s"), "--count", "10", "--side", "32", "--kind", "floor"]
    monkeypatch.setattr(sys, "argv", words)
    main()
    table = (FOLDER / "index.md").read_text().partition("| in the folder |")[2].partition("\n\n")[0]
    for folder in (each.name for each in (tmp_path / "s").iterdir()):
        assert f"`{folder}/" in table
