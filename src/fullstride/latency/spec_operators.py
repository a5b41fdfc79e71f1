"""Which operators will a network run, and how long will it take, before it is built? From its spec, for many at once.

Stems, blocks and heads are walked as their modules in `nets` run. Every size may be one number or an array of them, so
that all blocks that run the same operators, at whatever sizes and of whatever network, are walked together.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from fullstride.latency.profiles import Profile
from fullstride.latency.roofline import prepare_rows, times
from fullstride.measure.cost.operators import (
    AFTER_PRODUCT,
    ALONE,
    IN_CHAIN,
    IN_OTHER_CHAIN,
    JOINING,
    KIND,
    NAMES,
    Operators,
    Row,
    Size,
    elementwise,
    linear,
    where,
)
from fullstride.measure.cost.operators import convolution as convolution_of_pixels
from fullstride.nets.spec import MOST_CHANNELS, NetSpec, check_range
from fullstride.nets.spec import NAMES as NAMES_OF_PARTS

AT_ONCE = 1_000  # specs: what is made of them stays small
MOST_KNOWN = 200_000  # kinds and sizes of parts that an estimator remembers: about 65 MB

# What decides which operators run, the name of the walk first, and the sizes. Names and numbers only: into tuples of
# such the garbage collector looks but once, and looking again and again would take a third of the time.
Part = tuple[tuple, tuple]


def operators_of(spec: NetSpec, resolution: int | None = None) -> Operators:
    """Equal to `traced(Network(spec), resolution)`, row by row. At the spec's own resolution where none is given.

    Raises ValueError for what `Network` would not build.
    """
    rows: list[Row] = []
    for ((walk, *how), sizes), count in parts(spec, resolution):
        rows += WALKS[walk](*how, *sizes) * count
    return Operators.of(rows)


class Estimator:
    """Times of networks by one profile at one batch size, from their specs alone: fast for many that share blocks.

    What `estimate` says of the real module, to the rounding of sums. Raises ValueError for training steps where the
    profile has none.
    """

    def __init__(self, profile: Profile, batch: int, *, training: bool = False):
        fit = profile.training if training else profile.inference
        if fit is None:
            raise ValueError(
                f"{profile.name} knows no training steps: use rtx3090, or calibrate your own device"
            )
        check_range("batch", batch, MOST_CHANNELS)
        self.machine, self.batch, self.training = profile.machine, batch, training
        self.fixed_s = 1e-6 * (
            fit.numbers.get("start_us", 0.0) + batch * fit.numbers.get("image_us", 0.0)
        )
        self.numbers = {
            **fit.numbers,
            "start_us": 0.0,
            "image_us": 0.0,
        }  # they are a network's, not each part's
        self.known: dict[Part, tuple[float, float]] = {}  # seconds of device and host for a batch

    def __call__(self, spec: NetSpec, resolution: int | None = None) -> float:
        """ms per image."""
        return float(self.many([spec], resolution)[0])

    def many(self, specs: Sequence[NetSpec], resolution: int | None = None) -> np.ndarray:
        """ms per image of each, at `resolution` or else at its own."""
        busy = np.empty((2, len(specs)))  # seconds of device and host
        for i in range(0, len(specs), AT_ONCE):
            some = specs[i : i + AT_ONCE]
            if len(self.known) > MOST_KNOWN:
                self.known.clear()
            self.learn(
                {
                    part: None
                    for spec in some
                    for part, _ in parts(spec, resolution)
                    if part not in self.known
                }
            )
            for number, spec in enumerate(some, i):
                found = [(self.known[part], count) for part, count in parts(spec, resolution)]
                busy[0, number] = sum(device_s * count for (device_s, _), count in found)
                busy[1, number] = sum(host_s * count for (_, host_s), count in found)
        device_s, host_s = busy
        return (
            np.sqrt(np.hypot((device_s + self.fixed_s) ** 2, host_s**2)) * 1e3 / self.batch
        )  # as `times` joins them

    def learn(self, new: Iterable[Part]) -> None:
        """Time each part, as if it were a network."""
        alike: defaultdict[tuple, list[tuple]] = defaultdict(list)
        for kind, sizes in new:
            alike[kind].append(sizes)
        if not alike:
            return
        tables, lengths = [], []
        for (walk, *how), sizes in alike.items():
            rows = WALKS[walk](*how, *np.array(sizes, np.float64).T)
            table = np.empty((len(NAMES), len(sizes), len(rows)))
            for number, row in enumerate(rows):
                for column, values in zip(table, row, strict=True):
                    column[:, number] = values
            tables.append(table.reshape(len(NAMES), -1))
            lengths += [len(rows)] * len(sizes)
        columns = zip(NAMES, np.concatenate(tables, axis=1), strict=True)
        rows = Operators(
            *(c.astype(np.int64) if name in ("kind", "chain") else c for name, c in columns)
        )
        batches = np.full(len(lengths), self.batch)
        took = times(
            prepare_rows(rows, np.array(lengths), batches, self.machine, training=self.training),
            self.numbers,
        )
        both = zip(took.device_s.tolist(), took.host_s.tolist(), strict=True)
        keys = ((kind, sizes) for kind, group in alike.items() for sizes in group)
        self.known.update(zip(keys, both, strict=True))


def parts(spec: NetSpec, resolution: int | None = None) -> Iterator[tuple[Part, int]]:
    """Stem, blocks and head in order, each with how often it runs in a row."""
    side = spec.resolution if resolution is None else resolution
    check_range("resolution", side, MOST_CHANNELS)
    stem = NAMES_OF_PARTS.get(spec.stem)
    if stem not in WALKS:
        raise ValueError(
            f"no walk for a {spec.stem.__name__}: take its operators from the module, with traced"
        )
    how = (side % 4 > 0, spec.in_channels > 1 or side > 4) if stem == "SpaceToDepthStem" else ()
    yield ((stem, *how), (spec.in_channels, spec.stem_width, side)), 1
    side, width = halved(side, spec.stem.stride), spec.stem_width
    for stage in spec.stages:
        branch, inner, groups, style = (
            NAMES_OF_PARTS.get(stage.block),
            stage.inner,
            stage.groups,
            spec.style,
        )
        if branch not in BRANCHES:
            raise ValueError(
                f"no walk for a {stage.block.__name__}: take its operators from the module, with traced"
            )
        if branch == "Basic" and (width % groups or stage.width % groups):
            raise ValueError(
                f"{width} channels in and {stage.width} out do not divide into {groups} groups: "
                "set group_width=0, or widths that are multiples of the groups"
            )
        gate, reduced = None, 0
        if stage.se:
            gate = "inner" if branch == "Bottleneck" and stage.se.at == "inner" else "out"
            channels = inner if gate == "inner" else stage.width
            reduced = max(int(channels * stage.se.ratio), stage.se.least)
        sizes = (stage.width, inner, stage.kernel, groups, reduced)
        projected, halving = stage.stride > 1 or width != stage.width, stage.stride > 1
        first = (
            "block",
            branch,
            gate,
            stage.stride,
            projected,
            halving and style.blur,
            halving and style.average_shortcut,
        )
        yield (first, (width, *sizes, side)), 1
        side, width = halved(side, stage.stride), stage.width
        if stage.depth > 1:
            yield (
                (("block", branch, gate, 1, False, False, False), (width, *sizes, side)),
                stage.depth - 1,
            )
    yield (("head", spec.head_width > 0), (width, spec.head_width, spec.classes, side)), 1


def halved(side: Size, stride: int) -> Size:
    """Pixels a side behind every layer of ours of that stride."""
    return -(-side // stride)


def convolution(
    c_in: Size,
    c_out: Size,
    kernel: Size,
    side_in: Size,
    side_out: Size,
    groups: Size = 1,
    bias: bool = False,
) -> Row:
    """Of square kernels and maps."""
    return convolution_of_pixels(c_in, c_out, kernel**2, side_in**2, side_out**2, groups, bias)


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
) -> list[Row]:
    """`layers.ConvNorm`. `blur`: halves by one, where the stride would."""
    stride = 1 if blur else stride
    out = halved(side, stride)
    size = c_out * out**2
    rows = [
        convolution(c_in, c_out, kernel, side, out, groups),
        elementwise("batch_norm", size, size, 4 * c_out, AFTER_PRODUCT),
    ]
    if active:
        rows.append(elementwise("activation", size, size, chain=IN_CHAIN))
    if blur:
        rows.append(elementwise("copy", size, c_out * (out + 2) ** 2))
        rows.append(convolution(c_out, c_out, 3, out + 2, halved(out, 2), c_out))
    return rows


def squeeze_excite(channels: Size, reduced: Size, side: Size) -> list[Row]:
    """`layers.SqueezeExcite`. A map of one pixel is as large as the gate, so that the product is of equals."""
    size, pixel = channels * side**2, side == 1
    scale = where(pixel, KIND["add"], KIND["scale"])
    return [
        elementwise("reduce", size, channels),
        convolution(channels, reduced, 1, 1, 1, bias=True),
        elementwise("activation", reduced, reduced, chain=AFTER_PRODUCT),
        convolution(reduced, channels, 1, 1, 1, bias=True),
        elementwise("activation", channels, channels, chain=AFTER_PRODUCT),
        Row(scale, 0, size + channels, size, chain=where(pixel, IN_CHAIN, ALONE)),
    ]


def basic(gate, stride, blur, c_in, c_out, inner, kernel, groups, reduced, side) -> list[Row]:
    rows = conv_norm(c_in, inner, kernel, side, stride, groups, blur=blur)
    return rows + conv_norm(inner, c_out, kernel, halved(side, stride), groups=groups, active=False)


def bottleneck(gate, stride, blur, c_in, c_out, inner, kernel, groups, reduced, side) -> list[Row]:
    out = halved(side, stride)
    rows = conv_norm(c_in, inner, 1, side)
    rows += conv_norm(inner, inner, kernel, side, stride, groups, blur=blur)
    if gate == "inner":
        rows += squeeze_excite(inner, reduced, out)
    return rows + conv_norm(inner, c_out, 1, out, active=False)


def block(
    branch,
    gate,
    stride,
    projected,
    blur,
    average,
    c_in,
    c_out,
    inner,
    kernel,
    groups,
    reduced,
    side,
) -> list[Row]:
    """`blocks.Block`, with the layers of its branch."""
    out = halved(side, stride)
    size = c_out * out**2
    rows = BRANCHES[branch](gate, stride, blur, c_in, c_out, inner, kernel, groups, reduced, side)
    add = relu = IN_CHAIN
    if gate == "out":
        rows += squeeze_excite(c_out, reduced, out)
        add = relu = where(out == 1, IN_CHAIN, IN_OTHER_CHAIN)
    if projected:
        if average:
            rows.append(elementwise("pool", c_in * side**2, c_in * out**2))
        rows += conv_norm(
            c_in, c_out, 1, out if average else side, 1 if average else stride, active=False
        )
        add, relu = JOINING, IN_CHAIN
    rows.append(elementwise("add", 2 * size, size, chain=add))
    return [*rows, elementwise("activation", size, size, chain=relu)]


def conv_stem(c_in: Size, width: Size, side: Size) -> list[Row]:
    return conv_norm(c_in, width, 3, side, 2)


def max_pool(width: Size, side: Size) -> Row:
    return elementwise("pool", width * side**2, width * halved(side, 2) ** 2)


def pool_stem(c_in: Size, width: Size, side: Size) -> list[Row]:
    return [*conv_norm(c_in, width, 7, side, 2), max_pool(width, halved(side, 2))]


def three_convs(c_in: Size, width: Size, side: Size) -> list[Row]:
    half, out = np.maximum(width // 2, 1), halved(side, 2)
    return (
        conv_norm(c_in, half, 3, side, 2)
        + conv_norm(half, half, 3, out)
        + conv_norm(half, width, 3, out)
    )


def deep_stem(c_in: Size, width: Size, side: Size) -> list[Row]:
    return [*three_convs(c_in, width, side), max_pool(width, halved(side, 2))]


def deep_conv_stem(c_in: Size, width: Size, side: Size) -> list[Row]:
    return three_convs(c_in, width, side) + conv_norm(width, width, 3, halved(side, 2), 2)


def space_to_depth_stem(
    padded: bool, moved: bool, c_in: Size, width: Size, side: Size
) -> list[Row]:
    """`moved`: one patch of one channel is in order as it is."""
    out = halved(side, 4)
    size = c_in * (4 * out) ** 2
    rows = [elementwise("copy", c_in * side**2, size)] if padded else []
    rows += [elementwise("copy", size, size)] if moved else []
    return rows + conv_norm(16 * c_in, width, 3, out)


def head(wide: bool, c_in: Size, width: Size, classes: Size, side: Size) -> list[Row]:
    rows = conv_norm(c_in, width, 1, side) if wide else []
    channels = width if wide else c_in
    return [*rows, elementwise("reduce", channels * side**2, channels), linear(channels, classes)]


BRANCHES = {"Basic": basic, "Bottleneck": bottleneck}
WALKS: dict[str, Callable[..., list[Row]]] = {
    "ConvStem": conv_stem,
    "PoolStem": pool_stem,
    "DeepStem": deep_stem,
    "DeepConvStem": deep_conv_stem,
    "SpaceToDepthStem": space_to_depth_stem,
    "block": block,
    "head": head,
}
