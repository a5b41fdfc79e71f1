"""Lists the candidates of a fit: networks with resolutions, resize policies and initial weights.

If there are many, a shortlist of the most promising ones is tried.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from fullstride.autofit.released_weights import (
    RGB,
    SUFFIXES,
    Start,
    allowed_by,
    best_starts,
    cached,
    examine,
    family_of,
    in_repository,
    listed,
    without_tag,
)
from fullstride.autofit.settings import Licence
from fullstride.io.console import first_names
from fullstride.measure.budget import Budget
from fullstride.nets import zoo
from fullstride.nets.bundle import METADATA, build
from fullstride.nets.preprocessing import Fit
from fullstride.nets.spec import NetSpec, TimmSpec
from fullstride.nets.weights import hub
from fullstride.nets.weights.key_maps import meta_network
from fullstride.study.trials import Work
from fullstride.tables import SMALL_RESOLUTIONS, is_repository

NON_SQUARE = 1.2  # least longer / shorter side for which a crop leaves out much of a picture
ENLARGED = 1.25  # most enlargement of pictures, except for small ones
SMALL_SIDE = 96  # pixels; below, networks that halve a map five times leave hardly a pixel

# From random weights: network, multipliers of width and of depth. The tiny networks are tried for
# pictures of any size, as they are the fastest.
TINY = tuple(
    (name, (0.5, 1.0, 1.5, 2.0, 3.0), (1.0, 2.0))
    for name in ("genet_tiny", "resnet_rs_tiny", "tresnet_tiny")
)
LARGE = (
    ("genet_light", (0.5, 0.75, 1.0), (1.0,)),
    ("genet_normal", (0.75, 1.0), (1.0,)),
    ("resnet_rs_50", (0.5, 0.75, 1.0), (0.5, 1.0)),
    ("tresnet_m", (0.5, 0.75, 1.0), (0.5, 1.0)),
)
TINY_CLIPS = (("resnet3d_rs_tiny", (0.5, 1.0, 2.0), (1.0, 2.0)),)
LARGE_CLIPS = tuple((name, (0.5, 1.0), (0.5, 1.0)) for name in ("resnet3d_50", "resnet3d_rs_50"))
LARGE_SIDES = (96, 128, 160, 224, 288)
AS_IT_IS = ((1.0,), (1.0,))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A network with its resolution, resize policy and initial weights."""

    model: str  # argument of `zoo.create`: a name of the zoo, timm/NAME or a spec's JSON file
    resolution: int  # pixels a side
    fit: Fit = "crop"  # how images become square
    width: float = 1.0  # multiplier of the network's widths
    depth: float = 1.0
    weights: str = ""  # initial weights, argument of `run.train`; "": random
    channels: int | None = None  # input channels of the weights; None: as the pictures
    family: str = ""  # networks of one family have the same kind of blocks, such as genet
    params: int | None = None
    # Published ImageNet top-1 of the weights, per cent, at the nearest published resolution.
    top1: float | None = None
    top1_resolution: int | None = None
    licence: str = ""  # of the weights; "" if unknown
    task_options: Mapping[str, Any] = field(default_factory=dict)  # see `Task.variants`
    teacher: str = ""  # bundle of its teacher, see `halving.teach`

    @property
    def name(self) -> str:
        """A name that is distinct among candidates and valid for a folder."""
        source = self.weights if self.weights not in ("", "hub") else self.model
        scale = [f"w{self.width:g}"] * (self.width != 1) + [f"d{self.depth:g}"] * (self.depth != 1)
        policy = [self.fit] * (self.fit == "squish")
        for key, value in self.task_options.items():  # head_width 64 -> hw64
            policy.append("".join(word[0] for word in key.split("_")) + str(value))
        distilled = ["distilled"] * bool(self.teacher)
        return "-".join([label_of(source), *scale, str(self.resolution), *policy, *distilled])


def label_of(source: str) -> str:
    """The last distinctive part of a path, without a file's suffix or a hub's commit."""
    source = source.partition("@")[0] if is_repository(source) else source
    parts = [part for part in Path(source).parts if part not in ("bundle", METADATA, "..", "/")]
    stems = [
        part[: part.rindex(".")] if part.endswith((".json", *SUFFIXES)) else part
        for part in parts[-2:]
    ]
    if len(stems) == 2 and stems[1] in ("model", "pytorch_model", "weights"):
        return stems[0]
    return stems[-1] if stems else "bundle"


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """The properties of the data that decide the candidates."""

    classes: int  # of the data
    channels: int
    side: int  # median pixels of the shorter side
    fits: tuple[Fit, ...] = ("crop",)
    # pixels a side to try; (): by the weights and the pictures
    sides: tuple[int, ...] = ()
    chosen: bool = False  # whether the user chose `sides`
    variants: tuple[Mapping[str, Any], ...] = ({},)  # of the task's options
    takes_clips: bool = False

    def among(self, usual: Sequence[int]) -> tuple[int, ...]:
        """The resolutions in `usual` that are not far above the size of the pictures.

        Small pictures are enlarged to `SMALL_RESOLUTIONS`, so that the last maps have some pixels.
        A network with a single resolution keeps it.
        """
        if self.sides:
            return self.sides
        suitable = tuple(side for side in usual if side <= self.most)
        return suitable or (SMALL_RESOLUTIONS if len(usual) > 1 else tuple(usual))

    @property
    def most(self) -> int:
        """The largest resolution in pixels a side."""
        return max(*SMALL_RESOLUTIONS, 32 * math.ceil(ENLARGED * self.side / 32))

    @property
    def for_scratch(self) -> tuple[int, ...]:
        """Resolutions for random weights: up to twice the size for small pictures."""
        if self.sides:
            return self.sides
        if self.side < SMALL_SIDE:
            base = max(16, 8 * round(self.side / 8))
            return (base, 8 * round(1.5 * base / 8), 2 * base)
        return tuple(side for side in LARGE_SIDES if side <= self.most)


def fits_of(aspect: float, view_fit: Fit | None = None) -> tuple[Fit, ...]:
    """The resize policies for pictures with `aspect`, the longer / the shorter side.

    Crop and squish from `NON_SQUARE` on, else crop; or `view_fit`, if the task sets one.
    """
    if view_fit is not None:
        return (view_fit,)
    return ("crop", "squish") if aspect >= NON_SQUARE else ("crop",)


def list_candidates(
    pictures: Pictures,
    *,
    weights: str = "hub",
    names: Sequence[str] = (),
    licence: Licence = "permissive",
) -> Work[tuple[Candidate, ...]]:
    """The networks to choose from, in a fixed order; yields lines on the case.

    Args:
        pictures: The properties of the data.
        weights: hub: the released weights of the package's table that are in the local cache or
            can be downloaded, else random weights. A folder: its files, bundles and runs.
            hf:USER/NAME: a bundle on the hub. "": random weights.
        names: Networks in place of the lists here: of the zoo, timm/NAME, or JSON files of specs.
        licence: permissive leaves out weights of other and unknown licences.

    Raises ValueError, in one line, for unknown names, a folder without weights, and if the licences
    leave no candidate.
    """
    specs = find_specs(names)
    if weights == "hub":
        starts = yield from hub_starts(pictures, names, licence)
    elif weights:
        starts = yield from starts_in(weights, pictures, names, licence)
    else:
        starts = []
        yield "from scratch: all candidates begin with random weights"
    others = {name: spec for name, spec in specs.items() if not any_is(starts, name)}
    candidates = [each for start in starts for each in of_start(start, pictures)]
    if others or not starts:
        candidates += from_scratch(pictures, others)
    if starts and others:
        yield f"from random weights: {', '.join(others)}, of which no weights are in reach"
    twice = [name for name, count in Counter(each.name for each in candidates).items() if count > 1]
    if twice:
        raise ValueError(
            f"several candidates are named {twice[0]}: rename a file, or leave one out"
        )
    return tuple(candidates)


def find_specs(names: Sequence[str]) -> dict[str, NetSpec | TimmSpec]:
    """The network of each name. Raises ValueError, in one line, for an unknown name."""
    return {name: zoo.spec(without_tag(name)) for name in names}


def hub_starts(pictures: Pictures, names: Sequence[str], licence: Licence) -> Work[list[Start]]:
    """The released weights in reach; [], with a line that says why, for random weights."""
    scratch = "so all candidates begin with random weights"
    if pictures.takes_clips:
        yield f"from scratch: no released weights are of clips, {scratch}"
        return []
    if pictures.channels != RGB:
        yield (
            "from scratch: gray pictures begin with released weights for RGB only by --weights "
            f"FOLDER, {scratch}"
        )
        return []
    starts, online = listed(names), hub.is_reachable()
    local = list(cached(starts))
    if not starts:
        yield f"from scratch: {', '.join(names)} without released weights, {scratch}"
    elif not (local or online):
        yield (
            "from scratch: the hub is not reachable and its local cache is empty, and no --weights "
            f"FOLDER was given, {scratch}"
        )
    if not (starts and (local or online)):
        return []
    allowed = yield from allowed_by(licence, starts if online else local)
    exact = [start for start in allowed if start.label in names]
    best = [*exact, *best_starts((start for start in allowed if start not in exact), pictures.most)]
    present = sum(start in local for start in best)
    others = "the others are downloaded" if online else "the hub is not reachable"
    yield f"fine-tuning: released weights, {counts(best)}; {present} in the local cache, {others}"
    return best


def starts_in(
    weights: str, pictures: Pictures, names: Sequence[str], licence: Licence
) -> Work[list[Start]]:
    """The weights in a folder or in `hf:USER/NAME` that take the pictures, gray ones also as RGB.

    Raises ValueError if there are none.
    """
    check_source(weights)
    starts, problems = [], []
    for item in in_repository(weights) if is_repository(weights) else examine(Path(weights)):
        if isinstance(item, str):
            problems.append(item)
        elif item.channels < pictures.channels:
            problems.insert(0, f"{item.label} takes gray pictures, and these are RGB")
        elif (zoo.spec(item.model).frames > 0) is not pictures.takes_clips:
            kind = "images" if pictures.takes_clips else "clips"
            problems.insert(0, f"{item.label} takes {kind}")
        elif not names or any(any_is([item], name) for name in names):
            starts.append(item)
    if not starts:
        reason = f" ({problems[0]})" if problems else ""
        raise ValueError(
            f"no weights of {' or '.join(names) or 'a known network'} in {weights}{reason}: give "
            "files of safetensors or torch.save, bundles or runs"
        )
    for problem in problems:
        yield f"left out: {problem}"
    allowed = yield from allowed_by(licence, starts)
    yield f"fine-tuning: weights in {weights}, {counts(allowed)}"
    return allowed


def check_source(weights: str) -> None:
    """Raise ValueError, in one line, for a folder of weights that does not exist."""
    if weights not in ("", "hub") and not zoo.has_own_spec(weights):
        raise ValueError(f"no weights at {weights}: give hub, or a folder with files of weights")


def counts(starts: Sequence[Start]) -> str:
    families = sorted({start.family for start in starts})
    unknown = sum(not start.licence for start in starts)
    without = f"; {unknown} without a known licence" if unknown else ""
    return (
        f"networks: {len(starts)}, families: {len(families)} ({first_names(families, 5)}){without}"
    )


def any_is(starts: Iterable[Start], name: str) -> bool:
    """Whether any weights match a network's name, with or without a tag."""
    return any(
        name in (start.label, start.model, start.model.partition(".")[0]) for start in starts
    )


def of_start(start: Start, pictures: Pictures) -> Iterator[Candidate]:
    params = start.params or count_params(start.model, 1.0, 1.0, pictures.classes, start.channels)
    sides = pictures.among(start.resolutions)
    for resolution, fit, options in product(sides, pictures.fits, pictures.variants):
        nearest = min(start.top1, key=lambda side: abs(side - resolution), default=None)
        yield Candidate(
            model=start.model,
            resolution=resolution,
            fit=fit,
            weights=start.weights,
            channels=start.channels,
            family=start.family,
            params=params,
            top1=None if nearest is None else start.top1[nearest],
            top1_resolution=nearest,
            licence=start.licence,
            task_options=options,
        )


def from_scratch(
    pictures: Pictures, specs: Mapping[str, NetSpec | TimmSpec]
) -> Iterator[Candidate]:
    """Candidates with random weights: the networks in `specs`, else scaled networks of the zoo.

    A JSON file sets its resolution itself.
    """
    tiny, large = (TINY_CLIPS, LARGE_CLIPS) if pictures.takes_clips else (TINY, LARGE)
    large = () if pictures.side < SMALL_SIDE else large
    grid = [(name, *AS_IT_IS) for name in specs] if specs else [*tiny, *large]
    for name, widths, depths in grid:
        model = without_tag(name)
        spec = specs.get(name) or zoo.spec(model)
        sides = pictures.for_scratch
        if zoo.is_spec_file(name) and not pictures.chosen:
            sides = (spec.resolution,)
        for width, depth in product(widths, depths):
            params = count_params(model, width, depth, pictures.classes, pictures.channels)
            for resolution, fit, options in product(sides, pictures.fits, pictures.variants):
                yield Candidate(
                    model=model,
                    resolution=resolution,
                    fit=fit,
                    width=width,
                    depth=depth,
                    family=family_of(name, spec),
                    params=params,
                    task_options=options,
                )


@cache
def count_params(model: str, width: float, depth: float, classes: int, channels: int) -> int:
    """The number of parameters, counted without allocating memory."""
    spec = replace(zoo.spec(model), classes=classes, in_channels=channels)
    if isinstance(spec, NetSpec):
        net = meta_network(spec.scaled(width=width, depth=depth))
    else:
        with torch.device("meta"):
            net = build(spec)
    return sum(parameter.numel() for parameter in net.parameters())


# The shortlist has the most promising candidates in each band of the budget.

MOST_TRIED = 20  # most candidates that are measured here, or whose training is planned
# Upper ends of bands as shares of the budget, and how many of `MOST_TRIED` candidates are tried in
# each. Slower ones may fit in another precision, may teach, and show the gain of a larger budget.
BANDS = ((0.5, 3), (1.0, 10), (2.0, 4), (4.0, 2))
MOST_OF_FAMILY = 1 / 4  # of all places, while there are other families
POINTS_PER_DOUBLING = 2.0  # top-1 for twice the resolution; median of 94 pairs in pretrained.csv


def expected_top1(candidate: Candidate) -> float:
    """Published ImageNet top-1, less the loss by a lower resolution; 0 if unknown."""
    if candidate.top1 is None or candidate.top1_resolution is None:
        return candidate.top1 or 0.0
    doublings = math.log2(candidate.resolution / candidate.top1_resolution)
    return candidate.top1 + POINTS_PER_DOUBLING * min(0.0, doublings)


def shortlist(
    candidates: Sequence[Candidate], ms: Mapping[str, float], budget: Budget, most: int = MOST_TRIED
) -> tuple[Candidate, ...]:
    """At most `most` candidates, in the order of `candidates`, whose names are distinct.

    The fastest candidate is among them, as it decides whether anything fits. Each of `BANDS` gives
    its most promising candidates: by `expected_top1`, then the nearest to the budget. Free places
    go to the most promising within the budget, then to the nearest. A family takes a quarter of the
    places, or more if other families leave them free. Candidates without a time in `ms`, by name,
    are left out.
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
        places = max(1, round(places * most / MOST_TRIED))
        take((each for each in promising if low < share[each.name] <= high), places, few)
        low = high
    take((each for each in promising if share[each.name] <= 1), most, few)
    take(nearest, most, few)
    take(nearest, most, math.inf)
    return tuple(each for each in candidates if each.name in names)


def shortlists(
    candidates: Sequence[Candidate],
    ms: Mapping[str, float],
    budgets: Sequence[Budget],
    most: int = MOST_TRIED,
) -> tuple[Candidate, ...]:
    """The candidates on the `shortlist` of any budget; with several budgets, lists are shorter."""
    most = math.ceil(2 * most / (1 + len(budgets)))
    chosen = [shortlist(candidates, ms, budget, most) for budget in budgets]
    names = {each.name for each in itertools.chain(*chosen)}
    return tuple(each for each in candidates if each.name in names)


# The order in which candidates are measured and trained, if there is not the time for all.


def in_turn(orders: Iterable[Sequence[Candidate]]) -> list[Candidate]:
    """The first candidate of each order, then the second ones, and so on, each once."""
    rows = itertools.zip_longest(*orders)
    return list({each.name: each for row in rows for each in row if each is not None}.values())


def by_promise(candidates: Sequence[Candidate], ms: Mapping[str, float]) -> list[Candidate]:
    """The most promising candidates first; the second is of another family if there is one.

    The order is by `expected_top1`, then the slowest first.
    """

    def promise(each: Candidate) -> tuple[float, float, str]:
        return -expected_top1(each), -ms[each.name], each.name

    order = sorted(candidates, key=promise)
    other = next((each for each in order if each.family != order[0].family), None)
    if other is not None:
        order.remove(other)
        order.insert(1, other)
    return order


def in_order(
    candidates: Sequence[Candidate], ms: Mapping[str, float], budgets: Sequence[Budget]
) -> list[Candidate]:
    """The fastest candidate, the most promising within each budget in turn, and slower ones."""
    by_time = sorted(candidates, key=lambda each: ms.get(each.name, math.inf))
    within = (
        [each for each in by_time if ms.get(each.name, math.inf) <= budget.ms_per_image]
        for budget in budgets
    )
    promising = in_turn(by_promise(each, ms) for each in within if each)
    return list({each.name: each for each in (*by_time[:1], *promising, *by_time)}.values())
