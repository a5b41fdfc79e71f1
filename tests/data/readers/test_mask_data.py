"""Pictures with a class or a depth for each pixel are read from folders of several layouts."""

import io
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pixels import write_pictures

from fullstride.data.readers.decode import UnreadableImage
from fullstride.data.readers.masks import VOC_CLASSES
from fullstride.data.readers.splits import SplitRule
from fullstride.data.targets import open_depths, open_masks
from fullstride.examples.files import write_scenes
from fullstride.tasks.depth import Depth
from fullstride.tasks.segment import Segment

COUNTS = {"train": 3, "val": 2, "test": 1}


def save(path: Path, values, palette=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.array(values))
    if palette:
        image.putpalette(np.random.default_rng(0).integers(0, 256, 768).astype(np.uint8).tobytes())
    image.save(path)


def picture(path: Path, seed=0):
    save(path, np.random.default_rng(seed).integers(0, 256, (4, 6, 3)).astype(np.uint8))


def mask(value=0):
    values = np.zeros((4, 6), np.uint8)
    values[1:3, 2:4] = value
    return values


def sizes(data):
    return {name: len(getattr(data, name)) for name in ("train", "val", "test")}


@pytest.mark.parametrize(
    ("pictures", "masks"),
    [
        ("images/{}", "masks/{}"),
        ("{}/images", "{}/masks"),
        ("rgb/{}", "labels/{}"),
        ("{}", "masks/{}"),
        ("images/{}", "annotations/{}"),
    ],
)
def test_splits_of_all_layouts_are_the_datas_own(tmp_path, pictures, masks):
    for number, (split, count) in enumerate(COUNTS.items()):
        for index in range(count):
            place = f"{index}/{index}" if index else "0"  # folders below are as good
            picture(tmp_path / pictures.format(split) / f"{place}.jpg", 10 * number + index)
            save(tmp_path / masks.format(split) / f"{place}.png", mask(index))
    data = open_masks(str(tmp_path))
    assert sizes(data) == {"train": 3, "val": 2, "test": 1}
    assert data.classes == ("0", "1", "2")
    for index, target in enumerate(data.train.targets):
        np.testing.assert_array_equal(target.read(), mask(index))
        assert target.name.split(".")[0][-1] == data.train.names[index].split(".")[0][-1]


def test_scenes_are_read_as_masks_and_as_depths(tmp_path):
    write_scenes(tmp_path / "s", {"train": 2, "val": 1, "test": 1}, 64, kind="floor")
    masks, depths = open_masks(str(tmp_path / "s")), open_depths(str(tmp_path / "s"))
    assert masks.classes == ("background", *"0123456789")
    assert depths.classes == ("depth",)
    assert sizes(masks) == sizes(depths) == {"train": 2, "val": 1, "test": 1}
    stored = np.asarray(Image.open(tmp_path / "s" / "depth" / "train" / "00000.png"))
    np.testing.assert_allclose(depths.train.targets[0].read(), stored / 1000, rtol=1e-6)


def test_without_splits_a_hash_of_names_takes_them_and_the_masks_are_in_the_fingerprint(tmp_path):
    for number in range(40):
        picture(tmp_path / "images" / f"{number}.png", number)
        save(tmp_path / "masks" / f"{number}.png", mask(1))
    data = open_masks(str(tmp_path))
    counts = sizes(data)
    assert sum(counts.values()) == 40
    assert min(counts.values()) > 0
    assert open_masks(str(tmp_path)).fingerprint == data.fingerprint
    moved = tmp_path.rename(tmp_path.with_name("elsewhere"))
    assert open_masks(str(moved)).fingerprint == data.fingerprint
    save(
        moved / "masks" / "0.png", np.random.default_rng(0).integers(0, 2, (4, 6)).astype(np.uint8)
    )
    assert open_masks(str(moved)).fingerprint != data.fingerprint
    without = open_masks(str(moved), SplitRule(left_out=[data.train.names[0]]))
    assert len(without.train) == len(data.train) - 1


def test_voc_is_read_by_its_lists_and_its_border_is_ignored(tmp_path):
    lists = {"train": ["a", "b"], "val": ["c"], "test": ["d", "unreleased"]}
    (tmp_path / "ImageSets" / "Segmentation").mkdir(parents=True)
    for number, (split, names) in enumerate(lists.items()):
        text = "".join(f"{name}\n" for name in names)
        (tmp_path / "ImageSets" / "Segmentation" / f"{split}.txt").write_text(text)
        for index, name in enumerate(names):
            picture(tmp_path / "JPEGImages" / f"{name}.jpg", 10 * number + index)
            if name != "unreleased":
                values = mask(20)
                values[0] = 255
                save(tmp_path / "SegmentationClass" / f"{name}.png", values, palette=True)
    data = open_masks(str(tmp_path))
    assert data.classes == VOC_CLASSES
    assert len(VOC_CLASSES) == 21
    assert sizes(data) == {"train": 2, "val": 1, "test": 1}
    read = data.train.targets[0].read()
    assert set(np.unique(read)) == {0, 20, 255}
    (tmp_path / "SegmentationClass" / "b.png").unlink()
    with pytest.raises(ValueError, match=r"train\.txt.*'b'.*SegmentationClass/b\.png"):
        open_masks(str(tmp_path))
    shutil.rmtree(tmp_path / "ImageSets")  # then all masks are for training
    (tmp_path / "JPEGImages" / "a.jpg").rename(tmp_path / "JPEGImages" / "a.JPG")
    assert len(open_masks(str(tmp_path), SplitRule(val=0, test=0)).train) == 3


def test_voc_without_train_txt_trains_on_what_val_txt_leaves_of_trainval_txt(tmp_path):
    lists = tmp_path / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "trainval.txt").write_text("a\nb\nc\nd\nb\n")
    (lists / "val.txt").write_text("c\n")
    for number, name in enumerate("abcd"):
        picture(tmp_path / "JPEGImages" / f"{name}.jpg", number)
        save(tmp_path / "SegmentationClass" / f"{name}.png", mask(1), palette=True)
    data = open_masks(str(tmp_path))
    stems = {split: [Path(name).stem for name in getattr(data, split).names] for split in COUNTS}
    assert stems == {"train": ["a", "b", "d"], "val": ["c"], "test": []}
    (tmp_path / "JPEGImages" / "d.jpg").unlink()
    with pytest.raises(ValueError, match=r"trainval\.txt' names 'd', but there is no .*d\.jpg"):
        open_masks(str(tmp_path))
    shutil.rmtree(tmp_path / "ImageSets")
    with pytest.raises(ValueError, match=r"SegmentationClass/d\.png' names 'd'"):
        open_masks(str(tmp_path))


def test_value_0_of_ade20k_is_ignored_and_its_names_are_distinct(tmp_path):
    for split, words in (("training", "train"), ("validation", "val")):
        picture(tmp_path / "images" / split / f"ADE_{words}_1.jpg", len(split))
        save(tmp_path / "annotations" / split / f"ADE_{words}_1.png", mask(150))
    names = ["wall", "screen, crt", "screen, silver", *(f"thing {k}" for k in range(147))]
    rows = [f"{k}\t0.1\t1\t1\t{name}" for k, name in enumerate(names, 1)]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tStuff", *rows]))
    data = open_masks(str(tmp_path))
    assert data.classes[:3] == ("wall", "screen", "screen 2")
    assert len(data.classes) == 150
    assert sizes(data) == {"train": 1, "val": 1, "test": 0}
    assert set(np.unique(data.train.targets[0].read())) == {149, 255}


def test_values_that_classes_txt_names_ignored_are_no_class(tmp_path):
    save(tmp_path / "masks" / "train" / "0.png", np.array([[0, 1, 2, 255]], np.uint16))
    save(tmp_path / "train" / "0.png", np.zeros((1, 4, 3), np.uint8))
    (tmp_path / "masks" / "classes.txt").write_text("road\nignored\ncar\n")
    data = open_masks(str(tmp_path), SplitRule(val=0, test=0))
    assert data.classes == ("road", "car")
    assert data.train.targets[0].read().tolist() == [[0, 255, 1, 255]]


def test_depths_are_metres_of_millimetres_or_of_arrays_and_0_where_there_are_none(tmp_path):
    for name in ("a", "b"):
        picture(tmp_path / "rgb" / f"{name}.png", ord(name))
    save(tmp_path / "depth" / "a.png", np.full((4, 6), 1234, np.uint16))
    metres = np.full((4, 6), 2.5)
    metres[0, :3] = np.nan, -1, np.inf
    np.save(tmp_path / "depth" / "b.npy", metres)
    data = open_depths(str(tmp_path), SplitRule(val=0, test=0))
    first, second = (target.read() for target in data.train.targets)
    assert first.dtype == second.dtype == np.float32
    assert (first == np.float32(1.234)).all()
    assert second[0].tolist() == [0, 0, 0, 2.5, 2.5, 2.5]


def grey_png(values: list[int], bits: int) -> bytes:
    """A grey PNG of one row of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data).to_bytes(4)
        return len(data).to_bytes(4) + kind + data + check

    packed = int("".join(f"{value:0{bits}b}" for value in values), 2)
    row = b"\0" + packed.to_bytes(len(values) * bits // 8)
    header = len(values).to_bytes(4) + (1).to_bytes(4) + bytes([bits, 0, 0, 0, 0])
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_values_of_a_mask_are_those_of_the_file_in_any_depth_of_bits(tmp_path, bits):
    values = [min(value, 2**bits - 1) for value in (0, 1, 2, 3, 0, 7, 1, 15)]
    for number in range(2):
        picture(tmp_path / "images" / f"{number}.jpg", number)
        (tmp_path / "masks").mkdir(exist_ok=True)
        (tmp_path / "masks" / f"{number}.png").write_bytes(grey_png(values, bits))
    data = open_masks(str(tmp_path), SplitRule(val=0, test=0))
    assert len(data.classes) == max(values) + 1
    assert data.train.targets[0].read().tolist() == [values]


@pytest.mark.parametrize("palette", [False, True])
def test_depths_in_8_bits_are_no_millimetres(tmp_path, palette):
    for name in "ab":
        picture(tmp_path / "rgb" / f"{name}.png", ord(name))
        save(tmp_path / "depth" / f"{name}.png", mask(200), palette)
    data = open_depths(str(tmp_path), SplitRule(val=0, test=0))
    with pytest.raises(UnreadableImage, match="save millimetres in 16 bits"):
        data.train.targets[0].read()
    with pytest.raises(ValueError, match="no training image has a depth .*in 16 bits") as caught:
        Depth().for_data(data)
    assert "\n" not in str(caught.value)


def test_what_is_wrong_with_a_map_is_one_line_that_names_its_file(tmp_path):
    write_pictures(tmp_path, {"train": 5}, (8, 8))
    masks = tmp_path / "masks" / "train"
    save(masks / "000.png", mask(7))
    (masks / "001.png").write_bytes((masks / "001.png").read_bytes()[:60])
    save(masks / "002.png", np.zeros((4, 6, 3), np.uint8))
    data = open_masks(str(tmp_path), SplitRule(val=0, test=0))
    reasons = []
    for target in data.train.targets[:3]:
        with pytest.raises(UnreadableImage) as caught:
            target.read()
        assert caught.value.name == target.name
        assert "\n" not in str(caught.value)
        reasons.append(caught.value.reason)
    assert "7" in reasons[0]
    assert "3 channels" in reasons[2]
    depths = open_depths(str(tmp_path), SplitRule(val=0, test=0))
    objects, archive = io.BytesIO(), io.BytesIO()
    np.save(objects, np.array([{}], object))
    np.savez(archive, np.ones((2, 2)))
    broken = depths.train.targets[0].__class__(tmp_path, "depth/train/x.npy")
    for content in (objects.getvalue(), archive.getvalue(), b"", b"PK\x03\x04 and more"):
        (tmp_path / broken.name).write_bytes(content)
        with pytest.raises(UnreadableImage, match="no array"):
            broken.read()


def test_pictures_without_a_map_are_left_out_with_a_note_but_not_all(tmp_path):
    write_pictures(tmp_path, {"train": 5}, (8, 8))
    (tmp_path / "masks" / "train" / "001.png").unlink()
    data = open_masks(str(tmp_path), SplitRule(val=0, test=0))
    assert len(data.train) == 4
    assert any("1 picture has" in note and "train/001.png" in note for note in data.notes)
    for path in (tmp_path / "masks" / "train").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="no picture"):
        open_masks(str(tmp_path))


@pytest.mark.parametrize(
    ("lines", "match"),
    [("", "name 1 to 255"), ("ignored\n", "name 1"), ("a\n\nb\n", "line 2"), ("a\na\n", "twice")],
)
def test_names_of_classes_are_checked(tmp_path, lines, match):
    write_pictures(tmp_path, {"train": 2}, (8, 8))
    (tmp_path / "masks" / "classes.txt").write_text(lines)
    with pytest.raises(ValueError, match=match):
        open_masks(str(tmp_path))


@pytest.mark.parametrize("opened", [open_masks, open_depths])
def test_a_folder_of_another_kind_is_refused_in_one_line(tmp_path, opened):
    (tmp_path / "cats").mkdir()
    for where in (str(tmp_path), "digits", str(tmp_path / "missing")):
        with pytest.raises(ValueError, match="images/") as caught:
            opened(where)
        assert "\n" not in str(caught.value)


ROAD, CAR, VOID = (128, 64, 128), (0, 0, 142), (0, 0, 0)
TABLES = {
    "label_colors.txt": "128 64 128\troad\n0 0 142\tpassenger car\n0 0 0\tignored\n",
    "labelmap.txt": "# label:color_rgb:parts:actions\nroad:128,64,128::\n"
    "passenger car:0,0,142::\nignored:0,0,0::\n",
    "class_dict.csv": "name,r,g,b\nroad,128,64,128\npassenger car,0,0,142\nignored,0,0,0\n",
}


def write_coloured(folder: Path, *colours, mode="RGB") -> str:
    for number in range(4):
        picture(folder / "images" / f"{number}.jpg", number)
        image = Image.fromarray(np.array([colours], np.uint8))
        (folder / "masks").mkdir(exist_ok=True)
        image.convert(mode).save(folder / "masks" / f"{number}.png")
    return str(folder)


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("name", TABLES)
def test_masks_in_colours_are_read_by_a_table_of_these(tmp_path, name, mode):
    where = write_coloured(tmp_path / "data", CAR, ROAD, VOID, CAR, mode=mode)
    with pytest.raises(ValueError, match=r"are in colours: .* --task.colours FILE") as caught:
        open_masks(where)
    assert "\n" not in str(caught.value)
    table = tmp_path / "data" / name
    table.write_text(TABLES[name])
    found = open_masks(where, SplitRule(val=0, test=0))
    table = table.rename(tmp_path / "elsewhere.txt")
    chosen = Segment(colours=str(table)).open_data(where, SplitRule(val=0, test=0))
    again = open_masks(chosen.where, SplitRule(val=0, test=0))
    for data in (found, chosen, again):
        assert data.classes == ("road", "passenger car")
        assert data.train.targets[0].read().tolist() == [[1, 0, 255, 1]]
    table.write_text("128 64 128 road\n0 0 142 car\n")
    mask = open_masks(chosen.where, SplitRule(val=0, test=0)).train.targets[0]
    with pytest.raises(UnreadableImage, match="it has the colour 0 0 0, which the table"):
        mask.read()


def test_a_table_of_colours_beside_masks_of_values_is_not_read(tmp_path):
    write_pictures(tmp_path, {"train": 4}, (8, 8))
    classes = open_masks(str(tmp_path)).classes
    (tmp_path / "labelmap.txt").write_text("background\nroad\n")
    assert open_masks(str(tmp_path)).classes == classes


@pytest.mark.parametrize("names", ["", "background\nthing\n"])
def test_masks_in_black_and_white_need_a_table_of_both(tmp_path, names):
    for number in range(3):
        picture(tmp_path / "images" / f"{number}.jpg", number)
        save(tmp_path / "masks" / f"{number}.png", mask(255))
    if names:
        (tmp_path / "masks" / "classes.txt").write_text(names)
    with pytest.raises(
        ValueError, match=r"fewer than two classes .* --task.colours FILE"
    ) as caught:
        open_masks(str(tmp_path))
    assert "\n" not in str(caught.value)
    table = tmp_path / "table.txt"
    table.write_text("0 0 0 background\n255 255 255 thing\n")
    data = open_masks(str(tmp_path), SplitRule(val=0, test=0), str(table))
    assert data.classes == ("background", "thing")
    np.testing.assert_array_equal(data.train.targets[0].read(), mask(1))
    save(tmp_path / "masks" / "0.png", mask(1) > 0)  # of one bit
    np.testing.assert_array_equal(data.train.targets[0].read(), mask(1))
    save(tmp_path / "masks" / "0.png", mask(7))
    with pytest.raises(UnreadableImage, match="it has the colour 7 7 7, which the table"):
        data.train.targets[0].read()


def test_the_colours_of_voc_are_known(tmp_path):
    # aeroplane, bicycle, tvmonitor and the border of the published palette
    colours = ((128, 0, 0), (0, 128, 0), (0, 64, 128), (224, 224, 192), (0, 0, 0))
    where = write_coloured(tmp_path, *colours)
    data = open_masks(f"{where}?colours=voc", SplitRule(val=0, test=0))
    assert data.classes == VOC_CLASSES
    assert data.train.targets[0].read().tolist() == [[1, 2, 20, 255, 0]]
    assert open_masks(data.where).classes == VOC_CLASSES


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("128 0 road\n1 2 3 car", "line 1 is '128 0 road': write red, green and blue"),
        ("128 0 256 road", "line 1"),
        ("1 2 3 road\n1 2 3 car", "one colour for two"),
        ("1 2 3 road\n1 2 4 road", "'road' twice"),
        ("", "name 1 to 255"),
    ],
)
def test_a_table_of_colours_that_cannot_be_used_is_one_line(tmp_path, text, match):
    where = write_coloured(tmp_path / "data", ROAD)
    (tmp_path / "table.txt").write_text(text)
    with pytest.raises(ValueError, match=match):
        open_masks(where, colours=str(tmp_path / "table.txt"))
    with pytest.raises(ValueError, match="no table of colours 'nowhere'"):
        open_masks(where, colours="nowhere")
