"""Are boxes read as their files have them? From hand-written COCO and Pascal VOC files."""

import json
from pathlib import Path

import pytest
from PIL import Image

from fullstride.data.readers.listing import Objects
from fullstride.data.readers.splits import SplitRule
from fullstride.data.targets import open_boxes

NOTHING = Objects((), (), ())


def write_images(folder: Path, *names: str, size: tuple[int, int] = (20, 10)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        Image.new("RGB", size, (40 * number % 256, 13 * len(str(folder)) % 256, 9 * number)).save(
            folder / name
        )


def coco(images: dict[int, str], boxes: list[tuple], **size: int) -> dict:
    """The content of a file; a box is (image, category, bbox, crowd)."""
    return {
        "images": [{"id": key, "file_name": name, **size} for key, name in images.items()],
        "annotations": [
            {"id": 100 + i, "image_id": image, "category_id": label, "bbox": box, "iscrowd": crowd}
            for i, (image, label, box, crowd) in enumerate(boxes)
        ],
        "categories": [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}],
    }


BOXES = [(0, 7, [1, 2, 3.5, 4], 0), (0, 3, [0, 0, 20, 10], 1), (1, 3, [5, 5, 1, 2], 0)]


def write_coco(root: Path, boxes: list[tuple] = BOXES, **size: int) -> str:
    (root / "annotations").mkdir(parents=True)
    for split, named in (("train", "abc"), ("val", "d"), ("test", "e")):
        names = [f"{each}.png" for each in named]
        write_images(root / split, *names)
        rows = boxes if split == "train" else [(0, 7, [2, 2, 4, 4], 0)]
        content = coco(dict(enumerate(names)), rows, **size)
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return str(root)


def targets(data, split: str = "train") -> dict[str, Objects]:
    images = getattr(data, split)
    return {
        Path(name).stem: target for name, target in zip(images.names, images.targets, strict=True)
    }


def test_coco_boxes_are_edges_with_classes_by_the_order_of_ids(tmp_path):
    data = open_boxes(write_coco(tmp_path, width=20, height=10))
    assert data.classes == ("dog", "cat")
    assert targets(data) == {
        "a": Objects(((1, 2, 4.5, 6), (0, 0, 20, 10)), (1, 0), (False, True)),
        "b": Objects(((5, 5, 6, 7),), (0,), (False,)),
        "c": NOTHING,
    }
    assert [*targets(data, "val")] == ["d"]
    assert targets(data, "test") == {"e": Objects(((2, 2, 6, 6),), (1,), (False,))}
    assert any("no object in 1 image" in note for note in data.notes)
    again = open_boxes(data.where, data.rule)
    assert again.fingerprint == data.fingerprint
    assert data.labels("train") == [(1, 0), (0,), ()]


def test_another_box_is_another_data_set(tmp_path):
    moved = [(0, 7, [1, 2, 3.6, 4], 0), *BOXES[1:]]
    first = open_boxes(write_coco(tmp_path / "a"))
    second = open_boxes(write_coco(tmp_path / "b", moved))
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize("size", [{}, {"width": 20, "height": 10}])
def test_boxes_that_cannot_be_used_are_named_and_left_out(tmp_path, size):
    bad = [
        (0, 7, [-3, 4, 8, 30], 0),  # clipped
        (0, 7, [5, 5, -2, 2], 0),  # inverted
        (0, 7, [5, 5, 0, 2], 0),  # empty
        (0, 7, [25, 5, 4, 4], 0),  # outside
        (0, 7, [float("nan"), 5, 4, 4], 0),
        (1, 3, [5, 5, float("inf"), 4], 0),
    ]
    data = open_boxes(write_coco(tmp_path, [*bad, *BOXES[2:]], **size))
    assert targets(data)["a"] == Objects(((0, 4, 5, 10),), (1,), (False,))
    clipped = next(note for note in data.notes if "clipped" in note)
    assert clipped.startswith("1 box reaches beyond")
    assert "100" in clipped
    assert "a.png" in clipped
    for count, reason, first in ((2, "no area", 101), (1, "outside", 103), (2, "no finite", 104)):
        (note,) = (note for note in data.notes if reason in note)
        assert note.startswith("1 box is" if count == 1 else "2 boxes have")
        assert f"{first}" in note


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"bbox": [1, 2, 3.5, 4]', '"bbox": [1, 2, 3.5]', ("annotation 100", "bbox")),
        ('"bbox": [1, 2, 3.5, 4]', '"bbox": "x"', ("annotation 100", "bbox")),
        ('"bbox": [1, 2, 3.5, 4]', '"bbox": null', ("annotation 100", "bbox")),
        ('"bbox": [1, 2, 3.5, 4]', f'"bbox": [1, 2, 3, 1{"0" * 400}]', ("annotation 100",)),
        ('"category_id": 3', '"category_id": 9', ("annotation 101", "9")),
        ('"iscrowd": 0}], "categories"', '"iscr', ("whole JSON",)),
    ],
)
def test_a_bad_coco_file_is_one_line_with_its_entry(tmp_path, old, new, words):
    where = write_coco(tmp_path)
    path = tmp_path / "annotations" / "instances_train.json"
    text = path.read_text()
    assert old in text
    cut = text[: text.index(old)] + new
    path.write_text(cut if words == ("whole JSON",) else text.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"instances_train\.json") as raised:
        open_boxes(where)
    assert all(word in str(raised.value) for word in words)
    assert str(raised.value).isprintable()


# ---- Pascal VOC


def xml(*objects: tuple, size: str = "<size><width>20</width><height>10</height></size>") -> str:
    text = "".join(
        f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>"
        + "".join(
            f"<{edge}>{value}</{edge}>"
            for edge, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
        )
        + "</bndbox><part><name>head</name></part></object>"
        for name, box, difficult in objects
    )
    return f"<annotation><filename>other.jpg</filename>{size}{text}</annotation>"


def write_voc(folder: Path, images: dict[str, str], **lists: str) -> Path:
    write_images(folder / "JPEGImages", *(f"{name}.jpg" for name in images))
    (folder / "Annotations").mkdir()
    for name, text in images.items():
        (folder / "Annotations" / f"{name}.xml").write_text(text)
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    for name, ids in lists.items():
        (folder / "ImageSets" / "Main" / f"{name}.txt").write_text("\n".join(ids.split()) + "\n")
    return folder


DOG = xml(("dog", (1, 1, 20, 10), 0), ("cat", (3, 4, 5, 6), 1))
CAT = xml(("cat", (2, 2, 2, 2), 0))


def test_voc_counts_pixels_from_one_and_includes_the_last(tmp_path):
    images = {"a": DOG, "b": CAT, "c": xml(), "d": CAT}
    write_voc(tmp_path, images, train="a b", val="c", test="d", aeroplane_train="a -1")
    data = open_boxes(str(tmp_path))
    assert data.classes == ("cat", "dog")
    assert targets(data) == {
        "a": Objects(((0, 0, 20, 10), (2, 3, 5, 6)), (1, 0), (False, True)),
        "b": Objects(((1, 1, 2, 2),), (0,), (False,)),
    }
    assert targets(data, "val") == {"c": NOTHING}
    assert [*targets(data, "test")] == ["d"]
    assert open_boxes(data.where, data.rule).fingerprint == data.fingerprint


def test_two_voc_years_train_on_trainval_and_test_on_the_test_of_one(tmp_path):
    first = {f"0{i}": (DOG, CAT)[i % 2] for i in range(8)}
    write_voc(tmp_path / "VOC2007", first, trainval="00 01 02 03", val="03", test="06 07")
    second = {f"1{i}": (DOG, CAT)[i % 2] for i in range(8)}
    write_voc(tmp_path / "VOC2012", second, train="10 11 12", val="13 14", trainval="10 11")
    data = open_boxes(str(tmp_path))
    assert sorted(targets(data, "test")) == ["06", "07"]
    others = [*targets(data), *targets(data, "val")]
    assert sorted(others) == ["00", "01", "02", "03", "10", "11", "12", "13", "14"]
    whole = open_boxes(str(tmp_path), SplitRule(val=0))
    assert len(whole.train) == 9
    assert whole.train.picture(0).size == (20, 10)


def test_annotations_without_lists_have_their_splits_taken(tmp_path):
    write_voc(tmp_path, {f"{i:02}": (DOG, CAT)[i % 2] for i in range(20)})
    data = open_boxes(str(tmp_path))
    assert len(data.train) + len(data.val) + len(data.test) == 20
    assert all(len(each) for each in (data.train, data.val, data.test))


def test_voc_boxes_that_cannot_be_used_are_named_and_left_out(tmp_path):
    bad = [("dog", (-5, 1, 30, 5), 0), ("dog", (9, 1, 3, 5), 0), ("dog", ("nan", 1, 3, 5), 0)]
    bad += [("dog", (-9, 1, 40, 5), 0), ("dog", (25, 1, 30, 5), 0)]
    write_voc(tmp_path, {"a": xml(*bad, size=""), "b": CAT}, train="a b", val="a")
    with pytest.raises(ValueError, match="'JPEGImages/a.jpg' in val and in train"):
        open_boxes(str(tmp_path))
    (tmp_path / "ImageSets/Main/val.txt").write_text("b\n")
    (tmp_path / "ImageSets/Main/train.txt").write_text("a\n")
    with pytest.raises(ValueError, match=r"b\.xml' has the class 'cat'"):
        open_boxes(str(tmp_path))
    (tmp_path / "Annotations" / "b.xml").write_text(xml())
    data = open_boxes(str(tmp_path))
    assert targets(data)["a"].boxes == ((0, 0, 20, 5),)
    notes = [note for note in data.notes if "a.xml" in note]
    reasons = ("twice", "reaches beyond", "no finite", "no area", "outside")
    assert len(notes) == len(reasons)
    assert all(any(reason in note for note in notes) for reason in reasons)


BOMB = '<!DOCTYPE a [<!ENTITY b "bb">]><annotation><filename>&b;</filename></annotation>'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DOG[:200], "whole annotation"),
        ("", "whole annotation"),
        (BOMB, "DOCTYPE"),
        (DOG.replace("<name>dog</name>", ""), "object 1"),
        (DOG.replace("<xmax>5</xmax>", ""), "object 2"),
        (DOG.replace("<xmax>5</xmax>", "<xmax>five</xmax>"), "object 2"),
    ],
)
def test_a_bad_voc_file_is_one_line_with_its_object(tmp_path, text, words):
    write_voc(tmp_path, {"a": text, "b": CAT}, train="a b")
    with pytest.raises(ValueError, match=words) as raised:
        open_boxes(str(tmp_path))
    assert "a.xml" in str(raised.value)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("kind", ["xml", "jpg", "list"])
def test_a_missing_file_of_a_voc_folder_is_one_line(tmp_path, kind):
    write_voc(tmp_path, {"a": DOG, "b": CAT}, train="a b")
    if kind == "list":
        (tmp_path / "ImageSets/Main/train.txt").write_text("../../a\n")
    else:
        folder = {"xml": "Annotations", "jpg": "JPEGImages"}[kind]
        (tmp_path / folder / f"b.{kind}").unlink()
    with pytest.raises(ValueError, match={"list": "'../../a'"}.get(kind, f"b.{kind}")):
        open_boxes(str(tmp_path))


def test_a_folder_of_classes_has_no_boxes(tmp_path):
    write_images(tmp_path / "cat", "a.png")
    with pytest.raises(ValueError, match="has no boxes"):
        open_boxes(str(tmp_path))


# ---- files as labelling tools write them


@pytest.mark.parametrize(
    ("file", "folder", "prefix"),
    [
        ("annotations.json", "images", ""),
        ("result.json", "images", "images/"),  # Label Studio
        ("result.json", "images", "images\\"),  # on Windows
        ("result.json", "images", "/data/upload/3/"),  # of pictures that were uploaded
        ("result.json", "images", "C:\\photos\\"),
        ("result.json", "images", "../../"),
        ("result.json", "my images", "my%20images/"),
        ("labels.json", "data", ""),  # FiftyOne
        ("annotations/all.json", "images", ""),
    ],
)
def test_one_file_of_annotations_in_a_folder_is_taken(tmp_path, file, folder, prefix):
    write_images(tmp_path / folder, "a.png", "b.png")
    content = coco({0: f"{prefix}a.png", 1: f"{prefix}b.png"}, BOXES)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps({"info": {}, **content}, indent=2))
    (tmp_path / "other.json").write_text('{"images": 3}')
    data = open_boxes(str(tmp_path), SplitRule(val=0, test=0, keep_duplicates=True))
    assert targets(data)["b"] == Objects(((5, 5, 6, 7),), (0,), (False,))


def test_several_files_of_annotations_are_splits_by_their_names_or_named(tmp_path):
    write_images(tmp_path / "images", "a.png", "b.png")
    for name, image in (("train_v2", "a.png"), ("labels.val", "b.png")):
        text = json.dumps(coco({0: image}, BOXES[:2]))
        (tmp_path / f"{name}.json").write_text(text)
    data = open_boxes(str(tmp_path))
    assert (*targets(data), *targets(data, "val")) == ("a", "b")
    (tmp_path / "labels.val.json").rename(tmp_path / "mine.json")
    with pytest.raises(ValueError, match=r"several files .*mine\.json.*train_v2\.json.*give one"):
        open_boxes(str(tmp_path))


@pytest.mark.parametrize(
    ("pictures", "files"),
    [
        (".", "."),  # labelImg
        ("images", "annotations"),
        ("images", "images"),
        ("train", "train"),  # Roboflow
        ("train/images", "train/labels"),
    ],
)
def test_xml_files_are_beside_their_pictures_or_in_a_folder(tmp_path, pictures, files):
    write_images(tmp_path / pictures, "a.jpg", "b.png", "c.jpg")
    (tmp_path / files).mkdir(parents=True, exist_ok=True)
    (tmp_path / files / "a.xml").write_text(DOG)
    (tmp_path / files / "b.xml").write_text(xml(("dog", (1, 1, 20, 10), 0)))
    data = open_boxes(str(tmp_path), SplitRule(val=0, test=0))
    assert data.classes == ("cat", "dog")
    assert targets(data)["a"] == Objects(((0, 0, 20, 10), (2, 3, 5, 6)), (1, 0), (False, True))
    assert [*targets(data)] == ["a", "b"]
    assert any("1 picture has none of the XML files" in note for note in data.notes)


def test_images_of_another_size_than_the_annotations_say_are_in_a_note(tmp_path):
    right = open_boxes(write_coco(tmp_path / "right", width=20, height=10))
    other = open_boxes(write_coco(tmp_path / "other", width=200, height=100))
    assert not any("another size" in note for note in right.notes)
    (note,) = [note for note in other.notes if "another size" in note]
    assert note.startswith("5 of 5 compared images have another size than the annotations say")
    assert note.endswith(".png': 20 x 10, not 200 x 100")


# ---- YOLO

FOLDER = "images/train2017"  # of both splits, as in COCO128
COCO128 = ("data.yaml", f"path: .\ntrain: {FOLDER}\nval: {FOLDER}\nnames: [cat, dog]")
LINES = "1 0.5 0.5 0.2 0.4\n\n0 0.1 0.2 0.3 0.2 0.3 0.6 0.1 0.6\n"
YOLO = Objects(((8, 3, 12, 7), (2, 2, 6, 6)), (1, 0), (False, False))


def write_yolo(root: Path, pictures: str, labels: str, names: str = "ab") -> None:
    write_images(root / pictures, *(f"{name}.png" for name in names))
    (root / labels).mkdir(parents=True, exist_ok=True)
    for name in names[:-1]:  # the last picture has no object
        (root / labels / f"{name}.txt").write_text(LINES)


def same(objects: Objects) -> bool:
    return objects._replace(boxes=()) == YOLO._replace(boxes=()) and all(
        box == pytest.approx(expected)
        for box, expected in zip(objects.boxes, YOLO.boxes, strict=True)
    )


@pytest.mark.parametrize(
    ("pictures", "labels", "names"),
    [
        ("images", "labels", ("data.yaml", "names: {0: cat, 1: dog}")),
        ("images/train", "labels/train", ("data.yaml", "names: [cat, dog]\ntrain: ../gone")),
        ("train/images", "train/labels", ("classes.txt", "cat\ndog\n")),
        ("images/train2017", "labels/train2017", COCO128),
        (".", ".", ("classes.txt", "cat\ndog\n")),
    ],
)
def test_yolo_has_boxes_and_polygons_as_shares_of_the_picture(tmp_path, pictures, labels, names):
    write_yolo(tmp_path, pictures, labels)
    (tmp_path / names[0]).write_text(names[1])
    for where in {tmp_path, tmp_path / names[0]} if names[0] == "data.yaml" else {tmp_path}:
        data = open_boxes(str(where), SplitRule(val=0, test=0))
        assert data.classes == ("cat", "dog")
        assert same(targets(data)["a"])
        assert targets(data)["b"] == NOTHING
        assert open_boxes(data.where, data.rule).fingerprint == data.fingerprint


def test_yolo_keeps_its_splits_and_counts_classes_without_names(tmp_path):
    for split, names in (("train", "abc"), ("valid", "de"), ("test", "fg")):
        write_yolo(tmp_path, f"{split}/images", f"{split}/labels", names)
    data = open_boxes(str(tmp_path), SplitRule(keep_duplicates=True))
    assert data.classes == ("0", "1")
    assert [*targets(data, "val"), *targets(data, "test")] == ["d", "e", "f", "g"]


@pytest.mark.parametrize(
    ("train", "val"),
    [("train.txt", "val.txt"), ("[images/a, images/b]", "images/c"), ("images/a", "images/gone")],
)
def test_a_val_of_yolo_that_is_no_folder_of_its_own_is_refused_and_not_trained_on(
    tmp_path, train, val
):
    for folder, names in (("a", "abc"), ("b", "de"), ("c", "fg")):
        write_yolo(tmp_path, f"images/{folder}", f"labels/{folder}", names)
    (tmp_path / "train.txt").write_text("images/a/a.png\nimages/b/d.png\n")
    (tmp_path / "val.txt").write_text("images/c/f.png\nimages/c/g.png\n")
    (tmp_path / "data.yaml").write_text(f"train: {train}\nval: {val}\nnames: [cat, dog]")
    with pytest.raises(ValueError, match=f" and val '{val}', .* into one folder") as raised:
        open_boxes(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_cvats_yolo_keeps_its_splits(tmp_path):
    for split, names in (("train", "abc"), ("valid", "de")):
        write_yolo(tmp_path, f"obj_{split}_data", f"obj_{split}_data", names)
        listed = "".join(f"data/obj_{split}_data/{name}.png\n" for name in names)
        (tmp_path / f"{split}.txt").write_text(listed)
    (tmp_path / "obj.names").write_text("cat\ndog\n")
    (tmp_path / "obj.data").write_text("classes = 2\ntrain = data/train.txt\n")
    data = open_boxes(str(tmp_path), SplitRule(test=0, keep_duplicates=True))
    assert data.classes == ("cat", "dog")
    assert [*targets(data)] == ["a", "b", "c"]
    assert [*targets(data, "val")] == ["d", "e"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("0 0.5 0.5 0.2", r"b\.txt' line 2 is '0 0.5 0.5 0.2': write the index"),
        ("x 0.5 0.5 0.2 0.2", "line 2"),
        ("-1 0.5 0.5 0.2 0.2", "line 2"),
        ("0 0.5 0.5 0.2 0.2 0.9", "line 2"),
        ("7 0.5 0.5 0.2 0.2", r"b\.txt' has the class 7, and only 0 to 1 have names"),
    ],
)
def test_a_bad_line_of_yolo_is_named(tmp_path, line, words):
    write_yolo(tmp_path, "images", "labels", "abc")
    (tmp_path / "data.yaml").write_text("names: [cat, dog]")
    (tmp_path / "labels" / "b.txt").write_text(f"{LINES.splitlines()[0]}\n{line}\n")
    with pytest.raises(ValueError, match=words) as raised:
        open_boxes(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_boxes_of_yolo_in_pixels_are_said_to_be_outside(tmp_path):
    write_yolo(tmp_path, "images", "labels", "abc")
    for name in "ab":
        (tmp_path / "labels" / f"{name}.txt").write_text("0 30 20 5 5\n")
    with pytest.raises(ValueError, match=r"no object \(2 boxes are outside of the image") as raised:
        open_boxes(str(tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("shape", ["[2, 2]", "[2, 3]"])
def test_key_points_of_yolo_are_no_polygon(tmp_path, shape):
    write_images(tmp_path / "images", "a.png", "b.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "data.yaml").write_text(f"names: [cat]\nkpt_shape: {shape}")
    points = "0.1 0.1 0.9 0.9" if shape == "[2, 2]" else "0.1 0.1 2 0.9 0.9 1"
    (tmp_path / "labels" / "a.txt").write_text(f"0 0.5 0.5 0.2 0.4 {points}\n")
    box = targets(open_boxes(str(tmp_path), SplitRule(val=0, test=0)))["a"].boxes[0]
    assert box == pytest.approx(YOLO.boxes[0])


def test_a_picture_that_cannot_be_read_has_no_boxes_in_any_format_without_stated_sizes(tmp_path):
    write_coco(tmp_path / "coco")
    write_voc(tmp_path / "voc", {"a": xml(("dog", (1, 1, 9, 9), 0), size=""), "b": DOG})
    write_yolo(tmp_path / "yolo", "images", "labels", "abc")
    pictures = ("coco/train/a.png", "voc/JPEGImages/a.jpg", "yolo/images/a.png")
    for picture in pictures:
        (tmp_path / picture).write_bytes(b"no picture")
        data = open_boxes(str(tmp_path / picture.split("/")[0]), SplitRule(val=0, test=0))
        assert targets(data)["a"] == NOTHING
        assert targets(data)["b"] != NOTHING


def test_a_class_index_of_yolo_builds_no_million_names(tmp_path):
    write_yolo(tmp_path, "images", "labels", "abc")
    (tmp_path / "labels" / "b.txt").write_text("4000000000 0.5 0.5 0.2 0.4\n")
    with pytest.raises(ValueError, match="names 4,000,000,001 classes for 3 images"):
        open_boxes(str(tmp_path))


@pytest.mark.parametrize(
    "text",
    ["names: {1: cat}", "names: [a, a]", "names: [no, yes]", "- 1", "names: [", "a: &b *b"],
)
def test_a_yaml_file_without_names_is_one_line(tmp_path, text):
    write_yolo(tmp_path, "images", "labels", "abc")
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"data\.yaml|the names of") as raised:
        open_boxes(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_advice_for_a_detector_is_about_boxes(tmp_path):
    write_images(tmp_path / "coco" / "images", "a.png")
    for where in ("coco", "coc", "coco/images/a.png"):
        with pytest.raises(ValueError, match="box|did you mean") as raised:
            open_boxes(str(tmp_path / where))
        assert "class folder" not in str(raised.value)
        assert "subfolder" not in str(raised.value)
