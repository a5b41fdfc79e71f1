"""The task of semantic segmentation: each pixel shows one of K classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from fullstride.data.dataset import DEFAULT_RULE, DataSet, SplitRule
from fullstride.data.readers.decode import Size
from fullstride.data.readers.masks import IGNORED, MaskFile
from fullstride.data.targets import open_masks
from fullstride.nets.backbone import Backbone
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import dense, task

# The score: mIoU and accuracies, from one table of counts.
#
# Letters: N images, K classes, H x W pixels. All scores but the loss are in percent.


@dataclass(frozen=True)
class RegionScore(task.ClassScore):
    """The scores of one class; `images` and `predicted` count pixels."""

    headers: ClassVar[Mapping[str, str]] = {
        **task.ClassScore.headers,
        "images": "pixels",
        "predicted": "predicted pixels",
        "iou": "IoU",
    }

    iou: float | None  # intersection / union of the class's pixels and its predicted pixels


class SegmentScore(task.Score):
    """Counts of pixels by class and prediction over all images, at the size of the view.

    Pixels of class `IGNORED`, such as padding, do not count. A class that no pixel has or is
    predicted as has no IoU; `absent_classes` is the number of such classes. `miou_constant` is the
    mIoU of predicting the most frequent class for all pixels.
    """

    def __init__(self) -> None:
        # by class (rows) and prediction (columns); before the first batch a single 0
        self.counts_kk = np.zeros((1, 1), np.int64)
        self.images: list[np.ndarray] = []  # int64 (2, K): each image's intersections and unions
        self.loss = 0.0  # the sum over pixels

    def update(self, logits_nkhw: Tensor, targets_nhw: Tensor) -> None:
        classes = logits_nkhw.shape[1]
        logits, targets = task.full_precision(logits_nkhw), targets_nhw.long()
        valid = targets != IGNORED
        images = len(logits)
        image = torch.arange(images, device=targets.device)[:, None, None].expand_as(targets)
        pairs = (image[valid] * classes + targets[valid]) * classes + logits.argmax(1)[valid]
        counts = pairs.bincount(minlength=images * classes**2).view(images, classes, classes)
        counts_nkk = counts.cpu().numpy()
        self.counts_kk = self.counts_kk + counts_nkk.sum(0)
        self.images += [np.stack((each.diagonal(), _union(each))) for each in counts_nkk]
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        self.loss += loss.sum(dtype=torch.float64).item()

    def merge(self, other: Self) -> None:
        self.counts_kk = self.counts_kk + other.counts_kk
        self.images += other.images
        self.loss += other.loss

    def compute(self) -> dict[str, float]:
        pixels = self.counts_kk.sum()
        if not pixels:
            raise ValueError("none of the images to score on has a pixel with a class: give others")
        hits, of_class, union = self.sums()
        occurs = union > 0
        return {
            "miou": 100 * float((hits[occurs] / union[occurs]).mean()),
            "pixel_accuracy": 100 * float(hits.sum() / pixels),
            "mean_accuracy": 100 * float((hits / np.maximum(of_class, 1))[of_class > 0].mean()),
            "miou_constant": 100 * float(of_class.max() / pixels / (of_class > 0).sum()),
            "loss": self.loss / int(pixels),
            "absent_classes": float((~occurs).sum()),
        }

    def sums(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each class the intersection, the pixels of the class, and the union."""
        return self.counts_kk.diagonal(), self.counts_kk.sum(1), _union(self.counts_kk)

    def resampled(self) -> np.ndarray:
        hits_nk, union_nk = np.stack(self.images, 1)

        def weighted(drawn_nb: np.ndarray) -> np.ndarray:
            hits_kb, union_kb = hits_nk.T @ drawn_nb, union_nk.T @ drawn_nb
            ious_kb, occurs_b = hits_kb / np.maximum(union_kb, 1), (union_kb > 0).sum(0)
            return np.where(occurs_b > 0, 100 * ious_kb.sum(0) / np.maximum(occurs_b, 1), np.nan)

        return task.bootstrap(len(self.images), weighted)

    def by_class(self, names: Sequence[str]) -> list[RegionScore]:
        hits, of_class, union = self.sums()
        columns = (each.tolist() for each in (hits, of_class, self.counts_kk.sum(0), union))
        return [
            RegionScore.of_counts(
                name, right, pixels, predicted, iou=100 * (right / union) if union else None
            )
            for name, right, pixels, predicted, union in zip(names, *columns, strict=True)
        ]


def _union(counts_kk: np.ndarray) -> np.ndarray:
    """For each class the pixels that have or are predicted as the class."""
    return counts_kk.sum(0) + counts_kk.sum(1) - counts_kk.diagonal()


OPACITY = 0.6  # of colours over a picture
SAME = 0.99  # least share of pixels with the same class in predictions that count as equal


@dataclass(frozen=True)
class Regions:
    """The class of each pixel of an image, and the share of each class."""

    percent: dict[str, float]  # of the pixels, by class, the largest first
    map: np.ndarray = field(repr=False, compare=False)  # uint8 (H, W); `IGNORED`: unknown
    classes: np.ndarray = field(repr=False, compare=False)  # names of the map's values

    @classmethod
    def of(cls, map_hw: np.ndarray, classes: Sequence[str], top: int) -> "Regions":
        """The regions of a map; `percent` has the `top` most frequent classes."""
        counts = np.bincount(map_hw[map_hw != IGNORED], minlength=len(classes))
        order = [k for k in np.argsort(-counts, kind="stable").tolist() if counts[k]][:top]
        percent = {str(classes[k]): 100 * counts[k].item() / counts.sum().item() for k in order}
        return cls(percent, map_hw, np.array(classes))

    def __str__(self) -> str:
        shares = (f"{' '.join(name.split())} {x:.1f} %" for name, x in self.percent.items())
        return ", ".join(shares)


@dataclass(frozen=True)
class SegmentOptions(dense.DenseOptions):
    """The options of segmentation."""

    # the colours of classes in coloured masks, or in black and white: a file with a line such as
    # 128 0 0 road for each class, or voc for Pascal VOC's palette
    colours: str = ""


@dataclass(frozen=True)
class Segment(SegmentOptions, dense.PixelTask):
    """Segmentation by the cross-entropy of pixels; compared by the mIoU in percent.

    The loss is the mean over the pixels of the batch in all processes, at the size of the input,
    without class `IGNORED`. Scores count the pixels of the view without its padding.
    """

    name: ClassVar[str] = "segment"
    options: ClassVar[type] = SegmentOptions
    metric: ClassVar[task.Metric] = task.Metric("miou", "mIoU", "%")
    other_metrics: ClassVar[tuple[task.Metric, ...]] = (
        task.Metric("pixel_accuracy", "pixel accuracy", "%"),
        task.Metric("mean_accuracy", "mean accuracy", "%"),
        task.Metric("loss", "loss", higher_is_better=False),
    )
    state_fields: ClassVar[tuple[str, ...]] = ("head_width",)
    outside: ClassVar[float] = IGNORED

    def open_data(self, where: str, rule: SplitRule = DEFAULT_RULE) -> DataSet:
        return open_masks(where, rule, self.colours)

    def renumber(self, target: MaskFile, numbers: Sequence[int]) -> MaskFile:
        table = bytes(IGNORED if each == IGNORED else numbers[each] for each in target.classes)
        return replace(target, classes=table)

    def head(self, net: Backbone) -> dense.PixelHead:
        return dense.PixelHead(net.channels, net.strides, net.spec.classes, width=self.head_width)

    def loss(self, outputs: Tensor, targets: Tensor, teacher: Tensor | None = None) -> Tensor:
        """`outputs`: logits (N, K, h, w), resized to the targets. `targets`: uint8 (N, H, W)."""
        logits = dense.resize(task.full_precision(outputs), targets.shape[-2:])
        classes = targets.long()
        # cross_entropy's own sum is not deterministic on a GPU
        each = F.cross_entropy(logits, classes, ignore_index=IGNORED, reduction="none")
        pixels = task.mean_over_processes((classes != IGNORED).sum().to(each.dtype))
        return each.sum() / pixels.clamp_min(1)

    def score(self) -> SegmentScore:
        return SegmentScore()

    def baseline_note(self, scores: Mapping[str, float]) -> str:
        if "miou_constant" not in scores:
            return ""
        value = scores["miou_constant"]
        return f"the most frequent class for all pixels has mIoU {value:.2f} %"

    def agree(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """Whether nearly all pixels have the same class; equal logits may choose either."""
        same = outputs.argmax(1) == expected.argmax(1)
        return same.flatten(1).to(torch.float32).mean(1) >= SAME

    def decode(
        self, outputs: Tensor, classes: Sequence[str], top: int
    ) -> list[tuple[Regions, ...]]:
        """The most probable class of each pixel, and the shares of the `top` largest classes."""
        maps = outputs.argmax(1).to(torch.uint8).numpy()
        return [(Regions.of(map_hw, classes, top),) for map_hw in maps]

    def place(
        self, guesses: tuple[Regions, ...], size: Size, pre: Preprocessing
    ) -> tuple[Regions, ...]:
        """The classes on the picture's pixels, without the view's padding."""
        (regions,) = guesses
        map_hw = dense.on_picture(regions.map, size, pre, IGNORED)
        return (Regions.of(map_hw, regions.classes.tolist(), len(regions.percent)),)

    def truth(self, target: MaskFile, classes: Sequence[str]) -> tuple[Regions, ...]:
        return (Regions.of(target.read(), classes, len(classes)),)

    def draw(
        self, picture: Image.Image, guesses: tuple[Regions, ...], classes: Sequence[str]
    ) -> Image.Image:
        colours = Image.fromarray(dense.class_colours()[guesses[0].map])
        return Image.blend(picture.convert("RGB"), colours, OPACITY)

    def maps(self, guesses: tuple[Regions, ...]) -> Image.Image:
        """An image with a palette whose values are the classes."""
        image = Image.fromarray(guesses[0].map)
        image.putpalette(dense.class_colours().tobytes())
        return image
