"""Maps fullstride's parameters to their names in each format of released weights.

Each is a function of a spec that yields (fullstride's path, the format's path) for every module
with parameters, the stem's convolution first. It yields less where the format lacks the network.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import torch
from torch import nn

from fullstride.nets import blocks
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec

Pairs = Iterator[tuple[str, str]]

# The convolutions of the blocks that other formats have, and the one with the stride (or blur).
CONVS = {blocks.Basic: ("conv1", "conv2"), blocks.Bottleneck: ("conv1", "conv2", "conv3")}
STRIDED = {blocks.Basic: "conv1", blocks.Bottleneck: "conv2"}


class BlockLocation(NamedTuple):
    """One block, as the key maps need it."""

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


def block_names(
    spec: NetSpec, block: str, conv: str, norm: str, down: tuple[str, str], *, se: bool = True
) -> Pairs:
    """The names of all blocks, or of none from the first gate on if the format has no `se`.

    Templates of names: of a block, below it of its convolutions and their norms, and of the
    convolution and the norm of its projection. {stage} counts from 1 and {number} from 0, {listed}
    from the authors' third module; {conv} is our name of a convolution, {from_1} its number, and
    {first} and {second} the places of it and of its norm in a list with activations. {pooled} is
    the place of a projection behind a pool, {blurred} the level that a blur adds.
    """
    for at in block_locations(spec):
        if at.se and not se:
            return
        values = {"ours": at.path, "stage": at.stage + 1, "number": at.number}
        values |= {"listed": at.stage + 3, "pooled": 1 if at.strided else 0}
        theirs = block.format(**values)
        for place, ours in enumerate(at.convs):
            each = values | {"conv": ours, "first": 3 * place}
            each |= {"from_1": place + 1, "second": 3 * place + 1}
            each["kind"] = "kxk" if len(at.convs) == 2 or place == 1 else "1x1"
            each["blurred"] = ".0" if ours == at.strided else ""
            names = (f"{theirs}.{name.format(**each)}" for name in (conv, norm))
            yield from conv_norm(f"{at.path}.branch.{ours}", *names)
        if at.se:
            yield f"{at.path}.branch.se.reduce", f"{theirs}.se.fc1"
            yield f"{at.path}.branch.se.expand", f"{theirs}.se.fc2"
        if at.projected:
            names = (f"{theirs}.{name.format(**values)}" for name in down)
            yield from conv_norm(f"{at.path}.shortcut.project", *names)


def layer_paths(spec: NetSpec) -> tuple[str, ...]:
    """The path of every module with parameters, in the order of the forward pass."""
    # All blocks of a stage but the first and the last have the same layers.
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
    """The network without memory, and without its initialisation, which is slow even so."""
    with torch.device("meta"):
        return Network(replace(spec, init=no_init))


def no_init(_net: nn.Module) -> None:
    pass


def fullstride(spec: NetSpec) -> Pairs:
    """Fullstride's own names, for weights that have been converted already."""
    return ((path, path) for path in layer_paths(spec))


def timm(spec: NetSpec) -> Pairs:
    """timm's TResNet, GENet (`gernet`), ResNet-RS and ResNet; torchvision's ResNet too."""
    if spec.frames:
        return
    if spec.stem is blocks.SpaceToDepthStem:
        yield from timm_tresnet(spec)
    elif spec.stem is blocks.ConvStem:
        yield from timm_gernet(spec)
    elif spec.stem in (blocks.PoolStem, blocks.DeepStem, blocks.DeepConvStem):
        yield from timm_resnet(spec)


def timm_tresnet(spec: NetSpec) -> Pairs:
    yield from conv_norm("stem.conv", "body.conv1.conv", "body.conv1.bn")
    down = "downsample.{pooled}.conv", "downsample.{pooled}.bn"
    block = "body.layer{stage}.{number}"
    yield from block_names(spec, block, "{conv}.conv", "{conv}.bn", down)
    yield "head.fc", "head.fc"


def timm_gernet(spec: NetSpec) -> Pairs:
    yield from conv_norm("stem.conv", "stem.conv", "stem.bn")
    down = "shortcut.conv", "shortcut.bn"
    conv, norm = "{conv}_{kind}.conv", "{conv}_{kind}.bn"
    yield from block_names(spec, "{ours}", conv, norm, down, se=False)
    if spec.head_width:
        yield from conv_norm("head.conv", "final_conv.conv", "final_conv.bn")
    yield "head.fc", "head.fc"


def timm_resnet(spec: NetSpec) -> Pairs:
    if spec.stem is blocks.PoolStem:
        yield from conv_norm("stem.conv", "conv1", "bn1")
    else:
        yield from conv_norm("stem.conv1", "conv1.0", "conv1.1")
        yield from conv_norm("stem.conv2", "conv1.3", "conv1.4")
        yield from conv_norm("stem.conv3", "conv1.6", "bn1")
    if spec.stem is blocks.DeepConvStem:
        yield from conv_norm("stem.pool", "maxpool.0", "maxpool.1")
    first = 1 if spec.style.average_shortcut else 0
    down = f"downsample.{first}", f"downsample.{first + 1}"
    yield from block_names(spec, "layer{stage}.{number}", "conv{from_1}", "bn{from_1}", down)
    yield "head.fc", "fc"


def official(spec: NetSpec) -> Pairs:
    """The authors' own `.pth` files."""
    if spec.frames:
        return
    if spec.stem is blocks.SpaceToDepthStem:
        yield from official_tresnet(spec)
    elif spec.stem is blocks.ConvStem:
        yield from official_genet(spec)


def official_tresnet(spec: NetSpec) -> Pairs:
    """Alibaba-MIIL/TResNet, ASL, ImageNet21K. A convolution before a blur is one level deeper."""
    yield from conv_norm("stem.conv", "body.conv1.0", "body.conv1.1")
    down = "downsample.{pooled}.0", "downsample.{pooled}.1"
    conv, norm = "{conv}{blurred}.0", "{conv}{blurred}.1"
    yield from block_names(spec, "body.layer{stage}.{number}", conv, norm, down)
    yield "head.fc", "head.fc"


def official_genet(spec: NetSpec) -> Pairs:
    """idstcv/GPU-Efficient-Networks: one list of modules, in which activations are counted."""
    yield from conv_norm("stem.conv", "module_list.0.netblock", "module_list.1.netblock")
    down = "shortcut_list.{number}.0", "shortcut_list.{number}.1"
    conv, norm = "conv_list.{number}.{first}", "conv_list.{number}.{second}"
    yield from block_names(spec, "module_list.{listed}", conv, norm, down, se=False)
    if spec.head_width:
        after = len(spec.stages) + 3
        names = f"module_list.{after}.netblock", f"module_list.{after + 1}.netblock"
        yield from conv_norm("head.conv", *names)
    yield "head.fc", "fc_linear"


def tf_resnet_rs(spec: NetSpec) -> Pairs:
    """ResNet-RS of tensorflow/tpu@7dc921f, which numbers layers in the order of their creation.

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
