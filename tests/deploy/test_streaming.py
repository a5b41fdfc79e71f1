"""Predictions of a window that slides over a long video, against each window by itself."""

import json
import os
import signal
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from clips import PRE, clip_bundle
from PIL import Image
from videos import all_frames, drawn, write_frames, write_video

from fullstride import cli
from fullstride.data.readers.decode import UnreadableImage
from fullstride.data.readers.videos import TimedFrame, timed_frames
from fullstride.data.transforms.crop import test_view, to_input
from fullstride.deploy.predict import predict
from fullstride.deploy.streaming import stream, windows

LOSSLESS = dict(codec="ffv1", pixels="bgr0")
SPAN = 15  # frames from the first to the last of a clip of 8 with stride 2


@pytest.fixture(scope="module")
def bundle():
    return clip_bundle()


def expected(bundle, frames, last: int) -> np.ndarray:
    """Probabilities for the clip that ends at a frame, by hand."""
    numbers = range(last - SPAN + 1, last + 1, 2)
    view = np.stack([test_view(Image.fromarray(frames[number]), PRE) for number in numbers])
    with torch.inference_mode():
        logits = bundle.net(to_input(torch.from_numpy(view[None]), PRE))
    return (logits / bundle.temperature).softmax(1)[0].numpy()


def by_class(bundle, row) -> np.ndarray:
    values = {guess.label: guess.probability for guess in row.guesses}
    return np.array([values[name] for name in bundle.classes])


def check(bundle, rows, frames, times, lasts) -> None:
    assert [row.end_s for row in rows] == pytest.approx([times[last] for last in lasts])
    assert [row.start_s for row in rows] == pytest.approx(
        [times[last - SPAN + 1] for last in lasts]
    )
    for row, last in zip(rows, lasts, strict=True):
        assert by_class(bundle, row) == pytest.approx(expected(bundle, frames, last), abs=1e-6)


@pytest.mark.parametrize(
    ("every_s", "lasts"),
    [
        (0.2, [14, 19, 24, 29, 34, 39]),  # each fifth frame of 25 a second
        (0.5, [14, 27, 39]),  # 12.5 frames: the first frame after it, and no rounding adds up
        (0.01, [*range(14, 40)]),  # faster than the frames
        (9.0, [14]),
    ],
)
def test_a_row_is_the_prediction_for_its_window_alone(bundle, tmp_path, every_s, lasts):
    path = write_video(tmp_path / "a.mkv", 40, **LOSSLESS)
    rows = list(stream(bundle, path, every_s=every_s))
    frames = all_frames(path)
    assert np.array_equal(frames, np.stack([*drawn(40)]))
    check(bundle, rows, frames, np.arange(40) / 25, lasts)
    assert {row.path for row in rows} == {str(path)}
    if len(rows) > 1:
        assert rows[0].guesses != rows[-1].guesses


def test_times_are_those_of_the_file_where_its_frame_rate_varies(bundle, tmp_path):
    # 20 frames at 25 a second, a pause of 2 seconds, and 20 frames at 12.5 a second
    ticks = [*range(20), *(70 + 2 * n for n in range(20))]
    path = write_video(tmp_path / "a.mkv", 40, times=ticks, **LOSSLESS)
    rows = list(stream(bundle, path, every_s=0.5))
    # 0.5 s after frame 14 at 0.56 s comes frame 20, at 2.8 s, then those from 3.06 s on
    lasts, times = [14, 20, 24, 30, 36], np.array(ticks) / 25
    assert times[lasts] == pytest.approx([0.56, 2.8, 3.12, 3.6, 4.08])
    check(bundle, rows, all_frames(path), times, lasts)


def test_a_compressed_video_with_frames_out_of_order_is_read_in_order(bundle, tmp_path):
    path = write_video(tmp_path / "a.mp4", 60, options={"bf": "3"})
    frames = [*timed_frames(path)]
    assert [each.seconds for each in frames] == pytest.approx(np.arange(60) / 25)
    assert np.array_equal(np.stack([np.asarray(each.picture) for each in frames]), all_frames(path))
    rows = list(stream(bundle, path, every_s=1))
    check(bundle, rows, all_frames(path), np.arange(60) / 25, [14, 39])


def test_times_of_files_without_any_are_by_their_frame_rate(tmp_path):
    path = write_video(tmp_path / "a.mpg", 30, codec="mpeg2video")
    assert [each.seconds for each in timed_frames(path)] == pytest.approx(np.arange(30) / 25)


def test_a_video_that_is_shorter_than_a_window_repeats_as_in_predict(bundle, tmp_path):
    path = write_video(tmp_path / "a.mkv", 6, **LOSSLESS)
    (row,) = stream(bundle, path)
    (whole,) = predict(bundle, path)
    assert by_class(bundle, row) == pytest.approx(by_class(bundle, whole), abs=1e-6)
    assert (row.start_s, row.end_s) == pytest.approx((0, 0.2))


def test_frames_may_come_from_a_camera_and_rows_come_before_the_next_frame(bundle):
    frames, taken = [*drawn(40)], []

    def camera():
        for number, pixels in enumerate(frames):
            taken.append(number)
            yield TimedFrame(number / 10, Image.fromarray(pixels))

    rows = []
    for row in stream(bundle, camera(), every_s=1):
        assert row.end_s == taken[-1] / 10
        rows.append(row)
    check(bundle, rows, frames, np.arange(40) / 10, [14, 24, 34])
    assert {row.path for row in rows} == {""}


def test_frames_are_not_held_and_views_only_of_one_window():
    pictures, views = [], []

    def camera():
        for number in range(300):
            picture = Image.new("RGB", (64, 48))
            pictures.append(weakref.ref(picture))
            yield TimedFrame(number / 25, picture)
            del picture
            assert sum(each() is not None for each in pictures) <= 2

    import fullstride.deploy.streaming as module

    view = module.test_view

    def watched(picture, pre):
        pixels = view(picture, pre)
        views.append(weakref.ref(pixels))
        assert sum(each() is not None for each in views) <= SPAN + 1
        return pixels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "test_view", watched)
        assert sum(1 for _ in windows(camera(), PRE, 1.0)) == 12
    assert len(views) == 300


BREAKS = {"cut": lambda data: data[: len(data) // 2]}
BREAKS["damaged"] = lambda data: data[: len(data) // 2] + bytes(200) + data[len(data) // 2 + 200 :]


@pytest.mark.parametrize("how", BREAKS)
def test_a_video_that_breaks_yields_the_rows_before_and_then_the_reason(bundle, how, tmp_path):
    whole = write_video(tmp_path / "whole.mkv", 200)
    path = tmp_path / "broken.mkv"
    path.write_bytes(BREAKS[how](whole.read_bytes()))
    rows, streamed = [], stream(bundle, path, every_s=0.5)
    with pytest.raises(UnreadableImage) as caught:
        rows += iter(lambda: next(streamed), None)  # as far as it goes
    assert len(caught.value.reason.splitlines()) == 1
    same = stream(bundle, whole, every_s=0.5)
    assert 2 <= len(rows) < 15
    for row, other in zip(rows, same, strict=False):
        assert (row.start_s, row.end_s) == (other.start_s, other.end_s)
        assert by_class(bundle, row) == pytest.approx(by_class(bundle, other), abs=1e-6)


def test_what_cannot_be_streamed_is_said_in_one_line(bundle, tmp_path):
    from bundles import COLOUR, make_bundle

    path = write_video(tmp_path / "a.mkv", 20, **LOSSLESS)
    with pytest.raises(ValueError, match="takes images"):
        next(stream(make_bundle("genet_tiny", COLOUR), path))
    for every_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 0"):
            next(stream(bundle, path, every_s=every_s))
    for top in (0, -1):
        with pytest.raises(ValueError, match=f"top {top}: use 1 or more"):
            next(stream(bundle, path, top=top))
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    for wrong, part in (
        (write_frames(tmp_path / "frames"), "no times"),
        (tmp_path / "a.png", "picture"),
        (tmp_path / "gone.mkv", "No such file"),
        (write_video(tmp_path / "one.mkv", 1, **LOSSLESS), "one frame"),
    ):
        with pytest.raises(UnreadableImage, match=part):
            list(stream(bundle, wrong))


# ---- the command


@pytest.fixture
def command(bundle, monkeypatch, capsys):
    """Runs `predict --stream` of the bundle: exit code, and lines of output and of errors."""
    monkeypatch.setattr("fullstride.deploy.predict.open_model", lambda *_, **__: bundle)

    def run(*words: object) -> tuple[int, list[str], list[str]]:
        code = cli.run(["predict", "run", "--stream", "--device", "cpu", *map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err.splitlines()

    return run


def test_the_command_prints_a_line_of_json_for_each_window_of_each_video(command, bundle, tmp_path):
    paths = [write_video(tmp_path / f"{n}.mkv", 40, seed=n, **LOSSLESS) for n in range(2)]
    code, lines, errors = command(tmp_path, "--every-s", 0.5, "--json", "--top", 2)
    assert (code, errors) == (0, [])
    rows = [json.loads(line) for line in lines]
    expected = [row for path in paths for row in stream(bundle, path, every_s=0.5, top=2)]
    assert [row["path"] for row in rows] == [str(paths[0])] * 3 + [str(paths[1])] * 3
    for row, same in zip(rows, expected, strict=True):
        assert {*row} == {"path", "start_s", "end_s", "guesses", "unreadable"}
        assert (row["start_s"], row["end_s"]) == (same.start_s, same.end_s)
        assert [each["label"] for each in row["guesses"]] == [each.label for each in same.guesses]
        assert len(row["guesses"]) == 2
    text = command(paths[0], "--every-s", 0.5, "--top", 1)[1]
    label = expected[0].guesses[0].label
    assert text[0].startswith(f"{paths[0]}: 0.00 to 0.56 s: {label} ")


def test_the_command_names_a_video_that_breaks_and_goes_on_with_the_next_one(command, tmp_path):
    data = write_video(tmp_path / "b.mkv", 200).read_bytes()
    (tmp_path / "a.mkv").write_bytes(BREAKS["cut"](data))
    code, lines, errors = command(tmp_path / "a.mkv", tmp_path / "b.mkv", "--json")
    rows = [json.loads(line) for line in lines]
    by_path = {name: [r for r in rows if r["path"].endswith(name)] for name in ("a.mkv", "b.mkv")}
    assert code == 0
    assert 2 < len(by_path["a.mkv"]) < len(by_path["b.mkv"]) == 8
    assert "cut short" in by_path["a.mkv"][-1]["unreadable"]
    assert len(errors) == 1
    assert "a.mkv" in errors[0]
    (tmp_path / "c.mkv").write_bytes(b"nothing")
    code, lines, errors = command(tmp_path / "c.mkv")
    assert (code, lines) == (2, [])
    assert "none of the videos" in errors[-1]


@pytest.fixture
def process(bundle, tmp_path):
    """Starts the command in a process of its own, on a video of 40 seconds."""
    bundle.save(tmp_path / "bundle")
    video = write_video(tmp_path / "a.mp4", 1000)
    words = [sys.executable, "-m", "fullstride", "predict", tmp_path / "bundle", video]
    words += ["--stream", "--every-s", "0.04", "--json", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        [*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    yield started
    started.kill()
    started.communicate()


@pytest.mark.slow
def test_a_reader_of_a_pipe_gets_lines_as_they_are_computed_and_may_leave(process):
    assert json.loads(process.stdout.readline())["end_s"] == pytest.approx(0.56)
    assert process.poll() is None  # there are 985 rows more
    process.stdout.close()
    assert process.wait(30) == 141
    assert process.stderr.read() == b""


@pytest.mark.slow
def test_an_interrupt_ends_a_stream_in_one_line(process):
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.decode().splitlines() == ["fullstride: interrupted"]
    assert all(json.loads(line) for line in out.splitlines())
