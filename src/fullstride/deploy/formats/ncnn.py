"""Writes and opens folders of ncnn: graph, weights and metadata, in fp32 or fp16."""

# pyright: reportMissingImports=false

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from fullstride.deploy.exported import ExportedModel, Metadata
from fullstride.deploy.formats import base, mobile
from fullstride.deploy.job import ExportJob
from fullstride.io.console import count_of, without_native_lines
from fullstride.io.records import MAX_JSON_BYTES
from fullstride.io.writing import open_regular, read_regular
from fullstride.targets import sessions

GRAPH, WEIGHTS, ABOUT = "model.param", "model.bin", "model.json"
# Characters in types of layers that ncnn lacks, named after their operator: torch.topk, aten::sort.
FOREIGN = {".", ":"}


def write(job: ExportJob, folder: Path) -> None:
    if job.metadata.preprocessing.frames and not job.normalised:
        raise ValueError("ncnn makes no clips of pixels: leave --with-preprocessing out")
    job = mobile.of_one_image(job)
    module, x = job.module(), torch.from_numpy(job.example)
    if not job.normalised:
        module, x = mobile.Planes(module), mobile.planes(x)
    with torch.no_grad():
        module = torch.export.export(module, (x,)).run_decompositions({}).module(check_guards=False)
    folder.mkdir()
    with TemporaryDirectory(dir=folder) as scratch:
        with base.quiet(""), torch.no_grad():  # PyTorch calls the trace that pnnx reads outdated
            torch.jit.save(torch.jit.trace(module, (x,), check_trace=False), f"{scratch}/graph.pt")
        convert(Path(scratch), folder, job.metadata.precision == "fp16")
    for line in (folder / GRAPH).read_text().splitlines():
        if FOREIGN.intersection(kind := line.split(maxsplit=1)[0]):
            raise ValueError(f"ncnn has no layer for {kind}: use another format")
    about = {"metadata": job.metadata.to_strings(), "sha256": checksums(folder)}
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")


def convert(scratch: Path, folder: Path, fp16: bool) -> None:
    """Convert `scratch`/graph.pt to ncnn's two files by its converter."""
    from pnnx import EXEC_PATH

    names = dict(pnnxparam="a", pnnxbin="b", pnnxpy="c", ncnnpy="d", pnnxonnx="e")
    paths = {name: scratch / file for name, file in names.items()}
    paths |= {"ncnnparam": folder / GRAPH, "ncnnbin": folder / WEIGHTS}
    words = [f"{name}={path}" for name, path in paths.items()]
    mobile.run_converter("ncnn", EXEC_PATH, scratch / "graph.pt", *words, f"fp16={int(fp16)}")
    if not (folder / GRAPH).exists():
        raise ValueError("the converter of ncnn failed: it wrote no graph")


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of both files, checked first because ncnn reads beyond the end of damaged files."""
    sums: dict[str, str] = {}
    for name in (GRAPH, WEIGHTS):
        with open_regular(folder / name) as file:
            sums[name] = hashlib.sha256(file.read()).hexdigest()
    return sums


def open_file(folder: Path, threads: int) -> ExportedModel:
    if reason := missing("ncnn"):
        raise ValueError(reason)
    with base.reading(folder):
        about = json.loads(read_regular(folder / ABOUT, MAX_JSON_BYTES))
        if about["sha256"] != checksums(folder):
            raise ValueError(f"{GRAPH} or {WEIGHTS} does not match {ABOUT}")
        strings = dict(about["metadata"])
    metadata = Metadata.from_strings(strings, folder)
    with base.reading(folder), without_native_lines():
        outputs = sessions.open_ncnn(str(folder), threads, metadata.precision)

    def infer(images: np.ndarray) -> np.ndarray:
        if images.shape[1:] != metadata.input_shape():  # ncnn itself would accept any size
            raise ValueError("another size")
        return outputs(images)

    runtime = f"ncnn {version('ncnn')}, {count_of(threads, 'thread')}"
    return base.with_checked_sizes(ExportedModel(folder, metadata, infer, runtime))


def detect(path: Path) -> bool:
    return (path / GRAPH).is_file() and (path / ABOUT).is_file()


def missing(*packages: str) -> str:
    """Why ncnn or its converter is missing, without an import; `packages`: by default both."""
    reasons = (base.absent(each, each, "ncnn") for each in packages or ("ncnn", "pnnx"))
    return next(filter(None, reasons), "")


FILES = (GRAPH, WEIGHTS, ABOUT)
NCNN = base.Format(
    "ncnn", "", ("fp32", "fp16"), write, open_file, detect, missing, FILES, one_size=True
)
