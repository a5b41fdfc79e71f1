"""Where are the objects of an image, and what are they? The task of detection."""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from fullstride.data.dataset import DEFAULT_RULE, DataSet, SplitRule
from fullstride.data.readers.decode import Size
from fullstride.data.targets import open_boxes
from fullstride.data.transforms.boxes import BoxTestView, BoxTrainView
from fullstride.data.transforms.crop import (
    Augmentation,
    Decoder,
    Sides,
    check_decoder,
    view_geometry,
)
from fullstride.io.records import Bounds
from fullstride.nets.backbone import Backbone
from fullstride.nets.preprocessing import Fit, Preprocessing
from fullstride.tasks.dense import DenseOptions
from fullstride.tasks.detect.average_precision import (
    DetectionScore,
    ObjectScore,
    difference,
    has_coco,
    predict_alike,
)
from fullstride.tasks.task import Metric, Score, Task

# What is predicted for an image? An object: its class, a score and a box.


@dataclass(frozen=True)
class Box:
    """An object: its class, the score of it, and where it is."""

    label: str
    probability: float
    box: tuple[float, float, float, float]  # left, top, right, bottom, in pixels

    def __str__(self) -> str:
        place = " ".join(f"{edge:.0f}" for edge in self.box)
        return f"{' '.join(self.label.split())} {100 * self.probability:.1f} % at {place}"


# How are boxes shown to people? Rectangles in the colours of their classes, with names.


SHOWN = 0.3  # score from which a box is drawn
GOLDEN = 0.618034  # of the circle of hues, by which each class differs from the one before


def draw_boxes(picture: Image.Image, guesses: Sequence[Box], classes: Sequence[str]) -> Image.Image:
    """A copy of `picture` with the boxes of a score of `SHOWN` or more, the highest on top."""
    image = picture.convert("RGB")
    pen = ImageDraw.Draw(image)
    width = max(1, round(min(image.size) / 200))
    size = max(10, round(min(image.size) / 40))
    for guess in reversed(guesses):
        if guess.probability < SHOWN:
            continue
        left, top, right, bottom = guess.box
        colour = class_colour(list(classes).index(guess.label))
        pen.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=width)
        text = f"{' '.join(guess.label.split())} {100 * guess.probability:.0f} %"
        box = pen.textbbox((left, top), text, anchor="lb", font_size=size)
        shift = max(0, -box[1])  # names of boxes at the upper edge are inside
        pen.rectangle((box[0], box[1] + shift, box[2], box[3] + shift), fill=colour)
        pen.text((left, top + shift), text, fill="black", anchor="lb", font_size=size)
    return image


def class_colour(index: int) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(index * GOLDEN % 1, 0.7, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


COCO_METRICS = (
    Metric("ap", "AP", "%"),
    Metric("coco_ap50", "COCO's AP50", "%"),
    Metric("coco_ap75", "AP75", "%"),
    *(Metric(f"ap_{size}", f"AP {size}", "%") for size in ("small", "medium", "large")),
    Metric("ar100", "AR100", "%"),
)


@dataclass(frozen=True)
class DetectOptions(DenseOptions):
    """The options of detection."""

    # fcos with the assignment of ATSS, in one stage (arXiv:1904.01355), or faster_rcnn
    detector: Literal["fcos", "faster_rcnn"] = "fcos"
    # convolutions of classes, and of boxes, on each level of the pyramid
    head_convs: Annotated[int, Bounds(ge=0)] = 4
    # flip, or ssd with photometric distortion, zoom-out and IoU crops too (arXiv:1512.02325)
    box_augmentation: Literal["flip", "ssd"] = "flip"


@dataclass(frozen=True)
class Detect(DetectOptions, Task):
    """FCOS with the assignment of ATSS, see `detection_loss`, or Faster R-CNN, whose head computes
    its losses with the targets; compared by VOC's AP50 in percent.

    Outputs of the network in evaluation are detections (N, 100, 6), see `fcos.detections`. COCO's
    scores need the extra `detection`.
    """

    box_weight: float = 2.0  # of the loss of boxes
    labels: int = 0  # K

    name: ClassVar[str] = "detect"
    options: ClassVar[type] = DetectOptions
    metric: ClassVar[Metric] = Metric("ap50", "AP50", "%")
    other_metrics: ClassVar[tuple[Metric, ...]] = COCO_METRICS
    default_recipe: ClassVar[str] = "dense"
    state_fields: ClassVar[tuple[str, ...]] = ("detector", "head_width", "head_convs")
    output_names: ClassVar[tuple[str, str]] = ("detections", "detections")
    view_fit: ClassVar[Fit | None] = "pad"
    scoring_batch: ClassVar[int] = 16

    def with_options(self, recipe: Any) -> Self:
        names = [metric.name for metric in COCO_METRICS]
        if recipe.score in names and not has_coco():
            raise ValueError(
                f"recipe.score {recipe.score} needs hotcoco: pip install 'fullstride[detection]', "
                f"or use {self.metric.name}"
            )
        task = super().with_options(recipe)
        if task.training_targets and recipe.efficiency not in ("plain", "fused"):
            raise ValueError(
                f"recipe.efficiency {recipe.efficiency}: the samples of faster_rcnn have shapes "
                "that depend on data, which do not compile: use plain or fused"
            )
        return task

    def for_classes(self, classes: Sequence[str]) -> Self:
        return replace(self, labels=len(classes))

    def for_data(self, data: DataSet) -> Self:
        return self.for_classes(data.classes)

    def open_data(self, where: str, rule: SplitRule = DEFAULT_RULE) -> DataSet:
        """The data set at `where`, whose targets are `Objects`."""
        return open_boxes(where, rule)

    def train_view(
        self, pre: Preprocessing, augmentation: Augmentation, decoder: Decoder, sides: Sides
    ) -> BoxTrainView:
        check_decoder(decoder)
        return BoxTrainView(pre, augmentation, self.box_augmentation, self.jitter, sides)

    def test_view(self, pre: Preprocessing) -> BoxTestView:
        return BoxTestView(pre)

    def collate(self, targets: list[Any]) -> list[dict[str, Tensor]]:
        """Objects of N images, each a dict with boxes, labels, difficult and scale."""
        return targets

    def head(self, net: Backbone) -> nn.Module:
        # these modules import torchvision, which takes seconds that other tasks need not wait for
        from fullstride.tasks.detect.faster_rcnn import FasterRcnnHead
        from fullstride.tasks.detect.fcos import FcosHead

        kind = FcosHead if self.detector == "fcos" else FasterRcnnHead
        shape = dict(width=self.head_width, convs=self.head_convs)
        return kind(net.channels, net.strides, net.spec.classes, **shape)

    @property
    def training_targets(self) -> bool:
        return self.detector == "faster_rcnn"

    def training_module(self, net: Backbone) -> nn.Module:
        from fullstride.tasks.detect.faster_rcnn import WithTargets

        return WithTargets(net) if self.training_targets else net

    def loss(self, outputs: Any, targets: Any, teacher: Tensor | None = None) -> Tensor:
        """`outputs`: `Predictions`, or losses by name. `targets`: those of `collate`."""
        from fullstride.tasks.detect.fcos import detection_loss

        if self.training_targets:
            return torch.stack(list(outputs.values())).sum()
        return detection_loss(outputs, targets, box_weight=self.box_weight)

    def score(self) -> DetectionScore:
        return DetectionScore(self.labels)

    def by_class(self, score: Score, classes: Sequence[str]) -> list[ObjectScore]:
        assert isinstance(score, DetectionScore)
        return score.by_class(classes)

    def interval(self, score: Score) -> tuple[float, float] | None:
        assert isinstance(score, DetectionScore)
        return score.interval()

    def agree(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """Whether the sure detections of each image have a partner in the other's."""
        return predict_alike(outputs, expected)

    def difference(self, outputs: Tensor, expected: Tensor) -> float:
        """A thousandth for a pixel between the sides of boxes, or a thousandth of the score."""
        return difference(outputs, expected)

    def decode(self, outputs: Tensor, classes: Sequence[str], top: int) -> list[tuple[Box, ...]]:
        """Detections (N, D, 6) -> at most `top` boxes of each image, in pixels of the view."""
        return [
            tuple(
                Box(classes[int(label)], probability, (x1, y1, x2, y2))
                for x1, y1, x2, y2, probability, label in rows[:top]
                if label >= 0
            )
            for rows in outputs.tolist()
        ]

    def place(self, guesses: tuple[Box, ...], size: Size, pre: Preprocessing) -> tuple[Box, ...]:
        """The boxes in pixels of the picture, which has `size` (w, h) and in which they end."""
        geometry = view_geometry(size, pre)
        return tuple(
            replace(guess, box=inside(geometry.to_picture(corners(guess)), size))
            for guess in guesses
        )

    def draw(
        self, picture: Image.Image, guesses: tuple[Box, ...], classes: Sequence[str]
    ) -> Image.Image:
        return draw_boxes(picture, guesses, classes)


def corners(guess: Box) -> tuple[tuple[float, float], tuple[float, float]]:
    x1, y1, x2, y2 = guess.box
    return (x1, y1), (x2, y2)


def inside(points: Sequence[tuple[float, float]], size: Size) -> tuple[float, float, float, float]:
    """The box of two corners, clipped to a picture of `size` (w, h)."""
    (x1, y1), (x2, y2) = ((min(max(x, 0), size[0]), min(max(y, 0), size[1])) for x, y in points)
    return x1, y1, x2, y2
