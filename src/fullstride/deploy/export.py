"""How does a network leave PyTorch? As ONNX, compared with the original on images before it is kept."""

import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fullstride.deploy.fuse import folded
from fullstride.deploy.predict import network_input
from fullstride.nets.bundle import Bundle
from fullstride.nets.disk import replacing

OPSET = 20
TOLERANCE = 1e-4  # largest difference of a logit / largest logit, in float32


@dataclass(frozen=True)
class Check:
    """How the exported file's logits compare with PyTorch's on the same images."""

    images: int
    relative_difference: float  # largest absolute difference / largest absolute logit
    same_top1: int  # images on which both name the same class


def export_onnx(bundle: Bundle, path: Path, pictures: Sequence[Image.Image]) -> Check:
    """Write `bundle` to `path` as ONNX with a dynamic batch: float32 (N, C, H, W) "images" -> (N, K) "logits".

    Batch norms are folded into convolutions; class names, preprocessing and scores are metadata. The file is written
    beside its place, run by ONNX Runtime on `pictures` and compared with the network as it is; raises ValueError and
    keeps what stood there before if a logit differs by more than `TOLERANCE`.
    """
    onnx, _ = exporters()
    x = network_input(bundle, pictures)
    net = bundle.net.eval().cpu()
    with torch.inference_mode():
        expected = net(x).numpy()
    with replacing(path) as beside:
        with warnings.catch_warnings(), quiet("torch.onnx"):
            warnings.simplefilter("ignore")  # of the exporter about its own parts; the check below judges the file
            program = torch.onnx.export(
                folded(net),
                (torch.zeros_like(x[:2] if len(x) > 1 else x.repeat(2, 1, 1, 1)),),
                dynamo=True,
                opset_version=OPSET,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False,
            )
        assert program is not None
        model = program.model_proto
        onnx.helper.set_model_props(model, metadata(bundle))
        onnx.save(model, beside)
        check = compare(expected, run_onnx(beside, x.numpy()))
        if check.relative_difference > TOLERANCE:
            raise ValueError(
                f"{path} was not written: its logits differ from PyTorch's by {check.relative_difference:.1e} of the "
                f"largest, {TOLERANCE:g} is allowed (on {check.images} images)"
            )
    return check


def run_onnx(path: Path, x: np.ndarray) -> np.ndarray:
    """Logits (N, K) of ONNX Runtime on the CPU."""
    _, onnxruntime = exporters()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(["logits"], {"images": x})[0]


def compare(expected: np.ndarray, found: np.ndarray) -> Check:
    return Check(
        images=len(expected),
        relative_difference=float(np.abs(found - expected).max() / np.abs(expected).max()),
        same_top1=int((found.argmax(1) == expected.argmax(1)).sum()),
    )


def metadata(bundle: Bundle) -> dict[str, str]:
    about = {
        "name": bundle.name,
        "source": bundle.source,
        "classes": list(bundle.classes),
        "preprocessing": asdict(bundle.preprocessing),
        "scores": dict(bundle.scores),
    }
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}


def exporters():
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  torch.onnx needs it
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'fullstride[export]'") from None
    return onnx, onnxruntime


class quiet:  # noqa: N801  reads as a verb
    """Keep a library's log below errors for a while."""

    def __init__(self, name: str):
        self.logger = logging.getLogger(name)

    def __enter__(self) -> None:
        self.level = self.logger.level
        self.logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self.logger.setLevel(self.level)
