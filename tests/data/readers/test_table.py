"""Does a CSV table become the right images in the right parts, or a line that names what is wrong
and where?"""

import os
from pathlib import Path

import pytest
from PIL import Image

from fullstride.data.dataset import DataSet, open_data
from fullstride.data.loader import Batches, LoaderOptions, TestView
from fullstride.data.readers.splits import SplitRule
from fullstride.nets.preprocessing import Preprocessing


def pictures(root: Path, *names: str) -> Path:
    """A picture at each name, the n-th with n in its red channel."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 5), (number, 0, 0)).save(root / name, "PNG")
    return root


def table(root: Path, text: str | bytes, name: str = "images.csv") -> str:
    (root / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return str(root / name)


def images_of(data: DataSet) -> dict[str, str]:
    """The class of each name, whatever its part."""
    parts = (data.train, data.val, data.test)
    return {
        n: data.classes[label]
        for part in parts
        for n, label in zip(part.names, part.targets, strict=True)
    }


TEN = [f"photos/{number}.png" for number in range(10)]
ROWS = [(name, "cat" if number % 3 else "dog") for number, name in enumerate(TEN)]


@pytest.mark.parametrize(
    ("delimiter", "mark", "newline"),
    [
        (",", b"", "\n"),
        (",", b"\xef\xbb\xbf", "\r\n"),
        (";", b"\xef\xbb\xbf", "\n"),
        (";", b"", "\r\n"),
        ("\t", b"", "\r\n"),
        ("\t", b"\xef\xbb\xbf", "\n"),
    ],
)
def test_every_row_is_an_image_of_its_class(tmp_path, delimiter, mark, newline):
    pictures(tmp_path, *TEN)
    lines = [delimiter.join(fields) for fields in [("path", "label"), *ROWS]]
    data = open_data(table(tmp_path, mark + newline.join(lines).encode()))
    assert images_of(data) == dict(ROWS)
    assert (data.name, data.classes, data.channels, data.mirror) == (
        "images",
        ("cat", "dog"),
        3,
        True,
    )
    assert data.train.picture(0).getpixel((0, 0)) == (TEN.index(data.train.names[0]), 0, 0)
    assert min(len(part) for part in (data.train, data.val, data.test)) >= 1


@pytest.mark.parametrize("header", ["image,class", "Filename , Target", "file,label", "label,path"])
def test_columns_go_by_several_names_in_any_order_beside_others(tmp_path, header):
    pictures(tmp_path, *TEN)
    swap = header == "label,path"
    rows = [f"{b},{a},7" if swap else f" {a} ,{b},7" for a, b in ROWS]
    assert images_of(open_data(table(tmp_path, "\n".join([header + ",width", *rows])))) == dict(
        ROWS
    )


def test_quoted_fields_hold_delimiters_and_other_scripts(tmp_path):
    names = ["a, b.png", "ü 猫.png", 'say "x".png', "d;e.png", "new\nline.png"]
    pictures(tmp_path, *names)
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    rows = "\n".join(f'{name},"class, {number % 2}"' for number, name in enumerate(quoted))
    data = open_data(table(tmp_path, "path,label\n" + rows))
    assert images_of(data) == {name: f"class, {number % 2}" for number, name in enumerate(names)}


def test_whole_numbers_as_labels_are_ordered_by_number_and_other_labels_by_letter(tmp_path):
    pictures(tmp_path, *TEN)
    for labels, wanted in (
        (("10", "9", "-1"), ("-1", "9", "10")),
        (("10", "9", "x"), ("10", "9", "x")),
    ):
        rows = [f"{name},{labels[number % 3]}" for number, name in enumerate(TEN)]
        assert open_data(table(tmp_path, "\n".join(["path,label", *rows]))).classes == wanted


def test_the_column_split_names_the_parts(tmp_path):
    pictures(tmp_path, *TEN)
    splits = ["train"] * 6 + ["val", "Validation", "test", "TEST"]
    rows = [f"{name},{label},{split}" for (name, label), split in zip(ROWS, splits, strict=True)]
    data = open_data(table(tmp_path, "\n".join(["path,label,split", *rows])))
    assert [list(part.names) for part in (data.train, data.val, data.test)] == [
        TEN[:6],
        TEN[6:8],
        TEN[8:],
    ]
    with pytest.raises(ValueError, match="'val' is the validation split already"):
        open_data(data.where, SplitRule(val=0.1))
    two = open_data(table(tmp_path, "\n".join(["path,label,split", *rows[:8]])))
    assert (list(two.val.names), len(two.train), len(two.test)) == (TEN[6:8], 6, 0)


def test_parts_that_are_not_named_are_cut_as_in_a_folder_of_the_same_names(tmp_path):
    names = [f"{name}/{i:03}.png" for name in ("cat", "dog") for i in range(60)]
    folder = open_data(str(pictures(tmp_path / "pets", *names)))
    rows = [f"pets/{name},{name[:3]}" for name in names]
    inside = [f"{name},{name[:3]}" for name in names]
    other = open_data(table(tmp_path, "\n".join(["path,label", *rows])))
    same = open_data(table(tmp_path / "pets", "\n".join(["path,label", *inside])))
    for part in ("train", "val", "test"):
        assert getattr(same, part).names == getattr(folder, part).names
        assert getattr(other, part).names
    assert same.fingerprint == folder.fingerprint != other.fingerprint


def test_absolute_paths_lead_anywhere_and_those_below_the_table_are_told_from_there(tmp_path):
    pictures(tmp_path / "far", *TEN[:5])
    pictures(tmp_path / "near", *TEN[5:])
    paths = [tmp_path / "far" / name for name in TEN[:5]] + [
        tmp_path / "near" / name for name in TEN[5:]
    ]
    text = "\n".join(
        ["path,label", *(f"{path},{label}" for path, (_, label) in zip(paths, ROWS, strict=True))]
    )
    data = open_data(table(tmp_path / "near", text))
    assert set(images_of(data)) == {str(tmp_path / "far" / name) for name in TEN[:5]} | set(TEN[5:])
    (batch,) = Batches(
        data.test, TestView(Preprocessing(resolution=8)), LoaderOptions(batch=10)
    ).epoch(0)
    assert len(batch.x) == len(data.test)


def test_where_opens_the_same_data_from_any_working_directory(tmp_path, monkeypatch):
    pictures(tmp_path, *TEN)
    table(tmp_path, "\n".join(["path\tlabel", *map("\t".join, ROWS)]), "a b.TSV")
    monkeypatch.chdir(tmp_path)
    first = open_data("a b.TSV")
    monkeypatch.chdir("/")
    assert open_data(first.where) == first


def test_a_row_that_stands_twice_counts_once_and_blank_lines_not_at_all(tmp_path):
    pictures(tmp_path, *TEN)
    rows = [f"{name},{label}" for name, label in ROWS]
    plain = open_data(table(tmp_path, "\n".join(["path,label", *rows])))
    twice = open_data(
        table(tmp_path, "\n".join(["path,label", *rows, "", ",", f"./{rows[0]}", *rows]) + "\n\n")
    )
    assert twice.fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: give a header"),
        (b"\xef\xbb\xbf\n \n", "is empty: give a header"),
        ("path,label\n", "has a header and no rows"),
        (
            "photos/0.png,cat\n",
            "line 1 has no column 'path', but .*: name one of path, image, filename, file",
        ),
        (
            "path,lable\nphotos/0.png,cat\n",
            "line 1 has no column 'label', .*: name one of label, class, target",
        ),
        ("path,label\nphotos/0.png,cat\nphotos/1.png\n", "line 3 has no label"),
        ("path,label\n\nphotos/0.png, \n", "line 3 has an empty label"),
        ("path,label\n,cat\n", "line 2 has an empty path"),
        ("path,label\nphotos/0.png,cat,dog\n", "line 2 has 3 fields, the header 2: quote"),
        ('path,label\n"photos/0.png,cat\n', r"line 2 is not CSV \(.*\): check its quotes"),
        (
            "path,label,split\nphotos/0.png,cat,trian\n",
            "line 2 has the split 'trian': use train, val or test",
        ),
        ("path,label,split\nphotos/0.png,cat,\n", "line 2 has an empty split"),
        ("path,label,split\nphotos/0.png,cat,test\n", "no row to train on"),
        ("path,label\nphotos/0.png,cat\nphotos/1.png,cat\n", "one class only, 'cat'"),
        (
            "path,label,split\nphotos/0.png,a,train\nphotos/1.png,b,train\nphotos/2.png,z,test\n",
            "line 4 has the label 'z', which no training row has",
        ),
        (
            "path,label\nphotos/0.png,a\nphotos/1.png,b\n./photos/0.png,b\n",
            "line 4: 'photos/0.png' has two labels, 'a' on line 2 and 'b' here",
        ),
        (
            "path,label,split\nphotos/0.png,a,train\nphotos/0.png,a,test\n",
            "line 3: .* has two splits, 'train' on line 2",
        ),
        (
            "path,label\nphotos/0.png,a\nphotos/x.png,b\nphotos,b\n\0,b\n",
            "3 of the 4 files in .* are missing, the first is 'photos/x.png' on line 3",
        ),
        (b"path,label\nphotos/0.png,a\nphotos/1.png,\xfc\n", "line 3 is not UTF-8: save"),
        ("path,label\nphotos/0.png,a\nphotos/1.png,b\n", "too few images"),
    ],
)
def test_a_table_that_will_not_do_is_refused_in_one_line(tmp_path, text, message):
    pictures(tmp_path, *TEN)
    with pytest.raises(ValueError, match=message) as caught:
        open_data(table(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_slip_in_the_tables_name_is_noticed(tmp_path):
    table(tmp_path, "path,label\n")
    with pytest.raises(ValueError, match=r"no table '.*image.csv': did you mean '.*images.csv'\?"):
        open_data(str(tmp_path / "image.csv"))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match="has no class folders"):
        open_data(str(tmp_path / "folder.csv"))
    with pytest.raises(ValueError, match="no table '.*': check the path"):
        open_data(os.fspath(tmp_path / "no" / "where.csv"))
