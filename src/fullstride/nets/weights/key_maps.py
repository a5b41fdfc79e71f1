"""What are our parameters called elsewhere? One function of a spec for each format that weights were released in.

Each yields (our path, their path) for every module that holds parameters, the stem's convolution first.
A network that the format has no names for yields nothing.
"""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from fullstride.nets.blocks import (
    Basic,
    Bottleneck,
    ConvStem,
    DeepConvStem,
    DeepStem,
    PoolStem,
    SpaceToDepthStem,
)
from fullstride.nets.spec import NetSpec

Pairs = Iterator[tuple[str, str]]

CONVS = {Basic: ("conv1", "conv2"), Bottleneck: ("conv1", "conv2", "conv3")}
STRIDED = {
    Basic: "conv1",
    Bottleneck: "conv2",
}  # the convolution that halves the map, or that a blur follows


class Place(NamedTuple):
    """One block as the formats see it."""

    stage: int
    number: int  # of the block in its stage
    path: str  # among our parameters
    convs: tuple[str, ...]
    strided: str  # the convolution that has the stride; "" for none
    projected: bool  # the shortcut has parameters
    se: bool


def places(spec: NetSpec) -> Iterator[Place]:
    width = spec.stem_width
    for s, stage in enumerate(spec.stages):
        for b in range(stage.depth):
            strided = b == 0 and stage.stride > 1
            yield Place(
                stage=s,
                number=b,
                path=f"stages.{s}.{b}",
                convs=CONVS.get(stage.block, ()),
                strided=STRIDED.get(stage.block, "") if strided else "",
                projected=strided or width != stage.width,
                se=stage.se is not None,
            )
            width = stage.width


def conv_norm(ours: str, conv: str, norm: str) -> Pairs:
    yield f"{ours}.conv", conv
    yield f"{ours}.norm", norm


def squeeze_excite(block: str, theirs: str) -> Pairs:
    yield f"{block}.branch.se.reduce", f"{theirs}.fc1"
    yield f"{block}.branch.se.expand", f"{theirs}.fc2"


def ours(spec: NetSpec) -> Pairs:
    """Our own names, for weights that have been converted already."""
    if issubclass(spec.stem, DeepStem):
        stem = (
            ("conv1", "conv2", "conv3", "pool")
            if spec.stem is DeepConvStem
            else ("conv1", "conv2", "conv3")
        )
    else:
        stem = ("conv",)
    branches = [f"stem.{conv}" for conv in stem]
    gates = []
    for place in places(spec):
        branches += [f"{place.path}.branch.{conv}" for conv in place.convs]
        branches += [f"{place.path}.shortcut.project"] if place.projected else []
        gates += [f"{place.path}.branch.se.{part}" for part in ("reduce", "expand") if place.se]
    branches += ["head.conv"] if spec.head_width else []
    for path in branches:
        yield from conv_norm(path, f"{path}.conv", f"{path}.norm")
    for path in (*gates, "head.fc"):
        yield path, path


def timm(spec: NetSpec) -> Pairs:
    """timm's TResNet, GENet (there `gernet`), ResNet-RS and ResNet; torchvision's ResNet has the same names."""
    if spec.stem is SpaceToDepthStem:
        yield from timm_tresnet(spec)
    elif spec.stem is ConvStem:
        yield from timm_gernet(spec)
    elif spec.stem in (PoolStem, DeepStem, DeepConvStem):
        yield from timm_resnet(spec)


def timm_tresnet(spec: NetSpec) -> Pairs:
    yield from conv_norm("stem.conv", "body.conv1.conv", "body.conv1.bn")
    for place in places(spec):
        block = f"body.layer{place.stage + 1}.{place.number}"
        for conv in place.convs:
            yield from conv_norm(
                f"{place.path}.branch.{conv}", f"{block}.{conv}.conv", f"{block}.{conv}.bn"
            )
        if place.se:
            yield from squeeze_excite(place.path, f"{block}.se")
        if place.projected:
            down = f"{block}.downsample.{1 if place.strided else 0}"
            yield from conv_norm(f"{place.path}.shortcut.project", f"{down}.conv", f"{down}.bn")
    yield "head.fc", "head.fc"


def timm_gernet(spec: NetSpec) -> Pairs:
    yield from conv_norm("stem.conv", "stem.conv", "stem.bn")
    for place in places(spec):
        if place.se:
            return
        kinds = ("kxk", "kxk") if len(place.convs) == 2 else ("1x1", "kxk", "1x1")
        for conv, kind in zip(place.convs, kinds, strict=False):
            theirs = f"{place.path}.{conv}_{kind}"
            yield from conv_norm(f"{place.path}.branch.{conv}", f"{theirs}.conv", f"{theirs}.bn")
        if place.projected:
            theirs = f"{place.path}.shortcut"
            yield from conv_norm(f"{place.path}.shortcut.project", f"{theirs}.conv", f"{theirs}.bn")
    if spec.head_width:
        yield from conv_norm("head.conv", "final_conv.conv", "final_conv.bn")
    yield "head.fc", "head.fc"


def timm_resnet(spec: NetSpec) -> Pairs:
    if spec.stem is PoolStem:
        yield from conv_norm("stem.conv", "conv1", "bn1")
    else:
        yield from conv_norm("stem.conv1", "conv1.0", "conv1.1")
        yield from conv_norm("stem.conv2", "conv1.3", "conv1.4")
        yield from conv_norm("stem.conv3", "conv1.6", "bn1")
    if spec.stem is DeepConvStem:
        yield from conv_norm("stem.pool", "maxpool.0", "maxpool.1")
    first = 1 if spec.style.average_shortcut else 0
    for place in places(spec):
        block = f"layer{place.stage + 1}.{place.number}"
        for number, conv in enumerate(place.convs, 1):
            yield from conv_norm(
                f"{place.path}.branch.{conv}", f"{block}.conv{number}", f"{block}.bn{number}"
            )
        if place.se:
            yield from squeeze_excite(place.path, f"{block}.se")
        if place.projected:
            down = f"{block}.downsample"
            yield from conv_norm(
                f"{place.path}.shortcut.project", f"{down}.{first}", f"{down}.{first + 1}"
            )
    yield "head.fc", "fc"


def official(spec: NetSpec) -> Pairs:
    """The authors' own `.pth` files."""
    if spec.stem is SpaceToDepthStem:
        yield from official_tresnet(spec)
    elif spec.stem is ConvStem:
        yield from official_genet(spec)


def official_tresnet(spec: NetSpec) -> Pairs:
    """Alibaba-MIIL/TResNet, ASL, ImageNet21K. A convolution that a blur follows is one level deeper."""
    yield from conv_norm("stem.conv", "body.conv1.0", "body.conv1.1")
    for place in places(spec):
        block = f"body.layer{place.stage + 1}.{place.number}"
        for conv in place.convs:
            theirs = f"{block}.{conv}.0" if conv == place.strided else f"{block}.{conv}"
            yield from conv_norm(f"{place.path}.branch.{conv}", f"{theirs}.0", f"{theirs}.1")
        if place.se:
            yield from squeeze_excite(place.path, f"{block}.se")
        if place.projected:
            down = f"{block}.downsample.{1 if place.strided else 0}"
            yield from conv_norm(f"{place.path}.shortcut.project", f"{down}.0", f"{down}.1")
    yield "head.fc", "head.fc"


def official_genet(spec: NetSpec) -> Pairs:
    """idstcv/GPU-Efficient-Networks: one list of modules, in which activations take a number too."""
    yield from conv_norm("stem.conv", "module_list.0.netblock", "module_list.1.netblock")
    for place in places(spec):
        if place.se:
            return
        stage = f"module_list.{place.stage + 3}"
        for number, conv in enumerate(place.convs):
            theirs = f"{stage}.conv_list.{place.number}"
            yield from conv_norm(
                f"{place.path}.branch.{conv}",
                f"{theirs}.{3 * number}",
                f"{theirs}.{3 * number + 1}",
            )
        if place.projected:
            theirs = f"{stage}.shortcut_list.{place.number}"
            yield from conv_norm(f"{place.path}.shortcut.project", f"{theirs}.0", f"{theirs}.1")
    if spec.head_width:
        after = len(spec.stages) + 3
        yield from conv_norm(
            "head.conv", f"module_list.{after}.netblock", f"module_list.{after + 1}.netblock"
        )
    yield "head.fc", "fc_linear"


def tf_resnet_rs(spec: NetSpec) -> Pairs:
    """TensorFlow 1 code of ResNet-RS, tensorflow/tpu@7dc921f: layers are numbered in the order of their creation.

    In a block the projection is created first.
    """
    if spec.stem is not DeepConvStem:
        return
    convs, norms = numbered("conv2d"), numbered("batch_normalization")
    for conv in ("conv1", "conv2", "conv3", "pool"):
        yield from conv_norm(f"stem.{conv}", next(convs), next(norms))
    for place in places(spec):
        if place.projected:
            yield from conv_norm(f"{place.path}.shortcut.project", next(convs), next(norms))
        for conv in place.convs:
            yield from conv_norm(f"{place.path}.branch.{conv}", next(convs), next(norms))
        if place.se:
            yield f"{place.path}.branch.se.reduce", next(convs)
            yield f"{place.path}.branch.se.expand", next(convs)
    yield "head.fc", "dense"


def numbered(name: str) -> Iterator[str]:
    """name, name_1, name_2, ..."""
    yield name
    for number in count(1):
        yield f"{name}_{number}"
