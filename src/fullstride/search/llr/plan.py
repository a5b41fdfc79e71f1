"""The job of a search and the records of its stages, the times of networks and the plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.data.dataset import DataSet
from fullstride.io.records import refuse_flags
from fullstride.io.writing import scratch_folder
from fullstride.latency.devices import load_profile
from fullstride.latency.profiles import Profile
from fullstride.measure.budget import Budget
from fullstride.nets import zoo
from fullstride.nets.spec import NetSpec
from fullstride.search.block_tuning import PAPER_TUNING, tuning_recipe, write_spec
from fullstride.search.llr.times import LatencyTables, find_label, fit_profile, measure_specs
from fullstride.search.settings import Method, SearchSettings
from fullstride.search.structures.proposals import Design, Slope, fastest, first_design
from fullstride.search.structures.space import NetSpace, net_space
from fullstride.study.driver import Results, StudyJob
from fullstride.study.trials import Work
from fullstride.train.batches import recipe_in_epochs
from fullstride.train.recipes.choice import RecipeChoice, RunOptions, case_of
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.timing import RunTimes, time_training

TRIALS = "trials"  # has a folder for each training
FURTHER = 16  # default number of tunings after the first design: four refits
# Time of a step with a teacher / without one: the teacher's forward pass is a third of a step.
TEACHER = 4 / 3
TUNING_SHARE = 0.25  # of the MasterNet's epochs
# Purposes of random draws; later stages have further numbers.
MEASURE, SAMPLE, RANDOM = 1, 2, 5


@dataclass(frozen=True)
class Variant:
    """A resolution and a kernel; all variants are searched with the same regression."""

    resolution: int  # pixels a side
    kernel: int  # of all stages; 0: each stage keeps its own

    def __str__(self) -> str:
        kernel = f" with kernel {self.kernel}" if self.kernel else ""
        return f"{self.resolution} pixels{kernel}"

    @property
    def name(self) -> str:
        """A name for folders."""
        return f"{self.resolution}-k{self.kernel}" if self.kernel else f"{self.resolution}"


Structure = tuple[int, ...]  # the choice at each place


@dataclass(frozen=True)
class MeasuredStructure:
    structure: Structure
    variant: Variant
    ms: float  # per image
    low: float  # of nine in ten rounds
    high: float


@dataclass(frozen=True, kw_only=True)
class DeviceTimes:
    """The profile that estimates times, and the measurements here to which it was fitted."""

    profile: Profile
    measured: tuple[MeasuredStructure, ...] = ()


@dataclass(frozen=True)
class PlannedTrainings:
    stage: str
    trainings: int
    seconds: float  # of all of them, one after the other


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """The trainings of a search, and their expected time here."""

    structures: float  # in the space
    master_ms: Mapping[str, float]  # variant -> ms per image of the MasterNet
    fastest_ms: Mapping[str, float]  # variant -> ms per image of the fastest structure
    trainings: tuple[PlannedTrainings, ...]
    devices: int  # trainings at the same time

    @property
    def total_s(self) -> float:
        return sum(each.seconds for each in self.trainings) / self.devices


WHOLE = -2


@dataclass(frozen=True)
class Tuning:
    """A finished tuning or training, as input of the regression."""

    trial: str  # its folder
    structure: Structure
    place: int  # exchanged place; -1: all places; `WHOLE`: trained from random weights
    score: float | None  # the recipe's metric, in percent
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Regression:
    """The regression of scores on changes of structures."""

    slopes: tuple[Slope, ...]
    reference: float  # score of the MasterNet's structure
    noise: float | None  # standard deviation of a training, in points
    failures: tuple[str, ...] = ()  # trial: reason


@dataclass(frozen=True, kw_only=True)
class Finalist:
    structure: Structure
    variant: Variant
    network: str  # its depths and widths, in words
    predicted: float  # score
    low: float  # of the 95 % prediction interval
    high: float
    ms: float  # per image
    ms_low: float
    ms_high: float
    measured: bool = False
    bound: str = ""  # what bounds the time, if it is an estimate
    at_bounds: tuple[str, ...] = ()  # places at the end of a range


@dataclass(frozen=True)
class Winner:
    """A finalist that was trained to the end."""

    trial: str
    finalist: Finalist
    score: float | None  # on the validation split
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class SearchResults:
    """The network of a search."""

    data_name: str
    settings: Mapping[str, Any]
    best: Winner
    bundle: str  # its path in the folder
    val: float  # the best of several, and therefore biased upward
    test: Mapping[str, float]  # scores, read once; empty without test images
    test_images: int
    seconds: Mapping[str, float]  # of each stage


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchJob(StudyJob):
    """The job of a search, with its space and variants."""

    settings: SearchSettings
    cache: dict[Any, Any] = field(default_factory=dict)  # of tables

    @cached_property
    def space(self) -> NetSpace:
        """The structures around the MasterNet. Raises ValueError, in one line, if none exist."""
        settings = self.settings
        return net_space(
            find_master(settings, self.data),
            depth_steps=settings.depth_steps,
            width_range=settings.width_range,
            most_widths=settings.most_widths,
            kernels=settings.kernel_sizes,
            per_block_kernels=self.method.kernels == "block",
            switch_blocks=settings.switch_blocks,
            paper=self.method.regression == "paper",
        )

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """Every combination of a resolution and a kernel for the whole network."""
        settings, master = self.settings, self.space.master
        kernels: list[int] = [0]
        own = {stage.kernel for stage in master.stages}
        # In the paper's regression, kernels are part of the types that blocks choose.
        by_network = self.method.kernels == "network" and self.method.regression != "paper"
        if by_network and settings.kernel_sizes:
            kernels = sorted({*settings.kernel_sizes, *(own if len(own) == 1 else {0})})
        sides = settings.sides(master.resolution)
        return tuple(Variant(side, kernel) for side in sides for kernel in kernels)

    def check(self) -> None:
        """Raise ValueError, in one line, for invalid arguments, before anything is written."""
        settings, changes = self.settings, self.recipe.changes
        settings.budget()
        if "resolution" in changes:
            raise ValueError(
                "recipe.resolution is searched: choose by --resolutions, or leave it out"
            )
        if "seed" in changes:
            raise ValueError("recipe.seed is set by each training: give it by --seed")
        if settings.whole and settings.method.regression == "paper":
            raise ValueError(
                f"--whole {settings.whole}: the paper's regression takes tunings only; leave it "
                "out, or give --regression bayesian"
            )
        if settings.method.regression == "paper" and settings.method.next != "none":
            raise ValueError(
                f"--next {settings.method.next}: the paper's regression takes changes at one place "
                "only; give --next none, or --regression bayesian"
            )
        super().check()
        if settings.is_here:
            find_label(settings.format)
        else:
            load_profile(settings.target)
            measuring = {
                "format": settings.format,
                "measured": settings.measured != SearchSettings.measured,
            }
            refuse_flags(measuring, f"with --target {settings.target}: nothing is measured here")
        _ = self.variants
        self.check_trainings()
        name = self.training_recipe.score
        if not self.task.find_metric(name, len(self.data.classes)).higher_is_better:
            raise ValueError(
                f"recipe.score {name} is lower for a better network, and a search compares scores "
                "that are higher: leave it out, or give top1"
            )

    def check_trainings(self) -> None:
        settings, method = self.settings, self.method
        if method.final:
            _ = self.final_choice(self.home).resolve(case_of(self.data))
        else:
            refuse_flags({"final_epochs": settings.final_epochs}, "is for --final: name a recipe")
        if method.next == "none":
            refuse_flags({"trainings": settings.trainings}, "with --next none: leave it out")
        most, least = settings.trainings, len(self.design.places)
        if most is not None and most < least:
            raise ValueError(
                f"--trainings {most}: the first design takes {least}; give at least {least}, or "
                "fewer --samples"
            )

    @property
    def method(self) -> Method:
        return self.settings.method

    @property
    def budget(self) -> Budget:
        return self.settings.budget()

    @property
    def home(self) -> Variant:
        """The variant in which the MasterNet and the tunings train.

        The MasterNet's own resolution and kernel if they are choices, else the middle ones.
        """
        own = self.space.master.resolution
        sides = sorted({each.resolution for each in self.variants})
        side = own if own in sides else sides[len(sides) // 2]
        kernels = [each.kernel for each in self.variants if each.resolution == side]
        stages = [stage.kernel for stage in self.space.master.stages]
        return Variant(side, next((k for k in kernels if stages.count(k) == len(stages)), 0))

    @property
    def start(self) -> Structure:
        """The MasterNet's own structure."""
        return tuple(self.space.start.tolist())

    def space_of(self, variant: Variant) -> NetSpace:
        return self.space.with_kernel(variant.kernel) if variant.kernel else self.space

    def spec(self, structure: Structure | np.ndarray, variant: Variant) -> NetSpec:
        return self.space_of(variant).spec(np.array(structure), variant.resolution)

    def trial_folder(self, name: str) -> Path:
        return self.folder / TRIALS / name

    def parts(self, place: int) -> tuple[str, ...]:
        """The paths of the new parts if `place` is exchanged; all parts for -1."""
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

    def draws(self, purpose: int, number: int = 0) -> np.random.Generator:
        """A random generator that depends on the seed, the purpose and a number."""
        return np.random.default_rng([self.settings.seed, purpose, number])

    @cached_property
    def design(self) -> Design:
        """The first design: one change at a time, with a control of each place."""
        is_controlled, samples = self.method.baseline == "control", self.settings.samples
        return first_design(
            self.space,
            self.draws(SAMPLE),
            per_place=samples if is_controlled else samples + 1,
            control_each=is_controlled,
            spread=self.method.design == "spread",
        )

    @property
    def random_structures(self) -> np.ndarray:
        """(n, M): random structures that are trained to the end, whatever the model predicts."""
        return self.space.random(self.draws(RANDOM), self.settings.whole)

    @property
    def further_tunings(self) -> int:
        if self.method.next == "none":
            return 0
        most = self.settings.trainings
        return FURTHER if most is None else most - len(self.design.places)

    @property
    def training_recipe(self) -> Recipe:
        """The recipe of the MasterNet at its own resolution."""
        return self.master_choice(self.home).resolve(case_of(self.data)).recipe

    def master_choice(self, variant: Variant) -> RecipeChoice:
        """The recipe of the MasterNet and of the winners, at their resolution."""
        changes = {"resolution": variant.resolution, **self.recipe.changes}
        return RecipeChoice(self.recipe.source or self.method.training, changes)

    @property
    def tuning_choice(self) -> RecipeChoice:
        """The changes of the tuning recipe.

        By default a quarter of the MasterNet's epochs, as in the paper, 30 of 120.
        """
        whole = recipe_in_epochs(self.data, self.training_recipe).epochs
        changes: dict[str, object] = {"epochs": TUNING_SHARE * whole}
        if self.method.tuning == "paper":
            changes = dict(PAPER_TUNING)
        if self.settings.tune_epochs is not None:
            changes["epochs"] = self.settings.tune_epochs
        return RecipeChoice("", changes)

    def final_choice(self, variant: Variant) -> RecipeChoice:
        changes: dict[str, object] = {"resolution": variant.resolution}
        if self.settings.final_epochs is not None:
            changes["epochs"] = self.settings.final_epochs
        return RecipeChoice(self.method.final, changes)

    def fastest_ms(self, profile: Profile, variant: Variant) -> float:
        """The ms per image of the fastest structure of a variant."""
        tables = self.tables(profile, variant)
        return float(tables(fastest(self.space, tables)[None])[0])


def find_master(settings: SearchSettings, data: DataSet) -> NetSpec:
    """The MasterNet for the images. Raises ValueError, in one line, if it cannot be searched."""
    spec = zoo.spec(settings.master)
    if not isinstance(spec, NetSpec):
        raise ValueError(
            f"{settings.master} has no super-blocks: name a network of `fullstride zoo` made of "
            "Basic and Bottleneck stages, or the JSON file of a spec"
        )
    if spec.frames:
        raise ValueError(f"{settings.master} takes clips: a search needs a network of images")
    if spec.style.self_gate:
        raise ValueError(
            f"{settings.master} has self_gate, which the tables of times lack: set it to false, or "
            "name another network"
        )
    return replace(spec, classes=len(data.classes), in_channels=data.channels)


def describe(spec: NetSpec) -> str:
    """Depths and widths of a network in one line: 'stem 16, 1 x 48, ..., head 256'."""
    parts = [f"stem {spec.stem_width}"]
    parts += [f"{stage.depth} x {stage.width}" for stage in spec.stages]
    ratios = {f"{stage.kernel}/{stage.ratio:g}" for stage in spec.stages}
    parts += [f"head {spec.head_width}"] if spec.head_width else []
    return f"{', '.join(parts)} (kernel/ratio {', '.join(sorted(ratios))})"


def time_networks(job: SearchJob, done: Results) -> Work[DeviceTimes]:
    """The profile of the device; for this machine, a profile fitted to measured networks."""
    if not job.settings.is_here:
        return DeviceTimes(profile=load_profile(job.settings.target))
    rows: list[tuple[Structure, Variant]] = [(job.start, each) for each in job.variants]
    count = max(job.settings.measured, len(rows) + 6)
    others = job.space.random(job.draws(MEASURE), count - len(rows)).tolist()
    for number, row in enumerate(others):
        rows.append((tuple(row), job.variants[number % len(job.variants)]))
    measured = yield from measure_structures(job, rows)
    return DeviceTimes(profile=profile_of(job, measured), measured=tuple(measured))


def measure_structures(
    job: SearchJob, rows: list[tuple[Structure, Variant]]
) -> Work[list[MeasuredStructure]]:
    specs = [job.spec(structure, variant) for structure, variant in rows]
    label = find_label(job.settings.format)
    times = yield from measure_specs(specs, job.budget.batch, label, job.folder / "times")
    return [
        MeasuredStructure(*row, time.ms, time.low, time.high)
        for row, time in zip(rows, times, strict=True)
    ]


def profile_of(job: SearchJob, measured: list[MeasuredStructure]) -> Profile:
    """The profile of this machine, fitted to all measured times."""
    specs = [job.spec(each.structure, each.variant) for each in measured]
    label = find_label(job.settings.format)
    return fit_profile(specs, [each.ms for each in measured], job.budget.batch, label)


def make_plan(job: SearchJob, done: Results) -> Work[SearchPlan]:
    """Measure steps of the MasterNet, and estimate the time of all trainings.

    Raises ValueError, with the shortest time, if no structure is within the budget.
    """
    profile = done["times"].profile
    limit_ms, tables_of = job.budget.ms_per_image, partial(job.tables, profile)
    master_ms = {v.name: float(tables_of(v)(job.space.start[None])[0]) for v in job.variants}
    fastest_ms = {v.name: job.fastest_ms(profile, v) for v in job.variants}
    if min(fastest_ms.values()) > limit_ms:
        raise ValueError(
            f"nothing fits {job.budget}: the fastest structure takes "
            f"{min(fastest_ms.values()):.4g} ms: give a larger budget, a smaller MasterNet or "
            "--resolutions"
        )
    yield "measuring the training of the MasterNet"
    run, recipe, design = measure_steps(job), job.training_recipe, job.design
    tables, home_ms = tables_of(job.home), master_ms[job.home.name]

    def seconds(own: Recipe) -> float:  # the images per epoch count, whatever the batch
        return run.seconds(recipe_in_epochs(job.data, own).epochs)

    whole_s = seconds(recipe)
    tuning = replace(tuning_recipe(len(job.data.train), recipe), **job.tuning_choice.changes)
    relative = float(tables(design.structures).mean() / home_ms)
    tune_s = TEACHER * relative * seconds(tuning)
    count, further = len(design.places), job.further_tunings
    random = job.random_structures
    random_s = float(tables(random).sum() / home_ms) * whole_s
    inside = [each for each in job.variants if fastest_ms[each.name] <= limit_ms]
    sides = [(each.resolution / job.home.resolution) ** 2 for each in inside]
    winners = job.method.winners
    rows = [
        PlannedTrainings("master", 1, whole_s),
        PlannedTrainings("design", count, count * tune_s),
        PlannedTrainings("whole", len(random), random_s),
        PlannedTrainings("sequential", further, further * tune_s),
        PlannedTrainings("winners", winners * len(inside), winners * whole_s * sum(sides)),
    ]
    if job.method.final:
        final = job.final_choice(job.home).resolve(case_of(job.data)).recipe
        rows.append(PlannedTrainings("final", 1, seconds(final)))
    return SearchPlan(
        structures=float(job.space.size) * len(job.variants),
        master_ms=master_ms,
        fastest_ms=fastest_ms,
        trainings=tuple(row for row in rows if row.trainings or row.stage != "whole"),
        devices=len(job.devices),
    )


def measure_steps(job: SearchJob) -> RunTimes:
    """The times of the MasterNet's steps, on the first device."""
    with scratch_folder(job.folder / "steps") as scratch:
        model = write_spec(job.spec(job.start, job.home), scratch / "spec.json")
        named = job.master_choice(job.home).resolve(case_of(job.data))
        options = RunOptions(device=job.devices[0], workers=job.options.workers)
        return time_training(scratch / "run", model, job.unseen, named, options)
