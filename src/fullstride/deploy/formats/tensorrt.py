"""What does TensorRT take? An ONNX file without reflecting pads, and beside it the engine, where one can be built.

A folder of model.onnx and, where TensorRT and a GPU are here, model.engine. The ONNX file is strongly typed: TensorRT
computes each layer in the type that stands there. An engine is of one GPU and one version of TensorRT.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullstride.deploy.exported import Run, Shipped
from fullstride.deploy.formats import onnx, onnx_graph
from fullstride.deploy.formats.base import Format, needs, whole_file
from fullstride.deploy.formats.onnx_int8 import quantised
from fullstride.deploy.job import Job

MODEL, ENGINE = "model.onnx", "model.engine"
MOST_IMAGES = 256  # of a batch that an engine takes


def write(job: Job, folder: Path) -> None:
    model = onnx_graph.model(job)
    if job.about.precision == "int8":
        model = quantised(model, job, symmetric=True)  # TensorRT knows no zero points
    unreflect(model)
    folder.mkdir()
    onnx_graph.save(model, job.about, folder / MODEL)
    if not engine_missing():
        (folder / ENGINE).write_bytes(build(folder / MODEL, job.inputs.shape[1:]))


def unreflect(model: Any) -> None:
    """Say every reflecting pad of an ONNX model by slices and concatenations: TensorRT has no such pad."""
    import onnx

    known = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    known |= {
        n.output[0]: onnx.numpy_helper.to_array(n.attribute[0].t)
        for n in model.graph.node
        if is_constant(n)
    }
    nodes = []
    for node in model.graph.node:
        mode = next((a.s for a in node.attribute if a.name == "mode"), b"constant")
        if node.op_type != "Pad" or mode != b"reflect":
            nodes.append(node)
            continue
        pads = known[node.input[1]].tolist()
        named = len(node.input) > 3 and node.input[3]
        axes = known[node.input[3]].tolist() if named else list(range(len(pads) // 2))
        wide = {
            axis: (pads[i], pads[i + len(axes)])
            for i, axis in enumerate(axes)
            if pads[i] or pads[i + len(axes)]
        }
        nodes.extend(reflection(node, wide, model.graph.initializer))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def is_constant(node: Any) -> bool:
    return (
        node.op_type == "Constant"
        and len(node.attribute) == 1
        and node.attribute[0].name == "value"
    )


def reflection(node: Any, wide: dict[int, tuple[int, int]], constants: Any) -> Iterator[Any]:
    """Nodes that do what a reflecting pad does: `wide` is how far it goes at either end of each axis."""
    import onnx

    made = source = node.input[0]
    for place, (axis, (before, after)) in enumerate(wide.items()):
        source = made
        lines = [*range(before, 0, -1), None, *range(-2, -2 - after, -1)]  # None: all that is there
        parts = []
        for number, line in enumerate(lines):
            if line is None:
                parts.append(source)
                continue
            name = f"reflected/{node.output[0]}/{axis}/{number}"
            ends = {"starts": line, "ends": line + 1, "axes": axis}
            for end, value in ends.items():
                constants.append(
                    onnx.numpy_helper.from_array(np.array([value], np.int64), f"{name}/{end}")
                )
            yield onnx.helper.make_node(
                "Slice", [source, *(f"{name}/{end}" for end in ends)], [name], name=name
            )
            parts.append(name)
        made = node.output[0] if place == len(wide) - 1 else f"reflected/{node.output[0]}/{axis}"
        yield onnx.helper.make_node("Concat", parts, [made], name=f"{made}/join", axis=axis)


def build(path: Path, shape: tuple[int, ...]) -> bytes:
    """The engine for this GPU, for 1 to MOST_IMAGES images."""
    import tensorrt as trt  # pyright: ignore[reportMissingImports]

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(path.read_bytes()):
        raise ValueError(
            f"TensorRT {trt.__version__} does not take {path.name}: {parser.get_error(0).desc()}"
        )
    profile = builder.create_optimization_profile()
    profile.set_shape("images", *((count, *shape) for count in (1, 8, MOST_IMAGES)))
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    return bytes(builder.build_serialized_network(network, config))


def open_file(folder: Path, threads: int) -> Shipped:
    """By TensorRT where it is here and the engine too, else by ONNX Runtime."""
    shipped = onnx.open_file(folder / MODEL, threads)
    if engine_missing() or not (folder / ENGINE).exists():
        return replace(shipped, path=folder)
    import tensorrt as trt  # pyright: ignore[reportMissingImports]

    engine = trt.Runtime(trt.Logger(trt.Logger.ERROR)).deserialize_cuda_engine(
        (folder / ENGINE).read_bytes()
    )
    if engine is None:
        raise whole_file(
            folder / ENGINE, ValueError("an engine is of one GPU and one version: export it again")
        )
    run = runner(engine, len(shipped.classes))
    return replace(shipped, path=folder, run=run, runtime=f"TensorRT {trt.__version__}")


def runner(engine: Any, classes: int) -> Run:
    context = engine.create_execution_context()
    gives = engine.get_tensor_name(1)

    def run(images: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(images).cuda()
        out = torch.empty(len(x), classes, device="cuda")
        context.set_input_shape("images", tuple(x.shape))
        context.set_tensor_address("images", x.data_ptr())
        context.set_tensor_address(gives, out.data_ptr())
        context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
        return out.cpu().numpy()

    return run


def engine_missing() -> str:
    """Why no engine can be built or run here; "" if it can."""
    try:
        import tensorrt  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return str(needs("tensorrt", "tensorrt"))
    return "" if torch.cuda.is_available() else "TensorRT runs on a GPU, and there is none here"


TENSORRT = Format(
    name="tensorrt",
    suffix="",
    precisions=("fp32", "fp16", "int8"),
    write=write,
    open=open_file,
    recognises=lambda path: (path / MODEL).is_file(),
    missing=onnx.missing,
)
