"""Frames of a video are those that decoding all of it gives; what is no video is named."""

import os
import pickle
import sys
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from videos import all_frames, drawn, write_frames, write_video

from fullstride.data.readers import videos
from fullstride.data.readers.videos import (
    MiddleFrame,
    UnreadableImage,
    frame_names,
    frames_size,
    open_video,
)

FRAMES = 60
PICKS = ([0, 1], [FRAMES - 1], [7], [13, 15, 17, 40, 42], [3, 58, 59], range(FRAMES))
# Containers, codecs and structures in which frames are stored in another order than they are shown,
# or depend on frames before a key frame.
FILES = {
    "one-key.mp4": {},
    "keys.mp4": dict(options={"g": "12"}),
    "only-keys.mp4": dict(options={"g": "1"}),
    "open-groups.mp4": dict(options={"x264-params": "keyint=10:open-gop=1:bframes=5"}),
    "refreshed.mp4": dict(options={"x264-params": "keyint=20:intra-refresh=1"}),
    "keys.mkv": dict(options={"g": "12"}),
    "vp9.webm": dict(codec="libvpx-vp9"),
    "hidden.webm": dict(codec="libvpx", options={"auto-alt-ref": "1", "lag-in-frames": "10"}),
    "mpeg4.avi": dict(codec="mpeg4"),
    "no-times.avi": dict(codec="mpeg4", options={"bf": "2"}),
    "h264.avi": dict(options={"g": "12"}),
    "mpeg1.mpg": dict(codec="mpeg1video"),
    "mpeg2.mpg": dict(codec="mpeg2video", options={"bf": "2"}),
    "a.flv": dict(codec="flv"),
    "a.wmv": dict(codec="wmv2"),
    "ten-bits.mov": dict(pixels="yuv420p10le"),
    "grey.mp4": dict(pixels="gray"),
    "odd.mkv": dict(codec="ffv1", pixels="yuv444p", size=(51, 37)),
}


def read(source: Path | bytes, numbers=None) -> np.ndarray:
    with open_video(source) as video:
        numbers = range(video.frames) if numbers is None else numbers
        return np.stack([np.asarray(picture) for picture in video.read(numbers)])


def reason(source: Path | bytes) -> str:
    with pytest.raises(UnreadableImage) as caught:
        read(source)
    assert "\n" not in str(caught.value)
    return caught.value.reason


@pytest.mark.parametrize("name", FILES)
def test_any_frames_are_those_that_decoding_the_whole_file_gives(name, tmp_path):
    path = write_video(tmp_path / name, FRAMES, **FILES[name])
    expected = all_frames(path)
    with open_video(path) as video:
        assert video.frames == len(expected) == FRAMES
        assert video.rate == pytest.approx(25)
        assert video.times == pytest.approx(np.arange(FRAMES) / 25)
        for numbers in PICKS:
            pixels = np.stack([np.asarray(picture) for picture in video.read(numbers)])
            assert np.array_equal(pixels, expected[list(numbers)])
    assert np.array_equal(read(path.read_bytes(), [20, 50]), expected[[20, 50]])


def test_decoded_frames_look_as_they_were_drawn(tmp_path):
    path = write_video(tmp_path / "a.mp4", 12, pixels="yuv444p", options={"crf": "5"})
    difference = np.abs(read(path).astype(int) - np.stack([*drawn(12)]))
    assert difference.mean() < 3


def test_frames_that_nothing_depends_on_are_not_decoded(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", FRAMES, options={"g": "30"})
    decoded = []
    plain = videos.FrameReader._frames

    def count(self, needed):
        for frame in plain(self, needed):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(videos.FrameReader, "_frames", count)
    read(path, [40, 44, 48])
    assert len(decoded) < 18  # of 30 to 48, without those that are only shown
    decoded.clear()
    read(path, [1, 59])
    assert len(decoded) < 35  # not those between 2 and 30


def test_a_key_frame_that_does_not_serve_is_left_for_the_start(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", FRAMES, options={"g": "12"})
    expected, starts = all_frames(path), []
    seek = videos.FrameReader._seek

    def too_late(self, key):
        starts.append(key)
        seek(self, key + 1 if key else 0)

    monkeypatch.setattr(videos.FrameReader, "_seek", too_late)
    assert np.array_equal(read(path, [3, 30, 31]), expected[[3, 30, 31]])
    assert starts == [0, 2, 0]


def test_a_frame_that_the_decoder_never_shows_is_named(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", FRAMES, options={"g": "12"})
    frames = videos.FrameReader._frames

    def without_one(self, needed):
        missing = self.index.times[31]
        return (frame for frame in frames(self, needed) if frame.pts != missing)

    monkeypatch.setattr(videos.FrameReader, "_frames", without_one)
    assert len(read(path, [3, 30, 32])) == 3
    with pytest.raises(UnreadableImage, match="frame 31 of 60 cannot be decoded"):
        read(path, [3, 30, 31])


def test_other_streams_of_a_file_are_not_its_frames(tmp_path):
    path = tmp_path / "a.mkv"
    with av.open(path, "w") as container:
        pictures = container.add_stream("libx264", rate=25)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        tone = container.add_stream("aac", rate=16000)
        for number, pixels in enumerate(drawn(20)):
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            samples = np.zeros((1, 1024), np.float32)
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 16000, 1024 * number, Fraction(1, 16000)
            container.mux(tone.encode(frame))
        container.mux(pictures.encode())
        container.mux(tone.encode())
    assert np.array_equal(read(path), all_frames(path))
    with open_video(path) as video:
        assert video.frames == 20
        assert [*video.read([])] == []


def test_frames_at_uneven_times_are_counted_and_timed(tmp_path):
    times = np.cumsum(np.random.default_rng(0).integers(1, 5, 30)).tolist()
    path = write_video(tmp_path / "a.mp4", 30, times=times)
    with open_video(path) as video:
        assert video.times == pytest.approx([(each - times[0]) / 25 for each in times])
        assert video.rate == pytest.approx(29 / video.times[-1])
    assert np.array_equal(read(path, [3, 29]), all_frames(path)[[3, 29]])


@pytest.mark.parametrize("turn", [90, 180, -90])
def test_a_video_that_was_filmed_sideways_is_turned_upright(turn, tmp_path):
    path = write_video(tmp_path / "a.mp4", 4, turn=turn)
    assert np.array_equal(read(path), np.rot90(all_frames(path), turn // 90, (1, 2)))


def test_a_folder_has_its_frames_in_natural_order(tmp_path):
    folder = write_frames(tmp_path / "clip", 12)
    (folder / "notes.txt").write_text("")
    (folder / ".img3.png").write_text("")
    assert frame_names(folder) == [f"img{number}.png" for number in range(12)]
    assert np.array_equal(read(folder, [1, 10, 11]), np.stack([*drawn(12)])[[1, 10, 11]])
    assert frames_size(folder) == sum(each.stat().st_size for each in folder.glob("i*.png"))
    with open_video(folder) as video:
        assert (video.frames, video.rate, video.times) == (12, None, None)
    size = frames_size(folder)
    (folder / "img12.png").symlink_to(tmp_path / "nowhere.png")
    assert frames_size(folder) == size
    assert "'img12.png': No such file" in reason(folder)
    assert frames_size(tmp_path / "nowhere") == frames_size(tmp_path) == 0


def test_the_picture_of_a_video_is_its_middle_frame(tmp_path):
    write_frames(tmp_path / "clip", 5)
    middle = pickle.loads(pickle.dumps(MiddleFrame(tmp_path.joinpath)))
    assert np.array_equal(np.asarray(middle("clip")), [*drawn(5)][2])
    with pytest.raises(UnreadableImage) as caught:
        middle("none.mp4")
    assert (caught.value.name, caught.value.reason) == ("none.mp4", "No such file or directory")


# ---- what is no video


def sound(path: Path) -> Path:
    with av.open(path, "w") as container:
        stream = container.add_stream("aac", rate=16000)
        for number in range(20):
            samples = np.zeros((1, 1024), np.float32)
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 16000, 1024 * number, Fraction(1, 16000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def test_what_is_no_video_is_named_with_the_reason(tmp_path):
    write_video(tmp_path / "a.mp4")
    (tmp_path / "fifo.mp4").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "fifo.mp4")
    (tmp_path / "empty").mkdir()
    assert reason(b"") == "it is empty"
    assert "MP4" in reason(b"words " * 500)
    assert "FIFO" in reason(tmp_path / "fifo.mp4")
    assert "no such file" in reason(tmp_path / "none.mp4").lower()
    assert "only sound" in reason(sound(tmp_path / "sound.mp4"))
    assert "one frame" in reason(write_video(tmp_path / "one.mp4", 1))
    assert "one frame" in reason(write_frames(tmp_path / "one", 1))
    assert "no frames" in reason(tmp_path / "empty")
    assert len(read(write_video(tmp_path / "two.mp4", 2))) == 2


def test_a_title_in_another_encoding_is_no_reason_against_the_pictures(tmp_path):
    with av.open(tmp_path / "a.mkv", "w") as container:
        container.metadata["title"] = "A title of Z."
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for pixels in drawn(5):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    data = (tmp_path / "a.mkv").read_bytes()
    latin = data.replace(b"title of Z", b"title of \xe9")
    assert latin != data
    assert np.array_equal(read(latin), read(data))


def test_random_damage_ends_in_frames_or_in_one_line(tmp_path):
    files = [
        write_video(tmp_path / name, 20, **how).read_bytes()
        for name, how in {
            "a.mp4": dict(options={"movflags": "faststart", "g": "8"}),
            "a.mkv": {},
            "a.avi": dict(codec="mpeg4"),
            "a.mpg": dict(codec="mpeg2video"),
            "a.flv": dict(codec="flv"),
        }.items()
    ]
    rng, read_whole, reasons = np.random.default_rng(0), 0, []
    for number in range(500):
        data = bytearray(files[number % len(files)])
        most = len(data) if number % 2 else min(len(data), 2000)
        for place in rng.integers(most, size=rng.integers(1, 30)):
            data[place] = rng.integers(256)
        try:
            with open_video(bytes(data)) as video:
                frames = [*video.read(sorted({0, video.frames // 2, video.frames - 1}))]
            assert len(frames) in (2, 3)
            read_whole += 1
        except UnreadableImage as error:
            reasons.append(error.reason)
    assert min(read_whole, len(reasons)) > 50
    assert not [reason for reason in reasons if not reason or "\n" in reason]


@pytest.mark.parametrize(
    "playlist",
    [
        "ffconcat version 1.0\nfile a.mp4\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\na.mp4\n#EXT-X-ENDLIST\n",
    ],
)
def test_a_list_of_other_files_is_no_video(playlist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_video(tmp_path / "a.mp4")
    (tmp_path / "list.mp4").write_text(playlist)
    if "concat" in playlist:
        av.open("list.mp4").close()  # FFmpeg itself follows it
    assert "MP4" in reason(tmp_path / "list.mp4")
    assert len(read(path)) == 20


def test_a_video_that_is_cut_short_or_damaged_is_named(tmp_path):
    files = {
        name: write_video(tmp_path / name, FRAMES, **how).read_bytes()
        for name, how in {
            "end.mp4": {},
            "start.mp4": dict(options={"movflags": "faststart", "g": "12"}),
            "a.mkv": dict(options={"g": "12"}),
            "a.avi": dict(codec="mjpeg", pixels="yuvj420p"),
        }.items()
    }
    for data in files.values():
        assert reason(data[: len(data) // 2])
        assert reason(data[:100])
    assert "cut short after" in reason(files["a.mkv"][: len(files["a.mkv"]) // 2])
    damaged = bytearray(files["start.mp4"])
    for place in range(len(damaged) // 2, len(damaged) // 2 + 300):
        damaged[place] ^= 0x5A
    assert "damaged" in reason(bytes(damaged))


def test_a_broken_frame_and_one_of_another_size_are_named(tmp_path):
    folder = write_frames(tmp_path / "clip", 6)
    Image.new("RGB", (10, 10)).save(folder / "img4.png")
    assert "64 x 48 pixels and of 10 x 10" in reason(folder)
    (folder / "img2.png").write_bytes(b"")
    assert "'img2.png': it is empty" in reason(folder)
    assert len(read(folder, [0, 1, 3])) == 3


def test_hostile_sizes_counts_and_waits_have_limits(tmp_path, monkeypatch):
    path, folder = write_video(tmp_path / "a.mp4"), write_frames(tmp_path / "clip", 20)
    counted = write_video(tmp_path / "a.mpg", codec="mpeg2video")
    monkeypatch.setattr(videos, "MAX_FRAMES", 19)
    for each in (path, folder, counted):
        assert "more than 19 frames" in reason(each)
    monkeypatch.undo()
    for module in (videos, videos):
        monkeypatch.setattr(module, "MAX_MEGAPIXELS", 0.001)
    for each in (path, folder):
        assert "0.001 megapixels" in reason(each)
    assert reason(counted)
    monkeypatch.undo()
    monkeypatch.setattr(videos, "MAX_WAIT_S", -1)
    assert "takes more than" in reason(path)


def test_without_pyav_a_line_says_what_to_install(tmp_path, monkeypatch):
    path, folder = write_video(tmp_path / "a.mp4"), write_frames(tmp_path / "clip", 3)
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setattr(videos, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'fullstride\[video\]'") as caught:
        read(path)
    assert not isinstance(caught.value, UnreadableImage)
    assert len(read(folder)) == 3


def test_a_file_is_closed_when_its_video_is(tmp_path):
    path = write_video(tmp_path / "a.mp4")
    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        read(path, [0])
        reason(BytesIO(path.read_bytes()[:500]).getvalue())
    assert len(os.listdir("/proc/self/fd")) == opened  # noqa: PTH208
