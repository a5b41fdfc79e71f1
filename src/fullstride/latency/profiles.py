"""Defines profiles, which describe a device with a runtime, and their JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from fullstride.io.records import Bounds, Count, PositiveInt, Record, check_bounds, from_json
from fullstride.latency.roofline import DEVICE, NUMBERS, REQUIRED, REST, Machine, Positive

CALIBRATED = "fullstride measure calibrate"  # prefix of a calibrated profile's source


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """The clocks that took the times of a calibration."""

    wall: Count  # times that are wall time of rounds without other work
    cpu: Count  # times that are CPU time, because too few rounds were without other work
    wall_per_cpu: Positive  # median ratio of both clocks: above 1 the machine had other work


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Numbers fitted to measurements, and their error for networks outside the fit."""

    numbers: Mapping[str, Positive]  # keys: `roofline.NUMBERS`
    error: Positive  # mean of |estimate / measured - 1| in percent, for families left out
    low: Positive  # measured / estimate is in `low` to `high` for nine of ten left-out networks
    high: Positive
    # Above this ratio of two estimates the slower network is slower in eight cases of ten.
    resolvable_ratio: Annotated[float, Bounds(ge=1, le=1e12)]
    networks: PositiveInt  # number of fitted networks
    source: str  # of the measured times
    software: str
    date: str  # of the fit
    note: str = ""  # on the times
    full_batches: bool = False  # only full batches were timed, so the time of a launch is assumed
    # Median over networks of (p90 - p10) / median of the rounds; `low` and `high` include it
    spread: Annotated[float, Bounds(ge=0, le=1e12)] = 0.0
    clocks: Clocks | None = None  # of a calibration
    # Standard deviations of the logarithms of `numbers`, and of unexplained errors (`REST` and
    # `DEVICE`), which give each network its own interval; without them all have `low` to `high`
    spreads: Mapping[str, Annotated[float, Bounds(ge=0, le=10)]] = field(default_factory=dict)

    @property
    def calibrated(self) -> bool:
        """Whether `calibrate` fitted microbenchmarks, not networks."""
        return self.source.startswith(CALIBRATED)

    def __post_init__(self) -> None:
        check_bounds(self)
        check_text(self)
        for name, names in (("numbers", [*NUMBERS]), ("spreads", [*NUMBERS, REST, DEVICE])):
            if unknown := sorted(set(getattr(self, name)) - set(names)):
                raise ValueError(f"{name} has {unknown[0]!r}: use {', '.join(names)}")
        if missing := [name for name in REQUIRED if name not in self.numbers]:
            raise ValueError(f"numbers lack {', '.join(missing)}")
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}: swap them")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A device with a runtime, a layout and a precision."""

    name: str  # such as rtx4090
    device: str  # in full
    layout: Literal["nchw", "nhwc", ""]  # "": the runtime chooses
    precision: str  # of activations
    machine: Machine  # rates of the data sheet
    sheet: str  # source of the machine's peak and bandwidth
    inference: Fit  # the fitted numbers
    training: Fit | None = None  # a step with backward and update
    measured: bool = True  # False: the numbers come from another device
    note: str = ""  # for the user

    def __post_init__(self) -> None:
        check_text(self)

    def __repr__(self) -> str:
        layout = ", ".join(filter(None, (self.layout, self.precision)))
        return f"Profile({self.name!r}: {self.device}, {self.machine.runtime}, {layout})"

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "profile") -> "Profile":
        """Read JSON. Raises ValueError with one line for anything but a profile."""
        return from_json(cls, text, where)


PROFILE = Record(Profile, "a profile", ("machine", "inference", "sheet"))


def check_text(instance: Any) -> None:
    for name, value in vars(instance).items():
        if isinstance(value, str) and not value.isprintable():
            raise ValueError(f"{name} {value[:40]!r}: use one line of text")
