"""Does every file become the right picture in the right part, or an error that tells what to do?"""

import contextlib
import json
import os
import pickle
import struct
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image

from fullstride import cli
from fullstride.data.dataset import UnreadableImage, decode, open_data
from fullstride.data.readers import decode as pixel_modes
from fullstride.data.readers.decode import OversizedImage, plain_image
from fullstride.data.readers.splits import SplitRule
from fullstride.deploy.predict import find_images

# by EXIF orientation, from the upright array to the stored one, after the standard's "row 0 is ..."
CORNERS_OF = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[:, ::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a[::-1].swapaxes(0, 1),
}


@cache
def photo() -> np.ndarray:
    return load_sample_image("china.jpg")[100:180, 200:320].copy()


def distance(picture: Image.Image, pixels: np.ndarray) -> float:
    """Mean difference in levels of 0..255."""
    assert picture.size == (pixels.shape[1], pixels.shape[0])
    return float(np.abs(np.asarray(picture).astype(float) - pixels).mean())


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises width x height pixels and holds next to none."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size)
        + chunk(b"IDAT", zlib.compress(b"\0" * 10))
        + chunk(b"IEND", b"")
    )


def write(root: Path, *names: str) -> Path:
    """A small picture at each name below `root`."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4 + number % 3, 5), (number % 256, 0, 0)).save(root / name, "PNG")
    return root


def many(*classes: str, each: int) -> list[str]:
    return [f"{name}/{i:03}.png" for name in classes for i in range(each)]


# ---- files


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_each_of_the_eight_exif_orientations_comes_out_upright(tmp_path, suffix):
    for value, stored in CORNERS_OF.items():
        exif = Image.Exif()
        exif[0x0112] = value
        path = tmp_path / f"{value}.{suffix}"
        Image.fromarray(np.ascontiguousarray(stored(photo()))).save(path, exif=exif, quality=95)
        picture = decode(path, 3)
        assert distance(picture, photo()) < (6 if suffix in ("jpg", "webp") else 1e-9), value
        assert not picture.info


def test_gray_of_16_bits_is_scaled_and_not_clipped(tmp_path):
    values = np.linspace(0, 65535, 80 * 60).reshape(60, 80).astype(np.uint16)
    wanted = np.floor(values / 257 + 0.5)
    for suffix in ("png", "tif"):
        Image.fromarray(values).save(tmp_path / f"gray.{suffix}")
        assert distance(decode(tmp_path / f"gray.{suffix}", 1), wanted) == 0
        assert (
            distance(decode(tmp_path / f"gray.{suffix}", 3), wanted[:, :, None].repeat(3, 2)) == 0
        )
    Image.fromarray(values.astype(np.int32)).save(tmp_path / "integers.tif")
    assert distance(decode(tmp_path / "integers.tif", 1), wanted) == 0


def test_floats_and_wide_integers_span_black_to_white(tmp_path):
    ramp = np.linspace(0, 255, 256).reshape(16, 16)
    for values in (ramp.astype(np.float32) / 1000 - 0.1, (ramp * 8_000_000).astype(np.int32) - 5):
        Image.fromarray(values).save(tmp_path / "wide.tif")
        assert distance(decode(tmp_path / "wide.tif", 1), ramp) < 1e-9
    holed = ramp.astype(np.float32)
    holed[0, 1], holed[0, 2] = np.nan, np.inf
    Image.fromarray(holed).save(tmp_path / "holed.tif")
    assert np.asarray(decode(tmp_path / "holed.tif", 1))[0, :4].tolist() == [0, 0, 0, 3]
    Image.fromarray(np.full((3, 3), 7, np.float32)).save(tmp_path / "flat.tif")
    assert decode(tmp_path / "flat.tif", 1).getextrema() == (0, 0)
    Image.fromarray(np.full((3, 3), np.nan, np.float32)).save(tmp_path / "none.tif")
    with pytest.raises(UnreadableImage, match="no pixel has a finite value"):
        decode(tmp_path / "none.tif", 1)


def test_a_cmyk_jpeg_keeps_its_colours(tmp_path):
    Image.fromarray(photo()).convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    assert distance(decode(tmp_path / "cmyk.jpg", 3), photo()) < 6
    assert np.allclose(
        np.asarray(decode(tmp_path / "cmyk.jpg", 3)).mean((0, 1)), photo().mean((0, 1)), atol=2
    )


def test_a_ycck_jpeg_keeps_its_colours(tmp_path):
    ink = Image.fromarray(255 - photo())  # cyan, magenta and yellow
    y, cb, cr = (255 - np.asarray(band) for band in ink.convert("YCbCr").split())
    black = np.full_like(y, 64)
    path = tmp_path / "ycck.jpg"
    Image.merge("CMYK", [Image.fromarray(band) for band in (y, cb, cr, black)]).save(
        path, quality=95
    )
    data = bytearray(path.read_bytes())
    data[data.index(b"Adobe") + 11] = 2  # of Adobe's marker: the transform, 2 for YCCK
    path.write_bytes(data)
    assert distance(decode(path, 3), photo() * ((255 - 64) / 255)) < 6


def test_what_is_transparent_lies_over_white(tmp_path):
    alpha = np.full(photo().shape[:2], 255, np.uint8)
    alpha[:40], alpha[40:60] = 0, 128
    share = alpha[:, :, None] / 255
    over_white = photo() * share + 255 * (1 - share)
    rgba = Image.fromarray(np.dstack([photo(), alpha]))
    for name in ("rgba.png", "rgba.tif"):
        rgba.save(tmp_path / name)
        assert distance(decode(tmp_path / name, 3), over_white) < 1
    rgba.convert("LA").save(tmp_path / "la.png")
    gray = np.asarray(Image.fromarray(photo()).convert("L"))
    assert (
        distance(decode(tmp_path / "la.png", 1), gray * share[:, :, 0] + 255 * (1 - share[:, :, 0]))
        < 1
    )


def test_palettes_one_bit_and_colour_keys_become_plain_pictures(tmp_path):
    indexed = Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4) % 3).convert("P")
    indexed.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]])
    shown = colours[np.arange(16).reshape(4, 4) % 3]
    indexed.save(tmp_path / "palette.png")
    assert distance(decode(tmp_path / "palette.png", 3), shown) == 0
    colours[1] = 255
    for name in ("key.png", "key.gif"):
        indexed.save(tmp_path / name, transparency=1)
        assert distance(decode(tmp_path / name, 3), colours[np.arange(16).reshape(4, 4) % 3]) == 0
    half = bytes([255, 255, 51])  # blue at a fifth
    indexed.save(tmp_path / "alpha.png", transparency=half)
    assert decode(tmp_path / "alpha.png", 3).getpixel((2, 0)) == (204, 204, 255)
    Image.fromarray(photo()[:, :, 0] > 99).save(tmp_path / "bits.png")
    assert distance(decode(tmp_path / "bits.png", 1), (photo()[:, :, 0] > 99) * 255.0) == 0
    Image.fromarray(photo()[:, :, 0]).save(
        tmp_path / "gray_key.png", transparency=int(photo()[0, 0, 0])
    )
    assert decode(tmp_path / "gray_key.png", 3).getpixel((0, 0)) == (255, 255, 255)


def test_of_an_animation_the_first_frame_is_taken(tmp_path):
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    for name in ("moving.gif", "moving.png", "moving.webp", "pages.tif", "pair.mpo"):
        red.save(tmp_path / name, save_all=True, append_images=[blue])
        assert distance(decode(tmp_path / name, 3), np.full((8, 8, 3), (255, 0, 0))) < 3


def test_every_kind_of_file_gives_gray_or_colour_as_asked(tmp_path):
    for mode in (
        "1",
        "L",
        "LA",
        "P",
        "PA",
        "RGB",
        "RGBA",
        "RGBX",
        "CMYK",
        "YCbCr",
        "I",
        "I;16",
        "F",
    ):
        source = (
            Image.fromarray(photo()).convert(mode)
            if mode != "I;16"
            else Image.new("I;16", (120, 80), 9999)
        )
        suffix = "tif" if mode != "PA" else "png"
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.{suffix}"
        (source if mode != "PA" else source.convert("RGBA")).save(path)
        if mode == "YCbCr" and int(PIL.__version__.partition(".")[0]) < 13:
            with pytest.raises(UnreadableImage, match="truncated"):
                decode(path, 3)
            continue
        assert [decode(path, channels).mode for channels in (1, 3)] == ["L", "RGB"]
        assert decode(path.read_bytes(), 3).size == (120, 80)


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "bmp", "webp", "tif"])
def test_a_file_cut_short_is_refused_in_one_line(tmp_path, suffix):
    path = tmp_path / f"cut.{suffix}"
    Image.fromarray(photo()).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(UnreadableImage) as caught:
        decode(path, 3)
    assert "\n" not in str(caught.value)
    assert caught.value.reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"no picture, but words", "not a JPEG, PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a JPEG, PNG"),
        (png_header(60_000, 60_000), "89 megapixels"),
        (png_header(12_000, 10_000), "120.0 megapixels, and 89"),
        (png_header(100, 100), "truncated"),
    ],
)
def test_what_is_no_picture_is_refused_with_the_reason(tmp_path, content, reason):
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(UnreadableImage, match=reason):
        decode(tmp_path / "a.jpg", 3)
    with pytest.raises(UnreadableImage, match=f"'image bytes': .*{reason}"):
        decode(content, 3)


def test_the_limit_of_megapixels_can_be_lower_and_is_read_from_the_header():
    with pytest.raises(OversizedImage, match="1.2 megapixels, and 1 "):
        decode(png_header(1200, 1000), 3, max_megapixels=1)


def test_an_image_is_the_same_if_it_is_converted_in_strips(monkeypatch):
    rng = np.random.default_rng(0)
    pictures = [
        Image.fromarray(rng.integers(0, 256, (23, 17, 4)).astype(np.uint8)),
        Image.fromarray(rng.integers(0, 65536, (23, 17)).astype(np.uint16)),
        Image.fromarray(rng.normal(size=(23, 17)).astype(np.float32)),
    ]
    whole = [[plain_image(picture, channels) for channels in (1, 3)] for picture in pictures]
    monkeypatch.setattr(pixel_modes, "STRIP_PIXELS", 40)
    for picture, (gray, colour) in zip(pictures, whole, strict=True):
        assert plain_image(picture, 1).tobytes() == gray.tobytes()
        assert plain_image(picture, 3).tobytes() == colour.tobytes()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_or_a_device_is_no_picture(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", Path("/dev/zero"), tmp_path):
        with pytest.raises(UnreadableImage, match="not a file"):
            decode(path, 3)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(UnreadableImage, match=r"cannot read '.*gone.jpg': No such file"):
        decode(tmp_path / "gone.jpg", 3)


def test_nonsense_in_the_exif_block_does_not_cost_the_picture(tmp_path):
    entry = struct.pack("<HHII", 0x0112, 3, 0xFFFFFFFF, 0xFFFFFFFF)
    for junk in (
        b"",
        b"II",
        bytes(range(200, 240)),
        b"II*\0\x08\0\0\0\xff\xff" + entry,
        b"II*\0\xff\xff\xff\xff",
    ):
        Image.fromarray(photo()).save(tmp_path / "odd.jpg", exif=b"Exif\0\0" + junk, quality=95)
        assert distance(decode(tmp_path / "odd.jpg", 3), photo()) < 6


def test_a_damaged_file_is_a_picture_or_an_unreadable_image_and_nothing_else(tmp_path):
    rng = np.random.default_rng(0)
    for suffix in ("jpg", "png", "gif", "bmp", "webp", "tif"):
        path = tmp_path / f"whole.{suffix}"
        Image.fromarray(photo()[:24, :24]).save(path)
        whole = np.frombuffer(path.read_bytes(), np.uint8)
        for _ in range(60):
            damaged = whole.copy()
            damaged[rng.integers(min(len(whole), 400), size=4)] = rng.integers(256, size=4)
            with contextlib.suppress(UnreadableImage):
                assert decode(damaged.tobytes(), 3).mode == "RGB"


def test_an_unreadable_image_pickles():
    error = pickle.loads(pickle.dumps(UnreadableImage("a/b.jpg", "it is empty")))
    assert (error.name, error.reason, str(error)) == (
        "a/b.jpg",
        "it is empty",
        "cannot read 'a/b.jpg': it is empty",
    )


# ---- digits


def test_the_digits_are_those_of_scikit_learn():
    theirs: Any = load_digits()
    data = open_data("digits")
    parts = (data.train, data.val, data.test)
    assert [len(part) for part in parts] == [1037, 260, 500]
    assert [label for part in parts for label in part.targets] == theirs.target.tolist()
    ours = np.stack([np.asarray(part.picture(i)) for part in parts for i in range(len(part))])
    assert np.abs(ours - theirs.images * 255 / 16).max() <= 0.5
    assert data.train.picture(0).mode == "L"
    assert data.classes == tuple("0123456789")
    assert (data.channels, data.mirror, data.train.names[1]) == (1, False, "digits/0001")


def test_another_share_of_the_digits_can_be_held_out():
    data = open_data("digits", SplitRule(val=0.5))
    assert [len(part) for part in (data.train, data.val, data.test)] == [649, 648, 500]
    assert data.fingerprint != open_data("digits").fingerprint


# ---- folders


def test_a_folder_is_cut_into_disjoint_parts_that_cover_it(tmp_path):
    names = many("cat", "dog", each=200)
    data = open_data(str(write(tmp_path / "pets", *names)))
    parts = (data.train, data.val, data.test)
    assert sorted(name for part in parts for name in part.names) == sorted(names)
    assert all(
        data.classes[label] == name[:3]
        for part in parts
        for name, label in zip(part.names, part.targets, strict=True)
    )
    assert 20 <= len(data.test) <= 60
    assert 18 <= len(data.val) <= 54
    assert (data.name, data.classes, data.channels, data.mirror) == (
        "pets",
        ("cat", "dog"),
        3,
        True,
    )
    assert data.train.picture(0).mode == "RGB"


def test_an_image_stays_in_its_part_when_others_come_and_go(tmp_path):
    few, more = many("cat", "dog", each=60), many("ant", "cat", "dog", each=90)
    small, large = (
        open_data(str(write(tmp_path / str(len(names)), *names))) for names in (few, more)
    )
    for part in ("train", "val", "test"):
        assert set(getattr(small, part).names) == set(getattr(large, part).names) & set(few)


@pytest.mark.parametrize("each", [2, 3, 5])
def test_even_of_a_handful_no_part_is_empty(tmp_path, each):
    data = open_data(str(write(tmp_path, *many("a", "b", each=each))))
    assert min(len(data.train), len(data.val), len(data.test)) >= 1
    assert len(data.train) + len(data.val) + len(data.test) == 2 * each


def test_the_val_share_can_be_chosen(tmp_path):
    write(tmp_path, *many("a", "b", each=100))
    assert 55 <= len(open_data(str(tmp_path), SplitRule(val=0.4)).val) <= 95
    with pytest.raises(ValueError, match="val 1.5: use a share"):
        open_data(str(tmp_path), SplitRule(val=1.5))


def test_a_test_beside_train_is_the_test_and_the_val_is_taken(tmp_path):
    data = open_data(str(write(tmp_path, *many("train/a", "train/b", each=10), "Test/b/x.png")))
    assert data.test.names == ("Test/b/x.png",)
    assert data.test.targets == (1,)
    assert len(data.train) + len(data.val) == 20
    assert data.missing_classes("test") == ("a",)
    assert data.missing_classes("val") == ()


def test_classes_with_the_names_of_splits_are_noted(tmp_path):
    write(tmp_path / "sets", *many("cat", "train_set/cat", "test_set/cat", each=5))
    (note,) = open_data(str(tmp_path / "sets"), SplitRule(keep_duplicates=True)).notes
    assert note.startswith("'test_set', 'train_set' are read as classes: ")
    write(tmp_path / "trains", *many("freight_train", "passenger_train", each=5))
    assert not open_data(str(tmp_path / "trains"), SplitRule(keep_duplicates=True)).notes


@pytest.mark.parametrize("name", ["val", "valid", "Validation"])
def test_networks_are_chosen_by_val_and_no_test_is_cut_that_nobody_asked_for(tmp_path, name):
    root = str(write(tmp_path, *many("train/a", "train/b", each=10), f"{name}/b/x.png"))
    data = open_data(root)
    assert (len(data.train), data.val.names, len(data.test)) == (20, (f"{name}/b/x.png",), 0)
    with pytest.raises(ValueError, match=f"'{name}' is the validation split already"):
        open_data(root, SplitRule(val=0.1))


@pytest.mark.parametrize("each", [5, 8, 30, 200])
def test_every_class_is_in_every_split_and_has_most_of_its_images_for_training(tmp_path, each):
    data = open_data(str(write(tmp_path, *many("a", "b", "c", "d", each=each))))
    for split in ("train", "val", "test"):
        assert data.missing_classes(split) == (), split
    for label in range(4):
        assert data.train.targets.count(label) >= 0.6 * each
    assert len(data.test) <= 4 * max(1, 0.2 * each)


def test_a_small_class_stays_in_training_whatever_the_others_have(tmp_path):
    names = [*many("a", each=40), *many("b", each=3), *many("c", each=2), *many("d", each=1)]
    data = open_data(str(write(tmp_path, *names)))
    assert data.missing_classes("train") == ()
    assert len(data.train) + len(data.val) + len(data.test) == 46


def test_val_is_the_val_where_there_is_a_test_too(tmp_path):
    write(tmp_path, *many("train/a", "train/b", each=5), "val/a/v.png", "test/b/t.png")
    data = open_data(str(tmp_path))
    assert (len(data.train), data.val.names, data.test.names) == (
        10,
        ("val/a/v.png",),
        ("test/b/t.png",),
    )
    with pytest.raises(ValueError, match="val' is the validation split already"):
        open_data(str(tmp_path), SplitRule(val=0.1))


def test_odd_names_links_and_nested_folders_are_read_and_hidden_ones_are_not(tmp_path):
    odd = ["-rf.png", "ü ñ 猫.PNG", "a b.jpeg", "new\nline.gif", "deep/er/x.webp", "#%?.tif"]
    root = write(
        tmp_path / "root",
        *(f"a/{name}" for name in odd),
        "b/1.png",
        ".hidden/x.png",
        "a/._x.png",
        "a/.t/x.png",
    )
    (root / "a" / "notes.txt").write_text("no picture")
    write(tmp_path, "elsewhere/2.png")
    (root / "b" / "linked.png").symlink_to(tmp_path / "elsewhere" / "2.png")
    (root / "c").symlink_to(tmp_path / "elsewhere")
    (root / "b" / "loop").symlink_to(root)
    (root / "b" / "self.png").symlink_to(root / "b" / "self.png")
    if sys.platform == "linux":
        write(root, os.fsdecode(b"b/\xff.png"))
    data = open_data(str(root))
    names = {*data.train.names, *data.val.names, *data.test.names}
    assert {f"a/{name}" for name in odd} | {
        "b/1.png",
        "b/linked.png",
        "b/self.png",
        "c/2.png",
    } == names - {"b/\udcff.png"}
    for part in (data.train, data.val, data.test):
        for index, name in enumerate(part.names):
            if name == "b/self.png":
                with pytest.raises(
                    UnreadableImage, match=r"cannot read 'b/self.png': it is a loop of links"
                ):
                    part.picture(index)
            else:
                assert part.picture(index).height == 5


def test_every_file_that_is_not_used_is_counted_by_its_reason(tmp_path):
    root = write(tmp_path / "data", *many("train/a", "train/b", each=6), "test/a/1.png")
    write(root, "sheet.jpg", "other/2.png", ".hidden/3.png", "train/a/.DS_Store", "train/a.png")
    write(root, *(f"train/a/{i}.HEIC" for i in range(5)), "train/b/1.mp4", "test/a/notes.txt")
    (root / "train/a/more").symlink_to(root / "train/b")
    (root / "back").symlink_to(root)
    if hasattr(os, "mkfifo"):
        os.mkfifo(root / "train/a/pipe.png")
    data = open_data(str(root))
    assert len(data.train) + len(data.val) == 18
    counts = {reason.split(" (")[0]: count for reason, count in data.ignored.items()}
    assert {"neither file nor folder": 1, **counts} == {
        "neither file nor folder": 1,
        "images outside of the class folders": 3,
        "hidden": 2,
        ".heic": 5,
        ".mp4": 1,
        ".txt": 1,
    }
    assert "pillow-heif" in next(iter(data.ignored))  # the most frequent reason
    plain = open_data(str(write(tmp_path / "plain", *many("a", "b", each=5))))
    assert plain.ignored == {}


def test_a_class_of_unknown_pictures_is_refused_with_what_would_read_them(tmp_path):
    write(tmp_path, *many("a", "b", each=3), *(f"c/{i}.heic" for i in range(4)))
    with pytest.raises(ValueError, match=r"no images in 'c' .*, but 4 \.heic .*pillow-heif"):
        open_data(str(tmp_path))


def test_commands_begin_with_what_they_do_not_use(tmp_path, capsys):
    root = write(tmp_path / "data", *many("a", "b", each=5), "a/1.heic", "a/2.heic", "b/._1.png")
    assert cli.run(["data", "pack", str(root), str(tmp_path / "shards")]) == 0
    assert "not used: 2 .heic (" in capsys.readouterr().err
    paths, ignored = find_images([str(root), str(root / "a/1.heic")])
    assert [path.name for path in paths] == [f"{i:03}.png" for i in range(5)] * 2 + ["1.heic"]
    assert sorted(ignored.values()) == [1, 2]
    (root / "only").mkdir()
    (root / "only/1.heic").touch()
    with pytest.raises(ValueError, match="no images .*, but 1 .heic"):
        find_images([str(root / "only")])


def test_the_fingerprint_sees_names_labels_and_sizes(tmp_path):
    root = write(tmp_path, *many("a", "b", each=5))
    first = open_data(str(root)).fingerprint
    assert open_data(str(root)).fingerprint == first
    assert len(first) == 16
    with (root / "a/000.png").open("ab") as file:
        file.write(b"x")
    second = open_data(str(root)).fingerprint
    (root / "a/001.png").rename(root / "b/001a.png")
    assert len({first, second, open_data(str(root)).fingerprint}) == 3


def test_the_cut_is_the_same_in_every_process(tmp_path):
    root = write(tmp_path, *many("a", "b", each=30))
    code = "import json; from fullstride.data.dataset import *; "
    code += f"print(json.dumps(open_data({str(root)!r}).test.names))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert tuple(json.loads(done.stdout)) == open_data(str(root)).test.names


@pytest.mark.parametrize(
    ("files", "where", "message"),
    [
        (["pets/a/1.png"], "pest", r"no folder '.*pest': did you mean '.*pets'\?"),
        (
            [],
            "zzzz",
            "no folder '.*zzzz': give a folder with one subfolder of images per class, 'digits'",
        ),
        (["pets.zip"], "pets.zip", "is a file: give a folder"),
        (["pets.zip"], "pets.zip/a", "no folder '.*pets.zip/a': give a folder"),
        (
            ["1.png", "2.jpg"],
            "",
            "has images but no class folders: put the images of each class in a subfolder",
        ),
        ([".hidden/1.png"], "", "has no class folders: put"),
        (["cat/1.png", "cat/2.png"], "", "has one class only, 'cat': add a second class folder"),
        (
            ["train/a/1.png", "train/b/1.png"],
            "",
            "one class only, 'train': add .*, or give '.*train'",
        ),
        (
            ["a/1.png", "b/1.txt", "c/1.png"],
            "",
            "no images in 'b' of .*: add some .*png.* or remove it",
        ),
        (["a/1.png", "b/1.png"], "", "too few images"),
        (
            ["train/a/1.png", "train/b/1.png", "val/a/1.png", "val/z/1.png"],
            "",
            "val' has 'z', which the training images",
        ),
        (["train/a/1.png", "train/b/1.png", "test/1.png"], "", "test' has no class folders: put"),
        (["val/a/1.png", "Test/a/1.png"], "", "has 'val', 'Test' and no train: put the images"),
        (["a/1.png", "b/1.png", "test/a/1.png"], "", "has 'test' and no train"),
        (["train/1.png", "test/2.png"], "", "train' has images but no class folders"),
        (
            ["train/a/1.png", "val/a/1.png", "valid/a/1.png"],
            "",
            "has 'val', 'valid' for one split: keep one",
        ),
    ],
)
def test_a_folder_that_will_not_do_is_refused_in_one_line(tmp_path, files, where, message):
    write(tmp_path, *files)
    with pytest.raises(ValueError, match=message) as caught:
        open_data(str(tmp_path / where))
    assert "\n" not in str(caught.value)


def test_a_slip_in_digits_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no folder 'digit': did you mean 'digits'\?"):
        open_data("digit")
    with pytest.raises(ValueError, match="no folder named"):
        open_data("")


def test_a_folder_that_may_not_be_listed_is_told_by_name(tmp_path, monkeypatch):
    write(tmp_path, *many("a", "b", each=3))
    scandir = os.scandir

    def guarded(path):
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(
        ValueError, match=r"cannot list '.*b': Permission denied; check its permissions"
    ):
        open_data(str(tmp_path))
