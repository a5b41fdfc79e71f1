"""Which formats are there? Each is one file here; this is the table of them."""

import errno
import os
from pathlib import Path

import torch

from fullstride.deploy.exported import Shipped
from fullstride.deploy.formats import (
    onnx,
    openvino,
    tensorrt,
    torch_export,
    triton_server,
)
from fullstride.deploy.formats.base import Format

# ONNX Runtime (from 1.29 on, when imported) and NNCF report their use to their makers, which nobody here agreed to.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("NNCF_CI", "1")

FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        onnx.ONNX,
        openvino.OPENVINO,
        torch_export.AOTI,
        torch_export.PT2,
        tensorrt.TENSORRT,
        triton_server.TRITON_SERVER,
    )
}


def recognised(path: Path) -> str | None:
    """The name of the format that `path` seems to be of."""
    return next((name for name, each in FORMATS.items() if each.recognises(path)), None)


def meant(word: str) -> bool:
    """Whether `word` can only mean an exported file, be it a good one or not."""
    return recognised(Path(word)) is not None or Path(word).suffix in (".onnx", ".xml", ".pt2")


def open_file(path: str | Path, *, threads: int | None = None, trust: bool = False) -> Shipped:
    """An exported file, ready to answer on `threads` of the CPU, None: as many as PyTorch takes.

    Raises ValueError, in one line, for any other file. Files of the formats pt2 and aoti are programs: loading one may
    run whatever its author put in, so they are opened only with `trust`.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
    name = recognised(path)
    if name is None:
        raise ValueError(
            f"{path} is not an exported file, or cut short: `fullstride export` writes {', '.join(FORMATS)}"
        )
    if FORMATS[name].runs_code and not trust:
        raise ValueError(
            f"{path} is a program of PyTorch, and opening it runs what is in it: say --trust if it is yours"
        )
    return FORMATS[name].open(path, threads or torch.get_num_threads())
