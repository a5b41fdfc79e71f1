"""Fits a linear classifier to the features of a frozen network: ridge regression, in closed form.

Training may begin with it (LP-FT, arXiv:2202.10054), and may end with it, or between the two
(WiSE-FT, arXiv:2109.01903).

Letters: N images, D features, K classes.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fullstride.data.dataset import Images
from fullstride.io.console import print_note
from fullstride.nets import fused_form
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.timm_wrapper import TimmNetwork
from fullstride.tasks import build_head
from fullstride.tasks.classify import fit_temperature
from fullstride.tasks.task import Metric, Task
from fullstride.train import run_folder
from fullstride.train.prepare import PreparedRun
from fullstride.train.recipes.named import MAX_PROBE_CLASSES
from fullstride.train.scoring import FinalNetwork, averaged, quality, scoring_batches

MAX_IMAGES = 5_000  # of the training images, evenly chosen
# Of the weights at the end of training, to one of the probe: in 13 trainings on 60 to 311 images
# the test is 72.7, 74.1, 75.5, 76.3 and 75.2 % at 0, 1/4, 1/2, about 3/4 and 1 (docs/log.md).
TRAINED_PARTS = 3
STRENGTHS = 10.0 ** np.arange(-3, 2.1, 0.5)  # of the penalty, per image


class LinearProbe(NamedTuple):
    """Logits of features are `features_nd @ weight_kd.T + bias_k`."""

    weight_kd: np.ndarray  # float64
    bias_k: np.ndarray


def fit_probe(features_nd: np.ndarray, labels_n: np.ndarray, classes: int) -> LinearProbe:
    """Ridge regression of the features on 1 for the class of an image and 0 for others.

    All features are divided by one number. With a deviation of 1 for each, those that hardly vary
    would have large weights, which the rounding of int8 files turns into noise (docs/log.md).

    The strength has the least squared error of each image by the regression on all others, which
    has a closed form (the PRESS statistic). The predictions so made of each image also give the
    factor that makes logits of the outputs, by `fit_temperature`.
    """
    n = len(features_nd)
    mean_d = features_nd.mean(0)
    deviation = np.sqrt(features_nd.var(0).mean()) or 1.0
    x = (features_nd - mean_d) / deviation
    targets_nk = np.eye(classes)[labels_n]
    shares_k = targets_nk.mean(0)
    left, squares, right = _singular(x)
    projected = left.T @ (targets_nk - shares_k)
    best: tuple[float, np.ndarray, np.ndarray] | None = None
    for strength in n * STRENGTHS:
        shrinkage = squares / (squares + strength)
        # the share of an image in its own prediction, with that of the mean
        own_n = np.minimum((left**2 * shrinkage).sum(1) + 1 / n, 1 - 1e-9)
        residuals_nk = targets_nk - shares_k - (left * shrinkage) @ projected
        without_nk = residuals_nk / (1 - own_n)[:, None]
        error = float((without_nk**2).mean())
        if best is None or error < best[0]:
            best = error, shrinkage, targets_nk - without_nk
    assert best is not None
    _, shrinkage, predicted_nk = best
    weight_dk = right @ ((shrinkage / np.sqrt(squares))[:, None] * projected) / deviation
    temperature = fit_temperature(torch.from_numpy(predicted_nk), torch.from_numpy(labels_n))
    bias_k = shares_k - mean_d @ weight_dk
    return LinearProbe(weight_dk.T / temperature, bias_k / temperature)


def _singular(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Left vectors, squared values and right vectors of `x`, without those of rank 0."""
    is_long = len(x) >= x.shape[1]
    squares, vectors = np.linalg.eigh(x.T @ x if is_long else x @ x.T)
    positive = squares > squares[-1] * max(x.shape) * np.finfo(float).eps
    squares, vectors = squares[positive], vectors[:, positive]
    others = (x if is_long else x.T) @ vectors / np.sqrt(squares)
    left, right = (others, vectors) if is_long else (vectors, others)
    return left, squares, right


@torch.inference_mode()
def features(
    net: Backbone,
    task: Task,
    images: Images,
    pre: Preprocessing,
    device: torch.device | str,
    workers: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of the classifier (N, D) in float64, labels (N,) and indices (N,), of those images
    that can be read.
    """
    net.to(device).eval()
    batches = scoring_batches(task, images, pre, device, workers)
    try:
        rows = [(net.embed(x).double().cpu(), y.cpu(), i.cpu()) for x, y, i in batches.epoch(0)]
    finally:
        batches.close()
    inputs, labels, indices = (torch.cat(each) for each in zip(*rows, strict=True))
    return inputs, labels, indices


def save_probe(run: PreparedRun) -> None:
    """Fit the classifier of a copy of the untrained network, and save its bundle, if there is none.

    It is fitted to the training images, or `MAX_IMAGES` of them, and has its scores on the
    validation split. A network without a linear classifier has no probe, which is printed. Raises
    ValueError for a task without single labels, and for too many classes.
    """
    classes = len(run.data.classes)
    if not run.task.single_label or classes > MAX_PROBE_CLASSES:
        raise ValueError(
            f"recipe.linear_probe is for one of up to {MAX_PROBE_CLASSES:,} classes for each "
            f"image, not for {classes:,} classes of the task {run.task.name}: leave it out"
        )
    if has_probe(run):
        return
    net = copy.deepcopy(fused_form.unpadded(run.net, run.spec)).to(run.device)
    if not has_linear_classifier(net):
        if run.context.is_rank_zero:
            print_note(f"{run.config.model} has no linear classifier, and so no linear probe")
        return
    images, number = run.data.train, min(len(run.data.train), MAX_IMAGES)
    some = images.subset([index * len(images) // number for index in range(number)])
    inputs, labels, _ = features(net, run.task, some, run.pre, run.device, run.workers)
    probe = fit_probe(inputs.numpy(), labels.numpy(), classes)
    classifier = net.get_submodule(net.classifier)
    with torch.no_grad():
        for parameter, value in zip(classifier.parameters(), probe, strict=True):
            parameter.copy_(torch.from_numpy(value))
    bundle = run.bundle(net, {"val": run.val_scores(net)})
    run.context.on_rank_zero(bundle.save, run.folder / run_folder.PROBE)


def has_linear_classifier(net: Backbone) -> bool:
    """Whether the logits are one linear function, with biases, of what `embed` returns."""
    if len(net.classifiers) > 1 or (isinstance(net, TimmNetwork) and not net.embeds):
        return False
    layer = net.get_submodule(net.classifier)
    return isinstance(layer, nn.Linear) and isinstance(layer.bias, Tensor)


def has_probe(run: PreparedRun) -> bool:
    return (run.folder / run_folder.PROBE).is_dir()


def begin_with_probe(run: PreparedRun) -> None:
    """Give the network of a run the classifier that `save_probe` saved, if there is one."""
    if has_probe(run):
        probe = Bundle.load(run.folder / run_folder.PROBE, build_head).net
        run.net.get_submodule(run.net.classifier).load_state_dict(
            probe.get_submodule(probe.classifier).state_dict()
        )


def probe_network(run: PreparedRun) -> FinalNetwork:
    """The network with frozen features that `save_probe` saved, and its validation scores."""
    bundle = Bundle.load(run.folder / run_folder.PROBE, build_head)
    return FinalNetwork(bundle.net.to(run.device), bundle.scores["val"])


def with_probe(run: PreparedRun, final: FinalNetwork) -> FinalNetwork:
    """The network that a run with a probe ends with: `final`, the probe, or their mean.

    With frozen statistics, where training began with the probe, this is a mean of the weights of
    both, with `TRAINED_PARTS` to 1, unless the validation split is better with one of the two by
    more than its standard error: networks between them are as good on such images and better on
    others (arXiv:2109.01903), and those of few images may have unlearned what the probe knows. With
    statistics of batches a mean of the weights is no network, and the better one of the two is
    taken. It is `final` where there is no probe or no validation split.
    """
    if not (has_probe(run) and run.data.val):
        return final
    probe = probe_network(run)
    both = {"after training": final, "by the linear probe, without training": probe}
    how, best = max(both.items(), key=lambda item: quality(item[1].scores, run.metric))
    if run.recipe.frozen_statistics and final.scores:
        net = copy.deepcopy(fused_form.unpadded(final.net, run.spec))
        ends = [*[net.state_dict()] * TRAINED_PARTS, probe.net.state_dict()]
        net.load_state_dict(averaged(ends))
        mean = replace(final, net=net, scores=run.val_scores(net))
        if not is_clearly_better(best.scores, mean.scores, run.metric, len(run.data.val)):
            how, best = "between the linear probe and the end of training", mean
    if best is not final and run.context.is_rank_zero:
        print_note(
            f"the bundle is the network {how}: validation {best.described(run.metric)}, after "
            f"training {final.described(run.metric)}"
        )
    return best


def is_clearly_better(
    scores: Mapping[str, float], other: Mapping[str, float], metric: Metric, images: int
) -> bool:
    """Whether `scores` are better by more than the standard error of a share of so many `images`.

    For a metric that is no share of images, whether they are better.
    """
    if not other or not scores:
        return bool(scores)
    if metric.name != "top1":
        return quality(scores, metric) > quality(other, metric)
    share = scores["top1"] / 100
    error = 100 * math.sqrt(share * (1 - share) / images)
    return scores["top1"] - other["top1"] > error
