"""Writes and opens packages of Core ML, in fp32 or fp16.

Core ML only runs on macOS and iOS, and was not run. Elsewhere coremltools reads a package again,
and PyTorch computes its operations with its weights, for the comparison and for `predict`.
"""

# pyright: reportMissingImports=false

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.deploy.exported import ExportedModel, Infer, Metadata
from fullstride.deploy.formats import base, mobile
from fullstride.deploy.job import ExportJob
from fullstride.io.console import without_native_lines
from fullstride.targets.sessions import one_by_one
from fullstride.tasks import task_of

DATA = "Data/com.apple.CoreML"
MANIFEST, GRAPH, WEIGHTS = "Manifest.json", f"{DATA}/model.mlmodel", f"{DATA}/weights/weight.bin"
FILES = (MANIFEST, GRAPH, WEIGHTS)
SOURCE = "images"  # the name of the input


def write(job: ExportJob, folder: Path) -> None:
    with (
        TemporaryDirectory(dir=folder.parent) as scratch,
        base.quiet(""),
        base.quiet("torch"),
        without_native_lines(),
    ):
        model = convert(job, f"{scratch}/converted.mlpackage")
        model.user_defined_metadata.update(job.metadata.to_strings())
        model.license, model.author = job.metadata.licence, job.metadata.source
        model.short_description = f"{job.metadata.name} by fullstride"
        model.save(f"{scratch}/model.mlpackage")
        for name in FILES:  # and not its table for debuggers
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            Path(scratch, "model.mlpackage", name).rename(folder / name)
    operations = Counter(each.op_type for each in read(folder)[1])
    counts = ", ".join(f"{count} {kind}" for kind, count in operations.most_common())
    job.progress(f"not run, as Core ML needs macOS. Its operations: {counts}")


def convert(job: ExportJob, path: str) -> Any:
    """Convert to Core ML: pixels become an image input, one class per image a classifier."""
    import coremltools as ct

    job = mobile.of_one_image(job)
    module, x = job.module(), torch.from_numpy(job.example)
    # By default arrays would be float16 in fp16.
    options: dict[str, Any] = {"outputs": [ct.TensorType(dtype=np.float32)]}
    if job.normalised:
        options["inputs"] = [ct.TensorType(SOURCE, x.shape, dtype=np.float32)]
    elif job.metadata.preprocessing.frames:
        raise ValueError("Core ML takes no clips of pixels: leave --with-preprocessing out")
    else:
        module, x = mobile.Planes(module), mobile.planes(x)
        layout = ct.colorlayout.RGB if x.shape[1] == 3 else ct.colorlayout.GRAYSCALE
        options["inputs"] = [ct.ImageType(SOURCE, x.shape, color_layout=layout)]
        if task_of(job.metadata).single_label:
            options["classifier_config"] = ct.ClassifierConfig([*job.metadata.classes])
    x = x.clone(memory_format=torch.contiguous_format)  # its strides, of one channel too
    half = job.metadata.precision == "fp16"
    with torch.no_grad():
        program = torch.export.export(module, (x,)).run_decompositions(mobile.DECOMPOSITIONS)
    try:
        return ct.convert(
            program,
            minimum_deployment_target=ct.target.iOS16,
            compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
            skip_model_load=True,
            package_dir=path,
            **options,
        )
    except Exception as error:  # of many types; without its frames, which hold a temporary folder
        why = base.last_line(error)
    raise ValueError(f"coremltools cannot convert {job.metadata.name}: {why}")


def read(folder: Path) -> tuple[dict[str, str], list[Any]]:
    """The metadata of a package, and its operations in their order, without its constants."""
    with base.quiet(""), base.quiet("torch"), without_native_lines():
        from coremltools.converters.mil.frontend.milproto.load import load
        from coremltools.models.utils import load_spec

        model: Any = load_spec(str(folder))
        weights = str((folder / WEIGHTS).parent)
        program = load(model, model.specificationVersion, weights)
    (function,) = program.functions.values()
    operations = [each for each in function.operations if each.op_type != "const"]
    return dict(model.description.metadata.userDefined), operations


def open_file(folder: Path, threads: int) -> ExportedModel:
    if reason := missing():
        raise ValueError(reason)
    with base.reading(folder):
        strings, operations = read(folder)
        infer = outputs(operations)
    metadata = Metadata.from_strings(strings, folder)

    def checked(images: np.ndarray) -> np.ndarray:
        if images.shape[1:] != metadata.input_shape():
            raise ValueError("another size")
        if metadata.input_kind == "pixels":  # as Core ML makes planes of an image
            images = mobile.planes(torch.from_numpy(images)).numpy()
        return infer(images)

    runtime = f"PyTorch {torch.__version__} with the operations of Core ML, which needs macOS"
    return base.with_checked_sizes(ExportedModel(folder, metadata, one_by_one(checked), runtime))


class Computed(str):
    """The name of an operation's output."""


def outputs(operations: Sequence[Any]) -> Infer:
    """Computes operations in order; the last one's output is the result."""
    if unknown := {each.op_type for each in operations} - {*OPERATIONS}:
        raise ValueError(f"fullstride cannot compare its operations {', '.join(sorted(unknown))}")
    steps = [
        (each.outputs[0].name, OPERATIONS[each.op_type], arguments(each)) for each in operations
    ]

    def infer(images: np.ndarray) -> np.ndarray:
        values: dict[str, Any] = {SOURCE: torch.from_numpy(images)}

        def value(each: Any) -> Any:
            if isinstance(each, list):
                return [*map(value, each)]
            return values[each] if isinstance(each, Computed) else each

        for name, compute, inputs in steps:
            values[name] = compute(**{key: value(each) for key, each in inputs.items()})
        return values[steps[-1][0]].float().numpy()

    return infer


def arguments(operation: Any) -> dict[str, Any]:
    """By their names: weights as tensors, other constants of Python, and names of other values."""

    def argument(each: Any) -> Any:
        if isinstance(each, list | tuple):
            return [*map(argument, each)]
        value = getattr(each, "val", each)
        if value is None and each is not None:
            return Computed(each.name)
        if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind == "f":
            return torch.tensor(value)
        return value.tolist() if isinstance(value, np.ndarray | np.generic) else value

    inputs = {**dict(operation.default_inputs().items()), **operation.inputs}
    return {name: argument(each) for name, each in inputs.items()}


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    function = F.conv2d if x.ndim == 4 else F.conv3d
    strides, dilations, groups = (options[key] for key in ("strides", "dilations", "groups"))
    padding = same_on_both_sides(options["pad_type"], options["pad"])
    return function(x, weight, bias, strides, padding, dilations, groups)


def pool(kind: str, x: Tensor, **options: Any) -> Tensor:
    padding = same_on_both_sides(options["pad_type"], options["pad"])
    own = {"padding": padding, "ceil_mode": options["ceil_mode"]}
    if kind == "avg":
        own["count_include_pad"] = not options["exclude_padding_from_average"]
    function = getattr(F, f"{kind}_pool{x.ndim - 2}d")
    return function(x, options["kernel_sizes"], options["strides"], **own)


def same_on_both_sides(kind: str, pad: list[int]) -> list[int]:
    """The padding of each dimension; `pad` has what is before and after it in turn."""
    if kind not in ("custom", "valid") or pad[::2] != pad[1::2]:
        raise ValueError(f"padding {kind} {pad} of other sizes at its ends")
    return pad[::2]


def pad(x: Tensor, pad: list[int], mode: str, constant_val: float) -> Tensor:
    sides = [*zip(pad[::2], pad[1::2], strict=True)]
    value = constant_val if mode == "constant" else None
    last_first = [each for side in reversed(sides) if any(side) for each in side]
    return F.pad(x, last_first, mode, value)


def slice_by_index(x: Tensor, begin: list[int], end: list[int], **options: Any) -> Tensor:
    if any(options["squeeze_mask"] or ()):
        raise ValueError("a slice that removes dimensions")
    names, none = ("stride", "begin_mask", "end_mask"), [None] * len(begin)
    parts = zip(begin, end, *(options[name] or none for name in names), strict=True)
    return x[tuple(slice(None if a else i, None if b else j, n) for i, j, n, a, b in parts)]


def upsample(
    x: Tensor, scale_factor_height: float, scale_factor_width: float, **how: Any
) -> Tensor:
    factors, bilinear = [scale_factor_height, scale_factor_width], "align_corners" in how
    if bilinear and how["align_corners"] == how.get("half_pixel_centers"):
        raise ValueError("bilinear upsampling of other places")
    own = {"mode": "bilinear", "align_corners": how["align_corners"]} if bilinear else {}
    return F.interpolate(x, scale_factor=factors, **own)


def gelu(x: Tensor, mode: str) -> Tensor:
    return F.gelu(x, approximate={"EXACT": "none", "TANH_APPROXIMATION": "tanh"}[mode])


# As coremltools' reference of MIL defines them; arguments have the names that they have there.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "avg_pool": partial(pool, "avg"),
    "batch_norm": lambda x, mean, variance, gamma, beta, epsilon: F.batch_norm(
        x, mean, variance, gamma, beta, eps=epsilon
    ),
    "cast": lambda x, dtype: x.to({"fp16": torch.float16, "fp32": torch.float32}[dtype]),
    "classify": lambda probabilities, classes: probabilities,
    "clip": lambda x, alpha, beta: x.clamp(alpha, beta),
    "concat": lambda values, axis, interleave: torch.cat(values, axis),
    "conv": conv,
    "exp": lambda x: x.exp(),
    "gelu": gelu,
    "layer_norm": lambda x, axes, gamma, beta, epsilon: F.layer_norm(
        x, gamma.shape, gamma, beta, epsilon
    ),
    "leaky_relu": lambda x, alpha: F.leaky_relu(x, alpha),
    "linear": lambda x, weight, bias: F.linear(x, weight, bias),
    "max_pool": partial(pool, "max"),
    "mul": lambda x, y: x * y,
    "pad": pad,
    "reduce_mean": lambda x, axes, keep_dims: x.mean(axes, keep_dims),
    "relu": lambda x: x.relu(),
    "reshape": lambda x, shape: x.reshape(shape),
    "sigmoid": lambda x: x.sigmoid(),
    "sigmoid_hard": lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1),
    "silu": lambda x: F.silu(x),
    "slice_by_index": slice_by_index,
    "softmax": lambda x, axis: x.softmax(axis),
    "sub": lambda x, y: x - y,
    "thresholded_relu": lambda x, alpha: x * (x >= alpha),
    "transpose": lambda x, perm: x.permute(perm),
    "upsample_bilinear": upsample,
    "upsample_nearest_neighbor": upsample,
}
missing = partial(base.absent, "coremltools", "coremltools", "coreml")


def detect(path: Path) -> bool:
    return (path / MANIFEST).is_file() and (path / GRAPH).is_file()


COREML = base.Format(
    "coreml",
    ".mlpackage",
    ("fp32", "fp16"),
    write,
    open_file,
    detect,
    missing,
    FILES,
    one_size=True,
    runs_on="macOS",
)
