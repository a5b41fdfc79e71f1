"""What does a format of files have to say and do?"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fullstride.deploy.exported import Kind, Shipped
from fullstride.deploy.job import Job


@dataclass(frozen=True)
class Format:
    name: str
    suffix: str  # of its files; "" where it is a folder
    precisions: tuple[Kind, ...]
    write: Callable[[Job, Path], None]
    open: Callable[[Path, int], Shipped]  # with a number of threads; raises ValueError in one line
    recognises: Callable[[Path], bool]  # by a look at names and first bytes
    missing: Callable[[], str]  # why it cannot be written or run here, in one line; "" where it can
    runs_code: bool = False  # loading a file may run what its author put in


def needs(package: str, extra: str = "export") -> ValueError:
    return ValueError(f"{package} is not installed: pip install 'fullstride[{extra}]'")


def whole_file(path: Path, error: Exception) -> ValueError:
    """What is said of a file that its runtime cannot read."""
    return ValueError(
        f"{path} cannot be read, it may be cut short or come from another program: {last_line(error)}"
    )


def last_line(error: Exception) -> str:
    """What an engine or a compiler says went wrong, which may be pages, in short."""
    lines = str(error).split("\n")
    return next(
        (line.strip()[:200] for line in reversed(lines) if line.strip()), type(error).__name__
    )


@contextmanager
def quiet(library: str) -> Iterator[None]:
    """Without a library's warnings and what it logs below what stops a program; "" is what goes to the root logger."""
    logger, handler = logging.getLogger(library), logging.NullHandler()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    logger.addHandler(handler)  # a root logger without one would be given one for good
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
