"""The task of depth estimation: the distance in metres of what each pixel shows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from fullstride.data.dataset import DEFAULT_RULE, DataSet, Images, SplitRule
from fullstride.data.readers.decode import Size
from fullstride.data.readers.masks import MILLIMETRES, DepthFile, UnreadableImage
from fullstride.data.targets import open_depths
from fullstride.io.records import NonNegative
from fullstride.nets.backbone import Backbone
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import dense
from fullstride.tasks.task import Metric, Score, bootstrap, full_precision, mean_over_processes

# The priors: depths that ignore the picture, for all pixels and for each row.

MAPS = 500  # most maps whose median is taken
SAMPLES = 64  # sampled rows, and columns, of a map


def fit_priors(images: Images, max_depth: float = 0.0) -> tuple[float, tuple[float, ...]]:
    """The medians in metres over all pixels, and over each of `SAMPLES` rows from the top.

    They are of at most `MAPS` maps, evenly spaced in the list of images.
    Depths above `max_depth`, if that is not 0, and unreadable maps are left out. A row without
    depths gets the overall median. Raises ValueError if there is no depth at all.
    """
    samples, problem = [], ""
    places = (np.arange(SAMPLES) + 0.5) / SAMPLES  # of sampled rows, from the top
    for target in images.spaced(MAPS).targets:
        try:
            metres = target.read()
        except UnreadableImage as error:
            problem = f" ({error})"
            continue
        rows, columns = ((places * side).astype(int) for side in metres.shape)
        samples.append(metres[rows][:, columns])
    depths = np.stack(samples, 1) if samples else np.zeros((SAMPLES, 0, SAMPLES), np.float32)
    valid = valid_pixels(depths, max_depth)
    if not valid.any():
        raise ValueError(f"no training image has a depth{problem}: give maps with metres above 0")
    constant = float(np.median(depths[valid]))
    by_row = zip(depths, valid, strict=True)
    rows = (float(np.median(each[has])) if has.any() else constant for each, has in by_row)
    return constant, tuple(rows)


def row_numbers(inside_h: np.ndarray, rows: int) -> np.ndarray:
    """(H,): the index of each view row's prior, among `rows` priors from top to bottom.

    `inside_h` says which rows show the picture, from its first row to its last.
    """
    shown = np.flatnonzero(inside_h)
    first, count = (int(shown[0]), len(shown)) if len(shown) else (0, 1)
    shares = (np.arange(len(inside_h)) - first + 0.5) / count
    return np.clip((shares * rows).astype(int), 0, rows - 1)


# The score: shares of pixels within a ratio, errors, and the scores of the priors.
#
# Letters: N images, H x W pixels. delta1, delta2 and delta3 are the percentages of all valid pixels
# whose ratio of predicted and true depth, the larger / the smaller, is below 1.25, 1.25 squared and
# 1.25 cubed.

RATIO = 1.25
SUMS = ("pixels", "delta1", "delta2", "delta3", "mae", "rmse", "loss")
PRIORS = ("constant", "rows")


class DepthScore(Score):
    """Scores of depths over the valid pixels of all images, at the size of the view.

    `delta1_constant` and `delta1_rows` are the scores of predicting the training priors.

    All arguments are in metres. `constant` is the prior of all pixels, 0: no priors; `rows` are the
    priors of rows, from the top of the picture to the bottom. True depths above `max_depth` are not
    valid; 0: no limit.
    """

    def __init__(
        self, constant: float = 0.0, rows: Sequence[float] = (), max_depth: float = 0.0
    ) -> None:
        self.constant, self.max_depth = constant, max_depth
        self.rows = torch.tensor(tuple(rows), dtype=torch.float32)
        self.sums: dict[str, float] = dict.fromkeys((*SUMS, *PRIORS), 0.0)
        # of each image: valid pixels, and valid pixels within `RATIO`
        self.images: list[tuple[int, int]] = []

    def update(self, metres_n1hw: Tensor, targets_nhw: Tensor) -> None:
        predicted = full_precision(metres_n1hw)[:, 0]
        valid = valid_pixels(targets_nhw, self.max_depth)
        depth, true = predicted[valid].double(), targets_nhw[valid].double()
        error = (depth - true).abs()
        self.sums["pixels"] += len(true)
        self.images += [
            (int(pixels.sum()), count_within(metres[pixels], targets[pixels], RATIO))
            for metres, targets, pixels in zip(predicted, targets_nhw, valid, strict=True)
        ]
        for power in (1, 2, 3):
            self.sums[f"delta{power}"] += count_within(depth, true, RATIO**power)
        self.sums["mae"] += error.sum().item()
        self.sums["rmse"] += error.square().sum().item()
        self.sums["loss"] += (depth.log() - true.log()).abs().sum().item()
        if self.constant:
            constant = torch.full_like(true, self.constant)
            by_row = self._row_priors(targets_nhw)[valid].double()
            self.sums["constant"] += count_within(constant, true, RATIO)
            self.sums["rows"] += count_within(by_row, true, RATIO)

    def _row_priors(self, targets_nhw: Tensor) -> Tensor:
        """(N, H, W): the prior of each pixel by its row of the picture."""
        inside_nh = (targets_nhw >= 0).any(2).cpu().numpy()
        numbers = np.stack([row_numbers(inside_h, len(self.rows)) for inside_h in inside_nh])
        prior_nh = self.rows[torch.from_numpy(numbers)].to(targets_nhw.device)
        return prior_nh[:, :, None].expand(targets_nhw.shape)

    def merge(self, other: Self) -> None:
        self.sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        self.images += other.images

    def resampled(self) -> np.ndarray:
        pixels_n, near_n = np.array(self.images).reshape(-1, 2).T

        def weighted(drawn_nb: np.ndarray) -> np.ndarray:
            pixels_b = pixels_n @ drawn_nb
            return np.where(
                pixels_b > 0, 100 * (near_n @ drawn_nb) / np.maximum(pixels_b, 1), np.nan
            )

        return bootstrap(len(self.images), weighted)

    def compute(self) -> dict[str, float]:
        sums, pixels = self.sums, self.sums["pixels"]
        if not pixels:
            raise ValueError("none of the images to score on has a valid depth: give others")
        priors = {f"delta1_{name}": 100 * sums[name] / pixels for name in PRIORS}
        return {
            **{name: 100 * sums[name] / pixels for name in ("delta1", "delta2", "delta3")},
            **(priors if self.constant else {}),
            "mae": sums["mae"] / pixels,
            "rmse": (sums["rmse"] / pixels) ** 0.5,
            "loss": sums["loss"] / pixels,
        }


def count_within(depth: Tensor, true: Tensor, ratio: float) -> int:
    """The number of pixels whose larger depth / smaller depth is below `ratio`."""
    return int((torch.maximum(depth / true, true / depth) < ratio).sum())


def valid_pixels(metres: Any, max_depth: float) -> Any:
    """Which true depths count: above 0 and, unless it is 0, at most `max_depth`.

    A tensor or a NumPy array -> booleans of its shape.
    """
    valid = metres > 0
    return valid & (metres <= max_depth) if max_depth else valid


OUTSIDE = -1.0  # target of pixels of the view outside the picture; 0: no valid depth
MAX_MILLIMETRES = 65535  # the largest value of a 16-bit image
# Colours from near to far: light yellow, orange, violet, dark blue.
NEAR_TO_FAR = np.array([(252, 253, 191), (251, 135, 97), (146, 43, 129), (20, 14, 54)])
SAME, SAME_RATIO = 0.99, 1.01  # predictions are equal if this share of pixels has a smaller ratio


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
class DepthOptions(dense.DenseOptions):
    """The options of depth estimation."""

    max_depth: NonNegative = 0.0  # larger true depths, in metres, do not count; 0: all do


@dataclass(frozen=True)
class Depth(DepthOptions, dense.PixelTask):
    """Depth estimation by the mean absolute error of log depths; compared by delta1 in percent.

    The network's output is the logarithm in training, and its exponential in evaluation, so that
    depths are positive and ratios count, as in the score. The paper does not state its loss. The
    loss is the mean over the valid pixels of the batch in all processes. If training enlarges a
    picture by a factor, its depths are divided by the factor, as in arXiv:1406.2283.

    `constant` and `rows` are the priors that scores are compared with, see `fit_priors`. Training
    begins at the constant.
    """

    constant: NonNegative = 0.0  # median of the training depths; 0: unknown
    rows: tuple[NonNegative, ...] = ()  # median of each row of training pictures, from the top

    name: ClassVar[str] = "depth"
    options: ClassVar[type] = DepthOptions
    metric: ClassVar[Metric] = Metric("delta1", "delta1", "%")
    other_metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("delta2", "delta2", "%"),
        Metric("delta3", "delta3", "%"),
        Metric("mae", "mean absolute error", "m", higher_is_better=False),
        Metric("rmse", "RMSE", "m", higher_is_better=False),
        Metric("loss", "loss", higher_is_better=False),
    )
    state_fields: ClassVar[tuple[str, ...]] = ("head_width", "max_depth", "constant", "rows")
    output_names: ClassVar[tuple[str, str]] = ("metres", "metres")
    outside: ClassVar[float] = OUTSIDE
    divides: ClassVar[bool] = True

    def open_data(self, where: str, rule: SplitRule = DEFAULT_RULE) -> DataSet:
        return open_depths(where, rule)

    def for_data(self, data: DataSet) -> Self:
        constant, rows = fit_priors(data.train, self.max_depth)
        return replace(self, constant=constant, rows=rows)

    def head(self, net: Backbone) -> dense.PixelHead:
        width, start = self.head_width, math.log(self.constant or 1.0)
        return dense.PixelHead(
            net.channels, net.strides, 1, width=width, finish=torch.exp, start=start
        )

    def loss(self, outputs: Tensor, targets: Tensor, teacher: Tensor | None = None) -> Tensor:
        """`outputs`: log of metres (N, 1, h, w), resized to the targets. `targets`: (N, H, W)."""
        log_depth = dense.resize(full_precision(outputs), targets.shape[-2:])[:, 0]
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
            f"{scores['delta1_constant']:.2f} %, and the median of each row "
            f"{scores['delta1_rows']:.2f} %"
        )

    def agree(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """Whether nearly all depths agree within a hundredth."""
        ratio = torch.maximum(outputs / expected, expected / outputs)
        return (ratio < SAME_RATIO).flatten(1).to(torch.float32).mean(1) >= SAME

    def decode(
        self, outputs: Tensor, classes: Sequence[str], top: int
    ) -> list[tuple[DepthMap, ...]]:
        return [(DepthMap.of(metres.numpy()),) for metres in outputs[:, 0]]

    def place(
        self, guesses: tuple[DepthMap, ...], size: Size, pre: Preprocessing
    ) -> tuple[DepthMap, ...]:
        """The depths on the picture's pixels, without the view's padding."""
        return (DepthMap.of(dense.on_picture(guesses[0].map, size, pre, 0)),)

    def truth(self, target: DepthFile, classes: Sequence[str]) -> tuple[DepthMap, ...]:
        return (DepthMap.of(target.read()),)

    def draw(
        self, picture: Image.Image, guesses: tuple[DepthMap, ...], classes: Sequence[str]
    ) -> Image.Image:
        """The depths as colours, from light for near to dark for far; unknown depths are black.

        Equal ratios of depths are equal steps of colours.
        """
        shown = guesses[0].map > 0
        logs = np.log(np.where(shown, guesses[0].map, 1.0))
        least, most = (logs[shown].min(), logs[shown].max()) if shown.any() else (0.0, 0.0)
        places = (logs - least) / max(most - least, 1e-6) * (len(NEAR_TO_FAR) - 1)
        channels = [np.interp(places, range(len(NEAR_TO_FAR)), column) for column in NEAR_TO_FAR.T]
        colours = np.where(shown[..., None], np.stack(channels, -1), 0)
        return Image.fromarray(colours.astype(np.uint8))

    def maps(self, guesses: tuple[DepthMap, ...]) -> Image.Image:
        """The depths in millimetres, as a 16-bit image; 0: unknown."""
        millimetres = np.rint(MILLIMETRES * guesses[0].map).clip(0, MAX_MILLIMETRES)
        return Image.fromarray(millimetres.astype(np.uint16))
