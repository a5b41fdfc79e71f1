"""Reports to the user of a command: progress bars, lines, and one line for an error."""

import errno
import os
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TextIO, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fullstride.io.writing import DISK_FULL

MAX_SKIPPED_SHOWN = 10
REPORTED_ELSEWHERE = "reported by another process"  # a note on an error
HELP_INDENT = 8 * " "  # before the help of an argument in the parser's errors
UNLIMITED_WIDTH = 100_000  # characters, where the output is not a terminal
# Unicode categories of characters that move the cursor, colour, reverse or hide text, or are half
# of one: control, format (with bidirectional marks), surrogates, line and paragraph separators.
UNPRINTABLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_native_lock = threading.Lock()
JOINERS = "\u200c\u200d"  # some scripts and emoji need them


def printable(text: object) -> str:
    """Escape every character of `text` that a terminal cannot show within a line.

    For names of files and classes. `Output` does the same with all that is printed, except line
    ends, which it cannot tell from the program's own.
    """
    return "".join(
        letter
        if letter in JOINERS or unicodedata.category(letter) not in UNPRINTABLE
        else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in str(text)
    )


class LostOutputError(OSError):
    """Standard output cannot be written to, and the command has no other result."""


class Output:
    """Standard output, which may lose its reader.

    Once writing fails, because the reader has closed a pipe, the stream is closed or the disk is
    full, all output is dropped. If the output is `optional`, the work continues; otherwise a
    LostOutputError ends it.
    """

    def __init__(self, stream: TextIO | None):
        self.stream, self.optional, self.lost = stream, False, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def isatty(self) -> bool:
        return self.stream is not None and not self.lost and self.stream.isatty()

    def write(self, text: str) -> int:
        self.write_as_is("".join(x if x in "\n\t" else printable(x) for x in text))
        return len(text)

    def write_as_is(self, text: str) -> None:
        self._try("write", text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, method: str, *arguments: str) -> None:
        if self.lost:
            return
        try:
            if self.stream is None:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            getattr(self.stream, method)(*arguments)
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.lost = True
        drop(self.stream)
        if not self.optional:
            raise LostOutputError(error.errno, error.strerror, "standard output") from None
        print_error(f"standard output is lost ({error.strerror}); the work goes on without it")


class _Errors(Output):
    """The standard error stream, without errors of its own: nobody would read them."""

    def write(self, text: str) -> int:
        self.write_as_is(text)
        return len(text)

    def _lose(self, error: OSError) -> None:
        self.lost = True
        drop(self.stream)


def drop(stream: TextIO | None) -> None:
    """Redirect a stream to the null device, so that flushing its buffer at exit does not fail."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, cast(TextIO, stream).fileno())
        os.close(null)


class _Styled:
    """The stream that rich writes to: rich's escape codes must reach the terminal."""

    def __init__(self, output: Output):
        self.output, self.write = output, output.write_as_is

    def __getattr__(self, name: str) -> Any:
        return getattr(self.output, name)


@contextmanager
def standard_streams() -> Iterator[Output]:
    """Replace the standard streams in the body; yields its standard output."""
    streams = sys.stdin, sys.stdout, sys.stderr
    before = [getattr(stream, "errors", None) for stream in streams]
    for stream, errors in zip(streams, ("surrogateescape", *2 * ["backslashreplace"]), strict=True):
        if hasattr(stream, "reconfigure"):  # names of files are not always UTF-8
            cast(Any, stream).reconfigure(errors=errors)
    output = Output(sys.stdout)
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, _Errors(sys.stderr))
    try:
        yield output
        output.flush()
    finally:
        sys.stderr.flush()
        _, sys.stdout, sys.stderr = streams
        for stream, errors in zip(streams, before, strict=True):
            if hasattr(stream, "reconfigure") and not stream.closed:
                cast(Any, stream).reconfigure(errors=errors)


@contextmanager
def without_native_lines() -> Iterator[None]:
    """Drop what C libraries write to the standard error stream while the body runs.

    The descriptor belongs to the whole process, so one thread at a time is in a body.
    """
    with _native_lock:
        try:
            before, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        except OSError:  # no descriptor is left, or there is no such stream
            yield
            return
        try:
            os.dup2(null, 2)
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            os.close(null)


def open_closed_descriptors() -> None:
    """Open the null device as each standard stream that is closed.

    Else the next file that is opened, a checkpoint for example, would get the number of a standard
    stream, and what libraries print would be written to it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
    if sys.stdin is None:  # so that a closed input has no lines
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  of the whole process


def console() -> Console:
    """A rich console; of unlimited width for a file or a pipe, so that a table row is one line."""
    width = None if sys.stdout.isatty() else UNLIMITED_WIDTH
    file = cast(TextIO, _Styled(sys.stdout)) if isinstance(sys.stdout, Output) else None
    return Console(file=file, width=width, highlight=False)


def print_parts(parts: Iterable[str | Table]) -> None:
    """Print lines and tables without buffering."""
    for part in parts:
        if isinstance(part, str):
            print(printable(part), flush=True)
        else:
            console().print(part)


class Bar:
    """Progress within an epoch, on a terminal only; `shown` is True in one process.

    The bar disappears after an epoch, since other libraries draw bars of their own.
    """

    def __init__(self, shown: bool = True):
        self.shown = shown

    def __enter__(self) -> "Bar":
        title, counts = TextColumn("{task.description}"), MofNCompleteColumn()
        columns = title, BarColumn(), counts, TimeRemainingColumn()
        hidden = not (self.shown and sys.stdout.isatty())
        self.progress = Progress(*columns, console=console(), transient=True, disable=hidden)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.progress.disable:  # else older versions of rich print a line
            self.progress.stop()

    def print(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        if not self.shown:
            return
        if self.progress.disable:
            print(line, flush=True)
        else:
            self.progress.console.print(printable(line), markup=False)

    def watch(self, batches: Any) -> "CountedBatches":
        """The same batches, counted on the bar as they pass."""
        return CountedBatches(batches, self.progress)


T = TypeVar("T")
BAR_AFTER_S = 2.0  # a user waits this long without asking why


def counted(items: Iterable[T], what: str) -> Iterator[T]:
    """The items, called `what`, counted on a bar from two seconds on, on a terminal only."""
    if not sys.stdout.isatty() or os.environ.get("RANK", "0") != "0":
        yield from items
        return
    begin, step = time.monotonic(), 256
    total = len(items) if isinstance(items, Sized) else None
    with Bar() as bar:
        task = None
        for number, item in enumerate(items):
            if number % step == 0 and time.monotonic() > begin + BAR_AFTER_S:
                if task is None:
                    task = bar.progress.add_task(what, total=total)
                    bar.progress.start()
                bar.progress.update(task, completed=number)
            yield item


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
            if not self.progress.disable:
                self.progress.stop()
            self.progress.remove_task(task)


def report_skipped(skipped: Mapping[str, str]) -> None:
    """Print which images could not be read, and why, on the standard error stream."""
    if not skipped:
        return
    items = list(skipped.items())[:MAX_SKIPPED_SHOWN]
    shown = "; ".join(f"{printable(name)}: {reason}" for name, reason in items)
    more = f"; and {len(skipped) - len(items)} more" if len(skipped) > len(items) else ""
    print_error(f"skipped {len(skipped)} unreadable: {shown}{more}")


def report_ignored(ignored: Mapping[str, int], notes: Iterable[str] = ()) -> None:
    """Print how many files of a data set are not used, by reason, on the standard error stream.

    `notes` are lines on its splits.
    """
    if ignored:
        reasons = "; ".join(with_reason(count, why) for why, count in ignored.items())
        print_error(f"not used: {reasons}")
    for note in notes:
        print_error(note)


def print_error(message: object, code: int = 0) -> int:
    """Print an error or a warning in one line on the standard error stream, and return `code`.

    Under torchrun the first process prints, unless a note on the error says that it occurred in
    another one.
    """
    rank = os.environ.get("RANK", "0")
    notes = getattr(message, "__notes__", [])
    if REPORTED_ELSEWHERE not in notes and (notes or rank == "0"):
        prefix = "" if rank == "0" else f"rank {rank}: "
        print(f"fullstride: {prefix}{printable(one_line(message))}", file=sys.stderr)
    return code


@cache
def print_note(message: str) -> None:
    """Print what was assumed, in one line on the standard error stream, once in a process."""
    print_error(message)


def count_of(number: int, noun: str, verb: str = "") -> str:
    """2, "class", "have" -> 2 classes have; 1 -> 1 class has. Without `verb`: 2 classes."""
    if number != 1:
        is_es = noun.endswith(("s", "x", "ch")) and not noun.endswith("epoch")
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}{'es' if is_es else 's'}"
    return f"{number:,} {noun}{f' {verb_of(number, verb)}' if verb else ''}"


IRREGULAR = {"are": "is", "were": "was", "have": "has"}


def first_names(names: Sequence[str], most: int = 3) -> str:
    """The first names, and ", ..." if there are more."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def verb_of(number: int, verb: str) -> str:
    """The form of a verb, given in the plural, for a number of things: 1, "show" -> shows."""
    if number != 1:
        return verb
    return IRREGULAR.get(verb, f"{verb}{'es' if verb.endswith(('ch', 'sh', 'o')) else 's'}")


def with_reason(number: int, why: str) -> str:
    """1, "files without a suffix" -> 1 file without a suffix; other first words stay."""
    if number == 1:
        why = re.sub(r"^(file|folder|image|video)s\b", r"\1", why)
    return f"{number:,} {why}"


def with_verbs(text: str, number: int) -> str:
    """`text` with each verb in braces in its form: 1, "{have} no area" -> has no area."""
    return re.sub(r"\{(\w+)\}", lambda match: verb_of(number, match[1]), text)


def without_frame(text: str) -> str:
    """The parser's error message in one line, with the flags that it suggests.

    The frame, the title, the help of arguments and the reference to the help are left out.
    """
    sections: list[list[str]] = [[]]
    for line in text.splitlines()[1:]:
        content = line.strip("╭╮╰╯│\n")
        if not content.strip(" ─-"):
            sections.append([])
        elif not content.startswith(HELP_INDENT):
            sections[-1].append(content.strip())
    message, *others = [section for section in sections if section]
    parts = [" ".join(message).removesuffix(".")]
    for section in others:
        if section[0].startswith("Unrecognized"):
            parts.append(" ".join(section))
        if section[0].startswith(("Perhaps you meant", "Arguments similar")):
            flags = [line.split()[0].rstrip(",") for line in section if line.startswith("--")]
            parts.append(f"did you mean {' or '.join(flags)}?")
    return re.sub(r"\. Expected one of \((.*?)\)", in_order, "; ".join(parts))


def in_order(choices: re.Match[str]) -> str:
    """The values of a choice, sorted: the parser has a set, with None for a missing flag."""
    names = sorted(name.strip(" '") for name in choices[1].split(","))
    return f": choose from {', '.join(name for name in names if name and name != 'None')}"


def reason(error: BaseException, name: str = "") -> str:
    """Why a file cannot be read, in one line; "it" in place of its `name` in front."""
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    if name and text.startswith(f"{name} "):  # from `open_regular`
        text = f"it{text.removeprefix(name)}"
    return (text or type(error).__name__).rstrip(".")


def one_line(message: object) -> str:
    if isinstance(message, OSError) and message.strerror:
        where = f": {message.filename}" if message.filename else ""
        hint = "; make room, then give the same command again" if message.errno in DISK_FULL else ""
        return f"{message.strerror}{where}{hint}"
    return " ".join(str(message).split())
