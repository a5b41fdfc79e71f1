"""Clips and views of videos are those of slow, obvious programs, and batches of them resume."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from videos import all_frames, drawn, write_frames, write_video

from fullstride.data.dataset import DataSet, Images
from fullstride.data.loader import Batches, LoaderOptions
from fullstride.data.readers.splits import SplitRule
from fullstride.data.targets import open_clips
from fullstride.data.transforms.clips import (
    ClipTestView,
    ClipTrainView,
    ViewsOfVideo,
    clip_starts,
    jittered_box,
)
from fullstride.data.transforms.crop import Augmentation
from fullstride.nets.preprocessing import Preprocessing

PRE = Preprocessing(resolution=24, crop=0.75, frames=4, frame_stride=3)
PLAIN = Augmentation(scale=(1.0, 1.0), ratio=(4 / 3, 4 / 3), hflip_prob=0.0)  # all of 64 x 48
FRAMES = 20


@pytest.fixture(scope="module")
def video(tmp_path_factory) -> Path:
    return write_video(tmp_path_factory.mktemp("video") / "a.mp4", FRAMES)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataSet:
    root = tmp_path_factory.mktemp("data")
    for label, name in enumerate("ab"):
        (root / name).mkdir()
        for number in range(6):
            write_video(root / name / f"{number}.mp4", FRAMES, (40, 32), seed=10 * label + number)
    (root / "a" / "3.mp4").write_bytes(b"broken")
    return open_clips(str(root), SplitRule(val=0, test=0))


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def pixels(view, source: Path | bytes, seed: int = 0) -> np.ndarray:
    clip, target = view(source, "target", rng(seed))
    assert (clip.dtype, target) == (np.uint8, "target")
    return clip


def whole(frame: np.ndarray, pre: Preprocessing = PRE) -> Image.Image:
    """A frame with the shorter side that evaluation resizes to."""
    h, w, _ = frame.shape
    short_side = int(pre.resolution / pre.crop)
    size = (int(short_side * w / h), short_side) if w > h else (short_side, short_side * h // w)
    return Image.fromarray(frame).resize(size, Image.Resampling.BILINEAR)


# ---- which frames


def first_frames(view: ClipTrainView, source: Path, frames: np.ndarray, draws: int) -> Counter[int]:
    """How often a clip starts at each frame, found by comparing its first picture with all."""
    resized = [np.asarray(Image.fromarray(each).resize((24, 24), 2)) for each in frames]
    counts: Counter[int] = Counter()
    for seed in range(draws):
        clip = pixels(view, source, seed).astype(int)
        start = int(np.argmin([np.abs(clip[0] - each).sum() for each in resized]))
        for step in range(PRE.frames):
            expected = resized[(start + step * PRE.frame_stride) % len(frames)]
            assert np.array_equal(clip[step], expected)
        counts[start] += 1
    return counts


def test_every_clip_inside_of_a_video_is_equally_likely(tmp_path):
    folder = write_frames(tmp_path / "clip", 14)
    counts = first_frames(ClipTrainView(PRE, PLAIN), folder, np.stack([*drawn(14)]), 400)
    assert {*counts} == {0, 1, 2, 3, 4}  # 14 - (3 * 3 + 1) is the last
    assert min(counts.values()) > 50


def test_a_video_that_is_shorter_than_a_clip_repeats(tmp_path):
    folder = write_frames(tmp_path / "clip", 5)
    assert {*first_frames(ClipTrainView(PRE, PLAIN), folder, np.stack([*drawn(5)]), 20)} == {0}
    clip = pixels(ClipTestView(PRE), folder)
    assert np.array_equal(clip[1], pixels(ClipTestView(replace(PRE, frames=2)), folder)[1])
    views = pixels(ViewsOfVideo(PRE, clips=3, crops=1), folder)
    assert np.array_equal(views[0], views[2])
    frames = [*drawn(5)]
    for step, number in enumerate((0, 3, 1, 4)):
        expected = np.asarray(whole(frames[number]))[4:28, 9:33]
        assert np.array_equal(clip[step], expected)


@pytest.mark.parametrize(
    ("frames", "span", "rule", "expected"),
    [
        (250, 64, "inclusive", [0, 20, 41, 62, 82, 103, 124, 144, 165, 186]),
        (250, 64, "slowfast", [0, 18, 37, 55, 74, 93, 111, 130, 148, 167]),
        (64, 64, "inclusive", [0] * 10),
        (40, 64, "slowfast", [0] * 10),
        (66, 64, "inclusive", [0, 0, 0, 0, 0, 1, 1, 1, 1, 2]),
    ],
)
def test_clips_start_where_both_rules_say(frames, span, rule, expected):
    assert clip_starts(frames, span, 10, rule) == expected
    last = max(0, frames - span)
    slow = np.linspace(0, last, 10) if rule == "inclusive" else last * np.arange(10) / 10
    assert expected == np.floor(slow + 1e-9).astype(int).tolist()
    assert clip_starts(frames, span, 1, rule) == [0]


# ---- which pixels


@pytest.mark.parametrize("size", [(64, 48), (36, 50)])
def test_many_views_are_those_of_the_slow_way(size, tmp_path):
    path = write_video(tmp_path / "a.mp4", FRAMES, size)
    frames, side = all_frames(path), PRE.resolution
    for rule, starts in (("inclusive", (0, 4, 8)), ("slowfast", (0, 2, 5))):
        expected = []
        for start in starts:  # 20 - 4 * 3 is the last
            for place in ("first", "middle", "last"):
                clip = []
                for step in range(PRE.frames):
                    picture = whole(frames[start + step * PRE.frame_stride])
                    free = [each - side for each in picture.size]
                    share = {"first": 0, "middle": 1 / 2, "last": 1}[place]
                    left, top = (
                        round(each * (share if each == max(free) else 1 / 2)) for each in free
                    )
                    box = (left, top, left + side, top + side)
                    clip.append(np.asarray(picture.crop(box)))
                expected.append(clip)
        view = ViewsOfVideo(PRE, clips=3, crops=3, starts=rule)
        assert np.array_equal(pixels(view, path), np.array(expected))
        centre = pixels(replace(view, crops=1), path)
        assert np.array_equal(centre, np.array(expected)[1::3])


def test_the_test_view_is_the_centre_of_the_clip_in_the_middle(video):
    frames = all_frames(video)
    expected = [
        np.asarray(whole(frames[number]))[4:28, 9:33] for number in (5, 8, 11, 14)
    ]  # (20 - 10) // 2 on
    assert np.array_equal(pixels(ClipTestView(PRE), video), np.array(expected))
    assert np.array_equal(pixels(ClipTestView(PRE), video.read_bytes()), np.array(expected))


def test_all_frames_of_a_clip_have_one_crop_and_one_augmentation(tmp_path):
    picture = Image.fromarray(next(drawn(1)))
    (tmp_path / "still").mkdir()
    for number in range(12):
        picture.save(tmp_path / "still" / f"{number}.png")
    augmentation = Augmentation(
        rotation_degrees=20, random_kernel=True, rand_layers=2, random_erasing_prob=0.9
    )
    for view in (
        ClipTrainView(PRE, augmentation),
        ClipTrainView(PRE, augmentation, short_side=(24, 40)),
    ):
        clips = [pixels(view, tmp_path / "still", seed) for seed in range(6)]
        assert all((clip == clip[0]).all() for clip in clips)
        assert len({clip.tobytes() for clip in clips}) == 6
        assert np.array_equal(clips[2], pixels(view, tmp_path / "still", 2))


def test_a_flip_moves_the_whole_clip(video):
    view = ClipTrainView(PRE, PLAIN)
    flipped = ClipTrainView(PRE, replace(PLAIN, hflip_prob=1.0))
    assert np.array_equal(pixels(view, video)[:, :, ::-1], pixels(flipped, video))


def test_scale_jitter_is_a_crop_of_the_resized_frame():
    frame = Image.fromarray(next(drawn(1, (90, 60))))
    draw = rng(0)
    lefts = []
    for _ in range(200):
        short_side = int(draw.integers(24, 41))
        box = jittered_box(24 / short_side, frame.size, Augmentation(), draw)
        scale = short_side / 60
        left, top, right, bottom = (each * scale for each in box)
        assert (right - left, bottom - top) == pytest.approx((24, 24))
        assert left >= 0 <= top
        assert right <= 90 * scale + 1e-9
        assert bottom <= 60 * scale + 1e-9
        lefts.append(left / (90 * scale - 24))
        size = (round(90 * scale), short_side)
        resized = frame.resize(size, Image.Resampling.BILINEAR)
        if short_side % 2 == 0:  # sides that are whole numbers of pixels
            moved = resized.transform((24, 24), Image.Transform.AFFINE, (1, 0, left, 0, 1, top), 2)
            crop = frame.resize((24, 24), Image.Resampling.BILINEAR, box)
            difference = np.abs(np.asarray(crop, int) - np.asarray(moved, int))[1:-1, 1:-1]
            assert difference.mean() < 6
    assert 0.4 < np.mean(lefts) < 0.6
    assert min(lefts) < 0.05 < 0.95 < max(lefts)


def test_frames_as_one_channel_are_the_grey_of_the_picture(video):
    grey = replace(PRE, mean=(0.5,), std=(0.25,))
    frames = all_frames(video)
    clip = pixels(ClipTestView(grey), video)
    assert clip.shape == (4, 24, 24, 1)
    first = whole(np.asarray(Image.fromarray(frames[5]).convert("L"))[:, :, None].repeat(3, 2))
    assert np.abs(clip[0, :, :, 0].astype(int) - np.asarray(first)[4:28, 9:33, 0]).max() <= 1
    views = pixels(ViewsOfVideo(grey, clips=2), video)
    assert views.shape == (6, 4, 24, 24, 1)


def test_views_that_cannot_be_are_refused_in_one_line(tmp_path):
    for make in (
        lambda: ClipTrainView(Preprocessing()),
        lambda: ClipTestView(Preprocessing()),
        lambda: ClipTrainView(PRE, short_side=(20, 40)),
        lambda: ClipTrainView(PRE, short_side=(40, 30)),
        lambda: ViewsOfVideo(PRE, clips=0),
        lambda: ViewsOfVideo(PRE, crops=2),
        lambda: ViewsOfVideo(PRE, starts="random"),
        lambda: ViewsOfVideo(replace(PRE, fit="squish"), crops=3),
    ):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            make()
    (tmp_path / "thin").mkdir()
    for number in range(2):
        Image.new("L", (80_000, 1)).save(tmp_path / "thin" / f"{number}.png")
    with pytest.raises(ValueError, match="80000 x 1 pixels"):
        pixels(ViewsOfVideo(PRE), tmp_path / "thin")
    assert pixels(ClipTestView(PRE), tmp_path / "thin").shape == (4, 24, 24, 3)


# ---- batches


def raw(images: Images, start: int = 0, workers: int = 0) -> list[torch.Tensor]:
    """The pixels of an epoch's batches from one on."""
    view, options = ClipTrainView(PRE), dict(batch=2, seed=4, shuffle=True, workers=workers)
    batches = Batches(images, view, LoaderOptions(**options), to_x=lambda pixels, pre: pixels)
    epoch = [batch.x for batch in batches.epoch(1, start)]
    batches.close()
    assert {*batches.skipped} <= {"a/3.mp4"}
    return epoch


def test_a_batch_is_of_clips_whatever_the_workers_and_the_start(data):
    epoch = raw(data.train)
    assert [each.shape for each in epoch] == [(2, 4, 24, 24, 3)] * 6
    assert epoch[0].dtype == torch.uint8
    for start, workers in ((0, 2), (3, 0)):
        again = raw(data.train, start, workers)
        assert all(torch.equal(a, b) for a, b in zip(epoch[start:], again, strict=True))


def test_a_broken_video_is_named_and_left_out_of_scores(data):
    batches = Batches(
        data.train, ClipTestView(PRE), LoaderOptions(batch=5), to_x=lambda pixels, pre: pixels
    )
    scored = [index for batch in batches.epoch(0) for index in batch.indices.tolist()]
    broken = data.train.names.index("a/3.mp4")
    assert scored == [index for index in range(12) if index != broken]
    assert "MP4" in batches.skipped["a/3.mp4"]
    views = Batches(
        data.train,
        ViewsOfVideo(PRE, clips=2),
        LoaderOptions(batch=12),
        to_x=lambda pixels, pre: pixels,
    )
    (batch,) = views.epoch(0)
    assert batch.x.shape == (11, 6, 4, 24, 24, 3)
