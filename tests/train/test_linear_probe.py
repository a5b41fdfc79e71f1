"""Released weights, a linear classifier on their features, and what a run ends with."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression, Ridge

from fullstride.cli import run as command
from fullstride.nets.bundle import Bundle
from fullstride.tasks import find_task
from fullstride.train import final_weights, run_folder
from fullstride.train.batches import BatchOptions
from fullstride.train.final_weights import STRENGTHS, features, fit_probe, pictures_of
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.run import train
from fullstride.train.scoring import score_bundle

SHORT = Recipe(epochs=2, batch_size=16, lr=0.05, resolution=16, hflip_prob=0.0, linear_probe=True)
HOPELESS = replace(SHORT, lr=1e-9)  # a classifier that stays random


@pytest.fixture(scope="module")
def weights(few_digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "run"
    list(train(folder, "genet_tiny", few_digits, replace(SHORT, linear_probe=False, epochs=8)))
    return str(folder / run_folder.BUNDLE)


def trained(folder, data, weights, recipe):
    list(train(folder, "genet_tiny", data, recipe, RunOptions(weights=weights)))
    return Bundle.load(folder / run_folder.BUNDLE)


@pytest.mark.parametrize("shape", [(60, 12), (12, 60)])
@pytest.mark.parametrize("copies", [1, 3])
def test_a_probe_is_the_ridge_regression_with_the_least_error_when_each_picture_is_left_out(
    shape, copies
):
    rng = np.random.default_rng(0)
    x, labels = rng.normal(3, 2, shape), rng.integers(0, 3, shape[0])
    x[:, 0] = 5.0  # a constant feature
    x[:, 1] += 3 * labels
    pictures = np.arange(len(x))
    several = np.r_[pictures, np.repeat(pictures[:4], copies - 1)]
    x, labels, pictures = x[several], labels[several], pictures[several]
    labels[-1] = 2  # copies may have other labels
    z, y = (x - x.mean(0)) / np.sqrt(x.var(0).mean()), np.eye(3)[labels]

    def left_out(strength):
        rows = []
        for row in range(len(z)):
            others = pictures != pictures[row]
            # the scale of features is that of all rows
            model = Ridge(alpha=strength, fit_intercept=True).fit(z[others], y[others])
            rows.append(model.predict(z[row : row + 1])[0])
        return np.array(rows)

    best = min(len(z) * STRENGTHS, key=lambda strength: ((y - left_out(strength)) ** 2).mean())
    expected = Ridge(alpha=best).fit(z, y).predict(z)
    probe = fit_probe(x, labels, 3, pictures)
    assert probe.cross_validated_n.tolist() == (left_out(best).argmax(1) == labels).tolist()
    logits = x @ probe.weight_kd.T + probe.bias_k
    # but for the factor of the temperature
    factor = (logits * expected).sum() / (expected**2).sum()
    assert factor > 0
    assert logits == pytest.approx(factor * expected, rel=1e-6, abs=1e-8)


def test_copies_of_a_picture_have_one_number(few_digits):
    names = few_digits.train.names[:5]
    rule = replace(few_digits.rule, copies={"a": names[1:3], "b": (names[4], "another")})
    assert pictures_of(replace(few_digits, rule=rule), names).tolist() == [0, 1, 1, 2, 3]


def test_a_probe_of_many_images_is_a_logistic_regression_with_a_fifth_of_the_penalty(monkeypatch):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 600)
    x = rng.normal(0, 1, (600, 12)) + 2 * np.eye(12)[labels] + np.arange(12)
    z = (x - x.mean(0)) / np.sqrt(x.var(0).mean())
    monkeypatch.setattr(final_weights, "STRENGTHS", np.array([0.01]))
    ridge = fit_probe(x, labels, 3)
    monkeypatch.setattr(final_weights, "MANY_IMAGES", 600)
    assert np.array_equal(ridge.weight_kd, fit_probe(x, labels, 3).weight_kd)  # 200 of a class
    monkeypatch.setattr(final_weights, "MANY_OF_CLASS", 200)
    probe = fit_probe(x, labels, 3)
    expected = LogisticRegression(C=1 / (600 * 0.2 * 0.01), tol=1e-8).fit(z, labels)
    shares = expected.predict_proba(z)
    assert softmax(x @ probe.weight_kd.T + probe.bias_k, 1) == pytest.approx(shares, abs=1e-3)
    assert abs(softmax(x @ ridge.weight_kd.T + ridge.bias_k, 1) - shares).max() > 0.1
    assert np.array_equal(probe.weight_kd, fit_probe(x, labels, 3).weight_kd)
    assert len(ridge.cross_validated_n) == 600
    assert not len(probe.cross_validated_n)  # another classifier would be ranked


def test_features_that_hardly_vary_have_small_weights_and_rounding_them_changes_little():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 400)
    x = rng.normal(0, 1, (400, 40)) + labels[:, None] * (np.arange(40) < 5)
    x[:, 20:] *= 1e-3
    probe = fit_probe(x, labels, 2)
    step = (x.max() - x.min()) / 255  # of int8 features
    rounded = np.round(x / step) * step
    first, second = ((z @ probe.weight_kd.T + probe.bias_k).argmax(1) for z in (x, rounded))
    assert (first == second).mean() > 0.98


def test_a_run_that_does_not_get_better_ends_with_the_probe_and_its_frozen_features(
    weights, few_digits, tmp_path
):
    bundle = trained(tmp_path / "probe", few_digits, weights, HOPELESS)
    other = replace(HOPELESS, linear_probe=False)
    random = trained(tmp_path / "random", few_digits, weights, other)
    assert bundle.scores["val"]["top1"] > random.scores["val"]["top1"]
    before, after = Bundle.load(weights).net.state_dict(), bundle.net.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{bundle.net.classifier}.weight", f"{bundle.net.classifier}.bias"}
    again = score_bundle(bundle, few_digits.test, "cpu").scores
    assert again["top1"] == bundle.scores["test"]["top1"]


def test_a_run_that_gets_better_than_the_probe_ends_as_without_it(
    weights, few_digits, tmp_path, monkeypatch
):
    expected = trained(tmp_path / "a", few_digits, weights, replace(SHORT, linear_probe=False))
    # a probe that is wrong everywhere
    worst = fit_probe(np.random.default_rng(0).normal(size=(20, 64)), np.arange(20) % 10, 10)

    def fit(features_nd, labels_n, classes, pictures_n):
        return worst._replace(weight_kd=np.zeros((10, features_nd.shape[1])), bias_k=np.arange(10))

    monkeypatch.setattr(final_weights, "fit_probe", fit)
    bundle = trained(tmp_path / "b", few_digits, weights, SHORT)
    for name, value in expected.net.state_dict().items():
        assert torch.equal(value, bundle.net.state_dict()[name])


def test_a_run_that_was_stopped_after_its_probe_does_not_make_it_again(
    weights, few_digits, tmp_path
):
    whole = trained(tmp_path / "whole", few_digits, weights, HOPELESS)
    rows = train(tmp_path / "part", "genet_tiny", few_digits, HOPELESS, RunOptions(weights=weights))
    next(rows)
    rows.close()
    probe = tmp_path / "part" / run_folder.PROBE
    times = {path: path.stat().st_mtime_ns for path in probe.iterdir()}
    bundle = trained(tmp_path / "part", few_digits, weights, HOPELESS)
    assert {path: path.stat().st_mtime_ns for path in probe.iterdir()} == times
    for name, value in whole.net.state_dict().items():
        assert torch.equal(value, bundle.net.state_dict()[name])


def test_features_are_the_inputs_of_the_classifier(weights, few_digits):
    bundle = Bundle.load(weights)
    task, classifier = find_task(), bundle.net.get_submodule(bundle.net.classifier)
    how = BatchOptions(bundle.preprocessing, "cpu")
    inputs, labels, _ = features(bundle.net, task, few_digits.test, how)
    assert labels.tolist() == list(few_digits.test.targets)
    with torch.inference_mode():
        correct = (classifier(inputs.float()).argmax(1) == labels).float().mean()
    assert 100 * correct.item() == pytest.approx(bundle.scores["test"]["top1"])


def test_a_probe_needs_weights_and_single_labels(weights, tmp_path, capsys):
    words = ["train", "digits", "--model", "genet_tiny", "--recipe.linear-probe", "--epochs", "1"]
    assert command([*words, "--out", str(tmp_path / "a")]) == 2
    assert "--weights" in capsys.readouterr().err
    words += ["--task", "multilabel", "--weights", weights]
    assert command([*words, "--out", str(tmp_path / "b")]) == 2
    assert "recipe.linear_probe" in capsys.readouterr().err
