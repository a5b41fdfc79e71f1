"""What is exported? The folded network, and its preprocessing and softmax if requested."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fullstride.data.transforms.crop import to_input
from fullstride.deploy.exported import Metadata
from fullstride.deploy.resize import resize_and_crop
from fullstride.tasks import task_of

Backend = Literal["onnx", "openvino", "tensorrt"]
STRIDE = 32  # pixels: sides of images of any size are multiples of it, at least two
# Sides of the images that a file for any size is traced with: maps of stride 128 then have several
# pixels, and a graph that is traced with maps of one has that size as a constant.
TRACED_SIDES = (5 * STRIDE, 9 * STRIDE)
MAX_SIDE = 16_384  # pixels of a picture that the file resizes


@dataclass(frozen=True)
class ExportJob:
    """The input of a format's writer."""

    # float32, in evaluation mode, batch norms folded: normalised images (N, C, H, W), or clips
    # (N, C, T, H, W) -> (N, K) logits
    net: nn.Module
    metadata: Metadata
    example: np.ndarray  # real inputs of the file; its shapes are theirs, except for the batch
    any_size: bool = False  # whether sides may be other multiples of STRIDE
    backend: Backend = "onnx"  # of triton-server
    calibration: Sequence[np.ndarray] = ()  # for int8: batches of real inputs of the file
    # ONNX graphs of `net` by type and `any_size`, shared by the files that are made of them
    graphs: dict[tuple[torch.dtype, bool], Any] = field(default_factory=dict, compare=False)

    @property
    def dynamic_sides(self) -> tuple[int, ...]:
        """The dimensions of an image that may have other sizes than those of `example`.

        They are its height and its width.
        """
        if not self.any_size and self.metadata.input_kind != "pictures":
            return ()
        width = self.example.ndim - 2 if self.normalised else self.example.ndim - 3
        return (width - 1, width)

    @property
    def normalised(self) -> bool:
        return self.metadata.input_kind == "normalised"

    @property
    def output_name(self) -> str:
        """What the file calls its outputs."""
        raw, activated = task_of(self.metadata).output_names
        return raw if self.normalised else activated

    def module(self, dtype: torch.dtype = torch.float32) -> "ExportWrapper":
        """The module to export, computing in `dtype`."""
        net = copy.deepcopy(self.net).to(self.metadata.device, dtype)
        return ExportWrapper(net, self.metadata, dtype).eval()

    def program(
        self, dtype: torch.dtype = torch.float32, batch: int | None = None
    ) -> torch.export.ExportedProgram:
        """The graph of `module`, for images in batches of `batch`; None: of any number."""
        # torch.export would take a batch of 1 for a constant. A fresh array has plain strides.
        shape = list(self.example.shape[1:])
        if self.any_size:
            for dim, side in zip(self.dynamic_sides, TRACED_SIDES, strict=True):
                shape[dim] = side
        images = np.resize(self.example, (batch or 2, *shape))
        sizes: dict[int, Any] = {} if batch else {0: torch.export.Dim("batch")}
        for dim, name in zip(self.dynamic_sides, ("height", "width"), strict=False):
            if self.metadata.input_kind == "pictures":
                sizes[dim + 1] = torch.export.Dim(name, max=MAX_SIDE)
            else:
                sizes[dim + 1] = STRIDE * torch.export.Dim(name, min=2, max=MAX_SIDE // STRIDE)
        with torch.no_grad():
            example = torch.from_numpy(images).to(self.metadata.device)
            return torch.export.export(self.module(dtype), (example,), dynamic_shapes=(sizes,))


class ExportWrapper(nn.Module):
    """A network with preprocessing and its task's activation, as `Metadata.input_kind` says."""

    def __init__(self, net: nn.Module, metadata: Metadata, dtype: torch.dtype):
        super().__init__()
        self.net, self.pre, self.dtype = net, metadata.preprocessing, dtype
        self.input_kind = metadata.input_kind
        self.task = task_of(metadata)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        if self.input_kind == "pictures":
            x = resize_and_crop(x, self.pre)
        if self.input_kind != "normalised":
            x = to_input(x, self.pre)
        outputs = self.net(x.to(self.dtype)).float()
        return outputs if self.input_kind == "normalised" else self.task.activate(outputs)
