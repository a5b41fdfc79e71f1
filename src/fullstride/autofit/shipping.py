"""Which file ships? The finalists in every format and precision, measured last."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fullstride.deploy.exported import Precision


@dataclass(frozen=True, kw_only=True)
class ShippedFile:
    """A finalist in one format and precision."""

    candidate: str
    path: str  # relative to the folder of the fit; "" where it was not written
    format: str
    precision: Precision
    ms: float | None  # per image, measured at the end in turn with all others, or estimated
    minival: Mapping[str, float]  # scores of the file on the minival
    within: bool  # whether it stays in the budget
    failure: str = ""  # why it was not written, in one line


@dataclass(frozen=True, kw_only=True)
class Shipment:
    """All files of the finalists, and the one that ships with its test scores."""

    files: tuple[ShippedFile, ...]
    best: int  # index in `files`
    test: Mapping[str, Any]  # scores of the shipped file on the test images; empty without a test
    test_split: str  # "test"; "" where the data have none
    bundle: str  # folder of the network that it was exported from, relative to that of the fit
    environment: Mapping[str, Any]
