"""Chooses a run's final weights: precise batch statistics, averages of epochs, a linear probe.

Letters: N images, D features, K classes.
"""

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fullstride.data.dataset import DataSet, Images
from fullstride.io.console import count_of, print_note
from fullstride.io.records import Record, write_json
from fullstride.io.writing import check_output
from fullstride.nets import padding
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import OUTPUT, Bundle, read_metadata
from fullstride.nets.timm_wrapper import TimmNetwork
from fullstride.tasks import build_head
from fullstride.tasks.classify import fit_temperature
from fullstride.tasks.task import Metric, Task
from fullstride.train import run_folder
from fullstride.train.averages import BATCH_NORM
from fullstride.train.batches import BatchOptions
from fullstride.train.compute import SINGLE_PROCESS, numerics
from fullstride.train.optimizer import frozen_names
from fullstride.train.prepare import PreparedRun
from fullstride.train.recipes.named import MAX_PROBE_CLASSES
from fullstride.train.scoring import FinalNetwork, averaged, scoring_batches

# Precise BN: batch statistics of the final weights on training images in evaluation views match
# evaluation better than statistics of augmented images in small batches (arXiv:2105.07576, section
# 3; for other resolutions: arXiv:1906.06423).


MOST_IMAGES = 64 * 128  # of the training images, evenly spaced, for statistics or for a probe


def better_statistics(run: PreparedRun, final: FinalNetwork) -> FinalNetwork:
    """`final`; or a copy with precise statistics if its validation score is better.

    It is `final` without a validation split, or if training changes no statistics.
    """
    if not run.data.val or not batch_norms(final.net, frozen_names(final.net, run.recipe)):
        return final
    net = of_run(run, final.net)
    precise = replace(final, net=net, scores=run.val_scores(net))
    if not precise.is_better(final, run.metric):
        return final
    if run.context.is_rank_zero:
        print_note(
            "the batch statistics are measured anew on training images without augmentation: "
            f"validation {precise.described(run.metric)}, before {final.described(run.metric)}"
        )
    return precise


def of_run(run: PreparedRun, net: Backbone) -> Backbone:
    """Copy `net` with batch statistics of the run's training images."""
    frozen = frozen_names(net, run.recipe)
    return with_precise_statistics(net, run.task, run.data.train, run.scoring, frozen=frozen)


@torch.no_grad()
def with_precise_statistics(
    net: Backbone,
    task: Task,
    images: Images,
    how: BatchOptions,
    *,
    frozen: Collection[str] = (),
) -> Backbone:
    """Copy `net` with batch statistics that are means over batches of `images`.

    All images are used, or `MOST_IMAGES`, in evaluation views and whole batches. Norms with
    `frozen` parameters keep their statistics.
    """
    precise = copy.deepcopy(net).eval()
    norms = batch_norms(precise, frozen)
    number = min(len(images), MOST_IMAGES)
    number -= number % task.scoring_batch if number > task.scoring_batch else 0
    some = images.spaced(number)
    momenta = [norm.momentum for norm in norms]
    computing = numerics(tf32=False, benchmark=False, deterministic=False)
    with closing(scoring_batches(task, some, how)) as batches, computing:
        for index, (x, _, _) in enumerate(batches.epoch(0)):
            if len(x) < 2:  # one image has no variance where a map has one pixel
                continue
            for norm in norms:
                for value in () if index else (norm.running_mean, norm.running_var):
                    if value is not None:
                        value.zero_()  # 0 x a value that is not finite is NaN
                norm.train().momentum = 1 / (index + 1)
            precise(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    how.context.sync_buffers(precise)
    return precise.eval()


def batch_norms(net: Backbone, frozen: Collection[str] = ()) -> list[BATCH_NORM]:
    """The batch norms of `net` without `frozen` parameters."""
    return [
        module
        for name, module in net.named_modules()
        if isinstance(module, BATCH_NORM)
        and not any(f"{name}.{part}" in frozen for part, _ in module.named_parameters())
    ]


# Averages of several epochs: greedy soups, chosen by the validation split.
#
# Source: model soups, arXiv:2203.05482, here of epochs of one run. Batch statistics are averaged
# like weights, or measured for each average with the recipe's `precise_bn`.


EPOCH = "epoch"  # key of an ingredient's epoch in its scores


def check_slots(run: PreparedRun) -> None:
    """Raise ValueError if other files are where epochs will be saved; write nothing."""
    for slot in slots(run):
        check_output(slot, OUTPUT)


def save_epoch(
    run: PreparedRun, rows: list[dict[str, Any]], average: Backbone, scores: Mapping[str, float]
) -> None:
    """Save the network of the last row if it is among the best of `rows`.

    It replaces a network that no longer is. The log gets the row afterwards: after a stop in
    between, the epoch is trained again, with the same result.
    """
    count, epoch = run.recipe.soup, rows[-1]["epoch"]
    best = {row["epoch"] for row in run_folder.best_rows(rows, run.metric, count)}
    if epoch in best:
        held = {slot: saved_scores(slot).get(EPOCH) for slot in slots(run)}
        slot = next(slot for slot, other in held.items() if other not in best - {epoch})
        run.bundle(average, {"val": {**scores, EPOCH: epoch}}).save(slot)


def better_average(run: PreparedRun, final: FinalNetwork) -> FinalNetwork:
    """`final`; or an average of epochs whose validation score is better.

    Epochs are tried in order, the best first; each stays if it makes the average better.
    """
    candidates = [
        (run.metric.quality(scores), -int(scores[EPOCH]), slot)
        for slot in slots(run)
        if (scores := saved_scores(slot))
    ]
    best, states = None, []
    for _, minus_epoch, slot in sorted(candidates, reverse=True):
        state = Bundle.load(slot, build_head).net.state_dict()
        net = copy.deepcopy(padding.to_unpadded(final.net, run.spec))
        net.load_state_dict(averaged([*states, state]))
        if run.recipe.measures_statistics:
            net = of_run(run, net)
        is_saved = not states and not run.recipe.measures_statistics  # then scores are known
        scores = saved_scores(slot) if is_saved else run.val_scores(net)
        trial = FinalNetwork(net, scores, (*(best.epochs if best else ()), -minus_epoch))
        if best is None or trial.is_better(best, run.metric):
            best, states = trial, [*states, state]
    is_better = best and len(states) > 1 and best.is_better(final, run.metric)
    if run.context.is_rank_zero:
        alone = f"the final weights ({final.described(run.metric)})"
        print_note(
            f"the bundle is the average of epochs {', '.join(map(str, sorted(best.epochs)))}, on "
            f"the validation split {best.described(run.metric)}, and not {alone}"
            if best and is_better
            else f"no average of epochs is better on the validation split than {alone}"
        )
    return replace(best, epochs=tuple(sorted(best.epochs))) if best and is_better else final


def slots(run: PreparedRun) -> list[Path]:
    return [run.folder / run_folder.SOUP / str(number) for number in range(1, run.recipe.soup + 1)]


def saved_scores(slot: Path) -> Mapping[str, float]:
    """The epoch and validation scores of the network in `slot`; empty without a network."""
    return read_metadata(slot).scores["val"] if slot.is_dir() else {}


# A linear probe: a classifier on the features of a frozen network, by ridge regression in closed
# form, and from many images on by logistic regression. Training may begin with it (LP-FT,
# arXiv:2202.10054), and end with it or with a mean of it and the trained weights (WiSE-FT,
# arXiv:2109.01903).


# Standard errors by which the probe, or the end of training, must be better than their mean. The
# end needs more, since validation images like the training images do not show what was unlearned:
# with 250 solar cells two means have 83.9 and 83.8 % of the test, and the ends, better on the
# validation images by 1.5 and 2.3 errors, 80.3 and 78.9 (docs/log.md).
CLEAR_PROBE, CLEAR_END = 1, 3
# By BARRIER and an image the mean must be worse than what lies between the scores of both, and then
# the end better than the probe by CLEAR_OF_PROBE. With 1,292 cells of one kind it is by .7, 1.0 and
# 1.5, and has 38 to 45 % of the other kind, the probe 79 to 80 (docs/log.md).
BARRIER, CLEAR_OF_PROBE = 0.5, 2
TRAINED, UNTRAINED = "after training", "by the linear probe, without training"
STRENGTHS = 10.0 ** np.arange(-3, 2.1, 0.5)  # penalties per image
# The fewest images, and images a class, of a logistic regression. Ridge and logistic regression
# have 82.1 and 81.6 % of the test of Fashion-MNIST with 1,000 images, 83.7 and 83.3 with 2,000,
# 85.5 and 85.8 with 5,000, 85.9 and 86.9 with 8,192 (docs/log.md).
MANY_IMAGES, MANY_OF_CLASS = 5_000, 500
# The penalty of the logistic / the penalty of the ridge regression, and the steps; 60 steps would
# change the test by 0.15 points.
LOGISTIC_STRENGTH, LOGISTIC_STEPS = 0.2, 20


class LinearProbe(NamedTuple):
    """Logits of features are `features_nd @ weight_kd.T + bias_k`."""

    weight_kd: np.ndarray  # float64
    bias_k: np.ndarray
    # (N,) whether a ridge regression on other images predicts an image's class; (0,) for a logistic
    # regression
    cross_validated_n: np.ndarray


@dataclass(frozen=True)
class CrossValidation:
    """The training images of a linear probe, each predicted by a probe of all other pictures."""

    correct: str  # 1 or 0 for each image, whether its class is predicted; "" for many images


CROSS_VALIDATION_FILE = "cross_validation.json"  # in the folder of a run, beside the probe
CROSS_VALIDATION = Record(CrossValidation, "the cross-validation of a linear probe", ("correct",))


def fit_probe(
    features_nd: np.ndarray,
    labels_n: np.ndarray,
    classes: int,
    pictures_n: np.ndarray | None = None,
) -> LinearProbe:
    """Fit a ridge regression from features to 1 for an image's class and 0 for other classes.

    With many images, a logistic regression begins with it.

    All features are divided by one number. With a deviation of 1 for each, features that hardly
    vary would have large weights, which rounding in int8 files turns into noise (docs/log.md).

    The strength minimises the squared leave-one-out error, which has a closed form (the PRESS
    statistic). The leave-one-out predictions also give the factor that turns outputs into logits,
    by `fit_temperature`. Images with the same number in `pictures_n` are copies, with the same
    features, and are left out together.
    """
    n = len(features_nd)
    pictures_n = np.arange(n) if pictures_n is None else pictures_n
    copies_n = np.bincount(pictures_n)[pictures_n]
    mean_d = features_nd.mean(0)
    deviation = np.sqrt(features_nd.var(0).mean()) or 1.0
    x = (features_nd - mean_d) / deviation
    targets_nk = np.eye(classes)[labels_n]
    shares_k = targets_nk.mean(0)
    left, squares, right = _singular(x)
    projected = left.T @ (targets_nk - shares_k)
    best: tuple[float, float, np.ndarray, np.ndarray] | None = None
    for strength in n * STRENGTHS:
        shrinkage = squares / (squares + strength)
        # the share of an image in its own prediction (leverage), with its share in the mean
        own_n = np.minimum((left**2 * shrinkage).sum(1) + 1 / n, (1 - 1e-9) / copies_n)
        residuals_nk = targets_nk - shares_k - (left * shrinkage) @ projected
        # solves (1 - H) without = residuals for the c copies of a picture: all of H is own
        sums_ck = np.zeros((pictures_n.max() + 1, classes))
        np.add.at(sums_ck, pictures_n, residuals_nk)
        factor_n = own_n / (1 - copies_n * own_n)
        without_nk = residuals_nk + factor_n[:, None] * sums_ck[pictures_n]
        error = float((without_nk**2).mean())
        if best is None or error < best[0]:
            best = error, strength, shrinkage, targets_nk - without_nk
    assert best is not None
    _, strength, shrinkage, predicted_nk = best
    cross_validated_n = predicted_nk.argmax(1) == labels_n
    temperature = fit_temperature(torch.from_numpy(predicted_nk), torch.from_numpy(labels_n))
    roots = np.sqrt(squares)
    weight_kd, bias_k = shrinkage / roots * projected.T / temperature, shares_k / temperature
    probe = LinearProbe(weight_kd, bias_k, cross_validated_n)
    if n >= max(MANY_IMAGES, MANY_OF_CLASS * classes):
        probe = _logistic(left * roots, labels_n, probe, LOGISTIC_STRENGTH * strength / n)
        probe = probe._replace(cross_validated_n=cross_validated_n[:0])
    weight_kd = probe.weight_kd @ right.T / deviation
    return probe._replace(weight_kd=weight_kd, bias_k=probe.bias_k - weight_kd @ mean_d)


def _logistic(
    x: np.ndarray, labels_n: np.ndarray, start: LinearProbe, penalty: float
) -> LinearProbe:
    """The logistic regression on `x`, whose features are uncorrelated, by L-BFGS from `start`."""
    features_nd, labels = torch.from_numpy(x), torch.from_numpy(labels_n)
    # near the root of the second derivatives, so that few steps are enough
    scale_d = (features_nd.square().mean(0) / 5 + penalty).sqrt()
    weight_kd = (torch.from_numpy(start.weight_kd) * scale_d).contiguous().requires_grad_()
    bias_k = torch.from_numpy(start.bias_k).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight_kd, bias_k], max_iter=LOGISTIC_STEPS, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        weight = weight_kd / scale_d
        likelihood = cross_entropy(features_nd @ weight.T + bias_k, labels)
        error = likelihood + penalty / 2 * weight.square().sum()
        error.backward()
        return error

    optimizer.step(loss)
    weight_kd = (weight_kd / scale_d).detach()
    return start._replace(weight_kd=weight_kd.numpy(), bias_k=bias_k.detach().numpy())


def _singular(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Left singular vectors, squared singular values above 0 and right singular vectors of `x`."""
    is_long = len(x) >= x.shape[1]
    squares, vectors = np.linalg.eigh(x.T @ x if is_long else x @ x.T)
    positive = squares > squares[-1] * max(x.shape) * np.finfo(float).eps
    squares, vectors = squares[positive], vectors[:, positive]
    others = (x if is_long else x.T) @ vectors / np.sqrt(squares)
    left, right = (others, vectors) if is_long else (vectors, others)
    return left, squares, right


@torch.inference_mode()
def features(
    net: Backbone, task: Task, images: Images, how: BatchOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of the classifier (N, D) in float64, labels (N,) and indices (N,), of those images
    that can be read.
    """
    net.to(how.device).eval()
    with closing(scoring_batches(task, images, how)) as batches:
        rows = [(net.embed(x).double().cpu(), y.cpu(), i.cpu()) for x, y, i in batches.epoch(0)]
    inputs, labels, indices = (torch.cat(each) for each in zip(*rows, strict=True))
    return inputs, labels, indices


def save_probe(run: PreparedRun) -> None:
    """Fit the classifier of a copy of the untrained network, and save its bundle, unless it exists.

    At most `MOST_IMAGES` training images are used; the bundle has validation scores. A network
    without a linear classifier has no probe, which is printed. Raises ValueError for a task without
    single labels, and for too many classes.
    """
    classes = len(run.data.classes)
    if not run.task.single_label or classes > MAX_PROBE_CLASSES:
        raise ValueError(
            f"recipe.linear_probe is for one of up to {MAX_PROBE_CLASSES:,} classes for each "
            f"image, not for {count_of(classes, 'class')} of the task {run.task.name}: leave it out"
        )
    if has_probe(run):
        return
    net = copy.deepcopy(padding.to_unpadded(run.net, run.spec)).to(run.device)
    # whether the logits are one linear function, with biases, of the output of `embed`
    classifier = net.get_submodule(net.classifier)
    is_linear = isinstance(classifier, nn.Linear) and isinstance(classifier.bias, Tensor)
    embeds = not isinstance(net, TimmNetwork) or net.embeds
    if len(net.classifiers) > 1 or not embeds or not is_linear:
        if run.context.is_rank_zero:
            print_note(f"{run.config.model} has no linear classifier, and so no linear probe")
        return
    some = run.data.train.spaced(MOST_IMAGES)
    alone = replace(run.scoring, context=SINGLE_PROCESS)
    inputs, labels, indices = features(net, run.task, some, alone)
    pictures_n = pictures_of(run.data, [some.names[index] for index in indices])
    probe = fit_probe(inputs.numpy(), labels.numpy(), classes, pictures_n)
    with torch.no_grad():
        for parameter, value in zip(classifier.parameters(), probe[:2], strict=True):
            parameter.copy_(torch.from_numpy(value))
    bundle = run.bundle(net, {"val": run.val_scores(net)})
    result = CrossValidation("".join(map(str, probe.cross_validated_n.astype(int))))
    path = run.folder / CROSS_VALIDATION_FILE
    run.context.on_rank_zero(write_json, path, CROSS_VALIDATION.output, result)
    run.context.on_rank_zero(bundle.save, run.folder / run_folder.PROBE)


def pictures_of(data: DataSet, names: Sequence[str]) -> np.ndarray:
    """A number for the picture of each image, the same for copies."""
    contents = {name: key for key, same in (data.rule.copies or {}).items() for name in same}
    numbers: dict[str, int] = {}
    keys = (contents.get(name, name) for name in names)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def has_probe(run: PreparedRun) -> bool:
    return (run.folder / run_folder.PROBE).is_dir()


def begin_with_probe(run: PreparedRun) -> None:
    """Give a run's network the classifier of `save_probe`, if there is one."""
    if has_probe(run):
        probe = Bundle.load(run.folder / run_folder.PROBE, build_head).net
        weights = probe.get_submodule(probe.classifier).state_dict()
        run.net.get_submodule(run.net.classifier).load_state_dict(weights)


def probe_network(run: PreparedRun) -> FinalNetwork:
    """The network with frozen features of `save_probe`, and its validation scores."""
    bundle = Bundle.load(run.folder / run_folder.PROBE, build_head)
    return FinalNetwork(bundle.net.to(run.device), bundle.scores["val"])


def with_probe(run: PreparedRun, final: FinalNetwork) -> FinalNetwork:
    """Choose the final network of a run with a probe: `final`, the probe, or their mean.

    With a `probe_share` of the recipe, the mean of both weights is chosen unless one of them is
    clearly better on the validation split: means are as good on similar images and better on others
    (arXiv:2109.01903), and training on few images may have unlearned what the probe knows. So it
    is the mean without a validation split. Where the mean is clearly worse than what lies between
    the scores of both, an error barrier is between their weights (arXiv:1912.05671), and it is one
    of them. Without a share, or if training did not begin with the probe, as with batch statistics,
    the better network is chosen, and `final` without a probe or without a validation split.
    """
    share = run.recipe.probe_share if run.recipe.frozen_statistics else 0.0
    if not has_probe(run) or not (share or run.data.val):
        return final
    probe = probe_network(run)
    ends = {TRAINED: final, UNTRAINED: probe}
    if share and (final.scores or not run.data.val):
        net = copy.deepcopy(padding.to_unpadded(final.net, run.spec))
        states = [net.state_dict(), probe.net.state_dict()]
        net.load_state_dict(averaged(states, (1 - share, share)))
        mean = replace(final, net=net, scores=run.val_scores(net))
        metric, images = run.metric, len(run.data.val)
        better = {
            how: end
            for (how, end), errors in zip(ends.items(), (CLEAR_END, CLEAR_PROBE), strict=True)
            if is_clearly_better(end.scores, mean.scores, metric, images, errors)
        }
        if not better and probe.scores and metric.name == "top1":
            top1 = (1 - share) * final.scores["top1"] + share * probe.scores["top1"]
            between = {"top1": max(top1 - 100 / images, 0.0)}
            if is_clearly_better(between, mean.scores, metric, images, BARRIER):
                both = final.scores, probe.scores
                has_learned = is_clearly_better(*both, metric, images, CLEAR_OF_PROBE)
                better = {TRAINED: final} if has_learned else {UNTRAINED: probe}
        ends = better or {"between the linear probe and the end of training": mean}
    how, best = max(ends.items(), key=lambda item: run.metric.quality(item[1].scores))
    if best is not final and run.context.is_rank_zero:
        scored, last = best.described(run.metric), final.described(run.metric)
        why = f"validation {scored}, after training {last}"
        why = why if run.data.val else "there are no validation images to choose by"
        print_note(f"the bundle is the network {how}: {why}")
    return best


def is_clearly_better(
    scores: Mapping[str, float],
    other: Mapping[str, float],
    metric: Metric,
    images: int,
    errors: float = 1,
) -> bool:
    """Whether top-1 is better by more than `errors` standard errors of a share of `images` images.

    For another metric, whether it is better at all.
    """
    if not other or not scores:
        return bool(scores)
    if metric.name != "top1":
        return metric.quality(scores) > metric.quality(other)
    share = (images * scores["top1"] / 100 + 1 / 2) / (images + 1)  # which is never certain
    error = 100 * math.sqrt(share * (1 - share) / images)
    return scores["top1"] - other["top1"] > errors * error
