"""Reads YOLO's format: a text file for each image has a line for each object.

A line is a class index and the middle, width and height of a box, as shares of the image; or the
corners of a polygon, whose box is read. Where data.yaml has kpt_shape, key points follow each box,
and are skipped. Names of classes are in data.yaml or classes.txt.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fullstride.data.readers.folder import (
    FileKind,
    PairFolders,
    PairKind,
    holds_pairs,
    pair_files,
    split_folders,
)
from fullstride.data.readers.listing import (
    NO_OBJECTS,
    BoxCheck,
    Described,
    Listing,
    Objects,
    Sample,
    check_class_count,
    check_once,
    read_text,
)
from fullstride.io.console import counted
from fullstride.io.writing import read_regular

YAML_SUFFIXES = (".yaml", ".yml")
YAML_NAMES = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
CVAT_FOLDERS = {"train": "obj_train_data", "val": "obj_valid_data", "test": "obj_test_data"}
LINES = ("classes.txt", "obj.names")  # files with the name of a class in each line
MAX_YAML_BYTES = 2**22
TEXTS = PairKind(FileKind("text files of boxes", (".txt",)), ("labels",), optional=True)
# beside pictures a text may be anything, such as a caption, unless class names are given
TEXTS_WITH_NAMES = replace(TEXTS, beside=True)


def yolo_root(where: Path) -> Path | None:
    """The folder of YOLO's files: `where`, or the folder of the .yaml file; None without either."""
    if where.suffix.lower() in YAML_SUFFIXES and where.is_file():
        return where.parent
    if where.is_dir() and holds_pairs(where, _kind(where)):
        return where
    with suppress(ValueError):  # a .yaml file of something else
        return where if _folders_in(_read_yaml(_yaml_in(where)), where) else None
    return None


def _yaml_in(root: Path) -> Path | None:
    return next((root / name for name in YAML_NAMES if (root / name).is_file()), None)


def _kind(root: Path) -> PairKind:
    has_names = _yaml_in(root) or any((root / name).is_file() for name in LINES)
    return TEXTS_WITH_NAMES if has_names else TEXTS


def read_yolo(where: Path, root: Path) -> Listing:
    """The images of `yolo_root`, with `Objects` as targets; an image without a file has no object.

    The .yaml file names the folders of the splits if they are below the root; else they are found
    as in `read_pairs`. Raises ValueError in one line that names the file and the line.
    """
    settings = _read_yaml(where if where.is_file() else _yaml_in(root))
    if not settings and (root / "obj.data").is_file():  # CVAT's YOLO 1.1
        settings = {split: name for split, name in CVAT_FOLDERS.items() if (root / name).is_dir()}
    kind = _kind(root)
    folders = _folders_in(settings, root) or split_folders(root, kind)
    if "train" not in folders:
        raise ValueError(
            f"{str(root)!r} has no images/train beside labels/train, nor train/images beside "
            "train/labels: put pictures and their text files into one of these"
        )
    train, val = settings.get("train"), settings.get("val")
    if val and "val" not in folders and val != train:
        raise ValueError(
            f"{str(where)!r} names train {train!r} and val {val!r}, which are not both a folder "
            "here: put the pictures of each split into one folder, as images/train and images/val"
        )
    pairs = pair_files(root, folders, kind)
    names, check, largest = _class_names(settings, where, root), BoxCheck(), -1
    most = 5 if "kpt_shape" in settings else None  # words of a line: key points follow
    splits: dict[str, list[Sample]] = {}
    for split, samples in pairs.listing.splits.items():
        splits[split] = []
        for sample in counted(samples, "text files"):
            text = pairs.files.get(sample.name)
            target = _objects(root, sample.name, text.name, check, most) if text else NO_OBJECTS
            label = max(target.labels, default=-1)
            if text and names and label >= len(names):
                raise ValueError(
                    f"{str(root / text.name)!r} has the class {label}, and only 0 to "
                    f"{len(names) - 1} have names: add its name"
                )
            largest = max(largest, label)
            splits[split].append(sample._replace(target=target))
    if largest < 0:
        why = "".join(f" ({note})" for note in check.notes())
        raise ValueError(f"{str(pairs.folder)!r} has no object{why}: add some")
    check_once(splits)
    check_class_count(repr(str(root)), largest + 1, sum(map(len, splits.values())))
    classes = names or tuple(map(str, range(largest + 1)))
    notes = (*pairs.listing.notes, *check.notes())
    return replace(pairs.listing, classes=classes, splits=splits, notes=notes)


def _objects(root: Path, picture: str, text: str, check: BoxCheck, most: int | None) -> Objects:
    """The objects of a text file, by the first `most` words of each line; None: by all."""
    path, described = root / text, []
    lines = [line.split()[:most] for line in read_text(path).splitlines()]
    if not any(lines) or not (size := check.size(root / picture)):
        return NO_OBJECTS
    for number, words in enumerate(lines, 1):
        if words:
            where = f"{str(path)!r} line {number}"
            label, shares = _numbers(words, where)
            edges = [share * size[index % 2] for index, share in enumerate(shares)]
            box = min(edges[::2]), min(edges[1::2]), max(edges[::2]), max(edges[1::2])
            described.append(Described(where, box, label))
    return check.objects(size, described)


def _numbers(words: list[str], where: str) -> tuple[int, list[float]]:
    """The class, and the corners of a box or a polygon as alternating x and y. ValueError."""
    try:
        label, shares = int(words[0]), [float(word) for word in words[1:]]
    except ValueError:
        label, shares = -1, []
    if label < 0 or (len(shares) != 4 and (len(shares) < 6 or len(shares) % 2)):
        raise ValueError(
            f"{where} is {' '.join(words)[:60]!r}: write the index of a class, and the middle, "
            "width and height of the box as shares of the image"
        )
    if len(shares) == 4:
        x, y, width, height = shares
        shares = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
    return label, shares


def _read_yaml(path: Path | None) -> Mapping[str, Any]:
    """The settings in a .yaml file; {} without a file. Raises ValueError."""
    if path is None:
        return {}
    try:
        settings = yaml.safe_load(read_regular(path, MAX_YAML_BYTES))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())[:100]
        raise ValueError(
            f"{str(path)!r} is no whole YAML file ({problem}): save it again"
        ) from None
    if not isinstance(settings, dict):
        raise ValueError(f"{str(path)!r} has no names: write names, train and val")
    return settings


def _class_names(settings: Mapping[str, Any], where: Path, root: Path) -> tuple[str, ...]:
    """The class names in the .yaml file or a file of `LINES`; () without. Raises ValueError."""
    names = settings.get("names")
    if isinstance(names, dict) and {*names} == {*range(len(names))}:
        names = [names[index] for index in range(len(names))]
    if names is None:
        lists = (root / each for each in (*LINES, *(f"labels/{name}" for name in LINES)))
        path = next(filter(Path.is_file, lists), None)
        lines = read_text(path).splitlines() if path else []
        names = [line.strip() for line in lines if line.strip()]
    is_list = isinstance(names, list) and {*map(type, names)} <= {str, int}
    if not is_list or len({*map(str, names)}) < len(names):
        raise ValueError(
            f"the names of {str(where)!r} are not one distinct name for each class from 0 on: "
            "write names: [cat, dog], with quotes around yes and no, which YAML reads as booleans"
        )
    return tuple(map(str, names))


def _folders_in(settings: Mapping[str, Any], root: Path) -> dict[str, PairFolders]:
    """The folders of the splits in a .yaml file, if the training folder is below `root`.

    As in YOLO's own code, the files of images/train are in labels/train. Exported files may name
    folders of another machine: the layout then says the splits.
    """
    folders: dict[str, PairFolders] = {}
    bases = [root / settings["path"]] if isinstance(settings.get("path"), str) else []
    for split in ("train", "val", "test"):
        if not isinstance(value := settings.get(split), str):
            continue
        places = (base / value.removeprefix("./") for base in (*bases, root))
        pictures = next((place.resolve() for place in places if place.is_dir()), None)
        if not pictures or not pictures.is_relative_to(root) or pictures == root:
            continue
        parts = [*pictures.relative_to(root).parts]
        if "images" in parts:
            parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
        files = root.joinpath(*parts)
        if files.is_dir() and pictures not in [each.pictures for each in folders.values()]:
            folders[split] = PairFolders(split, pictures, files)
    return folders if "train" in folders else {}
