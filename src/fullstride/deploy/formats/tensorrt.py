"""Writes and opens folders with a TensorRT engine, built from an ONNX file for one GPU.

A folder has model.onnx and, if TensorRT and a GPU are available and images have one size,
model.engine. The ONNX file is strongly typed: TensorRT computes each layer in the file's type. An
engine works on one kind of GPU and with one version of TensorRT.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullstride.deploy.exported import ExportedModel, Infer
from fullstride.deploy.formats import onnx
from fullstride.deploy.formats.base import Format, import_error, reading
from fullstride.deploy.job import ExportJob

MODEL, ENGINE = "model.onnx", "model.engine"
DEVICE = "cuda"
MAX_BATCH = 256
BATCHES = (1, 8, MAX_BATCH)  # smallest, optimised, largest


def write(job: ExportJob, folder: Path) -> None:
    model = onnx.convert(job)
    if job.metadata.precision == "int8":
        model = onnx.quantize(model, job, symmetric=True)
    folder.mkdir()
    onnx.save(model, job.metadata, folder / MODEL)
    if not engine_missing() and not job.dynamic_sides:
        (folder / ENGINE).write_bytes(build(folder / MODEL, job.example.shape[1:]))


def build(path: Path, shape: tuple[int, ...]) -> bytes:
    """Build the engine of an ONNX file for this GPU, for 1 to `MAX_BATCH` images of `shape`."""
    import tensorrt as trt  # pyright: ignore[reportMissingImports]

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(path.read_bytes()):
        raise ValueError(
            f"TensorRT {trt.__version__} cannot read {path.name}: {parser.get_error(0).desc()}"
        )
    profile = builder.create_optimization_profile()
    profile.set_shape(onnx.INPUT, *((count, *shape) for count in BATCHES))
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise ValueError(f"TensorRT {trt.__version__} could not build an engine of {path.name}")
    return bytes(engine)


def open_file(folder: Path, threads: int) -> ExportedModel:
    """Open the engine if it exists and TensorRT is available, else the ONNX file."""
    model = onnx.open_file(folder / MODEL, threads)
    if engine_missing() or not (folder / ENGINE).exists():
        return replace(model, path=folder)
    import tensorrt as trt  # pyright: ignore[reportMissingImports]

    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    with reading(folder / ENGINE):
        engine = runtime.deserialize_cuda_engine((folder / ENGINE).read_bytes())
        if engine is None:
            raise ValueError("an engine works on one kind of GPU and one version: export it again")
    return ExportedModel(folder, model.metadata, inference(engine), f"TensorRT {trt.__version__}")


def inference(engine: Any) -> Infer:
    context = engine.create_execution_context()
    output = engine.get_tensor_name(1)

    def infer(images: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(images).to(DEVICE)
        if not context.set_input_shape(onnx.INPUT, tuple(x.shape)):
            raise ValueError(f"the engine takes batches of up to {MAX_BATCH}")
        y = torch.empty(tuple(context.get_tensor_shape(output)), device=DEVICE)
        context.set_tensor_address(onnx.INPUT, x.data_ptr())
        context.set_tensor_address(output, y.data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise ValueError("TensorRT could not run the engine")
        return y.cpu().numpy()

    return infer


def engine_missing() -> str:
    """Why no engine can be built or run here; "" if it can."""
    if reason := import_error("tensorrt", "tensorrt"):
        return reason
    return "" if torch.cuda.is_available() else "TensorRT needs a GPU, and none is available"


def detect(path: Path) -> bool:
    """Whether the folder has our files and no others, as a fit and a run may have a model.onnx."""
    names = [each.name for each in path.iterdir()] if path.is_dir() else []
    return MODEL in names and all(name in FILES or name.startswith(".") for name in names)


FILES = (MODEL, ENGINE)
TENSORRT = Format(
    "tensorrt", "", ("fp32", "fp16", "int8"), write, open_file, detect, onnx.missing, FILES
)
