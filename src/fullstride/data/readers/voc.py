"""Reads Pascal VOC's format: an XML file for each image lists the objects in the image.

VOC's folders have lists of names; labelImg and others write the XML files beside the pictures.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from xml.etree import ElementTree

from fullstride.data.readers.decode import SUFFIXES
from fullstride.data.readers.folder import FileKind, PairKind, read_pairs
from fullstride.data.readers.listing import (
    Below,
    BoxCheck,
    Described,
    FileSizes,
    Listing,
    Sample,
    check_once,
    read_names,
    sorted_classes,
)
from fullstride.io.console import counted
from fullstride.io.writing import read_regular

IMAGES, ANNOTATIONS, LISTS = "JPEGImages", "Annotations", "ImageSets/Main"
XML_FILES = PairKind(
    FileKind("XML files of boxes", (".xml",)),
    ("annotations", "Annotations", "labels", "xml", "xmls"),
    beside=True,
)
MAX_XML_BYTES = 2**23


class VocImage(NamedTuple):
    sample: Sample  # labels are names of classes
    annotation: Path


def voc_folders(where: Path) -> list[Path]:
    """The folders in Pascal VOC's layout: `where` itself, or folders one or two levels below."""
    for pattern in ("", "*/", "*/*/"):
        folders = [each for each in where.glob(f"{pattern}{ANNOTATIONS}") if each.is_dir()]
        if homes := sorted(each.parent for each in folders if (each.parent / IMAGES).is_dir()):
            return homes
    return []


def read_voc(root: Path, folders: Sequence[Path]) -> Listing:
    """The images of `folders` below `root`, with `Objects` as targets.

    The lists in ImageSets/Main say the splits: train.txt, val.txt and test.txt, where trainval.txt
    stands for the first two. If one of several folders has a test, all train and val images are
    for training, as with VOC2007 and VOC2012. Without lists all images are for training.

    Raises ValueError in one line that names the file and the object.
    """
    lists = [read_lists(folder / LISTS, (folder / ANNOTATIONS).glob("*.xml")) for folder in folders]
    if len(folders) > 1 and any("test" in each for each in lists):
        lists = [_joined(each) for each in lists]
    images: dict[str, list[VocImage]] = {}
    check, sizes = BoxCheck(), FileSizes(root)
    for folder, names in zip(folders, lists, strict=True):
        for split, listed in names.items():
            images.setdefault(split, []).extend(
                _image(root, folder, each, sizes, check) for each in counted(listed, "XML files")
            )
    return _listing(root, images, check)


def read_xml_files(root: Path) -> Listing:
    """The pictures below `root` that have an XML file of the same name.

    The layouts are listed in `read_pairs`: images/ and annotations/, or train/ with both, or the
    XML files beside the pictures. Raises ValueError in one line that names the file and the object.
    """
    pairs, check = read_pairs(root, XML_FILES), BoxCheck()
    images = {
        split: [
            _described(root, name, size, root / pairs.files[name].name, check)
            for name, _, size in counted(samples, "XML files")
        ]
        for split, samples in pairs.listing.splits.items()
    }
    listing = _listing(root, images, check)
    notes = (*pairs.listing.notes, *listing.notes)
    return replace(listing, notes=notes, val_name=pairs.listing.val_name)


def _listing(root: Path, images: Mapping[str, Sequence[VocImage]], check: BoxCheck) -> Listing:
    train = images.get("train")
    if not train:
        raise ValueError(f"{str(root)!r} has no list of training images: add {LISTS}/train.txt")
    classes = sorted_classes(name for image in train for name in image.sample.target.labels)
    if not classes:
        why = "".join(f" ({note})" for note in check.notes())
        raise ValueError(f"{str(train[0].annotation.parent)!r} has no object{why}: add some")
    indices = {name: index for index, name in enumerate(classes)}
    splits = {
        split: [_sample(image, indices) for image in images[split]]
        for split in ("train", "val", "test")
        if images.get(split)
    }
    check_once(splits)
    return Listing(classes, splits, Below(root), notes=check.notes())


Listed = dict[str, Path]  # the names of images, each with the file that lists or describes it


def read_lists(lists: Path, unlisted: Iterable[Path]) -> dict[str, Listed]:
    """The images of each split by the lists train.txt, val.txt, trainval.txt and test.txt.

    Without train.txt the training images are the images of trainval.txt that val.txt lacks. Without
    any list all files `unlisted` are for training. Raises ValueError.
    """
    splits: dict[str, Listed] = {}
    for name in ("train", "val", "trainval", "test"):
        if (path := lists / f"{name}.txt").is_file():
            splits[name] = dict.fromkeys(read_names(path), path)
    if not splits:
        return {"train": {path.stem: path for path in sorted(unlisted, key=lambda path: path.stem)}}
    both, val = splits.pop("trainval", {}), splits.get("val", {})
    if both and "train" not in splits:
        splits["train"] = {name: path for name, path in both.items() if name not in val}
    return splits


def _joined(splits: dict[str, Listed]) -> dict[str, Listed]:
    """The splits with the images of val in train."""
    train = splits.get("train", {}) | splits.get("val", {})
    joined = {"train": train, "test": splits.get("test", {})}
    return {split: each for split, each in joined.items() if each}


def _image(root: Path, folder: Path, name: str, sizes: FileSizes, check: BoxCheck) -> VocImage:
    annotation, below = folder / ANNOTATIONS / f"{name}.xml", folder.relative_to(root).as_posix()
    if sizes(f"{below}/{ANNOTATIONS}/{name}.xml") is None:
        raise ValueError(
            f"{str(annotation)!r} is missing, for the image {name!r}: add or remove it"
        )
    if not (picture := sizes.picture(PurePosixPath(below, IMAGES, name).as_posix())):
        missing = str(folder / IMAGES / f"{name}{SUFFIXES[0]}")
        raise ValueError(f"{missing!r} is missing, the image of {str(annotation)!r}: add it")
    return _described(root, *picture, annotation, check)


def _described(root: Path, name: str, bytes_in: int, annotation: Path, check: BoxCheck) -> VocImage:
    """The image `name` with the objects of its annotation that are inside the image."""
    size, described = read_annotation(annotation)
    objects = check.objects(check.size(root / name, size), described)
    return VocImage(Sample(name, objects, bytes_in), annotation)


def _sample(image: VocImage, indices: dict[str, int]) -> Sample:
    objects = image.sample.target
    if others := [name for name in objects.labels if name not in indices]:
        raise ValueError(
            f"{str(image.annotation)!r} has the class {others[0]!r}, which no training image has: "
            "add or remove it"
        )
    labels = tuple(indices[name] for name in objects.labels)
    return image.sample._replace(target=objects._replace(labels=labels))


# ---- annotations


class _NoDoctype(ElementTree.TreeBuilder):
    """Refuses a DOCTYPE, which alone can declare entities: these can blow up a small file."""

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise ValueError("it has a DOCTYPE")


def read_annotation(path: Path) -> tuple[tuple[int, int] | None, Iterator[Described]]:
    """The size (width, height) of the image, if the file has one, and its objects.

    VOC counts pixels from 1 and includes the last one: its box 1, 1, 1, 1 is the first pixel,
    0, 0, 1, 1 here. Raises ValueError in one line.
    """
    try:
        data = read_regular(path, MAX_XML_BYTES)
        tree = ElementTree.fromstring(data, ElementTree.XMLParser(target=_NoDoctype()))
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        problem = " ".join(str(error).split())[:100]
        raise ValueError(f"{str(path)!r} is no whole annotation in XML ({problem})") from None
    size = tree.find("size")
    w, h = (_number(size, name) for name in ("width", "height"))
    whole = (int(w), int(h)) if w and h and 0 < w < 1e6 and 0 < h < 1e6 else None
    return whole, _objects(path, tree.iterfind("object"))


def _objects(path: Path, elements: Iterable[Any]) -> Iterator[Described]:
    for number, element in enumerate(elements, 1):
        where = f"object {number} of {str(path)!r}"
        label = (element.findtext("name") or "").strip()
        if not label:
            raise ValueError(f"{where} has no name: add one")
        edges = [_number(element.find("bndbox"), name) for name in ("xmin", "ymin", "xmax", "ymax")]
        if any(edge is None for edge in edges):
            raise ValueError(f"{where}, {label!r}, has no bndbox of four numbers: add or remove it")
        left, top, right, bottom = (edge for edge in edges if edge is not None)
        difficult = _number(element, "difficult") == 1
        yield Described(where, (left - 1, top - 1, right, bottom), label, difficult)


def _number(element: Any, name: str) -> float | None:
    text = element.findtext(name) if element is not None else None
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
