"""How does a network become an OpenVINO model, and how is it run? A folder of model.xml (the graph) and model.bin."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fullstride.deploy.exported import About, Shipped
from fullstride.deploy.formats import onnx, onnx_graph
from fullstride.deploy.formats.base import Format, needs, whole_file
from fullstride.deploy.formats.openvino_int8 import quantised
from fullstride.deploy.job import Job

MODEL, NUMBERS = "model.xml", "model.bin"
SECTION = "fullstride"  # of the runtime information in the file
HINTS = {
    "fp32": "f32",
    "fp16": "f32",
    "int8": "f32",
    "bf16": "bf16",
}  # what it computes in; int8 layers know it


def write(job: Job, folder: Path) -> None:
    ov, model = openvino(), converted(job)
    if job.about.precision == "int8":
        model = quantised(model, job)
    for key, value in job.about.strings().items():
        model.set_rt_info(value, [SECTION, key])
    folder.mkdir()
    ov.save_model(model, folder / MODEL, compress_to_fp16=job.about.precision == "fp16")


def converted(job: Job) -> Any:
    """The float32 graph as an `openvino.Model`, by way of ONNX."""
    import onnx

    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.onnx"
        onnx.save(onnx_graph.model(replace(job, about=replace(job.about, precision="fp32"))), path)
        return read_onnx(path)


def read_onnx(path: Path) -> Any:
    """An `openvino.Model`, constants folded. OpenVINO's `convert_model` would report its use to its makers."""
    model = core().read_model(path)
    from openvino.passes import ConstantFolding, Manager

    passes = Manager()
    passes.register_pass(ConstantFolding())
    passes.run_passes(model)
    return model


def open_file(path: Path, threads: int) -> Shipped:
    ov = openvino()
    file = path if path.suffix == ".xml" else path / MODEL
    try:
        model = core().read_model(file)
        told = read_told(model)
    except Exception as error:
        raise whole_file(path, error) from None
    about = About.read(told, path)
    how = {
        "INFERENCE_PRECISION_HINT": HINTS[about.precision],
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",  # one call takes all threads, as many images as it brings
    }
    try:
        compiled = core().compile_model(model, "CPU", how)
    except Exception as error:
        raise whole_file(path, error) from None

    def run(images: np.ndarray) -> np.ndarray:
        return compiled([images])[0]

    version = ov.__version__.split("-")[0]
    return Shipped(path, about, run, f"OpenVINO {version}, {threads} threads")


def read_told(model: Any) -> dict[str, str]:
    keys = About.__dataclass_fields__
    return {
        k: model.get_rt_info([SECTION, k]).astype(str)
        for k in keys
        if model.has_rt_info([SECTION, k])
    }


@cache
def core() -> Any:
    """The only one of this process, which nothing ends.

    The CPU plugin of each (seen in 2026.4) gives the thread a stack for signals and puts the one before back at its
    end. Of two that do not end in turn the last puts back one that is gone, and the next signal, as of a process that
    has decoded its images, ends the program without a word.
    """
    found = openvino().Core()
    found.get_versions("CPU")  # loads the plugin, before others make theirs
    return found


def openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise needs(str(error.name)) from None
    return openvino


def recognises(path: Path) -> bool:
    return (path.is_dir() and (path / MODEL).exists()) or (path.is_file() and path.suffix == ".xml")


def missing() -> str:
    try:
        openvino()
    except ValueError as error:
        return str(error)
    return onnx.missing()


OPENVINO = Format(
    "openvino", "", ("fp32", "bf16", "fp16", "int8"), write, open_file, recognises, missing
)
