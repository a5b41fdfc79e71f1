"""Folders of IDX files are read as by torchvision, and damaged ones are refused in one line."""

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import MNIST

from fullstride.data.dataset import open_data
from fullstride.data.readers.idx import read_idx
from fullstride.data.readers.splits import SplitRule

RNG = np.random.default_rng(0)


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def write(root: Path, suffix: str = "", prefix: str = "", dot: str = "-") -> Path:
    """30 training and 12 test images of 5 x 4 pixels and the classes 0, 2 and 10."""
    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 30), ("t10k", 12)):
        images = RNG.integers(0, 256, (count, 5, 4), dtype=np.uint8)
        labels = np.array([0, 2, 10] * (count // 3), np.uint8)
        for kind, values in (("images", images), ("labels", labels)):
            path = root / f"{prefix}{split}-{kind}{dot}idx{values.ndim}-ubyte{suffix}"
            data = idx(values)
            path.write_bytes(gzip.compress(data) if suffix else data)
    return root


@pytest.mark.parametrize(
    ("suffix", "prefix", "dot"), [("", "", "-"), (".gz", "", "."), (".gz", "emnist-letters-", "-")]
)
def test_images_and_labels_are_those_in_the_files(tmp_path, suffix, prefix, dot):
    data = open_data(str(write(tmp_path, suffix, prefix, dot)), SplitRule(val=0))
    assert (data.classes, data.channels, data.mirror) == (("0", "2", "10"), 1, False)
    assert (len(data.train), len(data.val), len(data.test)) == (30, 0, 12)
    file = next(tmp_path.glob("*train-images*")).read_bytes()
    raw = gzip.decompress(file) if suffix else file
    pixels = np.frombuffer(raw[16:], np.uint8).reshape(30, 5, 4)
    assert np.array_equal(pixels, [np.asarray(data.train.picture(n)) for n in range(30)])
    assert data.train.targets == (0, 1, 2) * 10
    again = pickle.loads(pickle.dumps(data.test))
    assert again.picture(3).tobytes() == data.test.picture(3).tobytes()
    taken = open_data(str(tmp_path))
    assert len(taken.val) == 3
    assert taken.test.names == data.test.names


def test_torchvision_reads_the_same(tmp_path):
    raw = write(tmp_path / "MNIST" / "raw")
    data = open_data(str(raw), SplitRule(val=0))
    for train, images in ((True, data.train), (False, data.test)):
        theirs = MNIST(str(tmp_path), train=train)
        assert [data.classes[t] for t in images.targets] == [str(int(t)) for t in theirs.targets]
        ours = np.stack([np.asarray(images.picture(n)) for n in range(len(images))])
        assert np.array_equal(ours, theirs.data.numpy())


def test_copies_of_test_images_are_left_out_of_training(tmp_path):
    write(tmp_path)
    names = [tmp_path / f"{split}-images-idx3-ubyte" for split in ("train", "t10k")]
    train, test = (name.read_bytes() for name in names)
    names[0].write_bytes(train[: 16 + 20] + test[16 : 16 + 40] + train[16 + 60 :])
    data = open_data(str(tmp_path), SplitRule(val=0))
    assert len(data.train) == 28
    assert any(note.startswith("2 training images are copies") for note in data.notes)


LABELS, IMAGES = "train-labels-idx1-ubyte", "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (IMAGES, b"", "no IDX file"),
        (IMAGES, b"\0\0\x0d\x03" + bytes(12), "no IDX file"),
        (
            IMAGES,
            struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 9),
            "its sizes are 42949",
        ),
        (IMAGES, struct.pack(">HBB3I", 0, 8, 3, 0, 5, 4), "its sizes are 0 x"),
        (IMAGES, struct.pack(">HBB3I", 0, 8, 3, 30, 5, 4) + bytes(599), "is cut short"),
        (IMAGES, struct.pack(">HBB3I", 0, 8, 3, 30, 5, 4) + bytes(601), "bytes after"),
        (IMAGES, idx(np.zeros((29, 5, 4), np.uint8)), "29 images, but there are 30 labels"),
        (LABELS, idx(np.zeros(30, np.uint8)), "has the labels '10', '2'"),
        (LABELS, None, "has no file of labels"),
    ],
)
def test_a_file_that_will_not_do_is_refused_in_one_line(tmp_path, name, content, message):
    write(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        open_data(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_no_more_of_a_gzip_file_is_read_than_its_header_says(tmp_path):
    head = struct.pack(">HBB3I", 0, 8, 3, 30, 5, 4)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(head + bytes(50 * 2**20)))
    with pytest.raises(ValueError, match="bytes after its last one, of 600"):
        read_idx(path, 3)
    path.write_bytes(gzip.compress(head + bytes(600))[:-12])
    with pytest.raises(ValueError, match="cannot read"):
        read_idx(path, 3)
    path.write_bytes(b"words")
    with pytest.raises(ValueError, match="cannot read"):
        read_idx(path, 3)


def test_two_data_sets_in_a_folder_are_refused(tmp_path):
    write(tmp_path, prefix="emnist-letters-")
    write(tmp_path, prefix="emnist-digits-")
    with pytest.raises(ValueError, match="several data sets, 'emnist-digits', 'emnist-letters'"):
        open_data(str(tmp_path))
