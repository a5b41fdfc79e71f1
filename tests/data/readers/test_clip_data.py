"""Videos are opened as images are: folders, tables and shards, with the same splits."""

import pickle
import shutil
from pathlib import Path

import pytest
from videos import write_frames, write_video

from fullstride.data import targets
from fullstride.data.dataset import DataSet, open_data
from fullstride.data.pack import Encoding, pack
from fullstride.data.readers.splits import SplitRule
from fullstride.data.readers.videos import open_video
from fullstride.data.targets import open_clips

PARTS = ("train", "val", "test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two classes of twelve videos each, two of them folders of frames; a.mp4 is twice in it."""
    root = tmp_path_factory.mktemp("data") / "actions"
    for label, name in enumerate(("jump", "walk")):
        (root / name).mkdir(parents=True)
        for number in range(11):
            path = root / name / f"take{number // 2}_{number}.mp4"
            write_video(path, 4, (32, 24), seed=20 * label + number)
        write_frames(root / name / "take9" / "frames", 3, (32, 24), seed=label)
    shutil.copy(root / "walk" / "take0_0.mp4", root / "walk" / "copy.mp4")
    (root / "walk" / "notes.txt").write_text("")
    (root / "walk" / "poster.jpg").write_text("")
    (root / "trailer.mp4").write_text("")
    return root


def names(data: DataSet) -> dict[str, tuple[str, ...]]:
    return {part: getattr(data, part).names for part in PARTS}


def test_a_folder_has_files_and_folders_of_frames_as_videos(folder):
    data = open_clips(str(folder), SplitRule(val=0, test=0))
    assert data.classes == ("jump", "walk")
    expected = {
        f"{name}/{file}"
        for name in data.classes
        for file in ("take9/frames", *(f"take{n // 2}_{n}.mp4" for n in range(11)))
    }
    assert {*data.train.names} == expected | {"walk/copy.mp4"}
    assert data.ignored == {
        "videos outside of the class folders": 1,
        ".txt (no videos)": 1,
        ".jpg (no videos)": 1,
    }
    index = data.train.names.index("walk/take9/frames")
    assert data.train.source(index) == folder / "walk/take9/frames"
    assert data.train.targets[index] == 1
    assert [picture.size for _, picture in data.train.readable()] == [(32, 24)] * 25
    assert len(pickle.loads(pickle.dumps(data)).train) == 25


def test_splits_are_taken_by_the_rules_of_images(folder):
    data = open_clips(str(folder))
    assert all(names(data).values())
    assert all({*getattr(data, part).targets} == {0, 1} for part in PARTS)
    part_of = {name: part for part, each in names(data).items() for name in each}
    assert len(part_of) == 25
    assert part_of["walk/copy.mp4"] == part_of["walk/take0_0.mp4"]
    groups = names(open_clips(str(folder), SplitRule(group=r"(\w+/take\d+)")))
    takes = [{name.rpartition("_")[0] for name in each if "_" in name} for each in groups.values()]
    assert all(takes)
    assert not takes[0] & takes[1] | takes[0] & takes[2] | takes[1] & takes[2]


def test_splits_of_the_data_stay(folder, tmp_path):
    for split in ("train", "val"):
        shutil.copytree(folder, tmp_path / "d" / split)
    (tmp_path / "d" / "val" / "trailer.mp4").unlink()
    data = open_clips(str(tmp_path / "d"), SplitRule(keep_duplicates=True))
    assert [len(each) for each in names(data).values()] == [25, 25, 0]
    assert data.own_splits == ("val",)
    left_out = open_clips(
        str(tmp_path / "d"), SplitRule(keep_duplicates=True, left_out=("train/walk/copy.mp4",))
    )
    assert len(left_out.train) == 24
    assert left_out.fingerprint != data.fingerprint


def test_a_table_lists_files_and_folders_of_frames(folder, tmp_path):
    rows = ["path,label,split"]
    for name in ("jump/take0_0.mp4", "walk/take0_0.mp4", "walk/take9/frames"):
        rows.append(f"{folder / name},{name.split('/')[0]},train")
    table = tmp_path / "a.csv"
    table.write_text("\n".join([*rows, f"{folder}/jump/take1_2.mp4,jump,val"]))
    data = open_clips(str(table), SplitRule(keep_duplicates=True))
    assert [len(each) for each in names(data).values()] == [3, 1, 0]
    assert data.train.targets == (0, 1, 1)
    table.write_text("\n".join([*rows, f"{folder}/walk,walk,val"]))  # a folder without frames
    (folder / "walk" / "poster.jpg").rename(tmp_path / "poster.jpg")
    try:
        with pytest.raises(ValueError, match="1 of the 4 files .* is missing"):
            open_clips(str(table))
    finally:
        (tmp_path / "poster.jpg").rename(folder / "walk" / "poster.jpg")


def test_shards_give_back_the_bytes_and_the_splits(folder, tmp_path):
    copy = tmp_path / "files"
    shutil.copytree(folder, copy)
    for name in ("jump", "walk"):
        shutil.rmtree(copy / name / "take9")
    there = open_clips(str(copy))
    *_, last = pack(there, tmp_path / "shards")
    assert (last.images, last.skipped) == (23, {})
    here = open_clips(str(tmp_path / "shards"))
    assert (here.fingerprint, here.classes) == (there.fingerprint, there.classes)
    for part in PARTS:
        ours, theirs = getattr(here, part), getattr(there, part)
        assert (ours.names, ours.targets) == (theirs.names, theirs.targets)
        for index in range(len(ours)):
            assert ours.source(index) == theirs.source(index).read_bytes()
    (tmp_path / "shards" / "index.json").unlink()
    plain = open_clips(str(tmp_path / "shards"))
    assert len(plain.train) == len(there.train)
    with open_video(plain.train.source(0)) as video:
        assert video.frames == 4
    with pytest.raises(ValueError, match="has no images"):
        open_data(str(tmp_path / "shards"))


def test_folders_of_frames_are_not_packed_and_videos_not_made_smaller(folder, tmp_path):
    data = open_clips(str(folder))
    *_, last = pack(data, tmp_path / "shards")
    assert {name.split("/")[1] for name in last.skipped} == {"take9"}
    assert "shards take video files only" in last.skipped["walk/take9/frames"]
    with pytest.raises(ValueError, match="no image of the split train can be read"):
        list(pack(data, tmp_path / "small", Encoding(long_side=16)))


def test_left_and_right_are_directions_which_a_mirror_image_would_exchange(tmp_path):
    for classes, mirror in (
        (("Turn left", "turn Right", "walk"), False),
        (("left", "walk"), True),
    ):
        root = tmp_path / str(mirror)
        for name in classes:
            for number in range(3):
                write_frames(root / name / str(number), 2, (16, 16), seed=number)
        data = open_clips(str(root), SplitRule(val=0, test=0))
        assert data.mirror is mirror
        assert any("'Turn left'" in note for note in data.notes) is not mirror


def test_what_has_no_videos_is_refused_in_one_line(folder, tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "1.jpg").write_text("")
    with pytest.raises(ValueError, match=r"no videos in 'a', 'b' .*folders of frames") as caught:
        open_clips(str(tmp_path / "d"))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="'digits' are images"):
        open_clips("digits")
    with pytest.raises(ValueError, match="did you mean"):
        open_clips(str(folder)[:-1])

    def missing():
        raise ValueError("no PyAV")

    monkeypatch.setattr(targets, "check_decoder", missing)
    with pytest.raises(ValueError, match="no PyAV"):
        open_clips(str(folder))
