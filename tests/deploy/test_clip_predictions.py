"""Predictions for videos: of files, folders of frames and arrays, by one clip or many views."""

import json
import sys

import numpy as np
import pytest
import torch
from clips import PRE, clip_bundle
from PIL import Image
from videos import drawn, write_frames, write_video

from fullstride import cli
from fullstride.data.transforms.crop import test_view, to_input
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export
from fullstride.deploy.formats import open_file
from fullstride.deploy.predict import predict
from fullstride.deploy.settings import ExportOptions

LOSSLESS = dict(codec="ffv1", pixels="bgr0")


@pytest.fixture(scope="module")
def bundle():
    return clip_bundle()


@pytest.fixture
def folder(tmp_path):
    """A video file, a folder of other frames, a folder with both kinds, and no videos."""
    root = tmp_path / "videos"
    root.mkdir()
    write_video(root / "b.mkv", 40, **LOSSLESS)
    write_frames(root / "a", 30, seed=1)
    (root / "more").mkdir()
    write_video(root / "more" / "c.mkv", 24, seed=2, **LOSSLESS)
    (root / "notes.txt").write_text("nothing")
    return root


def expected(bundle, frames: list[np.ndarray], numbers: list[int]) -> np.ndarray:
    """Probabilities for one clip, by hand."""
    view = np.stack([test_view(Image.fromarray(frames[number]), PRE) for number in numbers])
    with torch.inference_mode():
        logits = bundle.net(to_input(torch.from_numpy(view[None]), PRE))
    return (logits / bundle.temperature).softmax(1)[0].numpy()


def by_class(bundle, prediction) -> np.ndarray:
    values = {guess.label: guess.probability for guess in prediction.guesses}
    return np.array([values[name] for name in bundle.classes])


def test_the_clip_in_the_middle_of_each_video_is_predicted(bundle, folder):
    paths = [folder / "a", folder / "b.mkv"]
    found = [*predict(bundle, paths)]
    assert [row.path for row in found] == [str(path) for path in paths]
    for row, count, seed in zip(found, (30, 40), (1, 0), strict=True):
        frames, start = [*drawn(count, seed=seed)], (count - 15) // 2
        rows = expected(bundle, frames, [start + 2 * t for t in range(8)])
        assert by_class(bundle, row) == pytest.approx(rows, abs=1e-6)
        probabilities = [guess.probability for guess in row.guesses]
        assert probabilities == sorted(probabilities, reverse=True)
    differ = by_class(bundle, found[0]) - by_class(bundle, found[1])
    assert np.abs(differ).max() > 1e-3


def test_a_video_may_be_an_array_alone_in_a_list_or_in_an_array_of_several(bundle, folder):
    frames = np.stack([*drawn(30, seed=1)])
    (by_path,) = predict(bundle, str(folder / "a"))
    (one,) = predict(bundle, frames)
    assert one.path == ""
    assert one.guesses == by_path.guesses
    for several in ([frames, frames], np.stack([frames, frames])):
        for row in predict(bundle, several):
            assert by_class(bundle, row) == pytest.approx(by_class(bundle, one), abs=1e-6)
    (grey,) = predict(bundle, frames[..., :1])
    assert [grey] == [*predict(bundle, np.repeat(frames[..., :1], 3, -1))]


@pytest.mark.parametrize("batch", [2, 32])
@pytest.mark.parametrize("starts", ["inclusive", "slowfast"])
def test_many_views_are_predicted_by_the_mean_of_their_probabilities(bundle, folder, starts, batch):
    frames, last = [*drawn(40)], 40 - 16
    begin = [last * i // 2 if starts == "inclusive" else last * i // 3 for i in range(3)]
    kernel = Image.Resampling[PRE.kernel.upper()]
    small = [np.array(Image.fromarray(each).resize((42, 32), kernel)) for each in frames]
    crops = [
        np.stack([small[start + 2 * t][:, left : left + 32] for t in range(8)])
        for start in begin
        for left in (0, 5, 10)
    ]
    with torch.inference_mode():
        logits = bundle.net(to_input(torch.from_numpy(np.stack(crops)), PRE))
    rows = (logits / bundle.temperature).softmax(1).mean(0).numpy()
    found = predict(
        bundle,
        [folder / "b.mkv", folder / "gone.mp4", folder / "a"],
        views="3x3",
        clip_starts=starts,
        batch=batch,
    )
    first, missing, other = found
    assert by_class(bundle, first) == pytest.approx(rows, abs=1e-6)
    assert missing.unreadable
    assert other.guesses != first.guesses


@pytest.mark.parametrize("kind", [pytest.param("normalised", marks=pytest.mark.slow), "pixels"])
def test_files_of_networks_predict_videos_as_the_bundle_does(kind, bundle, folder, tmp_path):
    clips, path = ComparisonImages([np.stack([*drawn(8, (32, 32))])]), tmp_path / "net.onnx"
    export(bundle, path, clips, ExportOptions(input_kind=kind))
    for views in ("", "2x3"):
        (ours,) = predict(bundle, [folder / "b.mkv"], views=views)
        (theirs,) = predict(open_file(path), [folder / "b.mkv"], views=views)
        assert by_class(bundle, theirs) == pytest.approx(by_class(bundle, ours), abs=1e-5)


def test_the_mirror_image_of_a_clip_is_another_and_their_mean_is_that_of_both_orders(bundle):
    frames = np.stack([*drawn(20)])
    flipped = np.ascontiguousarray(frames[:, :, ::-1])
    (plain,), (both,) = predict(bundle, frames), predict(bundle, frames, tta="flip")
    (mirrored,) = predict(bundle, flipped, tta="flip")
    assert by_class(bundle, both) == pytest.approx(by_class(bundle, mirrored), abs=1e-6)
    assert np.abs(by_class(bundle, both) - by_class(bundle, plain)).max() > 1e-4


def test_what_is_no_video_is_named_with_the_reason_and_the_others_are_answered(bundle, folder):
    whole = write_video(folder / "long.mkv", 100, **LOSSLESS).read_bytes()
    (folder / "cut.mkv").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.mp4").touch()
    write_frames(folder / "one", 1)
    Image.new("RGB", (64, 48)).save(folder / "photo.png")
    names = ["cut.mkv", "empty.mp4", "one", "photo.png", "gone.mp4", "b.mkv"]
    *broken, good = predict(bundle, [folder / name for name in names])
    assert not good.unreadable
    reasons = [row.unreadable for row in broken]
    assert all(len(reason.splitlines()) == 1 for reason in reasons)
    for reason, part in zip(reasons[1:4], ("empty", "one frame", "picture"), strict=True):
        assert part in reason


def test_a_network_of_images_names_videos_and_refuses_views(folder):
    from bundles import COLOUR, make_bundle

    images = make_bundle("genet_tiny", COLOUR)
    (row,) = predict(images, [folder / "b.mkv"])
    assert "video" in row.unreadable
    with pytest.raises(ValueError, match="--views 10x3"):
        list(predict(images, [folder / "a" / "img0.png"], views="10x3"))


@pytest.mark.parametrize(
    "wrong",
    [Image.new("RGB", (32, 32)), np.zeros((8, 32, 32, 2), np.uint8), np.zeros((8, 32, 32, 3)), 7],
)
def test_what_is_no_video_in_memory_is_refused_in_one_line(bundle, wrong):
    with pytest.raises(ValueError, match=r"use .*\(T, H, W, C\)"):
        list(predict(bundle, [wrong]))
    (row,) = predict(bundle, np.zeros((1, 32, 32, 3), np.uint8))
    assert "one frame" in row.unreadable


# ---- the command


@pytest.fixture
def command(bundle, monkeypatch, capsys):
    """Runs `predict` of the bundle: exit code, lines of standard output, and of errors."""
    monkeypatch.setattr("fullstride.deploy.predict.open_model", lambda *_, **__: bundle)

    def run(*words: object) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr(sys, "argv", ["fullstride"])
        code = cli.run(["predict", "run", *map(str, words), "--device", "cpu"])
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err.splitlines()

    return run


def test_the_command_predicts_files_folders_of_frames_and_folders_of_videos(
    command, folder, bundle
):
    code, lines, errors = command(folder, "--json", "--top", 4)
    assert code == 0
    assert len(errors) == 1
    assert ".txt" in errors[0]
    rows = [json.loads(line) for line in lines]
    paths = [folder / "a", folder / "b.mkv", folder / "more" / "c.mkv"]
    assert [row["path"] for row in rows] == [str(path) for path in paths]
    for row, path in zip(rows, paths, strict=True):
        found = {each["label"]: each["probability"] for each in row["guesses"]}
        (same,) = predict(bundle, [path])
        assert found == pytest.approx(
            {each.label: each.probability for each in same.guesses}, abs=1e-6
        )
    assert len(command(folder / "a", "--json")[1]) == 1  # a folder of frames is one video
    many = command(folder / "a", "--views", "4x3", "--top", 4, "--json")[1]
    assert json.loads(many[0])["guesses"] != rows[0]["guesses"]


def test_the_command_skips_a_broken_video_with_its_reason(command, folder):
    (folder / "broken.mp4").write_bytes(b"no video")
    code, lines, errors = command(folder)
    assert (code, len(lines)) == (0, 3)
    assert any("broken.mp4" in line and "1 unreadable" in line for line in errors)
    code, lines, errors = command(folder / "broken.mp4")
    assert (code, lines) == (2, [])
    assert "none of the videos" in errors[-1]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--views", "10x2"), "1 or 3 crops"),
        (("--clip-starts", "slowfast"), "--views"),
        (("--out", "table"), "use --json"),
        (("--every-s", "2"), "--stream"),
        (("--stream", "--views", "10x3"), "--views"),
        (("--stream", "--clip-starts", "slowfast"), "--clip-starts"),
        (("--stream", "--out", "table"), "--out"),
        (("--stream", "--every-s", "0"), "above 0"),
    ],
)
def test_flags_that_do_not_fit_are_refused_in_one_line(command, folder, words, part):
    code, lines, errors = command(folder / "b.mkv", *words)
    assert (code, lines, len(errors)) == (2, [], 1)
    assert part in errors[0]
