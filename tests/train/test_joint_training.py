"""Images with and without labels in one batch: the loss of Noisy Student, step by step."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from stores import settings_of, store_of, tiny

from fullstride import tasks
from fullstride.data.dataset import open_data
from fullstride.data.prediction_store import read_key
from fullstride.data.unlabelled import open_unlabelled
from fullstride.deploy.offline import write_outputs
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.classify import Classify
from fullstride.train import run
from fullstride.train.batches import BatchOptions, JointBatches, run_batches
from fullstride.train.compute import DistributedContext
from fullstride.train.distill import read_pseudo_labels
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS, find_recipe

PIXELS = Preprocessing(resolution=16, mean=(0.5,), std=(0.5,))
LARGE = settings_of({"part_images": 999, "batch": 128})
SHORT = replace(DIGITS, epochs=2, warmup_epochs=0, batch_size=16, resolution=16, lr=0.01)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("labels") / "store"
    write_outputs("pseudo_labels", tiny(), open_unlabelled("digits"), out, 4, LARGE)
    return out


def joint(data, recipe, **how) -> JointBatches:
    batches, in_steps, fingerprint = run_batches(
        data, Classify(), BatchOptions(PIXELS, **how), recipe
    )
    assert isinstance(batches, JointBatches)
    assert fingerprint
    assert in_steps == replace(recipe, label_smoothing=0.0)
    return batches


def recipe_of(store, **changes):
    return replace(SHORT, unlabelled=str(store), unlabelled_min_confidence=0.0, **changes)


def reference(logits, labels, soft, smoothing, ratio):
    """mean CE(labelled, smoothed) + ratio * mean CE(teacher, unlabelled), by its definition."""
    log_p = logits.double().log_softmax(1)
    hard = torch.eye(10).double()[labels] * (1 - smoothing) + smoothing / 10
    first = -(hard * log_p[: len(labels)]).sum(1).mean()
    return first - ratio * (soft.double() * log_p[len(labels) :]).sum(1).mean()


@pytest.mark.parametrize(("ratio", "passes"), [(1.0, 1), (3.0, 4), (0.5, 2)])
def test_the_loss_is_noisy_students_in_one_pass_and_in_several(ratio, passes, few_digits, store):
    recipe = recipe_of(store, label_smoothing=0.1, unlabelled_ratio=ratio, grad_accum_steps=passes)
    batches = joint(few_digits, recipe)
    labelled, unlabelled = next(batches.labelled.epoch(0)), next(batches.unlabelled.epoch(0))
    assert (len(labelled.x), len(unlabelled.x)) == (16, 16 * ratio)
    whole = batches.targets.join(labelled, unlabelled)
    net = tiny().net
    with torch.no_grad():
        parts = whole.x.chunk(passes), whole.targets.chunk(passes)
        losses = [Classify(0.0).loss(net(x), targets) for x, targets in zip(*parts, strict=True)]
        logits = net(torch.cat([labelled.x, unlabelled.x]))
    soft = read_pseudo_labels(store).dense(unlabelled.targets)
    expected = reference(logits, labelled.targets, soft, 0.1, ratio)
    assert torch.stack(losses).mean().item() == pytest.approx(expected.item(), rel=1e-5)
    hard = torch.tensor((0.9 + 0.01) * (1 + ratio))  # the largest entry of a labelled target
    for targets in whole.targets.chunk(passes):
        assert torch.isclose(targets.amax(1), hard).sum() == 16 / passes


def test_the_batch_of_a_step_is_a_function_of_its_number(few_digits, store):
    recipe = recipe_of(store, unlabelled_ratio=20.0)  # 5 batches an epoch, 4 of labelled images
    batches = joint(few_digits, recipe)
    assert (len(batches), len(batches.unlabelled)) == (4, 5)
    whole = [list(batches.epoch(number)) for number in range(3)]
    again = joint(few_digits, recipe, workers=1)
    for number, start in ((1, 2), (2, 0), (0, 1)):
        for ours, theirs in zip(again.epoch(number, start), whole[number][start:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    again.close()
    first, later = whole[0][0].x, whole[1][0].x
    assert not torch.equal(first, later)


def test_two_processes_share_both_kinds_of_images(few_digits, store):
    recipe = recipe_of(store, unlabelled_ratio=2.0)
    whole = next(iter(joint(few_digits, recipe).epoch(0)))
    halves = [
        next(iter(joint(few_digits, recipe, context=DistributedContext(rank, 2)).epoch(0)))
        for rank in range(2)
    ]
    for name in ("x", "targets"):
        rows = [
            {row.numpy().tobytes() for row in getattr(batch, name)} for batch in (whole, *halves)
        ]
        assert rows[1] | rows[2] == rows[0]
    net = tiny().net
    with torch.no_grad():
        losses = [Classify(0.0).loss(net(each.x), each.targets) for each in (whole, *halves)]
    assert (losses[1] + losses[2]).item() / 2 == pytest.approx(losses[0].item(), rel=1e-4)


def weights_of(folder):
    return tasks.load(folder).net.state_dict()


def test_a_run_resumes_bit_for_bit_and_only_with_the_same_labels(few_digits, store, tmp_path):
    recipe = recipe_of(store, mixup=0.2, label_smoothing=0.1, unlabelled_per_class=150)
    rows = list(run.train(tmp_path / "whole", "genet_tiny", few_digits, recipe))
    assert len(rows) == 2
    started = run.train(
        tmp_path / "stopped", "genet_tiny", few_digits, recipe, RunOptions(checkpoint_every_steps=3)
    )
    next(started)
    started.close()
    list(run.train(tmp_path / "stopped", "genet_tiny", few_digits, recipe))
    whole, stopped = weights_of(tmp_path / "whole"), weights_of(tmp_path / "stopped")
    assert all(torch.equal(value, stopped[name]) for name, value in whole.items())
    config = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert config["recipe"] == {**asdict(recipe), **config["recipe"]}
    assert config["recipe"]["label_smoothing"] == 0.1
    other = tmp_path / "other"
    write_outputs(
        "pseudo_labels",
        tiny(seed=1),
        open_unlabelled("digits"),
        other,
        4,
        LARGE,
    )
    moved = store.rename(store.with_name("moved"))
    try:
        other.rename(store)
        with pytest.raises(ValueError, match="pseudo_labels is"):
            list(run.train(tmp_path / "whole", "genet_tiny", few_digits, recipe))
    finally:
        store.rename(other)
        moved.rename(store)


@pytest.mark.parametrize(
    "changes",
    [
        dict(loss="bce"),
        dict(teacher="runs/x"),
        dict(triplet=1.0, per_class=2),
        dict(grow_from=8),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_cannot_be_combined_is_refused(changes, store):
    with pytest.raises(ValueError, match=f"recipe.unlabelled with recipe.{next(iter(changes))}"):
        recipe_of(store, **changes)


def test_labels_of_other_images_or_without_confident_ones_are_refused(few_digits, store, tmp_path):
    array = np.zeros((2, 1))
    low = store_of(tmp_path / "low", array.astype(np.int32), array.astype(np.float16))
    named = replace(few_digits, classes=read_key(low).classes)
    with pytest.raises(ValueError, match="lower recipe.unlabelled_min_confidence"):
        joint(named, replace(recipe_of(low), unlabelled_min_confidence=0.5))
    with pytest.raises(ValueError, match="unlabelled_ratio 0.3"):
        joint(few_digits, recipe_of(store, unlabelled_ratio=0.3, grad_accum_steps=2))
    with pytest.raises(ValueError, match="gone"):
        joint(few_digits, recipe_of(tmp_path / "gone"))
    photos = tmp_path / "photos"
    photos.mkdir()
    for index in range(3):
        open_data("digits").train.picture(index).save(photos / f"{index}.png")
    out = tmp_path / "labels"
    write_outputs(
        "pseudo_labels",
        tiny(),
        open_unlabelled(str(photos)),
        out,
        4,
        LARGE,
    )
    (photos / "0.png").unlink()
    with pytest.raises(ValueError, match="label them again"):
        joint(few_digits, recipe_of(out))


def test_the_named_recipe_keeps_the_supervised_hyperparameters():
    ours, supervised = find_recipe("resnet_rs_noisy_student"), find_recipe("resnet_rs_152_224")
    changes = {k for k, v in asdict(ours).items() if v != getattr(supervised, k)}
    assert changes == {"unlabelled_ratio", "unlabelled_per_class"}
    assert (ours.unlabelled_ratio, ours.unlabelled_min_confidence) == (3.0, 0.3)
    assert ours.unlabelled_per_class == 130_000
