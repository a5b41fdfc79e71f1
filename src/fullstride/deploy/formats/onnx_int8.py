"""Quantizes an ONNX graph to int8 by pairs of quantize and dequantize nodes."""

from collections.abc import Collection, Iterable
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fullstride.deploy.formats.base import Node, before_layers, missing_package, quiet
from fullstride.deploy.job import ExportJob

# Calibration images per batch: for TResNet-M twice as fast as 32, with 0.7 instead of 3 GB.
BATCH = 2
PIXEL_AXES = ([2, 3], [2, 3, 4])  # of images and of clips
LAYERS = {"Conv", "Gemm", "MatMul"}  # with weights, if an input is constant
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
        raise missing_package(str(error.name), extra="") from None
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
    with TemporaryDirectory() as scratch, quiet(""):  # it logs to the root logger
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
    from onnx import ModelProto, numpy_helper

    copied = ModelProto()
    copied.CopyFrom(model)
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
    nodes: dict[str, list[str]] = {path: [] for path in paths}
    for node in model.graph.node:
        path = node.name.split("/")[0].removeprefix("net.")
        if path in nodes:
            nodes[path].append(node.name)
    for path, names in nodes.items():
        if not names:
            raise ValueError(
                f"{path} cannot stay in float, the graph has no such layer: "
                f"name a layer with weights"
            )
    return list(chain(*nodes.values()))


def outside_network(model: Any) -> list[str]:
    """Nodes of the preprocessing, after the last layer, or without an int8 kernel."""
    constants = {each.name for each in model.graph.initializer}
    inside = {name for name in constants if name.startswith("net.")}
    makers, nodes, names = producers(model), list[Node](), set[str]()
    for node in model.graph.node:
        is_layer = node.op_type in LAYERS and not constants.isdisjoint(node.input)
        sources = [makers[each].name for each in node.input if each in makers]
        nodes.append(Node(node.name, sources, is_layer))
        if inside.intersection(node.input):
            inside.update(node.output)
            names.add(node.name)
    names &= before_layers(nodes)
    return [
        node.name
        for node in model.graph.node
        if node.name not in names or node.op_type in NO_KERNEL
    ]


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
