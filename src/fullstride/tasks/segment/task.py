"""Which one of K classes does each pixel show? The task of semantic segmentation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from fullstride.data.dataset import DataSet
from fullstride.data.mask_data import open_masks
from fullstride.data.readers.decode import Size
from fullstride.data.readers.map_files import IGNORED
from fullstride.data.transforms.crop import Augmentation
from fullstride.data.transforms.geometry import check_decoder
from fullstride.data.transforms.masks import MaskTestView, MaskTrainView
from fullstride.nets.backbone import Backbone
from fullstride.nets.preprocessing import Fit, Preprocessing
from fullstride.strict_json import Bounds
from fullstride.tasks.dense.colours import class_colours, class_picture, over_picture
from fullstride.tasks.dense.head import PixelHead, resize
from fullstride.tasks.dense.maps import on_picture, stacked
from fullstride.tasks.processes import mean_over_processes
from fullstride.tasks.segment.scores import RegionScore, SegmentScore
from fullstride.tasks.task import Metric, Score, Task, full_precision

SAME = 0.99  # of the pixels of an image that predict the same, from which on predictions are equal


@dataclass(frozen=True)
class Regions:
    """The class of each pixel of an image, and how much of it each class is."""

    percent: dict[str, float]  # of the pixels, by class, the largest first
    map: np.ndarray = field(repr=False, compare=False)  # uint8 (H, W); `IGNORED`: not known
    classes: np.ndarray = field(repr=False, compare=False)  # names of the map's values

    @classmethod
    def of(cls, map_hw: np.ndarray, classes: Sequence[str], top: int) -> "Regions":
        """With the shares of the `top` most frequent classes."""
        counts = np.bincount(map_hw[map_hw != IGNORED], minlength=len(classes))
        order = [k for k in np.argsort(-counts, kind="stable").tolist() if counts[k]][:top]
        percent = {str(classes[k]): 100 * counts[k].item() / counts.sum().item() for k in order}
        return cls(percent, map_hw, np.array(classes))

    def __str__(self) -> str:
        shares = (f"{' '.join(name.split())} {x:.1f} %" for name, x in self.percent.items())
        return ", ".join(shares)


@dataclass(frozen=True)
class Segment(Task):
    """Cross-entropy of the pixels, at the size of the input; compared by the mIoU in percent.

    Pixels of class `IGNORED` are left out. The loss is the mean over the other pixels of the batch,
    in all processes. Scores are those of the pixels of the view, without its padding.
    """

    head_width: Annotated[int, Bounds(ge=1)] = 256  # channels of the pyramid and the convolutions
    jitter: tuple[float, float] = (1.0, 1.0)  # of the scale in training, see `MaskTrainView`

    name: ClassVar[str] = "segment"
    metric: ClassVar[Metric] = Metric("miou", "mIoU", "%")
    other_metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("pixel_accuracy", "pixel accuracy", "%"),
        Metric("mean_accuracy", "mean accuracy", "%"),
        Metric("loss", "loss", higher_is_better=False),
    )
    recipe_fields: ClassVar[frozenset[str]] = frozenset({"jitter", "head_width"})
    default_recipe: ClassVar[str] = "dense"
    state_fields: ClassVar[tuple[str, ...]] = ("head_width",)
    view_fit: ClassVar[Fit | None] = "pad"
    scoring_batch: ClassVar[int] = 16

    def open_data(self, where: str, **how: Any) -> DataSet:
        return open_masks(where, **how)

    def train_view(
        self,
        pre: Preprocessing,
        augmentation: Augmentation,
        decoder: Literal["pillow", "opencv"] = "pillow",
        sides: tuple[int, ...] = (),
    ) -> MaskTrainView:
        check_decoder(decoder)
        return MaskTrainView(pre, augmentation, self.jitter, sides, outside=IGNORED)

    def test_view(self, pre: Preprocessing) -> MaskTestView:
        return MaskTestView(pre, outside=IGNORED)

    def collate(self, targets: list[Any]) -> Tensor:
        """Classes (H, W) of N images -> uint8 (N, H, W)."""
        return stacked(targets)

    def head(self, net: Backbone) -> PixelHead:
        return PixelHead(net.channels, net.strides, net.spec.classes, width=self.head_width)

    def loss(self, outputs: Tensor, targets: Tensor, teacher: Tensor | None = None) -> Tensor:
        """`outputs`: logits (N, K, h, w), resized to the targets. `targets`: uint8 (N, H, W)."""
        logits = resize(full_precision(outputs), (targets.shape[-2], targets.shape[-1]))
        classes = targets.long()
        # not the sum of cross_entropy, which is not deterministic on a GPU
        each = F.cross_entropy(logits, classes, ignore_index=IGNORED, reduction="none")
        pixels = mean_over_processes((classes != IGNORED).sum().to(each.dtype))
        return each.sum() / pixels.clamp_min(1)

    def score(self) -> SegmentScore:
        return SegmentScore()

    def by_class(self, score: Score, classes: Sequence[str]) -> list[RegionScore]:
        assert isinstance(score, SegmentScore)
        return score.by_class(classes)

    def baseline_note(self, scores: Mapping[str, float]) -> str:
        if "miou_constant" not in scores:
            return ""
        value = scores["miou_constant"]
        return f"the most frequent class for all pixels has mIoU {value:.2f} %"

    def agree(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """Whether nearly all pixels are of the same class: of logits that are equal, any is."""
        same = outputs.argmax(1) == expected.argmax(1)
        return same.flatten(1).to(torch.float32).mean(1) >= SAME

    def decode(
        self, outputs: Tensor, classes: Sequence[str], top: int
    ) -> list[tuple[Regions, ...]]:
        """The class of the largest logit of each pixel, and the shares of the `top` largest."""
        maps = outputs.argmax(1).to(torch.uint8).numpy()
        return [(Regions.of(map_hw, classes, top),) for map_hw in maps]

    def place(
        self, guesses: tuple[Regions, ...], size: Size, pre: Preprocessing
    ) -> tuple[Regions, ...]:
        """The classes of the pixels of the picture, without the view's padding."""
        (regions,) = guesses
        map_hw = on_picture(regions.map, size, pre, IGNORED)
        return (Regions.of(map_hw, regions.classes.tolist(), len(regions.percent)),)

    def draw(
        self, picture: Image.Image, guesses: tuple[Regions, ...], classes: Sequence[str]
    ) -> Image.Image:
        return over_picture(picture, class_colours()[guesses[0].map])

    def maps(self, guesses: tuple[Regions, ...]) -> Image.Image:
        """The classes as the values of an image with a palette."""
        return class_picture(guesses[0].map)
