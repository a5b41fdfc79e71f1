"""What a user sees of a training run: its plan, its time, and a bar that leaves no line."""

import os
import pty
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from fullstride import cli
from fullstride.io.console import Bar
from fullstride.nets import zoo
from fullstride.report.training_progress import (
    TrainingProgress,
    duration,
    plan_lines,
    recipe_name,
)
from fullstride.tasks import find_task
from fullstride.train import prepare, run, timing
from fullstride.train.compute import DistributedContext
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS, FINETUNE, RECIPES
from fullstride.train.recipes.papers import GENET

SHORT = replace(DIGITS, epochs=2, resolution=16, batch_size=16)
METRIC = find_task().metric


@pytest.fixture
def plan(few_digits, tmp_path):
    """What a run of 64 images in batches of 16 announces."""
    plans = []
    rows = run.train(tmp_path / "run", "genet_tiny", few_digits, SHORT, announce=plans.append)
    next(rows)
    (plan,) = plans
    return plan


def test_a_run_says_what_it_will_do_before_its_first_step(plan, few_digits):
    lines = {line.split()[0]: line for line in plan_lines(plan)}
    assert list(lines) == ["device", "data", "network", "recipe", "warmup", "length"]
    counts = [len(getattr(few_digits, name)) for name in ("train", "val", "test")]
    assert counts == [64, 20, 20]
    assert "10 classes; images: 64 train, 20 val, 20 test" in lines["data"]
    net = zoo.create("genet_tiny", classes=10, in_channels=1)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    assert f"genet_tiny: {parameters / 1e3:.0f} k parameters" in lines["network"]
    assert "16 x 16" in lines["network"]
    assert "2 epochs x 4 steps = 8 steps of 16 images" in lines["recipe"]
    assert "0.2 epochs in place of 5" in lines["warmup"]


def test_a_run_with_a_time_limit_says_that_its_epochs_are_expected_ones(plan):
    lines = [line for line in plan_lines(replace(plan, deadline=1e9)) if line.startswith("limit")]
    assert lines == [
        "limit    2 epochs are expected to end in time; where steps become slower, training ends "
        "after fewer, and a line says so"
    ]


def test_a_resumed_run_says_where_and_a_finished_one_announces_nothing(few_digits, tmp_path):
    plans = []
    settings = dict(options=RunOptions(checkpoint_every_steps=3), announce=plans.append)
    for _ in range(2):
        rows = run.train(tmp_path / "run", "genet_tiny", few_digits, SHORT, **settings)
        next(rows)
    next(rows, None)
    assert [each.start for each in plans] == [(0, 0), (1, 0)]
    assert plan_lines(plans[1])[-1].split() == ["resumes", "after", "1", "epoch"]
    list(rows)
    list(run.train(tmp_path / "run", "genet_tiny", few_digits, SHORT, **settings))
    assert len(plans) == 2


def test_a_network_of_timm_trains_at_its_own_resolution_where_the_recipe_has_none(few_digits):
    assert FINETUNE.resolution is None
    net, pre = prepare.initial_network("timm/resnet10t", find_task(), few_digits, FINETUNE)
    assert pre.resolution == net.spec.resolution > 100


def test_only_the_first_of_several_processes_prints(plan, capsys):
    for rank in (0, 1):
        with Bar(shown=DistributedContext(rank, 2).is_rank_zero) as bar:
            progress = TrainingProgress(bar, METRIC)
            progress.announce(plan)
            progress.report(1.0, 0, 1)
        lines = capsys.readouterr().out.splitlines()
        assert bool(lines) == (rank == 0)


def test_the_name_of_a_recipe_is_that_of_the_closest_one():
    assert recipe_name(DIGITS) == "digits"
    assert recipe_name(replace(GENET, epochs=3, lr=0.1)) == "genet"
    assert (
        recipe_name(replace(RECIPES["finetune"], seed=4, mixup=0.3))
        == "finetune with mixup 0.3, seed 4"
    )
    assert {recipe_name(recipe) for recipe in RECIPES.values()} <= set(RECIPES)


def test_the_time_left_is_that_of_all_steps_and_of_scoring(plan):
    # Scoring takes a third of a step for 16 images: 20 after each of 2 epochs and 40 at the end.
    scoring = (20 + 20 + 20 + 20) / 16 / 3
    assert sum(plan.seconds_left(2.0, 0, 0)) == pytest.approx(2 * (8 + scoring))
    assert sum(plan.seconds_left(2.0, 0, 3)) == pytest.approx(2 * (5 + scoring))
    assert sum(plan.seconds_left(2.0, 1, 4)) == pytest.approx(2 * (20 + 20 + 20) / 16 / 3)
    half = replace(plan, resolved=replace(plan.resolved, epochs=1.5))
    assert sum(half.seconds_left(2.0, 0, 0)) == pytest.approx(2 * (6 + scoring))
    growing = replace(
        plan, resolved=replace(plan.resolved, grow_from=8, grow_share=0.5)
    )  # 8, then 16
    assert sum(growing.seconds_left(1.0, 0, 0)) == pytest.approx(4 + 4 * (4 + scoring))
    assert sum(growing.seconds_left(4.0, 1, 0)) == pytest.approx(4 * (4 + 60 / 16 / 3))


@pytest.mark.parametrize(
    ("seconds", "text"), [(61, "1 min"), (4000, "67 min"), (9000, "2.5 h"), (3e5, "3.5 days")]
)
def test_a_duration_has_the_unit_that_people_use(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "when"),
    [(1.0, (0, 23)), (0.26, (1, 2)), (20.0, (0, 5))],
    ids=["after 20 steps", "after 10 s", "after 30 s"],
)
def test_the_time_of_a_step_is_that_of_the_first_ones_without_the_start(
    seconds, when, plan, monkeypatch
):
    clock, reports = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    run = replace(plan, batches=range(40), resolved=replace(plan.resolved, epochs=3))
    pace = timing.Pace(run, lambda *_: None, lambda *report: reports.append(report))
    for done in range(1, 121):
        step_s = 50.0 if done <= 3 else seconds
        clock[0] += step_s
        pace(run.course, done, step_s)
    assert reports == [(pytest.approx(seconds), *when)]


def screen(text: str) -> list[str]:
    """The lines that a terminal shows after `text`, by the control codes that bars use."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.endswith("A"):
            row -= int(part[2:-1])
        elif part != "\r" and part[0] != "\x1b":
            lines[row] += part
    return [line.strip() for line in lines if line.strip()]


@pytest.mark.slow
def test_on_a_terminal_there_is_one_bar_which_leaves_no_line(tmp_path):
    words = ["train", "digits", "--model", "genet_tiny", "--out", str(tmp_path / "run")]
    words += ["--recipe.epochs", "2", "--recipe.resolution", "16", "--recipe.batch-size", "64"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "250", "LINES": "50", "TERM": "xterm"}
    command = [sys.executable, "-m", "fullstride", *words]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        text = b""
        try:
            while chunk := os.read(ours, 65536):
                text += chunk
        except OSError:  # the other end is closed
            pass
    assert process.returncode == 0
    assert text.count(b"epoch 1") > 2  # the bar was there
    bars = [
        sum("\u2501" in line for line in screen(text[: end.end()].decode()))
        for end in re.finditer(rb"\n", text)
    ]
    assert max(bars) == 1  # also in the second epoch
    shown = screen(text.decode())
    first_words = [line.split()[0] for line in shown]
    # the time is printed on a slow machine, the calibration where the task has probabilities, a
    # shift where the writers of the test are harder to read than those of the validation split, and
    # that training has stalled as it may within two epochs
    others = ("time", "calibration", "shift", "stalled")
    first_words = [word for word in first_words if word not in others]
    assert first_words == [
        "device",
        "data",
        "network",
        "recipe",
        "warmup",
        "length",
        "epoch",
        "epoch",
        "test",
    ]


def test_the_command_begins_with_the_plan(tmp_path, capsys):
    words = ["train", "digits", "--model", "genet_tiny", "--out", str(tmp_path / "run")]
    words += ["--recipe.steps", "1", "--recipe.resolution", "16", "--recipe.batch-size", "16"]
    assert cli.run(words) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    plan = ["device", "data", "network", "recipe", "rate", "warmup", "length"]
    assert lines == [*plan, "epoch", "calibration", "test"]
