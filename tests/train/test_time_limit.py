"""Training within a time: how many epochs fit, and what is refused."""

import json
import math
import time
from dataclasses import asdict, replace

import pytest
import torch
from slow_machine import Machine

from fullstride.measure.budget import deadline_s, time_limit_s
from fullstride.nets.bundle import Bundle
from fullstride.nets.network import Network
from fullstride.train import timing
from fullstride.train.averages import Average
from fullstride.train.optimizer import Course
from fullstride.train.prepare import epochs_text
from fullstride.train.recipes.choice import NamedRecipe, RecipeChoice, RunOptions, case_of
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.run import train
from fullstride.train.run_folder import load_checkpoint
from fullstride.train.timing import RunTimes, recipe_within, time_training

LONG = RecipeChoice(Recipe(epochs=100, batch_size=16, lr=0.01, resolution=16, hflip_prob=0.0))
TIMES = RunTimes(
    steps=4, score_every=1, step_s=0.5, image_s=0.01, val_s=0.2, save_s=0.1, start_s=1.0
)


@pytest.fixture
def steady(monkeypatch):
    """Measurements that are always the same: 2.3 s an epoch, and 1.9 s once."""
    monkeypatch.setattr(timing, "time_run", lambda run, *_: run.close() or TIMES)


def within(folder, data, seconds, choice=LONG):
    deadline = time.perf_counter() + seconds
    named = recipe_within(choice, deadline, folder, "genet_tiny", data)
    return named.recipe


def test_as_many_epochs_as_fit_and_no_more_than_the_recipe_has(steady, few_digits, tmp_path):
    recipe = within(tmp_path / "run", few_digits, 60)
    assert 0.8 * 60 < recipe.epochs * 2.3 + 1.9 <= 60
    assert within(tmp_path / "run", few_digits, 3600).epochs == 100


@pytest.mark.parametrize(("minutes", "seconds"), [(0.1, 1.5), (10, 6.0), (600, 10.0)])
def test_steps_are_timed_for_a_hundredth_of_the_time_within_bounds(
    few_digits, tmp_path, monkeypatch, minutes, seconds
):
    timed = []

    def time_run(run, begin, steps_s):
        timed.append(steps_s)
        run.close()
        return TIMES

    monkeypatch.setattr(timing, "time_run", time_run)
    monkeypatch.setattr(timing, "MEASURE_S", 1.5)  # which is shorter in all other tests
    within(tmp_path / "run", few_digits, 60 * minutes)
    assert timed == [pytest.approx(seconds, rel=0.1)]


def test_a_run_that_goes_on_keeps_its_length(steady, few_digits, tmp_path, capsys):
    recipe = within(tmp_path / "run", few_digits, 10)
    rows = train(tmp_path / "run", "genet_tiny", few_digits, recipe)
    next(rows)
    rows.close()
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(asdict(LONG.resolve(case_of(few_digits)).recipe)))
    for choice in (LONG, RecipeChoice(recipe), RecipeChoice(str(file)), RecipeChoice()):
        assert within(tmp_path / "run", few_digits, 3600, choice) == recipe
    assert not capsys.readouterr().err
    assert within(tmp_path / "run", few_digits, 3600, RecipeChoice("scratch")) == recipe
    assert "run keeps its own recipe, which has no name, not scratch" in capsys.readouterr().err


def test_a_length_beside_the_time_and_too_little_time_are_one_line(steady, few_digits, tmp_path):
    with pytest.raises(ValueError, match=r"^epochs 3 and a time"):
        within(tmp_path / "run", few_digits, 60, RecipeChoice(LONG.source, {"epochs": 3.0}))
    with pytest.raises(ValueError, match=r"too short.*needs 0\.\d minutes more$"):
        within(tmp_path / "run", few_digits, 1)


@pytest.mark.parametrize("has_test", [True, False])
def test_a_time_limit_needs_no_validation_images(few_digits, tmp_path, has_test):
    none = few_digits.val.subset([])
    data = replace(few_digits, val=none, test=few_digits.test if has_test else none)
    assert within(tmp_path / "run", data, 60).epochs > 0
    times = time_training(
        tmp_path / "run", "genet_tiny", data, LONG.resolve(case_of(data)), RunOptions()
    )
    assert times.val_s == 0 < times.image_s


def test_hours_and_minutes_add_up():
    assert time_limit_s(1, 30) == 5400
    assert time_limit_s(None, None) is None
    assert deadline_s(None, None) is None
    with pytest.raises(ValueError, match="--minutes 0"):
        time_limit_s(None, 0)


SHORT = Recipe(
    epochs=15,
    batch_size=16,
    lr=0.01,
    resolution=16,
    hflip_prob=0.0,
    warmup_epochs=1,
    score_every_epochs=10,
)


def state(folder):
    state = load_checkpoint(folder)
    assert state is not None
    return state


def rows_within(folder, data, deadline, recipe=SHORT, stop=None):
    """The rows of a training of 15 epochs of 4 steps, which has until `deadline`."""
    named, rows = NamedRecipe(recipe, deadline=deadline), []
    trained = train(folder, "genet_tiny", data, named)
    for row in trained:
        rows.append(row)
        if row["epoch"] == stop:
            trained.close()
    return rows


@pytest.mark.parametrize(("after", "factor"), [(0, 1.15), (0, 5), (30, 2), (50, 3)])
def test_a_run_ends_in_time_on_a_machine_that_becomes_slow(
    few_digits, tmp_path, monkeypatch, capsys, after, factor
):
    """60 steps of 1 s in 62 s, with scores that take no time, until a step takes longer."""
    machine = Machine(monkeypatch, lambda step: 1.0 if step < after else factor)
    rows = rows_within(tmp_path / "run", few_digits, 62.0)
    assert 0.8 * 62 <= machine.now <= 1.06 * 62
    assert rows[-1]["epoch"] == rows[-1]["epochs"] == math.ceil(machine.steps / 4)
    # the rates fall to the end of the cosine, in steps that are larger after a turn and no jumps
    assert machine.rates[-1] < 0.02 * max(machine.rates)
    falls = [a - b for a, b in zip(machine.rates, machine.rates[1:], strict=False)]
    assert max(falls) < 4 * max(machine.rates) / machine.steps
    turns = state(tmp_path / "run")["turns"]
    lines = [line for line in capsys.readouterr().err.splitlines() if "to keep the time" in line]
    assert len(lines) == len(turns)
    assert bool(turns) == (machine.steps < 60)


def test_a_machine_that_is_slow_for_a_while_trains_most_of_its_epochs(
    few_digits, tmp_path, monkeypatch
):
    machine = Machine(monkeypatch, lambda step: 4.0 if 10 <= step < 13 else 1.0)
    rows = rows_within(tmp_path / "run", few_digits, 62.0)
    assert 0.8 * 62 <= machine.now <= 1.06 * 62
    epochs = [row["epochs"] for row in rows]
    assert min(epochs) < 9 < 10 < epochs[-1] <= 15


def test_without_a_time_and_on_a_steady_machine_the_rates_are_those_of_the_recipe(
    few_digits, tmp_path, monkeypatch
):
    rates = []
    for name, deadline in (("free", None), ("timed", 62.0)):
        machine = Machine(monkeypatch, lambda step: 1.0)
        rows = rows_within(tmp_path / name, few_digits, deadline)
        rates.append(machine.rates)
        assert {row["epochs"] for row in rows} == {15}
        monkeypatch.undo()
    assert rates[0] == rates[1]
    assert len(rates[0]) == 60


@pytest.mark.parametrize("stop", [7, 8])
def test_a_run_that_goes_on_repeats_the_schedule_that_the_clock_has_made(
    few_digits, tmp_path, monkeypatch, stop
):
    growing = replace(SHORT, grow_from=8)
    with monkeypatch.context() as patch:
        machine = Machine(patch, lambda step: 1.0 if step < 12 else 3.0)
        whole = rows_within(tmp_path / "whole", few_digits, 62.0, growing)
        turns = state(tmp_path / "whole")["turns"]
        assert len(turns) == 1
        assert turns[0][0] < 4 * 7
    with monkeypatch.context() as patch:
        Machine(patch, lambda step: 1.0 if step < 12 else 3.0)
        rows_within(tmp_path / "cut", few_digits, 62.0, growing, stop=stop)
    rows = rows_within(tmp_path / "cut", few_digits, None, growing)
    assert [row["lr"] for row in rows] == [row["lr"] for row in whole]
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole]
    states = [state(tmp_path / name) for name in ("whole", "cut")]
    assert states[0]["turns"] == states[1]["turns"]
    for name in ("net", "average"):
        for one, other in zip(states[0][name].values(), states[1][name].values(), strict=True):
            assert torch.equal(one, other)
    bundle = Bundle.load(tmp_path / "cut" / "bundle")
    assert f"for {machine.steps / 4:.3g} of 15 epochs by a time limit" in bundle.source


def test_steps_are_timed_by_their_mean_over_the_schedule_where_images_grow(
    few_digits, tmp_path, monkeypatch
):
    growing = replace(SHORT, grow_from=8)
    machine = Machine(monkeypatch, lambda step: 1.0)
    rows_within(tmp_path / "run", few_digits, None, growing)
    mean_s = machine.now / machine.steps
    assert 0.25 < mean_s < 0.75
    times = time_training(
        tmp_path / "timed", "genet_tiny", few_digits, NamedRecipe(growing), RunOptions(), 4.0
    )
    assert times.step_s == pytest.approx(mean_s)


@pytest.mark.parametrize(("precise_bn", "images"), [(True, 9 * 84), (False, 8 * 20)])
def test_the_passes_of_a_soup_at_the_end_of_a_run_are_part_of_its_time(
    steady, few_digits, tmp_path, precise_bn, images
):
    whole = LONG.resolve(case_of(few_digits)).recipe
    recipe = replace(whole, soup=8, precise_bn=precise_bn)
    most_s = 60 - images * TIMES.image_s
    planned_s = within(tmp_path / "run", few_digits, 60, RecipeChoice(recipe)).epochs * 2.3 + 1.9
    assert 0.8 * most_s < planned_s <= most_s


def test_a_shorter_course_is_told_in_epochs_without_exponents():
    assert [epochs_text(each) for each in (0.25, 12.25, 1234.5)] == ["0.25", "12.2", "1234"]


def test_the_average_of_weights_spans_the_same_part_of_the_schedule():
    net = torch.nn.Linear(1, 1)
    average = Average(net, 0.9)
    course = Course(100).turned(50, 75)
    assert (Course(100).stride, course.stride, course.at(60), course.at(74.5)) == (1, 2, 70, 99)
    weight, new = (next(each.parameters()) for each in (average.net, net))
    with torch.no_grad():
        weight.fill_(1.0)
        new.fill_(0.0)
    average.update(10**6, course.stride)
    assert weight.ravel().tolist() == pytest.approx([0.9**2])
    average.update(10**6)
    assert weight.ravel().tolist() == pytest.approx([0.9**3])


def test_slow_steps_and_scores_are_timed_by_part_of_their_images(few_digits, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "PART", 4)
    named, sizes = LONG.resolve(case_of(few_digits)), list[tuple[bool, int]]()

    def count(net, arguments):
        if isinstance(net, Network):
            sizes.append((net.training, len(arguments[0])))

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        for slow_s, images in ((1e-6, {4}), (60.0, {4, 16})):
            monkeypatch.setattr(timing, "SLOW_S", slow_s)
            sizes.clear()
            times = time_training(tmp_path / "run", "genet_tiny", few_digits, named, RunOptions())
            assert {size for training, size in sizes if training} == images
            assert {size for training, size in sizes if not training} == {4}
            assert times.step_s > 0
            assert times.val_s == pytest.approx(20 * times.image_s)
    finally:
        hook.remove()
