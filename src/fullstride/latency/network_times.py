"""Estimates times of networks with intervals, from their operators and a profile."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from fullstride.io.records import check_range
from fullstride.latency.profiles import Fit, Profile
from fullstride.latency.roofline import NORMAL_95, bounds, prepare, times
from fullstride.measure.budget import MOST_IMAGES
from fullstride.measure.operators import KIND, OF_FRAMES, Operators

UNUSUAL = {  # operators that not every ConvNet has
    "norm": "batch norms apart from convolutions",
    "group_norm": "group norms",
    "statistics": "layer norms or softmax",
    "product": "attention",
}


# Prefixes of ATen's operators in heads of tasks, which no profile was fitted on.
OUTSIDE = {
    OF_FRAMES: "convolutions of frames",
    "topk": "sorting",
    "gather": "choosing of candidates",
    "bmm": "suppression of boxes",
    "upsample": "resizing of maps",
    "roi_align": "regions of maps",
}


# Power of the interval's bounds for a network with unfitted operators.
WIDENING = 3


def unfitted(
    operators: Operators, numbers: Mapping[str, float], *, microbenchmarks: bool = False
) -> list[str]:
    """Describe the network's operators that no fitted network had.

    Fitted norms have a number. Networks with layer norms have some attention too, except
    `microbenchmarks`.
    """
    fitted = {
        "norm": "norm" in numbers,
        **dict.fromkeys(("group_norm", "statistics"), "statistics" in numbers),
        "product": "statistics" in numbers and not microbenchmarks,
    }
    return [
        description
        for kind, description in UNUSUAL.items()
        if not fitted[kind] and (operators.kind == KIND[kind]).any()
    ]


Bound = Literal["host launches", "device launches", "arithmetic", "memory"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated time of a network at one batch size.

    `low` and `high` enclose the times of nine in ten such networks.
    """

    profile: str  # name
    work: Literal["inference", "training"]  # a call, or a step
    batch: int  # images per call
    ms_per_image: float  # the time of a call / its images
    low: float  # ms per image
    high: float  # ms per image
    device_ms: float  # busy time of the device per batch
    host_ms: float  # busy time of the host per batch
    bound: Bound  # what takes most of the time
    resolvable_ratio: float  # the order of two estimates with a smaller ratio is not reliable
    # Why the interval is wide: descriptions of what the fitted networks and batches lacked
    unfitted: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Estimate({self.profile}, {self.work}, batch {self.batch}: {self.ms_per_image:.3g} "
            f"ms/image, 90 % interval {self.low:.3g} to {self.high:.3g}, "
            f"{self.images_per_s:,.4g} images/s, bounded by {self.bound})"
        )

    @property
    def images_per_s(self) -> float:
        return 1e3 / self.ms_per_image

    def probability_within(self, ms_per_image: float) -> float:
        """The probability, log-normal, that the measured time is at most `ms_per_image`."""
        ratio = self.high / self.low
        if ratio <= 1:
            return float(self.low <= ms_per_image)
        middle, deviation = math.log(self.low * self.high) / 2, math.log(ratio) / 2 / NORMAL_95
        return NormalDist(middle, deviation).cdf(math.log(ms_per_image))


def estimates(
    networks: Sequence[Operators],
    profile: Profile,
    batches: Sequence[int],
    *,
    training: bool = False,
    names: Sequence[frozenset[str]] = (),
) -> list[Estimate]:
    """Estimate the time of each network at its entry of `batches`.

    `names`: ATen's names of each network's operators, to find operators that were not fitted.
    """
    fit = fit_of(profile, training)
    for batch in batches:
        check_range("batch", batch, MOST_IMAGES)
    work = prepare(networks, batches, profile.machine, training=training)
    seconds = times(work, fit.numbers)
    lows, highs = fit.low * np.ones(len(work)), fit.high * np.ones(len(work))
    if fit.spreads:
        lows, highs = bounds(work, fit.numbers, fit.spreads)
    causes: tuple[Bound, ...] = ("device launches", "arithmetic", "memory")
    rows = []
    for i, batch in enumerate(batches):
        ms = 1e3 * float(seconds.total_s[i]) / batch
        shares = (seconds.launch_s[i], seconds.arithmetic_s[i], seconds.memory_s[i])
        host_bound = seconds.host_s[i] > seconds.device_s[i]
        bound: Bound = "host launches" if host_bound else causes[int(np.argmax(shares))]
        reasons = unfitted(networks[i], fit.numbers, microbenchmarks=fit.calibrated)
        ran = names[i] if names else ()
        if outside := [OUTSIDE[s] for s in OUTSIDE if any(name.startswith(s) for name in ran)]:
            # products of activations belong to boxes
            reasons = [each for each in reasons if each != "attention"] + outside
        assumed = fit.full_batches and bound in ("host launches", "device launches")
        power = WIDENING if reasons else 1
        rows.append(
            Estimate(
                profile=profile.name,
                work="training" if training else "inference",
                batch=batch,
                ms_per_image=ms,
                low=ms * float(lows[i]) ** power,
                high=ms * float(highs[i]) ** power,
                device_ms=1e3 * float(seconds.device_s[i]),
                host_ms=1e3 * float(seconds.host_s[i]),
                bound=bound,
                resolvable_ratio=fit.resolvable_ratio,
                unfitted=(*dict.fromkeys(reasons), *["batches this small"] * assumed),
            )
        )
    return rows


def fit_of(profile: Profile, training: bool) -> Fit:
    fit = profile.training if training else profile.inference
    if fit is None:
        raise ValueError(
            f"{profile.name} has no training steps: use rtx3090, or calibrate your own device"
        )
    return fit


def is_tie(a: Estimate, b: Estimate) -> bool:
    """Whether the ratio of two estimates by one profile is below the resolvable ratio."""
    if (a.profile, a.work) != (b.profile, b.work):
        raise ValueError(
            f"{a.profile} {a.work} and {b.profile} {b.work}: compare estimates of one profile"
        )
    resolvable = max(a.resolvable_ratio, b.resolvable_ratio)
    return abs(math.log(a.ms_per_image / b.ms_per_image)) < math.log(resolvable)
