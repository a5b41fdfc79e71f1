"""A loss that diverges ends a run with advice; the losses of healthy runs do not."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fullstride import cli
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
