"""How is a network said in ONNX? As a graph whose nodes have the names of the network's layers."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fullstride.deploy.exported import About
from fullstride.deploy.formats.base import needs, quiet
from fullstride.deploy.job import Job

OPSET = 20
ANSWER = {"normalised": "logits", "pixels": "probabilities", "pictures": "probabilities"}


def model(job: Job) -> Any:
    """The ONNX model, any batch; in fp16 it takes and gives float32 and computes in float16."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401  torch.onnx needs it
    except ImportError as error:
        raise needs(str(error.name)) from None
    with quiet("torch.onnx"):  # of its own parts: the comparison of answers judges the file
        program = torch.onnx.export(
            job.program(torch.float16 if job.about.precision == "fp16" else torch.float32),
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
        path = next(
            (name.removesuffix(".weight") for name in node.input[1:2] if name.endswith(".weight")),
            "",
        )
        if path.startswith("net."):
            calls[path] += 1
            node.name = path if calls[path] == 1 else f"{path}/{calls[path]}"


def save(proto: Any, about: About, path: Path) -> None:
    import onnx

    onnx.helper.set_model_props(proto, about.strings())
    onnx.save(proto, path)
