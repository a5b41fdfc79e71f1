"""How does a command speak to a person? A bar on a terminal, plain lines elsewhere, one line for what goes wrong."""

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

NAMED_SKIPPED = 10
TOLD = "told by another process"


def console() -> Console:
    """Wide enough for a table where the output is no terminal, so that a file or a pipe gets whole lines."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


class Bar:
    """Progress within an epoch, where there is a terminal to show it. Of several processes one is `shown`."""

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
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def say(self, line: str) -> None:
        if not self.shown:
            return
        if self.progress.disable:
            print(line, flush=True)
        else:
            self.progress.console.print(line, markup=False)

    def watch(self, batches: Any) -> "Watched":
        return Watched(batches, self.progress)


class Watched:
    """The same batches, counted on a bar as they pass."""

    def __init__(self, batches: Any, progress: Progress):
        self.batches, self.progress = batches, progress

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        task = self.progress.add_task(f"epoch {number + 1}", total=len(self), completed=start)
        for batch in self.batches.epoch(number, start):
            yield batch
            self.progress.advance(task)
        self.progress.remove_task(task)


def report_skipped(skipped: Mapping[str, str]) -> None:
    """Which pictures could not be read, at the end, on the standard error stream."""
    if not skipped:
        return
    named = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:NAMED_SKIPPED])
    more = f"; and {len(skipped) - NAMED_SKIPPED} more" if len(skipped) > NAMED_SKIPPED else ""
    complain(f"skipped {len(skipped)} unreadable: {named}{more}", 0)


def complain(what: object, code: int) -> int:
    """Say it in one line and hand back the exit code.

    Of several processes that torchrun started, the first speaks, unless a note on an error says that it was another's.
    """
    rank = os.environ.get("RANK", "0")
    notes = getattr(what, "__notes__", [])
    if TOLD not in notes and (notes or rank == "0"):
        print(
            f"fullstride: {'' if rank == '0' else f'rank {rank}: '}{one_line(what)}",
            file=sys.stderr,
        )
    return code


def unboxed(drawn: str) -> str:
    """What the parser says in its box, without the frame, the title and the pointer to the help."""
    lines = [line.strip(" ╭╮╰╯│─\n") for line in drawn.splitlines()]
    told = [
        line for line in lines[1:] if line.strip("-") and not line.startswith("For full helptext")
    ]
    return " ".join(told).replace("Error parsing __tyro-dummy-inner__.recipe: ", "")


def one_line(what: object) -> str:
    if isinstance(what, OSError) and what.strerror:
        return f"{what.strerror}: {what.filename}" if what.filename else what.strerror
    return " ".join(str(what).split())
