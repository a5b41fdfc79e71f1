"""Holds the table of formats; each format is a file in this folder."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from fullstride.deploy.exported import ExportedModel, ExportedModule
from fullstride.deploy.formats import (
    coreml,
    executorch,
    litert,
    ncnn,
    onnx,
    openvino,
    tensorrt,
    torch_export,
    triton_server,
)
from fullstride.deploy.formats.base import Format
from fullstride.io.writing import Output, check_regular, read_regular

# ONNX Runtime (from 1.29, when imported) sends telemetry unless this is set.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

MAX_GRAPH_BYTES = 2**31  # of ONNX
FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        onnx.ONNX,
        openvino.OPENVINO,
        torch_export.AOTI,
        torch_export.PT2,
        tensorrt.TENSORRT,
        triton_server.TRITON_SERVER,
        executorch.EXECUTORCH,
        ncnn.NCNN,
        litert.LITERT,
        coreml.COREML,
    )
}


def detect_format(path: Path) -> str | None:
    """The name of the format of `path`, by names and first bytes; None for no known format."""
    return next((name for name, each in FORMATS.items() if each.detect(path)), None)


def output(kind: Format, force: bool) -> Output:
    """The output of an export of `kind`, which with `force` may replace files and export folders.

    In a folder it replaces the files of all formats, since the earlier format may differ.
    """
    if not kind.files:
        return Output(f"a file of {kind.name}", kind.suffix, lambda path: force)
    files = tuple(dict.fromkeys(name for each in FORMATS.values() for name in each.files))
    noun = f"a folder of {kind.name} by `fullstride export`"
    return Output(noun, kind.suffix, lambda path: force and _is_exported_folder(path), files)


def _is_exported_folder(path: Path) -> bool:
    """Whether the folder has a format's files, with our metadata in or beside the graph."""
    mark = b"float_layers"
    kinds = (".onnx", ".xml", ".json", ".mlmodel")
    graphs = (each for each in path.rglob("*") if each.suffix in kinds)
    return detect_format(path) is not None and any(
        mark in read_regular(each, MAX_GRAPH_BYTES) for each in graphs if each.is_file()
    )


def is_exported_path(word: str) -> bool:
    """Whether `word` names an exported file, even an unreadable one, rather than a network."""
    suffixes = {".xml", *(each.suffix for each in FORMATS.values() if each.suffix)}
    return detect_format(Path(word)) is not None or Path(word).suffix in suffixes


def open_file(
    path: str | Path, *, threads: int | None = None, trust: bool = False
) -> ExportedModel:
    """Open an exported file of any format with a number of CPU threads (None: PyTorch's number).

    Files of the formats pt2 and aoti are programs that may run any code when loaded, so they are
    only opened with `trust`. Raises ValueError, in one line, for any other file.

    Examples:
        >>> from pathlib import Path
        >>> import fullstride
        >>> bundle = fullstride.train_network("digits", "genet_tiny", "runs/few", steps=2)
        >>> digits = fullstride.open_data("digits").val
        >>> images = fullstride.ComparisonImages([digits.picture(0)])
        >>> _ = fullstride.export(bundle, Path("few.onnx"), images)
        >>> fullstride.open_file("few.onnx").metadata.classes == bundle.classes
        True
    """
    path = Path(path)
    if not path.exists():
        if beside := near(path):
            raise ValueError(f"no file {path}: there is {beside}")
        raise ValueError(f"no such file or folder: {path}")
    for file in path.rglob("*") if path.is_dir() else (path,):
        if not file.is_dir():
            check_regular(file)
    name = detect_format(path)
    if name is None:
        raise ValueError(
            f"{path} is not an exported file, or is incomplete: "
            f"`fullstride export` writes {', '.join(FORMATS)}"
        )
    if FORMATS[name].runs_code and not trust:
        raise ValueError(
            f"{path} is a program of PyTorch, and opening it runs its code: "
            f"add --trust if you trust its author"
        )
    return FORMATS[name].open(path, threads or torch.get_num_threads())


def near(path: Path) -> Path | None:
    """An exported file with the name of `path` and another suffix; None if there is none."""
    others = path.parent.iterdir() if path.parent.is_dir() else ()
    return next((each for each in others if each.stem == path.stem and detect_format(each)), None)


def open_as_modules(words: Iterable[str], *, trust: bool = False) -> dict[str, ExportedModule]:
    """Open the exported files among `words` as modules for `bench`."""
    files = [*filter(is_exported_path, words)]
    for word in files:
        check_timed(detect_format(Path(word)))
    return {word: ExportedModule(open_file(word, trust=trust)) for word in files}


def check_timed(name: str | None) -> None:
    """Raise ValueError for a format whose files are computed by another program here."""
    if name and (system := FORMATS[name].runs_on):
        raise ValueError(f"{name} files are not timed: they run on {system}, and not in fullstride")
