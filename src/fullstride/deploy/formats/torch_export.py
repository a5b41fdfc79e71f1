"""Writes and opens files of PyTorch: a graph (pt2) or code compiled for this machine (aoti)."""

import json
import zipfile
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullstride.deploy.exported import ExportedModel, Metadata, Precision
from fullstride.deploy.formats.base import Format, quiet, reading, with_checked_sizes
from fullstride.deploy.job import ExportJob
from fullstride.io.console import count_of
from fullstride.measure.protocols import cpu_threads
from fullstride.nets.weights.reader import ZIP_ERRORS

TYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
METADATA = "about.json"  # in the archive
# Models in an aoti package -> batch size; other programs load the first name.
BATCHES = {"model": None, "one": 1}


def write_pt2(job: ExportJob, path: Path) -> None:
    extra = {METADATA: json.dumps(job.metadata.to_strings())}
    archive = BytesIO()  # PyTorch aborts the process if it writes to a file on a full disk
    torch.export.save(job.program(TYPES[job.metadata.precision]), archive, extra_files=extra)
    path.write_bytes(archive.getbuffer())


def open_pt2(path: Path, threads: int) -> ExportedModel:
    extra = {METADATA: ""}
    with reading(path), quiet("torch"):  # it logs failures to the terminal
        module = torch.export.load(path, extra_files=extra).module()
    return exported_model(path, extra[METADATA], module, "graph", threads)


def write_aoti(job: ExportJob, path: Path) -> None:
    """Compile for the CPU or GPU of this machine, with weights in its preferred layout.

    The package has two models, each with its weights, because code for any batch size takes up to
    twice as long for one image as code for a single image.
    """
    from torch._inductor.package.package import package_aoti

    options: dict[str, Any] = {
        "freezing": True,
        "aot_inductor.package": True,
        "aot_inductor.metadata": {METADATA: json.dumps(job.metadata.to_strings())},
    }
    archive, compiled = BytesIO(), {}
    with quiet("torch"), torch.no_grad():  # with gradients, freezing is silently skipped
        for name, batch in BATCHES.items():
            program = job.program(TYPES[job.metadata.precision], batch)
            assert program.example_inputs is not None
            images, _ = program.example_inputs
            compiled[name] = torch._inductor.aot_compile(
                program.module(check_guards=False), images, options=options
            )
        package_aoti(archive, compiled)
    path.write_bytes(archive.getbuffer())


def open_aoti(path: Path, threads: int) -> ExportedModel:
    from torch._inductor.package.package import load_package

    with reading(path), quiet("torch"):
        any_batch, one = (load_package(str(path), name) for name in BATCHES)
        strings = any_batch.get_metadata().get(METADATA, "")

    def module(images: Tensor) -> Tensor:
        return (one if len(images) == 1 else any_batch)(images)

    return exported_model(path, strings, module, "AOTInductor", threads)


def exported_model(
    path: Path, metadata_json: str, module: Callable[[Tensor], Tensor], backend: str, threads: int
) -> ExportedModel:
    try:
        strings = json.loads(metadata_json)
    except ValueError:
        strings = {}
    metadata = Metadata.from_strings(strings, path)

    def infer(images: np.ndarray) -> np.ndarray:
        with cpu_threads(threads), torch.no_grad():
            return module(contiguous(images).to(metadata.device)).cpu().numpy()

    device = count_of(threads, "thread") if metadata.device == "cpu" else metadata.device
    runtime = f"PyTorch {torch.__version__} {backend}, {device}"
    return with_checked_sizes(ExportedModel(path, metadata, infer, runtime))


def contiguous(images: np.ndarray) -> Tensor:
    """Convert to a tensor with the strides of a fresh tensor, which compiled code relies on.

    A dimension of size 1, such as one channel, may have any stride in an array that PyTorch and
    NumPy call contiguous.
    """
    return torch.from_numpy(images).flatten().view(images.shape)


def has_folder(path: Path, folder: str) -> bool:
    """Whether `path` is a PyTorch archive with this folder in it."""
    if path.suffix != ".pt2" or not path.is_file():
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(f"/{folder}/" in name for name in archive.namelist())
    except ZIP_ERRORS:
        return False


def compiler_missing() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:
        return "aoti needs a C++ compiler, and none is available: use another format"
    return ""


in_aoti, in_pt2 = (partial(has_folder, folder=each) for each in ("aotinductor", "models"))
AOTI = Format(
    "aoti", ".pt2", ("fp32", "bf16"), write_aoti, open_aoti, in_aoti, compiler_missing, (), True
)
PT2 = Format(
    "pt2", ".pt2", tuple(TYPES), write_pt2, open_pt2, in_pt2, lambda: "", (), runs_code=True
)
