"""What data are for is recognised by their files, and said or refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fullstride import cli
from fullstride.data.pack import pack
from fullstride.data.readers.splits import SplitRule
from fullstride.data.targets import check_purpose, open_labels, recognise
from fullstride.examples.files import write_scenes

XML = (
    "<annotation><size><width>9</width><height>7</height></size><object><name>cat</name><bndbox>"
    "<xmin>2</xmin><ymin>3</ymin><xmax>5</xmax><ymax>6</ymax></bndbox></object></annotation>"
)


def pictures(folder: Path, count: int = 6) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", (9, 7), (number, 40, 9)).save(folder / f"{number}.jpg")
    return [f"{number}.jpg" for number in range(count)]


def clips(root: Path) -> None:
    pictures(root / "down" / "a folder of frames")
    for name in ("down", "up"):
        (root / name).mkdir(exist_ok=True)
        (root / name / "1.MP4").touch()


def coco(root: Path, file: str, folder: str = "images") -> None:
    names = pictures(root / folder)
    content = {
        "images": [{"id": n, "file_name": name} for n, name in enumerate(names)],
        "categories": [{"id": 0, "name": "cat"}],
        "annotations": [
            {"id": n, "image_id": n, "category_id": 0, "bbox": [1, 2, 4, 4]} for n in range(6)
        ],
    }
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(json.dumps(content))


def maps(root: Path, folder: str) -> None:
    pictures(root / "images")
    (root / folder).mkdir()
    for number in range(6):
        values = np.full((7, 9), number % 2, np.uint8)
        Image.fromarray(values).save(root / folder / f"{number}.png")


def texts(root: Path, pictures_in: str, folder: str, text: str) -> None:
    for name in pictures(root / pictures_in):
        path = (root / folder / name).with_suffix(".xml" if text == XML else ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def classes(root: Path, text: str) -> None:
    for name in ("cat", "dog"):
        pictures(root / name)
    (root / "data.yaml").write_text(text)


def shards(root: Path) -> str:
    names = pictures(root / "source", 4)
    rows = [f"{name},{'x y' if number % 2 else 'x'}" for number, name in enumerate(names)]
    (root / "source" / "t.csv").write_text("\n".join(["path,labels", *rows]))
    [*pack(open_labels(str(root / "source" / "t.csv"), SplitRule(val=0, test=0)), root / "packed")]
    return "packed"


def coco128(root: Path) -> None:
    texts(root, "images/train2017", "labels/train2017", "0 .5 .5 .2 .2")
    (root / "data.yaml").write_text("train: images/train2017\nnames: [cat]")


def label_studio_yolo(root: Path) -> None:
    texts(root, "images", "labels", "0 .5 .5 .2 .2")
    (root / "notes.json").write_text('{"categories": [{"id": 0, "name": "cat"}]}')


def cvat_masks(root: Path) -> None:
    maps(root, "SegmentationClass")
    (root / "images").rename(root / "JPEGImages")
    (root / "ImageSets" / "Segmentation").mkdir(parents=True)
    (root / "ImageSets" / "Segmentation" / "default.txt").write_text("0\n1\n")


def table(root: Path, text: str) -> str:
    (root / "all.csv").write_text(text)
    return "all.csv"


LAYOUTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "COCO's folder": ("detect", lambda root: coco(root, "annotations/instances_train.json")),
    "one file of annotations": ("detect", lambda root: coco(root, "annotations.json")),
    "Label Studio": ("detect", lambda root: coco(root, "result.json")),
    "labelImg": ("detect", lambda root: texts(root, ".", ".", XML)),
    "labelImg with splits": ("detect", lambda root: texts(root, "train", "train", XML)),
    "XML files in annotations": ("detect", lambda root: texts(root, "images", "annotations", XML)),
    "YOLO": ("detect", lambda root: texts(root, "images", "labels", "0 .5 .5 .2 .2")),
    "Label Studio's YOLO": ("detect", lambda root: label_studio_yolo(root)),
    "masks": ("segment", lambda root: maps(root, "masks")),
    "CVAT's masks": ("segment", lambda root: cvat_masks(root)),
    "masks in labels": ("segment", lambda root: maps(root, "labels")),
    "depths": ("depth", lambda root: maps(root, "depth")),
    "classes": ("classify", lambda root: [pictures(root / name) for name in ("cat", "dog")]),
    "videos": ("video", clips),
    "videos with splits": ("video", lambda root: clips(root / "train")),
    "captions": ("classify", lambda root: texts(root, "cat", "cat", "0 .5 .5 .2 .2")),
    "several labels": ("multilabel", lambda root: table(root, "path,labels\na,x y\nb,\n")),
    "a column each": ("multilabel", lambda root: table(root, "path,cat,dog\na,1,0\nb,1,1\n")),
    "cells": ("multilabel", lambda root: table(root, "path,label\na,x;y\nb,x\nc,y\n")),
    "other columns": ("classify", lambda root: table(root, "path,width\na,640\nb,480\n")),
    "classes and a .yaml file": ("classify", lambda root: classes(root, "names: [cat, dog]")),
    "classes and a broken one": ("classify", lambda root: classes(root, "names: [")),
    "COCO128": ("detect", lambda root: coco128(root)),
    "shards of several labels": ("multilabel", lambda root: shards(root)),
    "one label": ("classify", lambda root: table(root, "path,label\na,x; or y\nb,z\n")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_task_of_a_layout_is_recognised(tmp_path, name):
    task, write = LAYOUTS[name]
    file = write(tmp_path)
    where = str(tmp_path / file) if isinstance(file, str) else str(tmp_path)
    assert recognise(where).task == task
    if task == "classify":
        check_purpose(where)
        return
    with pytest.raises(ValueError, match=f"fullstride train .* --task {task} ") as caught:
        check_purpose(where)
    assert "\n" not in str(caught.value)


def test_an_option_behind_a_name_says_the_task(tmp_path):
    assert recognise("photos.csv?separator=;").task == "multilabel"
    assert recognise("photos?colours=voc").task == "segment"
    assert recognise("x" * 5000 + "-{000000..000007}.tar").task == "classify"
    assert recognise("digits").task == recognise("nowhere").task == "classify"


def test_a_command_takes_an_option_behind_a_name(tmp_path, capsys):
    names, table, shards = pictures(tmp_path), tmp_path / "tags.csv", tmp_path / "shards"
    table.write_text("path,labels\n" + "".join(f"{name},a|b; c\n" for name in names))
    assert cli.run(["data", "pack", f"{table}?separator=|", str(shards)]) == 0
    assert open_labels(str(shards)).classes == ("a", "b; c")
    for option in ("separator=|", "colours=voc"):
        assert cli.run(["data", "pack", f"{tmp_path}/none?{option}", str(tmp_path / "b")]) == 2
        assert f"no folder '{tmp_path}/none'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("annotations.xml", "<annotations><version>1.1</version></annotations>"),  # CVAT
        ("project-1.json", '[{"id": 1, "image": "a.jpg"}]'),  # Label Studio
    ],
)
def test_a_labelling_tools_own_format_is_named_with_those_to_export(tmp_path, name, text):
    pictures(tmp_path / "images")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}.*export in COCO's"):
        recognise(str(tmp_path))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("classes", ("--task segment", "--task classify for its class folders, 'cat' and 'dog'")),
        ("boxes", ("--task detect", "--task segment")),
    ],
)
def test_data_for_several_tasks_are_refused_with_a_flag_for_each(tmp_path, more, words):
    maps(tmp_path, "masks")
    if more == "classes":
        for name in ("cat", "dog"):
            pictures(tmp_path / name)
    else:
        coco(tmp_path, "annotations.json")
    with pytest.raises(ValueError, match="may be for several tasks: give") as caught:
        recognise(str(tmp_path))
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_a_study_of_scaling_refuses_masks_and_train_says_that_it_learns_them(tmp_path, capsys):
    maps(tmp_path / "data", "masks")
    where, out = str(tmp_path / "data"), str(tmp_path / "out")
    assert cli.run(["study", "scale", where, "--models", "genet_tiny", "--out", out]) == 2
    error = capsys.readouterr().err
    assert "--task segment" in error
    assert error.count("\n") == 1
    command = ["train", where, "--model", "genet_tiny", "--out", out, "--recipe.score", "none"]
    assert cli.run(command) == 2
    said, error = capsys.readouterr().err.splitlines()
    assert f"{where!r} has pictures with masks of the same names: the task is segment" in said
    assert "the task segment has miou" in error
    # the given task wins
    assert cli.run([*command, "--task", "classify"]) == 2
    assert "the task classify has" in capsys.readouterr().err


def test_shards_are_packed_by_the_task_of_the_data_and_boxes_are_refused(tmp_path, capsys):
    counts = {"train": 6, "val": 2, "test": 2}
    write_scenes(tmp_path / "scenes", counts, 32)
    labels, shards = str(tmp_path / "scenes" / "train" / "labels.csv"), tmp_path / "shards"
    assert cli.run(["data", "pack", labels, str(shards)]) == 0
    assert "multilabel" in capsys.readouterr().err
    assert any(len(each) != 1 for each in open_labels(str(shards)).train.targets)
    boxes = ["data", "pack", str(tmp_path / "scenes"), str(tmp_path / "b"), "--task", "detect"]
    assert cli.run(boxes) == 2
    assert "neither classes nor labels" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
