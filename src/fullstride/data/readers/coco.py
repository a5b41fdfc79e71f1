"""Reads COCO's format: the categories and boxes of images are in files of annotations."""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TextIO

from fullstride.data.readers.decode import image_size
from fullstride.data.readers.listing import (
    SPLITS,
    Below,
    Box,
    BoxCheck,
    FileSizes,
    Listing,
    Objects,
    Sample,
    check_once,
    quote_names,
)
from fullstride.io.console import counted
from fullstride.io.writing import open_regular

# ---- the lists of a large JSON file, an element at a time


CHARACTERS = 2**20  # that are read at once
MAX_CHARACTERS = 2**26  # of one element, or of another value
SPACE = re.compile(r"[ \t\n\r]*")


def read_lists(path: Path, names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Each element of the lists `names` of the object in a file, with the name of its list.

    They come in the order of the file, and only one of them is in memory. Other members are read
    and dropped. Raises ValueError in one line for a file that is no whole JSON object.
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
    """The characters of a file from a position on, as far as they were needed."""

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
HEAD_BYTES = 2**16  # of a file, by which its format is recognised
ONE_LIST = re.compile(rb'"(images|annotations|categories)"\s*:\s*\[')


class CocoObject(NamedTuple):
    id: Any  # of the annotation
    category: int
    box: Box
    is_crowd: bool


class CocoImage(NamedTuple):
    id: int | str
    name: str  # of the file, as the annotations have it
    categories: frozenset[int]  # of its annotations
    size: tuple[int, int] | None = None  # (width, height), where the file has them
    objects: tuple[CocoObject, ...] = ()


@dataclass(frozen=True)
class CocoFile:
    """What one file of annotations says about whole images."""

    path: Path
    categories: Mapping[int, str]  # by id
    images: tuple[CocoImage, ...]
    annotation: Mapping[int, Any]  # category -> the id of one of its annotations


def coco_files(where: Path) -> dict[str, Path]:
    """The annotation file of each split; none if `where` is no such data set.

    `where` is a .json file, or a folder with `annotations/instances_train2017.json` and so on, with
    `train/_annotations.coco.json` and so on, or with other files in COCO's format, in it or in
    annotations/: one, or one for each split, with train, val or test in its name.

    Raises ValueError for several files whose names say no split.
    """
    if where.suffix.lower() == ".json" and where.is_file():
        return {"train": where}
    if not os.path.isdir(where):  # noqa: PTH112  a pattern may be too long a name for `Path.is_dir`
        return {}
    named = [(path.parent.name, path) for path in sorted(where.glob(f"*/{BESIDE}"))]
    named += [(_rest(path), path) for path in sorted(where.glob("annotations/instances_*.json"))]
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
    """Whether a file begins as an object with lists of COCO's format."""
    try:
        with open_regular(path) as file:
            head = file.read(HEAD_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
    except (OSError, ValueError):
        return False
    return head.startswith(b"{") and bool(ONE_LIST.search(head))


def _rest(path: Path) -> str:
    """Of a file of annotations: "train2017"."""
    return path.stem.removeprefix("instances_")


def read_coco_labels(files: Mapping[str, Path]) -> Listing:
    """The images of annotation files by their splits, with the categories of their annotations.

    Classes are the categories of the training images in the order of their ids, also those without
    annotations. Those of other splits are matched by name.

    Raises ValueError in one line that names the file and the image, annotation or category.
    """

    def labels(image: CocoImage, index_of: Callable[[int], int], path: Path) -> tuple[int, ...]:
        return tuple(sorted(map(index_of, image.categories)))

    return _read(files, labels, with_objects=False)


def read_coco_objects(files: Mapping[str, Path]) -> Listing:
    """As `read_coco_labels`, with `Objects` as targets and notes on boxes that were changed."""
    check = BoxCheck()

    def objects(image: CocoImage, index_of: Callable[[int], int], path: Path) -> Objects:
        size = image.size
        if image.objects and size is None:
            size = image_size(path)
        usable = []
        for each in image.objects:
            assert size
            where = f"annotation {each.id!r} of the image {image.name!r}"
            if box := check.usable(each.box, size, where):
                usable.append((box, index_of(each.category), each.is_crowd))
        boxes, labels, difficult = zip(*usable, strict=True) if usable else ((), (), ())
        return Objects(boxes, labels, difficult)

    listing = _read(files, objects, with_objects=True)
    return replace(listing, notes=(*listing.notes, *check.notes()))


def _read(files: Mapping[str, Path], target: "Target", with_objects: bool) -> Listing:
    root = _root(files["train"])
    contents = {split: read_coco(path, with_objects) for split, path in files.items()}
    train = contents["train"]
    classes = tuple(name for _, name in sorted(train.categories.items()))
    indices = {name: index for index, name in enumerate(classes)}
    splits: dict[str, list[Sample]] = {}
    for split, content in contents.items():
        for key in sorted(content.annotation):
            if (name := content.categories[key]) not in indices:
                raise ValueError(
                    f"{str(content.path)!r}: annotation {content.annotation[key]!r} has the "
                    f"category {name!r}, which {str(train.path)!r} lacks: add or remove it"
                )
        splits[split] = _samples(root, split, content, indices, target)
    check_once(splits)
    if not train.annotation:
        raise ValueError(f"{str(train.path)!r} has no annotation: add some")
    notes = ()
    if unused := [
        train.categories[key] for key in sorted({*train.categories} - {*train.annotation})
    ]:
        notes = (f"no training image has the label {quote_names(unused)}",)
    return Listing(classes, splits, Below(root), notes=notes)


def read_coco(path: Path, with_objects: bool = False) -> CocoFile:
    """The images and categories of a file, and its objects. Raises ValueError in one line."""
    categories: dict[int, str] = {}
    ids: dict[str, int] = {}  # of the categories
    names: dict[Any, str] = {}
    sizes: dict[Any, tuple[int, int]] = {}  # of the images
    labels: dict[Any, set[int]] = {}  # image -> categories
    objects: dict[Any, list[CocoObject]] = {}  # image -> annotations
    annotation_of: dict[Any, Any] = {}  # image -> the id of one of its annotations
    annotations: dict[int, Any] = {}
    entries = read_lists(path, ("images", "annotations", "categories"))
    for kind, entry in counted(entries, f"entries of {path.name}"):
        where = f"{str(path)!r}: {_KINDS[kind]} {_field(entry, 'id')!r}"
        if kind == "images":
            key, name = (
                _known(entry, "id", int | str, where),
                _known(entry, "file_name", str, where).replace("\\", "/"),  # of Windows
            )
            if names.setdefault(key, name) != name:
                raise ValueError(f"{where} is {names[key]!r} and {name!r}: give each its own id")
            if size := _size_of(entry):
                sizes[key] = size
        elif kind == "categories":
            key, name = _known(entry, "id", int, where), _known(entry, "name", str, where)
            if key in categories or name in ids:
                raise ValueError(f"{where}, {name!r}, has the id or the name of another one")
            categories[key], ids[name] = name, key
        else:
            image = _known(entry, "image_id", int | str, where)
            category = _known(entry, "category_id", int, where)
            labels.setdefault(image, set()).add(category)
            annotation_of.setdefault(image, entry.get("id"))
            annotations.setdefault(category, entry.get("id"))
            if with_objects:
                each = CocoObject(
                    entry.get("id"), category, _box(entry, where), entry.get("iscrowd") == 1
                )
                objects.setdefault(image, []).append(each)
    for what, used, present in (
        ("category", annotations, categories),
        ("image", annotation_of, names),
    ):
        for key in used:
            if key not in present:
                raise ValueError(
                    f"{str(path)!r}: annotation {used[key]!r} is of the {what} {key!r}, which the "
                    "file does not list: add or remove it"
                )
    images = [
        CocoImage(
            key,
            name,
            frozenset(labels.get(key, ())),
            sizes.get(key),
            tuple(objects.get(key, ())),
        )
        for key, name in names.items()
    ]
    if not images:
        raise ValueError(f"{str(path)!r} lists no images: give a file with some")
    return CocoFile(path, categories, tuple(_joined(images)), annotations)


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
    """The width and height of an image, unless they are missing or wrong."""
    size = _field(entry, "width"), _field(entry, "height")
    return size if all(type(side) is int and side > 0 for side in size) else None


def _box(entry: Any, where: str) -> Box:
    """COCO's (left, top, width, height) of an annotation as edges."""
    values = _field(entry, "bbox")
    is_box = isinstance(values, list) and len(values) == 4
    try:
        left, top, width, height = map(float, values if is_box else ())
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{where} has the bbox {str(values)[:40]!r}: use [left, top, width, height]"
        ) from None
    return left, top, left + width, top + height


def _joined(images: list[CocoImage]) -> Iterator[CocoImage]:
    """One entry for each file, with the categories of all its entries."""
    by_name: dict[str, CocoImage] = {}
    for image in images:
        earlier = by_name.setdefault(image.name, image)
        if earlier is not image:
            by_name[image.name] = earlier._replace(
                categories=earlier.categories | image.categories,
                objects=earlier.objects + image.objects,
            )
    yield from by_name.values()


# ---- the files of images


def _root(path: Path) -> Path:
    """The folder of the data set: images are in it or below."""
    folder = path.resolve().parent
    return folder.parent if folder.name == "annotations" or path.name == BESIDE else folder


# What is learnt of an image, with the class index of a category, and the path of its file.
Target = Callable[[CocoImage, Callable[[int], int], Path], Any]


def _samples(
    root: Path, split: str, content: CocoFile, indices: Mapping[str, int], target: Target
) -> list[Sample]:
    size_of = FileSizes(root)
    folder, samples, missing = _image_folder(root, split, content, size_of), [], []
    for image in content.images:
        name = (PurePosixPath(folder) / image.name).as_posix()
        size = size_of(name)
        if size is None:
            missing.append(image)
            continue
        what = target(image, lambda key: indices[content.categories[key]], root / name)
        samples.append(Sample(name, what, size))
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(content.images)} images in {str(content.path)!r} are "
            f"missing in {str(root / folder)!r}, the first is {missing[0].name!r} (image "
            f"{missing[0].id!r}): add or remove them"
        )
    return samples


def _image_folder(root: Path, split: str, content: CocoFile, size_of: FileSizes) -> str:
    """The folder below `root` that has the first image. Raises ValueError."""
    for image in content.images:
        pure = PurePosixPath(image.name)
        if pure.is_absolute() or ".." in pure.parts:
            raise ValueError(
                f"{str(content.path)!r}: image {image.id!r} has the file_name {image.name!r}: use "
                "a path below the folder of images"
            )
    rest = content.path.parent.name if content.path.name == BESIDE else _rest(content.path)
    folders = [rest, f"images/{rest}", split, f"images/{split}", "images", "."]
    first = content.images[0]
    others = sorted(path.name for path in root.iterdir() if path.is_dir())
    for folder in (*folders, *others):
        if size_of(f"{folder}/{first.name}") is not None:
            return folder
    raise ValueError(
        f"{str(content.path)!r}: image {first.id!r}, {first.name!r}, is in none of the folders "
        f"{', '.join(folders)} of {str(root)!r}: put the images into one"
    )
