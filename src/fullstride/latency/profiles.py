"""What is known of a device with an engine, and how long does a network take there? Profiles by name, and estimates."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from torch import nn

from fullstride.latency.roofline import NEEDED, NUMBERS, Machine, prepare, times
from fullstride.measure.cost.operators import Operators, traced
from fullstride.nets.spec import MOST_CHANNELS, check_range
from fullstride.storage import atomic_write

Bound = Literal["host launches", "device launches", "arithmetic", "memory"]
OURS = resources.files("fullstride.latency").joinpath("profiles")
FINITE = "a finite number above 0, from 1e-12 to 1e12"
LARGEST_FILE = 100_000  # bytes; ours have two thousand


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Numbers of `model.NUMBERS` that came out of measurements, and how wrong they are where they were not fitted."""

    numbers: dict[str, float]
    error: float  # mean of |estimate / measured - 1| in percent, of networks of families left out of the fit
    low: float  # measured / estimate of left-out networks: nine of ten lie between `low` and `high`
    high: float
    apart: float  # ratio of two estimates from which the slower one is slower in eight cases of ten
    networks: int  # that were fitted
    source: str  # of the measured times
    software: str
    date: str  # when it was fitted


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A device with an engine, a layout and a precision."""

    name: str
    device: str
    layout: Literal["nchw", "nhwc", ""]  # "": the engine chooses
    precision: str
    machine: Machine
    sheet: str  # source of the machine's peak and bandwidth
    inference: Fit
    training: Fit | None = None  # a step with backward and update
    measured: bool = True  # False: the numbers are those of another device
    note: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """Raises ValueError with one line for everything that is no profile."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("is no JSON") from None
        return record(cls, data, "")


def record(kind: type, data: Any, where: str) -> Any:
    """The dataclass `kind` of parsed JSON. Numbers must be finite and above 0."""
    if not isinstance(data, dict):
        raise ValueError(f"{where or 'a profile'} is no table of names and values")
    known = get_type_hints(kind)
    if unknown := sorted(set(data) - set(known)):
        raise ValueError(
            f"{where}{unknown[0]!r} is no field of a profile: it has {', '.join(known)}"
        )
    values: dict[str, Any] = {}
    for name, value in data.items():
        at = f"{where}{name}"
        expected = known[name]
        if name in ("machine", "inference") or (name == "training" and value is not None):
            values[name] = record(Machine if name == "machine" else Fit, value, f"{at}.")
        elif name == "numbers":
            values[name] = checked_numbers(value, at)
        elif name == "training":
            values[name] = None
        elif get_origin(expected) is Literal:
            several = " or ".join(map(repr, get_args(expected)))
            values[name] = must(value in get_args(expected), value, at, several)
        elif expected is bool:
            values[name] = must(isinstance(value, bool), value, at, "true or false")
        elif expected is str:
            values[name] = must(
                isinstance(value, str) and value.isprintable(), value, at, "one line of text"
            )
        else:
            values[name] = must(positive(value), value, at, FINITE)
    try:
        made = kind(**values)
    except TypeError as error:
        missing = str(error).partition(":")[2].strip()
        raise ValueError(f"{where or 'a profile '}lacks {missing}") from None
    if kind is Fit:
        must(
            made.low <= made.high,
            (made.low, made.high),
            f"{where}low to high",
            "the lower one first",
        )
        must(made.apart >= 1, made.apart, f"{where}apart", "a ratio from 1")
    return made


def must(right: bool, value: Any, where: str, what: str) -> Any:
    if not right:
        raise ValueError(f"{where} is {repr(value)[:40]}: give {what}")
    return value


def positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-12 < value < 1e12


def checked_numbers(value: Any, where: str) -> dict[str, float]:
    must(isinstance(value, dict), value, where, "a table of names and numbers")
    for name, number in value.items():
        must(name in NUMBERS, name, where, f"only {', '.join(NUMBERS)}")
        must(positive(number), number, f"{where}.{name}", FINITE)
    for name in NEEDED:
        must(name in value, sorted(value), where, f"{name} too")
    return value


def profile_names() -> list[str]:
    return sorted(
        entry.name.removesuffix(".json") for entry in OURS.iterdir() if entry.name.endswith(".json")
    )


def load_profile(name_or_path: str | Path) -> Profile:
    """One of `profile_names()`, or a file of JSON. Raises ValueError in one line."""
    name = str(name_or_path)
    if name in profile_names():
        return Profile.from_json(OURS.joinpath(f"{name}.json").read_text())
    path = Path(name_or_path)
    if path.suffix != ".json" and not path.is_file():
        close = get_close_matches(name, profile_names(), n=3, cutoff=0.4)
        hint = (
            f"did you mean {' or '.join(close)}?"
            if close
            else f"choose from {', '.join(profile_names())}"
        )
        raise ValueError(f"no profile named {name!r}: {hint}")
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise ValueError(f"has more than {LARGEST_FILE:,} bytes, which no profile has")
        return Profile.from_json(text.decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no JSON") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def save_profile(profile: Profile, path: Path) -> None:
    with atomic_write(path) as beside:
        beside.write_text(profile.to_json())


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one network at one batch size. `low` and `high` enclose nine of ten such networks."""

    profile: str  # name
    work: Literal["inference", "training"]
    batch: int
    ms_per_image: float
    low: float  # ms per image
    high: float
    device_ms: float  # of a batch, as the next: what each side is busy
    host_ms: float
    bound: Bound
    apart: float  # ratio of two estimates of this profile from which their order is believed

    @property
    def images_per_s(self) -> float:
        return 1e3 / self.ms_per_image


def estimate(
    net: nn.Module | Callable[[], nn.Module] | Operators,
    profile: Profile,
    batch: int,
    resolution: int = 224,
    *,
    training: bool = False,
    in_channels: int = 3,
) -> Estimate:
    """The time of a network. Operators know their resolution and channels: for them, neither argument counts."""
    operators = net if isinstance(net, Operators) else traced(net, resolution, in_channels)
    return estimates([operators], profile, [batch], training=training)[0]


def estimates(
    networks: Sequence[Operators],
    profile: Profile,
    batches: Sequence[int],
    *,
    training: bool = False,
) -> list[Estimate]:
    """One for each network, at the batch size beside it."""
    fit = profile.training if training else profile.inference
    if fit is None:
        raise ValueError(
            f"{profile.name} knows no training steps: use rtx3090, or calibrate your own device"
        )
    for batch in batches:
        check_range("batch", batch, MOST_CHANNELS)
    took = times(prepare(networks, batches, profile.machine, training=training), fit.numbers)
    causes: tuple[Bound, ...] = ("device launches", "arithmetic", "memory")
    found = []
    for i, batch in enumerate(batches):
        ms = 1e3 * float(took.total_s[i]) / batch
        parts = (took.launch_s[i], took.arithmetic_s[i], took.memory_s[i])
        bound = (
            "host launches" if took.host_s[i] > took.device_s[i] else causes[int(np.argmax(parts))]
        )
        found.append(
            Estimate(
                profile=profile.name,
                work="training" if training else "inference",
                batch=batch,
                ms_per_image=ms,
                low=ms * fit.low,
                high=ms * fit.high,
                device_ms=1e3 * float(took.device_s[i]),
                host_ms=1e3 * float(took.host_s[i]),
                bound=bound,
                apart=fit.apart,
            )
        )
    return found


def tie(a: Estimate, b: Estimate) -> bool:
    """Are two estimates of one profile closer than it can tell apart?"""
    if (a.profile, a.work) != (b.profile, b.work):
        raise ValueError(
            f"{a.profile} {a.work} and {b.profile} {b.work}: a tie is between estimates of one profile"
        )
    return abs(math.log(a.ms_per_image / b.ms_per_image)) < math.log(max(a.apart, b.apart))


def elsewhere(
    profile: Profile, name: str, device: str, machine: Machine, sheet: str, wider: Fit
) -> Profile:
    """A device of which only the data sheet is known: the numbers of `profile`, the errors of `wider`.

    On which side the errors of a device lie is unknown, so the interval reaches equally far on both.
    """
    far = max(1 / wider.low, wider.high)
    fit = replace(
        profile.inference,
        error=wider.error,
        low=round(1 / far, 3),
        high=round(far, 3),
        apart=wider.apart,
    )
    fit = replace(fit, numbers=sober(fit.numbers))
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


def sober(numbers: dict[str, float]) -> dict[str, float]:
    """No share of peak arithmetic above 1: that one device's clock exceeds its sheet says nothing of another."""
    return {
        name: min(value, 1.0) if name in ("dense", "1x1", "depthwise") else value
        for name, value in numbers.items()
    }
