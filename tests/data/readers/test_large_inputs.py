"""Data of many entries, or that claim many, are read in time and memory proportional to them."""

import gzip
import json
import os
import struct
import sys
import tarfile
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fullstride.data.dataset import open_data
from fullstride.data.readers.coco import coco_files, read_coco_objects
from fullstride.data.readers.masks import MaskFile
from fullstride.data.readers.shards import scan
from fullstride.data.readers.voc import read_voc
from fullstride.data.targets import open_labels


def calls_in(work: Callable[[], Any]) -> int:
    """The function calls of `work`, of Python and of C."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def peak_bytes(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_counts_of_idx_files_are_compared_before_labels_are_read(tmp_path):
    images = struct.pack(">HBB3I", 0, 8, 3, 30, 5, 4) + bytes(600)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(images)
    labels = struct.pack(">HBBI", 0, 8, 1, 2 * 10**7) + bytes(2 * 10**7)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))

    def refused() -> None:
        with pytest.raises(ValueError, match="30 images, but there are 20,000,000 labels"):
            open_data(str(tmp_path))

    assert peak_bytes(refused) < 2**21


def test_an_idx_file_that_says_more_than_it_has_is_refused_by_its_size(tmp_path):
    images = struct.pack(">HBB3I", 0, 8, 3, 10**6, 30, 30) + bytes(600)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, 10**6))
    with pytest.raises(ValueError, match="is cut short, .* bytes for 900,000,000 values"):
        open_data(str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="folders are listed on Linux only")
def test_a_table_of_missing_files_lists_each_folder_once(tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    rows = [f"photos/{number}.png,{number % 2}" for number in range(500)]
    (tmp_path / "all.csv").write_text("\n".join(["path,label", *rows]))
    calls, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: calls.append(path) or scandir(path))
    for owner in (os, Path):
        stat = owner.stat
        monkeypatch.setattr(
            owner, "stat", lambda *a, stat=stat, **k: calls.append(a) or stat(*a, **k)
        )
    with pytest.raises(ValueError, match="500 of the 500 files .* are missing, the first is"):
        open_data(str(tmp_path / "all.csv"))
    assert len(calls) < 20


def coco(folder: Path, categories: int) -> Path:
    (folder / "annotations").mkdir(parents=True)
    (folder / "images").mkdir()
    Image.new("RGB", (9, 9)).save(folder / "images" / "0.png")
    numbers = range(categories)
    content = {
        "images": [{"id": 0, "file_name": "0.png", "width": 9, "height": 9}],
        "categories": [{"id": number, "name": f"c{number}"} for number in numbers],
        "annotations": [
            {"id": number, "image_id": 0, "category_id": number, "bbox": [1, 1, 5, 5]}
            for number in numbers
        ],
    }
    (folder / "annotations" / "instances_train.json").write_text(json.dumps(content))
    return folder


def voc(folder: Path, objects: int) -> Path:
    for name in ("JPEGImages", "Annotations"):
        (folder / name).mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(folder / "JPEGImages" / "0.jpg")
    edges = "".join(f"<{name}>4</{name}>" for name in ("xmin", "ymin", "xmax", "ymax"))
    one = f"<object><name>cat</name><bndbox>{edges}</bndbox></object>"
    size = "<size><width>9</width><height>9</height></size>"
    (folder / "Annotations" / "0.xml").write_text(f"<annotation>{size}{one * objects}</annotation>")
    return folder


def shard(folder: Path, members: int) -> Path:
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number in range(members):
            tar.addfile(tarfile.TarInfo(f"{number:06}.png"))
    return folder / "a.tar"


def index(folder: Path, **changes: Any) -> str:
    with tarfile.open(shard(folder, 0), "w") as tar:
        tar.addfile(tarfile.TarInfo("0.png"))
    size = (folder / "a.tar").stat().st_size
    samples = [[str(number), 0, 100, 0] for number in range(4000)]
    content: dict[str, Any] = {"format": "fullstride shards 1", "channels": 3, "mirror": True}
    content |= {"classes": ["a", "b"], "shards": {"a.tar": {"bytes": size, "samples": samples}}}
    (folder / "index.json").write_text(json.dumps(content | changes))
    return str(folder)


MANY = [f"c{number}" for number in range(30_000)]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"classes": MANY}, "names 30,000 classes for 4,000 images"),
        ({"classes": MANY, "label_sets": [[*range(3000)]]}, "names 12,000,000 labels of 4,000"),
        ({"label_sets": [[0, 1, 0]]}, r"label_sets has \(0, 1, 0\)"),
    ],
)
def test_an_index_that_names_more_than_its_images_could_use_is_refused(tmp_path, changes, match):
    where = index(tmp_path / "shards", **changes)

    def refused() -> None:
        with pytest.raises(ValueError, match=match):
            open_labels(where)

    assert peak_bytes(refused) < 2**25


def test_a_parquet_file_of_more_rows_than_bytes_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    rows = 10**6
    columns = {"image": pa.array([b"x"] * rows), "label": pa.array(np.arange(rows) < 9)}
    parquet.write_table(pa.table(columns), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r"train\.parquet.* bytes for 1,000,000 rows"):
        open_data(str(tmp_path))


MOST_TIMES = 64  # its own bytes that what is built of a file may take


def one_table(folder: Path) -> tuple[Path, Callable[[], Any]]:
    (folder / "a.csv").write_text("path,label\n" + "".join(f"{n},{n % 2}\n" for n in range(20000)))
    return folder / "a.csv", lambda: read_all(open_data, folder / "a.csv")


def one_set(folder: Path) -> tuple[Path, Callable[[], Any]]:
    changes = {"classes": MANY[:9000], "label_sets": [[*range(9000)]]}
    where = index(folder / "shards", **changes)
    return Path(where) / "index.json", lambda: read_all(open_labels, Path(where))


def one_coco(folder: Path) -> tuple[Path, Callable[[], Any]]:
    where = coco(folder, 3000) / "annotations" / "instances_train.json"
    return where, lambda: read_coco_objects({"train": where})


def one_voc(folder: Path) -> tuple[Path, Callable[[], Any]]:
    where = voc(folder / "voc", 3000)
    return where / "Annotations" / "0.xml", lambda: read_voc(where, [where])


def read_all(read: Callable[[str], Any], path: Path) -> None:
    with suppress(ValueError):  # too few images
        read(str(path))


@pytest.mark.parametrize("write", [one_table, one_set, one_coco, one_voc])
def test_what_is_built_of_a_file_is_bounded_by_its_bytes(tmp_path, write):
    path, read = write(tmp_path)
    read()  # once for what is imported
    assert peak_bytes(read) < MOST_TIMES * path.stat().st_size


READERS = {
    "categories of COCO": (coco, lambda where: read_coco_objects(coco_files(where)), 130),
    "objects of VOC": (voc, lambda where: read_voc(where, [where]), 80),
    "members of a tar file": (shard, lambda where: scan(where, labelled=False), 130),
}


@pytest.mark.parametrize("kind", READERS)
def test_an_entry_takes_a_fixed_number_of_calls(tmp_path, kind):
    write, read, most = READERS[kind]
    few, many = (write(tmp_path / str(count), count) for count in (400, 1200))
    first, second = calls_in(lambda: read(few)), calls_in(lambda: read(many))
    assert (second - first) / 800 < most


def test_the_values_of_a_mask_take_a_byte_each(tmp_path):
    Image.new("L", (1000, 1000), 3).save(tmp_path / "mask.png")
    mask = MaskFile(tmp_path, "mask.png", bytes(range(5)))
    assert (mask.read() == 3).all()
    assert peak_bytes(mask.read) < 8 * 10**6
    Image.fromarray(np.eye(9, dtype=bool)).save(tmp_path / "bits.png")
    assert np.array_equal(MaskFile(tmp_path, "bits.png", bytes(range(2))).read(), np.eye(9))
