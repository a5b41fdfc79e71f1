"""What is the same for all stages of a search? The space, its variants, and where trials run."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.data.dataset import DataSet
from fullstride.latency.profiles import Profile
from fullstride.measure.budget import Budget
from fullstride.nets import zoo
from fullstride.nets.spec import NetSpec
from fullstride.search.llr.latency_tables import LatencyTables
from fullstride.search.llr.search_folder import TRIALS, Structure, Variant
from fullstride.search.llr.settings import Method, SearchSettings
from fullstride.search.structures.net_space import NetSpace, net_space
from fullstride.search.trials import Executor, Study, Trial, run_trials
from fullstride.train.recipes.choice import RecipeChoice


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchJob:
    """A search and its means."""

    folder: Path
    data: DataSet  # without its test images
    settings: SearchSettings
    recipe: RecipeChoice  # of MasterNet and winners
    space: NetSpace
    variants: tuple[Variant, ...]
    devices: Sequence[str]
    workers: int | None
    executor: Executor | None = None
    cache: dict[Any, Any] = field(default_factory=dict)  # of tables

    @property
    def method(self) -> Method:
        return self.settings.method

    @property
    def budget(self) -> Budget:
        return self.settings.budget()

    @property
    def home(self) -> Variant:
        """The variant in which the MasterNet and the tunings train.

        Its own resolution and kernel where they are a choice, else those in the middle.
        """
        own = self.space.master.resolution
        sides = sorted({each.resolution for each in self.variants})
        side = own if own in sides else sides[len(sides) // 2]
        kernels = [each.kernel for each in self.variants if each.resolution == side]
        stages = [stage.kernel for stage in self.space.master.stages]
        return Variant(side, next((k for k in kernels if stages.count(k) == len(stages)), 0))

    def space_of(self, variant: Variant) -> NetSpace:
        return self.space.with_kernel(variant.kernel) if variant.kernel else self.space

    def spec(self, structure: Structure | np.ndarray, variant: Variant) -> NetSpec:
        return self.space_of(variant).spec(np.array(structure), variant.resolution)

    def trial_folder(self, name: str) -> Path:
        return self.folder / TRIALS / name

    def parts(self, place: int) -> tuple[str, ...]:
        """The paths of the parts that are new if a place is exchanged; all for -1."""
        names = [each.name for each in self.space.places]
        return tuple(names) if place < 0 else (names[place],)

    def tables(self, profile: Profile, variant: Variant) -> LatencyTables:
        """The times of structures; the tables of the last profile are cached."""
        if self.cache.get("profile") != profile:
            self.cache.clear()
            self.cache["profile"] = profile
        if variant not in self.cache:
            batch, clock = self.budget.batch, self.settings.clock
            space, side = self.space_of(variant), variant.resolution
            self.cache[variant] = LatencyTables(space, profile, batch, side, clock)
        return self.cache[variant]

    def run(
        self, study: Study, trials: Mapping[str, Trial]
    ) -> Generator[str, None, dict[str, Any]]:
        """The result of each trial by its name, or a `Failure`."""
        results = yield from run_trials(study, [*trials.values()], self.devices, self.executor)
        return dict(zip(trials, results, strict=True))


def find_master(settings: SearchSettings, data: DataSet) -> NetSpec:
    """The MasterNet for the images. Raises ValueError, in one line, for another kind of network."""
    spec = zoo.spec(settings.master)
    if not isinstance(spec, NetSpec):
        raise ValueError(
            f"{settings.master} has no super-blocks: name a network of `fullstride zoo` made of "
            "Basic and Bottleneck stages, or the JSON file of a spec"
        )
    return replace(spec, classes=len(data.classes), in_channels=data.channels)


def find_space(master: NetSpec, settings: SearchSettings) -> NetSpace:
    """The structures around `master`. Raises ValueError, in one line, where there are none."""
    method = settings.method
    return net_space(
        master,
        depth_steps=settings.depth_steps,
        width_range=settings.width_range,
        most_widths=settings.most_widths,
        kernels=settings.kernel_sizes,
        per_block_kernels=method.kernels == "block",
        switch_blocks=settings.switch_blocks,
        paper=method.regression == "paper",
    )


def find_variants(master: NetSpec, settings: SearchSettings) -> tuple[Variant, ...]:
    """Every resolution with every kernel that is one for the whole network."""
    kernels: list[int] = [0]
    own = {stage.kernel for stage in master.stages}
    # By the paper's regression kernels are types, which blocks choose.
    by_network = settings.method.kernels == "network" and settings.method.regression != "paper"
    if by_network and settings.kernel_sizes:
        kernels = sorted({*settings.kernel_sizes, *(own if len(own) == 1 else {0})})
    sides = settings.sides(master.resolution)
    return tuple(Variant(side, kernel) for side in sides for kernel in kernels)


def describe(spec: NetSpec) -> str:
    """Depths and widths of a network in one line: 'stem 16, 1 x 48, ..., head 256'."""
    parts = [f"stem {spec.stem_width}"]
    parts += [f"{stage.depth} x {stage.width}" for stage in spec.stages]
    ratios = {f"{stage.kernel}/{stage.ratio:g}" for stage in spec.stages}
    parts += [f"head {spec.head_width}"] if spec.head_width else []
    return f"{', '.join(parts)} (kernel/ratio {', '.join(sorted(ratios))})"
