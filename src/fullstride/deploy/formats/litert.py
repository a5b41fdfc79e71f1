"""Writes and opens .tflite files for LiteRT, in fp32 or int8."""

# pyright: reportMissingImports=false

import json
import os
import platform
import sys
import zipfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from fullstride.deploy.exported import ExportedModel, Metadata, check_graph_sizes
from fullstride.deploy.formats import litert_converter, mobile
from fullstride.deploy.formats.base import Format, absent, has_magic, quiet, reading
from fullstride.deploy.job import ExportJob
from fullstride.io.console import count_of, without_native_lines
from fullstride.io.records import MAX_JSON_BYTES
from fullstride.io.writing import user_cache
from fullstride.targets import sessions

METADATA = "fullstride.json"  # in the archive at the end of a file
MAGIC = slice(4, 8), b"TFL3"  # place and bytes in a file
# Packages of a separate environment: they need other versions than this one.
CONVERTER = ("litert-torch==0.10.*", "ai-edge-quantizer==0.10.*")
CONVERTER_GB = 1.0


def write(job: ExportJob, path: Path) -> None:
    python = converter(job)
    with TemporaryDirectory(dir=path.parent) as scratch:
        with quiet("torch"):
            torch.export.save(mobile.program(job), f"{scratch}/graph.pt2")
        if job.metadata.precision == "int8":
            np.save(f"{scratch}/calibration.npy", np.concatenate([*job.calibration]))
            Path(scratch, "float_layers.json").write_text(json.dumps(job.metadata.float_layers))
        # -P: otherwise the files beside it would be imported in place of packages
        run(python, "-P", litert_converter.__file__, scratch)
        Path(scratch, "model.tflite").rename(path)
    with zipfile.ZipFile(path, "a") as archive:  # runtimes ignore bytes after the graph
        archive.writestr(METADATA, json.dumps(job.metadata.to_strings()))


def converter(job: ExportJob) -> Path:
    """The Python of the converter's environment, which the first call installs.

    That environment sees this one's packages after its own, so it has the same PyTorch.
    """
    home = environment()
    if converter_missing():
        job.progress(
            f"installing the converter of LiteRT once, about {CONVERTER_GB:g} GB, in {home}"
        )
        home.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=home.parent) as scratch:
            fresh = Path(scratch, "venv")
            run(Path(sys.executable), "-m", "venv", fresh)
            (packages,) = fresh.glob("lib/python*/site-packages")
            (packages / "parent.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
            same = f"torch=={torch.__version__.split('+')[0]}"
            run(fresh / "bin/python", "-m", "pip", "install", "--quiet", *CONVERTER, same)
            if not home.exists():  # another process may have installed it meanwhile
                fresh.rename(home)
    return home / "bin/python"


def environment() -> Path:
    """The converter's folder for this version of Python and PyTorch."""
    return user_cache() / f"litert-{platform.python_version()}-{torch.__version__}"


def converter_missing() -> str:
    """Why no file can be written now: `write` would install the converter first."""
    if (environment() / "bin/python").exists():
        return ""
    return "the converter of LiteRT is not installed: an export by --format litert installs it"


def run(*words: str | Path) -> None:
    own = {"PYTHONPATH": "", "PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}
    mobile.run_converter("LiteRT", *words, environment=os.environ | own)


def open_file(path: Path, threads: int) -> ExportedModel:
    if reason := missing():
        raise ValueError(reason)
    with reading(path):
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo(METADATA).file_size > MAX_JSON_BYTES:
                raise ValueError("its metadata is too large")
            strings = json.loads(archive.read(METADATA))
        with without_native_lines():
            graph = sessions.litert_session(str(path), threads)
        (source,), (result,) = graph.get_input_details(), graph.get_output_details()
    metadata = Metadata.from_strings(strings, path)
    check_graph_sizes(path, metadata, [*map(int, source["shape"])], [*map(int, result["shape"])])
    runtime = f"LiteRT {version('ai-edge-litert')}, {count_of(threads, 'thread')}"
    return ExportedModel(path, metadata, sessions.litert_outputs(graph), runtime)


missing = partial(absent, "ai_edge_litert", "ai-edge-litert", "litert")
detect = partial(has_magic, suffix=".tflite", magic=MAGIC)
LITERT = Format(
    "litert", ".tflite", ("fp32", "int8"), write, open_file, detect, missing, one_size=True
)
