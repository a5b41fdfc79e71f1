"""Reads folders: images or videos by class and split, or pictures with a file of the same name."""

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fullstride.data.readers.decode import SUFFIXES
from fullstride.data.readers.listing import (
    SPLITS,
    TEST,
    TRAIN,
    VAL,
    Below,
    Listing,
    Sample,
    check_classes,
    near_names,
    quote_names,
)
from fullstride.data.readers.videos import SUFFIXES as VIDEO_SUFFIXES
from fullstride.data.readers.videos import frames_size
from fullstride.io.console import count_of, verb_of, with_reason

# ---- the kinds of files that a folder, a table or a shard may hold


@dataclass(frozen=True)
class FileKind:
    """A kind of file in a data set."""

    name: str  # for messages
    suffixes: tuple[str, ...]
    frames: bool = False  # whether a folder of frames counts as a file


IMAGES = FileKind("images", SUFFIXES)
VIDEOS = FileKind("videos", VIDEO_SUFFIXES, frames=True)


# ---- unused files, which a user may take for data: the counts are printed
#
# Counts are by reason: "30 .heic (convert them, for example with pillow-heif)".


# Suffixes of photographs that no reader here decodes -> a converter to JPEG.
CONVERTERS = {
    **dict.fromkeys((".heic", ".heif", ".hif"), "pillow-heif"),
    ".avif": "Pillow",
    ".jxl": "pillow-jxl-plugin",
    **dict.fromkeys((".jp2", ".j2k", ".ppm", ".tga", ".ico"), "Pillow"),
    **dict.fromkeys((".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"), "rawpy"),
    ".psd": "psd-tools",
    ".svg": "CairoSVG",
}


def count_unused(root: Path, used: Collection[str], kind: FileKind = IMAGES) -> dict[str, int]:
    """The number of files below `root` that are not `used`, by reason, the most frequent first.

    `used` has POSIX paths below `root`, of files and of folders of frames. A hidden folder counts
    as one file.
    """
    counts: Counter[str] = Counter()
    folders, visited = [(root, "")], set()
    while folders:
        folder, prefix = folders.pop()
        try:
            status = folder.stat()
            entries = list(os.scandir(folder))
        except OSError:
            counts["folders that cannot be listed"] += 1
            continue
        if (place := (status.st_dev, status.st_ino)) in visited:  # linked twice, or into itself
            continue
        visited.add(place)
        for entry in entries:
            name = prefix + entry.name
            if entry.name.startswith("."):
                counts["hidden"] += 1
            elif name in used:
                continue
            elif is_folder(entry):
                folders.append((folder / entry.name, f"{name}/"))
            elif not os.path.isfile(entry):  # noqa: PTH113  False also for a circular link
                counts["neither file nor folder"] += 1
            elif entry.name.lower().endswith(kind.suffixes):
                counts[f"{kind.name} outside of the class folders"] += 1
            else:
                counts[why_unused(name, kind)] += 1
    return dict(counts.most_common())


def first_reason(counts: Mapping[str, int]) -> str:
    """ ", but 12 .heic (convert them ...)" for an error about images that are missing, or ""."""
    return "".join(f", but {with_reason(count, why)}" for why, count in list(counts.items())[:1])


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular link
        return False


def why_unused(name: str, kind: FileKind = IMAGES) -> str:
    """The reason why a file of this name is not used."""
    suffix = PurePosixPath(name).suffix.lower()
    if kind is IMAGES and suffix in CONVERTERS:
        return f"{suffix} (convert them to JPEG, for example with {CONVERTERS[suffix]})"
    if kind is IMAGES and suffix in VIDEOS.suffixes:
        return f"{suffix} (videos: extract their frames, for example with ffmpeg)"
    return f"{suffix} (no {kind.name})" if suffix else "files without a suffix"


HINT = (
    "give a folder with one subfolder of images per class, 'digits', a .csv table, shards or a "
    "Hugging Face dataset"
)


def read_folder(root: Path, unseen_classes: bool = False, kind: FileKind = IMAGES) -> Listing:
    """The images or videos of a folder, by the rules of `open_data`."""
    train, val, test = (_split_folder(root, names) for names in (TRAIN, VAL, TEST))
    folders = {name: folder for name, folder in (("val", val), ("test", test)) if folder}
    if folders and not train:
        raise ValueError(
            f"{str(root)!r} has {quote_names([each.name for each in folders.values()])} and no "
            "train: put the images for training in train/, or rename a class of that name"
        )
    top = train if train and folders else root
    classes = names = _classes(top, kind)
    if unseen_classes:
        others = {name for folder in folders.values() for name in subfolders(folder)}
        classes = (*names, *sorted(others.difference(names)))
    splits = {"train": _samples(root, top, names, kind)}
    splits |= {name: _held_out(root, folder, classes, kind) for name, folder in folders.items()}
    notes = ()
    words = ((name, word) for name in names for word in re.split("[-_. ]", name.lower()))
    purposes = {name: SPLITS[word] for name, word in words if word in SPLITS}
    if {"train"} < {*purposes.values()}:
        notes = (
            f"{quote_names([*purposes])} are read as classes: name the folders of splits train, "
            "val and test",
        )
    listing = Listing(classes, splits, Below(root), val.name if val else "", notes=notes)
    unused = count_unused(root, {sample.name for sample in listing.samples}, kind)
    return replace(listing.at(root), ignored=unused)


def find_folder(where: str) -> Path:
    path = Path(where)
    try:
        if where and stat.S_ISDIR(path.stat().st_mode):
            return path.resolve()
        raise ValueError(f"{where!r} is a file: {HINT}" if where else f"no folder named: {HINT}")
    except (FileNotFoundError, NotADirectoryError):
        names = ["digits"] if path.parent == Path() else []
        names += subfolders(path.parent) if path.parent.is_dir() else []
        raise ValueError(f"no folder {where!r}: {near_names(path, names) or HINT}") from None
    except OSError as error:
        raise ValueError(
            f"cannot reach {where!r} ({error.strerror}): check the path and its permissions"
        ) from error


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """The entries that are not hidden, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            shown = [each for each in entries if not each.name.startswith(".")]
            return sorted(shown, key=lambda each: each.name)
    except OSError as error:
        raise ValueError(
            f"cannot list {str(folder)!r}: {error.strerror}; check its permissions"
        ) from error


def subfolders(folder: Path) -> list[str]:
    return [each.name for each in entries_of(folder) if is_folder(each)]


def _split_folder(root: Path, names: tuple[str, ...]) -> Path | None:
    folders = [name for name in subfolders(root) if name.lower() in names]
    if len(folders) > 1:
        raise ValueError(f"{str(root)!r} has {quote_names(folders)} for one split: keep one")
    return root / folders[0] if folders else None


def _classes(folder: Path, kind: FileKind) -> tuple[str, ...]:
    names = subfolders(folder)
    if len(names) > 1:
        return tuple(names)
    if names:
        hint = f", or give {str(folder / names[0])!r}" if subfolders(folder / names[0]) else ""
        check_classes(repr(str(folder)), names, f"add a second class folder{hint}")
    flat = any(each.name.lower().endswith(kind.suffixes) for each in entries_of(folder))
    what = f"has {kind.name} but no class folders" if flat else "has no class folders"
    raise ValueError(f"{str(folder)!r} {what}: put the {kind.name} of each class in a subfolder")


def _samples(root: Path, split: Path, names: tuple[str, ...], kind: FileKind) -> list[Sample]:
    """The files in the class folders `names` of `split`; targets count from 0.

    Raises ValueError for a class without files.
    """
    samples, empty = [], []
    for label, name in enumerate(names):
        folder = split / name
        below = folder.relative_to(root).as_posix()
        files = [*find_files(folder, kind, (root, split))]
        samples += [Sample(f"{below}/{file}", label, size) for file, size in files]
        if not files:
            empty.append(name)
    if empty:
        content = first_reason(count_unused(split / empty[0], (), kind))
        frames = ", or folders of frames" if kind.frames else ""
        raise ValueError(
            f"no {kind.name} in {quote_names(empty)} of {str(split)!r}{content}: add some "
            f"({' '.join(kind.suffixes)}{frames}) or remove it"
        )
    return samples


def _held_out(root: Path, split: Path, classes: tuple[str, ...], kind: FileKind) -> list[Sample]:
    """The files of val/ or test/, which may lack classes of the training images."""
    names = subfolders(split)
    if not names:
        raise ValueError(
            f"{str(split)!r} has no class folders: put the {kind.name} of each class in a subfolder"
        )
    if unknown := [name for name in names if name not in classes]:
        raise ValueError(
            f"{str(split)!r} has {quote_names(unknown)}, which the training images lack: add or "
            "remove it"
        )
    samples = _samples(root, split, tuple(names), kind)
    return [each._replace(target=classes.index(names[each.target])) for each in samples]


def find_files(
    folder: Path, kind: FileKind = IMAGES, above: tuple[Path, ...] = ()
) -> Iterator[tuple[str, int]]:
    """Files of a kind at any depth, and their sizes. Links to a folder in `above` are not followed.

    A folder with pictures counts as a video.
    """
    for entry in entries_of(folder):
        if is_folder(entry):
            path, parents = folder / entry.name, (*above, folder)
            if any(path.samefile(each) for each in parents):
                continue
            if size := frames_size(path) if kind.frames else 0:
                yield entry.name, size
            else:
                for file, size in find_files(path, kind, parents):
                    yield f"{entry.name}/{file}", size
        elif entry.name.lower().endswith(kind.suffixes):
            try:
                status = entry.stat()
            except OSError:  # a broken link is reported when it is read, like a broken image
                yield entry.name, -1
            else:
                if stat.S_ISREG(status.st_mode):
                    yield entry.name, status.st_size


# Each picture is paired with the mask, the depths or the boxes of the same name.


PICTURES = ("images", "rgb", "JPEGImages")


@dataclass(frozen=True)
class PairKind:
    """A kind of file that belongs to a picture, and the names of the folders with such files."""

    files: FileKind
    folders: tuple[str, ...]
    beside: bool = False  # whether the files may also be in the folder of the pictures
    optional: bool = False  # whether pictures without a file are kept


class PairFolders(NamedTuple):
    """The folders of a split's pictures and of their files."""

    name: str  # of the split, in the data
    pictures: Path
    files: Path


@dataclass(frozen=True)
class PairedListing:
    """Pictures as a listing with empty targets, and the file of each picture."""

    listing: Listing
    files: dict[str, Sample]  # picture -> name and size of its file
    folder: Path  # of the training pictures' files


def read_pairs(root: Path, kind: PairKind) -> PairedListing:
    """The pictures below `root` that have a file, by split.

    A file has the name of its picture, except the suffix. The pictures of a split, such as train,
    are in images/train, train/images or train, and the masks in masks/train or train/masks; without
    splits, in images and masks. `kind` has other names for masks, and `PICTURES` for images.

    Raises ValueError in one line.
    """
    if "train" not in (folders := split_folders(root, kind)):
        what = kind.files.name
        raise ValueError(
            f"{str(root)!r} has no pictures with {what} for training: put pictures into "
            f"images/train and {what} of the same names into {kind.folders[0]}/train"
        )
    return pair_files(root, folders, kind)


def holds_pairs(root: Path, kind: PairKind) -> bool:
    """Whether a training picture has a file of the kind."""
    folders = split_folders(root, kind).get("train")
    if not folders:
        return False
    stems = {_stem(name) for name, _ in find_files(folders.files, kind.files)}
    return any(_stem(name) in stems for name, _ in find_files(folders.pictures))


def split_folders(root: Path, kind: PairKind) -> dict[str, PairFolders]:
    """The folders of each split; data without splits are for training."""
    splits = (("train", TRAIN), ("val", VAL), ("test", TEST))
    folders = {split: pair for split, words in splits if (pair := _folders(root, kind, words))}
    if not folders and (pair := _folders(root, kind, ("",))):
        return {"train": pair}
    return folders


def _folders(root: Path, kind: PairKind, words: Sequence[str]) -> PairFolders | None:
    """The two folders of a split, if both exist. The word "" stands for data without splits."""
    places = [(word, *each) for word in words for each in _places(word, kind)]
    for word, pictures, files in places:
        pair = PairFolders(word, root / pictures, root / files)
        if pair.pictures.is_dir() and pair.files.is_dir() and _has_files(pair, kind.files):
            return pair
    return None


def _has_files(pair: PairFolders, kind: FileKind) -> bool:
    """Whether there is a file of the kind; beside pictures, subfolders do not count."""
    if pair.files != pair.pictures:
        return next(find_files(pair.files, kind), None) is not None
    return any(each.name.lower().endswith(kind.suffixes) for each in entries_of(pair.files))


def _places(word: str, kind: PairKind) -> list[tuple[str, str]]:
    """The possible paths of a split's pictures and files below the root."""
    places = []
    for files, pictures in product(kind.folders, PICTURES):
        places.append((f"{pictures}/{word}", f"{files}/{word}"))
        if word:
            places += [(f"{word}/{pictures}", f"{word}/{files}"), (word, f"{files}/{word}")]
    if kind.beside:
        inside = [f"{each}/{word}" for each in PICTURES]
        inside += [f"{word}/{each}" for each in PICTURES] if word else []
        places += [(each, each) for each in (*inside, word)]
    return places


def pair_files(root: Path, folders: Mapping[str, PairFolders], kind: PairKind) -> PairedListing:
    """Pair the pictures of each split with their files. Raises ValueError if no picture has one."""
    splits: dict[str, list[Sample]] = {}
    files, notes, what = {}, [], kind.files.name
    for split, (_, pictures, folder) in folders.items():
        by_stem = {
            _stem(name): Sample((folder.relative_to(root) / name).as_posix(), (), size)
            for name, size in find_files(folder, kind.files)
        }
        below, matched, lacking = pictures.relative_to(root), 0, []
        splits[split] = []
        for name, size in find_files(pictures):
            sample = Sample((below / name).as_posix(), (), size)
            if file := by_stem.get(_stem(name)):
                files[sample.name] = file
                matched += 1
            else:
                lacking.append(sample.name)
            if file or kind.optional:
                splits[split].append(sample)
        if not matched:
            raise ValueError(
                f"no picture in {str(pictures)!r} has one of the {what} in {str(folder)!r}: give "
                "both the same name"
            )
        if lacking and not kind.optional:
            notes.append(
                f"{count_of(len(lacking), 'picture', 'have')} none of the {what} in "
                f"{folder.relative_to(root).as_posix()} and {verb_of(len(lacking), 'are')} left "
                f"out: {quote_names(lacking)}"
            )
    val_name = folders["val"].name if "val" in folders else ""
    listing = Listing((), splits, Below(root), val_name, notes=tuple(notes))
    return PairedListing(listing, files, folders["train"].files)


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))
