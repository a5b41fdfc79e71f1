"""Groups and copies of images are on one side of a split, in every format, and what was done is
said."""

import io
import json
import random
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fullstride import cli
from fullstride.data.dataset import DataSet, open_data
from fullstride.data.pack import pack
from fullstride.data.readers import listing as duplicates
from fullstride.data.readers.listing import Below, Listing, Objects, Sample
from fullstride.data.readers.splits import DEFAULT_RULE, SplitRule, take_splits

SPLITS = ("train", "val", "test")


def split_of(data: DataSet) -> dict[str, str]:
    return {name: split for split in SPLITS for name in getattr(data, split).names}


def png(number: int) -> bytes:
    """A picture that only this number has."""
    written = io.BytesIO()
    pixels = np.frombuffer(number.to_bytes(12, "big"), np.uint8).reshape(2, 2, 3)
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def write(root: Path, pictures: dict[str, int]) -> Path:
    for name, number in pictures.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(number))
    return root


def patients(classes: str, each: int, images: int) -> dict[str, int]:
    """The names of `images` images of each of `each` patients in each class."""
    names = [
        f"{label}/p{label}{patient}/{image}.png"
        for label in classes
        for patient in range(each)
        for image in range(images)
    ]
    return {name: number for number, name in enumerate(names)}


def listing_of(groups: dict[str, list[int]], classes: int) -> Listing:
    """Samples of groups, whose images have the given classes."""
    samples, keys = [], {}
    for group, targets in groups.items():
        for number, target in enumerate(targets):
            name = f"{group}-{number}"
            samples.append(Sample(name, target, len(samples) + 1))
            keys[name] = group
    names = tuple(map(str, range(classes)))
    return Listing(names, {"train": samples}, lambda name: b"", groups=keys)


BY_GROUP = SplitRule(group="patient", keep_duplicates=True)


# ---- groups


@pytest.mark.parametrize("group", ["1", "parent", r"/(p\w+)/"])
def test_a_folder_keeps_the_images_of_a_patient_together_however_they_are_named(tmp_path, group):
    pictures = patients("ab", each=12, images=4) | {"a/alone.png": 900, "b/alone.png": 901}
    data = open_data(str(write(tmp_path, pictures)), SplitRule(group=group))
    where: dict[str, set[str]] = defaultdict(set)
    for name, split in split_of(data).items():
        where[name.split("/")[1]].add(split)
    assert all(len(splits) == 1 for name, splits in where.items() if name != "alone.png")
    assert {split for splits in where.values() for split in splits} == set(SPLITS)
    assert any("24 groups" in note and "2 images without" in note for note in data.notes)
    assert sorted(split_of(data)) == sorted(pictures)


def test_every_format_takes_the_same_splits_of_the_same_groups(tmp_path):
    datasets = pytest.importorskip("datasets")
    pictures = patients("ab", each=8, images=3)
    folder = open_data(str(write(tmp_path / "data", pictures)), SplitRule(group="1"))
    rows = [f"{name},{name[0]},{name.split('/')[1]}" for name in pictures]
    (tmp_path / "data/images.csv").write_text("\n".join(["path,label,Patient", *rows]))
    table = open_data(str(tmp_path / "data/images.csv"), SplitRule(group="patient"))
    features = datasets.Features(
        image=datasets.Image(),
        label=datasets.ClassLabel(names=["a", "b"]),
        patient=datasets.Value("string"),
    )
    cells = [{"bytes": png(number), "path": None} for number in pictures.values()]
    values = dict(label=[name[0] for name in pictures])
    values["patient"] = [name.split("/")[1] for name in pictures]
    saved = datasets.Dataset.from_dict(dict(image=cells, **values), features)
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "parquet" / "train.parquet")
    for other in (table, open_data(str(tmp_path / "data/images.csv"), SplitRule(group="1"))):
        assert split_of(other) == split_of(folder)
    for form in ("saved", "parquet"):  # whose images are named by their rows
        rows = split_of(open_data(str(tmp_path / form), SplitRule(group="patient")))
        names = {f"train/{number:08}": name for number, name in enumerate(pictures)}
        assert {names[row]: split for row, split in rows.items()} == split_of(folder)
    list(pack(folder, tmp_path / "shards"))
    for name in SPLITS:  # without words in their names the splits are taken from all images
        (tmp_path / f"shards/{name}-000000.tar").rename(
            tmp_path / f"shards/{SPLITS.index(name)}.tar"
        )
    index = tmp_path / "shards/index.json"
    text = json.loads(index.read_text())
    text["shards"] = {f"{SPLITS.index(n[:-11])}.tar": s for n, s in text["shards"].items()}
    index.write_text(json.dumps(text))
    assert split_of(open_data(str(tmp_path / "shards"), SplitRule(group="parent"))) == split_of(
        folder
    )


@pytest.mark.parametrize("seed", range(8))
def test_groups_never_straddle_and_no_class_lacks_training_images(seed):
    draw = random.Random(seed)
    classes = draw.randint(2, 6)
    groups = {
        f"g{number}": [draw.randrange(classes)] * draw.randint(1, 20)
        if draw.random() < 0.7
        else draw.choices(range(classes), k=draw.randint(1, 12))
        for number in range(draw.randint(12, 60))
    }
    listing = listing_of(groups, classes)
    splits, _, own, _ = take_splits(listing, BY_GROUP)
    assert own == ()
    sides = [{listing.groups[s.name] for s in split} for split in splits]  # type: ignore
    assert sum(map(len, sides)) == len(groups)
    assert sum(map(len, splits)) == len(listing.samples)
    present = {sample.target for sample in listing.samples}
    assert {sample.target for sample in splits.train} == present


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most", [1, 3, 9])
def test_each_class_has_its_share_up_to_half_of_its_largest_group(seed, most):
    """With groups of one image that is within one image."""
    draw = random.Random(seed)
    groups = {
        f"{label}-{number}": [label] * draw.randint(1, most)
        for label in range(4)
        for number in range(draw.randint(20, 200))
    }
    splits, *_ = take_splits(listing_of(groups, 4), BY_GROUP)
    counts = [Counter(sample.target for sample in split) for split in splits]
    for label in range(4):
        images = sum(count[label] for count in counts)
        assert abs(counts[2][label] - 0.1 * images) <= max(1, most / 2)
        assert abs(counts[1][label] - 0.1 * (images - counts[2][label])) <= max(1, most / 2)


@pytest.mark.parametrize("seed", range(5))
def test_when_images_come_and_go_hardly_a_group_changes_its_split(seed):
    """One more image moves at most two groups; a tenth of the groups less moves few of the rest."""
    draw = random.Random(seed)
    groups = {f"{n}": [n % 3] * draw.randint(1, 9) for n in range(150)}

    def side(groups) -> dict[str, int]:
        listing = listing_of(groups, 3)
        assert listing.groups
        taken = take_splits(listing, BY_GROUP).splits
        return {listing.groups[s.name]: n for n, split in enumerate(taken) for s in split}

    before = side(groups)
    name = draw.choice([*groups])
    after = side(groups | {name: [*groups[name], groups[name][0]]})
    assert sum(before[group] != after[group] for group in groups) <= 6
    fewer = {name: groups[name] for name in draw.sample([*groups], 135)}
    after = side(fewer)
    assert sum(before[group] != after[group] for group in fewer) <= 0.1 * len(fewer)


def test_a_class_whose_groups_are_too_few_for_a_test_is_named():
    groups = {f"a{n}": [0] * 5 for n in range(20)} | {"b0": [1] * 50, "b1": [1] * 50}
    splits, *_, notes = take_splits(listing_of(groups, 2), BY_GROUP)
    assert {s.target for s in splits.test} == {0}
    assert any("test" in note and "'1'" in note for note in notes)
    with pytest.raises(ValueError, match="too few groups"):
        take_splits(listing_of({"x": [0, 1] * 9, "y": [0, 1] * 9}, 2), BY_GROUP)


def test_a_group_in_several_splits_of_the_data_is_named(tmp_path):
    names = [f"train/{label}/p{patient}/1" for label in "ab" for patient in range(5)]
    names += ["test/a/p1/2", "test/b/p7/1"]
    write(tmp_path, {f"{name}.png": number for number, name in enumerate(names)})
    (note,) = [n for n in open_data(str(tmp_path), SplitRule(group="1")).notes if "both" in n]
    assert "have 1 group:" in note
    assert "'p1'" in note


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("patient", "no column; use a column"),
        ("7", "no image has one, for example 'a/pa0/0.png'"),
        ("0", "use a column, a level"),
        ("(p", "no regular expression"),
        ("(p)(a)", "has 2 groups"),
        ("(zzz)", "no image has one"),
    ],
)
def test_a_group_that_the_data_do_not_have_is_refused_in_one_line(tmp_path, group, message):
    write(tmp_path, patients("ab", each=2, images=2))
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as caught:
        open_data(str(tmp_path), SplitRule(group=group))
    assert "\n" not in str(caught.value)


def test_a_group_column_without_a_value_is_refused_in_one_line(tmp_path):
    pictures = write(tmp_path, patients("ab", each=2, images=2)).rglob("*.png")
    rows = [f"{path.relative_to(tmp_path)},{path.parts[-3]}," for path in pictures]
    (tmp_path / "table.csv").write_text("\n".join(["path,label,patient", *rows]))
    with pytest.raises(ValueError, match="group 'patient': no image has one, for example"):
        open_data(str(tmp_path / "table.csv"), SplitRule(group="patient"))


def test_the_digits_have_no_groups():
    with pytest.raises(ValueError, match="the digits have none"):
        open_data("digits", SplitRule(group="1"))


# ---- copies


def test_copies_of_an_image_are_in_one_split_and_those_of_groups_join_the_groups(tmp_path):
    pictures = patients("ab", each=20, images=2)
    pictures |= {f"{label}/copy/{n}.png": pictures[f"{label}/p{label}{n}/0.png"]
                 for label in "ab" for n in range(10)}  # fmt: skip
    write(tmp_path, pictures)
    for group in ("", "1"):
        sides: dict[int, set[str]] = defaultdict(set)
        for name, split in split_of(open_data(str(tmp_path), SplitRule(group=group))).items():
            sides[pictures[name]].add(split)
        assert all(len(splits) == 1 for splits in sides.values())
    loose = split_of(open_data(str(tmp_path), SplitRule(keep_duplicates=True)))
    assert len({(pictures[name], split) for name, split in loose.items()}) > len(
        {*pictures.values()}
    )
    # the folder of copies joins the first ten patients of a class into one group
    joined = split_of(open_data(str(tmp_path), SplitRule(group="1")))
    for label in "ab":
        ten = {f"p{label}{n}" for n in range(10)} | {"copy"}
        assert len({s for n, s in joined.items() if n.split("/")[1] in ten and n[0] == label}) == 1


def test_copies_are_searched_for_once_and_then_belong_to_the_rule(tmp_path, monkeypatch):
    pictures = {f"{label}/{n}.png": n % 40 for label in "a" for n in range(60)}
    data = open_data(str(write(tmp_path, pictures | {f"b/{n}.png": 99 + n for n in range(30)})))
    assert data.rule.copies
    assert {frozenset(names) for names in data.rule.copies.values()} == {
        frozenset({f"a/{n}.png", f"a/{n + 40}.png"}) for n in range(20)
    }

    def fail(*_):
        raise AssertionError("files are read")

    monkeypatch.setattr(duplicates, "open_regular", fail)
    assert open_data(str(tmp_path), data.rule).fingerprint == data.fingerprint
    (tmp_path / "a/0.png").unlink()  # its copy is one image now
    fewer = split_of(open_data(str(tmp_path), data.rule))
    assert sum(fewer[name] != split for name, split in split_of(data).items() if name in fewer) <= 2


@pytest.mark.parametrize("kind", ["folder", "table", "shards"])
def test_training_images_that_are_copies_of_test_images_are_left_out_and_named(tmp_path, kind):
    pictures = {f"train/{c}/{n}.png": 100 * "ab".index(c) + n for c in "ab" for n in range(20)}
    pictures |= {f"test/{c}/{n}.png": 100 * "ab".index(c) + n for c in "ab" for n in range(5, 12)}
    write(tmp_path / "data", pictures)
    where = str(tmp_path / "data")
    if kind == "table":
        rows = [f"{name},{name.split('/')[1]},{name.split('/')[0]}" for name in pictures]
        (tmp_path / "data/images.csv").write_text("\n".join(["path,label,split", *rows]))
        where = str(tmp_path / "data/images.csv")
    if kind == "shards":
        list(pack(open_data(where, SplitRule(keep_duplicates=True)), tmp_path / "shards"))
        where = str(tmp_path / "shards")
    data, loose = open_data(where), open_data(where, SplitRule(keep_duplicates=True))
    assert data.test.names == loose.test.names
    assert len(data.test) == 14
    in_test = {pictures[name] for name in data.test.names}
    assert not in_test & {pictures[name] for name in data.train.names}
    assert not loose.notes
    copies = [name for name in loose.train.names if pictures[name] in in_test]
    if kind == "shards":  # have the validation split that was taken before, with copies of its own
        assert {*data.train.names} == {*loose.train.names} - {*copies}
        assert any(
            re.search(
                "validation images? (is a copy of an image|are copies of images) of the test", note
            )
            for note in data.notes
        )
    else:
        assert len(data.train) + len(data.val) == 40 - 14
        assert not in_test & {pictures[name] for name in data.val.names}
        assert data.notes[0].startswith("14 training images are copies of images of the test")


def test_the_same_picture_in_two_classes_is_said_and_on_one_side(tmp_path):
    pictures = patients("ab", each=1, images=30) | {"a/x.png": 999, "b/y.png": 999}
    data = open_data(str(write(tmp_path, pictures)))
    (note,) = data.notes
    assert note.startswith("in several classes: 1 picture, for example")
    assert "'a/x.png'" in note
    assert "'b/y.png'" in note
    sides = split_of(data)
    assert sides["a/x.png"] == sides["b/y.png"]


@pytest.mark.parametrize(("classes", "mixed"), [((0, 0), False), ((0, 1), True)])
def test_copies_are_mislabelled_if_their_classes_differ_and_not_if_their_boxes_do(
    tmp_path, classes, mixed
):
    pictures = {f"{number}.png": number for number in range(20)} | {"a.png": 99, "b.png": 99}
    root = write(tmp_path, pictures)

    def sample(name: str) -> Sample:
        target = Objects(((0, 0, 4 + (name == "a.png"), 4),), (classes[name == "b.png"],), (False,))
        return Sample(name, target, (root / name).stat().st_size)

    listing = Listing(("cat", "dog"), {"train": [*map(sample, pictures)]}, Below(root))
    notes = take_splits(listing, DEFAULT_RULE).notes
    assert any("'a.png' in 'cat' and 'b.png' in 'dog'" in note for note in notes) == mixed
    assert len(notes) == mixed


def test_a_class_whose_training_images_are_all_in_the_test_is_refused(tmp_path):
    pictures = {f"{s}/{c}/{n}.png": 9 * "ab".index(c) + n
                for s in ("train", "test") for c in "ab" for n in range(3)}  # fmt: skip
    write(tmp_path, pictures)
    with pytest.raises(ValueError, match="all training images of 'a' are copies"):
        open_data(str(tmp_path))
    assert len(open_data(str(tmp_path), SplitRule(keep_duplicates=True)).test) == 6


@pytest.mark.parametrize("size", [100, 200_000])
def test_copies_are_those_whose_bytes_are_equal_whatever_their_size(tmp_path, monkeypatch, size):
    """Compared with a slow obvious version; large files differ in one byte that no probe reads."""
    draw = random.Random(size)
    contents = [bytes([n]) * size for n in range(3)]
    contents.append(contents[0][: size // 3] + b"x" + contents[0][size // 3 + 1 :])
    contents.append(contents[0][:-1])
    samples, by_content = [], defaultdict(list)
    for number in range(30):
        content = draw.choice(contents)
        (tmp_path / str(number)).write_bytes(content)
        samples.append(Sample(str(number), 0, len(content)))
        by_content[content].append(str(number))
    samples.append(Sample("gone", 0, size))
    found = duplicates.find_copies(samples, lambda name: tmp_path / name)
    assert [*map(list, found.values())] == [each for each in by_content.values() if len(each) > 1]
    monkeypatch.setattr(duplicates, "MAX_COMPARED", 10)
    with pytest.raises(duplicates.TooManyImagesError):
        duplicates.find_copies(samples, lambda name: tmp_path / name)


# ---- no validation split, no test


def test_a_share_of_zero_gives_the_images_to_training_and_moves_no_other(tmp_path):
    taken = str(write(tmp_path / "taken", patients("ab", each=1, images=60)))
    given = {f"{s}/{c}/{n}.png": 1000 * i + 100 * "ab".index(c) + n
             for i, s in enumerate(("train", "val", "test"))
             for c in "ab" for n in range(9)}  # fmt: skip
    for where in (taken, str(write(tmp_path / "given", given)), "digits"):
        usual = open_data(where)
        for none in ("val", "test"):
            data = open_data(where, SplitRule(**{none: 0}))
            other = "test" if none == "val" else "val"
            assert len(getattr(data, none)) == 0
            assert getattr(data, other).names == getattr(usual, other).names
            assert set(data.train.names) == {*usual.train.names, *getattr(usual, none).names}
        whole = open_data(where, SplitRule(val=0, test=0))
        assert len(whole.val) == len(whole.test) == 0
        assert set(whole.train.names) == set(split_of(usual))


def test_a_validation_split_that_is_given_to_training_shares_no_group_with_the_test(tmp_path):
    pictures = {f"{s}/{c}/p{p}/{i}.png": 1000 * "tv".index(s[0]) + 100 * "ab".index(c) + 10 * p + i
                for s in ("train", "val") for c in "ab"
                for p in range(10) for i in range(2)}  # fmt: skip
    pictures |= {f"train/a/copy{n}.png": pictures["val/a/p0/0.png"] for n in range(2)}
    where = str(write(tmp_path, pictures))
    data = open_data(where, SplitRule(val=0, test=0.3, group=r"/(p\d)/"))
    patients = [{name.split("/")[2] for name in each.names} for each in (data.train, data.test)]
    assert not patients[0] & patients[1]
    assert (len(data.val), len(data.test)) == (0, 24)
    assert set(split_of(data)) == set(pictures)
    assert len(open_data(where, SplitRule(val=0)).test) == 0


def test_training_images_may_all_be_copies_of_a_validation_split_that_is_given_to_them(tmp_path):
    pictures = {f"{s}/{c}/{n}.png": 10 * "ab".index(c) + n
                for s in ("train", "val") for c in "ab" for n in range(4)}  # fmt: skip
    where = str(write(tmp_path, pictures | {"test/a/1.png": 90, "test/b/1.png": 91}))
    data = open_data(where, SplitRule(val=0))
    assert (len(data.train), len(data.val), len(data.test)) == (16, 0, 2)


def test_a_share_for_the_test_is_taken_where_there_is_none(tmp_path):
    where = str(write(tmp_path, patients("ab", each=1, images=200)))
    assert 60 <= len(open_data(where, SplitRule(test=0.2)).test) <= 100
    with pytest.raises(ValueError, match="test 0.5: 'test' is the test already"):
        open_data(str(write(tmp_path / "more", {f"{s}/{c}/1.png": n for n, (s, c) in enumerate(
            [("train", "a"), ("train", "b"), ("test", "a")])})), SplitRule(test=0.5))  # fmt: skip


def test_packing_keeps_the_splits_of_groups(tmp_path, capsys):
    pictures = patients("ab", each=8, images=3)
    where = str(write(tmp_path / "data", pictures))
    assert cli.run(["data", "pack", where, str(tmp_path / "shards"), "--group", "1"]) == 0
    assert "16 groups by '1'" in capsys.readouterr().err
    data = open_data(where, SplitRule(group="1"))
    assert split_of(open_data(str(tmp_path / "shards"))) == split_of(data)
    assert not any(
        "both" in note for note in open_data(str(tmp_path / "shards"), SplitRule(group="1")).notes
    )
