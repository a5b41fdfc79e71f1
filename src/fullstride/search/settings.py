"""The settings of a search and of a scaling study, as on the command line.

This module imports nothing slow, as `--help` reads it.
"""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from fullstride.io.records import Bounds, Count, Positive, PositiveInt
from fullstride.study.settings import BudgetSettings

PAPER_SIDES = (192, 224, 256)  # pixels, of arXiv:2006.14090
SMALL_SIDE = 128  # pixels; below, a MasterNet's own resolution replaces the paper's
Clock = Literal["both", "device", "host"]
Next = Literal["thompson", "greedy", "none"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """The choices where a search may follow the paper (arXiv:2006.14090, section 4) or not.

    The defaults are ours, for the reasons in docs/reproduce/search.md; `PAPER` follows the paper
    literally. A user sets each choice by the field of `SearchSettings` with the same name, and
    `training` by the recipe of the search.
    """

    regression: Literal["bayesian", "paper"] = "bayesian"
    baseline: Literal["control", "master"] = "control"
    design: Literal["spread", "random"] = "spread"
    kernels: Literal["network", "block"] = "network"
    next: Next = "thompson"
    winners: int = 2
    tuning: Literal["images", "paper"] = "images"
    training: str = ""  # recipe of the MasterNet and the winners; "" for the default of the case
    final: str = ""  # recipe of the last training; "" to keep the winner as it is


OURS = Method()
PAPER = Method(
    regression="paper",
    baseline="master",
    design="random",
    kernels="block",
    next="none",
    winners=1,
    tuning="paper",
    training="genet_nas",
    final="genet",
)
PRESETS = {"ours": OURS, "paper": PAPER}


@dataclass(frozen=True, kw_only=True)
class SearchSettings(BudgetSettings):
    """How a search is done. Once it trains, it resumes with the same settings only."""

    # The network to begin with: masternet_1 to masternet_20, another of `fullstride zoo` made of
    # Basic and Bottleneck stages, or a JSON file of a spec.
    master: str = "masternet_1"
    # The time that the budget bounds on a profile's device: device and host in parallel, or one
    # alone. A CUDA graph has hardly any host time.
    clock: Clock = "both"
    # The form that is measured here: module, for PyTorch's modules, or a format; by default the
    # first format that can be written.
    format: str = ""
    # Pixels a side to choose from; by default 192, 224 and 256, or the MasterNet's own below 128.
    resolutions: tuple[Annotated[int, Bounds(ge=8, le=1024)], ...] = ()
    # Whether the method is ours or literally the paper's; the next eight fields change parts of it.
    preset: Literal["ours", "paper"] = "ours"
    # Regression: bayesian, or the paper's without an intercept and with linear widths.
    regression: Literal["bayesian", "paper"] | None = None
    # Reference of retrained blocks: a control of the same place, or the MasterNet.
    baseline: Literal["control", "master"] | None = None
    # Samples of a place: spread over its choices, or random.
    design: Literal["spread", "random"] | None = None
    # Kernels 3 and 5 for the whole network, or for each block.
    kernels: Literal["network", "block"] | None = None
    # Structures after the first design: by Thompson sampling, the best predicted, or none.
    next: Next | None = None
    # Structures of each resolution and kernel that are trained to the end.
    winners: PositiveInt | None = None
    # Recipe of tuning: by the number of images, or the paper's.
    tuning: Literal["images", "paper"] | None = None
    # Recipe of the last training; by default the winner stays as it is.
    final: str | None = None
    # Samples of each place and class of block, the control included.
    samples: Annotated[int, Bounds(ge=2)] = 9
    # Number of tunings; the model chooses the tunings after the first design, by default 16.
    trainings: PositiveInt | None = None
    # Random structures that are trained to the end from random weights, beside the tunings. They
    # show effects that a tuning can't, such as deep networks that do not converge.
    whole: Count = 0
    # Blocks that a stage may have more or fewer.
    depth_steps: Count = 2
    # Least and largest width, as multiples of the MasterNet's width.
    width_range: tuple[Positive, Positive] = (0.5, 2.0)
    # Most widths to choose from at each place.
    most_widths: Annotated[int, Bounds(ge=3)] = 24
    # Kernels to choose from; the MasterNet's kernel is always among them.
    kernel_sizes: tuple[PositiveInt, ...] = (3, 5)
    # Let stages change their class (XX, BL, DW) as well.
    switch_blocks: bool = False
    # What trains when a block is exchanged: block and the layers that read it; feature, the same
    # after the block has matched the MasterNet's maps; or full, everything.
    tune: Literal["block", "feature", "full"] = "block"
    # Epochs of a tuning; by default a quarter of the MasterNet's.
    tune_epochs: Positive | None = None
    # Epochs of the last training; by default as in its recipe.
    final_epochs: Positive | None = None
    # Structures that each selection compares, and how many of the best are measured.
    count: PositiveInt = 1_000_000
    finalists: PositiveInt = 10
    # Networks that are measured here before the search, to fit a profile.
    measured: Annotated[int, Bounds(ge=6)] = 16
    # Seed of the samples of structures and of the trainings.
    seed: Count = 0

    @property
    def method(self) -> Method:
        """The preset with the fields that were set."""
        values = {each.name: getattr(self, each.name, None) for each in fields(Method)}
        own: Any = {name: value for name, value in values.items() if value is not None}
        return replace(PRESETS[self.preset], **own)

    def sides(self, own: int) -> tuple[int, ...]:
        """The resolutions to choose from, for a MasterNet of `own` pixels a side."""
        default = (own,) if own < SMALL_SIDE else PAPER_SIDES
        return tuple(sorted(set(self.resolutions))) or default


Multiplier = Annotated[float, Bounds(gt=0, le=64)]
Depth = Annotated[float, Bounds(gt=0, le=1_024)]


@dataclass(frozen=True, kw_only=True)
class ScaleSettings(BudgetSettings):
    """Which networks are scaled, and how. A study is resumed with the same settings only."""

    # The network to scale; or several, such as timm/efficientnet_b0 to b4, to compare as they are.
    models: tuple[str, ...] = ("resnet_rs_50",)
    # Multipliers of the widths; by default 0.25 0.5 1 1.5 2 for one network, 1 for several.
    widths: tuple[Multiplier, ...] = ()
    # Multipliers of the depths, by default 0.5 1 2 4; for a ResNet-RS layers, by default 26 50 101
    # 200 300 350 400.
    depths: tuple[Depth, ...] = ()
    # Pixels a side; by default 128 160 224 320 448 for a ResNet-RS, and the same ratios to the own
    # resolution for other networks.
    resolutions: tuple[Annotated[int, Bounds(ge=8, le=1024)], ...] = ()
    # For EfficientNets: resolutions that grow half as fast, and RandAugment's magnitude by
    # resolution, after EfficientNet-RS (arXiv:2103.07579).
    slow_resolution: bool = False
    # Lengths of training: names of recipes, such as scaling_10 scaling_100 scaling_350, or numbers
    # of epochs of --recipe; by default --recipe alone.
    regimes: tuple[str, ...] = ()
    # Train the whole grid, not only a cross through its middle and points near the expected front.
    full_grid: bool = False
    # Points near the expected front that follow the cross, in each regime.
    band: Count = 8
    # Trainings of each of three points, which estimate the noise; other points have one.
    seeds: Annotated[int, Bounds(ge=1, le=100)] = 2
    # Memory for training in GiB, by default the device's; points that need more are left out.
    memory_gib: Positive | None = None
    # Hours of training, all devices together; the most expensive points are left out.
    hours: Positive | None = None
    # Epochs of the future training; by default as in the longest regime.
    target_epochs: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.models:
            raise ValueError("--models is empty: name a network, or several")
        for name in ("models", "widths", "depths", "resolutions", "regimes"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"--{name} {' '.join(map(str, values))}: name each once")
