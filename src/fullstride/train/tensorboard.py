"""How does a run look in TensorBoard? As its log says, drawn over the epochs."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fullstride.storage import remove


def open_board(folder: Path) -> Callable[[Mapping[str, Any]], None]:
    """A function that takes rows of the log. What `folder` held before is written anew with the first row.

    Raises ValueError where the package is missing.
    """
    if find_spec("tensorboard") is None:
        raise ValueError(
            "--tensorboard needs tensorboard: pip install 'fullstride[log]', or leave it out"
        )
    writers = []

    def write(row: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not writers:
            remove(folder)
            writers.append(SummaryWriter(str(folder)))
        for name, value in row.items():
            if isinstance(value, float):
                writers[0].add_scalar(name, value, row["epoch"])
        writers[0].flush()

    return write
