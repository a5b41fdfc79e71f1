"""How does ONNX Runtime compute a network in int8? Weights and maps are rounded; pairs of nodes in the file say how."""

from collections.abc import Collection, Iterable
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fullstride.deploy.formats.base import needs, quiet
from fullstride.deploy.job import Job

BATCH = (
    2  # images of calibration at once: twice as fast as 32 for TResNet-M, with 0.7 GB in place of 3
)


def quantised(proto: Any, job: Job, *, symmetric: bool = False) -> Any:
    """The ONNX model `proto` of `onnx_model.model` in int8, but for `job.about.kept_float`; `proto` stays as it is.

    Weights are int8 with a scale for each output channel. What passes between layers is uint8, which an x86 processor
    multiplies with int8 several times as fast as int8 with int8. Its range is that of the calibration images, from the
    least to the largest value: histograms that cut outliers off need all maps of all images in memory. `symmetric` is
    for TensorRT: int8 around zero, only where a layer reads, and biases in float; it fuses what lies between itself.
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
        raise needs(str(error.name)) from None
    kept = layer_nodes(proto, job.about.kept_float)
    if symmetric:
        types = ["Conv", "Gemm", "MatMul"]
        options = {
            "ActivationSymmetric": True,
            "QuantizeBias": False,
            "OpTypesToExcludeOutputQuantization": types,
        }
    else:
        types = None  # all that ONNX Runtime can compute in int8, but the logits: with 256 levels they would tie
        options = {"OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"]}
    with TemporaryDirectory() as scratch, quiet(""):  # its words go to the root logger
        before, after = Path(scratch, "float.onnx"), Path(scratch, "int8.onnx")
        onnx.save(pooling(proto), before)
        quantize_static(
            before,
            after,
            Reader(proto.graph.input[0].name, job.calibration),  # pyright: ignore[reportArgumentType]
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=types,
            per_channel=True,
            activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            nodes_to_exclude=[*kept, *outside(proto)],
            extra_options=options,
        )
        result = onnx.load(after)
    unround(result, proto, kept)
    return result


class Reader:
    """Batches as ONNX Runtime asks for them, in parts of `BATCH` images."""

    def __init__(self, name: str, batches: Iterable[np.ndarray]):
        self.rest = (
            {name: batch[i : i + BATCH]} for batch in batches for i in range(0, len(batch), BATCH)
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.rest, None)


def pooling(proto: Any) -> Any:
    """The same with the means over all pixels as pools, which ONNX Runtime has in int8 and means not.

    In ResNet-RS-50 with its gates that is 1.6 times as fast at batch 1, one thread of a Zen 5.
    """
    from onnx import ModelProto, numpy_helper

    copied = ModelProto()
    copied.CopyFrom(proto)
    small = [each for each in proto.graph.initializer if list(each.dims) == [2]]
    axes = {each.name for each in small if numpy_helper.to_array(each).tolist() == [2, 3]}
    for node in copied.graph.node:
        flat = any(each.name == "keepdims" and not each.i for each in node.attribute)
        if node.op_type == "ReduceMean" and axes.intersection(node.input[1:]) and not flat:
            node.op_type = "GlobalAveragePool"
            del node.input[1:], node.attribute[:]
    return copied


def layer_nodes(proto: Any, paths: Collection[str]) -> list[str]:
    """The nodes that compute the layers `paths`. Raises ValueError where one is not in the graph."""
    found: dict[str, list[str]] = {path: [] for path in paths}
    for node in proto.graph.node:
        path = node.name.split("/")[0].removeprefix("net.")
        if path in found:
            found[path].append(node.name)
    for path, nodes in found.items():
        if not nodes:
            raise ValueError(
                f"{path} cannot be kept in float, the graph has no such layer: name a layer with weights"
            )
    return list(chain(*found.values()))


def outside(proto: Any) -> list[str]:
    """Nodes before the network, which make its input of pixels, and the softmax behind it."""
    seen = {weights.name for weights in proto.graph.initializer if weights.name.startswith("net.")}
    names = []
    for node in proto.graph.node:
        if node.op_type != "Softmax" and seen.intersection(node.input):
            seen.update(node.output)
        else:
            names.append(node.name)
    return names


def unround(proto: Any, original: Any, kept: Collection[str]) -> None:
    """Give the nodes `kept` their inputs as they were before they were rounded for other nodes.

    A ReLU is gone where rounding to unsigned numbers cuts at zero anyway; then they get one of their own.
    """
    from onnx import helper

    nodes, was = producers(proto), producers(original)
    for node in [node for node in proto.graph.node if node.name in kept]:
        back = nodes.get(node.input[0])
        if back is None or back.op_type != "DequantizeLinear":
            continue
        name = nodes[back.input[0]].input[0]
        if name in was and was[name].op_type == "Relu" and nodes[name].op_type != "Relu":
            proto.graph.node.insert(
                list(proto.graph.node).index(node),
                helper.make_node("Relu", [name], [f"{node.name}/input"]),
            )
            name = f"{node.name}/input"
        node.input[0] = name


def producers(proto: Any) -> dict[str, Any]:
    return {name: node for node in proto.graph.node for name in node.output}
