"""docs/guides/latency.md: its commands print what it shows."""

import re
import shlex
from pathlib import Path

from fullstride import cli

PAGE = Path(__file__).parents[2] / "docs/guides/latency.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_commands_of_the_page_print_what_it_shows(tmp_path, monkeypatch, capsys):
    """Each line that it shows is printed, in that order; the page leaves out some last lines."""
    blocks = [block for kind, block in BLOCKS if not kind]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    commands = 0
    for block, following in zip(blocks, [*blocks[1:], ""], strict=True):
        if block.startswith("{"):
            Path("l40s.json").write_text(block)
        elif block.startswith("model,"):
            Path("times.csv").write_text(block)
        elif block.startswith("fullstride measure calibrate"):
            break  # its numbers are those of one machine
        elif block.startswith("fullstride "):
            commands += 1
            assert cli.run(shlex.split(block)[1:]) == 0, block
            printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
            shown = following.splitlines() if not following.startswith("fullstride") else []
            assert [line for line in printed if line in shown] == shown
    assert commands == 5


def test_the_python_of_the_page_prints_a_time_inside_of_its_interval(capsys):
    (code,) = (block for kind, block in BLOCKS if kind == "python")
    exec(code, {})
    middle, low, high = map(float, capsys.readouterr().out.split()[:3])
    assert low < middle < high
