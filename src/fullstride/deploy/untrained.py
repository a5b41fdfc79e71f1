"""How long would a network take as a file? It is written untrained: weights do not change the time.

Nothing is compared with PyTorch, as outputs of random weights say little: a file is only timed.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fullstride.deploy.export import write
from fullstride.deploy.exported import (
    ExportedModel,
    InputKind,
    Metadata,
    Precision,
    one_input,
)
from fullstride.deploy.fold_batch_norm import fold_batch_norm
from fullstride.deploy.formats import FORMATS, onnx, open_file
from fullstride.deploy.job import ExportJob
from fullstride.nets.backbone import Backbone
from fullstride.nets.preprocessing import Preprocessing
from fullstride.train.running_statistics import BATCH_NORM

IMAGES = 2  # of the example, which int8 takes its ranges from
STATISTICS_SHARE = 0.99  # of the variance of these images; the rest is 1, as channels may be zero


@dataclass
class UntrainedFiles:
    """Writes a network in evaluation mode to files of all formats."""

    job: ExportJob
    has_own_graphs: bool = True  # False: those of the network at another resolution

    def at(self, name: str, pre: Preprocessing) -> "UntrainedFiles":
        """The same network at another resolution; it is not traced again where its graph fits."""
        job, graphs = self.job, {}
        if job.metadata.input_kind != "pictures":  # whose graphs have the resolution in constants
            sides = replace(job, any_size=True).dynamic_sides
            graphs = {
                key: onnx.at_resolution(model, pre.resolution, sides)
                for key, model in job.graphs.items()
            }
        images = example(pre, job.metadata.input_kind)
        metadata = replace(job.metadata, name=name, preprocessing=pre)
        changes = dict(metadata=metadata, example=images, calibration=(images,), graphs=graphs)
        return UntrainedFiles(replace(job, **changes), has_own_graphs=not graphs)

    def open(
        self,
        format: str,
        precision: Precision,
        folder: Path,
        threads: int | None = None,
        batch: int = IMAGES,
    ) -> ExportedModel:
        """Write a file in `folder`, open it and run it on a batch.

        Raises ValueError, in one line, where that fails. A graph of another resolution that does
        not fit is replaced.
        """
        try:
            return self.written(format, precision, folder, threads, batch)
        except ValueError:
            if self.has_own_graphs:
                raise
            self.has_own_graphs, self.job = True, replace(self.job, graphs={})
            return self.written(format, precision, folder, threads, batch)

    def written(
        self, format: str, precision: Precision, folder: Path, threads: int | None, batch: int
    ) -> ExportedModel:
        kind = FORMATS[format]
        attempts = len([*folder.iterdir()])
        path = folder / f"{attempts}_{format}_{precision}{kind.suffix}"
        job = replace(self.job, metadata=replace(self.job.metadata, precision=precision))
        write(kind, job, path)
        model = open_file(path, threads=threads, trust=True)
        model.run(np.resize(job.example, (batch, *job.example.shape[1:])))
        return model


def untrained_files(
    net: Backbone, name: str, pre: Preprocessing, classes: int, input_kind: InputKind
) -> UntrainedFiles:
    """The files of a network with fresh weights, whose batch statistics are changed.

    `name` is in their metadata, `pre` has the resolution and the channels of the network's input,
    and `classes` is the number of its outputs.
    """
    with_typical_statistics(net, torch.randn(IMAGES, *one_input(pre, "normalised")))
    metadata = Metadata(
        name=name,
        classes=tuple(map(str, range(classes))),
        preprocessing=pre,
        scores={},
        input_kind=input_kind,
    )
    images = example(pre, input_kind)
    return UntrainedFiles(ExportJob(fold_batch_norm(net), metadata, images, calibration=(images,)))


@torch.no_grad()
def with_typical_statistics(net: nn.Module, images: Tensor) -> None:
    """Let batch norms normalise, as in a trained network, and branches add to their shortcuts.

    Else activations may fade to numbers so small that processors take many times as long.
    """
    for norm in net.modules():
        if isinstance(norm, BATCH_NORM):
            norm.momentum = STATISTICS_SHARE
            if norm.affine:
                nn.init.ones_(norm.weight)
    net.train()(images)
    net.eval()


def example(pre: Preprocessing, input_kind: InputKind) -> np.ndarray:
    """Random inputs of a file."""
    random, shape = np.random.default_rng(0), (IMAGES, *one_input(pre, input_kind))
    if input_kind == "normalised":
        return random.standard_normal(shape, np.float32)
    return random.integers(256, size=shape, dtype=np.uint8)
