"""Probabilities are calibrated by one number, which does not change the order of the classes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar

from fullstride import tasks
from fullstride.nets.bundle import Bundle, read_metadata
from fullstride.report.training_progress import calibration_line
from fullstride.tasks.classify import LIMITS, Classify, fit_temperature
from fullstride.train import run
from fullstride.train.batches import BatchOptions
from fullstride.train.recipes.named import DIGITS
from fullstride.train.scoring import HeldOutputs, score_images

SHORT = replace(DIGITS, epochs=2, warmup_epochs=0, batch_size=16, resolution=16, lr=0.01)


def logits(images=100, classes=7, scale=3.0):
    rng = torch.Generator().manual_seed(images)
    labels = torch.randint(classes, (images,), generator=rng)
    values = torch.randn(images, classes, generator=rng, dtype=torch.float64)
    values[torch.arange(images), labels] += 2
    return scale * values, labels


def smoothed_loss(values, labels, temperature):
    """Cross-entropy with a probability of (N + 1) / (N + 2) for the label."""
    n, k = values.shape
    rest = 1 / (n + 2)
    target = F.one_hot(labels, k) * (1 - rest - rest / (k - 1)) + rest / (k - 1)
    return -(target * (values / temperature).log_softmax(1)).sum(1).mean().item()


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("classes", [2, 7])
def test_the_temperature_is_the_one_that_scipy_finds(scale, classes):
    values, labels = logits(classes=classes, scale=scale)
    best = minimize_scalar(
        lambda each: smoothed_loss(values, labels, each),
        bounds=LIMITS,
        method="bounded",
        options={"xatol": 1e-9},
    )
    fitted = fit_temperature(values, labels)
    assert fitted == pytest.approx(best.x, rel=1e-5)
    assert smoothed_loss(values, labels, fitted) <= best.fun + 1e-15


def test_a_multiple_of_the_logits_has_that_multiple_of_the_temperature():
    values, labels = logits()
    assert fit_temperature(3 * values, labels) == pytest.approx(3 * fit_temperature(values, labels))


def test_images_that_are_all_right_or_all_wrong_have_a_temperature_too():
    labels = torch.arange(100) % 5
    right = F.one_hot(labels, 5).float()
    sure = fit_temperature(right, labels)
    assert LIMITS[0] < sure < 1
    # as sure as 101 right of 102 warrant
    assert (right / sure).softmax(1).amax(1)[0].item() == pytest.approx(101 / 102, rel=1e-4)
    assert fit_temperature(right, (labels + 1) % 5) == LIMITS[1]
    assert fit_temperature(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long)) in LIMITS


def test_logits_of_two_processes_have_the_temperature_of_all():
    values, labels = logits()
    parts = [HeldOutputs() for _ in range(2)]
    for rank, part in enumerate(parts):
        part.update(values[rank::2], labels[rank::2])
    parts[0].merge(parts[1])
    fitted = parts[0].fit(Classify()).temperature
    assert fitted == pytest.approx(fit_temperature(values, labels), rel=1e-9)


def test_activated_outputs_are_divided_and_keep_their_order():
    values, _ = logits()
    task = Classify(temperature=2.5)
    np.testing.assert_allclose(task.activate(values), (values / 2.5).softmax(1), rtol=1e-12)
    assert torch.equal(task.activate(values).argsort(1), values.argsort(1))


def test_a_run_stores_its_temperature_with_the_error_before_and_after(few_digits, tmp_path):
    list(run.train(tmp_path / "run", "genet_tiny", few_digits, SHORT))
    bundle = tasks.load(tmp_path / "run")
    plain = score_images(
        bundle.net, Classify(), few_digits.test, BatchOptions(bundle.preprocessing, "cpu")
    )
    task = tasks.task_of(bundle)
    scaled = score_images(
        bundle.net, task, few_digits.test, BatchOptions(bundle.preprocessing, "cpu")
    )
    saved = bundle.scores["test"]
    assert bundle.temperature != 1
    assert abs(plain.scores["ece"] - scaled.scores["ece"]) > 0.1
    assert saved == pytest.approx(scaled.scores, rel=1e-4)
    assert saved["ece_uncalibrated"] == pytest.approx(plain.scores["ece"], rel=1e-4)
    assert saved["loss"] == pytest.approx(plain.scores["loss"], rel=1e-4)
    file = json.loads((tmp_path / "run" / "scores.json").read_text())
    assert file["splits"]["test"]["scores"] == saved
    assert [each["name"] for each in file["splits"]["test"]["by_class"]] == [*bundle.classes]
    assert sum(file["splits"]["test"]["confusion"]["images"]) == len(few_digits.test)


def test_a_run_may_go_without_and_earlier_bundles_have_none(few_digits, tmp_path):
    recipe = replace(SHORT, calibrate=False)
    list(run.train(tmp_path / "run", "genet_tiny", few_digits, recipe))
    bundle = tasks.load(tmp_path / "run")
    assert bundle.temperature == 1
    assert "ece_uncalibrated" not in bundle.scores["test"]
    path = tmp_path / "run" / "bundle" / "bundle.json"
    content = json.loads(path.read_text())
    del content["temperature"]
    path.write_text(json.dumps(content))
    assert Bundle.load(path.parent).temperature == 1
    path.write_text(json.dumps({**content, "temperature": 0}))
    with pytest.raises(ValueError, match="temperature"):
        Bundle.load(path.parent)


def test_without_a_val_there_is_no_temperature_and_it_is_said(few_digits, tmp_path):
    whole = replace(few_digits, val=few_digits.val.subset(()))
    list(run.train(tmp_path / "run", "genet_tiny", whole, SHORT))
    metadata = read_metadata(tmp_path / "run" / "bundle")
    assert metadata.temperature == 1
    assert "no validation split" in calibration_line(metadata, SHORT)
    assert not calibration_line(metadata, replace(SHORT, calibrate=False))
