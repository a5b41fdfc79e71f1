"""How does a network leave Python but not PyTorch? As a graph (pt2), or compiled for this machine (aoti)."""

import json
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullstride.deploy.exported import About, Shipped
from fullstride.deploy.formats.base import Format, quiet, whole_file
from fullstride.deploy.job import Job
from fullstride.measure.timing import cpu_threads

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ABOUT = "about.json"
BATCHES = {
    "model": None,
    "one": 1,
}  # in an aoti package; the first name is what other programs look for


def write_pt2(job: Job, path: Path) -> None:
    extra = {ABOUT: json.dumps(job.about.strings())}
    archive = BytesIO()  # into a file PyTorch would end the program where the disk is full
    torch.export.save(job.program(TYPES[job.about.precision]), archive, extra_files=extra)
    path.write_bytes(archive.getbuffer())


def open_pt2(path: Path, threads: int) -> Shipped:
    extra = {ABOUT: ""}
    try:
        with quiet("torch"):  # it would show how it failed on the terminal
            module = torch.export.load(path, extra_files=extra).module()
    except Exception as error:  # of many kinds
        raise whole_file(path, error) from None
    return shipped(path, extra[ABOUT], module, "graph", threads)


def write_aoti(job: Job, path: Path) -> None:
    """Compiled for the processor, or the GPU, of this machine; weights are laid out as its convolutions like them.

    Twice, each with its weights: code for any batch takes up to twice as long for one image as code for one.
    """
    from torch._inductor.package.package import package_aoti

    about = {ABOUT: json.dumps(job.about.strings())}
    how: dict[str, Any] = {
        "freezing": True,
        "aot_inductor.package": True,
        "aot_inductor.metadata": about,
    }
    archive, compiled = BytesIO(), {}
    with quiet("torch"), torch.no_grad():  # else weights would not be frozen, without a word
        for name, batch in BATCHES.items():
            program = job.program(TYPES[job.about.precision], batch)
            assert program.example_inputs is not None
            images, _ = program.example_inputs
            compiled[name] = torch._inductor.aot_compile(
                program.module(check_guards=False), images, options=how
            )
        package_aoti(archive, compiled)
    path.write_bytes(archive.getbuffer())


def open_aoti(path: Path, threads: int) -> Shipped:
    from torch._inductor.package.package import load_package

    try:
        with quiet("torch"):
            any_batch, one = (load_package(str(path), name) for name in BATCHES)
        told = any_batch.get_metadata().get(ABOUT, "")
    except Exception as error:
        raise whole_file(path, error) from None

    def module(images: Tensor) -> Tensor:
        return (one if len(images) == 1 else any_batch)(images)

    return shipped(path, told, module, "AOTInductor", threads)


def shipped(
    path: Path, told: str, module: Callable[[Tensor], Tensor], how: str, threads: int
) -> Shipped:
    try:
        strings = json.loads(told)
    except ValueError:
        strings = {}
    about = About.read(strings if isinstance(strings, dict) else {}, path)

    def run(images: np.ndarray) -> np.ndarray:
        with cpu_threads(threads), torch.no_grad():
            return module(rows_of(images).to(about.device)).cpu().numpy()

    place = f"{threads} threads" if about.device == "cpu" else about.device
    return Shipped(path, about, run, f"PyTorch {torch.__version__} {how}, {place}")


def rows_of(images: np.ndarray) -> Tensor:
    """One image after the other in memory, with strides that say so: compiled code believes those of its example.

    Of images with one channel its stride may be anything, and PyTorch and NumPy call them contiguous all the same.
    """
    return torch.from_numpy(images).flatten().view(images.shape)


def holds(path: Path, folder: str) -> bool:
    """Whether `path` is one of PyTorch's archives with such a folder in it."""
    if path.suffix != ".pt2" or not path.is_file():
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(f"/{folder}/" in name for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def compiler_missing() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:
        return (
            "no C++ compiler is here: aoti needs one to write its files, the other formats do not"
        )
    return ""


AOTI = Format(
    name="aoti",
    suffix=".pt2",
    precisions=("fp32", "bf16"),
    write=write_aoti,
    open=open_aoti,
    recognises=lambda path: holds(path, "aotinductor"),
    missing=compiler_missing,
    runs_code=True,
)
PT2 = Format(
    name="pt2",
    suffix=".pt2",
    precisions=("fp32", "bf16", "fp16"),
    write=write_pt2,
    open=open_pt2,
    recognises=lambda path: holds(path, "models"),
    missing=lambda: "",
    runs_code=True,
)
