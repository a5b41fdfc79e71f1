"""How does a network become an ONNX file, and how does ONNX Runtime run it?"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullstride.deploy.formats.format import Format, needs, quiet, whole_file
from fullstride.deploy.graph import Job
from fullstride.deploy.shipped import About, Run, Shipped

OPSET = 20
ANSWER = {"normalised": "logits", "pixels": "probabilities", "pictures": "probabilities"}


def write(job: Job, path: Path) -> None:
    if job.about.precision == "int8":
        from fullstride.deploy.formats.onnx_int8 import quantise

        quantise(job, path)
        return
    save(model(job), job.about, path)


def model(job: Job) -> Any:
    """The ONNX model, any batch; in fp16 it takes and gives float32 and computes in float16."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401  torch.onnx needs it
    except ImportError as error:
        raise needs(str(error.name)) from None
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}
    with quiet("torch.onnx"):  # of its own parts: the comparison of answers judges the file
        program = torch.onnx.export(
            job.program(half.get(job.about.precision, torch.float32)),
            dynamo=True,
            opset_version=OPSET,
            input_names=["images"],
            output_names=[ANSWER[job.about.input]],
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    name_layers(proto)
    return proto


def name_layers(proto: Any) -> None:
    """Call each node that computes a layer by the layer's path, "net.head.fc"; later calls get "/2", "/3", ..."""
    calls = Counter[str]()
    for node in proto.graph.node:
        path = next((name.removesuffix(".weight") for name in node.input[1:2] if name.endswith(".weight")), "")
        if path.startswith("net."):
            calls[path] += 1
            node.name = path if calls[path] == 1 else f"{path}/{calls[path]}"


def save(proto: Any, about: About, path: Path) -> None:
    import onnx

    onnx.helper.set_model_props(proto, about.strings())
    onnx.save(proto, path)


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
