"""How long does each candidate take by the latency model, corrected by a few measured times?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fullstride.autofit.listing.candidates import Candidate
from fullstride.latency.network_times import Estimate, estimates
from fullstride.latency.operator_table import find_operators
from fullstride.latency.profiles import Profile
from fullstride.latency.spec_operators import operators_of
from fullstride.measure.cost.operators import Operators
from fullstride.nets import zoo
from fullstride.nets.spec import NetSpec


def operators_of_candidate(candidate: Candidate, classes: int, channels: int) -> Operators:
    """Of one image. Raises ValueError, in one line, for a network that cannot be built."""
    side, channels = candidate.resolution, candidate.channels or channels
    if candidate.model.startswith("timm/"):  # of its own classes, whose layer takes little time
        operators = find_operators(candidate.model, side) if channels == 3 else None
        if operators is not None:
            return operators
    spec = zoo.spec(candidate.model)
    if isinstance(spec, NetSpec):
        spec = spec.scaled(width=candidate.width, depth=candidate.depth)
    return operators_of(replace(spec, classes=classes, in_channels=channels), side)


def estimate_candidates(
    candidates: Sequence[Candidate], profile: Profile, batch: int, classes: int, channels: int
) -> dict[str, Estimate | str]:
    """By name the estimate, or the reason why there is none."""
    networks: dict[str, Operators] = {}
    results: dict[str, Estimate | str] = {}
    for candidate in candidates:
        try:
            networks[candidate.name] = operators_of_candidate(candidate, classes, channels)
        except (ValueError, RuntimeError) as error:  # of layers that do not fit the image
            results[candidate.name] = str(error).strip().split("\n")[0]
    if networks:
        rows = estimates([*networks.values()], profile, [batch] * len(networks))
        results |= dict(zip(networks, rows, strict=True))
    return results


def anchors(candidates: Sequence[Candidate], ms: Mapping[str, float]) -> tuple[Candidate, ...]:
    """Three of the candidates with a time, evenly spaced; measured, they correct all others."""
    in_order = sorted(
        (each for each in candidates if each.name in ms), key=lambda each: ms[each.name]
    )
    count = min(3, len(in_order))
    places = [(2 * number + 1) * len(in_order) // (2 * count) for number in range(count)]
    return tuple(in_order[place] for place in places)


def corrected(ms: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """All times, multiplied by the ratio of measured times to theirs, interpolated between them.

    The ratio of a small network is larger than that of a large one, as each call costs some time.
    """
    pairs = sorted((ms[name], measured[name]) for name in measured if name in ms)
    if not pairs:
        return dict(ms)
    times, goals = np.log(np.array(pairs)).T
    ratios = np.exp(np.interp(np.log([*ms.values()]), times, goals - times))
    return {
        name: value * ratio
        for (name, value), ratio in zip(ms.items(), ratios.tolist(), strict=True)
    }
