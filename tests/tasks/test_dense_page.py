"""docs/tasks/dense.md: its commands run as they stand, and folders of scenes are what it says."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from fullstride import cli
from fullstride.examples.__main__ import main

pytest.importorskip("sklearn")
pytest.importorskip("skimage")
PAGE = (Path(__file__).parents[2] / "docs/tasks/dense.md").read_text()
(COMMANDS,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_commands_of_the_page_run_as_they_stand(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scenes, *commands = [shlex.split(line) for line in COMMANDS.splitlines()]
    monkeypatch.setattr(sys, "argv", scenes[2:])
    main()
    for words in commands:
        assert words[0] == "fullstride"
        assert cli.run(words[1:]) == 0, capsys.readouterr().err
    assert Path("runs/masks.onnx").stat().st_size


def test_the_page_names_the_folders_of_scenes(tmp_path, monkeypatch):
    words = ["x", str(tmp_path / "s"), "--count", "10", "--side", "32", "--kind", "floor"]
    monkeypatch.setattr(sys, "argv", words)
    main()
    table = PAGE.partition("| in the folder |")[2].partition("\n\n")[0]
    for folder in (each.name for each in (tmp_path / "s").iterdir()):
        assert f"`{folder}/" in table
