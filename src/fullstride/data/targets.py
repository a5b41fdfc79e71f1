"""Data sets of the tasks, with boxes, labels, maps or clips, and the task of a data set."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fullstride.data.dataset import (
    DIGITS,
    DataSet,
    Images,
    digits,
    fingerprint,
    from_listing,
    open_listing,
)
from fullstride.data.readers.coco import coco_files, read_coco_labels, read_coco_objects
from fullstride.data.readers.csv_table import (
    ABSENT,
    COLUMNS,
    LABELS,
    PRESENT,
    Header,
    find_header,
    find_table,
    is_table,
    read_label_table,
    read_rows,
    table_text,
)
from fullstride.data.readers.decode import SUFFIXES
from fullstride.data.readers.folder import (
    PICTURES,
    VIDEOS,
    PairedListing,
    PairKind,
    find_folder,
    holds_pairs,
    read_pairs,
    subfolders,
)
from fullstride.data.readers.hugging_face import choice_in
from fullstride.data.readers.listing import SPLITS, Listing, Sample, join_copies, near_names
from fullstride.data.readers.masks import (
    DEPTHS,
    IGNORED,
    LEFT_OUT,
    MASKS,
    MAX_CLASSES,
    VOC_PALETTE,
    DepthFile,
    MapFile,
    MaskFile,
    UnreadableImage,
    class_names,
    find_colours,
    is_in_colours,
    read_masks,
    read_png,
)
from fullstride.data.readers.shards import has_label_sets
from fullstride.data.readers.splits import DEFAULT_RULE, SplitRule
from fullstride.data.readers.videos import MiddleFrame, check_decoder
from fullstride.data.readers.voc import XML_FILES, read_voc, read_xml_files, voc_folders
from fullstride.data.readers.yolo import read_yolo, yolo_root
from fullstride.io.console import count_of, counted
from fullstride.io.writing import open_regular


def open_boxes(where: str, rule: SplitRule = DEFAULT_RULE) -> DataSet:
    """The data set at `where`, whose targets are `Objects`: boxes, class indices and difficulty.

    A box is (left, top, right, bottom) in pixels of the upright image, from 0 to its width or
    height. Boxes beyond their image are clipped; boxes without area or finite edges, outside of the
    image, or twice in it are left out; notes of the data set count each reason. An image without
    objects is an example of the background.

    COCO's format: a .json file, or a folder with `annotations/instances_train2017.json` and the
    like, with `train/_annotations.coco.json`, or with one such file of any name, in it or in
    annotations/. Images are in a folder of the split's name, in images/, or beside the annotations.
    `iscrowd` makes an object difficult.

    Pascal VOC's format: a folder with JPEGImages/, Annotations/ and ImageSets/Main/train.txt,
    val.txt, trainval.txt and test.txt, or one with several such folders, such as VOC2007/ and
    VOC2012/. If one of several has a test, all other images are for training. Without these
    folders, XML files are beside the pictures of the same names, or in annotations/ beside images/.

    YOLO's format: a data.yaml, or a folder with text files in labels/ that have the names of the
    pictures in images/. Both may have a folder for each split.

    Missing splits are taken by the rules of `fullstride.data.dataset.open_data`, by the rarest
    class of an image's objects.

    Raises ValueError in one line.
    """
    boxes = find_boxes(where)
    data = from_listing(boxes.read().at(boxes.root), rule)
    splits = (data.train, data.val, data.test)
    if count := sum(not target.labels for images in splits for target in images.targets):
        data = replace(data, notes=(*data.notes, f"no object in {count_of(count, 'image')}"))
    return data.without(rule.left_out)


class Boxes(NamedTuple):
    """The place and the format of boxes."""

    root: Path  # the folder or the file
    format: str
    read: Callable[[], Listing]


class NoBoxesError(ValueError):
    """No file with boxes, in any of the formats."""


def find_boxes(where: str) -> Boxes:
    """Find boxes at `where` by the names of files. Raises NoBoxesError if there are none."""
    if not where or not os.path.exists(where):  # noqa: PTH110  names may be too long for `Path`
        hint = near_names(Path(where)) or "check the path"
        raise NoBoxesError(f"no folder or file {where!r}: {hint}")
    root = Path(where).resolve()
    if files := coco_files(root):
        return Boxes(root, "COCO's format", partial(read_coco_objects, files))
    if root.is_dir():
        if folders := voc_folders(root):
            return Boxes(root, "Pascal VOC's format", partial(read_voc, root, folders))
        if holds_pairs(root, XML_FILES):
            return Boxes(root, "XML files", partial(read_xml_files, root))
    if home := yolo_root(root):
        return Boxes(root, "YOLO's format", partial(read_yolo, root, home))
    raise NoBoxesError(
        f"{where!r} has no boxes: give a folder or a .json file in COCO's format, a folder with an "
        "XML file beside each picture or in Pascal VOC's JPEGImages/ and Annotations/, or YOLO's "
        "data.yaml or images/ and labels/"
    )


def open_clips(where: str, rule: SplitRule = DEFAULT_RULE) -> DataSet:
    """The data set at `where`, whose items are videos with one class each.

    As `open_data`, with videos in place of images: a folder with one subfolder per class, or with
    train/ beside val/ or test/, a table with the columns path, label and optionally split, and tar
    shards as `fullstride data pack` writes them. A video is a file or, except in shards, a folder
    of frames: JPEGs or PNGs in natural order. `Images.source` is the path or the bytes of a video,
    and `Images.picture` its middle frame.

    Splits are taken by the rules of `open_data`. Clips cut from one recording must be in one split:
    name the recording by `group`. Copies of files are recognised, copies of folders of frames not.

    Classes whose names differ only by "left" and "right" are directions, which a mirror image
    exchanges: `DataSet.mirror` is then False, and a note says so.

    Raises ValueError in one line.
    """
    if where == DIGITS:
        raise ValueError(
            f"{DIGITS!r} are images: give a folder with one subfolder of videos per class"
        )
    listing = open_listing(where, rule.group, kind=VIDEOS)
    data = from_listing(listing, rule)
    if any(name.lower().endswith(VIDEOS.suffixes) for name in data.train.names):
        check_decoder()
    data = data.map_images(lambda images: replace(images, read=MiddleFrame(listing.file)))
    if pair := _directions(data.classes):
        note = f"clips are not mirrored, as {pair[0]!r} and {pair[1]!r} are directions"
        data = replace(data, mirror=False, notes=(*data.notes, note))
    return data.without(rule.left_out)


def _directions(classes: tuple[str, ...]) -> tuple[str, str] | None:
    """Two classes whose names differ by "left" and "right"; None if there are none."""
    names = {name.lower(): name for name in classes}
    for name in classes:
        other = name.lower().replace("left", "right")
        if other != name.lower() and other in names:
            return name, names[other]
    return None


def open_labels(where: str, rule: SplitRule = DEFAULT_RULE) -> DataSet:
    """The data set at `where`, whose targets are sorted tuples of the indices of all labels.

    An image without labels has the target (). It is a negative example of all classes.

    A table is a .csv or .tsv file with the columns path and labels, and optionally split. A cell
    has any number of labels, separated by ; | , or spaces. The separator is recognised, or stands
    behind the table's name, "photos.csv?separator=;". Without a column of labels, every other
    column is a class, with 1 (true, yes) or 0 (false, no, nothing). Rows of one image are joined.

    A folder with `annotations/instances_train2017.json` and the like, or with
    `train/_annotations.coco.json`, or such a .json file, is in COCO's format: the labels of an
    image are the categories of its annotations. Images are in a folder of the split's name, in
    images/, or beside the annotations.

    All other data of `open_data` have one label for each image, but images with the same bytes in
    several class folders are one image with all their labels.

    Splits are taken by the rules of `open_data`, where an image counts for its rarest label among
    the images that splits are taken from: frequent labels are in every split anyhow. Images
    without labels are a class of their own.

    Raises ValueError in one line.
    """
    data = _open_labels(where, rule)
    splits = (data.train, data.val, data.test)
    if count := sum(not target for images in splits for target in images.targets):
        data = replace(data, notes=(*data.notes, f"no label for {count_of(count, 'image')}"))
    return data.without(rule.left_out)


def _open_labels(where: str, rule: SplitRule) -> DataSet:
    if where == DIGITS:
        data = digits(rule)
        return data.with_targets(data.classes, lambda label: (label,))
    path, separator = option_in(where, "separator")
    if is_table(path):
        return from_listing(read_label_table(find_table(path), separator, rule.group), rule)
    if files := coco_files(Path(where)):
        return from_listing(read_coco_labels(files).at(Path(where).resolve()), rule)
    listing = open_listing(where, rule.group)
    if listing.read:  # pixels without files, each image once
        data = from_listing(listing, rule)
        return data.with_targets(data.classes, lambda label: (label,))
    listing, copies = join_copies(listing, rule.copies)
    data = from_listing(listing, replace(rule, copies=copies))
    return replace(data, rule=replace(data.rule, copies=copies))


def option_in(where: str, name: str) -> tuple[str, str | None]:
    """Split DATA?name=TEXT into both, unless it is an existing path."""
    path, mark, value = where.rpartition(f"?{name}=")
    return (path, value) if mark and not Path(where).exists() else (where, None)


def open_masks(where: str, rule: SplitRule = DEFAULT_RULE, colours: str = "") -> DataSet:
    """The data set at `where`, whose targets are `MaskFile`s: a class for each pixel.

    A folder has pictures in images/ and PNGs of the same names in masks/, whose values are classes
    from 0 on, and 255 for pixels that are neither trained on nor scored. With splits, these are
    images/train and masks/train, train/images and train/masks, or train/ and masks/train, beside
    val and test; else splits are taken by the rules of `open_data`, which consider no classes here.
    images/ may be rgb/, and masks/ annotations/ or labels/.

    The names of the classes are the lines of classes.txt beside the masks or in the folder. Values
    whose line is "ignored" are treated as 255. Without the file, the classes are "0" to the largest
    value of the training. A release of ADE20K, with images/training, annotations/training and
    objectInfo150.txt, has the 150 classes of that file; value 0 is ignored.

    Masks in colours need a table of colours: the file `colours`, or label_colors.txt, labelmap.txt
    or another of `COLOUR_TABLES` with the data; "voc" is Pascal VOC's palette. A line of the table
    is 128 0 0 road, and "ignored" is no class. The values of a PNG with a palette are classes, and
    the values of a grey PNG too, unless the table has greys alone.

    A folder with JPEGImages, SegmentationClass and ImageSets/Segmentation is one year of VOC.

    Raises ValueError in one line.
    """
    folder, written = option_in(where, "colours")
    chosen = colours or written or ""
    root = _map_root(folder, MASKS)
    pairs = read_masks(root)
    train = (pairs.files[each.name].name for each in pairs.listing.splits["train"])
    is_coloured = is_in_colours(root / next(train))
    table = find_colours(root, pairs.folder, chosen) if chosen or is_coloured else None
    if is_coloured and table is None:
        raise ValueError(
            f"the masks in {str(pairs.folder)!r} are in colours: name a table of these by "
            "--task.colours FILE, with a line such as 128 0 0 road for each class, or "
            f"--task.colours {VOC_PALETTE} for Pascal VOC's palette"
        )
    names = table.names if table else class_names(root, pairs.folder) or _numbers(root, pairs)
    classes = _classes_of_values(names)

    def target(name: str) -> MaskFile:
        return MaskFile(root, name, classes, table.colours if table else ())

    option = ""
    if chosen:
        option = f"?colours={chosen if chosen == VOC_PALETTE else Path(chosen).resolve()}"
    listing = replace(pairs.listing.at(root, option), classes=names)
    data = _open_maps(listing, rule, pairs.files, target)
    if LEFT_OUT not in names:
        _check_ignored(data, pairs.folder)
    return replace(data, classes=tuple(name for name in data.classes if name != LEFT_OUT))


def open_depths(where: str, rule: SplitRule = DEFAULT_RULE) -> DataSet:
    """The data set at `where`, whose targets are `DepthFile`s: the depth of each pixel.

    The layout is as for `open_masks`, with depth/ in place of masks/: PNGs of 16 bits in
    millimetres, where 0 is no depth, or .npy files with an array (H, W) of metres, where values
    that are not finite and positive are no depth. The one class, "depth", is a network's output.

    Raises ValueError in one line.
    """
    root = _map_root(where, DEPTHS)
    pairs = read_pairs(root, DEPTHS)
    listing = replace(pairs.listing.at(root), classes=("depth",))
    return _open_maps(listing, rule, pairs.files, partial(DepthFile, root))


def _map_root(where: str, kind: PairKind) -> Path:
    if not where or not Path(where).is_dir():
        raise ValueError(
            f"{where!r} is no folder: give one with pictures in images/ and {kind.files.name} of "
            f"the same names in {kind.folders[0]}/"
        )
    return Path(where).resolve()


def _open_maps(
    listing: Listing, rule: SplitRule, files: Mapping[str, Sample], target: Callable[[str], MapFile]
) -> DataSet:
    """Pictures and the file of each; `target` makes the target from the name of this file."""
    data = from_listing(listing, rule)

    def with_maps(images: Images) -> Images:
        targets = tuple(target(files[name].name) for name in images.names)
        return replace(images, targets=targets)

    maps = sorted((name, *each) for name, each in files.items())
    data = replace(data.map_images(with_maps), fingerprint=fingerprint(data.fingerprint, maps))
    return data.without(rule.left_out)


def _numbers(root: Path, pairs: PairedListing) -> tuple[str, ...]:
    """The names "0" to the largest value of the training masks, each of which is read."""
    largest = -1
    for sample in counted(pairs.listing.splits["train"], "masks"):
        name = pairs.files[sample.name].name
        try:
            values = read_png(root / name, name)
        except UnreadableImage:
            continue  # it is left out where it is used
        labelled = values != IGNORED
        largest = max(largest, int(values.max(where=labelled, initial=0)) if labelled.any() else -1)
    if largest < 0:
        raise ValueError(f"no mask in {str(pairs.folder)!r} has a class: add some")
    if largest >= MAX_CLASSES:
        raise ValueError(
            f"masks in {str(pairs.folder)!r} have values up to {largest}: use at most "
            f"{MAX_CLASSES} classes from 0 on, and {IGNORED} for pixels without one"
        )
    return tuple(map(str, range(largest + 1)))


def _check_ignored(data: DataSet, folder: Path) -> None:
    """Raise ValueError if the training masks have `IGNORED` pixels and fewer than two classes."""
    values: set[int] = set()
    for target in counted(data.train.targets, "masks"):
        with suppress(UnreadableImage):
            values.update(target.read().tobytes())
        if len(values - {IGNORED}) > 1:
            return
    if IGNORED in values:
        raise ValueError(
            f"masks in {str(folder)!r} have fewer than two classes beside {IGNORED}, which is "
            "ignored: for masks in black and white give --task.colours FILE, with the lines 0 0 0 "
            "background and 255 255 255 object"
        )


def _classes_of_values(names: tuple[str, ...]) -> bytes:
    """The class of each value; values named `LEFT_OUT` are `IGNORED`, the others are numbered."""
    left_out = [name == LEFT_OUT for name in names]
    return bytes(
        IGNORED if out else value - sum(left_out[:value]) for value, out in enumerate(left_out)
    )


# The task of a data set, recognised by its files: boxes, masks, depths, labels or classes.

CLASSIFY = "classify"  # the task of images with one class each, and of unrecognised data
# Folder names in the layouts of other tasks, which are no classes.
LAYOUT = {*PICTURES, *MASKS.folders, *DEPTHS.folders, *SPLITS, "Annotations", "SegmentationClass"}
LAYOUT |= {"SegmentationObject", "ImageSets", "xml", "xmls"}


class Purpose(NamedTuple):
    """A task, and the part of the data that is for it."""

    task: str
    what: str


def recognise(where: str) -> Purpose:
    """The task that the data at `where` are for, by names of files and columns.

    Raises ValueError, in one line with the flag for each, if the data may be for several tasks.
    """
    if where == DIGITS:
        return Purpose(CLASSIFY, "")
    for option, task in (("separator", "multilabel"), ("colours", "segment")):
        if option_in(where, option)[1] is not None:
            return Purpose(task, f"the option {option!r}")
    if is_table(where):
        return _of_table(Path(where))
    purposes = _of_folder(where)
    if len(purposes) > 1:
        ways = "; or ".join(f"--task {task} for its {what}" for task, what in purposes)
        raise ValueError(f"{where!r} may be for several tasks: give {ways}")
    return purposes[0] if purposes else Purpose(CLASSIFY, "")


def _of_folder(where: str) -> list[Purpose]:
    purposes = []
    with suppress(NoBoxesError):
        purposes.append(Purpose("detect", f"boxes in {find_boxes(where).format}"))
    # a pattern of shards may be too long a name for `Path.is_dir`
    if not os.path.isdir(where):  # noqa: PTH112
        return purposes
    root = Path(where)
    if (root / "SegmentationClass").is_dir() or holds_pairs(root, MASKS):
        purposes.append(Purpose("segment", "pictures with masks of the same names"))
    if holds_pairs(root, DEPTHS):
        purposes.append(Purpose("depth", "pictures with depth maps of the same names"))
    if has_label_sets(root):
        purposes.append(Purpose("multilabel", "shards of several labels"))
    classes = _class_folders(root)
    if purposes and classes:
        purposes.append(Purpose(CLASSIFY, f"class folders, {classes[0]!r} and {classes[1]!r}"))
    if not classes and (clips := _class_folders(root, VIDEOS.suffixes)):
        purposes.append(Purpose("video", f"folders of videos, {clips[0]!r} and {clips[1]!r}"))
    if not purposes and not classes and (path := _own_format(root)):
        raise ValueError(
            f"{str(path)!r} is in a labelling tool's own format: export in COCO's, YOLO's or "
            "Pascal VOC's"
        )
    return purposes


def _own_format(root: Path) -> Path | None:
    """A file in CVAT's or Label Studio's own format in a folder; None if there is none."""
    for path in (root / "annotations.xml", *sorted(root.glob("*.json"))):
        start = b"<" if path.suffix == ".xml" else b"["
        with suppress(OSError, ValueError), open_regular(path) as file:
            if file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(start):
                return path
    return None


def _class_folders(root: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[str]:
    """Two folders of such files whose names no layout has, in the root or a split; else none."""
    for folder in (root, *(root / name for name in subfolders(root) if name.lower() in SPLITS)):
        classes = []
        for name in subfolders(folder):
            if name not in LAYOUT and _has_files(folder / name, suffixes):
                classes.append(name)
            if len(classes) == 2:
                return classes
    return []


def _has_files(folder: Path, suffixes: tuple[str, ...]) -> bool:
    with os.scandir(folder) as entries:
        return any(each.name.lower().endswith(suffixes) for each in entries)


def _of_table(table: Path) -> Purpose:
    """Judge by the columns, and by cells with several labels that other cells have too."""
    if not table.is_file():
        return Purpose(CLASSIFY, "")  # opening it says what is wrong
    text = table_text(table)
    header = find_header(table, text, {**COLUMNS, "label": LABELS})
    if "label" not in header.columns:
        return _of_columns(table, text, header)
    index = header.columns["label"]
    if header.lower[index] not in COLUMNS["label"]:
        return Purpose("multilabel", f"the column {header.titles[index]!r}")
    for sign in ";|":
        if sign == header.delimiter or sign not in text:
            continue
        rows = read_rows(table, text, header.delimiter)
        cells = {fields[index] for _, fields in rows if len(fields) > index}
        labels = {label.strip() for cell in cells for label in cell.split(sign)}
        if len(labels) < len(cells):
            return Purpose("multilabel", f"cells of labels that are separated by {sign}")
    return Purpose(CLASSIFY, "")


def _of_columns(table: Path, text: str, header: Header) -> Purpose:
    """Judge a table without a label column by its first row: columns of labels have 1 or 0."""
    (_, fields), *_ = read_rows(table, text, header.delimiter)
    others = [word.lower() for i, word in enumerate(fields) if i not in header.columns.values()]
    if others and {*others} <= {*PRESENT, *ABSENT, ""}:
        return Purpose("multilabel", "a column for each label")
    return Purpose(CLASSIFY, "")


def check_place(where: str, task: str = "") -> None:
    """Raise ValueError if `where` names no folder or file, in the words of the task's reader."""
    place = where
    for option in ("separator", "colours"):
        place, _ = option_in(place, option)
    place, _ = choice_in(place)
    if where == DIGITS or os.path.exists(place):  # noqa: PTH110  names may be too long for `Path`
        return
    if task == "detect" or place.lower().endswith((".json", ".yaml")):
        find_boxes(place)
    elif task in ("segment", "depth"):
        _map_root(place, MASKS if task == "segment" else DEPTHS)
    elif is_table(place):
        find_table(place)
    else:
        find_folder(str(Path(place).parent) if place.lower().endswith(".tar") else place)


def check_purpose(where: str) -> None:
    """Raise ValueError, with the command to use, if the data are for another task."""
    task, what = recognise(where)
    if task != CLASSIFY:
        raise ValueError(
            f"{where!r} has {what}, and this command is for images with one class each: train on "
            f"it with fullstride train {where} --task {task} --model NAME --out FOLDER"
        )
