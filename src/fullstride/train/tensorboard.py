"""How does a run look in TensorBoard? Its log rows become scalars over the epochs."""

import platform
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PREFIX = "events.out.tfevents"  # of the files that TensorBoard reads


def open_board(folder: Path) -> Callable[[Mapping[str, Any]], None]:
    """A function that writes a log row as scalars. The first row replaces earlier logs in `folder`.

    Rows are written by the thread that calls, because a writer with a thread of its own prints a
    traceback where the disk is full. Raises ValueError if a file has the folder's name, or if the
    package tensorboard is not installed.
    """
    if find_spec("tensorboard") is None:
        raise ValueError(
            "--tensorboard needs tensorboard: pip install 'fullstride[log]', or leave it out"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: move it, or leave --tensorboard out")
    log = folder / f"{PREFIX}.{time.time():.0f}.{platform.node()}"
    is_new = True

    def write(row: Mapping[str, Any]) -> None:
        nonlocal is_new
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore  # it is generated
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import scalar

        events = [
            Event(step=row["epoch"], wall_time=time.time(), summary=scalar(name, value))
            for name, value in row.items()
            if isinstance(value, float)
        ]
        if is_new:
            folder.mkdir(exist_ok=True)
            for each in folder.glob(f"{PREFIX}.*"):
                each.unlink()
            events.insert(0, Event(file_version="brain.Event:2", wall_time=time.time()))
            is_new = False
        try:
            with log.open("ab") as file:
                records = RecordWriter(file)
                for event in events:
                    records.write(event.SerializeToString())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(log)) from None

    return write
