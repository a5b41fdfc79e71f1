"""Stores times in a folder named after their target, and refuses times of another machine.

A fit stores them in its own folder, other commands in the user's cache folder.
"""

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from fullstride.io.records import Record, deletable
from fullstride.io.writing import user_cache
from fullstride.measure.protocols import Measurement, read_measurements, save_measurements
from fullstride.targets.target import Machine, Target

MACHINE_FILE = "target.json"
MACHINE = Record(Machine, "the machine that files were measured on", ("processor", "runtimes"))


def check_same(target: Target, folder: Path, advice: str = "use another --out") -> None:
    """Raise ValueError, in one line, if `folder` has times of another machine."""
    identity, before = target.describe().identity, MACHINE.find(folder / MACHINE_FILE)
    if before is not None and before != identity:
        raise ValueError(
            f"{target.where} is {identity}, and was {before} when {folder} was measured: {advice}"
        )


def save_machine(target: Target, folder: Path) -> None:
    MACHINE.save(folder / MACHINE_FILE, target.describe().identity)


class StoredTimes:
    """Earlier measurements on a target, with a file per network, size, batch and form."""

    def __init__(self, target: Target):
        self.target = target
        self.folder = user_cache() / "targets" / target.name

    @cached_property
    def checked(self) -> Path:
        """The folder. Raises ValueError, in one line, if it has times of another machine."""
        check_same(self.target, self.folder, "remove it to measure anew")
        if not (self.folder / MACHINE_FILE).exists():
            save_machine(self.target, self.folder)
        return self.folder

    def path(self, network: str, resolution: int, batch: int, format: str, precision: str) -> Path:
        name = re.sub(r"[^\w.-]", "+", network)
        return self.checked / f"{name}-{resolution}-{batch}-{format}-{precision}.json"

    def find(self, *key: str | int) -> Measurement | None:
        """Find the measurement of a network, resolution, batch, format and precision, if stored.

        Raises ValueError for a file with other content.
        """
        path = self.path(*key)  # pyright: ignore[reportArgumentType]
        if not path.exists():
            return None
        with deletable():
            (row,) = read_measurements(path)
        return row

    def save(self, network: str, format: str, precision: str, row: Measurement) -> Measurement:
        """Store a measurement by the online protocol."""
        own = replace(row, name=network)
        path = self.path(network, row.protocol.resolution, row.protocol.batch, format, precision)
        save_measurements([own], path)
        return own
