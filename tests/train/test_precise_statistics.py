"""Batch statistics that are measured at the end: those of the images, taken only where better."""

from dataclasses import replace

import pytest
import torch

from fullstride.data.loader import Batches
from fullstride.nets import fused_form
from fullstride.nets.bundle import Bundle
from fullstride.train import averages, run, run_folder
from fullstride.train.optimizer import frozen_names
from fullstride.train.prepare import PreparedRun, prepare
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS
from fullstride.train.scoring import FinalNetwork

SHORT = replace(
    DIGITS, epochs=2, warmup_epochs=0, resolution=16, batch_size=16, lr=0.01, dropout=0.5
)


def statistics(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items() if "running" in name}


def precise_of(start: PreparedRun, net, **how):
    data, task = start.data, start.task
    return averages.with_precise_statistics(net, task, data.train, start.pre, start.device, **how)


def prepared(folder, data, **changes) -> PreparedRun:
    return prepare(folder, "genet_tiny", data, replace(SHORT, **changes))


@pytest.mark.parametrize("efficiency", ["plain", "fused"])
def test_precise_statistics_are_those_of_all_training_images_at_once(
    few_digits, tmp_path, efficiency
):
    start = prepared(tmp_path / "run", few_digits, efficiency=efficiency)
    net = start.net
    if efficiency == "fused":
        fused_form.fused(net, net.spec.source)
    before = statistics(net)
    precise = precise_of(start, net)
    assert all(torch.equal(value, before[name]) for name, value in statistics(net).items())
    assert not any(module.training for module in precise.modules())
    (batch,) = Batches(few_digits.train, start.task.test_view(start.pre), batch=64).epoch(0)
    plain = prepared(tmp_path / "plain", few_digits).net.eval()
    for module in plain.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.train().momentum = 1.0
    with torch.no_grad():
        plain(batch.x)
    for name, value in statistics(plain).items():
        assert torch.allclose(precise.state_dict()[name], value, rtol=1e-3, atol=1e-4), name
        assert not torch.allclose(before[name], value)


def test_precise_statistics_are_taken_only_where_the_val_is_better(few_digits, tmp_path):
    """Of networks whose statistics are those of the images, and those of nothing."""
    start = prepared(tmp_path / "run", few_digits)
    good = precise_of(start, start.net)
    loss = start.score(good, few_digits.val).scores["loss"]
    for scale, is_better in ((1.0, False), (1e-3, True)):
        net = precise_of(start, start.net)
        for name, value in net.state_dict().items():
            if name.endswith("running_var"):
                value *= scale
        final = FinalNetwork(net, start.val_scores(net))
        chosen = averages.better_statistics(start, final)
        assert (chosen.net is not net) == is_better
        assert start.val_scores(chosen.net) == chosen.scores
        assert start.score(chosen.net, few_digits.val).scores["loss"] == pytest.approx(loss)


def test_statistics_of_frozen_stages_stay(few_digits, tmp_path):
    first = tmp_path / "first"
    list(run.train(first, "genet_tiny", few_digits, SHORT))
    recipe = replace(SHORT, freeze_stages=2)
    start = prepare(
        tmp_path / "run", "genet_tiny", few_digits, recipe, RunOptions(weights=str(first))
    )
    before = statistics(start.net)
    frozen = frozen_names(start.net, recipe)
    after = statistics(precise_of(start, start.net, frozen=frozen))
    names = [name for name in before if torch.equal(before[name], after[name])]
    assert names
    assert all(name.startswith(("stem.", "stages.0.", "stages.1.")) for name in names)
    assert not any(name.startswith(("stages.2.", "stages.3.")) for name in names)
    tail = frozen_names(start.net, replace(SHORT, frozen=("stages.2", "head")))
    after = statistics(precise_of(start, start.net, frozen=tail))
    for name, value in after.items():
        is_frozen = name.startswith(("stages.2.", "head."))
        assert torch.equal(value, before[name]) == is_frozen, name


def test_a_run_ends_with_precise_statistics_where_they_are_better(few_digits, tmp_path, capfd):
    bundles = {}
    for precise_bn in (False, True):
        folder = tmp_path / str(precise_bn)
        list(run.train(folder, "genet_tiny", few_digits, replace(SHORT, precise_bn=precise_bn)))
        bundles[precise_bn] = Bundle.load(folder / run_folder.BUNDLE)
    scores = {key: bundle.scores["val"] for key, bundle in bundles.items()}
    assert scores[True]["loss"] < scores[False]["loss"]
    assert "batch statistics" in capfd.readouterr().err
    weights = [dict(bundle.net.named_parameters()) for bundle in bundles.values()]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
