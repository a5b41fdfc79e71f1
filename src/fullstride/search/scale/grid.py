"""Which networks does a scaling study compare? A grid of width, depth and resolution, or a part."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from fullstride.nets import zoo
from fullstride.nets.families import resnet_rs
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import TimmSpec
from fullstride.search.scale.finished import Size
from fullstride.search.scale.settings import ScaleSettings

# Of the scaling study of arXiv:2103.07579.
WIDTHS = (0.25, 0.5, 1.0, 1.5, 2.0)
LAYERS = (26, 50, 101, 200, 300, 350, 400)
SIDES = (128, 160, 224, 320, 448)
DEPTHS = (0.5, 1.0, 2.0, 4.0)  # multipliers, for other families; ours
BASE_SIDE = 224  # of EfficientNet-B0


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """A network at a resolution."""

    name: str  # also of its folder
    model: str  # of the zoo, timm/NAME, or a JSON file of a spec
    width: float  # multiplier
    depth: float  # multiplier, or layers of a ResNet-RS
    resolution: int  # pixels a side

    @property
    def size(self) -> Size:
        return Size(self.width, self.depth, self.resolution)

    def spec(self, classes: int, channels: int) -> NetSpec | TimmSpec:
        """Of the network for images of so many channels."""
        changes: dict[str, Any] = dict(
            classes=classes, in_channels=channels, resolution=self.resolution
        )
        if is_resnet_rs(self.model):
            return replace(resnet_rs.of_layers(int(self.depth)).scaled(width=self.width), **changes)
        base = zoo.spec(self.model)
        if isinstance(base, NetSpec):
            base = base.scaled(width=self.width, depth=self.depth)
        return replace(base, **changes)


def is_resnet_rs(model: str) -> bool:
    """Whether depths are layers."""
    return re.fullmatch(r"resnet_rs_\d+", model) is not None


def grid(settings: ScaleSettings) -> list[ScalePoint]:
    """All points. Several models are points themselves, each at its own resolutions and width 1.

    Raises ValueError for names of no network, for a width or depth of timm's networks, and for
    layers that no ResNet-RS has.
    """
    points = []
    single = len(settings.models) == 1
    for model in settings.models:
        spec = zoo.spec(model)
        own, is_rs = isinstance(spec, NetSpec), is_resnet_rs(model)
        if not own and (settings.widths or settings.depths):
            raise ValueError(
                f"{model} cannot be scaled in width and depth: leave --widths and --depths out"
            )
        if settings.slow_resolution and own:
            raise ValueError(f"--slow-resolution is for timm's EfficientNets, not {model}")
        many = single and own
        widths = settings.widths or (WIDTHS if many else (1.0,))
        layers = float(model.rpartition("_")[2]) if is_rs else 1.0
        depths = settings.depths or ((LAYERS if is_rs else DEPTHS) if many else (layers,))
        sides = settings.resolutions or own_sides(spec, settings, many=many)
        for width, depth, side in product(widths, depths, sides):
            if is_rs and depth not in resnet_rs.SCALED_LAYERS:
                possible = " ".join(map(str, sorted(resnet_rs.SCALED_LAYERS)))
                raise ValueError(f"--depths {depth:g}: a ResNet-RS has layers {possible}")
            size: dict[str, Any] = dict(width=width, depth=float(depth), resolution=side)
            points.append(ScalePoint(name=name_of(model, **size), model=model, **size))
    return points


def own_sides(spec: Any, settings: ScaleSettings, *, many: bool) -> tuple[int, ...]:
    """The resolutions where none are set."""
    if settings.slow_resolution:
        return (slow_resolution(spec.resolution),)
    if not many:
        return (spec.resolution,)
    if is_resnet_rs(settings.models[0]):
        return SIDES
    step = 32 if spec.resolution >= 96 else 8
    sides = (step * round(spec.resolution * side / BASE_SIDE / step) for side in SIDES)
    return tuple(sorted({max(step, side) for side in sides}))


def name_of(model: str, width: float, depth: float, resolution: int) -> str:
    stem = model.removeprefix("timm/").removesuffix(".json").rpartition("/")[2]
    if is_resnet_rs(model):
        stem, depth = f"resnet_rs_{depth:g}", 1.0
    scaled = f"-w{width:g}" * (width != 1) + f"-d{depth:g}" * (depth != 1)
    return f"{stem}{scaled}-{resolution}"


def slow_resolution(resolution: int, share: float = 0.5) -> int:
    """The resolution of an EfficientNet that grows slowly: 224 stay, 600 become 368 pixels a side.

    In the logarithm from 224 it grows by `share` of what the compound coefficient's `resolution`
    does, rounded to 8 pixels. EfficientNet-RS (arXiv:2103.07579) keeps widths and depths, and says
    that resolution should grow slowly; its resolutions are only in a picture, so the share is ours.
    """
    return 8 * round(BASE_SIDE * (resolution / BASE_SIDE) ** share / 8)


def rand_magnitude(resolution: int) -> int:
    """RandAugment's magnitude of EfficientNet-RS by pixels a side (arXiv:2103.07579)."""
    return 10 if resolution <= 224 else 15 if resolution <= 320 else 20


def centre(points: Sequence[ScalePoint]) -> Size:
    """Of each axis the value nearest to the middle of its logarithms, of two the larger one."""

    def middle(values: Sequence[float]) -> float:
        mean = math.sqrt(min(values) * max(values))
        return min(values, key=lambda value: (round(abs(math.log(value / mean)), 9), -value))

    widths, depths, sides = zip(*(point.size for point in points), strict=True)
    return Size(middle(widths), middle(depths), int(middle(sides)))


def cross(points: Sequence[ScalePoint]) -> list[ScalePoint]:
    """The points that differ from the centre in at most one axis; few points are all taken."""
    middle = centre(points)
    arms = [
        point
        for point in points
        if sum(one != other for one, other in zip(point.size, middle, strict=True)) <= 1
    ]
    models = {point.model for point in points}
    return arms if len(models) == 1 else [*points]


def band(
    candidates: Sequence[ScalePoint],
    finished: Sequence[Size],
    errors: dict[Size, float],
    ms: dict[Size, float],
    count: int,
) -> list[ScalePoint]:
    """The candidates nearest to the front of predicted `errors`, at most `count`.

    Those on the front first, spread over its times if they are more.
    """
    sizes = [*finished, *(point.size for point in candidates)]

    def distance(point: ScalePoint) -> float:
        quicker = (errors[size] for size in sizes if ms[size] <= ms[point.size])
        return errors[point.size] - min(quicker)

    order = sorted(candidates, key=lambda point: (distance(point), ms[point.size]))
    front = [point for point in order if distance(point) == 0]
    if len(front) > count:
        places = np.unique(np.linspace(0, len(front) - 1, count).round().astype(int))
        return [front[place] for place in places]
    return order[:count]
