"""How does a run look in TensorBoard? Its log rows become scalars over the epochs."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def open_board(folder: Path) -> Callable[[Mapping[str, Any]], None]:
    """A function that writes a log row as scalars. The first row replaces earlier logs in `folder`.

    Raises ValueError if the package tensorboard is not installed.
    """
    if find_spec("tensorboard") is None:
        raise ValueError(
            "--tensorboard needs tensorboard: pip install 'fullstride[log]', or leave it out"
        )
    writers = []

    def write(row: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not writers:
            for log in folder.glob("events.out.tfevents.*"):
                log.unlink()
            writers.append(SummaryWriter(str(folder)))
        for name, value in row.items():
            if isinstance(value, float):
                writers[0].add_scalar(name, value, row["epoch"])
        writers[0].flush()

    return write
