"""Data with several labels: what is read, how it is split, and one line for what is wrong."""

import json
import os
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fullstride import cli, train_network
from fullstride.autofit.data_report import inspect, report_lines
from fullstride.autofit.fit import fit
from fullstride.data.dataset import open_data
from fullstride.data.loader import EpochSampler, LoaderOptions
from fullstride.data.pack import pack
from fullstride.data.readers import coco as json_lists
from fullstride.data.readers.coco import read_lists
from fullstride.data.readers.listing import fraction
from fullstride.data.readers.splits import SplitRule
from fullstride.data.targets import open_labels
from fullstride.tasks.classify import Classify


def write_images(folder: Path, names: str) -> None:
    """A PNG of a different grey level for each name."""
    for number, name in enumerate(names.split()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((4, 5, 3), number % 256, np.uint8)
        pixels[0, 0] = number // 256
        Image.fromarray(pixels).save(folder / name)


def table(folder: Path, text: str, name: str = "t.csv") -> str:
    write_images(folder, "a.png b.png c.png d.png")
    (folder / name).write_text(text)
    return str(folder / name)


def labels(data) -> dict[str, set[str]]:
    """Image -> the names of its labels."""
    return {
        name: {data.classes[index] for index in target}
        for images in (data.train, data.val, data.test)
        for name, target in zip(images.names, images.targets, strict=True)
    }


EXPECTED = {"a.png": {"cat", "dog"}, "b.png": {"dog"}, "c.png": set(), "d.png": {"traffic light"}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "path,labels\na.png,dog;cat\nb.png,dog\nc.png,\nd.png,traffic light\n"),
        ("t.csv", "path,labels\na.png,dog| cat |\nb.png,dog\nc.png,\nd.png,traffic light\n"),
        ("t.csv", 'path,label\na.png,"dog,cat"\nb.png,dog\nc.png,\nd.png,traffic light\n'),
        ("t.tsv", "file\ttags\na.png\tdog,cat\nb.png\tdog\nc.png\t\nd.png\ttraffic light\n"),
        # one row for each label
        ("t.csv", "path,label\na.png,dog\na.png,cat\nb.png,dog\nc.png,\nd.png,traffic light\n"),
        # one column for each class, as pandas writes its index too
        (
            "t.csv",
            ",path,traffic light,dog,cat\n0,a.png,0,1,1\n1,b.png,false,True,no\n2,c.png,,0,0\n"
            "3,d.png,1.0,0.0,\n",
        ),
    ],
    ids=["semicolon", "bar", "comma", "tabs", "rows", "columns"],
)
def test_all_forms_of_a_table_have_the_same_labels(tmp_path, name, text):
    data = open_labels(table(tmp_path, text, name), SplitRule(val=0, test=0))
    assert labels(data) == EXPECTED
    assert data.classes == ("cat", "dog", "traffic light")
    assert all(list(target) == sorted(target) for target in data.train.targets)
    assert any("no label for 1 image" in note for note in data.notes)


def test_spaces_separate_labels_that_are_combined_and_not_names_of_two_words(tmp_path):
    sky = table(tmp_path, "path,labels\na.png,haze water\nb.png,haze\nc.png,water\n")
    assert open_labels(sky, SplitRule(val=0, test=0)).classes == ("haze", "water")
    whole = open_labels(f"{sky}?separator=", SplitRule(val=0, test=0))
    assert whole.classes == ("haze", "haze water", "water")
    assert open_labels(whole.where, SplitRule(val=0, test=0)).classes == whole.classes
    names = table(tmp_path, "path,labels\na.png,traffic light\nb.png,fire hydrant\n", "n.csv")
    assert open_labels(names, SplitRule(val=0, test=0)).classes == ("fire hydrant", "traffic light")
    digits = table(tmp_path, "path,labels\na.png,3 7\nb.png,10\n", "d.csv")
    assert open_labels(digits, SplitRule(val=0, test=0)).classes == ("3", "7", "10")
    single = table(tmp_path, "path,labels\na.png,3\nb.png,10\nc.png,3\n", "s.csv")
    notes = {each: open_labels(each, SplitRule(val=0, test=0)).notes for each in (digits, single)}
    assert any("d.csv are separated by spaces" in note for note in notes[digits])
    assert not any("separated" in note for note in notes[single])


def test_a_separator_may_be_chosen_where_the_table_has_several(tmp_path):
    where = table(tmp_path, "path;labels\na.png;red, big|cat\nb.png;cat\n")
    with pytest.raises(ValueError, match=r"separator=\|"):
        open_labels(where)
    data = open_labels(f"{where}?separator=|", SplitRule(val=0, test=0))
    assert data.classes == ("cat", "red, big")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path,labels,split\na.png,cat,train\nb.png,cow,val\n", ["line 3", "'cow'"]),
        ("path,cat,dog\na.png,1,0\nb.png,0,1\na.png,0,0\n", ["line 4", "'a.png'", "'cat'"]),
        ("path,labels,split\na.png,cat,train\na.png,dog,val\n", ["line 3", "'a.png'"]),
        ("path,cat,dog\na.png,1,2\n", ["line 2", "'dog'", "'2'"]),
        ("path,cat,dog\na.png,-1,1\n", ["line 2", "'cat'", "'-1'"]),
        ("path,cat,cat\na.png,1,0\n", ["line 1", "'cat'"]),
        ("path,cat,dog\na.png,1,0\nb.png,1\n", ["line 3", "2 fields"]),
        ("path,labels\na.png,cat\nb.png\n", ["line 3", "'labels'"]),
        ("path,labels\na.png,['cat']\n", ["line 2", "cat;dog"]),
        ("path,labels\na.png,\nb.png,\n", ["no training image with a label"]),
        ("path,cat\na.png,0\nb.png,\n", ["no training image with a label"]),
        ("path,labels\na.png,cat\nmissing.png,cat\n", ["line 3", "'missing.png'"]),
        ("path\na.png\n", ["line 1", "'labels'"]),
        ("name,labels\na.png,cat\n", ["line 1", "'path'"]),
        ("path,labels\n", ["no rows"]),
        ("", ["empty"]),
        ("path,labels,split\na.png,cat,training\nb.png,cat,dev\n", ["line 3", "'dev'"]),
    ],
)
def test_bad_tables_are_one_line_with_file_and_row(tmp_path, text, words):
    with pytest.raises(ValueError, match=r"t\.csv") as raised:
        open_labels(table(tmp_path, text))
    message = str(raised.value)
    assert all(word in message for word in words)
    assert len(message.splitlines()) == 1


def random_table(folder: Path, images: int = 120) -> tuple[str, dict[str, set[str]]]:
    """Every image may be "common"; two in ten are "rare", and some have no label."""
    rng, expected = np.random.default_rng(0), {}
    for number in range(images):
        draws = {"common": 0.7, "medium": 0.3, "rare": 0.08}
        expected[f"{number:03}.png"] = {name for name, p in draws.items() if rng.random() < p}
    write_images(folder, " ".join(expected))
    rows = [f"{name},{';'.join(sorted(each))},g{name[:2]}" for name, each in expected.items()]
    (folder / "t.csv").write_text("\n".join(["path,labels,batch", *rows]))
    return str(folder / "t.csv"), expected


def test_splits_are_a_function_of_names_and_every_label_is_in_each(tmp_path):
    where, expected = random_table(tmp_path)
    data = open_labels(where)
    assert labels(data) == expected
    for split in ("train", "val", "test"):
        assert not data.missing_classes(split)
    # beside the images that rare labels need, those with the lowest hashes are taken
    rare = {name for name, each in expected.items() if "rare" in each}
    assert {n for n in data.test.names if n not in rare} == {
        n for n in expected if fraction(n) < 0.1 and n not in rare
    }
    again = open_labels(data.where, data.rule)
    assert again.fingerprint == data.fingerprint
    assert again.train.targets == data.train.targets


def test_an_image_more_moves_hardly_any_other(tmp_path):
    where, _ = random_table(tmp_path)
    before = open_labels(where)
    write_images(tmp_path / "new", "x.png y.png")
    with Path(where).open("a") as file:
        file.write("\nnew/x.png,common;rare,g1\nnew/y.png,,g2")
    after = open_labels(where)
    assert len({*before.test.names} ^ {*after.test.names} - {"new/x.png", "new/y.png"}) <= 1


def test_groups_and_copies_stay_in_one_split(tmp_path):
    where, _ = random_table(tmp_path)
    data = open_labels(where, SplitRule(group="batch"))
    groups = [{name[:2] for name in images.names} for images in (data.train, data.val)]
    assert not groups[0] & groups[1]
    (tmp_path / "000.png").write_bytes((tmp_path / "001.png").read_bytes())
    copies = open_labels(where)
    splits = [{*i.names} for i in (copies.train, copies.val, copies.test)]
    assert sum({"000.png", "001.png"} <= names for names in splits) == 1


def test_what_has_one_label_for_each_image_has_it_here_too():
    data = open_labels("digits")
    assert Counter(map(len, data.test.targets)) == {1: 500}
    assert data.classes == tuple("0123456789")
    assert not data.missing_classes("train")


def test_images_may_be_left_out(tmp_path):
    where, _ = random_table(tmp_path)
    data = open_labels(where)
    name = data.train.names[0]
    assert name not in open_labels(where, SplitRule(left_out=(name,))).train.names


# ---- COCO


def coco(images: list, annotations: list, names: tuple[str, ...] = ("cat", "dog", "cow")) -> dict:
    """The content of a file; an annotation is (image, category)."""
    boxes = {"bbox": [0, 0, 2, 2], "segmentation": [[0, 0, 2, 0, 2, 2]], "iscrowd": 0}
    return {
        "info": {"year": 2026, "images": [1, 2]},
        "annotations": [
            {"id": 100 + number, "image_id": image, "category_id": category, **boxes}
            for number, (image, category) in enumerate(annotations)
        ],
        "images": [{"id": key, "file_name": name, "width": 5, "height": 4} for key, name in images],
        "categories": [{"id": 10 * (i + 1), "name": name} for i, name in enumerate(names)],
    }


TRAIN = coco(
    [(0, "a.png"), (7, "b.png"), (8, "c.png")], [(0, 20), (0, 10), (0, 20), (7, 20)], ("cat", "dog")
)
VAL = coco([(1, "d.png")], [(1, 10)], ("dog", "cat"))  # other ids: matched by name


@pytest.mark.parametrize(
    ("images", "annotations"),
    [
        (("train2017", "val2017"), "annotations/instances_{}2017.json"),
        (("images/train", "images/val"), "annotations/instances_{}.json"),
        (("images", "images"), "annotations/instances_{}.json"),
        ((".", "."), "annotations/instances_{}.json"),
        (("train", "valid"), "{}/_annotations.coco.json"),
    ],
)
def test_coco_files_are_read_from_the_usual_folders(tmp_path, images, annotations):
    write_images(tmp_path / images[0], "a.png b.png c.png")
    Image.new("L", (9, 9)).save(tmp_path / "new.png")
    (tmp_path / images[1]).mkdir(exist_ok=True)
    (tmp_path / "new.png").rename(tmp_path / images[1] / "d.png")
    for split, content in (("train", TRAIN), ("valid" if "coco" in annotations else "val", VAL)):
        path = tmp_path / annotations.format(split)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    data = open_labels(str(tmp_path))
    short = {Path(name).name: each for name, each in labels(data).items()}
    assert short == {"a.png": {"cat", "dog"}, "b.png": {"dog"}, "c.png": set(), "d.png": {"dog"}}
    assert [Path(name).name for name in data.val.names] == ["d.png"]
    assert not len(data.test)
    assert data.classes == ("cat", "dog")
    assert all(data.train.picture(index).size == (5, 4) for index in range(3))
    assert open_labels(data.where, data.rule).fingerprint == data.fingerprint


def write_coco(folder: Path, content: object, name: str = "labels.json") -> str:
    write_images(folder, "a.png b.png c.png d.png")
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_coco_file_beside_its_images_has_its_splits_taken(tmp_path):
    names = [f"{number:02}.png" for number in range(30)]
    write_images(tmp_path, " ".join(names))
    content = coco([*enumerate(names)], [(number, 10 + 10 * (number % 2)) for number in range(28)])
    where = write_coco(tmp_path, content)
    data = open_labels(where)
    assert len(data.train) + len(data.val) + len(data.test) == 30
    assert all(data.missing_classes(split) == ("cow",) for split in ("train", "val", "test"))
    assert any("'cow'" in note for note in data.notes)
    assert any("no label for 2 images" in note for note in data.notes)


def changed(content: dict, kind: str, **changes: object) -> dict:
    """`content` with another first entry of a kind."""
    return {**content, kind: [{**content[kind][0], **changes}, *content[kind][1:]]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (changed(TRAIN, "annotations", category_id=99), ["annotation 100", "category 99"]),
        (changed(TRAIN, "annotations", category_id=0), ["annotation 100", "category 0"]),
        (changed(TRAIN, "annotations", image_id=55), ["annotation 100", "image 55"]),
        (changed(TRAIN, "annotations", category_id="10"), ["annotation 100", "category_id"]),
        (changed(TRAIN, "annotations", category_id=True), ["annotation 100", "category_id"]),
        (changed(TRAIN, "categories", name="dog"), ["category 20", "'dog'"]),
        (changed(TRAIN, "categories", id=20), ["category 20", "'dog'"]),
        (changed(TRAIN, "images", file_name="gone.png"), ["image 0", "'gone.png'"]),
        (changed(TRAIN, "images", file_name="../gone.png"), ["image 0", "'../gone.png'"]),
        (changed(TRAIN, "images", file_name="/etc/passwd"), ["image 0", "'/etc/passwd'"]),
        (changed(TRAIN, "images", file_name="a\n\x1b[2J.png"), ["image 0", r"\x1b"]),
        (changed(TRAIN, "images", file_name="a\0.png"), ["image 0", r"\x00"]),
        (changed(TRAIN, "images", id=7), ["image 7", "'a.png'", "'b.png'"]),
        (changed(TRAIN, "images", id=None), ["image None"]),
        ({**TRAIN, "images": [3]}, ["image None"]),
        ({**TRAIN, "annotations": []}, ["no annotation"]),
        ({**TRAIN, "images": [], "annotations": []}, ["no images"]),
        ({**TRAIN, "images": {}}, ["'['"]),
        ([1], ["'{'"]),
        ("", ["its end"]),
        (json.dumps(TRAIN)[:-1], ["its end"]),
        (json.dumps(TRAIN)[:300], ["annotations[2]"]),
        (json.dumps(TRAIN) + "x", ["behind its end"]),
        ('{"images": ' + "[" * 100_000, ["images[0]"]),
        ('{"n": ' + "1" * 5000 + "}", ["'n'"]),
    ],
)
def test_bad_coco_files_are_one_line_with_file_and_entry(tmp_path, content, words):
    with pytest.raises(ValueError, match=r"labels\.json") as raised:
        open_labels(write_coco(tmp_path, content))
    message = str(raised.value)
    assert all(word in message for word in words), message
    assert message.isprintable()
    assert len(message) < 400 + 2 * len(str(tmp_path))


def test_a_label_that_only_the_validation_has_is_refused(tmp_path):
    (tmp_path / "annotations").mkdir()
    write_coco(tmp_path, TRAIN, "annotations/instances_train.json")
    write_coco(tmp_path, coco([(1, "d.png")], [(1, 30)]), "annotations/instances_val.json")
    with pytest.raises(ValueError, match="annotation 100.*'cow'"):
        open_labels(str(tmp_path))
    # a category without annotations does no harm; an image in both files does
    write_coco(tmp_path, coco([(1, "a.png")], [(1, 10)]), "annotations/instances_val.json")
    with pytest.raises(ValueError, match=r"a\.png.* val .*train"):
        open_labels(str(tmp_path))


def test_lists_are_read_in_pieces_of_any_size(tmp_path, monkeypatch):
    content = {"é": [1, {"a": None}], "images": [1234567, "x,]", [], {"b": [1.5e3]}], "c": -12}
    path = tmp_path / "lists.json"
    for indent in (None, 2):
        path.write_text(json.dumps(content, indent=indent, ensure_ascii=False))
        for characters in (1, 2, 3, 7, 1000):
            monkeypatch.setattr(json_lists, "CHARACTERS", characters)
            for name in ("images", "é"):
                assert [value for _, value in read_lists(path, (name,))] == content[name]


def test_reading_a_large_file_takes_the_memory_of_a_piece(tmp_path):
    entry = json.dumps({"id": 1, "segmentation": "0.5, " * 2000})
    path = tmp_path / "large.json"
    path.write_text('{"annotations": [' + ",".join([entry] * 1300) + "]}")
    tracemalloc.start()
    assert sum(1 for _ in read_lists(path, ("annotations",))) == 1300
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * 2**20 < path.stat().st_size / 2


# ---- folders


def test_an_image_in_several_class_folders_has_all_their_labels(tmp_path):
    write_images(tmp_path, " ".join(f"{k}/{i}.png" for k in ("cat", "dog") for i in range(8)))
    for copy in ("dog/both.png", "dog/again.png"):
        (tmp_path / copy).write_bytes((tmp_path / "cat/0.png").read_bytes())
    data = open_labels(str(tmp_path))
    names = labels(data)
    assert names["cat/0.png"] == {"cat", "dog"}
    assert len(names) == 16
    assert Counter(map(len, names.values())) == {1: 15, 2: 1}
    for name in ("cat/1.png", "dog/3.png"):
        os.truncate(tmp_path / name, 0)  # with the copies of the rule no file is compared again
    again = open_labels(data.where, data.rule)
    assert labels(again) == names
    everything = open_labels(str(tmp_path), SplitRule(val=0, test=0, keep_duplicates=True))
    assert labels(everything) == names


# ---- what reads targets


def test_shards_have_all_labels_of_an_image(tmp_path):
    where, expected = random_table(tmp_path)
    data = open_labels(where)
    list(pack(data, tmp_path / "shards"))
    packed = open_labels(str(tmp_path / "shards"))
    assert labels(packed) == expected
    assert packed.classes == data.classes
    assert packed.fingerprint == data.fingerprint
    assert open_labels(packed.where, packed.rule).fingerprint == data.fingerprint
    assert np.array_equal(packed.test.picture(0), data.test.picture(0))
    with pytest.raises(ValueError, match="shards' have other targets than one class"):
        open_data(str(tmp_path / "shards"))
    index = tmp_path / "shards/index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "label_sets": [[0, 3]]}))
    with pytest.raises(ValueError, match=r"index\.json.*label_sets"):
        open_labels(str(tmp_path / "shards"))
    index.unlink()
    with pytest.raises(ValueError, match="no label"):
        open_labels(str(tmp_path / "shards"))


def test_shards_with_one_class_for_each_image_have_no_sets_of_labels(tmp_path):
    write_images(tmp_path, " ".join(f"{k}/{i}.png" for k in ("cat", "dog") for i in range(8)))
    list(pack(open_data(str(tmp_path)), tmp_path.parent / f"{tmp_path.name}-shards"))
    index = json.loads((tmp_path.parent / f"{tmp_path.name}-shards/index.json").read_text())
    assert index["label_sets"] == []
    assert open_data(str(tmp_path.parent / f"{tmp_path.name}-shards")).classes == ("cat", "dog")


def test_the_report_counts_labels_and_pairs_that_disagree(tmp_path):
    where, expected = random_table(tmp_path, 60)
    data = open_labels(where)
    report = finish(inspect(data, 0))
    counts = Counter(name for image in data.train.names for name in expected[image])
    assert {report.smallest, report.largest} == {min_of(counts), max_of(counts)}
    assert report_lines(report)
    two, others = (next(n for n in expected if expected[n] == s) for s in ({"common"}, set()))
    (tmp_path / two).write_bytes((tmp_path / others).read_bytes())
    pairs = finish(inspect(open_labels(where), 0)).across_classes
    assert {"common", ""} in [{*pair.classes} for pair in pairs]


def finish(events) -> object:
    while True:
        try:
            next(events)
        except StopIteration as stop:
            return stop.value


def min_of(counts: Counter) -> tuple[str, int]:
    return min(counts.items(), key=lambda item: item[1])


def max_of(counts: Counter) -> tuple[str, int]:
    return max(counts.items(), key=lambda item: item[1])


def test_what_needs_one_class_for_each_image_says_so_in_one_line(tmp_path):
    data = open_labels("digits")
    for action in (
        lambda: Classify().for_data(data),
        lambda: next(iter(fit(data, tmp_path / "fit", budget_ms=5))),
        lambda: train_network(data, "genet_tiny", tmp_path / "run", epochs=1),
    ):
        with pytest.raises(ValueError, match="several labels") as raised:
            action()
        assert len(str(raised.value).splitlines()) == 1
    for how in ({"balance": 0.5}, {"per_class": 2}):
        with pytest.raises(ValueError, match="several labels"):
            list(EpochSampler(data.train.targets, LoaderOptions(batch=8, shuffle=True, **how)))


def test_commands_read_several_labels_and_refuse_bad_ones_in_one_line(tmp_path, capsys):
    where, expected = random_table(tmp_path, 30)
    assert cli.run(["data", "pack", where, str(tmp_path / "shards"), "--task", "multilabel"]) == 0
    assert labels(open_labels(str(tmp_path / "shards"))) == expected
    bad = write_coco(tmp_path, changed(TRAIN, "annotations", category_id=99))
    capsys.readouterr()
    assert cli.run(["data", "pack", bad, str(tmp_path / "x"), "--task", "multilabel"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "annotation 100" in line
