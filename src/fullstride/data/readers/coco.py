"""Reads COCO's format: the categories and boxes of images are in files of annotations."""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TextIO
from urllib.parse import unquote

from fullstride.data.readers.decode import Box
from fullstride.data.readers.listing import (
    SPLITS,
    Below,
    BoxCheck,
    Described,
    FileSizes,
    Listing,
    Objects,
    Sample,
    check_once,
    quote_names,
)
from fullstride.io.console import count_of, counted, verb_of
from fullstride.io.writing import open_regular

# ---- the lists of a large JSON file, an element at a time


CHARACTERS = 2**20  # read at once
MAX_CHARACTERS = 2**26  # of one element, or of another value
SPACE = re.compile(r"[ \t\n\r]*")
DRIVE = re.compile("[A-Za-z]:/")  # of Windows


def read_lists(path: Path, names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Each element of the lists `names` of the object in a file, after the name of the list.

    Elements come in the order of the file, and only one is in memory. Other members are dropped.
    Raises ValueError in one line for a file that is not a complete JSON object.
    """
    with open_regular(path) as file, TextIOWrapper(file, "utf-8-sig") as text:
        reader = _Reader(path, text)
        reader.take("{")
        while True:
            name = reader.value("a name")
            reader.take(":")
            if name in names:
                reader.take("[")
                count = 0
                while reader.peek() != "]":
                    if count:
                        reader.take(",")
                    yield name, reader.value(f"{name}[{count}]")
                    count += 1
                reader.take("]")
            else:
                reader.value(f"{name!r}")
            if reader.peek() != ",":
                break
            reader.take(",")
        reader.take("}")
        if reader.peek():
            raise reader.error("more behind its end")


class _Reader:
    """The characters of a file from a position on, read as far as needed."""

    def __init__(self, path: Path, file: TextIO):
        self.path, self.file, self.text, self.at = path, file, "", 0
        self.decoder = json.JSONDecoder()

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{str(self.path)!r} is not whole JSON, it has {problem}: copy it again")

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        if (sign := self.text[self.at : self.at + 1]) and sign not in " \t\n\r":
            return sign
        while True:
            space = SPACE.match(self.text, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self.text) or not self._read_more():
                return self.text[self.at : self.at + 1]

    def take(self, sign: str) -> None:
        if (present := self.peek()) != sign:
            what = repr(present) if present else "its end"
            raise self.error(f"{what} where {sign!r} should be")
        self.at += 1

    def value(self, what: str) -> Any:
        """The next value; `what` names it in an error."""
        self.peek()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except (ValueError, RecursionError) as error:
                if len(self.text) - self.at > MAX_CHARACTERS or not self._read_more():
                    problem = str(getattr(error, "msg", error))[:100]
                    raise self.error(f"a damaged or very long {what} ({problem})") from None
                continue
            # a number may go on behind the characters that were read
            if end < len(self.text) or not self._read_more():
                self.at = end
                return value

    def _read_more(self) -> bool:
        try:
            more = self.file.read(max(CHARACTERS, len(self.text) - self.at))
        except UnicodeDecodeError:
            raise ValueError(f"{str(self.path)!r} is not UTF-8: save it as UTF-8") from None
        self.text, self.at = self.text[self.at :] + more, 0
        return bool(more)


BESIDE = "_annotations.coco.json"  # in the folder of a split, as some tools export it
HEAD_BYTES = 2**16  # of a file, to recognise its format
ONE_LIST = re.compile(rb'"(images|annotations|categories)"\s*:\s*\[')
IMAGE_LIST = re.compile(rb'"images"\s*:\s*\[')


class CocoObject(NamedTuple):
    id: Any  # of the annotation
    category: int
    box: Box | None  # None where only labels are read
    is_crowd: bool


class CocoImage(NamedTuple):
    id: int | str
    name: str  # of the file, as the annotations have it
    size: tuple[int, int] | None  # (width, height), where the file has them
    objects: list[CocoObject]


class CocoFile(NamedTuple):
    """The content of one file of annotations, by image."""

    path: Path
    categories: Mapping[int, str]  # by id
    images: Sequence[CocoImage]

    def annotated(self) -> dict[int, Any]:
        """The categories that have annotations -> the id of one annotation."""
        return {each.category: each.id for image in self.images for each in image.objects}


def coco_files(where: Path) -> dict[str, Path]:
    """The annotation file of each split; {} if `where` is no such data set.

    `where` is a .json file, or a folder with `annotations/instances_train2017.json` and so on, with
    `train/_annotations.coco.json` and so on, or with other files in COCO's format, in it or in
    annotations/: one, or one for each split, with train, val or test in the name.

    Raises ValueError for several files whose names do not say the split.
    """
    if where.suffix.lower() == ".json" and where.is_file():
        return {"train": where}
    if not os.path.isdir(where):  # noqa: PTH112  a pattern may be too long a name for `Path.is_dir`
        return {}
    named = [(path.parent.name, path) for path in sorted(where.glob(f"*/{BESIDE}"))]
    paths = sorted(where.glob("annotations/instances_*.json"))
    named += [(path.stem.removeprefix("instances_"), path) for path in paths]
    if not named:
        paths = sorted([*where.glob("*.json"), *where.glob("annotations/*.json")])
        named = [(path.stem, path) for path in paths if _lists_images(path)]
    if len(named) == 1:
        return {"train": named[0][1]}
    files: dict[str, Path] = {}
    for name, path in named:
        splits = {SPLITS[word] for word in re.findall("[a-z]+", name.lower()) if word in SPLITS}
        if len(splits) != 1:
            each = quote_names([str(path) for _, path in named])
            raise ValueError(
                f"{str(where)!r} has several files of annotations, {each}: give one of them, or "
                "write train, val or test into their names"
            )
        (split,) = splits
        if split in files:
            raise ValueError(f"{str(path)!r} is a second file for {split}: keep one")
        files[split] = path
    if files and "train" not in files:
        raise ValueError(f"{str(where)!r} has no annotations for training: add them")
    return files


def _lists_images(path: Path) -> bool:
    """Whether a file is, or if long begins as, a JSON object with the lists of COCO's format."""
    try:
        with open_regular(path) as file:
            head = file.read(HEAD_BYTES)
    except (OSError, ValueError):
        return False
    lists = IMAGE_LIST if len(head) < HEAD_BYTES else ONE_LIST
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and bool(lists.search(head))


def read_coco_labels(files: Mapping[str, Path]) -> Listing:
    """The images of annotation files by split, with the categories of their annotations.

    Classes are the categories in the training file, even without annotations, in the order of
    their ids. Categories in the files of other splits are matched by name.

    Raises ValueError in one line that names the file and the image, annotation or category.
    """

    def labels(image: CocoImage, index_of: Mapping[int, int], path: Path) -> tuple[int, ...]:
        return tuple(sorted({index_of[each.category] for each in image.objects}))

    return _read(files, labels, with_boxes=False)


def read_coco_objects(files: Mapping[str, Path]) -> Listing:
    """As `read_coco_labels`, with `Objects` as targets and notes on boxes that were changed."""
    check = BoxCheck()

    def objects(image: CocoImage, index_of: Mapping[int, int], path: Path) -> Objects:
        described = []
        for number, category, box, is_crowd in image.objects:
            if box:
                where = f"annotation {number!r} of the image {image.name!r}"
                described.append(Described(where, box, index_of[category], is_crowd))
        size = check.size(path, image.size) if image.size or described else None
        return check.objects(size, described)

    listing = _read(files, objects, with_boxes=True)
    return replace(listing, notes=(*listing.notes, *check.notes()))


# image, class index of each category, path of the image's file -> the target
Target = Callable[[CocoImage, Mapping[int, int], Path], Any]


def _read(files: Mapping[str, Path], target: Target, with_boxes: bool) -> Listing:
    folder = files["train"].resolve().parent  # images are in it, or beside annotations/ and splits
    is_above = folder.name == "annotations" or files["train"].name == BESIDE
    root = folder.parent if is_above else folder
    contents = {split: read_coco(path, with_boxes) for split, path in files.items()}
    train = contents["train"]
    ids = sorted(train.categories)
    indices = {train.categories[key]: index for index, key in enumerate(ids)}
    splits: dict[str, list[Sample]] = {}
    for split, content in contents.items():
        for key, annotation in sorted(content.annotated().items()):
            if (name := content.categories[key]) not in indices:
                raise ValueError(
                    f"{str(content.path)!r}: annotation {annotation!r} has the category {name!r}, "
                    f"which {str(train.path)!r} lacks: add or remove it"
                )
        index_of = {
            key: indices[name] for key, name in content.categories.items() if name in indices
        }
        splits[split] = [
            Sample(name, target(image, index_of, root / name), size)
            for image, name, size in _image_files(root, split, content)
        ]
    check_once(splits)
    if not (annotated := train.annotated()):
        raise ValueError(f"{str(train.path)!r} has no annotation: add some")
    notes = ()
    if unused := [train.categories[key] for key in ids if key not in annotated]:
        notes = (f"no training image has the label {quote_names(unused)}",)
    return Listing(tuple(indices), splits, Below(root), notes=notes)


def read_coco(path: Path, with_boxes: bool = False) -> CocoFile:
    """The images, categories and objects of a file. Raises ValueError in one line."""
    categories: dict[int, str] = {}
    ids: dict[str, int] = {}  # of the categories
    images: dict[int | str, CocoImage] = {}
    objects: dict[int | str, list[CocoObject]] = {}  # by image
    entries = read_lists(path, ("images", "annotations", "categories"))
    for kind, entry in counted(entries, f"entries of {path.name}"):
        where = f"{str(path)!r}: {_KINDS[kind]} {_field(entry, 'id')!r}"
        if kind == "images":
            key = _known(entry, "id", int | str, where)
            name = _known(entry, "file_name", str, where).replace("\\", "/")  # of Windows
            image = CocoImage(key, name, _size_of(entry), objects.setdefault(key, []))
            if (other := images.setdefault(key, image).name) != name:
                raise ValueError(f"{where} is {other!r} and {name!r}: give each its own id")
        elif kind == "categories":
            key, name = _known(entry, "id", int, where), _known(entry, "name", str, where)
            if key in categories or name in ids:
                raise ValueError(f"{where}, {name!r}, has the id or the name of another one")
            categories[key], ids[name] = name, key
        else:
            image_id = _known(entry, "image_id", int | str, where)
            category = _known(entry, "category_id", int, where)
            box = _box(entry, where) if with_boxes else None
            each = CocoObject(entry.get("id"), category, box, entry.get("iscrowd") == 1)
            objects.setdefault(image_id, []).append(each)
    for key, each in ((key, each) for key, several in objects.items() for each in several):
        if key not in images or each.category not in categories:
            what, number = ("image", key) if key not in images else ("category", each.category)
            raise ValueError(
                f"{str(path)!r}: annotation {each.id!r} is of the {what} {number!r}, which the "
                "file does not list: add or remove it"
            )
    if not images:
        raise ValueError(f"{str(path)!r} lists no images: give a file with some")
    by_name: dict[str, CocoImage] = {}  # entries of one file are joined
    for image in images.values():
        if (earlier := by_name.setdefault(image.name, image)) is not image:
            earlier.objects.extend(image.objects)
    return CocoFile(path, categories, [*by_name.values()])


_KINDS = {"images": "image", "annotations": "annotation", "categories": "category"}


def _field(entry: Any, name: str) -> Any:
    return entry.get(name) if isinstance(entry, dict) else None


def _known(entry: Any, name: str, kind: Any, where: str) -> Any:
    value = _field(entry, name)
    if not isinstance(value, kind) or isinstance(value, bool) or value == "":
        what = "text" if kind is str else "a whole number"
        raise ValueError(f"{where} has the {name} {str(value)[:40]!r}: use {what}")
    return value


def _size_of(entry: Any) -> tuple[int, int] | None:
    """The width and height of an image; None if they are missing or wrong."""
    size = _field(entry, "width"), _field(entry, "height")
    return size if all(type(side) is int and side > 0 for side in size) else None


def _box(entry: Any, where: str) -> Box:
    """The edges of an annotation's box, which COCO stores as (left, top, width, height)."""
    values = _field(entry, "bbox")
    is_box = isinstance(values, list) and len(values) == 4
    try:
        left, top, width, height = map(float, values if is_box else ())
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{where} has the bbox {str(values)[:40]!r}: use [left, top, width, height]"
        ) from None
    return left, top, left + width, top + height


# ---- the files of images


def _image_files(root: Path, split: str, content: CocoFile) -> Iterator[tuple[CocoImage, str, int]]:
    """Each image, the name of its file below `root`, and the file's bytes. Raises ValueError."""
    size_of = FileSizes(root)
    folder = _image_folder(root, split, content, size_of)
    files = [_find_file(folder, image.name, size_of) for image in content.images]
    if missing := [each for each, file in zip(content.images, files, strict=True) if not file]:
        raise ValueError(
            f"{len(missing)} of the {count_of(len(files), 'image')} in {str(content.path)!r} "
            f"{verb_of(len(missing), 'are')} missing in {str(root / folder)!r}, the first is "
            f"{missing[0].name!r} (image {missing[0].id!r}): add or remove them"
        )
    for image, file in zip(content.images, files, strict=True):
        if file:
            yield image, *file


def _find_file(folder: str, name: str, size_of: FileSizes) -> tuple[str, int] | None:
    """The path of an image below the root of `size_of`, and its bytes; None without a file.

    Labelling tools write plain names, names with percent signs as in a URL, or the path on the
    machine where pictures were labelled; only the last part of such a path is used.
    """
    for spelling in dict.fromkeys((name, unquote(name))):
        pure = PurePosixPath(spelling)
        if pure.is_absolute() or DRIVE.match(spelling) or ".." in pure.parts:
            pure = PurePosixPath(pure.name)
        path = (folder / pure).as_posix()
        if (size := size_of(path)) is not None:
            return path, size
    return None


def _image_folder(root: Path, split: str, content: CocoFile, size_of: FileSizes) -> str:
    """The folder below `root` that has the first image. Raises ValueError."""
    name = content.path.stem.removeprefix("instances_")  # such as train2017
    name = content.path.parent.name if content.path.name == BESIDE else name
    folders = [name, f"images/{name}", split, f"images/{split}", "images", "."]
    first = content.images[0]
    others = sorted(path.name for path in root.iterdir() if path.is_dir())
    for folder in (*folders, *others):
        if _find_file(folder, first.name, size_of):
            return folder
    raise ValueError(
        f"{str(content.path)!r}: image {first.id!r}, {first.name!r}, is in none of the folders "
        f"{', '.join(folders)} of {str(root)!r}: put the images into one"
    )
