"""What leaves PyTorch? The folded network, and if asked for also what stands before and behind it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fullstride.data.transforms.crop import to_input
from fullstride.deploy.exported import About, Input
from fullstride.deploy.resize import test_views
from fullstride.nets.preprocessing import Preprocessing

Backend = Literal["onnx", "openvino", "tensorrt"]
STRIDE = 32  # pixels: sides of images of any size are multiples of it, at least two


@dataclass(frozen=True)
class Job:
    """What a format has to write."""

    net: (
        nn.Module
    )  # float32, in evaluation mode, batch norms folded: (N, C, H, W) normalised -> (N, K) logits
    about: About
    inputs: (
        np.ndarray
    )  # some real ones, of what the file takes; their sizes are the file's but for the batch
    any_size: bool = False  # sides may be other multiples of STRIDE
    backend: Backend = "onnx"  # of triton-server
    calibration: Sequence[
        np.ndarray
    ] = ()  # for int8: batches of what the file will see, of the user's own images

    def module(self, dtype: torch.dtype = torch.float32) -> "Outgoing":
        """What is to be written, computing in `dtype`."""
        net = copy.deepcopy(self.net).to(self.about.device, dtype)
        return Outgoing(net, self.about.preprocessing, self.about.input, dtype).eval()

    def program(
        self, dtype: torch.dtype = torch.float32, batch: int | None = None
    ) -> torch.export.ExportedProgram:
        """The same as a graph, for any batch where none is given."""
        # Of any, 1 image would be taken for a constant. In a fresh array strides are those of other programs' arrays.
        images = np.resize(self.inputs, (batch or 2, *self.inputs.shape[1:]))
        sizes: dict[int, Any] = {} if batch else {0: torch.export.Dim("batch")}
        if self.about.input == "pictures":
            sizes |= {
                1: torch.export.Dim("height", max=16_384),
                2: torch.export.Dim("width", max=16_384),
            }
        elif self.any_size:
            first = 2 if self.about.input == "normalised" else 1
            sides = (
                STRIDE * torch.export.Dim(name, min=2, max=512) for name in ("rows", "columns")
            )
            sizes |= dict(enumerate(sides, first))
        with torch.no_grad():
            example = torch.from_numpy(images).to(self.about.device)
            return torch.export.export(self.module(dtype), (example,), dynamic_shapes=(sizes,))


class Outgoing(nn.Module):
    """A network as it is in a file: see `About.input` for what goes in and comes out."""

    def __init__(self, net: nn.Module, pre: Preprocessing, takes: Input, dtype: torch.dtype):
        super().__init__()
        self.net, self.pre, self.takes, self.dtype = net, pre, takes, dtype

    def forward(self, images: Tensor) -> Tensor:
        x = images
        if self.takes == "pictures":
            x = test_views(x, self.pre)
        if self.takes != "normalised":
            x = to_input(x, self.pre)
        logits = self.net(x.to(self.dtype)).float()
        return logits if self.takes == "normalised" else logits.softmax(1)
