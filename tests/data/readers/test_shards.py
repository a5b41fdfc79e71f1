"""Do shards give back what was packed, image by image, and does a damaged or hostile one end in one
line?"""

import io
import json
import multiprocessing
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fullstride import cli
from fullstride.data.dataset import DataSet, UnreadableImage, open_data
from fullstride.data.loader import Batches, LoaderOptions, TrainView
from fullstride.data.pack import Encoding, Progress, pack
from fullstride.data.readers import decode as decoding
from fullstride.data.readers.splits import SplitRule
from fullstride.data.transforms.crop import Augmentation
from fullstride.data.unlabelled import open_unlabelled
from fullstride.nets.preprocessing import Preprocessing

PARTS = ("train", "val", "test")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """120 noisy JPEGs of two classes, named with blanks and other scripts; two are stored on their
    side."""
    root = tmp_path_factory.mktemp("data") / "photos"
    rng = np.random.default_rng(0)
    for name in ("kočka 猫", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(60):
            pixels = rng.integers(0, 256, (120, 180, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"a {number}.v1.jpeg", "JPEG")
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("dog", "kočka 猫"):
        Image.linear_gradient("L").resize((180, 120)).save(
            root / name / "turned.jpg", exif=exif, quality=95
        )
    return root


@pytest.fixture(scope="module")
def packed(photos, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "small shards"
    made(photos, out)
    return out


def made(where: Path | str, out: Path, **form: int) -> Progress:
    """The last count of packing into shards of a MiB."""
    *_, last = pack(open_data(str(where)), out, Encoding(**form), shard_mib=1)
    return last


def tar(path: Path, *files: tuple[str, bytes], **how) -> Path:
    """A tar as anyone may write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **how) as opened:
        for name, data in files:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            opened.addfile(header, io.BytesIO(data))
    return path


def picture(red: int = 0, kind: str = "PNG") -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (6, 5), (red, 0, 0)).save(written, kind)
    return written.getvalue()


def samples(count: int, first: int = 0, **more: bytes) -> list[tuple[str, bytes]]:
    """Samples in webdataset's names, of the classes 2 and 10 in turn."""
    files = []
    for number in range(first, first + count):
        files += [
            (f"{number:06}.png", picture(number)),
            (f"{number:06}.cls", b"10" if number % 2 else b"2"),
        ]
        files += [(f"{number:06}.{suffix}", data) for suffix, data in more.items()]
    return files


def labels_of(data: DataSet) -> dict[str, str]:
    parts = [getattr(data, part) for part in PARTS]
    return {
        n: data.classes[label]
        for part in parts
        for n, label in zip(part.names, part.targets, strict=True)
    }


# ---- what pack writes


def test_packed_images_have_the_names_labels_order_and_pixels_of_the_folder(photos, packed):
    there, here = open_data(str(photos)), open_data(str(packed))
    assert (here.classes, here.channels, here.mirror) == (
        there.classes,
        there.channels,
        there.mirror,
    )
    assert here.fingerprint == there.fingerprint
    for part in PARTS:
        ours, theirs = getattr(here, part), getattr(there, part)
        assert (ours.names, ours.targets) == (theirs.names, theirs.targets)
        for index in range(len(ours)):
            assert ours.picture(index).tobytes() == theirs.picture(index).tobytes()
            assert ours.file(ours.names[index]) == theirs.file(ours.names[index]).read_bytes()


def test_packed_shards_are_plain_tars_in_webdatasets_names(photos, packed):
    data = open_data(str(photos))
    first = sorted(packed.glob("train-*.tar"))[0]
    with tarfile.open(first) as opened:
        names = opened.getnames()
        assert names[:4] == ["000000.jpeg", "000000.cls", "000001.jpeg", "000001.cls"]
        file = opened.extractfile("000000.cls")
        assert file
        assert int(file.read()) == data.train.targets[0]
    assert len(sorted(packed.glob("train-*.tar"))) > 1
    assert sorted(p.name for p in packed.iterdir() if p.suffix != ".tar") == ["index.json"]


def test_a_shard_ends_with_the_picture_that_fills_it(tmp_path, photos):
    counts = list(pack(open_data(str(photos)), tmp_path / "out", shard_mib=1))
    assert counts[-1] == counts[-2]
    assert counts[-1].shards == len(list((tmp_path / "out").glob("*.tar")))
    assert counts[-1].images == 122
    assert (
        counts[-1].bytes_in
        == counts[-1].bytes_out
        == sum(p.stat().st_size for p in photos.glob("*/*"))
    )
    sizes = [p.stat().st_size for p in sorted((tmp_path / "out").glob("train-*.tar"))]
    assert all(2**20 <= size < 2**20 + 2**16 for size in sizes[:-1])


def test_packing_twice_gives_the_same_bytes_and_packing_shards_gives_the_same_images(
    tmp_path, photos, packed
):
    made(photos, tmp_path / "again")
    for path in packed.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    made(packed, tmp_path / "third")
    assert open_data(str(tmp_path / "third")).fingerprint == open_data(str(photos)).fingerprint


def test_digits_are_packed_without_loss_and_stay_gray(tmp_path):
    made("digits", tmp_path / "digits")
    there, here = open_data("digits"), open_data(str(tmp_path / "digits"))
    assert (here.classes, here.channels, here.mirror) == (there.classes, 1, False)
    for part in PARTS:
        ours, theirs = getattr(here, part), getattr(there, part)
        assert (ours.names, ours.targets) == (theirs.names, theirs.targets)
        assert all(
            ours.picture(i).tobytes() == theirs.picture(i).tobytes()
            for i in range(0, len(ours), 37)
        )


def test_a_table_is_packed_with_files_of_any_suffix(tmp_path):
    names = [
        f"{number}.{suffix}" for number, suffix in enumerate(["bin", "jpg", "data", "PNG", "x.y"])
    ]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(picture(number, "PNG" if number != 1 else "JPEG"))
    rows = [f"{name},{number % 2}" for number, name in enumerate(names)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *rows]))
    made(tmp_path / "t.csv", tmp_path / "out")
    assert labels_of(open_data(str(tmp_path / "out"))) == {
        n: str(i % 2) for i, n in enumerate(names)
    }
    suffixes = set()
    for path in (tmp_path / "out").glob("*.tar"):
        with tarfile.open(path) as opened:
            suffixes |= {Path(name).suffix for name in opened.getnames()}
    assert suffixes == {".png", ".jpg", ".cls"}


def test_reencoding_shrinks_the_long_side_keeps_pictures_upright_and_enlarges_none(
    tmp_path, photos
):
    done = made(photos, tmp_path / "out", long_side=90, quality=80)
    assert done.bytes_out < done.bytes_in / 2
    there, here = open_data(str(photos)), open_data(str(tmp_path / "out"))
    for part in PARTS:
        ours, theirs = getattr(here, part), getattr(there, part)
        assert (ours.names, ours.targets) == (theirs.names, theirs.targets)
        for index, name in enumerate(ours.names):
            small, large = ours.picture(index), theirs.picture(index)
            assert small.size == tuple(side // 2 for side in large.size)
            if name.endswith("turned.jpg"):
                assert small.size == (60, 90)
                halved = np.asarray(large, float).reshape(90, 2, 60, 2, 3).mean((1, 3))
                assert np.abs(np.asarray(small, float) - halved).mean() < 2
    made(photos, tmp_path / "same", long_side=500)
    assert open_data(str(tmp_path / "same")).train.picture(0).size == there.train.picture(0).size


def test_pictures_that_cannot_be_read_are_left_out_when_reencoding_and_kept_otherwise(tmp_path):
    names = [f"{c}/{i}.png" for c in "ab" for i in range(20)]
    for number, name in enumerate(names):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(picture(number))
    (tmp_path / "data/a/3.png").write_bytes(b"words")
    (tmp_path / "data/b/4.png").unlink()
    (tmp_path / "data/b/4.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "data/b/5.png").write_bytes(b"")
    done = made(tmp_path / "data", tmp_path / "small", long_side=4)
    assert sorted(done.skipped) == ["a/3.png", "b/4.png", "b/5.png"]
    assert done.skipped["b/4.png"] == "No such file or directory"
    assert sorted(
        labels_of(open_data(str(tmp_path / "small"), SplitRule(keep_duplicates=True)))
    ) == sorted({*names} - {*done.skipped})
    done = made(tmp_path / "data", tmp_path / "kept")
    assert list(done.skipped) == ["b/4.png"]
    kept = open_data(str(tmp_path / "kept"))
    part = next(p for p in (kept.train, kept.val, kept.test) if "b/5.png" in p.names)
    with pytest.raises(UnreadableImage, match="cannot read 'b/5.png': it is empty"):
        part.picture(part.names.index("b/5.png"))


def test_a_part_of_which_nothing_can_be_read_leaves_no_shards(tmp_path):
    for number, name in enumerate(("train/a/1.png", "train/a/2.png", "train/b/1.png")):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(picture(number))
    (tmp_path / "data/test/a").mkdir(parents=True)
    (tmp_path / "data/test/a/1.png").write_bytes(b"words")
    with pytest.raises(
        ValueError, match="no image of the split test can be read; 'test/a/1.png': it is not a"
    ):
        made(tmp_path / "data", tmp_path / "out", long_side=9)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_a_folder_that_may_not_be_written_to_is_refused_as_by_other_commands(
    tmp_path, photos, monkeypatch
):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(PermissionError, match="cannot be written to"):
        next(pack(open_data(str(photos)), tmp_path / "out"))


def test_packing_that_is_stopped_leaves_nothing(tmp_path, photos):
    started = pack(open_data(str(photos)), tmp_path / "out")
    next(started)
    started.close()
    assert not list(tmp_path.iterdir())


# ---- reading


def test_a_path_is_opened_as_its_name_is(packed):
    assert open_data(packed).train.names == open_data(str(packed)).train.names


def test_workers_change_no_pixel_of_packed_images(packed):
    images = open_data(str(packed)).train
    view = TrainView(Preprocessing(resolution=16), Augmentation(scale=(0.5, 1.0)))
    epochs = []
    for workers in (0, 2):
        batches = Batches(
            images, view, LoaderOptions(batch=16, seed=3, shuffle=True, workers=workers)
        )
        epochs.append(torch.cat([batch.x for number in (0, 1) for batch in batches.epoch(number)]))
    assert torch.equal(*epochs)


def test_a_process_that_is_spawned_reads_packed_images(packed):
    images = open_data(str(packed)).test
    before = images.picture(0)
    assert pickle.loads(pickle.dumps(images)) == images
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(images.picture, (0,)).tobytes() == before.tobytes()


def test_where_opens_the_same_shards_from_any_working_directory(packed, monkeypatch):
    monkeypatch.chdir(packed.parent)
    for where in (packed.name, f"{packed.name}/*.tar"):
        monkeypatch.chdir(packed.parent)
        first = open_data(where)
        monkeypatch.chdir("/")
        assert open_data(first.where) == first
        assert first.fingerprint == open_data(str(packed)).fingerprint


def test_more_shards_than_may_be_open_are_read_in_turn(tmp_path, monkeypatch):
    from fullstride.data.readers import shards

    monkeypatch.setattr(shards, "MAX_OPEN_SHARDS", 2)
    for number in range(5):
        tar(tmp_path / f"{number}.tar", *samples(4, 4 * number))
    files = Path("/proc/self/fd")
    before = len(list(files.iterdir())) if files.is_dir() else 0
    data = open_data(str(tmp_path))
    for _ in range(2):
        for part in (data.train, data.val, data.test):
            for index, name in enumerate(part.names):
                assert part.picture(index).getpixel((0, 0)) == (int(name[-10:-4]), 0, 0)
                if before:
                    assert len(list(files.iterdir())) <= before + 2


def test_a_tar_that_webdataset_would_read_is_read_without_an_index(tmp_path):
    long = "deep/" * 30 + "ü 猫"
    for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        folder = tmp_path / str(kind)
        more = [(f"{long}.PNG", picture(200)), (f"{long}.json", b'{"label": 10, "note": "x"}')]
        tar(folder / "photos-0.tar", *samples(12, txt=b"a caption"), format=kind)
        tar(
            folder / "photos-1.tar",
            *samples(12, 12),
            *more,
            ("README", b"words"),
            ("x.txt", b""),
            format=kind,
        )
        data = open_data(str(folder))
        wanted = {f"photos-{i // 12}.tar/{i:06}.png": "10" if i % 2 else "2" for i in range(24)}
        assert labels_of(data) == {**wanted, f"photos-1.tar/{long}.png": "10"}
        assert (data.name, data.classes, data.channels) == (str(kind), ("2", "10"), 3)
        for part in (data.train, data.val, data.test):
            reds = [200 if "deep" in name else int(name[-10:-4]) for name in part.names]
            assert [part.picture(i).getpixel((0, 0)) for i in range(len(part))] == [
                (red, 0, 0) for red in reds
            ]


def test_patterns_with_braces_and_stars_choose_shards(tmp_path):
    for number in range(4):
        tar(tmp_path / f"p-{number:03}.tar", *samples(6, 6 * number))
    tar(tmp_path / "q[1].tar", *samples(6, 90))
    for pattern, wanted in {
        "p-{000..002}.tar": 18,
        "p-{000,003}.tar": 12,
        "p-*.tar": 24,
        "p-00[01].tar": 12,
        "{p,q}*.tar": 30,
        "q[1].tar": 6,
        "p-001.tar": 6,
    }.items():
        data = open_data(str(tmp_path / pattern))
        assert len(labels_of(data)) == wanted
        assert open_data(data.where).fingerprint == data.fingerprint
    for pattern, message in {
        "p-{000..009}.tar": r"6 of 10 shards are missing in .*'p-004.tar', .* and 3 more",
        "r-*.tar": "no shard 'r-.*it has 'p-000.tar', 'p-001.tar', 'p-002.tar' and 2 more",
        "p-{0..9999999}.tar": "count up, to at most 100,000 shards",
        "p-{3..1}.tar": "count up",
        "p-{0..99999}{0..99999}{0..99999}.tar": "use at most 100,000",
        "p-" + "{a,b}" * 50 + ".tar": "use at most 100,000",
        "gone.tar": "1 of 1 shard is missing",
    }.items():
        with pytest.raises(ValueError, match=message):
            open_data(str(tmp_path / pattern))


def test_a_pattern_may_be_longer_than_a_file_name(tmp_path, packed):
    pattern = packed / f"[{250 * 't'}]rain-*.tar"
    assert len(pattern.name) > 255
    data = open_data(str(pattern))
    assert open_unlabelled(str(pattern)).images.names
    *_, last = pack(data, tmp_path / "out")
    assert last.images == len(data.train) + len(data.val) + len(data.test)


def test_shards_without_images_are_refused_in_one_line(tmp_path, packed):
    index = json.loads((packed / "index.json").read_text())
    tarfile.open(tmp_path / "train-000000.tar", "w").close()
    size = (tmp_path / "train-000000.tar").stat().st_size
    index["shards"] = {"train-000000.tar": {"bytes": size, "samples": []}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"^'.*' has no images: add some$"):
        open_unlabelled(str(tmp_path))


def test_members_of_shards_that_are_not_used_are_counted(tmp_path):
    for shard in range(2):
        more = {"mp4": b"", "heic": b"", "txt": b"a caption"}
        tar(tmp_path / f"{shard}.tar", *samples(4, 10 * shard, **more))
    ignored = open_data(str(tmp_path)).ignored
    counts = {reason.split(" (")[0]: count for reason, count in ignored.items()}
    assert counts == {".mp4": 8, ".heic": 8, ".txt": 8}


def test_a_file_with_more_bytes_than_any_image_is_left_out(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(6):
            (tmp_path / "data" / name / f"{number}.png").write_bytes(picture(number))
    (tmp_path / "data/a/huge.jpg").write_bytes(bytes(10_001))
    monkeypatch.setattr(decoding, "MAX_FILE_BYTES", 10_000)
    done = [*pack(open_data(str(tmp_path / "data")), tmp_path / "packed")][-1]
    assert "more than 10,000 bytes" in done.skipped["a/huge.jpg"]
    assert done.images == 12


def test_data_without_a_test_are_packed_without_one(tmp_path):
    for number, name in enumerate(
        f"{split}/{label}/{i}.png" for split in ("train", "val") for label in "ab" for i in range(4)
    ):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(picture(number))
    data = open_data(str(tmp_path / "data"))
    list(pack(data, tmp_path / "packed"))
    packed = open_data(str(tmp_path / "packed"))
    assert packed.fingerprint == data.fingerprint
    assert (len(packed.train), len(packed.val), len(packed.test)) == (8, 8, 0)


def test_names_of_shards_tell_the_parts(tmp_path):
    tar(tmp_path / "set-train-0.tar", *samples(10))
    tar(tmp_path / "set-validation-0.tar", *samples(4, 20))
    data = open_data(str(tmp_path))
    assert (len(data.train), len(data.val), len(data.test)) == (10, 4, 0)
    tar(tmp_path / "set-test-0.tar", *samples(3, 30))
    data = open_data(str(tmp_path))
    assert (len(data.train), len(data.val), len(data.test)) == (10, 4, 3)
    with pytest.raises(ValueError, match="'set-validation-0.tar' is the validation split already"):
        open_data(str(tmp_path), SplitRule(val=0.2))
    assert len(labels_of(open_data(str(tmp_path / "*-train-*.tar")))) == 10
    with pytest.raises(ValueError, match="is for training: add shards with 'train'"):
        open_data(str(tmp_path / "set-{validation,test}-0.tar"))
    tar(tmp_path / "more.tar", *samples(3, 40))
    with pytest.raises(ValueError, match="'more.tar' does not say train, val or test"):
        open_data(str(tmp_path))


def test_packed_shards_without_their_index_still_have_their_parts(tmp_path, photos):
    made(photos, tmp_path / "out")
    with_index = open_data(str(tmp_path / "out"))
    (tmp_path / "out" / "index.json").unlink()
    without = open_data(str(tmp_path / "out"))
    assert without.classes == ("0", "1")
    for part in PARTS:
        assert getattr(without, part).targets == getattr(with_index, part).targets
        assert (
            getattr(without, part).picture(0).tobytes()
            == getattr(with_index, part).picture(0).tobytes()
        )


# ---- what is wrong


def refusal(where: Path) -> str:
    with pytest.raises(ValueError, match=".") as caught:
        open_data(str(where))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_shard_cut_short_is_refused_before_anything_is_read(tmp_path, packed):
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = tmp_path / "test-000000.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1000])
    assert (
        f"test-000000.tar' is cut short, 1,000 of {len(whole):,} bytes are missing: copy"
        in refusal(tmp_path)
    )
    shard.write_bytes(whole + b"x")
    assert f"{len(whole) + 1:,} bytes, {len(whole):,} in its index" in refusal(tmp_path)
    shard.unlink()
    assert "1 of " in refusal(tmp_path)
    assert "missing" in refusal(tmp_path)
    shard.write_bytes(whole)
    (tmp_path / "test-000009.tar").write_bytes(whole)
    assert "'test-000009.tar' not in" in refusal(tmp_path)


def test_a_shard_without_an_index_cut_anywhere_is_refused(tmp_path):
    path = tar(tmp_path / "a.tar", *samples(6))
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for length in range(0, end + 1, 64):
        path.write_bytes(whole[:length])
        assert "a.tar' is cut short, " in refusal(tmp_path), length


def test_a_shard_that_changes_after_opening_costs_images_and_no_more(tmp_path):
    path = tar(tmp_path / "a.tar", *samples(9))
    data = open_data(str(tmp_path))
    path.write_bytes(path.read_bytes()[:512])
    with pytest.raises(UnreadableImage, match="a.tar is cut short"):
        data.train.picture(0)
    again = pickle.loads(pickle.dumps(data.train))
    path.unlink()
    with pytest.raises(UnreadableImage, match="a.tar: No such file"):
        again.picture(0)


def test_an_index_that_is_damaged_or_foreign_is_refused_in_one_line(tmp_path, packed):
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = tmp_path / "index.json"
    good = json.loads(index.read_text())
    shard = "test-000000.tar"

    def first(*sample) -> dict:
        rest = good["shards"][shard]["samples"][1:]
        changed = {**good["shards"][shard], "samples": [list(sample), *rest]}
        return {**good, "shards": {**good["shards"], shard: changed}}

    name = good["shards"]["train-000000.tar"]["samples"][0][0]
    bad = [
        {},
        [],
        {"wids_version": 1, "shardlist": []},
        {**good, "classes": ["a", "a"]},
        {**good, "classes": [1, 2]},
        {**good, "channels": 2},
        {**good, "shards": []},
        {**good, "shards": {"../x.tar": {"bytes": 9, "samples": []}}},
        {**good, "shards": {"/etc/passwd": {"bytes": 9, "samples": []}}},
        first("new", 0, 10**12, 0),
        first("new", -1, 10, 0),
        first("new", 1.5, 10, 0),
        first("new", 512, 10, 2),
        first("new", 512, 10, True),
        first(name, 512, 10, 0),
        first("new", 512),
        first(None, 512, 10, 0),
    ]
    for text in [index.read_text()[:-9], "", "\xff", "[" * 100_000, *map(json.dumps, bad)]:
        index.write_text(text)
        assert "index.json' is not what `fullstride data pack` writes" in refusal(tmp_path), text[
            :60
        ]
    index.write_text(json.dumps(good))
    open_data(str(tmp_path))


def test_a_hostile_tar_leads_nowhere_outside_of_itself(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(picture(255))
    folder = tmp_path / "shards"
    path = tar(
        folder / "a.tar",
        *samples(4),
        (str(secret), picture(1)),
        (str(secret.with_suffix(".cls")), b"2"),
        ("../secret.png", picture(3)),
        ("../secret.cls", b"10"),
    )
    with tarfile.open(path, "a") as opened:
        for kind in (
            tarfile.SYMTYPE,
            tarfile.LNKTYPE,
            tarfile.CHRTYPE,
            tarfile.FIFOTYPE,
            tarfile.DIRTYPE,
        ):
            header = tarfile.TarInfo(f"link{kind.decode()}.png")
            header.type, header.linkname = kind, str(secret)
            opened.addfile(header)
            label = tarfile.TarInfo(f"link{kind.decode()}.cls")
            label.size = 1
            opened.addfile(label, io.BytesIO(b"2"))
    before = {each: each.stat().st_mtime_ns for each in tmp_path.rglob("*")}
    data = open_data(str(folder))
    names = {*(f"a.tar/{i:06}.png" for i in range(4)), f"a.tar/{secret}", "a.tar/../secret.png"}
    assert set(labels_of(data)) == names
    for part in (data.train, data.val, data.test):
        assert all(
            part.picture(index).getpixel((0, 0)) != (255, 0, 0) for index in range(len(part))
        )
    assert {each: each.stat().st_mtime_ns for each in tmp_path.rglob("*")} == before


def test_sizes_that_a_tar_cannot_have_are_refused(tmp_path):
    def block(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
        header = tarfile.TarInfo(name)
        header.size, header.type = size, kind
        return header.tobuf(tarfile.GNU_FORMAT)

    def pax(record: bytes) -> bytes:
        return block("x", len(record), tarfile.XHDTYPE) + record.ljust(512, b"\0")

    good = tar(tmp_path / "good" / "a.tar", *samples(4)).read_bytes()
    path = tmp_path / "bad" / "a.tar"
    path.parent.mkdir()
    for data, message in [
        (block("x.png", 2**62) + good, "cut short, 'x.png' ends"),
        (block("x.png", -(2**40)) + good, "a size below 0"),
        (block("x.png", -512) + good, "a size below 0"),
        (block("x", 2**40, tarfile.GNUTYPE_LONGNAME) + good, "cut short"),
        (
            block("x", 2**21, tarfile.GNUTYPE_LONGNAME) + bytes(2**21) + good,
            "has a name of 2,097,152 bytes",
        ),
        (block("x", 512, tarfile.GNUTYPE_SPARSE) + bytes(512) + good, "with holes"),
        (pax(b"28 size=9999999999999999999\n") + block("x.png", 5) + good, "cut short"),
        (b"no tar, but words" * 99, "damaged at byte 0, or no plain tar"),
        (good[:1024] + b"\1" * 512 + good, "damaged at byte 1,024"),
        (b"\x1f\x8b" + good, "damaged at byte 0"),
    ]:
        path.write_bytes(data)
        assert message in refusal(path.parent)
    for record in (b"0 path=x\n", b"410 size=" + b"9" * 400 + b"\n"):
        path.write_bytes(pax(record) + good)
        assert "a.tar' is " in refusal(path.parent)
    for record in (b"99999999 path=x\n", b"\xff" * 40, b"11 path=\0\n", b"9" * 500):
        path.write_bytes(pax(record) + good)
        if hasattr(tarfile, "_header_length_prefix_re"):  # security releases of Python from 2024 on
            assert "damaged at byte 0" in refusal(path.parent)
        else:
            assert len(labels_of(open_data(str(path.parent)))) >= 3


def test_a_header_with_a_bad_checksum_behind_good_ones_is_refused(tmp_path):
    path = tar(tmp_path / "a.tar", *samples(4))
    data = bytearray(path.read_bytes())
    data[2 * 1024 + 100] ^= 1
    path.write_bytes(data)
    assert "damaged at byte 2,048" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            [("1.png", b""), ("1.txt", b"")],
            "1 of 1 images in .* has no label, the first is '1': add 1.cls",
        ),
        ([*samples(3), ("a/1.jpg", b""), ("a/1.json", b"[1]")], "1 of 4 images"),
        ([("a.png", b""), ("a.cls", b" \n")], "1 of 1 images"),
        ([("a.png", b""), ("a.json", b"[" * 10**5)], "1 of 1 images"),
        ([("a.png", b""), ("a.cls", b"7" * 2**21)], "1 of 1 images"),
        (
            [("a.png", b""), ("a.jpg", b""), ("a.cls", b"1")],
            "has two images for 'a', .png and .jpg",
        ),
        ([("a.png", b""), ("a.cls", b"1"), ("a.png", b"")], "has 'a.png' twice"),
        ([("a.txt", b"words"), ("a.cls", b"1")], "has no images: give shards of .jpg"),
        (
            [("a.png", b""), ("a.cls", b"1"), ("b.png", b""), ("b.cls", b"1")],
            "has one class only, '1'",
        ),
        ([], "has no images"),
    ],
)
def test_shards_that_will_not_do_are_refused_in_one_line(tmp_path, files, message):
    tar(tmp_path / "a.tar", *files)
    with pytest.raises(ValueError, match=message) as caught:
        open_data(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_shards_for_testing_may_lack_classes_and_not_have_new_ones(tmp_path):
    tar(tmp_path / "train.tar", *samples(6))
    tar(tmp_path / "test.tar", *samples(1))
    assert open_data(str(tmp_path)).classes == ("2", "10")
    tar(tmp_path / "test.tar", ("a.png", picture()), ("a.cls", b"3"))
    assert "has the classes '3', which the training images lack" in refusal(tmp_path)


def test_a_folder_of_classes_with_a_stray_tar_is_still_a_folder(tmp_path):
    for number, name in enumerate(("a/1.png", "a/2.png", "b/1.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(picture(number))
    tar(tmp_path / "backup.tar", *samples(2))
    assert open_data(str(tmp_path)).classes == ("a", "b")


# ---- the commands


def test_pack_tells_what_it_did_and_training_goes_on_from_its_folder(tmp_path, photos, capsys):
    out = tmp_path / "my shards"
    words = [
        "data",
        "pack",
        str(photos),
        str(out),
        "--long-side",
        "40",
        "--quality",
        "85",
        "--shard-mib",
        "1",
    ]
    assert cli.run(words) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-2] == "122 images in 3 shards"
    assert "MiB of images became" in told[-1]
    assert str(out) in told[-1]
    assert cli.run(words) == 2
    assert f"{str(out)!r} exists: give the name of a new folder" in capsys.readouterr().err
    short = [
        "--recipe.epochs",
        "1",
        "--recipe.warmup-epochs",
        "0",
        "--recipe.resolution",
        "32",
        "--recipe.batch-size",
        "16",
    ]
    words = [
        "train",
        str(out),
        "--model",
        "genet_tiny",
        "--out",
        str(tmp_path / "run"),
        "--device",
        "cpu",
        *short,
    ]
    assert cli.run(words) == 0
    assert "test top-1" in capsys.readouterr().out
    assert cli.run(["validate", str(tmp_path / "run"), "--device", "cpu"]) == 0


def test_a_run_begun_on_a_folder_is_the_same_run_on_its_shards(photos, packed):
    view = TrainView(Preprocessing(resolution=16))
    batches = [
        next(
            Batches(open_data(str(where)).train, view, LoaderOptions(batch=8, shuffle=True)).epoch(
                0
            )
        )
        for where in (photos, packed)
    ]
    assert torch.equal(batches[0].x, batches[1].x)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--long-side", "0"], "long side 0: use 1 pixel or more"),
        (["--quality", "101"], "quality 101: use 1 to 100"),
        (["--shard-mib", "0"], "shards of 0 MiB: use 1 or more"),
    ],
)
def test_impossible_wishes_are_refused_before_anything_is_written(
    tmp_path, photos, capsys, flags, message
):
    assert cli.run(["data", "pack", str(photos), str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert cli.run(["data", "pack", str(photos), str(photos / "out")]) == 2
    assert "would be inside of the data" in capsys.readouterr().err
