"""Losses of classification and weights of classes, against timm, torchvision and scikit-learn."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy
from torchvision.ops import sigmoid_focal_loss

from fullstride.tasks.classify import Classify
from fullstride.tasks.losses import (
    binary_cross_entropy,
    class_weights,
    cross_entropy,
    focal_loss,
    image_weights,
    smoothed,
)
from fullstride.tasks.multilabel import MultiLabel
from fullstride.train.recipes.named import FINETUNE

LOGITS = 3 * torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.double)
LABELS = torch.tensor([0, 1, 2, 3, 4, 4, 0, 0, 1, 3, 2, 0])
WEIGHTS = torch.tensor([0.2, 0.5, 1.0, 2.0, 3.0], dtype=torch.double)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_binary_cross_entropy_equals_timms_also_of_mixed_and_binary_targets(
    mixed, threshold, reduction
):
    timms = BinaryCrossEntropy(0.1, threshold or None, sum_classes=reduction == "sum")
    wanted = timms(LOGITS, LABELS)
    targets = LABELS
    if mixed:  # timm smooths mixed targets where it mixes them
        wanted = timms(LOGITS, mixup_target(LABELS, 5, lam=0.7, smoothing=0.1).double())
        targets = 0.7 * F.one_hot(LABELS, 5) + 0.3 * F.one_hot(LABELS.flip(0), 5)
    ours = binary_cross_entropy(
        LOGITS, targets, threshold=threshold, reduction=reduction, smoothing=0.1
    )
    assert ours.item() == pytest.approx(wanted.item(), abs=1e-6)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_loss_of_two_classes_equals_torchvisions_of_their_difference(gamma):
    logits, labels = LOGITS[:, :2], LABELS % 2
    difference = logits[:, 1] - logits[:, 0]
    wanted = sigmoid_focal_loss(
        difference, labels.double(), alpha=-1, gamma=gamma, reduction="mean"
    )
    assert focal_loss(logits, labels, gamma=gamma).item() == pytest.approx(wanted.item(), rel=1e-9)


@pytest.mark.parametrize("targets", [LABELS, smoothed(LABELS, LOGITS, 0.4)])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_focal_loss_with_gamma_0_is_the_cross_entropy(targets, weights):
    weights = None if weights is None else image_weights(targets, weights)
    options = dict(smoothing=0.1, weights_n=weights)
    focal = focal_loss(LOGITS, targets, gamma=0.0, **options)
    assert focal.item() == pytest.approx(cross_entropy(LOGITS, targets, **options).item(), rel=1e-9)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 2.0])
def test_the_gradient_of_focal_loss_is_finite_for_a_certain_class(gamma):
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0]], requires_grad=True)
    focal_loss(logits, torch.tensor([0, 0]), gamma=gamma).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", ["cross_entropy", "bce", "focal"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_weighted_loss_is_the_mean_of_the_losses_of_images_times_the_weights_of_classes(
    name, smoothing, mixed
):
    """Image by image; a mixed image has the mean weight of both of its classes."""
    task = Classify(
        smoothing, objective=name, class_weights="balanced", class_counts=(5, 2, 2, 2, 1)
    )
    share, others = (0.7, LABELS.flip(0)) if mixed else (1.0, LABELS)
    targets = share * F.one_hot(LABELS, 5).double() + (1 - share) * F.one_hot(others, 5)
    targets = targets if mixed else LABELS
    raw = torch.tensor([12 / 5 / count for count in task.class_counts], dtype=torch.double)
    weights = share * raw[LABELS] + (1 - share) * raw[others]
    alone = replace(task, class_weights="none")
    one_by_one = [alone.loss(LOGITS[i : i + 1], targets[i : i + 1]) for i in range(12)]
    wanted = (torch.stack(one_by_one) * weights).mean()
    assert task.loss(LOGITS, targets).item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_weights_of_classes_do_not_change_the_best_answer_to_an_image(share):
    """The gradient is 0 where the softmax is the target: smoothed labels and a teacher's."""
    task = Classify(0.1, share, class_weights="balanced", class_counts=(190, 10))
    teacher = torch.tensor([[0.7, 0.3], [0.4, 0.6]], dtype=torch.double)
    target = (1 - share) * torch.tensor([[0.95, 0.05], [0.05, 0.95]]) + share * teacher
    logits = target.log().requires_grad_()
    task.loss(logits, torch.tensor([0, 1]), teacher).backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-7


def test_the_weighted_loss_of_a_batch_does_not_depend_on_how_it_is_divided():
    task = Classify(0.1, class_weights="sqrt", class_counts=(50, 2, 2, 2, 1))
    parts = [task.loss(LOGITS[i : i + 3], LABELS[i : i + 3]) for i in range(0, 12, 3)]
    whole = task.loss(LOGITS, LABELS).item()
    assert torch.stack(parts).mean().item() == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("kind", [Classify, MultiLabel])
def test_weights_of_classes_need_the_images_of_each_class(kind):
    task = kind(class_weights="balanced")
    with pytest.raises(ValueError, match=r"class_weights balanced .* use task.for_data\(data\)"):
        task.loss(LOGITS, F.one_hot(LABELS, 5))


def test_balanced_weights_equal_those_of_scikit_learn():
    counts = (50, 7, 1, 20)
    labels = np.repeat(np.arange(4), counts)
    wanted = compute_class_weight("balanced", classes=np.arange(4), y=labels)
    assert class_weights(counts, "balanced") == pytest.approx(wanted, rel=1e-12)
    roots = np.sqrt(wanted) / np.sqrt(wanted)[labels].mean()
    assert class_weights(counts, "sqrt") == pytest.approx(roots, rel=1e-12)


def test_a_class_without_training_images_has_no_weight_and_changes_no_other():
    first, second = class_weights((6, 2), "balanced")
    assert class_weights((6, 0, 2), "balanced") == (first, 0.0, second)


def test_the_loss_of_a_batch_is_unchanged_where_no_option_is_set():
    """The same bits as before there were options: old runs resume."""
    logits = LOGITS.float()
    task = Classify().with_options(replace(FINETUNE, label_smoothing=0.1))
    assert torch.equal(
        task.loss(logits, LABELS), F.cross_entropy(logits, LABELS, label_smoothing=0.1)
    )


REFUSED = (
    (dict(loss="bce", teacher="resnet152"), "recipe.teacher"),
    (dict(balanced_sampling=1.0, class_weights="sqrt"), "recipe.class_weights"),
    (dict(balanced_sampling=0.5, per_class=4), "recipe.per_class"),
)


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_options_that_exclude_each_other_are_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        replace(FINETUNE, **fields)
