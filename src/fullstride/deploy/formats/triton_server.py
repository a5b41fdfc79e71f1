"""What does NVIDIA's Triton Inference Server want? A folder of folders: one per model, with its settings and versions.

FOLDER/NAME/config.pbtxt, FOLDER/NAME/labels.txt and FOLDER/NAME/1/ with the file of another format.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from fullstride.deploy.exported import Shipped
from fullstride.deploy.formats import onnx, onnx_graph, openvino, tensorrt
from fullstride.deploy.formats.base import Format
from fullstride.deploy.job import Backend, Job

CONFIG, VERSION, LABELS = "config.pbtxt", "1", "labels.txt"
MOST_IMAGES = 64  # that the server puts together for one call
WAIT_US = 2000  # microseconds that a first image waits for others
# By backend: the format inside, and those of its files that the server reads. With tensorrt the server's ONNX Runtime
# has TensorRT build an engine when it loads the file, for the GPU that is there.
INSIDE: dict[Backend, tuple[Format, tuple[str, ...]]] = {
    "onnx": (onnx.ONNX, ()),
    "openvino": (openvino.OPENVINO, (openvino.MODEL, openvino.NUMBERS)),
    "tensorrt": (tensorrt.TENSORRT, (tensorrt.MODEL,)),
}
BATCHES = f"""dynamic_batching {{
  max_queue_delay_microseconds: {WAIT_US}
}}
"""
# The server's OpenVINO would fill every batch up to the largest, or refuse it: there images come as they were sent.
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


def write(job: Job, folder: Path) -> None:
    inside, files = INSIDE[job.backend]
    home = folder / server_name(job.about.name)
    version = home / VERSION
    version.mkdir(parents=True)
    with TemporaryDirectory(dir=home) as scratch:
        made = Path(scratch) / "made"
        inside.write(job, made)
        for name in files:
            (made / name).rename(version / name)
        if not files:
            made.rename(version / "model.onnx")
    labels = (
        " ".join(name.split()) for name in job.about.classes
    )  # one a line, whatever is in them
    (home / LABELS).write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    (home / CONFIG).write_text(config(job))


def config(job: Job) -> str:
    """The settings, in the server's own language: what goes in and out, and how it makes batches."""
    pixels = job.about.input != "normalised"
    sides = (0, 1) if pixels else (1, 2)
    free = sides if job.any_size or job.about.input == "pictures" else ()
    batch = [-1] if job.backend == "openvino" else []
    dims = batch + [
        -1 if place in free else size for place, size in enumerate(job.inputs.shape[1:])
    ]
    more = {
        "onnx": BATCHES,
        "openvino": ON_CPU,
        "tensorrt": BATCHES + ACCELERATOR % job.about.precision.upper(),
    }
    return f"""name: {json.dumps(server_name(job.about.name))}
backend: "{"openvino" if job.backend == "openvino" else "onnxruntime"}"
max_batch_size: {0 if batch else MOST_IMAGES}
input {{
  name: "images"
  data_type: {"TYPE_UINT8" if pixels else "TYPE_FP32"}
  dims: {dims}
}}
output {{
  name: "{onnx_graph.ANSWER[job.about.input]}"
  data_type: TYPE_FP32
  dims: {[*batch, len(job.about.classes)]}
  label_filename: "{LABELS}"
}}
{more[job.backend]}"""


def server_name(name: str) -> str:
    """A name that can be a folder and a part of an address."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_") or "model"


def open_file(folder: Path, threads: int) -> Shipped:
    """What the server would answer, by the runtimes that are here."""
    for inside, name in ((onnx.ONNX, "model.onnx"), (openvino.OPENVINO, openvino.MODEL)):
        for path in folder.glob(f"*/{VERSION}/{name}"):
            return replace(inside.open(path, threads), path=folder)
    raise ValueError(
        f"{folder} holds no model that can be run here: NAME/{VERSION}/model.onnx or model.xml"
    )


def recognises(path: Path) -> bool:
    """With one model: of several, which one answers would be a guess."""
    return (
        path.is_dir() and len([*path.glob(f"*/{CONFIG}")]) == 1 and any(path.glob(f"*/{VERSION}"))
    )


TRITON_SERVER = Format(
    name="triton-server",
    suffix="",
    precisions=("fp32", "fp16", "int8"),
    write=write,
    open=open_file,
    recognises=recognises,
    missing=onnx.missing,
)
