"""Defines a format: how its files are written, detected and opened."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fullstride.deploy.exported import ExportedModel, Precision
from fullstride.deploy.job import ExportJob
from fullstride.io.writing import open_regular


@dataclass(frozen=True)
class Format:
    name: str
    suffix: str  # of files; "" for a folder
    precisions: tuple[Precision, ...]
    write: Callable[[ExportJob, Path], None]
    open: Callable[[Path, int], ExportedModel]  # path, threads; ValueError in one line
    detect: Callable[[Path], bool]  # by names and first bytes
    missing: Callable[[], str]  # why it cannot be written or run here, in one line; "" if it can
    files: tuple[str, ...] = ()  # patterns of the paths in its folder
    runs_code: bool = False  # whether opening a file may run code in it
    one_size: bool = False  # whether files only take images at the network's resolution
    runs_on: str = ""  # the system of its runtime, where another program computes its files here


def missing_package(package: str, extra: str = "export") -> ValueError:
    """The error for a missing package; `extra`: fullstride's extra that has it, "" for none."""
    what = f"'fullstride[{extra}]'" if extra else package
    return ValueError(f"{package} is not installed: pip install {what}")


def absent(module: str, package: str, extra: str) -> str:
    """Why a package is unusable, "" if it is usable; without an import, which may take seconds."""
    return str(missing_package(package, extra)) if find_spec(module) is None else ""


def import_error(package: str, extra: str) -> str:
    """Why an import of a package fails, "" if it succeeds; a broken package is found too."""
    try:
        import_module(package)
    except ImportError as error:
        return str(missing_package(error.name or package, extra))
    return ""


def has_magic(path: Path, suffix: str, magic: tuple[slice, bytes]) -> bool:
    """Whether a file has a format's suffix, and the format's magic bytes at their place."""
    if path.suffix != suffix or not path.is_file():
        return False
    where, expected = magic
    with open_regular(path) as file:
        return file.read(where.stop)[where] == expected


def with_checked_sizes(model: ExportedModel) -> ExportedModel:
    """Check the sizes of a graph that does not state them, by a run on zeros. Raises ValueError."""
    kind = np.float32 if model.metadata.input_kind == "normalised" else np.uint8
    model.run(np.zeros((1, *model.metadata.input_shape()), kind))
    return model


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of a runtime that reads a file, of many types, into a ValueError of one line."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read, it may be incomplete or come from another program: "
            f"{last_line(error)}"
        ) from None


def last_line(error: Exception) -> str:
    """The last line of a message by a runtime or compiler, which may have pages."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


@contextmanager
def quiet(library: str) -> Iterator[None]:
    """Suppress a library's warnings and log records below CRITICAL; "" for the root logger."""
    logger, handler = logging.getLogger(library), logging.NullHandler()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    logger.addHandler(handler)  # logging adds a permanent handler to a root logger without one
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
