"""Scores networks on images, and finds the images to score a run on."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from fullstride.data.dataset import DIGITS, DataSet, Images
from fullstride.data.loader import Batches, LoaderOptions
from fullstride.data.readers.listing import MAX_COMPARED, Sample, find_copies, quote_names
from fullstride.data.readers.splits import OnlyCopiesError, SplitRule
from fullstride.data.transforms.clips import ViewsOfVideo
from fullstride.data.transforms.crop import to_input
from fullstride.io.console import count_of, print_note, verb_of
from fullstride.io.records import from_json, read_json, write_json
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import Bundle
from fullstride.tables.class_names import match_classes
from fullstride.tasks import TrainedModel, find_task, task_of
from fullstride.tasks.task import ClassScore, ConfusionMatrix, Metric, Score, Task, full_precision
from fullstride.train import run_folder
from fullstride.train.batches import BatchOptions
from fullstride.train.compute import SINGLE_PROCESS, DistributedContext, numerics
from fullstride.train.loop import BatchSource
from fullstride.train.run_folder import RunConfig

AnyScore = TypeVar("AnyScore", bound=Score)
SCORES = run_folder.OUTPUTS[run_folder.SCORES]
MAX_OUTPUTS = 2**24  # numbers to fit a task to: 64 MiB


class Evaluation(NamedTuple):
    """The scores of a network on a set of images."""

    scores: dict[str, float]  # with `images`, the number of readable images
    skipped: dict[str, str]  # unreadable images -> reason
    task: Task
    score: Score  # the task's score, after counting the images

    def with_interval(self) -> "Evaluation":
        """Add the 95 % interval of the task's metric to the scores, if the task computes it."""
        if (limits := self.score.interval()) is None:
            return self
        low, high = (f"{self.task.metric.name}_{end}" for end in ("low", "high"))
        return self._replace(scores={**self.scores, low: limits[0], high: limits[1]})


class HeldOutputs(Score):
    """Collects the outputs and targets of all images, as a `Score`, to fit a task to them."""

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
        """Fit `task` to the outputs. Raises FloatingPointError if an output is not finite."""
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
    """Score `net` on an epoch of `batches`; `images` is the number of readable images.

    With several processes in `context`, each has a part of the images, and all return the scores of
    all images. Raises ValueError if no image is readable, and FloatingPointError if a score is
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
    """Count the images of all processes in `score`; return it and the number of readable images."""
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
    """Score `net` on `images`."""
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
    """Score `bundle` on `images`.

    `mirrored` averages probabilities with the mirror images, `views` over these views of a video.
    """
    net, task = bundle.net.to(device), task_of(bundle)
    if mirrored:
        net = ViewAverage(net, task, lambda x: (x, x.flip(-1)))
        task = task.uncalibrated()
    if views is None:
        how = BatchOptions(bundle.preprocessing, device)
        return score_images(net, task, images, how).with_interval()
    pre = views.pre

    def parts(pixels: Tensor) -> Iterator[Tensor]:
        """uint8 views (1, V, T, H, W, C) of a video, as many at a time as the task scores."""
        return (to_input(part, pre) for part in pixels[0].split(task.scoring_batch))

    average = ViewAverage(net, task, parts)
    # one video at a time, as uint8 views: float32 views have four times the bytes
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


class ViewAverage(nn.Module):
    """Averages a network's probabilities over views of N images or videos.

    `views` turns an input into batches of N views, or for N = 1 of any number: (N, ...) -> (N, K),
    the logarithms of the means as finite numbers, which are logits with temperature 1.
    """

    def __init__(self, net: nn.Module, task: Task, views: Callable[[Tensor], Iterable[Tensor]]):
        super().__init__()
        self.net, self.task, self.views = net, task, views

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([self.task.activate(self.net(each).float()) for each in self.views(x)])
        means = rows.unflatten(0, (-1, len(x))).mean(0)
        return means.clamp_min(torch.finfo(means.dtype).tiny).log()


def score_batches(
    net: nn.Module, task: Task, batches: Batches, context: DistributedContext
) -> Evaluation:
    """Score `net` on the images of `batches`."""
    score, images = count(net, task.score(), batches, context)
    scores = finite_scores(score, images)
    return Evaluation(scores, all_skipped(batches.skipped, context), task, score)


def fit_and_score(
    net: nn.Module, task: Task, batches: Batches, context: DistributedContext
) -> Evaluation:
    """Fit `task` to the outputs of `net` for `batches`, and score these outputs with it.

    The outputs are computed once, and kept in memory.
    """
    held, images = count(net, HeldOutputs(), batches, context)
    task = held.fit(task)
    score = task.score()
    for outputs, targets in held.batches:
        score.update(outputs, targets)
    scores = finite_scores(score, images)
    return Evaluation(scores, all_skipped(batches.skipped, context), task, score)


def fit_on(net: nn.Module, task: Task, images: Images, how: BatchOptions, *, classes: int) -> Task:
    """Fit `task` to the outputs of `net` for `images`, or as many as `MAX_OUTPUTS` permits."""
    some = images.spaced(max(1, MAX_OUTPUTS // classes))
    with closing(scoring_batches(task, some, how)) as batches:
        held, _ = count(net, HeldOutputs(), batches, how.context)
    return held.fit(task)


def scoring_batches(task: Task, images: Images, how: BatchOptions) -> Batches:
    """Build batches of `images` for scoring. A single batch needs no worker."""
    workers = how.workers if len(images) > task.scoring_batch else 0
    options = how.loader(task.scoring_batch, workers=workers)
    return Batches(images, task.test_view(how.pre), options, collate=task.collate)


def all_skipped(skipped: Mapping[str, str], context: DistributedContext) -> dict[str, str]:
    """The unreadable images of all processes, with reasons."""
    return {name: why for each in context.gather(skipped) for name, why in each.items()}


@dataclass(frozen=True)
class FinalNetwork:
    """A network that a run may end with."""

    net: Backbone
    scores: Mapping[str, float]  # validation scores; empty without images, or if not finite
    epochs: tuple[int, ...] = ()  # the averaged epochs, if several

    def is_better(self, other: "FinalNetwork", metric: Metric) -> bool:
        return metric.quality(self.scores) > metric.quality(other.scores)

    def described(self, metric: Metric) -> str:
        """A text such as "top-1 97.50 %, loss 0.1200"."""
        if not self.scores:
            return "no finite score"
        has_loss = "loss" in self.scores and metric.name != "loss"
        loss = f", loss {self.scores['loss']:.4f}" if has_loss else ""
        return f"{metric.text(self.scores[metric.name])}{loss}"


def averaged(
    states: Sequence[Mapping[str, Tensor]], shares: Sequence[float] = ()
) -> dict[str, Tensor]:
    """The mean of each tensor over `states`, summed in float64; integers come from the first.

    `shares` are the weights of the states in the mean; by default they are equal.
    """
    shares = shares or [1] * len(states)

    def mean(name: str, first: Tensor) -> Tensor:
        if not first.is_floating_point():
            return first
        total = torch.zeros_like(first, dtype=torch.float64)
        for state, share in zip(states, shares, strict=True):
            total += share * state[name].double()
        return (total / sum(shares)).to(first.dtype)

    return {name: mean(name, first) for name, first in states[0].items()}


@dataclass(frozen=True)
class SplitScores:
    scores: Mapping[str, float]
    skipped: Mapping[str, str]  # unreadable images, and why
    by_class: tuple[ClassScore, ...]  # in the order of the classes
    confusion: ConfusionMatrix | None  # by the indices of classes


@dataclass(frozen=True)
class ScoreFile:
    """All scores, scores by class and confusions of each split."""

    network: str
    data: str
    classes: tuple[str, ...]
    splits: Mapping[str, SplitScores]


def save_scores(
    path: Path, network: str, data: str, classes: tuple[str, ...], results: Mapping[str, Evaluation]
) -> None:
    """Write the scores of `network` on splits of `data`, and replace an earlier file of scores."""
    splits = {
        split: SplitScores(
            result.scores,
            result.skipped,
            tuple(result.score.by_class(classes)),
            result.score.confusion(),
        )
        for split, result in results.items()
    }
    write_json(path, SCORES, ScoreFile(network, data, classes, splits))


def load_scores(path: Path) -> ScoreFile:
    """Read a file of `save_scores`, for a task with one class per image.

    Raises ValueError in one line.
    """
    return from_json(ScoreFile, read_json(path), str(path))


ALL = "all"  # instead of a split: the images of all splits


@dataclass(frozen=True)
class ScoredImages:
    """Images to score a network on."""

    data: DataSet
    split: str  # test, val, train or all
    images: Images
    missing: tuple[str, ...]  # classes without images
    notes: tuple[str, ...]  # lines on why the score may be misleading


class HasOutputs(TrainedModel, Protocol):
    """The parts of a bundle or exported file that its data depend on."""

    @property
    def has_class_names(self) -> bool: ...


def matching_data(where: str, model: HasOutputs, data: str = "") -> DataSet:
    """Open the data set `data`, by default the data of the run at `where`, for `model`'s task.

    The run's own data have the run's splits, even if moved. Targets are indices of the network's
    outputs, by `match_classes`. Raises ValueError if the data are unknown, or have classes that the
    network lacks.
    """
    config = _config(where, data)
    whole = _own_data(config, model, data) if config else None
    if whole is None:
        whole = _other_data(model, data)
    return _matched(whole, where, model, data)


def images_to_score(
    where: str, model: HasOutputs, data: str = "", split: str | None = None
) -> ScoredImages:
    """The images of a `split`, or "all", of `matching_data`.

    By default the test images, or the validation images without a test; all images for other data
    than the run's without own splits. Raises ValueError, also for a split without images.
    """
    config, notes = _config(where, data), []
    own = whole = _own_data(config, model, data) if config else None
    trained_on = {*own.train.names} if own else set()
    if whole is None or split == ALL:
        whole = _everything(model, own.where if own else data)
        if split is None and not whole.own_splits:
            split = ALL
            notes.append(f"all images of {whole.name} are scored, as it has no splits")
            if config is None:
                notes[-1] += f"; {where} does not say which of them it was trained on"
        if split != ALL:
            whole = _other_data(model, data)
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
    if config and not own:
        trained_on = _copies_of_training(config, model, images)
    if both := [name for name in images.names if name in trained_on]:
        notes.append(
            f"{len(both):,} of the {count_of(len(images), 'image')} {verb_of(len(both), 'were')} "
            f"trained on, so the score is too good: {quote_names(both)}"
        )
    return ScoredImages(whole, split, images, whole.missing_classes(part), tuple(notes))


def _config(where: str, data: str) -> RunConfig | None:
    """The configuration of the run at `where`, or of the run with the bundle `where`."""
    path = Path(where)
    places = [path]
    if path.name in (run_folder.BEST, run_folder.BUNDLE, run_folder.PROBE):
        places += [path.parent]
    if path.parent.name == run_folder.SOUP:
        places += [path.parent.parent]
    for folder in places:
        if (folder / run_folder.RUN_CONFIG).exists():
            hint = "give the bundle in it" if data else "give --data"
            return run_folder.read_config(folder, hint)
    if not data:
        raise ValueError(f"{where} is not a run and does not name its images: give --data")
    return None


def _own_data(config: RunConfig, model: HasOutputs, data: str) -> DataSet | None:
    """The run's data set with its splits, if `data` is that data set, a copy of it, or ""."""
    task = find_task(model.task)
    is_place = DIGITS not in (data, config.data)
    is_same = is_place and Path(data).resolve() == Path(config.data).resolve()
    if not data or data == config.data or is_same:
        return task.open_data(data or config.data, config.rule)
    try:
        other = task.open_data(data, config.rule)
    except ValueError:  # other splits, or no such groups
        return None
    return other if other.fingerprint == config.fingerprint else None


def _other_data(model: HasOutputs, data: str) -> DataSet:
    """Open other data than the run's. Copies, which training would refuse, do not matter here."""
    task = find_task(model.task)
    try:
        return task.open_data(data)
    except OnlyCopiesError as error:
        reason = str(error).partition(":")[0]
        print_note(f"{data}: {reason}; nothing is trained on here, so they stay")
        return task.open_data(data, SplitRule(keep_duplicates=True))


def _everything(model: HasOutputs, data: str) -> DataSet:
    """Open a data set with all images in its training split."""
    rule = SplitRule(val=0, test=0, keep_duplicates=True)
    return find_task(model.task).open_data(data, rule)


def _matched(images: DataSet, where: str, model: HasOutputs, data: str) -> DataSet:
    data = data or images.where
    task = find_task(model.task)
    if images.classes == model.classes or task.open_classes:
        return images
    if not task.single_label and len(images.classes) != len(model.classes):
        # Each target covers every class: missing classes would count as absent.
        raise ValueError(
            f"{data} has {count_of(len(images.classes), 'class')} and {where} has "
            f"{len(model.classes)}: give data with the same classes, in any order"
        )
    try:
        outputs, how = match_classes(model.classes, images.classes, named=model.has_class_names)
    except ValueError as error:
        raise ValueError(
            f"{where} and {data}: {error}; name its outputs by --class-names FILE, with a class in "
            "each line"
        ) from None
    if how:
        print_note(f"the classes of {data} are matched with those of {where} {how}")
    return images.with_targets(tuple(model.classes), lambda each: task.renumber(each, outputs))


def _copies_of_training(config: RunConfig, model: HasOutputs, images: Images) -> set[str]:
    """The names of `images` with the same bytes as a training image of the run.

    Empty if the run's data are gone or have no files, or if there are too many to compare.
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
    of_side = [{sizes[key] for key in sizes if key.startswith(side)} for side in files]
    both = set.intersection(*of_side)
    samples = [Sample(key, 0, size) for key, size in sizes.items() if size in both]

    def content(key: str) -> Path | bytes:
        side, _, name = key.partition("/")
        return files[side](name)

    copies: set[str] = set()
    for keys in find_copies(samples, content).values():
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
