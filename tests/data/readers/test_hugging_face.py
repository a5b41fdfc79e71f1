"""Does a Hugging Face dataset become the right images in the right parts, or one line that says
what is wrong?"""

import json
import logging
import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from pyarrow import parquet

from fullstride import cli
from fullstride.data.dataset import DataSet, UnreadableImage, open_data
from fullstride.data.loader import Batches, LoaderOptions, TestView
from fullstride.data.readers.splits import SplitRule
from fullstride.nets.preprocessing import Preprocessing
from fullstride.train import run, run_folder
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS

DIGITS_DATA = open_data("digits")
CLASSES = ClassLabel(names=["zero", "one", "two"])


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    """No network, no bars of the tests' own, and the converted files in a folder of the test."""

    def refuse(*_, **__):
        raise AssertionError("the network is asked")

    connect = socket.socket.connect  # by which loader workers speak too
    local = socket.AF_UNIX
    monkeypatch.setattr(
        socket.socket, "connect", lambda s, to: connect(s, to) if s.family == local else refuse()
    )
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def png(index: int) -> bytes:
    file = BytesIO()
    DIGITS_DATA.train.picture(index).save(file, "PNG")
    return file.getvalue()


THREE = [index for index, label in enumerate(DIGITS_DATA.train.targets) if label < 3]


def table(count: int = 36, skip: int = 0, label=CLASSES, paths: bool = False, **more) -> Dataset:
    """`count` digits of the first three classes as PNG files, with their labels."""
    which = THREE[skip : skip + count]
    numbers = [DIGITS_DATA.train.targets[index] for index in which]
    values = [CLASSES.int2str(n) if label == Value("string") else n for n in numbers]
    cells = [{"bytes": png(index), "path": f"{index:04}.png" if paths else None} for index in which]
    features = Features(
        {"image": datasets.Image(), "label": label, **{name: f for name, (f, _) in more.items()}}
    )
    return Dataset.from_dict(
        {"image": cells, "label": values} | {n: v for n, (_, v) in more.items()}, features
    )


def saved(folder: Path, data: Dataset | DatasetDict) -> Path:
    data.save_to_disk(folder)
    return folder


def as_parquet(folder: Path, **files: Dataset) -> Path:
    """A file of each dataset; two underscores in its name stand for a slash and one for a
    hyphen."""
    for name, data in files.items():
        path = folder / f"{name.replace('__', '/').replace('_', '-')}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        data.to_parquet(path)
    return folder


def everything(data: DataSet) -> list[tuple[str, bytes]]:
    """Class and pixels of every image, whatever its part, sorted."""
    parts = (data.train, data.val, data.test)
    return sorted(
        (data.classes[p.targets[i]], p.picture(i).tobytes()) for p in parts for i in range(len(p))
    )


def pixels(data: Dataset) -> list[tuple[str, bytes]]:
    """The same as the library decodes it."""
    return sorted(
        (CLASSES.int2str(row["label"]), row["image"].convert("RGB").tobytes()) for row in data
    )


@pytest.mark.parametrize("form", ["saved", "saved in shards", "parquet", "parquet in shards"])
def test_every_row_is_an_image_of_its_class_in_both_kinds_of_folder(tmp_path, form):
    data = table()
    halves = data.select(range(20)), data.select(range(20, 36))
    folder = tmp_path / "three"
    if form.startswith("saved"):
        data.save_to_disk(folder, num_shards=2 if "shards" in form else 1)
    elif form == "parquet":
        as_parquet(folder, digits=data)
    else:
        as_parquet(
            folder, data__train_00000_of_00002=halves[0], data__train_00001_of_00002=halves[1]
        )
        (folder / "README.md").write_text("---\nconfigs: []\n---\n")
    found = open_data(str(folder))
    assert everything(found) == pixels(data)
    assert (found.name, found.classes, found.channels, found.mirror) == (
        "three",
        tuple(CLASSES.names),
        3,
        True,
    )
    assert found.train.names[0].startswith("train/000000")
    assert min(len(part) for part in (found.train, found.val, found.test)) >= 1


def test_saved_and_parquet_give_the_same_fingerprint_and_the_second_opening_too(tmp_path):
    where = str(saved(tmp_path / "saved", table()))
    first = open_data(where)
    assert first.fingerprint == open_data(where).fingerprint
    for _ in range(2):
        assert (
            open_data(str(as_parquet(tmp_path / "parquet", train=table()))).fingerprint
            == first.fingerprint
        )
    assert open_data(str(saved(tmp_path / "other", table(35)))).fingerprint != first.fingerprint


@pytest.mark.parametrize("form", ["saved", "files", "folders", "words"])
@pytest.mark.parametrize("val", ["validation", "val"])
def test_splits_are_parts_by_their_names_and_others_are_left_out(tmp_path, form, val):
    splits = {"train": table(20), "test": table(8, 20), val: table(6, 28), "extra": table(2, 34)}
    if form == "saved":
        saved(tmp_path / "data", DatasetDict(splits))
    elif form == "folders":
        as_parquet(
            tmp_path / "data",
            **{f"set__{name}__0000": part for name, part in splits.items() if name != "extra"},
        )
    elif form == "words":
        as_parquet(
            tmp_path / "data",
            **{f"my_{name}": part for name, part in splits.items() if name != "extra"},
        )
    else:
        names = {f"data__{name}_00000_of_00001": part for name, part in splits.items()}
        as_parquet(tmp_path / "data", **names, data__train_extra_00000_of_00001=table(2, 34))
    found = open_data(str(tmp_path / "data"))
    assert [len(part) for part in (found.train, found.val, found.test)] == [20, 6, 8]
    assert found.test.names[-1] == "test/00000007"
    assert found.test.picture(0).tobytes() == splits["test"][0]["image"].convert("RGB").tobytes()
    with pytest.raises(ValueError, match="'val' is the validation split already"):
        open_data(str(tmp_path / "data"), SplitRule(val=0.1))


def test_a_split_that_is_alone_is_for_training_whatever_its_name(tmp_path):
    for name in ("test", "full"):
        found = open_data(str(saved(tmp_path / name, DatasetDict({name: table()}))))
        assert everything(found) == pixels(table())
        found = open_data(str(as_parquet(tmp_path / f"{name}2", **{name: table()})))
        assert everything(found) == pixels(table())


@pytest.mark.parametrize(
    ("label", "classes"),
    [
        (Value("string"), ("one", "two", "zero")),
        (Value("int64"), ("0", "1", "2")),
        (Value("uint8"), ("0", "1", "2")),
    ],
)
def test_labels_may_be_words_or_numbers(tmp_path, label, classes):
    found = open_data(str(saved(tmp_path / "data", table(label=label))))
    named = (
        {"zero": "0", "one": "1", "two": "2"}
        if classes[0] == "0"
        else {name: name for name in classes}
    )
    assert found.classes == classes
    assert everything(found) == sorted((named[name], picture) for name, picture in pixels(table()))


@pytest.mark.parametrize("kind", ["struct", "bytes"])
@pytest.mark.parametrize("name", ["image", "img"])
def test_parquet_that_never_saw_their_library_is_known_by_the_names_of_its_columns(
    tmp_path, kind, name
):
    rows = [{"bytes": png(index), "path": f"{index}.png"} for index in THREE[:36]]
    labels = [CLASSES.int2str(DIGITS_DATA.train.targets[index]) for index in THREE[:36]]
    cells = rows if kind == "struct" else [row["bytes"] for row in rows]
    parquet.write_table(
        pa.table({name: cells, "target": labels, "id": range(36)}), tmp_path / "all.parquet"
    )
    found = open_data(str(tmp_path))
    assert everything(found) == pixels(table())
    assert (found.train.names[0].endswith(".png")) == (kind == "struct")


def test_names_are_the_paths_of_the_cells_where_each_has_one_of_its_own(tmp_path):
    data = table(paths=True)
    found = open_data(str(saved(tmp_path / "one", data)))
    assert sorted(n for part in (found.train, found.val, found.test) for n in part.names) == [
        f"{index:04}.png" for index in THREE[:36]
    ]
    where = str(saved(tmp_path / "two", DatasetDict(train=data, test=data)))
    twice = open_data(where, SplitRule(keep_duplicates=True))
    assert (twice.train.names[0], twice.test.names[35]) == (
        f"train/{twice.train.names[0][6:]}",
        "test/00000035",
    )


def test_a_choice_in_the_path_names_the_columns(tmp_path, monkeypatch):
    coarse = ClassLabel(names=["empty", "line"])
    second = (datasets.Image(), [{"bytes": png(THREE[40]), "path": None}] * 36)
    data = table().rename_column("label", "fine_label").add_column("row", range(36))
    data = data.add_column("coarse label", [n % 2 for n in range(36)], feature=coarse)
    data = data.add_column("mask", second[1], feature=second[0])
    where = str(saved(tmp_path / "data", data))
    with pytest.raises(
        ValueError,
        match=r"several label columns, 'fine_label', 'coarse label'.*data\?label=fine_label",
    ):
        open_data(where)
    with pytest.raises(
        ValueError, match=r"several image columns, 'image', 'mask': choose one, as .*\?image=image"
    ):
        open_data(f"{where}?label=fine_label")
    fine = open_data(f"{where}?label=fine_label&image=image")
    assert everything(fine) == pixels(table())
    masked = open_data(f"{where}?label=coarse+label&image=mask", SplitRule(keep_duplicates=True))
    assert masked.classes == ("empty", "line")
    assert len({picture for _, picture in everything(masked)}) == 1
    monkeypatch.chdir(tmp_path)
    again = open_data("data?label=coarse%20label&image=mask", SplitRule(keep_duplicates=True))
    monkeypatch.chdir("/")
    assert open_data(again.where, SplitRule(keep_duplicates=True)).fingerprint == masked.fingerprint
    assert len(open_data(f"{where}?label=row&image=image").classes) > 10
    both = as_parquet(tmp_path / "parquet", train=data)
    assert everything(open_data(f"{both}?label=fine_label&image=image")) == pixels(table())


def test_a_path_with_a_question_mark_that_is_there_means_itself(tmp_path):
    folder = saved(tmp_path / "a [b] *?label=c", table())
    assert everything(open_data(str(folder))) == pixels(table())
    folder = as_parquet(tmp_path / "d [e] *?label=f" / "__g__", train=table())
    assert everything(open_data(str(folder))) == pixels(table())


def test_a_folder_of_images_stays_one_beside_a_parquet_file(tmp_path):
    for index in THREE[:36]:
        path = tmp_path / str(DIGITS_DATA.train.targets[index]) / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(index))
    as_parquet(tmp_path, labels=table(2))
    assert len(everything(open_data(str(tmp_path)))) == 36


def test_the_images_pickle_without_their_pixels_and_read_the_same(tmp_path):
    large = {"note": (Value("large_binary"), [bytes(10**5)] * 36)}
    found = open_data(str(saved(tmp_path / "data", table(**large))))
    before = found.train.picture(3).tobytes()  # its files are open now
    assert pickle.loads(pickle.dumps(found.train)).picture(3).tobytes() == before
    assert len(pickle.dumps(found.train)) < 10**4


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_workers_read_what_one_process_reads(tmp_path, form):
    folder = (
        saved(tmp_path / "data", table())
        if form == "saved"
        else as_parquet(tmp_path / "data", train=table())
    )
    found = open_data(str(folder))
    view = TestView(Preprocessing(resolution=8))
    seen = [
        [
            b.x.numpy()
            for b in Batches(found.train, view, LoaderOptions(batch=5, workers=w)).epoch(0)
        ]
        for w in (0, 2)
    ]
    assert all(np.array_equal(one, two) for one, two in zip(*seen, strict=True))


def test_a_network_trains_on_it_from_the_first_epoch_to_the_bundle(tmp_path):
    data = open_data(str(as_parquet(tmp_path / "data", train=table())))
    recipe = replace(DIGITS, epochs=1, warmup_epochs=0, resolution=16, batch_size=8)
    (row,) = run.train(tmp_path / "run", "genet_tiny", data, recipe, RunOptions(workers=2))
    assert row["skipped"] == {}
    assert (
        json.loads((tmp_path / "run" / run_folder.BUNDLE / "bundle.json").read_text())["classes"]
        == CLASSES.names
    )


def test_it_packs_into_shards_of_the_same_fingerprint(tmp_path):
    folder = saved(tmp_path / "data", table(paths=True))
    assert cli.run(["data", "pack", str(folder), str(tmp_path / "packed")]) == 0
    assert open_data(str(tmp_path / "packed")).fingerprint == open_data(str(folder)).fingerprint


# ---- what comes from elsewhere


def test_a_path_in_a_cell_is_followed_only_below_the_folder(tmp_path):
    (tmp_path / "data" / "pictures").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(png(0))
    (tmp_path / "data" / "pictures" / "in.png").write_bytes(png(1))
    (tmp_path / "data" / "pictures" / "link.png").symlink_to(tmp_path / "secret.png")
    inside = str(tmp_path / "data" / "pictures" / "in.png")
    refused = {
        "../secret.png": "outside",
        str(tmp_path / "secret.png"): "outside",
        "pictures/link.png": "outside",
        "https://example.org/a.png": "no file",
        "none.png": "no file",
        "pictures": "no file",
        "nul\0.png": "embedded null",
    }
    paths = ["pictures/in.png", inside, *refused]
    rows = [{"bytes": None, "path": path} for path in paths] + [
        {"bytes": b"text", "path": "t"},
        None,
    ]
    rows += [{"bytes": None, "path": None}, {"bytes": b"", "path": "empty"}]
    feature = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    labels = [number % 2 for number in range(len(rows))]
    parts = {
        "image": pa.array(rows, feature),
        "label": labels,
        "note": paths + ["t", "null", "none", "empty"],
    }
    parquet.write_table(pa.table(parts), tmp_path / "data" / "train.parquet")
    found = open_data(str(tmp_path / "data"))
    reasons = {"": "", **{f"train/{2 + n:08}": why for n, why in enumerate(refused.values())}}
    reasons |= {
        "train/00000009": "not a JPEG",
        "train/00000010": "cell is empty",
        "train/00000011": "cell is empty",
    }
    reasons |= {"train/00000012": "it is empty"}
    for part in (found.train, found.val, found.test):
        for index, name in enumerate(part.names):
            if name in ("train/00000000", "train/00000001"):
                assert part.picture(index).size == (8, 8)
                continue
            with pytest.raises(UnreadableImage, match=reasons[name]) as raised:
                part.picture(index)
            assert (raised.value.name, "\n" in str(raised.value)) == (name, False)


def test_a_state_that_names_files_elsewhere_is_refused(tmp_path):
    folder = saved(tmp_path / "data", table())
    saved(tmp_path / "other", table())
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"] = [{"filename": "../other/data-00000-of-00001.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(
        ValueError, match="names files outside of its folder: save the dataset again"
    ):
        open_data(str(folder))


def test_code_beside_the_data_is_never_run(tmp_path):
    folder = as_parquet(tmp_path / "data", train=table())
    for name in ("data.py", "datasets.py", "__init__.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    open_data(str(folder))
    assert not (tmp_path / "ran").exists()


# ---- what is wrong with it


def broken(tmp_path: Path, kind: str) -> Path:
    """A folder with one fault."""
    folder, none = (
        tmp_path / "data",
        Dataset.from_dict({"image": [], "label": []}, table(1).features),
    )
    labels = [None if n == 7 else n % 3 for n in range(36)]
    match kind:
        case "no image":
            return saved(folder, table().remove_columns("image"))
        case "no label":
            return saved(
                folder,
                table().rename_column("label", "digit").cast_column("digit", Value("float32")),
            )
        case "a label of another name":
            return saved(
                folder, table().rename_column("label", "digit").cast_column("digit", Value("int64"))
            )
        case "a missing label" | "a missing number" | "a label of -1":
            data = table().remove_columns("label")
            if "-1" in kind:
                labels[7] = -1
            feature = Value("int64") if "number" in kind else CLASSES
            return saved(
                folder,
                DatasetDict(train=table(), test=data.add_column("label", labels, feature=feature)),
            )
        case "an unlabelled split":
            return saved(folder, DatasetDict(train=table(), test=table().remove_columns("label")))
        case "two colons in a name":
            return saved(tmp_path / "a::b", table())
        case "one class":
            return saved(folder, table().filter(lambda row: row["label"] == 1))
        case "no train split":
            return saved(folder, DatasetDict(first=table(), test=table()))
        case "no train file":
            return as_parquet(folder, extra_00000_of_00001=table(), test_00000_of_00001=table())
        case "two for one purpose":
            return saved(folder, DatasetDict(train=table(), val=table(), validation=table()))
        case "a file of no split":
            return as_parquet(folder, train=table(), metadata=table())
        case "two folders":
            return as_parquet(folder, a__train=table(), b__train=table())
        case "other classes":
            other = table().cast_column("label", ClassLabel(names=["a", "b", "c"]))
            return saved(folder, DatasetDict(train=table(), test=other))
        case "a new class":
            train = table().filter(lambda row: row["label"] < 2)
            both = DatasetDict(train=train, test=table())
            return saved(folder, both.cast_column("label", Value("int64")))
        case "empty":
            return saved(folder, none)
        case "an empty split":
            return saved(folder, DatasetDict(train=table(), test=none))
        case "an empty file":
            return as_parquet(folder, train=table(), test=none)
        case "no splits at all":
            folder.mkdir()
            (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
            return folder
    file = (
        "train.parquet"
        if "parquet" in kind
        else "state.json"
        if "state" in kind
        else "data-00000-of-00001.arrow"
    )
    if file == "train.parquet":
        as_parquet(folder, train=table())
    else:
        saved(folder, table())
    data = (folder / file).read_bytes()
    match kind.split()[-1]:
        case "half":
            (folder / file).write_bytes(data[: len(data) // 2])
        case "end":
            (folder / file).write_bytes(data[:-8])
        case "away":
            (folder / file).unlink()
        case "zeros":
            (folder / file).write_bytes(
                data[:4] + bytes(len(data) // 2) + data[len(data) // 2 + 4 :]
            )
        case "nothing":
            (folder / file).write_bytes(b"")
        case "nonsense":
            (folder / file).write_bytes(b"[3]")
    return folder


CANNOT = "cannot read .*: copy or save it again"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no image", r"has no image column among 'label': give a dataset with images"),
        ("no label", r"has no label column among 'image', 'digit': give a dataset with labels"),
        (
            "a label of another name",
            r"has no label column among 'image', 'digit': choose one, as .*data\?label=digit",
        ),
        (
            "a missing label",
            r"row 7 \(from 0\) of the split 'test' in .* has no 'label': fill it in",
        ),
        (
            "a label of -1",
            r"row 7 \(from 0\) of the split 'test' in .* has no 'label': fill it in",
        ),
        (
            "a missing number",
            "the split 'test' in .* has other columns or classes than train: save both alike",
        ),
        (
            "an unlabelled split",
            "the split 'test' in .* has other columns or classes than train: save both alike",
        ),
        ("two colons in a name", "two colons in a path mean a chain of file systems: rename"),
        ("one class", "has one class only, 'one': add images of a second one"),
        ("no train split", "has the splits 'first', 'test', none to train on: rename one to train"),
        ("no train file", "has the splits 'extra', 'test', none to train on: rename one to train"),
        (
            "two for one purpose",
            "has the splits 'val', 'validation' for one purpose: keep one",
        ),
        (
            "a file of no split",
            r"metadata.parquet' does not say train, val or test as other files do: rename it",
        ),
        ("two folders", "has parquet files in several folders, 'a', 'b': give one of these"),
        (
            "other classes",
            "the split 'test' in .* has other columns or classes than train: save both alike",
        ),
        (
            "a new class",
            r"row \d+ \(from 0\) of the split 'test' in .* has the 'label' '2', but .* '0', '1'",
        ),
        ("empty", "the split 'train' in .* has no rows: fill or remove it"),
        ("an empty split", "the split 'test' in .* has no rows: fill or remove it"),
        ("an empty file", "the split 'test' in .* has no rows: fill or remove it"),
        ("no splits at all", "has neither state.json nor parquet files"),
        ("arrow cut in half", CANNOT),
        (
            "arrow without its end",
            r"cannot read .* \(.*data-00000-of-00001.arrow is cut short\): copy or save it again",
        ),
        ("arrow away", CANNOT),
        ("arrow of zeros", CANNOT),
        ("arrow of nothing", CANNOT),
        ("state of nothing", CANNOT),
        ("state of nonsense", CANNOT),
        ("parquet cut in half", CANNOT),
        ("parquet of zeros", CANNOT),
        ("parquet of nothing", CANNOT),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path, kind, message, capfd, caplog):
    where = str(broken(tmp_path, kind))
    capfd.readouterr()
    with pytest.raises(ValueError, match=message) as raised:
        open_data(where)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            "label=digit",
            "has no 'digit' as label column among 'image', 'label': choose one, as .*label=label",
        ),
        (
            "image=label",
            "has no 'label' as image column among 'image', 'label': choose one, as .*image=image",
        ),
        (
            "split=train",
            r"does not choose columns: write .*data\?image=NAME&label=NAME, or one of the two",
        ),
        ("label=", "does not choose columns"),
        ("label&image=x", "does not choose columns"),
    ],
)
def test_a_choice_that_leads_nowhere_is_refused(tmp_path, query, message):
    where = saved(tmp_path / "data", table())
    with pytest.raises(ValueError, match=message):
        open_data(f"{where}?{query}")


def test_a_choice_in_another_kind_of_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no folder of a Hugging Face dataset"):
        open_data(f"{tmp_path}?label=x")
    with pytest.raises(ValueError, match=r"no folder '.*none'"):
        open_data(f"{tmp_path}/none?label=x")


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    where = str(saved(tmp_path / "data", table()))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"needs the package datasets: pip install 'fullstride\[hf\]'"
    ):
        open_data(where)


def test_the_library_says_nothing_and_is_left_as_it_was(tmp_path, capfd, monkeypatch):
    folder = as_parquet(tmp_path / "data", train=table())
    datasets.enable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    datasets.utils.logging.set_verbosity(logging.INFO)
    capfd.readouterr()
    try:
        open_data(str(folder))
        assert datasets.utils.logging.get_verbosity() == logging.INFO
    finally:
        datasets.utils.logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()
    assert not datasets.config.HF_HUB_OFFLINE


def test_other_data_do_not_wait_for_the_library():
    code = (
        "import sys, fullstride; fullstride.open_data('digits'); print('datasets' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "False\n"
    )
