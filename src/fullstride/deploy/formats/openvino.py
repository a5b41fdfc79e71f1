"""Writes and opens folders of OpenVINO: the graph, model.xml, and the weights, model.bin."""

from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from fullstride.deploy.exported import ExportedModel, Metadata, Precision, check_graph_sizes
from fullstride.deploy.formats import onnx
from fullstride.deploy.formats.base import Format, import_error, missing_package, reading
from fullstride.deploy.job import ExportJob
from fullstride.io.console import count_of
from fullstride.io.writing import open_regular
from fullstride.targets import sessions

MODEL, WEIGHTS = "model.xml", "model.bin"
SECTION = "fullstride"  # of the runtime information in the file


def write(job: ExportJob, folder: Path) -> None:
    ov, model = openvino(), convert(job)
    for key, value in job.metadata.to_strings().items():
        model.set_rt_info(value, [SECTION, key])
    folder.mkdir()
    ov.save_model(model, folder / MODEL, compress_to_fp16=job.metadata.precision == "fp16")


def convert(job: ExportJob) -> Any:
    """The graph in float32 or int8 as an `openvino.Model`, converted from ONNX.

    `openvino.convert_model` would send telemetry.
    """
    import onnx as onnx_package

    precision: Precision = "int8" if job.metadata.precision == "int8" else "fp32"
    job = replace(job, metadata=replace(job.metadata, precision=precision))
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.onnx"
        onnx_package.save(onnx.graph(job), path)
        return core().read_model(path)


def open_file(path: Path, threads: int) -> ExportedModel:
    ov = openvino()
    file = path if path.suffix == ".xml" else path / MODEL
    check_xml(file)
    with reading(path):
        model = core().read_model(file)
        keys = [each.name for each in fields(Metadata)]
        keys = [key for key in keys if model.has_rt_info([SECTION, key])]
        strings = {key: model.get_rt_info([SECTION, key]).astype(str) for key in keys}
    metadata = Metadata.from_strings(strings, path)
    source, result = (
        [0 if side.is_dynamic else side.get_length() for side in each.partial_shape]
        for each in (model.inputs[0], model.outputs[0])
    )
    check_graph_sizes(path, metadata, source, result)
    with reading(path):
        infer = sessions.openvino_outputs(core(), model, threads, metadata.precision)
    version = ov.__version__.split("-")[0]
    runtime = f"OpenVINO {version}, {count_of(threads, 'thread')}"
    return ExportedModel(path, metadata, infer, runtime)


def check_xml(path: Path) -> None:
    """Raise ValueError, in one line, for a file whose first element is not a graph.

    OpenVINO would try the readers of other programs' files, which print to standard error.
    """
    with reading(path), open_regular(path) as file:
        _, root = next(ElementTree.iterparse(file, ("start",)))
    if root.tag != "net" or not root.get("version", "").isdigit():
        raise ValueError(f"{path} has no graph of OpenVINO: its first element is {root.tag[:40]!r}")


@cache
def core() -> Any:
    """The only `openvino.Core` of this process, which is never destroyed.

    A core's CPU plugin (observed in 2026.4) gives the thread a signal stack and restores the
    previous stack on destruction. If two cores are not destroyed in reverse order, a freed stack is
    restored, and the next signal, such as the end of a data-loader worker, kills the process.
    """
    instance = openvino().Core()
    instance.get_versions("CPU")  # loads the plugin before other libraries install their stacks
    return instance


def openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise missing_package(str(error.name)) from None
    return openvino


def detect(path: Path) -> bool:
    return (path.is_dir() and (path / MODEL).exists()) or (path.is_file() and path.suffix == ".xml")


def missing() -> str:
    return import_error("openvino", "export") or onnx.missing()


FILES = (MODEL, WEIGHTS)
OPENVINO = Format(
    "openvino", "", ("fp32", "bf16", "fp16", "int8"), write, open_file, detect, missing, FILES
)
