"""The task of detection: the objects of an image, their classes and their boxes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from fullstride.data.dataset import DEFAULT_RULE, DataSet, Images, SplitRule
from fullstride.data.readers.decode import Size, UnreadableImage, image_size
from fullstride.data.readers.listing import Objects
from fullstride.data.targets import open_boxes
from fullstride.data.transforms.boxes import BoxTestView, BoxTrainView
from fullstride.data.transforms.crop import (
    Augmentation,
    Decoder,
    Sides,
    check_decoder,
    view_geometry,
)
from fullstride.io.console import count_of, print_note
from fullstride.io.records import Bounds, Count, Probability
from fullstride.nets.backbone import Backbone
from fullstride.nets.preprocessing import Fit, Preprocessing
from fullstride.tasks import dense
from fullstride.tasks.detect import average_precision
from fullstride.tasks.task import Metric, Task


@dataclass(frozen=True)
class Box:
    """A detected object."""

    label: str
    probability: float
    box: tuple[float, float, float, float]  # left, top, right, bottom, in pixels

    def __str__(self) -> str:
        place = " ".join(f"{edge:.0f}" for edge in self.box)
        return f"{' '.join(self.label.split())} {100 * self.probability:.1f} % at {place}"


# Names of boxes in drawings.

Rectangle = tuple[float, float, float, float]  # left, top, right, bottom


def place_of_name(
    box: Rectangle, text: tuple[float, float], size: Size, taken: Sequence[Rectangle]
) -> Rectangle | None:
    """The free place for a box's name that is nearest to the box's upper left corner.

    It is above the box, or else some lines lower or higher, and begins at the left side of the box
    or ends at the right side, inside the picture if that is wide enough. None if the names that are
    already written leave no place.
    """
    (w, h), (left, top, right, _) = text, box
    above, lowest = top - h - 1, max(0.0, size[1] - h - 1)
    lines = {min(max(above + step * (h + 2), 0.0), lowest) for step in range(-size[1], size[1])}
    for y in sorted(lines, key=lambda y: (abs(y - above), y)):
        for x in (left, right - w):
            x = min(max(x, 0.0), max(0.0, size[0] - w - 1))
            if not any(x <= c and a <= x + w and y <= d and b <= y + h for a, b, c, d in taken):
                return x, y, x + w, y + h
    return None


# The size of views: except for the smallest tenth, boxes are at least as large as COCO's objects of
# medium size, unless views would be larger than the pictures or than is usual.

# In views of 32 pixels, below `SMALLEST_VIEW`, no box has a positive location of FCOS by ATSS.
MEDIUM, SMALLEST = 32, 0.1
MOST_PICTURES = 200  # most pictures whose boxes decide the size


def side_for_boxes(images: Images) -> int:
    """Pixels a side of the smallest view that shows the boxes of `images`; 0 without boxes."""
    some, sides, shares = images.spaced(MOST_PICTURES), [], []
    for index, target in enumerate(some.targets):
        try:
            source = some.source(index)
            size = source.size if isinstance(source, Image.Image) else image_size(source)
        except UnreadableImage:
            continue
        sides.append(max(size))
        shares += [
            math.sqrt((right - left) * (bottom - top)) / max(size)
            for left, top, right, bottom in target.boxes
        ]
    if not shares:
        return 0
    wanted = MEDIUM / float(np.quantile(shares, SMALLEST))
    side = min(wanted, float(np.median(sides)), dense.LARGEST_VIEW)
    return max(dense.SMALLEST_VIEW, dense.SIDE_STEP * math.ceil(side / dense.SIDE_STEP))


# The comparison of two ways to compute a network. It pairs detections, not rows, as the order of
# equal scores may differ. Letters: N images, D detections of each.

PAIRED_SURE = 0.5  # least score of detections that users see
CLOSE_PIXELS, CLOSE_SCORES = 2.0, 0.1  # most between detections that look the same to users
COMPARED = 0.1  # least score of compared detections; lower ones may miss a threshold
PIXEL = 1e-3  # a pixel's share of `difference`, equal to a thousandth of a score


def distances(a_nd6: Tensor, b_nd6: Tensor) -> tuple[Tensor, Tensor]:
    """(N, D, D), (N, D, D): most pixels between the sides of two boxes, infinite for different
    classes, and differences of scores."""
    pixels = (a_nd6[:, :, None, :4] - b_nd6[:, None, :, :4]).abs().amax(-1)
    same = a_nd6[:, :, None, 5].round() == b_nd6[:, None, :, 5].round()
    scores = (a_nd6[:, :, None, 4] - b_nd6[:, None, :, 4]).abs()
    return torch.where(same, pixels, torch.inf), scores


# Boxes that suppression compares, per object of the image with the most objects.
PER_OBJECT, LEAST_CANDIDATES, MOST_CANDIDATES = 30, 100, 1000

COCO_METRICS = (
    Metric("ap", "AP", "%"),
    Metric("coco_ap50", "COCO's AP50", "%"),
    Metric("coco_ap75", "AP75", "%"),
    *(Metric(f"ap_{size}", f"AP {size}", "%") for size in ("small", "medium", "large")),
    Metric("ar100", "AR100", "%"),
)


@dataclass(frozen=True)
class DetectOptions(dense.DenseOptions):
    """The options of detection."""

    # fcos, in one stage (arXiv:1904.01355) with ATSS assignment, or faster_rcnn
    detector: Literal["fcos", "faster_rcnn"] = "fcos"
    # convolutions for classes, and for boxes, on each level of the pyramid
    head_convs: Count = 4
    # flip, or ssd for photometric distortion, zoom-out and IoU crops too (arXiv:1512.02325)
    box_augmentation: Literal["flip", "ssd"] = "flip"


@dataclass(frozen=True)
class Detect(DetectOptions, Task):
    """Detection by FCOS or Faster R-CNN; compared by VOC's AP50 in percent.

    FCOS has ATSS assignment, see `detection_loss`; the head of Faster R-CNN computes losses from
    the targets. Outputs in evaluation are detections (N, 100, 6), see `fcos.detections`. COCO's
    scores need the extra `detection`.
    """

    box_weight: float = 2.0  # of the loss of boxes
    labels: int = 0  # K
    # boxes with the highest scores that suppression compares: its time grows with the square of
    # their number, and 1,000 boxes take most of the time of a small network
    candidates: Annotated[int, Bounds(ge=1, le=MOST_CANDIDATES)] = MOST_CANDIDATES
    min_score: Probability = average_precision.DEFAULT_SCORE  # of predicted boxes

    name: ClassVar[str] = "detect"
    options: ClassVar[type] = DetectOptions
    metric: ClassVar[Metric] = Metric("ap50", "AP50", "%")
    other_metrics: ClassVar[tuple[Metric, ...]] = (Metric("f1", "F1", "%"), *COCO_METRICS)
    default_recipe: ClassVar[str] = "dense"
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = dense.HEAD_WIDTHS
    state_fields: ClassVar[tuple[str, ...]] = (
        "detector",
        "head_width",
        "head_convs",
        "candidates",
        "min_score",
    )
    output_names: ClassVar[tuple[str, str]] = ("detections", "detections")
    view_fit: ClassVar[Fit | None] = "pad"
    scoring_batch: ClassVar[int] = 16
    most_objects: ClassVar[int] = 100  # detections of the head

    def with_options(self, recipe: Any) -> Self:
        names = [metric.name for metric in COCO_METRICS]
        if recipe.score in names and not average_precision.has_coco():
            raise ValueError(
                f"recipe.score {recipe.score} needs hotcoco: pip install 'fullstride[detection]', "
                f"or use {self.metric.name}"
            )
        task = super().with_options(recipe)
        if task.training_targets and recipe.efficiency != "plain":
            raise ValueError(
                f"recipe.efficiency {recipe.efficiency}: the samples of faster_rcnn have shapes "
                "that depend on data, which do not compile: use plain"
            )
        return task

    def for_classes(self, classes: Sequence[str]) -> Self:
        return replace(self, labels=len(classes))

    def for_data(self, data: DataSet) -> Self:
        """The task for the data. Raises ValueError for a validation split without an object."""
        if data.val and all(all(target.difficult) for target in data.val.targets):
            raise ValueError(
                f"none of {count_of(len(data.val), 'validation image')} has an object that is not "
                "difficult: give others"
            )
        most = max((len(target.boxes) for target in data.train.targets), default=0)
        candidates = min(max(LEAST_CANDIDATES, PER_OBJECT * most), MOST_CANDIDATES)
        return replace(self.for_classes(data.classes), candidates=candidates)

    def open_data(self, where: str, rule: SplitRule = DEFAULT_RULE) -> DataSet:
        """The data set at `where`, whose targets are `Objects`."""
        return open_boxes(where, rule)

    def view_sides(self, images: Images, longer: int) -> tuple[int, ...]:
        return dense.sides_around(side_for_boxes(images) or longer, (2 / 3, 1, 3 / 2))

    def resolution_for(self, images: Images, usual: int) -> int:
        """`usual` or, with a printed note, a larger `side_for_boxes`."""
        side = side_for_boxes(images)
        if side > usual:
            print_note(
                f"views have {side} x {side} pixels in place of {usual} x {usual}, in which boxes "
                "would be too small to learn; --resolution sets it"
            )
        return max(side, usual)

    def train_view(
        self, pre: Preprocessing, augmentation: Augmentation, decoder: Decoder, sides: Sides
    ) -> BoxTrainView:
        check_decoder(decoder)
        return BoxTrainView(pre, augmentation, self.box_augmentation, self.jitter, sides)

    def test_view(self, pre: Preprocessing) -> BoxTestView:
        return BoxTestView(pre)

    def renumber(self, target: Objects, numbers: Sequence[int]) -> Objects:
        return target._replace(labels=tuple(numbers[label] for label in target.labels))

    def collate(self, targets: list[Any]) -> list[dict[str, Tensor]]:
        """Objects of N images, each a dict with boxes, labels, difficult and scale."""
        return targets

    def head(self, net: Backbone) -> nn.Module:
        # these modules import torchvision, which takes seconds
        from fullstride.tasks.detect.faster_rcnn import FasterRcnnHead
        from fullstride.tasks.detect.fcos import FcosHead

        kind = FcosHead if self.detector == "fcos" else FasterRcnnHead
        return kind(
            net.channels,
            net.strides,
            net.spec.classes,
            width=self.head_width,
            convs=self.head_convs,
            candidates=self.candidates,
        )

    @property
    def training_targets(self) -> bool:
        return self.detector == "faster_rcnn"

    def training_module(self, net: Backbone) -> nn.Module:
        from fullstride.tasks.detect.faster_rcnn import WithTargets

        return WithTargets(net) if self.training_targets else net

    def loss(self, outputs: Any, targets: Any, teacher: Tensor | None = None) -> Tensor:
        """`outputs`: `Predictions`, or losses by name. `targets`: a result of `collate`."""
        from fullstride.tasks.detect.fcos import detection_loss

        if self.training_targets:
            return torch.stack(list(outputs.values())).sum()
        return detection_loss(outputs, targets, box_weight=self.box_weight)

    def score(self) -> average_precision.DetectionScore:
        return average_precision.DetectionScore(self.labels, self.min_score)

    def fit(self, outputs: Tensor, targets: list[dict[str, Tensor]]) -> Self:
        """The task with the `min_score` of `best_min_score`."""
        scenes = map(average_precision.scene_of, outputs.numpy(), targets)
        return replace(self, min_score=average_precision.best_min_score([*scenes], self.labels))

    def fit_note(self, scores: Mapping[str, float]) -> str:
        if self.min_score == average_precision.DEFAULT_SCORE or "f1" not in scores:
            return ""
        return (
            f"boxes are predicted from a score of {self.min_score:.3g} on, which has the best F1 "
            f"of the validation split: {scores['f1']:.2f} %"
        )

    def agree(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """Whether each sure detection has a close one of its class in the other set."""
        pixels_ndd, scores_ndd = distances(outputs, expected)
        close = (pixels_ndd <= CLOSE_PIXELS) & (scores_ndd <= CLOSE_SCORES)
        fine = close.any(2) | (outputs[..., 4] < PAIRED_SURE)
        fine_expected = close.any(1) | (expected[..., 4] < PAIRED_SURE)
        return fine.all(1) & fine_expected.all(1)

    def difference(self, outputs: Tensor, expected: Tensor) -> float:
        """The largest distance of a detection from the nearest one of the other set.

        Distances are the larger of `PIXEL` times the pixels and the difference of the scores;
        without another detection of the class, the score. NaN if a number is not finite.
        """
        if not (outputs.isfinite().all() and expected.isfinite().all()):
            return math.nan
        pixels_ndd, scores_ndd = distances(outputs, expected)
        apart_ndd = torch.maximum(PIXEL * pixels_ndd, scores_ndd)
        largest = 0.0
        for rows, dim in ((outputs, 2), (expected, 1)):
            apart_nd = torch.minimum(apart_ndd.amin(dim), rows[..., 4])
            compared = rows[..., 4] >= COMPARED
            largest = max(largest, *apart_nd[compared].tolist(), 0.0)
        return largest

    def decode(self, outputs: Tensor, classes: Sequence[str], top: int) -> list[tuple[Box, ...]]:
        """Detections (N, D, 6) -> at most `top` visible boxes per image, in pixels of the view."""
        predictions = []
        for rows in outputs.numpy():
            visible = average_precision.visible_detections(rows, self.min_score)[:top].tolist()
            boxes = (Box(classes[int(k)], p, (x1, y1, x2, y2)) for x1, y1, x2, y2, p, k in visible)
            predictions.append(tuple(boxes))
        return predictions

    def place(self, guesses: tuple[Box, ...], size: Size, pre: Preprocessing) -> tuple[Box, ...]:
        """The boxes in pixels of the picture, clipped to its `size` (w, h)."""
        geometry, placed = view_geometry(size, pre), []
        for guess in guesses:
            corners = geometry.to_picture((guess.box[:2], guess.box[2:]))
            (x1, y1), (x2, y2) = np.clip(corners, 0, size).tolist()
            placed.append(replace(guess, box=(x1, y1, x2, y2)))
        return tuple(placed)

    def truth(self, target: Objects, classes: Sequence[str]) -> tuple[Box, ...]:
        pairs = zip(target.labels, target.boxes, strict=True)
        return tuple(Box(classes[label], 1.0, box) for label, box in pairs)

    def draw(
        self, picture: Image.Image, guesses: tuple[Box, ...], classes: Sequence[str]
    ) -> Image.Image:
        """A copy of `picture` with the boxes, and with the names that do not cover others."""
        image = picture.convert("RGB")
        pen = ImageDraw.Draw(image)
        width = max(1, round(min(image.size) / 200))
        size = max(10, round(min(image.size) / 40))
        colours = {name: dense.class_colour(k, 0.7, 1.0) for k, name in enumerate(classes)}
        for guess in reversed(guesses):  # the highest score on top
            left, top, right, bottom = guess.box
            edges = (left, top, max(left, right), max(top, bottom))
            pen.rectangle(edges, outline=colours[guess.label], width=width)
        names: list[Rectangle] = []
        for guess in guesses:
            text = f"{' '.join(guess.label.split())} {100 * guess.probability:.0f} %"
            x1, y1, x2, y2 = pen.textbbox((0, 0), text, anchor="lt", font_size=size)
            place = place_of_name(guess.box, (x2 - x1, y2 - y1), image.size, names)
            if place is None:
                continue
            names.append(place)
            pen.rectangle(place, fill=colours[guess.label])
            pen.text(place[:2], text, fill="black", anchor="lt", font_size=size)
        return image
