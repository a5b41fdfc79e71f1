"""Writes a model repository of NVIDIA's Triton Inference Server.

FOLDER/NAME/config.pbtxt, FOLDER/NAME/labels.txt and FOLDER/NAME/1/ with another format's file.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from fullstride.deploy.exported import ExportedModel
from fullstride.deploy.formats import onnx, openvino, tensorrt
from fullstride.deploy.formats.base import Format
from fullstride.deploy.job import Backend, ExportJob

CONFIG, VERSION, LABELS = "config.pbtxt", "1", "labels.txt"
MODEL = "model.onnx"  # the name that the server's ONNX Runtime reads
MAX_BATCH = 64  # images in one dynamic batch
MAX_DELAY_US = 2000  # microseconds that an image waits for others
# Backend -> the format, and its files that the server reads. With tensorrt, the server's ONNX
# Runtime lets TensorRT build an engine for its GPU when it loads the file.
FORMATS: dict[Backend, tuple[Format, tuple[str, ...]]] = {
    "onnx": (onnx.ONNX, ()),
    "openvino": (openvino.OPENVINO, (openvino.MODEL, openvino.WEIGHTS)),
    "tensorrt": (tensorrt.TENSORRT, (tensorrt.MODEL,)),
}
DYNAMIC_BATCHING = f"""dynamic_batching {{
  max_queue_delay_microseconds: {MAX_DELAY_US}
}}
"""
# Dynamic batching is off for OpenVINO, whose backend fills or refuses batches below the largest.
ON_CPU = "instance_group [{ kind: KIND_CPU }]\n"
ACCELERATOR = """optimization {
  execution_accelerators {
    gpu_execution_accelerator: [{
      name: "tensorrt"
      parameters { key: "precision_mode" value: "%s" }
    }]
  }
}
"""


def write(job: ExportJob, folder: Path) -> None:
    format, files = FORMATS[job.backend]
    home = folder / server_name(job.metadata.name)
    version = home / VERSION
    version.mkdir(parents=True)
    with TemporaryDirectory(dir=home) as scratch:
        source = Path(scratch) / "model"
        format.write(job, source)
        for name in files:
            (source / name).rename(version / name)
        if not files:
            source.rename(version / MODEL)
    labels = (" ".join(name.split()) for name in job.metadata.classes)  # each on one line
    (home / LABELS).write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    (home / CONFIG).write_text(config(job))


def config(job: ExportJob) -> str:
    """The model configuration in the server's language: inputs, outputs and batching."""
    batch = [-1] if job.backend == "openvino" else []
    sizes = enumerate(job.example.shape[1:])
    dims = batch + [-1 if dim in job.dynamic_sides else size for dim, size in sizes]
    options = {
        "onnx": DYNAMIC_BATCHING,
        "openvino": ON_CPU,
        "tensorrt": DYNAMIC_BATCHING + ACCELERATOR % job.metadata.precision.upper(),
    }
    return f"""name: {json.dumps(server_name(job.metadata.name))}
backend: "{"openvino" if job.backend == "openvino" else "onnxruntime"}"
max_batch_size: {0 if batch else MAX_BATCH}
input {{
  name: "{onnx.INPUT}"
  data_type: {"TYPE_FP32" if job.normalised else "TYPE_UINT8"}
  dims: {dims}
}}
output {{
  name: "{job.output_name}"
  data_type: TYPE_FP32
  dims: {batch + [size or -1 for size in job.metadata.output_shape]}
  label_filename: "{LABELS}"
}}
{options[job.backend]}"""


def server_name(name: str) -> str:
    """`name` as the name of a folder and a part of a URL."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_") or "model"


def open_file(folder: Path, threads: int) -> ExportedModel:
    """Open the file of version 1 by its runtime on this machine."""
    for format, name in ((onnx.ONNX, MODEL), (openvino.OPENVINO, openvino.MODEL)):
        for path in folder.glob(f"*/{VERSION}/{name}"):
            return replace(format.open(path, threads), path=folder)
    raise ValueError(
        f"{folder} has no model that can be run here: NAME/{VERSION}/{MODEL} or {openvino.MODEL}"
    )


def detect(path: Path) -> bool:
    """Whether `path` is a repository of exactly one model, since a choice would be arbitrary."""
    return (
        path.is_dir() and len([*path.glob(f"*/{CONFIG}")]) == 1 and any(path.glob(f"*/{VERSION}"))
    )


GRAPHS = (MODEL, openvino.MODEL, openvino.WEIGHTS)
FILES = tuple(f"*/{name}" for name in (CONFIG, LABELS, *(f"{VERSION}/{each}" for each in GRAPHS)))
TRITON_SERVER = Format(
    "triton-server", "", ("fp32", "fp16", "int8"), write, open_file, detect, onnx.missing, FILES
)
