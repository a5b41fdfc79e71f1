"""Runs that diverge end with advice, and runs that learn nothing say so; healthy ones do not."""

import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fullstride import cli
from fullstride.report.console_lines import few_images_line
from fullstride.tasks import find_task
from fullstride.train import run, run_folder
from fullstride.train.loop import FEWEST, MOST, Divergence
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.recipe import Recipe

# at a rate that no network bears: with the digits the loss of a step is soon in the hundreds
WILD = Recipe(
    epochs=12, batch_size=8, lr=100.0, warmup_epochs=0, nesterov=False, ema_decay=0, resolution=16
)


def found(losses, total: int | None = None, per_check: int = 1000) -> int | None:
    """The step by which training has diverged, with the losses examined now and then."""
    divergence = Divergence(total or len(losses))
    for end in range(per_check, len(losses) + per_check, per_check):
        if (index := divergence.find(losses[:end], 0)) is not None:
            return index
    return None


def noise(steps: int, seed: int) -> np.ndarray:
    return np.exp(0.3 * np.random.default_rng(seed).standard_normal(steps))


CLASSES = (2, 10, 1000)
HEALTHY = {
    "a warm-up, then a decrease": lambda t, k, e: math.log(k) * np.exp(-3 * t) * e,
    "a rise to twice the loss of guessing": lambda t, k, e: (
        math.log(k) * (1 + np.sin(3 * np.pi * np.clip(t, 0, 1 / 3))) * e
    ),
    "a start with trained weights that the first steps spoil": lambda t, k, e: (
        0.01 + math.log(k) * np.minimum(1, 20 * t) * np.exp(-2 * t) * e
    ),
    "smoothed labels": lambda t, k, e: 0.1 * math.log(k) + math.log(k) * np.exp(-5 * t) * e,
    "a triplet loss that stays": lambda t, k, e: (0.69 + 3 * (1 - t)) * e,
    "mixed images": lambda t, k, e: math.log(k) * (0.6 + 0.4 * (1 - t)) * e,
}


@pytest.mark.parametrize("curve", HEALTHY)
@pytest.mark.parametrize("classes", CLASSES)
def test_healthy_losses_are_not_called_diverging(curve, classes):
    for steps in (4, 20, 300, 20_000):
        t = np.arange(steps) / steps
        losses = HEALTHY[curve](t, classes, noise(steps, steps))
        assert found(losses.tolist()) is None
        spikes = losses.copy()
        for first in range(steps // 2, steps, max(steps // 3, FEWEST)):  # late, and short
            spikes[first : first + FEWEST - 1] = 1e4
        assert found(spikes.tolist()) is None


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize(("steps", "stretch"), [(20, FEWEST), (1000, 50), (100_000, MOST)])
def test_losses_that_stay_far_above_the_first_are_found_after_a_stretch(classes, steps, stretch):
    losses = [math.log(classes)] * 10 + [261.0] * (steps - 10)
    assert found(losses) == 10 + stretch - 1


@pytest.mark.parametrize("per_check", [1, 3, 7, 100])
def test_how_often_losses_are_examined_changes_nothing(per_check):
    losses = [2.3, 50, 50, 2, 50, 50, 50, 50, 50, 50, 3]
    assert found(losses, total=20, per_check=per_check) == 8


def test_a_run_that_diverges_ends_with_its_rate_and_advice_also_after_a_stop(
    few_digits, tmp_path, monkeypatch
):
    with pytest.raises(FloatingPointError) as whole:
        list(run.train(tmp_path / "whole", "genet_tiny", few_digits, WILD))
    message = str(whole.value)
    for text in ("the loss diverges", "learning rate of 99", "for 8 images", "--lr 10,"):
        assert text in message
    save = run_folder.save_checkpoint

    def stop(folder, state):
        save(folder, state)
        if state["high_losses"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "save_checkpoint", stop)
    rows = run.train(
        tmp_path / "cut", "genet_tiny", few_digits, WILD, RunOptions(checkpoint_every_steps=1)
    )
    with pytest.raises(KeyboardInterrupt):
        list(rows)
    monkeypatch.setattr(run_folder, "save_checkpoint", save)
    with pytest.raises(FloatingPointError) as resumed:
        list(run.train(tmp_path / "cut", "genet_tiny", few_digits, WILD))
    assert str(resumed.value) == message


def test_the_command_ends_with_one_line_and_the_code_of_a_failure(tmp_path, capsys):
    words = ["train", "digits", "--model", "genet_tiny", "--out", str(tmp_path / "run")]
    words += ["--recipe", "scratch", "--batch-size", "16", "--lr", "100", "--epochs", "1"]
    words += ["--recipe.warmup-epochs", "0", "--resolution", "16", "--device", "cpu"]
    assert cli.run(words) == 1
    error = capsys.readouterr().err.strip()
    assert "the loss diverges" in error or "the loss became" in error
    assert len(error.splitlines()) == 1


def test_a_healthy_rate_does_not_end_a_run(few_digits, tmp_path):
    recipe = replace(WILD, lr=0.05, epochs=2)
    assert len(list(run.train(tmp_path, "genet_tiny", few_digits, recipe))) == 2


@pytest.fixture(scope="module")
def plan(few_digits, tmp_path_factory):
    """Of a run on digits, whose loss by guessing is that of ten classes."""
    plans = []
    recipe = replace(WILD, epochs=9, lr=0.1)
    folder = tmp_path_factory.mktemp("runs") / "run"
    next(run.train(folder, "genet_tiny", few_digits, recipe, announce=plans.append))
    return plans[0]


def notes(plan, losses, scores=(), **others) -> list[str]:
    """What a run says during and after epochs with these losses, and scores where they are."""
    watch, lines = run.StallWatch(plan), []
    for number, loss in enumerate(losses):
        row = dict(epoch=number + 1, epochs=len(losses), loss=loss) | others
        if scores:
            row[f"val/{plan.metric.name}"] = scores[number]
        lines.append(watch.update(row))
    return [*filter(None, lines), *([f"end: {watch.note}"] if watch.note else [])]


def test_the_loss_of_a_guess_is_the_entropy_of_the_classes(plan):
    task = find_task()
    assert replace(task, class_counts=(5,) * 10).chance_loss() == pytest.approx(math.log(10))
    skewed = replace(task, class_counts=(9, 1))
    assert skewed.chance_loss() == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))
    smoothed = replace(skewed, label_smoothing=1.0)
    assert smoothed.chance_loss() == pytest.approx(math.log(2))
    assert replace(skewed, objective="bce").chance_loss() is None
    assert skewed.chance_score(task.metric, {}) == pytest.approx(90)
    assert skewed.chance_score(task.metric, {}, (0, 1, 1, 1)) == pytest.approx(25)
    recall, three = task.find_metric("balanced_accuracy"), replace(task, class_counts=(9, 5, 1))
    assert three.chance_score(recall, {}, (0, 1, 1)) == pytest.approx(50)  # of two classes
    assert plan.task.chance_loss() == pytest.approx(math.log(10), rel=0.05)


def test_a_loss_that_stays_at_that_of_a_guess_is_said_after_a_third_and_at_the_end(plan):
    during, end = notes(plan, [2.3] * 9)
    assert during.startswith("nothing is learned in 4 of 9 epochs: the loss is 2.300")
    assert end.startswith("end: nothing is learned in 9 of 9 epochs")
    for what in ("--lr 0.01 or 0.3", "--weights", "labels"):
        assert what in during
    assert (
        "--weights"
        not in notes(replace(plan, config=replace(plan.config, weights="hub")), [2.3] * 9)[0]
    )
    assert len(notes(plan, [2.3] * 4 + [1.5] * 5)) == 1  # during it only: later epochs learned
    assert len(notes(plan, [2.0] * 5 + [2.3] * 4)) == 1  # at the end only: it lost all


def test_a_run_that_learns_says_nothing(plan):
    assert not notes(plan, [2.3] * 3 + [2.2, 2.0, 1.8, 1.5, 1.2, 1.0])
    assert not notes(plan, [2.3] * 2, **{"val/loss": 2.0})  # the epoch's mean is of its first steps
    assert not notes(plan, [4.0] * 9, [60.0] * 9)  # too sure of its errors
    assert notes(plan, [4.0] * 9, [10.0] * 9)
    assert not notes(replace(plan, batches=[()]), [2.3] * 9)  # of too few steps


def test_other_losses_are_judged_by_the_score(plan):
    guess = 100 * max(plan.task.class_counts) / sum(plan.task.class_counts)
    taught = replace(plan, resolved=replace(plan.resolved, teacher="hub"))
    assert not notes(taught, [2.3] * 9)  # without a score
    assert f"top-1 {guess:.2f} %" in notes(taught, [0.1] * 9, [guess] * 9)[0]
    assert not notes(taught, [2.3] * 9, [60.0] * 9)
    detect = find_task("detect")
    boxes = replace(plan, task=detect, metric=detect.metric)
    during, _ = notes(boxes, [8e-4] * 9, [0.0] * 9)
    assert "AP50 0.00 %" in during
    assert "--resolution above 16" in during
    assert not notes(boxes, [1.5] * 30, [0.0] * 3 + [2.0] * 27)
    assert "in 4 of 30 epochs" in notes(boxes, [8e-4] * 30, [0.0] * 30)[0]


def test_a_score_is_compared_with_the_share_of_the_frequent_class_in_the_validation_images(plan):
    """Training images of one class nearly alone, validation images of ten classes."""
    rare = replace(plan.task, class_counts=(991, *(1,) * 9))
    skewed = replace(plan, task=rare, resolved=replace(plan.resolved, teacher="hub"))
    assert not notes(skewed, [2.3] * 9, [60.0] * 9)
    share = 100 * list(plan.data.val.targets).count(0) / len(plan.data.val)
    assert f"and {share:.2f} without looking" in notes(skewed, [2.3] * 9, [share] * 9)[0]


def test_commands_and_calls_say_that_nothing_is_learned(tmp_path, capsys):
    """From images of noise at a rate that changes nothing; and that the split is small."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 4)):
        for name in "ab":
            (folder := tmp_path / "noise" / split / name).mkdir(parents=True)
            for index in range(count // 2):
                pixels = rng.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    data = str(tmp_path / "noise")
    words = ["train", data, "--model", "genet_tiny", "--out", str(tmp_path / "command")]
    words += [
        "--epochs",
        "6",
        "--batch-size",
        "4",
        "--lr",
        "1e-9",
        "--device",
        "cpu",
        "--workers",
        "0",
    ]
    assert cli.run(words) == 0
    lines = capsys.readouterr().out.splitlines()
    stalled = [line for line in lines if line.startswith("stalled")]
    assert ["3 of 6 epochs" in stalled[0], "6 of 6 epochs" in stalled[1]] == [True, True]
    assert f"warning  {few_images_line('val', 4)}" in lines
    options, changes = RunOptions(device="cpu"), dict(epochs=6, batch_size=4, lr=1e-9)
    run.train_network(data, "genet_tiny", tmp_path / "call", options=options, **changes)
    assert capsys.readouterr().err.count("nothing is learned in") == 2
