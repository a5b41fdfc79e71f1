"""Which of many candidates are tried? The most promising ones at each share of the budget."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fullstride.autofit.listing.candidates import Candidate
from fullstride.measure.budget import Budget

MOST_TRIED = 20  # candidates that are measured here, or whose training is planned
# Shares of the budget, and how many candidates are tried up to each. Slower ones may fit in another
# precision, may teach, and tell what more time would buy.
BANDS = ((0.5, 4), (1.0, 8), (2.0, 5), (4.0, 2))
MOST_OF_FAMILY = 1 / 4  # of all that are tried, while there are others
POINTS_PER_DOUBLING = 2.0  # top-1 for twice the resolution; median of 94 pairs in pretrained.csv


def expected_top1(candidate: Candidate) -> float:
    """Published ImageNet top-1, less what a lower resolution costs; 0 where it is unknown."""
    if candidate.top1 is None or candidate.top1_resolution is None:
        return candidate.top1 or 0.0
    doublings = math.log2(candidate.resolution / candidate.top1_resolution)
    return candidate.top1 + POINTS_PER_DOUBLING * min(0.0, doublings)


def shortlist(
    candidates: Sequence[Candidate],
    ms: Mapping[str, float],
    budget: Budget,
    most: int = MOST_TRIED,
) -> tuple[Candidate, ...]:
    """At most `most` candidates, in the order of `candidates`: all, if they are not more.

    The fastest one is among them, as it decides whether anything fits. Of each of `BANDS` the most
    promising ones are taken: by `expected_top1`, else the nearest to the budget. Places that a band
    leaves go to the most promising within the budget, then to the nearest. A family takes a quarter
    of the places, or more only where others leave them.

    Args:
        candidates: With distinct names.
        ms: Their times of an image, as far as they are known: those without one are left out.
        budget: That the times are compared with.
        most: Number of places.
    """
    if len(candidates) <= most:
        return tuple(candidates)
    timed = [each for each in candidates if each.name in ms]
    if not timed:
        return tuple(candidates[:most])
    share = {each.name: ms[each.name] / budget.ms_per_image for each in timed}

    def distance(each: Candidate) -> float:
        return abs(math.log(share[each.name]))

    nearest = sorted(timed, key=distance)
    promising = sorted(nearest, key=expected_top1, reverse=True)
    names, families = set[str](), Counter[str]()

    def take(pool: Iterable[Candidate], places: int, most_of_family: float) -> None:
        for each in pool:
            if places <= 0 or len(names) >= most:
                return
            if each.name not in names and families[each.family] < most_of_family:
                names.add(each.name)
                families[each.family] += 1
                places -= 1

    few = max(1.0, MOST_OF_FAMILY * most)
    take([min(timed, key=lambda each: ms[each.name])], 1, few)
    low = 0.0
    for high, places in BANDS:
        take((each for each in promising if low < share[each.name] <= high), places, few)
        low = high
    take((each for each in promising if share[each.name] <= 1), most, few)
    take(nearest, most, few)
    take(nearest, most, math.inf)
    return tuple(each for each in candidates if each.name in names)
