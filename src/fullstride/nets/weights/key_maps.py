"""Maps fullstride's parameters to their names in each format of released weights.

Each key map is a function of a spec that yields (fullstride's path, the format's path) for every
module with parameters, the stem's convolution first; fewer if the format lacks the network.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count
from typing import NamedTuple

import torch
from torch import nn

from fullstride.nets import blocks
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec

Pairs = Iterator[tuple[str, str]]

# The convolutions of the blocks that other formats have, and which of them has the stride or blur.
CONVS = {blocks.Basic: ("conv1", "conv2"), blocks.Bottleneck: ("conv1", "conv2", "conv3")}
STRIDED = {blocks.Basic: "conv1", blocks.Bottleneck: "conv2"}


class BlockLocation(NamedTuple):
    """The position and the layers of one block."""

    stage: int
    number: int  # of the block in its stage
    path: str  # of fullstride's module
    convs: tuple[str, ...]
    strided: str  # the convolution that has the stride; "" for none
    projected: bool  # the shortcut has parameters
    se: bool


def block_locations(spec: NetSpec) -> Iterator[BlockLocation]:
    width = spec.stem_width
    for s, stage in enumerate(spec.stages):
        for b in range(stage.depth):
            strided = b == 0 and stage.stride > 1
            yield BlockLocation(
                stage=s,
                number=b,
                path=f"stages.{s}.{b}",
                convs=CONVS.get(stage.block, ()),
                strided=STRIDED.get(stage.block, "") if strided else "",
                projected=strided or width != stage.width,
                se=stage.se is not None,
            )
            width = stage.width


def conv_norm(path: str, conv: str, norm: str) -> Pairs:
    yield f"{path}.conv", conv
    yield f"{path}.norm", norm


class Names(NamedTuple):
    """The names of a network's layers in one format; a pair names a convolution and its norm.

    {stage} counts from 1 and {number} from 0, {listed} from the authors' third module, up to
    {last_listed} and {after_last}; {ours} is fullstride's path of a block, {conv} fullstride's name
    of a convolution, {from_1} its number, {kind} its kernel, 1x1 or kxk, and {first} and {second}
    are the indices of convolution and norm in a list with activations. {pooled} is the index of a
    projection behind a pool, {average} and {after_average} are the indices of projection and norm
    if all projections are behind a pool, and {blurred} is the level that a blur adds.
    """

    stem: Mapping[str, tuple[str, str]]  # by fullstride's paths
    block: str
    conv: tuple[str, str]  # below the block
    project: tuple[str, str]
    classifier: str
    head: tuple[str, str] | None = None  # the convolution after the blocks
    se: bool = True  # whether the format has squeeze-and-excitation


def renamed(names: Names, spec: NetSpec) -> Pairs:
    """Fullstride's layers and the format's names; fewer if the format lacks the network."""
    for path, theirs in names.stem.items():
        yield from conv_norm(path, *theirs)
    average = int(spec.style.average_shortcut)
    for at in block_locations(spec):
        if at.se and not names.se:
            return
        values = {"ours": at.path, "stage": at.stage + 1, "number": at.number}
        values |= {"listed": at.stage + 3, "pooled": 1 if at.strided else 0}
        values |= {"average": average, "after_average": average + 1}
        block = names.block.format(**values)
        for place, ours in enumerate(at.convs):
            each = values | {"conv": ours, "first": 3 * place}
            each |= {"from_1": place + 1, "second": 3 * place + 1}
            each["kind"] = "kxk" if len(at.convs) == 2 or place == 1 else "1x1"
            each["blurred"] = ".0" if ours == at.strided else ""
            theirs = (f"{block}.{name.format(**each)}" for name in names.conv)
            yield from conv_norm(f"{at.path}.branch.{ours}", *theirs)
        if at.se:
            yield f"{at.path}.branch.se.reduce", f"{block}.se.fc1"
            yield f"{at.path}.branch.se.expand", f"{block}.se.fc2"
        if at.projected:
            theirs = (f"{block}.{name.format(**values)}" for name in names.project)
            yield from conv_norm(f"{at.path}.shortcut.project", *theirs)
    if spec.head_width and names.head:
        last = len(spec.stages) + 3
        theirs = (name.format(last_listed=last, after_last=last + 1) for name in names.head)
        yield from conv_norm("head.conv", *theirs)
    yield "head.fc", names.classifier


def layer_paths(spec: NetSpec) -> tuple[str, ...]:
    """The path of every module with parameters, in the order of the forward pass."""
    # All blocks of a stage except the first and the last have the same layers.
    stages = tuple(replace(stage, depth=min(stage.depth, 3)) for stage in spec.stages)
    built = built_paths(replace(spec, source="", stages=stages, resolution=1))
    paths = [path for path in built if path.startswith("stem.")]
    for s, stage in enumerate(spec.stages):
        for b in range(stage.depth):
            number = stages[s].depth - 1 if b == stage.depth - 1 else min(b, 1)
            block = f"stages.{s}.{number}."
            layers = [path.removeprefix(block) for path in built if path.startswith(block)]
            paths += [f"stages.{s}.{b}.{layer}" for layer in layers]
    return (*paths, *(path for path in built if path.startswith("head.")))


@lru_cache(maxsize=128)
def built_paths(spec: NetSpec) -> tuple[str, ...]:
    modules = meta_network(spec).named_modules()
    return tuple(name for name, module in modules if module._parameters)


def meta_network(spec: NetSpec) -> Network:
    """The network on the meta device, without initialisation, which is slow even there."""
    with torch.device("meta"):
        return Network(replace(spec, init=no_init))


def no_init(_net: nn.Module) -> None:
    pass


def fullstride(spec: NetSpec) -> Pairs:
    """Fullstride's own names, for converted weights."""
    return ((path, path) for path in layer_paths(spec))


RESNET = Names(
    stem={"stem.conv": ("conv1", "bn1")},
    block="layer{stage}.{number}",
    conv=("conv{from_1}", "bn{from_1}"),
    project=("downsample.{average}", "downsample.{after_average}"),
    classifier="fc",
)
DEEP_STEM = {
    "stem.conv1": ("conv1.0", "conv1.1"),
    "stem.conv2": ("conv1.3", "conv1.4"),
    "stem.conv3": ("conv1.6", "bn1"),
}
# timm's TResNet, GENet (`gernet`), ResNet-RS and ResNet; torchvision's ResNet too.
TIMM: dict[type[blocks.Stem], Names] = {
    blocks.SpaceToDepthStem: Names(
        stem={"stem.conv": ("body.conv1.conv", "body.conv1.bn")},
        block="body.layer{stage}.{number}",
        conv=("{conv}.conv", "{conv}.bn"),
        project=("downsample.{pooled}.conv", "downsample.{pooled}.bn"),
        classifier="head.fc",
    ),
    blocks.ConvStem: Names(
        stem={"stem.conv": ("stem.conv", "stem.bn")},
        block="{ours}",
        conv=("{conv}_{kind}.conv", "{conv}_{kind}.bn"),
        project=("shortcut.conv", "shortcut.bn"),
        classifier="head.fc",
        head=("final_conv.conv", "final_conv.bn"),
        se=False,
    ),
    blocks.PoolStem: RESNET,
    blocks.DeepStem: RESNET._replace(stem=DEEP_STEM),
    blocks.DeepConvStem: RESNET._replace(
        stem={**DEEP_STEM, "stem.pool": ("maxpool.0", "maxpool.1")}
    ),
}
# The authors' own `.pth` files.
OFFICIAL: dict[type[blocks.Stem], Names] = {
    # Alibaba-MIIL/TResNet, ASL, ImageNet21K. A convolution before a blur is one level deeper.
    blocks.SpaceToDepthStem: TIMM[blocks.SpaceToDepthStem]._replace(
        stem={"stem.conv": ("body.conv1.0", "body.conv1.1")},
        conv=("{conv}{blurred}.0", "{conv}{blurred}.1"),
        project=("downsample.{pooled}.0", "downsample.{pooled}.1"),
    ),
    # idstcv/GPU-Efficient-Networks: one list of modules, in which activations are counted.
    blocks.ConvStem: Names(
        stem={"stem.conv": ("module_list.0.netblock", "module_list.1.netblock")},
        block="module_list.{listed}",
        conv=("conv_list.{number}.{first}", "conv_list.{number}.{second}"),
        project=("shortcut_list.{number}.0", "shortcut_list.{number}.1"),
        classifier="fc_linear",
        head=("module_list.{last_listed}.netblock", "module_list.{after_last}.netblock"),
        se=False,
    ),
}


def by_stem(names: Mapping[type[blocks.Stem], Names], spec: NetSpec) -> Pairs:
    has_names = spec.stem in names and not spec.frames
    return renamed(names[spec.stem], spec) if has_names else iter(())


timm, official = partial(by_stem, TIMM), partial(by_stem, OFFICIAL)


def tf_resnet_rs(spec: NetSpec) -> Pairs:
    """ResNet-RS of tensorflow/tpu@7dc921f, which numbers layers in the order of creation.

    In a block the projection is created first.
    """
    if spec.stem is not blocks.DeepConvStem or spec.frames:
        return
    convs, norms = numbered("conv2d"), numbered("batch_normalization")
    for conv in ("conv1", "conv2", "conv3", "pool"):
        yield from conv_norm(f"stem.{conv}", next(convs), next(norms))
    for location in block_locations(spec):
        if location.projected:
            yield from conv_norm(f"{location.path}.shortcut.project", next(convs), next(norms))
        for conv in location.convs:
            yield from conv_norm(f"{location.path}.branch.{conv}", next(convs), next(norms))
        if location.se:
            yield f"{location.path}.branch.se.reduce", next(convs)
            yield f"{location.path}.branch.se.expand", next(convs)
    yield "head.fc", "dense"


def numbered(name: str) -> Iterator[str]:
    """name, name_1, name_2, ..."""
    yield name
    for number in count(1):
        yield f"{name}_{number}"
