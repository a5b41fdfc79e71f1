"""Where are the objects in images? `open_boxes` opens data whose images have boxes with classes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fullstride.data.dataset import DataSet, Source, from_source
from fullstride.data.readers.coco import coco_files, read_coco_objects
from fullstride.data.readers.folder import find_folder
from fullstride.data.readers.objects import Objects
from fullstride.data.readers.splits import SplitRule
from fullstride.data.readers.voc import read_voc, voc_folders

__all__ = ["Objects", "open_boxes"]


def open_boxes(where: str, **how: Any) -> DataSet:
    """The data set at `where`, whose targets are `Objects`: boxes, class indices and difficulty.

    A box is (left, top, right, bottom) in pixels of the upright image, from 0 to its width or
    height. Boxes beyond their image are clipped; empty, inverted and infinite ones are left out; a
    note of the data set counts both. An image without objects is an example of the background.

    COCO's format: a folder with `annotations/instances_train2017.json` and the like, or with
    `train/_annotations.coco.json`, or such a .json file. Images are in a folder of the split's
    name, in images/, or beside the annotations. `iscrowd` makes an object difficult.

    Pascal VOC's format: a folder with JPEGImages/, Annotations/ and ImageSets/Main/train.txt,
    val.txt, trainval.txt and test.txt, or one with several such folders, such as VOC2007/ and
    VOC2012/. Of several, with a test in one of them, all other images are for training.

    Splits that the data do not have are taken by the rules of `fullstride.data.dataset.open_data`,
    by the rarest class of an image's objects.

    Args:
        where: The data set.
        how: The keyword arguments of `open_data`.

    Raises ValueError in one line.
    """
    left_out = how.pop("left_out", ())
    data = _open(where, SplitRule(**how))
    splits = (data.train, data.minival, data.test)
    if count := sum(not target.labels for images in splits for target in images.targets):
        data = replace(data, notes=(*data.notes, f"{count:,} images have no object"))
    return data.without(left_out) if left_out else data


def _open(where: str, rule: SplitRule) -> DataSet:
    if files := coco_files(Path(where)):
        place = Path(where).resolve()
        return from_source(Source(place.stem, str(place), read_coco_objects(files)), rule)
    root = find_folder(where)
    folders = voc_folders(root)
    if not folders:
        raise ValueError(
            f"{where!r} has no boxes: give a folder in COCO's format, with "
            "annotations/instances_train.json, or in Pascal VOC's, with JPEGImages/ and "
            "Annotations/, or a .json file"
        )
    return from_source(Source(root.name, str(root), read_voc(root, folders)), rule)
