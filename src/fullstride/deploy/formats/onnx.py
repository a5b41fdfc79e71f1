"""Writes and opens .onnx files for ONNX Runtime, in float or int8."""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from fullstride.deploy.exported import ExportedModel, Metadata, check_graph_sizes
from fullstride.deploy.formats import base
from fullstride.deploy.job import ExportJob
from fullstride.io.console import count_of
from fullstride.targets import sessions

OPSET = 20
INPUT = "images"
MAX_TENSOR = 2**28  # elements, as in 64 channels of an image of 2048 pixels a side
# Limit of the constants that a graph may compute: elements per byte of its file, for int8 weights
# as floats, plus a number of elements.
CONSTANTS_OF_BYTE, CONSTANT_NUMBERS = 4, 2**20
MAX_SHAPE_BYTES = 4096  # a larger constant tensor holds weights, not sizes of other tensors
LOOPS = {"If", "Loop", "Scan"}


def write(job: ExportJob, path: Path) -> None:
    save(graph(job), job.metadata, path)


def graph(job: ExportJob) -> Any:
    """`convert`, in int8 if the precision is, except for `job.metadata.float_layers`.

    `job.graphs` caches the int8 model too, which files of ONNX Runtime and OpenVINO share.
    """
    model = convert(job)
    if job.metadata.precision != "int8":
        return model
    key = torch.int8, job.any_size, *job.metadata.float_layers
    if key not in job.graphs:
        job.graphs[key] = quantize(model, job)
    return job.graphs[key]


def convert(job: ExportJob) -> Any:
    """An `onnx.ModelProto` for any batch size, with nodes named after the network's layers.

    In fp16, inputs and outputs are float32, and the network computes in float16. `job.graphs`
    caches the model, so its nodes must not be modified.
    """
    dtype = torch.float16 if job.metadata.precision == "fp16" else torch.float32
    if (dtype, job.any_size) not in job.graphs:
        job.graphs[dtype, job.any_size] = trace(job, dtype)
    return job.graphs[dtype, job.any_size]


def trace(job: ExportJob, dtype: torch.dtype) -> Any:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401  torch.onnx needs it
    except ImportError as error:
        raise base.missing_package(str(error.name), extra="") from None
    with base.quiet("torch.onnx"):  # warnings about its internals; the comparison judges the file
        program = torch.onnx.export(
            # with channels last, pooling is traced as a gather that contains the batch size
            job.program(dtype, job.traced_batch, channels_first=True),
            dynamo=True,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=[job.output_name],
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    name_layers(model)
    if job.traced_batch is not None:
        with_any_batch(model, job.traced_batch)
    return model


def with_any_batch(model: Any, batch: int) -> None:
    """Let an `onnx.ModelProto` that was traced with `batch` images take any number of images.

    Most graphs contain that number only in reshapes. Other graphs fail when they are opened or run
    with another number, or return another shape: trace these with a dynamic batch.
    """
    from onnx import numpy_helper

    del model.graph.value_info[:]  # the shapes of activations
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    without_copies(model)
    shapes = {node.input[1] for node in model.graph.node if node.op_type == "Reshape"}
    for constant in model.graph.initializer:
        if constant.name in shapes:
            shape = numpy_helper.to_array(constant).copy()
            if shape[0] == batch and -1 not in shape:
                shape[0] = -1
                constant.CopyFrom(numpy_helper.from_array(shape, constant.name))


def without_copies(model: Any) -> None:
    """Turn gathers of all elements in their order, which depend on the batch size, into reshapes.

    The average pool of a tensor with channels last, as behind layer norms, is traced as such.
    """
    from onnx import numpy_helper

    constants, makers = {each.name: each for each in model.graph.initializer}, producers(model)
    for node in [node for node in model.graph.node if node.op_type == "Gather"]:
        flat, indices = makers.get(node.input[0]), constants.get(node.input[1])
        if flat is None or indices is None or len(indices.dims) < 2 or flat.op_type != "Reshape":
            continue
        size = constants.get(flat.input[1])
        shape = np.array(indices.dims, np.int64)
        in_order = np.arange(shape.prod()).reshape(shape)
        if size is None or numpy_helper.to_array(size).tolist() != [-1]:
            continue
        if np.array_equal(numpy_helper.to_array(indices), in_order):
            name = f"{node.output[0]}.shape"
            model.graph.initializer.append(numpy_helper.from_array(shape, name))
            node.op_type, node.input[1] = "Reshape", name
            del node.attribute[:]


def at_resolution(model: Any, resolution: int, sides: tuple[int, ...]) -> Any:
    """Copy an `onnx.ModelProto` for another resolution, in the dimensions `sides` of an image.

    Most graphs do not depend on the resolution. Copies of other graphs fail when they are opened or
    run, or return another shape: trace these again.
    """
    copied = deepcopy(model)
    del copied.graph.value_info[:]  # the shapes of activations
    shape = copied.graph.input[0].type.tensor_type.shape
    for side in sides:
        shape.dim[side + 1].dim_value = resolution
    return copied


def name_layers(model: Any) -> None:
    """Name each node after its layer, "net.head.fc"; later calls get "/2", "/3", ..."""
    calls = Counter[str]()
    for node in model.graph.node:
        weights = (name for name in node.input[1:2] if name.endswith(".weight"))
        path = next(weights, "").removesuffix(".weight")
        if path.startswith("net."):
            calls[path] += 1
            node.name = path if calls[path] == 1 else f"{path}/{calls[path]}"


def save(model: Any, metadata: Metadata, path: Path) -> None:
    import onnx

    onnx.helper.set_model_props(model, metadata.to_strings())
    onnx.save(model, path)


def open_file(path: Path, threads: int) -> ExportedModel:
    if reason := missing():
        raise ValueError(reason)
    import onnxruntime

    check_graph(path)
    onnxruntime.set_default_logger_severity(4)  # fatal: errors are raised, not also printed
    with base.reading(path):
        session = sessions.onnx_session(str(path), threads)
        strings = session.get_modelmeta().custom_metadata_map
        infer = sessions.onnx_outputs(session)
    metadata = Metadata.from_strings(strings, path)
    (source,), (result,) = session.get_inputs(), session.get_outputs()
    check_graph_sizes(path, metadata, source.shape, result.shape)
    device = "the GPU" if "CUDA" in session.get_providers()[0] else count_of(threads, "thread")
    return ExportedModel(path, metadata, infer, f"ONNX Runtime {onnxruntime.__version__}, {device}")


def check_graph(path: Path) -> None:
    """Raise ValueError, in one line, for a small file that the runtime would expand to much.

    Exported files have no loops. Constants are computed when a file is opened: in exported files
    these are weights, at most one element per byte of the file.
    """
    import onnx

    with base.reading(path):
        model = onnx.load(path, load_external_data=False)
        loops = LOOPS & {node.op_type for node in model.graph.node}
        if loops or model.functions:
            what = min(loops, default="functions")
            raise ValueError(f"it has {what}, which no file of `fullstride export` has")
        limit = CONSTANT_NUMBERS + CONSTANTS_OF_BYTE * path.stat().st_size
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) > MAX_SHAPE_BYTES:  # weights, whose values are not shapes
                tensor.ClearField("raw_data")
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        check_sizes(graph, limit)


def check_sizes(graph: Any, most_constants: int) -> None:
    """Raise ValueError for a graph with a tensor that is too large, or with too many constants."""
    sizes = {
        value.name: [side.dim_value for side in value.type.tensor_type.shape.dim]
        for value in (*graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }
    for sides in sizes.values():
        if (elements := math.prod(side or 1 for side in sides)) > MAX_TENSOR:
            raise ValueError(f"it makes a tensor of {elements:,} numbers, above {MAX_TENSOR:,}")
    constants, computed = {tensor.name for tensor in graph.initializer}, 0
    for node in graph.node:
        if constants.issuperset(filter(None, node.input)):
            constants.update(node.output)
            for name in filter(None, node.output):
                sides = sizes.get(name, [0])
                if 0 in sides:
                    raise ValueError(f"it makes a tensor of unknown size by {node.op_type}")
                computed += math.prod(sides)
    if computed > most_constants:
        raise ValueError(f"it makes {computed:,} numbers of none, above {most_constants:,}")


def detect(path: Path) -> bool:
    return path.is_file() and path.suffix == ".onnx"


# ---- int8, by pairs of quantize and dequantize nodes

# Calibration images per batch: for TResNet-M twice as fast as 32, with 0.7 instead of 3 GB.
BATCH = 2
PIXEL_AXES = ([2, 3], [2, 3, 4])  # of images and of clips
LAYERS = {"Conv", "Gemm", "MatMul"}  # with weights, if an input is constant
CHOICE = "TopK"  # of boxes, in a head with proposals between layers
NO_KERNEL = {"InstanceNormalization"}  # in int8, from group norms: rounding would save no time


def quantize(model: Any, job: ExportJob, *, symmetric: bool = False) -> Any:
    """Copy the `onnx.ModelProto` in int8, except the layers `job.metadata.float_layers`.

    Weights are int8 with a scale per output channel, or one scale without `job.per_channel`.
    Activations are uint8, which x86 processors multiply with int8 several times as fast as int8
    with int8. Their range is the smallest to the largest value in calibration: histograms, which
    would clip outliers, need the activations of all images in memory. `symmetric` is for TensorRT,
    which has no zero points: activations are int8 around zero, only at the inputs of layers, and
    biases are float.
    """
    try:
        import onnx
        from onnxruntime.quantization import (
            CalibrationMethod,
            QuantFormat,
            QuantType,
            quantize_static,
        )
    except ImportError as error:
        raise base.missing_package(str(error.name), extra="") from None
    in_float = layer_nodes(model, job.metadata.float_layers)
    has_layer_norms = any(node.op_type == "LayerNormalization" for node in model.graph.node)
    # Alone, or with all that have an int8 kernel, unless float layer norms stand between those:
    # OpenVINO then takes 10.4 ms for ConvNeXt-Atto, and 7.5 with int8 in layers alone.
    types = sorted(LAYERS) if symmetric or has_layer_norms else None
    # logits stay in float: 256 levels would tie
    options: dict[str, Any] = {"OpTypesToExcludeOutputQuantization": types or ["Gemm", "MatMul"]}
    if symmetric:
        options |= {"ActivationSymmetric": True, "QuantizeBias": False}
    reader: Any = Reader(model.graph.input[0].name, job.calibration)
    with TemporaryDirectory() as scratch, base.quiet(""):  # it logs to the root logger
        before, after = Path(scratch, "float.onnx"), Path(scratch, "int8.onnx")
        onnx.save(means_to_pools(model), before)
        quantize_static(
            before,
            after,
            reader,
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=types,
            per_channel=job.per_channel,
            activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            nodes_to_exclude=[*in_float, *outside_network(model)],
            extra_options=options,
        )
        result = onnx.load(after)
    restore_float_inputs(result, model, in_float)
    return result


class Reader:
    """Calibration data in the interface of ONNX Runtime, `BATCH` images at a time."""

    def __init__(self, name: str, batches: Iterable[np.ndarray]):
        self.rest = (
            {name: batch[i : i + BATCH]} for batch in batches for i in range(0, len(batch), BATCH)
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.rest, None)


def means_to_pools(model: Any) -> Any:
    """Copy the model with global average pools, which have an int8 kernel, for means over pixels.

    At batch 1 on one thread of a Zen 5, ResNet-RS-50 with squeeze-excite is 1.6 times as fast, and
    3D ResNet-RS-50 1.3 times.
    """
    from onnx import numpy_helper

    copied = deepcopy(model)
    small = [each for each in model.graph.initializer if list(each.dims) in ([2], [3])]
    axes = {each.name for each in small if numpy_helper.to_array(each).tolist() in PIXEL_AXES}
    for node in copied.graph.node:
        flat = any(each.name == "keepdims" and not each.i for each in node.attribute)
        if node.op_type == "ReduceMean" and axes.intersection(node.input[1:]) and not flat:
            node.op_type = "GlobalAveragePool"
            del node.input[1:], node.attribute[:]
    return copied


def layer_nodes(model: Any, paths: Collection[str]) -> list[str]:
    """The nodes that compute the layers `paths`. Raises ValueError for a path without any."""
    path_of = {node.name: node.name.split("/")[0].removeprefix("net.") for node in model.graph.node}
    if unknown := sorted({*paths}.difference(path_of.values())):
        raise ValueError(
            f"{unknown[0]} cannot stay in float, the graph has no such layer: name a layer with "
            "weights"
        )
    return [name for name, path in path_of.items() if path in paths]


def outside_network(model: Any) -> list[str]:
    """Nodes of the preprocessing, after the last layer, or without an int8 kernel.

    Between layers, these are the nodes from a choice of boxes to the next layer. Nodes after the
    last layer, such as a softmax or the choice of boxes, would lose much in int8, since boxes are
    large numbers beside small scores, and save no time.
    """
    nodes, names = [*model.graph.node], set[str]()
    constants = {each.name for each in model.graph.initializer}
    layers = {
        node.name
        for node in nodes
        if node.op_type in LAYERS and not constants.isdisjoint(node.input)
    }
    inside = {name for name in constants if name.startswith("net.")}
    chosen = set[str]()  # tensors that depend on a choice, up to the next layer
    for node in nodes:
        is_choice = node.op_type == CHOICE or not chosen.isdisjoint(node.input)
        if is_choice and node.name not in layers:
            chosen.update(node.output)
        if inside.intersection(node.input):
            inside.update(node.output)
            if chosen.isdisjoint(node.output):
                names.add(node.name)
    before = set[str]()  # tensors that layers depend on
    for node in reversed(nodes):
        if node.name in layers or not before.isdisjoint(node.output):
            before.update(node.input)
        else:
            names.discard(node.name)
    return [node.name for node in nodes if node.name not in names or node.op_type in NO_KERNEL]


def restore_float_inputs(model: Any, original: Any, in_float: Collection[str]) -> None:
    """Let the nodes `in_float` read their inputs before the rounding for other nodes.

    Rounding to unsigned integers clips at zero, so ReLUs were removed; they are restored.
    """
    from onnx import helper

    nodes, original_nodes = producers(model), producers(original)
    for node in [node for node in model.graph.node if node.name in in_float]:
        dequantize = nodes.get(node.input[0])
        if dequantize is None or dequantize.op_type != "DequantizeLinear":
            continue
        name = nodes[dequantize.input[0]].input[0]
        was_relu = name in original_nodes and original_nodes[name].op_type == "Relu"
        if was_relu and nodes[name].op_type != "Relu":
            model.graph.node.insert(
                list(model.graph.node).index(node),
                helper.make_node("Relu", [name], [f"{node.name}/input"]),
            )
            name = f"{node.name}/input"
        node.input[0] = name


def producers(model: Any) -> dict[str, Any]:
    """The node that computes each tensor, by the name of the tensor."""
    return {name: node for node in model.graph.node for name in node.output}


missing = partial(base.import_error, "onnxruntime", "")
ONNX = base.Format("onnx", ".onnx", ("fp32", "fp16", "int8"), write, open_file, detect, missing)
