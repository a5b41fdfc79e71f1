"""Defines a task: the targets of samples, the head, the loss, the scores and the predictions."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from functools import cache, cached_property
from math import inf
from typing import Annotated, Any, ClassVar, Self, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

from fullstride.data.dataset import DEFAULT_RULE, DataSet, Images, SplitRule, open_data
from fullstride.data.loader import TestView, TrainView, View, class_indices
from fullstride.data.readers.decode import Size
from fullstride.data.transforms.crop import Augmentation, Decoder, Sides
from fullstride.io.records import Bounds, Count, from_json
from fullstride.nets.backbone import Backbone
from fullstride.nets.preprocessing import Fit, Preprocessing

# Counts of images by class and prediction, and the scores of classes.

MAX_CLASSES = 10**6


@dataclass(frozen=True)
class ClassScore:
    """The scores of one class, in percent. None: not defined, as it would divide by zero."""

    # headers of columns in tables, where they differ from the names of the fields
    headers: ClassVar[Mapping[str, str]] = {"name": "class", "f1": "F1"}

    name: str
    images: int  # of the class
    predicted: int  # images, of any class, for which the class was predicted
    precision: float | None  # share of `predicted` that is of the class
    recall: float | None  # share of `images` for which the class was predicted
    f1: float | None  # harmonic mean of the two; 0 if no image of the class was recognised

    @classmethod
    def of_counts(cls, name: str, hits: int, images: int, predicted: int, **others: Any) -> Self:
        """The scores by three counts; `hits` are predicted images of the class."""
        return cls(
            name=name,
            images=images,
            predicted=predicted,
            precision=_percent(hits, predicted),
            recall=_percent(hits, images),
            f1=_percent(2 * hits, images + predicted),
            **others,
        )


@dataclass(frozen=True)
class ConfusionMatrix:
    """The images of each pair of a label and a prediction that occurs.

    Raises ValueError for columns of different lengths, and for classes that do not exist.
    """

    classes: Annotated[int, Bounds(ge=1, le=MAX_CLASSES)]
    labels: tuple[Count, ...]
    predictions: tuple[Count, ...]
    images: tuple[Count, ...]  # of each pair of a label and a prediction

    def __post_init__(self) -> None:
        if not len(self.labels) == len(self.predictions) == len(self.images):
            raise ValueError("the columns of a confusion matrix differ in length")
        largest = max((*self.labels, *self.predictions), default=0)
        if largest >= self.classes:
            raise ValueError(f"class {largest} of a confusion matrix: there are {self.classes}")

    @cached_property
    def sums(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each class the recognised images, all its images, and its predictions."""
        labels, predictions = np.array(self.labels, int), np.array(self.predictions, int)
        images, same = np.array(self.images, np.int64), labels == predictions
        hits_k, images_k, predicted_k = np.zeros((3, self.classes), np.int64)
        np.add.at(hits_k, labels[same], images[same])
        np.add.at(images_k, labels, images)
        np.add.at(predicted_k, predictions, images)
        return hits_k, images_k, predicted_k

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that have images, in percent."""
        hits_k, images_k, _ = self.sums
        present = images_k > 0
        return 100 * float((hits_k[present] / images_k[present]).mean())

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that have images or were predicted, in percent."""
        hits_k, images_k, predicted_k = self.sums
        occurs = images_k + predicted_k > 0
        return 100 * float((2 * hits_k[occurs] / (images_k + predicted_k)[occurs]).mean())

    def by_class(self, names: Sequence[str]) -> list[ClassScore]:
        """The scores of each class; `names` has all classes, in order."""
        columns = (each.tolist() for each in self.sums)
        return [
            ClassScore.of_counts(name, hits, images, predicted)
            for name, hits, images, predicted in zip(names, *columns, strict=True)
        ]

    def most_confused(self, count: int) -> list[tuple[int, int, int]]:
        """(label, another prediction, images) of the most frequent confusions, at most `count`."""
        pairs = zip(self.labels, self.predictions, self.images, strict=True)
        wrong = [pair for pair in pairs if pair[0] != pair[1]]
        return sorted(wrong, key=lambda pair: (-pair[2], pair))[:count]

    def dense(self) -> np.ndarray:
        """(K, K): images by label (rows) and prediction (columns)."""
        matrix_kk = np.zeros((self.classes, self.classes), np.int64)
        matrix_kk[list(self.labels), list(self.predictions)] = self.images
        return matrix_kk


def best_f1_threshold(scores_n: np.ndarray, is_hit_n: np.ndarray, positives: int) -> float:
    """The threshold of the score with the highest F1; the highest threshold among equals.

    It is midway between two scores, so that rounding does not decide. `scores_n` are of N >= 1
    predictions in any order, `is_hit_n` says which are right, and `positives` is the number of
    objects that should be predicted, hits included.
    """
    order = np.argsort(-scores_n, kind="stable")
    falling = scores_n[order].astype(np.float64)
    # the last prediction above each possible threshold
    cuts = np.append(np.flatnonzero(np.diff(falling)), len(falling) - 1)
    hits = is_hit_n[order].cumsum()[cuts]
    best = cuts[(2 * hits / (cuts + 1 + positives)).argmax()]
    below = falling[best + 1] if best + 1 < len(falling) else 0.0
    return float(falling[best] + below) / 2


def _percent(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


@dataclass(frozen=True)
class Metric:
    """The score that runs are compared by."""

    name: str  # in `Score.compute` and, as "val/NAME", in the rows of a log
    label: str  # in tables and reports
    unit: str = ""
    higher_is_better: bool = True
    percent_of_images: bool = False  # a proportion of the images, so its interval is binomial
    min_outputs: int = 1  # of the network; with fewer the score is trivial and not computed

    def rank(self, value: float) -> float:
        """Higher for a better `value`."""
        return value if self.higher_is_better else -value

    def quality(self, scores: Mapping[str, float]) -> tuple[float, float]:
        """A sort key, higher for better scores; ties go to lower losses; none is the worst."""
        if not scores:
            return -inf, -inf
        return self.rank(scores[self.name]), -scores.get("loss", 0.0)

    def text(self, value: float, digits: int = 2) -> str:
        """For example "top-1 97.50 %"."""
        return f"{self.label} {value:.{digits}f} {self.unit}".rstrip()

    def axis_label(self, of: str = "") -> str:
        """For example "top-1 on digits (%)", with " on digits" for `of`."""
        return f"{self.label}{of}" + (f" ({self.unit})" if self.unit else "")


@dataclass(frozen=True)
class Calibration:
    """Counts of predictions in bins of equal width of the predicted class's probability."""

    images: tuple[Count, ...]  # in each bin
    correct: tuple[Count, ...]  # images in each bin whose prediction is right
    probability: tuple[float, ...]  # its sum in each bin

    @property
    def error(self) -> float:
        """The expected calibration error in percent (arXiv:1706.04599).

        The mean over bins, weighted by images, of the absolute difference between the share of
        right predictions and the mean probability.
        """
        differences = np.abs(np.subtract(self.correct, self.probability))
        return 100 * float(differences.sum()) / max(1, sum(self.images))


class Score(ABC):
    """Scores of a data set, updated batch by batch, so that outputs need not be held."""

    @abstractmethod
    def update(self, outputs: Any, targets: Any, /) -> None:
        """Count one batch; the outputs come from the network in evaluation mode."""

    @abstractmethod
    def merge(self, other: Any, /) -> None:
        """Add the counts of another process on other images."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Values by name, the metric included; among equal metrics the lower "loss" is better."""

    def confusion(self) -> ConfusionMatrix | None:
        """The counts by class and prediction; None for a task without."""
        return None

    def calibration(self) -> Calibration | None:
        """How accurate probabilities are; None for a task without one class for each image."""
        return None

    def by_class(self, names: Sequence[str]) -> Sequence[ClassScore]:
        """A row of scores for each class, in order; () for a task without class scores."""
        matrix = self.confusion()
        return matrix.by_class(names) if matrix else ()

    def resampled(self) -> np.ndarray:
        """(B,): the task's `metric` over each resample of the images, see `bootstrap`.

        Empty for a task that compares networks image by image, such as by the correct class.
        """
        return np.zeros(0)

    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the task's `metric`: the percentiles of `resampled`.

        None if at most half of the resamples have a value, as with one image.
        """
        values = self.resampled()
        values = values[~np.isnan(values)]
        if len(values) <= RESAMPLES / 2:
            return None
        low, high = np.percentile(values, (2.5, 97.5))
        return float(low), float(high)


# The bootstrap: how a score would vary over other images of the same kind.
#
# Letters: N images, B resamples.

RESAMPLES = 200
MAX_BLOCK = 2**23  # numbers of a block of resamples: 32 MiB


def bootstrap(images: int, weighted: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """(B,): a score over resamples of the images, each drawn N times with replacement.

    The resamples are the same in every call, so that they compare two networks in pairs. `weighted`
    computes the score from how often each image was drawn: int32 (N, b), for b of the resamples ->
    (b,), NaN where the score is not defined.
    """
    if images < 2:
        return np.full(RESAMPLES, np.nan)
    rng, step, blocks = np.random.default_rng(0), max(1, MAX_BLOCK // images), []
    for start in range(0, RESAMPLES, step):
        size = min(step, RESAMPLES - start)
        drawn_bn = rng.multinomial(images, np.full(images, 1 / images), size)
        blocks.append(weighted(np.ascontiguousarray(drawn_bn.T, dtype=np.int32)))
    return np.concatenate(blocks)


@dataclass(frozen=True)
class NoOptions:
    """The options of a task without options of its own."""


@dataclass(frozen=True)
class Task(ABC):
    """Everything that depends on the task; the fields are its options and its fitted state.

    A field that a recipe has too, such as `label_smoothing`, takes the recipe's value in training.
    Fields that only this task has come from `options`, which the task inherits: recipes set them
    in `task_options`, and command lines by `--task.NAME`. Instances are pickled to the workers of
    data loaders.
    """

    name: ClassVar[str]  # in `TASKS`, in run.json and in bundle.json
    metric: ClassVar[Metric]  # compares runs, unless their recipe names another
    options: ClassVar[type] = NoOptions  # the dataclass of the task's own options, a base class
    other_metrics: ClassVar[tuple[Metric, ...]] = ()
    # whether a target is the index of one class, which mixup, CutMix, teachers, batches by class
    # and training for int8 require
    single_label: ClassVar[bool] = False
    takes_clips: ClassVar[bool] = False  # whether the networks take clips in place of images
    # fields of a recipe that only some tasks use, this one among them
    recipe_fields: ClassVar[frozenset[str]] = frozenset()
    # name of the default recipe; "": by the data and the weights
    default_recipe: ClassVar[str] = ""
    # fields of the task that are stored with the weights, such as fitted thresholds
    state_fields: ClassVar[tuple[str, ...]] = ()
    # values of the task's own options that `fit` tries, beside networks and resolutions
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    # images per scoring step over all processes: fewer where an image has many outputs
    scoring_batch: ClassVar[int] = 128
    # most objects that are predicted for an image, all of which are shown by default
    most_objects: ClassVar[int] = 0
    # whether images can be scored whose classes the network does not have
    open_classes: ClassVar[bool] = False
    # how a picture fits the evaluation view, unless a recipe sets it; None: as for the weights
    view_fit: ClassVar[Fit | None] = None
    # names of the outputs of exported files: of the network's, and of the result of `activate`
    output_names: ClassVar[tuple[str, str]] = ("logits", "probabilities")

    def with_options(self, recipe: Any) -> Self:
        """The task with the options of `recipe`. Raises ValueError for options of other tasks."""
        names = [field.name for field in fields(self) if hasattr(recipe, field.name)]
        own = self.read_options(recipe.task_options)
        return replace(self, **{name: getattr(recipe, name) for name in names}, **vars(own))

    def read_options(self, values: Mapping[str, Any]) -> Any:
        """The `options` with `values`. Raises ValueError for unknown names and invalid values."""
        names = [field.name for field in fields(self.options)]
        if others := [name for name in values if name not in names]:
            has = f"has the options {', '.join(names)}" if names else "has no options of its own"
            raise ValueError(f"recipe.task_options {', '.join(others)}: the task {self.name} {has}")
        return from_json(self.options, dict(values), "recipe.task_options")

    @property
    def clip(self) -> tuple[int, int]:
        """Frames of a clip, and the stride between them; 0: set by the weights or the network."""
        return 0, 0

    def metrics(self, first: Metric) -> tuple[Metric, ...]:
        """All metrics of the task, beginning with `first`."""
        others = (each for each in (self.metric, *self.other_metrics) if each != first)
        return (first, *others)

    @property
    def metric_alone(self) -> Metric:
        """The metric of a single image, by which the images with the worst scores are found."""
        return self.metric

    def find_metric(self, name: str = "", outputs: int | None = None) -> Metric:
        """The metric `name` for a network with `outputs` outputs; "" is the task's own.

        Raises ValueError for a name that the task does not have, or not with so few outputs.
        """
        metrics = {
            each.name: each
            for each in (self.metric, *self.other_metrics)
            if outputs is None or outputs >= each.min_outputs
        }
        if name and name not in metrics:
            few = "" if outputs is None else f" with {outputs} classes"
            raise ValueError(
                f"recipe.score {name!r}: the task {self.name}{few} has {', '.join(metrics)}"
            )
        return metrics[name or self.metric.name]

    def for_data(self, data: DataSet) -> Self:
        """The task with the statistics of training images that the loss uses, as class counts."""
        return self

    def for_classes(self, classes: Sequence[str]) -> Self:
        """The task for the outputs of a trained network; takes the place of `for_data` there."""
        return self

    def fit(self, outputs: Tensor, targets: Any) -> Self:
        """The task with `state_fields` fitted to outputs of validation images, on the CPU."""
        return self

    @property
    def has_places(self) -> bool:
        """Whether predictions have locations, which `place` maps to the picture."""
        return type(self).place is not Task.place

    @property
    def has_fit(self) -> bool:
        """Whether `fit` changes anything, so that outputs of validation images must be held."""
        return type(self).fit is not Task.fit

    def fit_note(self, scores: Mapping[str, float]) -> str:
        """One line on the effect of the fitted state on the validation `scores`, or ""."""
        return ""

    def state(self) -> dict[str, Any]:
        """The `state_fields` that differ from their defaults, as JSON values."""
        defaults = type(self)()
        values = {name: getattr(self, name) for name in self.state_fields}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value != getattr(defaults, name)
        }

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """The task with the fields that `state` returned. Raises ValueError for invalid ones."""
        if others := state.keys() - set(self.state_fields):
            raise ValueError(f"the task {self.name} has no state {', '.join(sorted(others))}")
        values = from_json(state_type(type(self)), dict(state), f"state of the task {self.name}")
        return replace(self, **{name: getattr(values, name) for name in state})

    def open_data(self, where: str, rule: SplitRule = DEFAULT_RULE) -> DataSet:
        """The data set at `where` with the task's targets; `classes` has a name for each output."""
        return open_data(where, rule)

    def view_sides(self, images: Images, longer: int) -> tuple[int, ...]:
        """Pixels a side for views of `images`, whose longer sides have about `longer` pixels.

        Empty if any side that suits the weights will do.
        """
        return ()

    def resolution_for(self, images: Images, usual: int) -> int:
        """The default resolution for `images`, in pixels a side.

        `usual` is the resolution of the initial weights, or the network's own.
        """
        return usual

    def train_view(
        self, pre: Preprocessing, augmentation: Augmentation, decoder: Decoder, sides: Sides
    ) -> View:
        """The transform of image and target in training."""
        return TrainView(pre, augmentation, decoder, sides)

    def test_view(self, pre: Preprocessing) -> View:
        """The transform of image and target in evaluation."""
        return TestView(pre)

    def renumber(self, target: Any, numbers: Sequence[int]) -> Any:
        """A target with the class `numbers[c]` in place of each class c."""
        return numbers[target]

    def collate(self, targets: list[Any]) -> Any:
        """Targets of N samples -> a tensor with N rows, or a list of N entries; N may be 0."""
        return class_indices(targets)

    def head(self, net: Backbone) -> nn.Module | None:
        """A module that takes the maps of `net.features`, or, as `EmbeddingHead`, `net.embed`.

        None: the network's own classifier, with an output for each of the data set's `classes`.
        """
        return None

    def training_module(self, net: Backbone) -> nn.Module:
        """The module (images, masks) -> outputs for `loss`, with the parameters of `net`."""
        return net

    @property
    def training_targets(self) -> bool:
        """Whether `training_module` takes the targets as a third argument, as to draw samples."""
        return False

    @abstractmethod
    def loss(self, outputs: Any, targets: Any, teacher: Tensor | None = None) -> Tensor:
        """The scalar that a step minimises, in float32 or wider under any precision.

        `teacher`: a teacher's probabilities (N, K) for the same images.
        """

    @abstractmethod
    def score(self) -> Score:
        """A new score without images."""

    def chance_loss(self) -> float | None:
        """The training loss of the best prediction that ignores the images; None if unknown."""
        return None

    def chance_score(
        self, metric: Metric, scores: Mapping[str, float], targets: Sequence[Any] = ()
    ) -> float | None:
        """The `metric` of predictions that ignore the images; None if unknown.

        `targets` are the targets of the scored images, by default like the training images. In
        `scores`, a network's scores on the same images, "NAME_constant" is the metric of the best
        prediction that is the same for all images.
        """
        guess = 0.0 if metric.higher_is_better else None
        return scores.get(f"{metric.name}_constant", guess)

    def baseline_note(self, scores: Mapping[str, float]) -> str:
        """One line on the score of predictions that ignore the images, by `scores`, or ""."""
        return ""

    def activate(self, outputs: Tensor) -> Tensor:
        """Convert the network's outputs to the input of `decode`; exported files do it too."""
        return outputs

    def agree(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """Whether users see the same prediction in both outputs: (N,) of bool."""
        return outputs.argmax(1) == expected.argmax(1)

    def difference(self, outputs: Tensor, expected: Tensor) -> float:
        """The largest difference, relative to the largest expected output."""
        return float((outputs - expected).abs().max() / expected.abs().max())

    def invert(self, activated: Tensor) -> Tensor:
        """The inverse of `activate` of the task `uncalibrated`."""
        return activated

    def uncalibrated(self) -> Self:
        """The task that scores exported files, whose activated outputs are inverted."""
        return self

    @abstractmethod
    def decode(self, outputs: Tensor, classes: Sequence[str], top: int) -> list[tuple[Any, ...]]:
        """The predictions for each of N images, at most `top`, the most probable first.

        `outputs` are activated, float32 on the CPU. A prediction is a dataclass of JSON values and
        arrays, which JSON leaves out; the command `predict` prints its `str`. Locations are in
        pixels of the view.
        """

    def place(self, guesses: tuple[Any, ...], size: Size, pre: Preprocessing) -> tuple[Any, ...]:
        """Map the predictions for one image to its upright picture, of `size`.

        `guesses` is an entry of `decode`, for the view that `pre` makes, see `view_geometry`.
        """
        return guesses

    def truth(self, target: Any, classes: Sequence[str]) -> tuple[Any, ...]:
        """The result of `place` for a perfect prediction, for drawings; () for other tasks."""
        return ()

    def draw(
        self, picture: Image.Image, guesses: tuple[Any, ...], classes: Sequence[str]
    ) -> Image.Image | None:
        """Draw the predictions of `place` on the upright picture; None if the task draws none."""
        return None

    def maps(self, guesses: tuple[Any, ...]) -> Image.Image | None:
        """The predictions of `place` as a lossless image; None if the task has no maps."""
        return None

    def columns(self, outputs: Tensor, classes: Sequence[str], top: int) -> dict[str, Any]:
        """The columns of a file of predictions with N rows; `outputs` are as for `decode`.

        A column is a list of N values or lists, or a NumPy array with N rows. The default is one
        column of JSON.
        """
        rows = self.decode(outputs, classes, top)
        return {"prediction": [json.dumps([*map(json_values, row)]) for row in rows]}


def json_values(prediction: Any) -> dict[str, Any]:
    """The fields of a dataclass, except for arrays."""

    def without_arrays(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pairs if not isinstance(value, np.ndarray)}

    return asdict(prediction, dict_factory=without_arrays)


@cache
def state_type(task: type[Task]) -> type:
    """A dataclass of a task's `state_fields`, with the types and defaults of the task."""
    hints, default = get_type_hints(task, include_extras=True), task()
    columns = [
        (name, hints[name], field(default=getattr(default, name))) for name in task.state_fields
    ]
    return make_dataclass("State", columns, frozen=True)


def full_precision(values: Tensor) -> Tensor:
    """16-bit values as float32; wider types stay as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


@torch.no_grad()
def mean_over_processes(value: Tensor) -> Tensor:
    """The mean of a tensor over the processes that train together, without gradients.

    All processes must call it. Each process minimises its sum of losses / the mean count of losses,
    so that the average of the gradients is the gradient of the mean over all processes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return value.detach()
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
