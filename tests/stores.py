"""A tiny classifier, and stores of its predictions."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from fullstride import cli
from fullstride.data.prediction_store import StoreKey, create_or_resume, write_part
from fullstride.deploy.offline import OfflineSettings
from fullstride.nets.bundle import Bundle
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing

PIXELS = Preprocessing(resolution=16, mean=(0.5,), std=(0.5,))


def tiny(seed: int = 0) -> Bundle:
    torch.manual_seed(seed)
    spec = replace(SPECS["genet_tiny"], in_channels=1, classes=10)
    net = Network(spec)
    with torch.no_grad():  # probabilities that are neither 0 nor 1
        net.get_parameter(f"{net.classifier}.weight").mul_(0.001)
    return Bundle(net.eval(), name="tiny", classes=tuple(map(str, range(10))), preprocessing=PIXELS)


def settings_of(settings):
    return OfflineSettings(**{"part_images": 5, "batch": 4, **settings})


def refused(words: str, capsys) -> str:
    assert cli.run(words.split()) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    return error


def store_of(out: Path, classes: np.ndarray, values: np.ndarray, names: int = 10, **changes):
    """A store of these arrays (N, k), as the engine would write it."""
    count = len(classes)
    fields = dict(kind="pseudo_labels", model="m", fingerprint="f", task="classify", where="digits")
    fields |= dict(classes=tuple(f"c{index}" for index in range(names)), has_class_names=True)
    fields |= dict(data="d", images=count, part_images=count, arguments={})
    key = StoreKey(**{**fields, **changes})
    create_or_resume(out, key)
    columns = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])
        for name, array in (("classes", classes), ("probabilities", values))
    }
    table = pa.table({"path": [str(index) for index in range(count)], **columns})
    write_part(out, 0, table, key)
    return out
