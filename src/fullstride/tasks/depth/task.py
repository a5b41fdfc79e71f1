"""How far is what each pixel shows? The task of depth, in metres."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from fullstride.data.dataset import DataSet
from fullstride.data.mask_data import open_depths
from fullstride.data.readers.decode import Size
from fullstride.data.readers.map_files import MILLIMETRES
from fullstride.data.transforms.crop import Augmentation
from fullstride.data.transforms.geometry import check_decoder
from fullstride.data.transforms.masks import MaskTestView, MaskTrainView
from fullstride.nets.backbone import Backbone
from fullstride.nets.preprocessing import Fit, Preprocessing
from fullstride.strict_json import Bounds
from fullstride.tasks.dense.colours import depth_colours
from fullstride.tasks.dense.head import PixelHead, resize
from fullstride.tasks.dense.maps import on_picture, stacked
from fullstride.tasks.depth.priors import fit_priors
from fullstride.tasks.depth.scores import DepthScore, valid_pixels
from fullstride.tasks.processes import mean_over_processes
from fullstride.tasks.task import Metric, Task, full_precision

OUTSIDE = -1.0  # of a target: pixels of the view that are not of the picture; 0: no valid depth
MAX_MILLIMETRES = 65535  # of an image of 16 bits
SAME, SAME_RATIO = 0.99, 1.01  # share of pixels within that ratio, for predictions that are equal

Metres = Annotated[float, Bounds(ge=0)]


@dataclass(frozen=True)
class DepthMap:
    """The depth of each pixel of an image."""

    min_m: float
    median_m: float
    max_m: float
    map: np.ndarray = field(repr=False, compare=False)  # float32 (H, W), metres; 0: not known

    @classmethod
    def of(cls, metres: np.ndarray) -> "DepthMap":
        values = metres[metres > 0]
        return cls(float(values.min()), float(np.median(values)), float(values.max()), metres)

    def __str__(self) -> str:
        return f"{self.min_m:.2f} to {self.max_m:.2f} m, median {self.median_m:.2f} m"


@dataclass(frozen=True)
class Depth(Task):
    """Mean absolute error of the logarithm of depths; compared by delta1 in percent.

    The network's output is the logarithm in training, and its exponential in evaluation, so that
    depths are positive and ratios count, as in the score. The paper does not state its loss. Pixels
    without a valid depth are left out; the loss is the mean over the others of the batch, in all
    processes. A picture that is enlarged by a factor in training has depths divided by it, as in
    arXiv:1406.2283.

    `constant` and `rows` are the priors that each score is beside, see `tasks.depth.priors`.
    Training begins with the constant.
    """

    head_width: Annotated[int, Bounds(ge=1)] = 256  # channels of the pyramid and the convolutions
    jitter: tuple[float, float] = (1.0, 1.0)  # of the scale in training, see `MaskTrainView`
    max_depth: Metres = 0.0  # true depths above it are not valid; 0: all are
    constant: Metres = 0.0  # median of the training depths; 0: not known
    rows: tuple[Metres, ...] = ()  # median of each row of training pictures, from the top

    name: ClassVar[str] = "depth"
    metric: ClassVar[Metric] = Metric("delta1", "delta1", "%")
    other_metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("delta2", "delta2", "%"),
        Metric("delta3", "delta3", "%"),
        Metric("mae", "mean absolute error", "m", higher_is_better=False),
        Metric("rmse", "RMSE", "m", higher_is_better=False),
        Metric("loss", "loss", higher_is_better=False),
    )
    recipe_fields: ClassVar[frozenset[str]] = frozenset({"jitter", "head_width", "max_depth"})
    default_recipe: ClassVar[str] = "dense"
    state_fields: ClassVar[tuple[str, ...]] = ("head_width", "max_depth", "constant", "rows")
    output_names: ClassVar[tuple[str, str]] = ("metres", "metres")
    view_fit: ClassVar[Fit | None] = "pad"
    scoring_batch: ClassVar[int] = 16

    def open_data(self, where: str, **how: Any) -> DataSet:
        return open_depths(where, **how)

    def for_data(self, data: DataSet) -> Self:
        priors = fit_priors(data.train, self.max_depth)
        return replace(self, constant=priors.constant, rows=priors.rows)

    def train_view(
        self,
        pre: Preprocessing,
        augmentation: Augmentation,
        decoder: Literal["pillow", "opencv"] = "pillow",
        sides: tuple[int, ...] = (),
    ) -> MaskTrainView:
        check_decoder(decoder)
        return MaskTrainView(pre, augmentation, self.jitter, sides, outside=OUTSIDE, divides=True)

    def test_view(self, pre: Preprocessing) -> MaskTestView:
        return MaskTestView(pre, outside=OUTSIDE)

    def collate(self, targets: list[Any]) -> Tensor:
        """Metres (H, W) of N images -> float32 (N, H, W)."""
        return stacked(targets)

    def head(self, net: Backbone) -> PixelHead:
        width, start = self.head_width, math.log(self.constant or 1.0)
        return PixelHead(net.channels, net.strides, 1, width=width, finish=torch.exp, start=start)

    def loss(self, outputs: Tensor, targets: Tensor, teacher: Tensor | None = None) -> Tensor:
        """`outputs`: log of metres (N, 1, h, w), resized to the targets. `targets`: (N, H, W)."""
        log_depth = resize(full_precision(outputs), (targets.shape[-2], targets.shape[-1]))[:, 0]
        valid = valid_pixels(targets, self.max_depth)
        true = torch.where(valid, targets, 1.0).log()
        error = F.l1_loss(log_depth, true, reduction="none").where(valid, 0.0)
        pixels = mean_over_processes(valid.sum().to(error.dtype))
        return error.sum() / pixels.clamp_min(1)

    def score(self) -> DepthScore:
        return DepthScore(self.constant, self.rows, self.max_depth)

    def baseline_note(self, scores: Mapping[str, float]) -> str:
        if "delta1_constant" not in scores:
            return ""
        return (
            "without looking at the images, the median of the training depths has delta1 "
            f"{scores['delta1_constant']:.2f} %, and that of each row {scores['delta1_rows']:.2f} %"
        )

    def agree(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """Whether nearly all depths are within a hundredth."""
        ratio = torch.maximum(outputs / expected, expected / outputs)
        return (ratio < SAME_RATIO).flatten(1).to(torch.float32).mean(1) >= SAME

    def decode(
        self, outputs: Tensor, classes: Sequence[str], top: int
    ) -> list[tuple[DepthMap, ...]]:
        return [(DepthMap.of(metres.numpy()),) for metres in outputs[:, 0]]

    def place(
        self, guesses: tuple[DepthMap, ...], size: Size, pre: Preprocessing
    ) -> tuple[DepthMap, ...]:
        """The depths of the pixels of the picture, without the view's padding."""
        return (DepthMap.of(on_picture(guesses[0].map, size, pre, 0)),)

    def draw(
        self, picture: Image.Image, guesses: tuple[DepthMap, ...], classes: Sequence[str]
    ) -> Image.Image:
        """The depths as colours, from light for near to dark for far."""
        return Image.fromarray(depth_colours(guesses[0].map))

    def maps(self, guesses: tuple[DepthMap, ...]) -> Image.Image:
        """The depths in millimetres, as an image of 16 bits: 0 where they are not known."""
        millimetres = np.rint(MILLIMETRES * guesses[0].map).clip(0, MAX_MILLIMETRES)
        return Image.fromarray(millimetres.astype(np.uint16))
