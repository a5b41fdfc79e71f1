"""The results of the stages of a search, as they are stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fullstride.latency.profiles import Profile
from fullstride.search.structures.additive import Slope


@dataclass(frozen=True)
class Variant:
    """A resolution and kernel; the structures of each are searched with the same regression."""

    resolution: int  # pixels a side
    kernel: int  # of all stages; 0: as each stage has it

    def __str__(self) -> str:
        kernel = f" with kernel {self.kernel}" if self.kernel else ""
        return f"{self.resolution} pixels{kernel}"

    @property
    def name(self) -> str:
        """For a folder."""
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
    """The profile by which structures are timed, and what it was fitted to if it is from here."""

    profile: Profile
    measured: tuple[MeasuredStructure, ...] = ()


@dataclass(frozen=True)
class PlannedTrainings:
    stage: str
    trainings: int
    seconds: float  # of all of them, one after the other


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """The trainings of a search, and how long they are expected to take here."""

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
    """A finished tuning or training, as the regression sees it."""

    trial: str  # its folder
    structure: Structure
    place: int  # that was exchanged; -1: all of them; `WHOLE`: trained from random weights
    score: float | None  # in percent, as the recipe's metric
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
