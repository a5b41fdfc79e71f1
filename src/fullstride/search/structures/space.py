"""The space of networks near a MasterNet, whose super-blocks vary in depth, width and type.

Source: GENet, arXiv:2006.14090, section 4. The paper leaves much open; each deviation is an
argument of `net_space` whose default has its reason there.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from fullstride.nets.blocks import Basic, Bottleneck
from fullstride.nets.spec import NetSpec, Stage

# Structures are rows of choice indices, so that millions of them are arrays. A linear model of the
# accuracy sees a choice as its features, which are zero for the MasterNet's own choice: their
# coefficients are then gains over the MasterNet.

MOST_LISTED = 2_000_000  # structures that `Space.all` lists


@dataclass(frozen=True, eq=False)
class Place:
    """One place of a network, such as a super-block, and the choices for it."""

    name: str  # the prefix of its parameters: "stem", "stages.0", "head"
    choices: int  # number of choices
    start: int  # index of the MasterNet's own choice
    features: np.ndarray  # (choices, p), zero in the row `start`
    terms: tuple[str, ...]  # names of the p columns: "depth", "log width", "kernel 5", ...
    # (choices,) numbers of the classes of block; samples are drawn within a class. None: one class
    classes: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Space:
    """The places of a network. A structure is a row of M integers, the choice at each place."""

    places: tuple[Place, ...]

    @cached_property
    def sizes(self) -> np.ndarray:
        """(M,) choices at each place."""
        return np.array([place.choices for place in self.places])

    @cached_property
    def start(self) -> np.ndarray:
        """(M,) the MasterNet's own structure."""
        return np.array([place.start for place in self.places])

    @cached_property
    def size(self) -> int:
        """The number of structures."""
        return math.prod(place.choices for place in self.places)

    @cached_property
    def terms(self) -> tuple[tuple[str, str], ...]:
        """(place, term) of each of the P features."""
        return tuple((place.name, term) for place in self.places for term in place.terms)

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """The columns of each place among all P features."""
        ends = np.cumsum([len(place.terms) for place in self.places]).tolist()
        return tuple(map(slice, [0, *ends[:-1]], ends))

    def features(self, structures: np.ndarray) -> np.ndarray:
        """(n, M) structures -> (n, P)."""
        parts = [place.features[structures[:, i]] for i, place in enumerate(self.places)]
        return np.concatenate(parts, axis=1)

    def random(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """(n, M): every place is drawn uniformly and independently."""
        return rng.integers(self.sizes, size=(n, len(self.places)))

    def all(self) -> np.ndarray:
        """Every structure, in lexicographic order. Raises ValueError for too large a space."""
        if self.size > MOST_LISTED:
            raise ValueError(f"{self.size:,} structures: at most {MOST_LISTED:,} can be listed")
        return np.stack(np.unravel_index(np.arange(self.size), self.sizes), axis=1)

    def neighbours(self, structure: np.ndarray) -> np.ndarray:
        """Every structure that differs from `structure`, (M,), at exactly one place."""
        ends = np.cumsum(self.sizes)
        rows = np.tile(structure, (int(ends[-1]), 1))
        for i, (end, size) in enumerate(zip(ends, self.sizes, strict=True)):
            rows[end - size : end, i] = np.arange(size)
        return rows[(rows != structure).any(axis=1)]


def values(gains: Sequence[np.ndarray], structures: np.ndarray) -> np.ndarray:
    """The sums of the gains, one array of choices for each place: (n, M) structures -> (n,)."""
    total = np.zeros(len(structures))
    for i, gain in enumerate(gains):
        total += gain[structures[:, i]]
    return total


def distinct(structures: np.ndarray) -> np.ndarray:
    """Each row once, in the order of its first appearance."""
    _, first = np.unique(structures, axis=0, return_index=True)
    return structures[np.sort(first)]


WIDTH_STEP = 8  # channels, for tensor cores
KERNELS = (3, 5)
# Class of block -> ratios to choose from. C, a plain convolution, is the class of stem and head.
RATIOS = {"XX": (1.0,), "BL": (0.5, 0.25), "DW": (3.0, 6.0, 9.0)}
BLOCKS = {"XX": Basic, "BL": Bottleneck, "DW": Bottleneck}
SOURCE = "ours: a structure of a search space around a MasterNet"


@dataclass(frozen=True)
class Choice:
    depth: int  # blocks
    width: int  # channels out
    block: str  # "C", "XX", "BL" or "DW"
    kernel: int
    ratio: float  # channels inside a block / width


@dataclass(frozen=True, eq=False)
class NetSpace(Space):
    """The networks around `master`: places are the stem, the stages, and the head if it has one."""

    master: NetSpec
    options: tuple[tuple[Choice, ...], ...]  # of each place, in the order of its choices

    def choices_of(self, structure: np.ndarray) -> tuple[Choice, ...]:
        """The choice at each place of one structure, (M,)."""
        rows = zip(self.options, structure.tolist(), strict=True)
        return tuple(options[index] for options, index in rows)

    def spec(self, structure: np.ndarray, resolution: int | None = None) -> NetSpec:
        """The network of one structure, (M,), by default at the MasterNet's resolution."""
        stem, *stages = self.choices_of(structure)
        head = stages.pop() if self.master.head_width else None
        spec = replace(
            self.master,
            stem_width=stem.width,
            stages=tuple(map(changed_stage, self.master.stages, stages)),
            head_width=head.width if head else 0,
            resolution=self.master.resolution if resolution is None else resolution,
        )
        own = replace(self.master, resolution=spec.resolution)
        return own if spec == own else replace(spec, source=SOURCE)

    def with_kernel(self, kernel: int) -> "NetSpace":
        """The space with `kernel` in every stage, and the same places, structures and features."""

        def changed(choice: Choice) -> Choice:
            return choice if choice.block == "C" else replace(choice, kernel=kernel)

        return replace(self, options=tuple(tuple(map(changed, own)) for own in self.options))

    def active_bounds(self, structure: np.ndarray) -> tuple[str, ...]:
        """Places whose depth or width is at the end of its range, and which end."""
        bounds = []
        choices = self.choices_of(structure)
        for place, options, choice in zip(self.places, self.options, choices, strict=True):
            for name in ("depth", "width"):
                own = getattr(choice, name)
                every = {getattr(other, name) for other in options}
                if len(every) > 1 and own in (min(every), max(every)):
                    end = "least" if own == min(every) else "most"
                    bounds.append(f"{place.name} {name} {own} ({end})")
        return tuple(bounds)


def net_space(
    master: NetSpec,
    *,
    depth_steps: int = 2,
    width_range: tuple[float, float] = (0.5, 2.0),
    most_widths: int = 24,
    kernels: Sequence[int] = KERNELS,
    per_block_kernels: bool = False,
    switch_blocks: bool = False,
    paper: bool = False,
) -> NetSpace:
    """The networks around `master`, a spec whose stages are XX, BL or DW blocks.

    Depths are the MasterNet's plus or minus up to `depth_steps` blocks. Widths are multiples of 8
    within `width_range` times the MasterNet's width: at most `most_widths`, in about equal ratios,
    always with both ends and the MasterNet's. Stem and head change widths only.

    - `per_block_kernels`: each stage chooses among `kernels`. By default the whole network has one
      kernel, which `with_kernel` sets, like the resolution: the paper's Table 4 trains whole
      networks with either kernel.
    - `switch_blocks`: a stage may change its class as well. All three GENets keep the classes of
      their MasterNet, and each class needs trainings of its own.
    - `paper`: each stage chooses a type, a class with a kernel and a ratio, and each type has its
      own slopes for the depth and the linear width, without an intercept, as the paper prints; a
      change of type alone then has no effect. The default has the logarithm of the width, one pair
      of slopes for a class, and a term for each other kernel, ratio and class.

    Raises ValueError for a stage of another kind.
    """
    low, high = width_range
    if not 0 < low <= 1 <= high:
        raise ValueError(f"widths of {low:g} to {high:g} times: give a range that has 1 in it")
    names = ["stem", *(f"stages.{i}" for i in range(len(master.stages)))]
    names += ["head"] if master.head_width else []
    places, options = [], []
    for name, own in zip(names, net_choices(master), strict=True):
        widths = width_choices(own.width, low, high, most_widths)
        depths, types = [own.depth], [own]
        if own.block != "C":
            depths = range(max(own.depth - depth_steps, 1), own.depth + depth_steps + 1)
            each = kernels if per_block_kernels or paper else ()
            types = list(type_choices(own, each, RATIOS if switch_blocks else (own.block,)))
        every = product(types, depths, widths)
        choices = tuple(replace(kind, depth=depth, width=width) for kind, depth, width in every)
        options.append(choices)
        places.append(net_place(name, own, choices, paper))
    return NetSpace(places=tuple(places), master=master, options=tuple(options))


def net_choices(spec: NetSpec) -> tuple[Choice, ...]:
    """The choice at each place of a network. Raises ValueError for blocks of another kind."""
    stem = Choice(1, spec.stem_width, "C", 3, 1.0)
    head = [Choice(1, spec.head_width, "C", 1, 1.0)] if spec.head_width else []
    stages = [
        Choice(stage.depth, stage.width, block_class(stage, i), stage.kernel, stage.ratio)
        for i, stage in enumerate(spec.stages)
    ]
    return (stem, *stages, *head)


def block_class(stage: Stage, number: int) -> str:
    if stage.block is Basic and not stage.group_width:
        return "XX"
    if stage.block is Bottleneck and stage.group_width in (0, 1):
        return "DW" if stage.group_width else "BL"
    raise ValueError(
        f"stage {number} has {stage.block.__name__} blocks of group_width {stage.group_width}: a "
        "search needs Basic with 0 (XX), or Bottleneck with 0 (BL) or 1 (DW)"
    )


def changed_stage(stage: Stage, choice: Choice) -> Stage:
    own = {**vars(choice), "block": BLOCKS[choice.block]}
    return replace(stage, **own, group_width=int(choice.block == "DW"))


def width_choices(own: int, low: float, high: float, most: int) -> list[int]:
    """Multiples of 8 within `low` to `high` times `own`, and `own`; at most `most`, ascending."""
    first, last = max(1, math.ceil(low * own / WIDTH_STEP)), int(high * own / WIDTH_STEP)
    every = sorted({own, *range(WIDTH_STEP * first, WIDTH_STEP * last + 1, WIDTH_STEP)})
    if len(every) <= most:
        return every
    # `most` equal ratios, rounded to choices; the own width replaces the nearest choice
    log = np.log(every)
    targets = np.linspace(log[0], log[-1], most)
    nearest = {int(np.abs(log - target).argmin()) for target in targets}
    if every.index(own) not in nearest:
        inner = nearest - {0, len(every) - 1}
        nearest.remove(min(inner, key=lambda i: abs(log[i] - np.log(own))))
        nearest.add(every.index(own))
    return [every[i] for i in sorted(nearest)]


def type_choices(own: Choice, kernels: Sequence[int], blocks: Iterable[str]) -> list[Choice]:
    """The types at a stage, its own type first, by `kernels` and the ratios of each class."""
    types = [
        replace(own, block=block, kernel=kernel, ratio=ratio)
        for block in blocks
        for kernel in (own.kernel, *kernels)
        for ratio in ((own.ratio,) if block == own.block else ()) + ratios(own, block)
    ]
    return list(dict.fromkeys([own, *types]))


def ratios(own: Choice, block: str) -> tuple[float, ...]:
    """The ratios to choose from in a class of block; a stage of class XX keeps its ratio."""
    return () if own.block == block == "XX" else RATIOS[block]


def net_place(name: str, own: Choice, options: tuple[Choice, ...], paper: bool) -> Place:
    """A place with the features of each choice, without columns that are all zero."""
    columns: dict[str, np.ndarray] = {}
    depth = np.array([choice.depth - own.depth for choice in options], float)
    width = np.array([choice.width for choice in options], float)
    if paper:
        for kind in dict.fromkeys((o.block, o.kernel, o.ratio) for o in options):
            same = np.array([(o.block, o.kernel, o.ratio) == kind for o in options])
            label = "" if kind[0] == "C" else f"{kind[0]} k{kind[1]} r{kind[2]:g} "
            columns[f"{label}depth"] = same * depth
            columns[f"{label}width"] = same * (width - own.width)
    else:
        for block in dict.fromkeys(choice.block for choice in options):
            same = np.array([choice.block == block for choice in options])
            label = "" if block == own.block else f"{block} "
            if block != own.block:
                columns[block] = same.astype(float)
            columns[f"{label}depth"] = same * depth
            columns[f"{label}log width"] = same * np.log(width / own.width)
            for term in ("kernel", "ratio"):
                values = np.array([getattr(choice, term) for choice in options])
                base = getattr(own, term) if block == own.block else values[same][0]
                for value in np.unique(values[same & (values != base)]):
                    columns[f"{label}{term} {value:g}"] = (same & (values == value)).astype(float)
    columns = {term: column for term, column in columns.items() if column.any()}
    blocks = list(dict.fromkeys(choice.block for choice in options))
    return Place(
        name=name,
        choices=len(options),
        start=options.index(own),
        features=np.array(list(columns.values())).reshape(len(columns), len(options)).T,
        terms=tuple(columns),
        classes=np.array([blocks.index(choice.block) for choice in options]),
    )
