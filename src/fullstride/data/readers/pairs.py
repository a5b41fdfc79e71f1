"""Pairs each picture of a folder with the mask, depths or boxes of the same name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fullstride.data.readers.folder import FileKind, entries_of, find_files
from fullstride.data.readers.listing import TEST, TRAIN, VAL, Below, Listing, Sample, quote_names

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
                f"{len(lacking):,} pictures have none of the {what} in "
                f"{folder.relative_to(root).as_posix()} and are left out: {quote_names(lacking)}"
            )
    val_name = folders["val"].name if "val" in folders else ""
    listing = Listing((), splits, Below(root), val_name, notes=tuple(notes))
    return PairedListing(listing, files, folders["train"].files)


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))
