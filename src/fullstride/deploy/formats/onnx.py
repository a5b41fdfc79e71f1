"""How does ONNX Runtime run a network? From one file, in float or int8."""

from pathlib import Path
from typing import Any

import numpy as np

from fullstride.deploy.exported import About, Run, Shipped
from fullstride.deploy.formats.base import Format, needs, whole_file
from fullstride.deploy.formats.onnx_graph import model, save
from fullstride.deploy.formats.onnx_int8 import quantised
from fullstride.deploy.job import Job


def write(job: Job, path: Path) -> None:
    found = model(job)
    save(quantised(found, job) if job.about.precision == "int8" else found, job.about, path)


def open_file(path: Path, threads: int) -> Shipped:
    if why := missing():
        raise ValueError(why)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors: warnings would go to the terminal
    gpu = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    providers = ["CUDAExecutionProvider"] * gpu + ["CPUExecutionProvider"]
    try:
        session = onnxruntime.InferenceSession(path, options, providers=providers)
        told, run = session.get_modelmeta().custom_metadata_map, runner(session)
    except Exception as error:  # of several kinds, none of which stands in its documentation
        raise whole_file(path, error) from None
    about = About.read(told, path)
    place = "the GPU" if gpu else f"{threads} threads"
    return Shipped(path, about, run, f"ONNX Runtime {onnxruntime.__version__}, {place}")


def runner(session: Any) -> Run:
    (takes,), (gives,) = session.get_inputs(), session.get_outputs()

    def run(images: np.ndarray) -> np.ndarray:
        return session.run([gives.name], {takes.name: images})[0]

    return run


def recognises(path: Path) -> bool:
    return path.is_file() and path.suffix == ".onnx"


def missing() -> str:
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        return str(needs(str(error.name)))
    return ""


ONNX = Format("onnx", ".onnx", ("fp32", "fp16", "int8"), write, open_file, recognises, missing)
