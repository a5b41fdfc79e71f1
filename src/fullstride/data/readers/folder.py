"""Which images does a folder hold, and which of them does it set apart for tuning and testing?"""

import os
import stat
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from fullstride.data.readers.splits import (
    TEST,
    TRAIN,
    VAL,
    Parts,
    Sample,
    divide,
    listed,
)

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
HOW = "give a folder with one subfolder of images per class, 'digits', a .csv table, shards or a Hugging Face dataset"


def read_folder(root: Path, minival: float | None) -> tuple[tuple[str, ...], Parts]:
    """Class names, and the samples of each part; `open_data` says which is which."""
    train, val, test = (_part(root, kinds) for kinds in (TRAIN, VAL, TEST))
    held_out = [part for part in (val, test) if part]
    if not (train and held_out):
        classes = _classes(root)
        return classes, divide(_samples(root, root, classes), {}, minival)
    classes = _classes(train)
    pool = _samples(root, train, classes)
    return classes, divide(
        pool, {str(part): _held_out(root, part, classes) for part in held_out}, minival
    )


def find_folder(where: str) -> Path:
    path = Path(where)
    try:
        if where and stat.S_ISDIR(path.stat().st_mode):
            return path.resolve()
        raise ValueError(f"{where!r} is a file: {HOW}" if where else f"no folder named: {HOW}")
    except (FileNotFoundError, NotADirectoryError):
        names = ["digits"] if path.parent == Path() else []
        if path.parent.is_dir():
            names += _subfolders(path.parent)
        close = [str(path.with_name(name)) for name in get_close_matches(path.name, names)]
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else HOW
        raise ValueError(f"no folder {where!r}: {hint}") from None
    except OSError as error:
        raise ValueError(
            f"cannot reach {where!r} ({error.strerror}): check the path and its permissions"
        ) from error


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """All that is not hidden, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                (each for each in entries if not each.name.startswith(".")),
                key=lambda each: each.name,
            )
    except OSError as error:
        raise ValueError(
            f"cannot list {str(folder)!r}: {error.strerror}; check its permissions"
        ) from error


def _subfolders(folder: Path) -> list[str]:
    return [each.name for each in _entries(folder) if _is_folder(each)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads back to itself
        return False


def _part(root: Path, kinds: tuple[str, ...]) -> Path | None:
    found = [name for name in _subfolders(root) if name.lower() in kinds]
    if len(found) > 1:
        raise ValueError(f"{str(root)!r} has {listed(found)} for one purpose: keep one of them")
    return root / found[0] if found else None


def _classes(folder: Path) -> tuple[str, ...]:
    names = _subfolders(folder)
    if len(names) > 1:
        return tuple(names)
    if names:
        hint = f", or give {str(folder / names[0])!r}" if _subfolders(folder / names[0]) else ""
        raise ValueError(
            f"{str(folder)!r} has one class only, {names[0]!r}: add a second class folder{hint}"
        )
    flat = any(each.name.lower().endswith(SUFFIXES) for each in _entries(folder))
    what = "has images but no class folders" if flat else "has no class folders"
    raise ValueError(f"{str(folder)!r} {what}: put the images of each class in a subfolder")


def _samples(root: Path, part: Path, names: tuple[str, ...]) -> list[Sample]:
    """The images in the class folders `names` of `part`, none of which may be empty; labels count from 0."""
    samples, empty = [], []
    for label, name in enumerate(names):
        folder = part / name
        below = folder.relative_to(root).as_posix()
        files = [
            Sample(f"{below}/{file}", label, size) for file, size in _files(folder, (root, part))
        ]
        samples += files
        if not files:
            empty.append(name)
    if empty:
        raise ValueError(
            f"no images in {listed(empty)} of {str(part)!r}: add some ({' '.join(SUFFIXES)}) or remove it"
        )
    return samples


def _held_out(root: Path, part: Path, classes: tuple[str, ...]) -> list[Sample]:
    """The images of val/ or test/, where classes may be missing but not new ones appear."""
    names = _subfolders(part)
    if not names:
        raise ValueError(
            f"{str(part)!r} has no class folders: put the images of each class in a subfolder"
        )
    if unknown := [name for name in names if name not in classes]:
        raise ValueError(
            f"{str(part)!r} has {listed(unknown)}, which the training images lack: add or remove it"
        )
    return [
        s._replace(target=classes.index(names[s.target]))
        for s in _samples(root, part, tuple(names))
    ]


def _files(folder: Path, above: tuple[Path, ...]) -> Iterator[tuple[str, int]]:
    """Image files at any depth and their sizes. `above` are the folders on the way here: a link back ends there."""
    for entry in _entries(folder):
        if _is_folder(entry):
            path, above_it = folder / entry.name, (*above, folder)
            if not any(path.samefile(each) for each in above_it):
                yield from ((f"{entry.name}/{file}", size) for file, size in _files(path, above_it))
        elif entry.name.lower().endswith(SUFFIXES):
            try:
                status = entry.stat()
            except OSError:  # a link that leads nowhere is told of when it is read, like every other broken image
                yield entry.name, -1
            else:
                if stat.S_ISREG(status.st_mode):
                    yield entry.name, status.st_size
