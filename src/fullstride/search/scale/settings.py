"""What does a user ask of a scaling study? The axes, how long trainings are, and what fits."""

from dataclasses import dataclass
from typing import Annotated

from fullstride.measure.budget import HERE, MOST_IMAGES
from fullstride.strict_json import Bounds, check_bounds

Multiplier = Annotated[float, Bounds(gt=0, le=64)]
Depth = Annotated[float, Bounds(gt=0, le=1_024)]


@dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """The arguments of `scale`. One that has begun to train is resumed only with the same ones."""

    # The network that is scaled; or several, such as timm/efficientnet_b0 to b4, that are compared
    # as they are.
    models: tuple[str, ...] = ("resnet_rs_50",)
    # Multipliers of the widths; by default 0.25 0.5 1 1.5 2 for one network, 1 for several.
    widths: tuple[Multiplier, ...] = ()
    # Multipliers of the depths, by default 0.5 1 2 4; of a ResNet-RS its layers, by default 26 50
    # 101 200 300 350 400.
    depths: tuple[Depth, ...] = ()
    # Pixels a side; of a ResNet-RS by default 128 160 224 320 448, of others in the same ratios to
    # their own.
    resolutions: tuple[Annotated[int, Bounds(ge=8, le=1024)], ...] = ()
    # For EfficientNets: resolutions that grow half as fast as theirs, and RandAugment's magnitude
    # by resolution, after EfficientNet-RS (arXiv:2103.07579).
    slow_resolution: bool = False
    # Lengths of training: names of recipes, such as scaling_10 scaling_100 scaling_350, or numbers
    # of epochs of --recipe; by default --recipe alone.
    regimes: tuple[str, ...] = ()
    # Train the whole grid, not only a cross through its middle and points near the expected front.
    full_grid: bool = False
    # Points near the expected front that follow the cross, in each regime.
    band: Annotated[int, Bounds(ge=0)] = 8
    # Trainings of each of three points, from which the noise is estimated; others have one.
    seeds: Annotated[int, Bounds(ge=1, le=100)] = 2
    # Where networks will run: here, where they are measured, or a profile such as rtx4090, or a
    # file that `calibrate` wrote, by which times are estimated.
    device: str = HERE
    # Images of a call.
    batch: Annotated[int, Bounds(ge=1, le=MOST_IMAGES)] = 1
    # The longest time that an image may take, in ms; slower points are left out.
    budget_ms: Annotated[float, Bounds(gt=0)] | None = None
    # Memory for training in GiB, without which that of the device is meant; points that need more
    # are left out.
    memory_gib: Annotated[float, Bounds(gt=0)] | None = None
    # Hours of training, all devices together; the most expensive points are left out.
    hours: Annotated[float, Bounds(gt=0)] | None = None
    # Epochs of the training that is to come; by default those of the longest regime.
    target_epochs: Annotated[float, Bounds(gt=0)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "--")
        if not self.models:
            raise ValueError("--models is empty: name a network, or several")
        for name in ("models", "widths", "depths", "resolutions", "regimes"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"--{name} {' '.join(map(str, values))}: name each once")
