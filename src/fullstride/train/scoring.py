"""Scores networks on images, and finds the images to score a run on."""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from fullstride.data.dataset import DIGITS, DataSet, Images
from fullstride.data.loader import Batches
from fullstride.data.readers.listing import MAX_COMPARED, Sample, find_copies, quote_names
from fullstride.data.readers.splits import OnlyCopiesError, SplitRule
from fullstride.data.sampler import LoaderOptions
from fullstride.data.transforms.clips import ViewsOfVideo
from fullstride.data.transforms.crop import to_input
from fullstride.io.console import print_note
from fullstride.io.records import from_json, read_json, to_json
from fullstride.io.writing import atomic_write
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tables.class_names import match_classes
from fullstride.tasks import find_task, task_of
from fullstride.tasks.task import ClassScore, ConfusionMatrix, Metric, Score, Task, full_precision
from fullstride.train import run_folder
from fullstride.train.batches import BatchOptions
from fullstride.train.compute import SINGLE_PROCESS, DistributedContext, numerics
from fullstride.train.loop import BatchSource
from fullstride.train.run_folder import RunConfig

AnyScore = TypeVar("AnyScore", bound=Score)
SCORES = run_folder.OUTPUTS[run_folder.SCORES]
MAX_OUTPUTS = 2**24  # numbers that a task is fitted to: 64 MiB


class Evaluation(NamedTuple):
    """What a network achieves on a set of images."""

    scores: dict[str, float]  # with `images`, the number of readable ones
    skipped: dict[str, str]  # the reason for each image that cannot be read
    task: Task
    score: Score  # of the task, that counted the images

    def with_interval(self) -> "Evaluation":
        """With the 95 % interval of the task's metric, as scores, where the task computes one."""
        if (limits := self.score.interval()) is None:
            return self
        low, high = (f"{self.task.metric.name}_{end}" for end in ("low", "high"))
        return self._replace(scores={**self.scores, low: limits[0], high: limits[1]})


class HeldOutputs(Score):
    """The outputs and targets of all images, as a `Score`, for what is fitted to them."""

    def __init__(self) -> None:
        self.batches: list[tuple[Tensor, Any]] = []

    def update(self, outputs: Tensor, targets: Any) -> None:
        if isinstance(targets, Tensor):
            targets = targets.cpu()
        else:  # objects of each image
            targets = [{name: each.cpu() for name, each in objects.items()} for objects in targets]
        self.batches.append((outputs.cpu(), targets))

    def merge(self, other: Self) -> None:
        self.batches += other.batches

    def compute(self) -> dict[str, float]:
        return {}

    def fit(self, task: Task) -> Task:
        """`task` fitted to them. Raises FloatingPointError where an output is not finite."""
        if not self.batches:
            raise ValueError("none of the images to score on can be read: give others")
        outputs = torch.cat([outputs for outputs, _ in self.batches])
        targets = [targets for _, targets in self.batches]
        joined = torch.cat(targets) if isinstance(targets[0], Tensor) else [*chain(*targets)]
        if not outputs.isfinite().all():
            raise FloatingPointError("the network's outputs are not finite")
        return task.fit(full_precision(outputs), joined)


def evaluate(
    net: nn.Module,
    task: Task,
    batches: BatchSource,
    context: DistributedContext = SINGLE_PROCESS,
) -> dict[str, float]:
    """Scores of `net` over an epoch of `batches`; `images` is the number of readable images.

    With several processes in `context`, each has a part of the images, and all return the scores of
    the whole. Raises ValueError if there is no readable image, and FloatingPointError if a score is
    not finite.

    Examples:
        >>> import fullstride
        >>> from fullstride.data.loader import Batches, LoaderOptions, TestView
        >>> from fullstride.tasks.classify import Classify
        >>> pixels = fullstride.Preprocessing(resolution=32, mean=(0.5,), std=(0.5,))
        >>> images = fullstride.open_data("digits").test.subset(range(64))
        >>> net = fullstride.zoo.create("genet_tiny", in_channels=1).eval()
        >>> batches = Batches(images, TestView(pixels), LoaderOptions(batch=32))
        >>> fullstride.evaluate(net, Classify(), batches)["images"]
        64
    """
    score, images = count(net, task.score(), batches, context)
    return finite_scores(score, images)


@torch.inference_mode()
def count(
    net: nn.Module, score: AnyScore, batches: BatchSource, context: DistributedContext
) -> tuple[AnyScore, int]:
    """`score` of the images of all processes, and the number of readable ones."""
    net.eval()
    images = 0
    with numerics(tf32=False, benchmark=False, deterministic=False):
        for x, targets, _ in batches.epoch(0):
            score.update(net(x), targets)
            images += len(x)
    (score, images), *others = context.gather((score, images))
    for other, number in others:
        score.merge(other)
        images += number
    return score, images


def finite_scores(score: Score, images: int) -> dict[str, float]:
    if not images:
        raise ValueError("none of the images to score on can be read: give others")
    scores = score.compute()
    if not all(map(math.isfinite, scores.values())):
        values = ", ".join(f"{name} {value:g}" for name, value in scores.items())
        raise FloatingPointError(f"the network's outputs are not finite ({values})")
    return {**scores, "images": images}


def score_images(net: nn.Module, task: Task, images: Images, how: BatchOptions) -> Evaluation:
    """What `net` achieves on `images`."""
    with closing(scoring_batches(task, images, how)) as batches:
        return score_batches(net, task, batches, how.context)


def score_bundle(
    bundle: Bundle,
    images: Images,
    device: torch.device | str,
    *,
    mirrored: bool = False,
    views: ViewsOfVideo | None = None,
) -> Evaluation:
    """What `bundle` achieves on `images`; with `mirrored` by the mean with their mirror images.

    With `views`, by the mean over these views of each video.
    """
    net, task = bundle.net.to(device), task_of(bundle)
    if mirrored:
        net, task = MirrorAverage(net, task), task.uncalibrated()
    if views is None:
        how = BatchOptions(bundle.preprocessing, device)
        return score_images(net, task, images, how).with_interval()
    average = ViewAverage(net, task, views.pre)
    # one video at a time, whose views stay uint8: in float32 they would have four times the bytes
    batches = Batches(
        images,
        views,
        LoaderOptions(batch=1, device=device),
        collate=task.collate,
        to_x=lambda pixels, _: pixels,
    )
    with closing(batches):
        result = score_batches(average, task.uncalibrated(), batches, SINGLE_PROCESS)
    return result.with_interval()


class MirrorAverage(nn.Module):
    """The mean of a network's probabilities for an image and its mirror image.

    (N, C, H, W) -> (N, K), the logarithms of the means, which are logits of temperature 1.
    """

    def __init__(self, net: nn.Module, task: Task):
        super().__init__()
        self.net, self.task = net, task

    def forward(self, x: Tensor) -> Tensor:
        both = [self.task.activate(self.net(each).float()) for each in (x, x.flip(-1))]
        return logarithms(torch.stack(both).mean(0))


class ViewAverage(nn.Module):
    """The mean of a network's probabilities for the views of a video.

    Views uint8 (N, V, T, H, W, C) -> (N, K), the logarithms of the means. As many views as the task
    scores at once become float32 at a time.
    """

    def __init__(self, net: nn.Module, task: Task, pre: Preprocessing):
        super().__init__()
        self.net, self.task, self.pre = net, task, pre

    def forward(self, pixels: Tensor) -> Tensor:
        parts = pixels.flatten(0, 1).split(self.task.scoring_batch)
        rows = [self.task.activate(self.net(to_input(part, self.pre)).float()) for part in parts]
        return logarithms(torch.cat(rows).unflatten(0, pixels.shape[:2]).mean(1))


def logarithms(probabilities: Tensor) -> Tensor:
    """Finite logits of these probabilities."""
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def score_batches(
    net: nn.Module, task: Task, batches: Batches, context: DistributedContext
) -> Evaluation:
    """What `net` achieves on the images of `batches`."""
    score, images = count(net, task.score(), batches, context)
    scores = finite_scores(score, images)
    return Evaluation(scores, all_skipped(batches.skipped, context), task, score)


def fit_and_score(
    net: nn.Module, task: Task, batches: Batches, context: DistributedContext
) -> Evaluation:
    """What `net` achieves on the images of `batches` with `task` fitted to them.

    The outputs are computed once, and held in memory.
    """
    held, images = count(net, HeldOutputs(), batches, context)
    task = held.fit(task)
    score = task.score()
    for outputs, targets in held.batches:
        score.update(outputs, targets)
    scores = finite_scores(score, images)
    return Evaluation(scores, all_skipped(batches.skipped, context), task, score)


def fit_on(net: nn.Module, task: Task, images: Images, how: BatchOptions, *, classes: int) -> Task:
    """`task` fitted to the outputs of `net` for `images`, or as many as `MAX_OUTPUTS` permits."""
    number = min(len(images), max(1, MAX_OUTPUTS // classes))
    some = images.subset([index * len(images) // number for index in range(number)])
    with closing(scoring_batches(task, some, how)) as batches:
        held, _ = count(net, HeldOutputs(), batches, how.context)
    return held.fit(task)


def scoring_batches(task: Task, images: Images, how: BatchOptions) -> Batches:
    """Batches of `images` to score networks on. A single batch needs no worker."""
    workers = how.workers if len(images) > task.scoring_batch else 0
    options = how.loader(task.scoring_batch, workers=workers)
    return Batches(images, task.test_view(how.pre), options, collate=task.collate)


def all_skipped(skipped: Mapping[str, str], context: DistributedContext) -> dict[str, str]:
    """The unreadable images of all processes, each with the reason."""
    return {name: why for each in context.gather(skipped) for name, why in each.items()}


@dataclass(frozen=True)
class FinalNetwork:
    """A network with which a run may end."""

    net: Backbone
    scores: Mapping[str, float]  # of the validation images; none without, or if not finite
    epochs: tuple[int, ...] = ()  # of which it is the average, if of several

    def is_better(self, other: "FinalNetwork", metric: Metric) -> bool:
        return quality(self.scores, metric) > quality(other.scores, metric)

    def described(self, metric: Metric) -> str:
        """For example "top-1 97.50 %, loss 0.1200"."""
        if not self.scores:
            return "no finite score"
        has_loss = "loss" in self.scores and metric.name != "loss"
        loss = f", loss {self.scores['loss']:.4f}" if has_loss else ""
        return f"{metric.text(self.scores[metric.name])}{loss}"


def quality(scores: Mapping[str, float], metric: Metric) -> tuple[float, float]:
    """Higher for better scores; of equal ones the lower loss is better, and none are the worst."""
    if not scores:
        return -inf, -inf
    return metric.rank(scores[metric.name]), -scores.get("loss", 0.0)


def averaged(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each tensor over `states`, summed in float64; integers are those of the first."""

    def mean(name: str, first: Tensor) -> Tensor:
        if not first.is_floating_point():
            return first
        total = torch.zeros_like(first, dtype=torch.float64)
        for state in states:
            total += state[name]
        return (total / len(states)).to(first.dtype)

    return {name: mean(name, first) for name, first in states[0].items()}


@dataclass(frozen=True)
class SplitScores:
    scores: Mapping[str, float]
    skipped: Mapping[str, str]  # unreadable images, and why
    by_class: tuple[ClassScore, ...]  # in the order of the classes
    confusion: ConfusionMatrix | None  # by the indices of classes


@dataclass(frozen=True)
class ScoreFile:
    """For each split all scores, those by class, and the confusions."""

    network: str
    data: str
    classes: tuple[str, ...]
    splits: Mapping[str, SplitScores]


def save_scores(
    path: Path, network: str, data: str, classes: tuple[str, ...], results: Mapping[str, Evaluation]
) -> None:
    """Write what `network` achieves on splits of `data`, in place of an earlier such file."""
    splits = {
        split: SplitScores(
            result.scores,
            result.skipped,
            tuple(result.score.by_class(classes)),
            result.score.confusion(),
        )
        for split, result in results.items()
    }
    with atomic_write(path, SCORES) as beside:
        beside.write_text(to_json(ScoreFile(network, data, classes, splits)))


def load_scores(path: Path) -> ScoreFile:
    """What `save_scores` wrote, of a task with one class for each image.

    Raises ValueError in one line.
    """
    return from_json(ScoreFile, read_json(path), str(path))


ALL = "all"  # in place of a split: the images of all splits


@dataclass(frozen=True)
class ScoredImages:
    """Images that a network is scored on."""

    data: DataSet
    split: str  # test, val, train or all
    images: Images
    missing: tuple[str, ...]  # classes that none of them has
    notes: tuple[str, ...]  # why the score may say less than it seems to, a line each


class HasOutputs(Protocol):
    """A bundle or an exported file, as far as its data depend on it."""

    @property
    def task(self) -> str: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def has_class_names(self) -> bool: ...


def matching_data(where: str, model: HasOutputs, data: str = "") -> DataSet:
    """The data set `data`, by default that of the run at `where`, for the task of `model`.

    The run's own data have the run's splits, wherever they are now. Targets are the outputs of the
    network, by `match_classes`. Raises ValueError if the data are not known, or have classes that
    are not the network's.
    """
    config = _config(where, data)
    whole = _own_data(config, model, data) if config else None
    if whole is None:
        whole = _other_data(model, data)
    return _matched(whole, where, model, data)


def images_to_score(
    where: str, model: HasOutputs, data: str = "", split: str | None = None
) -> ScoredImages:
    """The images of `split`, "all" or None, of the data set of `matching_data`.

    By default they are of the test or, where the data have none, of the validation split; of data
    that are not the run's and have no splits of their own, all images. Raises ValueError, also
    where the split has no images.
    """
    config = _config(where, data)
    whole = _own_data(config, model, data) if config else None
    is_own, notes = whole is not None, []
    if whole is None:
        everything = _everything(model, data)
        if split is None and not everything.own_splits:
            split = ALL
            notes.append(f"all images of {everything.name} are scored, as it has no splits")
        whole = everything
        if split != ALL:
            whole = _other_data(model, data)
    trained_on = {*whole.train.names} if is_own else set()
    if split == ALL and is_own:
        whole = _everything(model, whole.where)
    whole = _matched(whole, where, model, data)
    split = split or whole.score_split
    part = "train" if split == ALL else split
    images = getattr(whole, part)
    if not images:
        raise ValueError(
            f"{whole.name} has no images for the {split} split"
            + (
                ": leave --split out"
                if whole.val or whole.test
                else f", as {where} was trained on all images: give others by --data, or "
                "--split train"
            )
        )
    if config and not is_own:
        trained_on = _copies_of_training(config, model, images)
    if both := [name for name in images.names if name in trained_on]:
        notes.append(
            f"{len(both):,} of the {len(images):,} images were trained on, so the score is too "
            f"good: {quote_names(both)}"
        )
    return ScoredImages(whole, split, images, whole.missing_classes(part), tuple(notes))


def _config(where: str, data: str) -> RunConfig | None:
    """The configuration of the run at `where`, or of the run whose bundle is there."""
    path = Path(where)
    is_bundle = path.name in (run_folder.BEST, run_folder.BUNDLE)
    for folder in (path, path.parent) if is_bundle else (path,):
        if (folder / run_folder.RUN_CONFIG).exists():
            hint = "give the bundle in it" if data else "give --data"
            return run_folder.read_config(folder, hint)
    if not data:
        raise ValueError(f"{where} is not a run and does not name its images: give --data")
    return None


def _own_data(config: RunConfig, model: HasOutputs, data: str) -> DataSet | None:
    """The data set of a run with the run's splits, if `data` names it, a copy of it, or nothing."""
    task = find_task(model.task)
    is_place = DIGITS not in (data, config.data)
    is_same = is_place and Path(data).resolve() == Path(config.data).resolve()
    if not data or data == config.data or is_same:
        return task.open_data(data or config.data, config.rule)
    try:
        other = task.open_data(data, config.rule)
    except ValueError:  # it has other splits, or no such groups
        return None
    return other if other.fingerprint == config.fingerprint else None


def _other_data(model: HasOutputs, data: str) -> DataSet:
    """A data set that is not the run's. Copies that training would refuse do not matter here."""
    task = find_task(model.task)
    try:
        return task.open_data(data)
    except OnlyCopiesError as error:
        reason = str(error).partition(":")[0]
        print_note(f"{data}: {reason}; nothing is trained on here, so they stay")
        return task.open_data(data, SplitRule(keep_duplicates=True))


def _everything(model: HasOutputs, data: str) -> DataSet:
    """A data set with all images in its training split."""
    rule = SplitRule(val=0, test=0, keep_duplicates=True)
    return find_task(model.task).open_data(data, rule)


def _matched(images: DataSet, where: str, model: HasOutputs, data: str) -> DataSet:
    data = data or images.where
    task = find_task(model.task)
    if images.classes == model.classes or task.open_classes:
        return images
    if not task.single_label and len(images.classes) != len(model.classes):
        # An image says of every class whether it has it: with fewer, others would count as absent.
        raise ValueError(
            f"{data} has {len(images.classes)} classes and {where} has {len(model.classes)}: give "
            "data of the same ones, in any order"
        )
    try:
        outputs, how = match_classes(model.classes, images.classes, named=model.has_class_names)
    except ValueError as error:
        raise ValueError(f"{where} and {data}: {error}") from None
    if how:
        print_note(f"the classes of {data} are matched with those of {where} {how}")
    return images.with_targets(model.classes, lambda each: task.renumber(each, outputs))


def _copies_of_training(config: RunConfig, model: HasOutputs, images: Images) -> set[str]:
    """The names of those of `images` that have the bytes of a run's training image.

    None where the run's data are gone or have no files, or where there are too many to compare.
    """
    try:
        train = find_task(model.task).open_data(config.data, config.rule).train
    except ValueError:
        return set()
    if not train.file or not images.file or len(train) + len(images) > MAX_COMPARED:
        return set()
    files = {"train": train.file, "scored": images.file}
    sizes = {f"train/{name}": _size(train.file(name)) for name in train.names}
    sizes |= {f"scored/{name}": _size(images.file(name)) for name in images.names}
    both = [{sizes[key] for key in sizes if key.startswith(side)} for side in files]
    samples = [Sample(key, 0, size) for key, size in sizes.items() if size in both[0] & both[1]]

    def content(key: str) -> Path | bytes:
        side, _, name = key.partition("/")
        return files[side](name)

    copies: set[str] = set()
    for _, same in find_copies(samples, content):
        keys = [sample.name for sample in same]
        if any(key.startswith("train/") for key in keys):
            copies |= {key.removeprefix("scored/") for key in keys if key.startswith("scored/")}
    return copies


def _size(file: Path | bytes) -> int:
    """Bytes of an image; -1 if it cannot be read."""
    if isinstance(file, bytes):
        return len(file)
    try:
        return file.stat().st_size
    except OSError:
        return -1
