"""Names of networks as papers print them, of tasks, of export formats and of hub bundles."""

from collections.abc import Iterable

# Name in the papers -> name in the zoo, or timm/NAME.
PRINTED = {
    **{f"ResNet-{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
    "ResNet-50-D": "resnet50d",
    "ResNeXt-50": "timm/resnext50_32x4d",
    "SE-ResNeXt-50": "timm/seresnext50_32x4d",
    "MixNet-L": "timm/mixnet_l",
    **{f"EfficientNet-B{size}": f"timm/efficientnet_b{size}" for size in range(8)},
    **{f"RegNetY-{size}00MF": f"timm/regnety_00{size}" for size in (2, 4, 6, 8)},
    **{
        f"MobileNetV2-{width:g}": f"timm/mobilenetv2_{width * 100:03.0f}"
        for width in (0.5, 0.75, 1.4)
    },
    "MobileNetV2-1.0": "timm/mobilenetv2_100",
    "MnasNet-1.0": "timm/mnasnet_100",
    **{f"TResNet-{size}": f"tresnet_{size.lower()}" for size in ("M", "L", "XL")},
    **{f"GENet-{size}": f"genet_{size}" for size in ("light", "normal", "large")},
    **{f"ResNet-RS-{depth}": f"resnet_rs_{depth}" for depth in (50, 101, 152, 200, 270, 350, 420)},
}

# Task -> its module and class in `fullstride.tasks`; here, because `--help` lists the names.
TASKS = {
    "classify": "classify:Classify",
    "detect": "detect.task:Detect",
    "multilabel": "multilabel:MultiLabel",
    "retrieval": "retrieval:Retrieval",
    "segment": "segment:Segment",
    "depth": "depth:Depth",
    "video": "video:Video",
}
# The formats of `fullstride.deploy.formats`.
FORMATS = ("onnx", "openvino", "aoti", "pt2", "tensorrt", "triton-server", "executorch", "ncnn")
FORMATS += ("litert", "coreml")

REPOSITORY = "hf:"  # before USER/NAME of a bundle on the Hugging Face hub


def is_repository(name: str) -> bool:
    """Whether a name means a bundle on the hub, not a network or a path."""
    return name.startswith(REPOSITORY)


def check_name(kind: str, name: str, names: Iterable[str]) -> None:
    """Raise ValueError, in one line, if the `name` of a task or a format is not in `names`."""
    if name not in names:
        raise ValueError(f"no {kind} named {name!r}: choose from {', '.join(names)}")
