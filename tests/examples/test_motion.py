"""fullstride.examples.scenes: the direction of a clip is in the order of its frames alone."""

import sys

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("sklearn")
pytest.importorskip("skimage")
from fullstride.examples import scenes, split_clip, write_motion
from fullstride.examples.__main__ import main

COUNTS = {"train": 8, "val": 4, "test": 4}


def small_clips(name: str, frames: int = 5) -> dict[tuple[int, int], np.ndarray]:
    """A square of 2 x 3 pixels that moves over noise of 6 x 7, by its first place."""
    background = np.random.default_rng(0).integers(0, 200, (6, 7, 3)).astype(np.float32)
    alpha, colour = np.ones((2, 3)), np.array([255, 240, 230])
    step = np.array(scenes.STEPS[name])
    return {
        (row, column): scenes.moving(
            background, alpha, colour, np.array([row, column]), step, frames
        )
        for row in range(6)
        for column in range(7)
    }


def test_a_frame_has_the_same_distribution_in_all_directions():
    """Over all first places, the frames of any time are the same pictures."""
    pictures = {
        (name, number): sorted(clip[number].tobytes() for clip in small_clips(name).values())
        for name in scenes.STEPS
        for number in range(5)
    }
    first = pictures["left", 0]
    assert len({*first}) == 42
    assert all(each == first for each in pictures.values())


@pytest.mark.parametrize(("one", "other"), [("left", "right"), ("up", "down")])
def test_a_clip_played_backwards_is_one_of_the_opposite_direction(one, other):
    forwards = {clip.tobytes() for clip in small_clips(one).values()}
    backwards = {clip[::-1].tobytes() for clip in small_clips(other).values()}
    assert forwards == backwards


def test_the_digit_is_where_the_first_place_and_the_steps_say():
    clip = small_clips("left")[4, 1]
    for number in range(5):
        covered = np.zeros((6, 7), bool)
        for row in (4, 5):
            for column in range(3):
                covered[row, (1 - number + column) % 7] = True
        assert np.array_equal((clip[number] == (255, 240, 230)).all(-1), covered)


def test_a_clip_is_a_function_of_seed_split_and_number_and_directions_take_turns():
    one, again = (split_clip(3, 24, 7, "val") for _ in range(2))
    assert np.array_equal(one.pixels, again.pixels)
    assert one.pixels.shape == (scenes.FRAMES, 24, 24, 3)
    for other in ((3, 24, 8, "val"), (3, 24, 7, "train")):
        assert not np.array_equal(one.pixels, split_clip(*other).pixels)
    names = [split_clip(number, 24, 0, "test").direction for number in range(8)]
    assert sorted(names) == sorted([*scenes.STEPS] * 2)


@pytest.mark.parametrize("as_videos", [False, True])
def test_written_clips_are_those_of_their_numbers_and_open_with_four_classes(as_videos, tmp_path):
    from fullstride.data.readers.videos import open_video
    from fullstride.data.targets import open_clips

    if as_videos:
        pytest.importorskip("av")
    write_motion(tmp_path / "m", COUNTS, 24, 1, 6, as_videos=as_videos)
    data = open_clips(str(tmp_path / "m"))
    assert data.classes == tuple(sorted(scenes.STEPS))
    assert (len(data.train), len(data.val), len(data.test)) == (8, 4, 4)
    assert not data.mirror
    for index, name in enumerate(data.train.names):
        number = int(name.rpartition("/")[2].partition(".")[0])
        expected = split_clip(number, 24, 1, "train", 6)
        assert data.classes[data.train.targets[index]] == expected.direction
        source = data.train.source(index)
        with open_video(source) as video:
            pixels = np.stack([np.asarray(each) for each in video.read(range(6))])
            assert video.frames == 6
        difference = np.abs(pixels.astype(int) - expected.pixels)
        assert difference.mean() < (12 if as_videos else 1e-9)  # half of the colour is dropped


def test_the_command_writes_clips_and_replaces_only_its_own(tmp_path, monkeypatch, capsys):
    words = ["x", str(tmp_path / "m"), "--kind", "motion", "--count", "5", "--side", "24"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", [*words, "--frames", "3"])
        main()
    frames = sorted((tmp_path / "m/train/down/00000").iterdir())
    assert [each.name for each in frames] == ["000.png", "001.png", "002.png"]
    with Image.open(frames[0]) as frame:
        assert frame.size == (24, 24)
    capsys.readouterr()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("x")
    for wrong in (["--frames", "1"], ["--side", "25", "--as-videos"]):
        monkeypatch.setattr(sys, "argv", [*words, *wrong])
        with pytest.raises(SystemExit) as exit_of:
            main()
        assert exit_of.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "other"), "--kind", "motion"])
    with pytest.raises(SystemExit):
        main()
    assert (tmp_path / "other" / "mine.txt").exists()
