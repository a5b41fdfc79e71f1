"""Data with several labels: what is read, how it is split, and one line for what is wrong."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fullstride.data.label_data import open_labels
from fullstride.data.readers.listing import fraction


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
        for images in (data.train, data.minival, data.test)
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
    data = open_labels(table(tmp_path, text, name), minival=0, test=0)
    assert labels(data) == EXPECTED
    assert data.classes == ("cat", "dog", "traffic light")
    assert all(list(target) == sorted(target) for target in data.train.targets)
    assert any("1 images have no label" in note for note in data.notes)


def test_spaces_separate_labels_that_are_combined_and_not_names_of_two_words(tmp_path):
    sky = table(tmp_path, "path,labels\na.png,haze water\nb.png,haze\nc.png,water\n")
    assert open_labels(sky, minival=0, test=0).classes == ("haze", "water")
    whole = open_labels(f"{sky}?separator=", minival=0, test=0)
    assert whole.classes == ("haze", "haze water", "water")
    assert open_labels(whole.where, minival=0, test=0).classes == whole.classes
    names = table(tmp_path, "path,labels\na.png,traffic light\nb.png,fire hydrant\n", "n.csv")
    assert open_labels(names, minival=0, test=0).classes == ("fire hydrant", "traffic light")
    digits = table(tmp_path, "path,labels\na.png,3 7\nb.png,10\n", "d.csv")
    assert open_labels(digits, minival=0, test=0).classes == ("3", "7", "10")


def test_a_separator_may_be_chosen_where_the_table_has_several(tmp_path):
    where = table(tmp_path, "path;labels\na.png;red, big|cat\nb.png;cat\n")
    with pytest.raises(ValueError, match=r"separator=\|"):
        open_labels(where)
    data = open_labels(f"{where}?separator=|", minival=0, test=0)
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
    for split in ("train", "minival", "test"):
        assert not data.missing_classes(split)
    # beside the images that rare labels need, those with the lowest hashes are taken
    rare = {name for name, each in expected.items() if "rare" in each}
    assert {n for n in data.test.names if n not in rare} == {
        n for n in expected if fraction(n) < 0.1 and n not in rare
    }
    again = open_labels(data.where, **asdict(data.rule))
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
    data = open_labels(where, group="batch")
    groups = [{name[:2] for name in images.names} for images in (data.train, data.minival)]
    assert not groups[0] & groups[1]
    (tmp_path / "000.png").write_bytes((tmp_path / "001.png").read_bytes())
    copies = open_labels(where)
    splits = [{*i.names} for i in (copies.train, copies.minival, copies.test)]
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
    assert name not in open_labels(where, left_out=(name,)).train.names
