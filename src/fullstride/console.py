"""How does a command report to its user? Progress bars, lines, and one line for an error."""

import os
import sys
from collections.abc import Generator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

MAX_SKIPPED_SHOWN = 10
REPORTED_ELSEWHERE = "reported by another process"  # a note on an error
DEFAULT_WIDTH = 160  # characters, where the output is not a terminal


def console() -> Console:
    """Wide enough for tables where the output is a file or a pipe: lines are not broken."""
    width = None if sys.stdout.isatty() else DEFAULT_WIDTH
    return Console(width=width, highlight=False)


class Bar:
    """Progress within an epoch, on a terminal only. Of several processes one is `shown`.

    It is on the screen during an epoch only, since other libraries draw bars of their own.
    """

    def __init__(self, shown: bool = True):
        self.shown = shown

    def __enter__(self) -> "Bar":
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        hidden = not (self.shown and sys.stdout.isatty())
        self.progress = Progress(*columns, console=console(), transient=True, disable=hidden)
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def print(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        if not self.shown:
            return
        if self.progress.disable:
            print(line, flush=True)
        else:
            self.progress.console.print(line, markup=False)

    def watch(self, batches: Any) -> "CountedBatches":
        """The same batches, counted on the bar as they pass."""
        return CountedBatches(batches, self.progress)


class CountedBatches:
    """Batches whose epochs advance a progress bar."""

    def __init__(self, batches: Any, progress: Progress):
        self.batches, self.progress = batches, progress

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, number: int, start: int = 0) -> Generator[Any, None, None]:
        task = self.progress.add_task(f"epoch {number + 1}", total=len(self), completed=start)
        self.progress.start()
        try:
            for batch in self.batches.epoch(number, start):
                yield batch
                self.progress.advance(task)
        finally:  # also where the caller takes only a part of the epoch
            self.progress.stop()
            self.progress.remove_task(task)


def report_skipped(skipped: Mapping[str, str]) -> None:
    """Print which images could not be read, and why, on the standard error stream."""
    if not skipped:
        return
    items = list(skipped.items())[:MAX_SKIPPED_SHOWN]
    shown = "; ".join(f"{name}: {reason}" for name, reason in items)
    more = f"; and {len(skipped) - len(items)} more" if len(skipped) > len(items) else ""
    print_error(f"skipped {len(skipped)} unreadable: {shown}{more}")


def print_error(message: object, code: int = 0) -> int:
    """Print an error or a warning in one line on the standard error stream, and return `code`.

    Of several processes that torchrun started, the first one prints, unless a note on the error
    says that it occurred in another.
    """
    rank = os.environ.get("RANK", "0")
    notes = getattr(message, "__notes__", [])
    if REPORTED_ELSEWHERE not in notes and (notes or rank == "0"):
        prefix = "" if rank == "0" else f"rank {rank}: "
        print(f"fullstride: {prefix}{one_line(message)}", file=sys.stderr)
    return code


def without_frame(text: str) -> str:
    """The parser's error message without its frame, title and reference to the help."""
    lines = [line.strip(" ╭╮╰╯│─\n") for line in text.splitlines()]
    message = [
        line for line in lines[1:] if line.strip("-") and not line.startswith("For full helptext")
    ]
    return " ".join(message).replace("Error parsing __tyro-dummy-inner__.recipe: ", "")


def one_line(message: object) -> str:
    if isinstance(message, OSError) and message.strerror:
        where = f": {message.filename}" if message.filename else ""
        return f"{message.strerror}{where}"
    return " ".join(str(message).split())
