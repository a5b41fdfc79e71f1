"""What is known about a device and its runtime? Profiles by name, in JSON, and their files."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from fullstride.latency.roofline import ARITHMETIC_SHARES, NUMBERS, REQUIRED, Machine, Positive
from fullstride.outputs import json_output
from fullstride.storage import read_regular
from fullstride.strict_json import Bounds, check_bounds, from_json, parse_json
from fullstride.writing import atomic_write

PACKAGE_PROFILES = resources.files("fullstride.latency").joinpath("device_profiles")
OUTPUT = json_output("a profile", "machine", "inference", "sheet")
MAX_BYTES = 100_000  # of a profile's file; those of the package have two thousand
# Field in the file -> field here. Files keep the names of version 0.1.
FIELD_NAMES = {"engine": "runtime", "apart": "resolvable_ratio"}


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """By which clock the times of a calibration were taken."""

    wall: Annotated[int, Bounds(ge=0)]  # times that are wall time of rounds without other work
    cpu: Annotated[int, Bounds(ge=0)]  # times that are CPU time, as too few rounds were such
    wall_per_cpu: Positive  # median ratio of both clocks: above 1 the machine had other work


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Numbers fitted to measurements, and how wrong they are for networks outside of the fit."""

    numbers: Mapping[str, Positive]  # keys: `roofline.NUMBERS`
    error: Positive  # mean of |estimate / measured - 1| in percent, of families left out of the fit
    low: Positive  # measured / estimate of left-out networks: nine of ten are in `low` to `high`
    high: Positive
    # Above this ratio of two estimates the slower network is slower in eight cases of ten.
    resolvable_ratio: Annotated[float, Bounds(ge=1, le=1e12)]
    networks: Annotated[int, Bounds(ge=1)]  # that were fitted
    source: str  # of the measured times
    software: str
    date: str  # of the fit
    note: str = ""  # on the times
    full_batches: bool = False  # only full batches were timed: the time of a launch is assumed
    # (p90 - p10) / median of the rounds of one network, in the median: `low` and `high` include it
    spread: Annotated[float, Bounds(ge=0, le=1e12)] = 0.0
    clocks: Clocks | None = None  # of a calibration

    @property
    def calibrated(self) -> bool:
        """Whether microbenchmarks of `calibrate` were fitted, not networks."""
        return self.source.startswith("fullstride calibrate")

    def __post_init__(self) -> None:
        check_bounds(self)
        check_text(self)
        if unknown := sorted(set(self.numbers) - set(NUMBERS)):
            raise ValueError(f"no number is called {unknown[0]!r}: use {', '.join(NUMBERS)}")
        if missing := [name for name in REQUIRED if name not in self.numbers]:
            raise ValueError(f"numbers lack {', '.join(missing)}")
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}: swap them")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A device with a runtime, a layout and a precision."""

    name: str
    device: str
    layout: Literal["nchw", "nhwc", ""]  # "": the runtime chooses
    precision: str
    machine: Machine
    sheet: str  # source of the machine's peak and bandwidth
    inference: Fit
    training: Fit | None = None  # a step with backward and update
    measured: bool = True  # False: the numbers are those of another device
    note: str = ""

    def __post_init__(self) -> None:
        check_text(self)

    def __repr__(self) -> str:
        layout = ", ".join(filter(None, (self.layout, self.precision)))
        return f"Profile({self.name!r}: {self.device}, {self.machine.runtime}, {layout})"

    def to_dict(self) -> dict[str, Any]:
        """As in JSON."""
        return rename_fields(asdict(self), {name: key for key, name in FIELD_NAMES.items()})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "profile") -> "Profile":
        """Raises ValueError with one line for everything that is not a profile."""
        return from_json(cls, rename_fields(parse_json(text, where), FIELD_NAMES), where)


def check_text(instance: Any) -> None:
    for name, value in vars(instance).items():
        if isinstance(value, str) and not value.isprintable():
            raise ValueError(f"{name} {value[:40]!r}: use one line of text")


def rename_fields(data: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(data, dict):
        return data
    return {names.get(key, key): rename_fields(value, names) for key, value in data.items()}


def profile_names() -> list[str]:
    files = (entry.name for entry in PACKAGE_PROFILES.iterdir())
    return sorted(name.removesuffix(".json") for name in files if name.endswith(".json"))


def load_profile(name_or_path: str | Path) -> Profile:
    """One of `profile_names()`, or a JSON file. Raises ValueError in one line."""
    name, names = str(name_or_path), profile_names()
    if name in names:
        return Profile.from_json(PACKAGE_PROFILES.joinpath(f"{name}.json").read_text(), name)
    path = Path(name_or_path)
    if path.suffix != ".json" and not path.exists():
        close = get_close_matches(name, names, n=3, cutoff=0.4)
        near = f"did you mean {' or '.join(close)}?"
        raise ValueError(
            f"no profile named {name!r}: {near if close else 'choose from ' + ', '.join(names)}"
        )
    try:
        text = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    return Profile.from_json(text, str(path))


def save_profile(profile: Profile, path: Path) -> None:
    with atomic_write(path, OUTPUT) as temporary:
        temporary.write_text(profile.to_json())


def transfer(
    profile: Profile, name: str, device: str, machine: Machine, sheet: str, wider: Fit
) -> Profile:
    """A profile of a device of which only the data sheet is known.

    The numbers are those of `profile`, moved by `moved_numbers`, the errors those of `wider`. The
    sign of a device's error is unknown, so the interval reaches equally far on both sides.
    """
    factor = max(1 / wider.low, wider.high)
    fit = replace(
        profile.inference,
        numbers=moved_numbers(profile.inference.numbers, profile.machine, machine),
        error=wider.error,
        low=round(1 / factor, 3),
        high=round(factor, 3),
        resolvable_ratio=wider.resolvable_ratio,
    )
    return Profile(
        name=name,
        device=device,
        layout=profile.layout,
        precision=profile.precision,
        machine=machine,
        sheet=sheet,
        inference=fit,
        measured=False,
        note=f"not measured: shares of the data sheet's rates are those of {profile.name}",
    )


def moved_numbers(
    numbers: Mapping[str, float], source: Machine, target: Machine
) -> dict[str, float]:
    """The numbers of one machine on another of which only the data sheet is known.

    Depthwise convolutions do not run on tensor cores: their rate moves with the peak of the other
    units, where both sheets have it. Arithmetic follows the clock that the power limit sustains.
    """
    moved = clamp_to_peak(numbers)
    if source.vector_tflops and target.vector_tflops:
        vector_share = target.vector_tflops / target.peak_tflops
        moved["depthwise"] *= vector_share / (source.vector_tflops / source.peak_tflops)
    for name in ARITHMETIC_SHARES:
        moved[name] = float(f"{moved[name] * target.clock_share / source.clock_share:.4g}")
    return moved


def sustained_clock(watts: float, needed_watts: float) -> float:
    """`Machine.clock_share` under a power limit, where the peak's clock would need `needed_watts`.

    Power grows with clock and the square of voltage, which grows with the clock: the clock goes
    with the cube root. An RTX PRO 6000 of 300 W in place of 600 W was 21 to 29 % slower than by
    its peak; the cube root of a half is 0.79.
    """
    return min(1.0, round((watts / needed_watts) ** (1 / 3), 3))


def clamp_to_peak(numbers: Mapping[str, float]) -> dict[str, float]:
    """Shares of peak arithmetic of 1 at most: a clock above its sheet is one device's own."""
    return {
        name: min(value, 1.0) if name in ARITHMETIC_SHARES else value
        for name, value in numbers.items()
    }
