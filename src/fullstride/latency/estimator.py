"""Estimates times of modules and of many specs by a profile.

The operators of specs are listed at once, without building networks: stems, blocks and heads are
walked as their modules in `nets` run. A size may be an array, so that blocks of any sizes and
networks that run the same operators are walked together. A network with a stem or block that has no
walk here is built and traced on the meta device instead.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from fullstride.io.records import check_range
from fullstride.latency.network_times import Estimate, estimates, fit_of
from fullstride.latency.profiles import Profile
from fullstride.latency.roofline import prepare_rows, times, total_seconds
from fullstride.measure.budget import MOST_IMAGES
from fullstride.measure.operators import (
    AFTER_PRODUCT,
    ALONE,
    COLUMNS,
    IN_CHAIN,
    IN_OTHER_CHAIN,
    JOINING,
    KIND,
    OF_FRAMES,
    OperatorRow,
    Operators,
    Size,
    convolution,
    elementwise,
    linear,
    where,
)
from fullstride.measure.tracer import on_meta, traced, traced_with_names
from fullstride.nets import zoo
from fullstride.nets.blocks import Style, merge_branches
from fullstride.nets.bundle import build
from fullstride.nets.spec import MOST_CHANNELS, NAMES, NetSpec, Stage, TimmSpec

CHUNK = 1_000  # specs at once, to bound memory
MAX_CACHED = 200_000  # parts in an estimator's cache: about 65 MB
# The walk's name and the options that decide which operators run, and the sizes. Only numbers and
# names: the garbage collector untracks tuples of these, which saves a third of the time.
Part = tuple[tuple, tuple]


def estimate(
    net: nn.Module | Callable[[], nn.Module] | Operators,
    profile: Profile,
    batch: int,
    resolution: int = 224,
    *,
    training: bool = False,
    in_channels: int = 3,
) -> Estimate:
    """Estimate the time of a network: a module, a function that builds one, or its operators.

    `resolution` in pixels and `in_channels` describe the image, and are ignored for operators.
    Inference means the network as it ships, with branches merged (`blocks.merge_branches`). Raises
    ValueError for training steps if the profile has none, and for an unfit image.

    Examples:
        >>> import fullstride
        >>> net, profile = fullstride.zoo.create("resnet50"), fullstride.load_profile("rtx4090")
        >>> time = fullstride.estimate(net, profile, batch=64)
        >>> time.low < time.ms_per_image < time.high
        True
    """
    if not isinstance(net, Operators):
        form = partial(in_form, partial(on_meta, net), training)
        net = traced(form, resolution, in_channels)
    return estimates([net], profile, [batch], training=training)[0]


class Estimator:
    """Estimates times of specs by one profile at one batch size, fast for specs that share blocks.

    Equal to `estimate` of the module, up to rounding. Raises ValueError for training steps if
    the profile has none.
    """

    def __init__(self, profile: Profile, batch: int, *, training: bool = False):
        fit = fit_of(profile, training)
        check_range("batch", batch, MOST_IMAGES)
        self.machine, self.batch, self.training = profile.machine, batch, training
        start_us, image_us = (fit.numbers.get(name, 0.0) for name in ("start_us", "image_us"))
        self.fixed_s = 1e-6 * (start_us + batch * image_us)
        # A network starts and copies its image once, not once per part.
        self.numbers = {**fit.numbers, "start_us": 0.0, "image_us": 0.0}
        self.cache: dict[Part, tuple[float, float]] = {}  # seconds of device and host for a batch

    def __call__(self, spec: NetSpec, resolution: int | None = None) -> float:
        """Estimate ms per image."""
        return float(self.many([spec], resolution)[0])

    def many(self, specs: Sequence[NetSpec], resolution: int | None = None) -> np.ndarray:
        """Estimate ms per image of each spec at `resolution` pixels, by default its own."""
        busy_s = np.empty((2, len(specs)))  # device and host
        for i in range(0, len(specs), CHUNK):
            chunk = specs[i : i + CHUNK]
            if len(self.cache) > MAX_CACHED:
                self.cache.clear()
            every = (part for spec in chunk for part, _ in parts(spec, resolution))
            self.add(dict.fromkeys(part for part in every if part not in self.cache))
            for number, spec in enumerate(chunk, i):
                own = [(self.cache[part], count) for part, count in parts(spec, resolution)]
                busy_s[0, number] = sum(device_s * count for (device_s, _), count in own)
                busy_s[1, number] = sum(host_s * count for (_, host_s), count in own)
        device_s, host_s = busy_s
        return total_seconds(device_s + self.fixed_s, host_s) * 1e3 / self.batch

    def add(self, new: Iterable[Part]) -> None:
        """Cache the time of each part, estimated like a network."""
        groups: defaultdict[tuple, list[tuple]] = defaultdict(list)
        for walk, sizes in new:
            groups[walk].append(sizes)
        if not groups:
            return
        tables, lengths = [], []
        for walk, sizes in groups.items():
            rows = rows_of(walk, np.array(sizes, np.float64).T)
            table = np.empty((len(COLUMNS), len(sizes), len(rows)))
            for number, row in enumerate(rows):
                for column, values in zip(table, row, strict=True):
                    column[:, number] = values
            tables.append(table.reshape(len(COLUMNS), -1))
            lengths += [len(rows)] * len(sizes)
        rows = Operators.of_columns(np.concatenate(tables, axis=1))
        batches = np.full(len(lengths), self.batch)
        work = prepare_rows(rows, np.array(lengths), batches, self.machine, training=self.training)
        seconds = times(work, self.numbers)
        keys = ((walk, sizes) for walk, group in groups.items() for sizes in group)
        values = zip(seconds.device_s.tolist(), seconds.host_s.tolist(), strict=True)
        self.cache.update(zip(keys, values, strict=True))


# ---- the operators of many networks at once from their specs, without building them


def operators_with_names(
    network: zoo.NamedNetwork, resolution: int, *, training: bool = False
) -> tuple[Operators, frozenset[str]]:
    """The operators of a network, and their ATen names if it has the head of a task."""
    if network.spec.frames:
        return operators_of(network.spec, resolution), frozenset({OF_FRAMES})
    if network.head is None:
        return operators_of(network.spec, resolution, training=training), frozenset()
    form = partial(in_form, network.build, training)
    return traced_with_names(form, resolution, network.spec.in_channels)


def operators_of(
    spec: NetSpec | TimmSpec, resolution: int | None = None, *, training: bool = False
) -> Operators:
    """The operators of one image at `resolution`, by default the spec's own.

    The network is in its shipped form, with branches merged, or its training form. The rows equal
    `traced(Network(spec), resolution)`. Raises ValueError for a spec that cannot be built.
    """
    if not isinstance(spec, NetSpec):
        side = spec.resolution if resolution is None else resolution
        return traced_network(spec, side, training)
    rows: list[OperatorRow] = []
    for (walk, sizes), count in parts(spec, resolution):
        rows += rows_of(walk, sizes) * count
    return Operators.of(rows)


def rows_of(walk: tuple, sizes: tuple | np.ndarray) -> list[OperatorRow]:
    """The operators of a part; `sizes` may be arrays with one entry per part."""
    name, *options = walk
    return WALKS[name](*options, *sizes)


def parts(spec: NetSpec, resolution: int | None = None) -> Iterator[tuple[Part, int]]:
    """Yield stem, blocks and head in order, each with its number of repetitions."""
    side = spec.resolution if resolution is None else resolution
    check_range("resolution", side, MOST_CHANNELS)
    stem = NAMES.get(spec.stem)
    branches = [NAMES.get(stage.block) for stage in spec.stages]
    has_walks = stem in WALKS and BRANCHES.keys() >= set(branches)
    if not has_walks or spec.frames or spec.style.self_gate:
        yield (("network", spec, side), ()), 1
        return
    options = (side % 4 > 0, spec.in_channels > 1 or side > 4) if stem == "SpaceToDepthStem" else ()
    yield ((stem, *options), (spec.in_channels, spec.stem_width, side)), 1
    side, width, style = halved(side, spec.stem.stride), spec.stem_width, spec.style
    for stage in spec.stages:
        yield from stage_parts(stage, width, side, style)
        side, width = halved(side, stage.stride), stage.width
    yield (("head", spec.head_width > 0), (width, spec.head_width, spec.classes, side)), 1


def stage_parts(stage: Stage, c_in: int, side: int, style: Style) -> Iterator[tuple[Part, int]]:
    """Yield the first block, which alone depends on `c_in` channels, and the others, if any.

    `side`: pixels of the map that the stage reads.
    """
    branch, inner, groups = NAMES[stage.block], stage.inner, stage.groups
    se_at, reduced = None, 0
    if stage.se:
        se_at = "inner" if branch == "Bottleneck" and stage.se.at == "inner" else "out"
        channels = inner if se_at == "inner" else stage.width
        reduced = max(int(channels * stage.se.ratio), stage.se.least)
    sizes = (stage.width, inner, stage.kernel, groups, reduced)
    projected, halving = stage.stride > 1 or c_in != stage.width, stage.stride > 1
    blur, average = halving and style.blur, halving and style.average_shortcut
    first = ("block", branch, se_at, stage.stride, projected, blur, average)
    yield (first, (c_in, *sizes, side)), 1
    if stage.depth > 1:
        other = ("block", branch, se_at, 1, False, False, False)
        yield (other, (stage.width, *sizes, halved(side, stage.stride))), stage.depth - 1


@lru_cache(maxsize=256)
def traced_network(spec: NetSpec | TimmSpec, side: int, training: bool = False) -> Operators:
    """Build and trace a network, cached because it takes a second and a walk a millisecond."""
    return traced(partial(in_form, partial(build, spec), training), side, spec.in_channels)


def in_form(build: Callable[[], nn.Module], training: bool) -> nn.Module:
    """Build the network in its training form, or in its shipped form."""
    net = build()
    return net if training else merge_branches(net)


def network(spec: NetSpec, side: int) -> list[OperatorRow]:
    """A network with a stem, a block or gates that have no walk."""
    return traced_network(spec, side).rows()


def halved(side: Size, stride: int) -> Size:
    """Pixels a side after a layer with this stride."""
    return -(-side // stride)


def conv_norm(
    c_in: Size,
    c_out: Size,
    kernel: Size,
    side: Size,
    stride: int = 1,
    groups: Size = 1,
    *,
    active: bool = True,
    blur: bool = False,
) -> list[OperatorRow]:
    """`layers.ConvNorm`; `blur`: halve by a blur instead of the stride."""
    stride = 1 if blur else stride
    out = halved(side, stride)
    size = c_out * out**2
    rows = [
        convolution(c_in, c_out, kernel**2, side**2, out**2, groups),
        elementwise("batch_norm", size, size, 4 * c_out, AFTER_PRODUCT),
    ]
    if active:
        rows.append(elementwise("activation", size, size, chain=IN_CHAIN))
    if blur:
        padded = (out + 2) ** 2
        rows.append(elementwise("copy", size, c_out * padded))
        rows.append(convolution(c_out, c_out, 9, padded, halved(out, 2) ** 2, c_out))
    return rows


def squeeze_excite(channels: Size, reduced: Size, side: Size) -> list[OperatorRow]:
    """`layers.SqueezeExcite`; a map of one pixel has the gate's size, so "add" is its kind."""
    size, pixel = channels * side**2, side == 1
    scale = where(pixel, KIND["add"], KIND["scale"])
    return [
        elementwise("reduce", size, channels),
        convolution(channels, reduced, 1, 1, 1, bias=True),
        elementwise("activation", reduced, reduced, chain=AFTER_PRODUCT),
        convolution(reduced, channels, 1, 1, 1, bias=True),
        elementwise("activation", channels, channels, chain=AFTER_PRODUCT),
        OperatorRow(scale, 0, size + channels, size, chain=where(pixel, IN_CHAIN, ALONE)),
    ]


class BlockForm(NamedTuple):
    """The options that decide which operators a block runs."""

    branch: str
    se_at: str | None
    stride: int
    projected: bool
    blur: bool
    average: bool


class BlockSizes(NamedTuple):
    c_in: Size
    c_out: Size
    inner: Size
    kernel: Size
    groups: Size
    reduced: Size  # channels inside squeeze-and-excitation
    side: Size


def basic(form: BlockForm, n: BlockSizes) -> list[OperatorRow]:
    out = halved(n.side, form.stride)
    rows = conv_norm(n.c_in, n.inner, n.kernel, n.side, form.stride, n.groups, blur=form.blur)
    return rows + conv_norm(n.inner, n.c_out, n.kernel, out, groups=n.groups, active=False)


def bottleneck(form: BlockForm, n: BlockSizes) -> list[OperatorRow]:
    out = halved(n.side, form.stride)
    rows = conv_norm(n.c_in, n.inner, 1, n.side)
    rows += conv_norm(n.inner, n.inner, n.kernel, n.side, form.stride, n.groups, blur=form.blur)
    if form.se_at == "inner":
        rows += squeeze_excite(n.inner, n.reduced, out)
    return rows + conv_norm(n.inner, n.c_out, 1, out, active=False)


def block(*options_and_sizes: Any) -> list[OperatorRow]:
    """`blocks.Block` with its branch; the arguments are the fields of `BlockForm`, `BlockSizes`."""
    count = len(BlockForm._fields)
    form, n = BlockForm(*options_and_sizes[:count]), BlockSizes(*options_and_sizes[count:])
    out = halved(n.side, form.stride)
    size = n.c_out * out**2
    rows = BRANCHES[form.branch](form, n)
    add = relu = IN_CHAIN
    if form.se_at == "out":
        rows += squeeze_excite(n.c_out, n.reduced, out)
        add = relu = where(out == 1, IN_CHAIN, IN_OTHER_CHAIN)
    if form.projected:
        side, stride = n.side, form.stride
        if form.average:
            rows.append(elementwise("pool", n.c_in * side**2, n.c_in * out**2))
            side, stride = out, 1
        rows += conv_norm(n.c_in, n.c_out, 1, side, stride, active=False)
        add, relu = JOINING, IN_CHAIN
    rows.append(elementwise("add", 2 * size, size, chain=add))
    return [*rows, elementwise("activation", size, size, chain=relu)]


def conv_stem(c_in: Size, width: Size, side: Size) -> list[OperatorRow]:
    return conv_norm(c_in, width, 3, side, 2)


def max_pool(width: Size, side: Size) -> OperatorRow:
    return elementwise("pool", width * side**2, width * halved(side, 2) ** 2)


def pool_stem(c_in: Size, width: Size, side: Size) -> list[OperatorRow]:
    return [*conv_norm(c_in, width, 7, side, 2), max_pool(width, halved(side, 2))]


def three_convs(c_in: Size, width: Size, side: Size) -> list[OperatorRow]:
    half, out = np.maximum(width // 2, 1), halved(side, 2)
    return (
        conv_norm(c_in, half, 3, side, 2)
        + conv_norm(half, half, 3, out)
        + conv_norm(half, width, 3, out)
    )


def deep_stem(c_in: Size, width: Size, side: Size) -> list[OperatorRow]:
    return [*three_convs(c_in, width, side), max_pool(width, halved(side, 2))]


def deep_conv_stem(c_in: Size, width: Size, side: Size) -> list[OperatorRow]:
    return three_convs(c_in, width, side) + conv_norm(width, width, 3, halved(side, 2), 2)


def space_to_depth_stem(
    padded: bool, moved: bool, c_in: Size, width: Size, side: Size
) -> list[OperatorRow]:
    """`moved`: False for a single patch of one channel, which is already in order."""
    out = halved(side, 4)
    size = c_in * (4 * out) ** 2
    rows = [elementwise("copy", c_in * side**2, size)] if padded else []
    rows += [elementwise("copy", size, size)] if moved else []
    return rows + conv_norm(16 * c_in, width, 3, out)


def head(wide: bool, c_in: Size, width: Size, classes: Size, side: Size) -> list[OperatorRow]:
    rows = conv_norm(c_in, width, 1, side) if wide else []
    channels = width if wide else c_in
    return [*rows, elementwise("reduce", channels * side**2, channels), linear(channels, classes)]


BRANCHES = {"Basic": basic, "Bottleneck": bottleneck}
WALKS: dict[str, Callable[..., list[OperatorRow]]] = {
    "ConvStem": conv_stem,
    "PoolStem": pool_stem,
    "DeepStem": deep_stem,
    "DeepConvStem": deep_conv_stem,
    "SpaceToDepthStem": space_to_depth_stem,
    "network": network,
    "block": block,
    "head": head,
}
