"""The task video: clips are trained, resumed and scored; many views are those of the slow way."""

import json
import math
from dataclasses import replace

import clip_processes
import numpy as np
import pytest
import torch
from PIL import Image
from torchruns import main_in_two

pytest.importorskip("sklearn")
pytest.importorskip("skimage")
from fullstride import cli, tasks
from fullstride.data.dataset import Images
from fullstride.data.loader import Batches, LoaderOptions
from fullstride.examples import write_motion
from fullstride.nets import families, zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.video import Video, views_of
from fullstride.train import run
from fullstride.train.batches import BatchOptions, mix, training_batches
from fullstride.train.prepare import initial_network
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import find_recipe, scratch, video
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import score_bundle

NET = "resnet3d_rs_tiny"
PRE = Preprocessing(resolution=32)
SHORT = Recipe(
    epochs=2,
    batch_size=4,
    lr=0.05,
    warmup_epochs=0.5,
    ema_decay=0.9,
    resolution=24,
    task_options={"frames": 4},
)
FLAGS = ["--epochs", "1", "--batch-size", "4", "--resolution", "24", "--task.frames", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Clips of 8 frames, 32 x 32 pixels."""
    where = tmp_path_factory.mktemp("clips") / "motion"
    write_motion(where, {"train": 12, "val": 6, "test": 6}, 32, frames=8)
    return where


@pytest.fixture(scope="module")
def data(folder):
    return Video().open_data(str(folder))


def varied(net: torch.nn.Module) -> torch.nn.Module:
    """With gains and statistics as of a trained network, so that clips have other outputs."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in [*net.named_parameters(), *net.named_buffers()]:
            if name.endswith(("norm.weight", "running_var")):
                value.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith(("norm.bias", "running_mean")):
                value.uniform_(-0.5, 0.5, generator=generator)
        head = net.get_submodule(net.classifier)
        head.weight.normal_(0, 0.5, generator=generator)
    return net.eval()


def make_bundle(pre: Preprocessing, **more) -> Bundle:
    torch.manual_seed(0)
    net = varied(zoo.create(NET, classes=4))
    classes = ("down", "left", "right", "up")
    return Bundle(
        net, name="toy", classes=classes, preprocessing=pre, task="video", mirror=False, **more
    )


def test_the_commands_train_report_and_validate_clips_and_name_the_unreadable(
    folder, tmp_path, capsys
):
    broken = folder.parent / "broken"
    write_motion(broken, {"train": 8, "val": 4, "test": 4}, 24, frames=5)
    next((broken / "test" / "up").glob("*/001.png")).write_bytes(b"no picture")
    out = str(tmp_path / "run")
    words = ["train", str(broken), "--task", "video", "--model", NET, "--out", out, *FLAGS]
    assert cli.run(words) == 0, capsys.readouterr().err
    capsys.readouterr()
    bundle = tasks.load(out)
    assert (bundle.task, bundle.preprocessing.frames, bundle.preprocessing.frame_stride) == (
        "video",
        4,
        2,
    )
    assert bundle.net.spec.frames == 4
    assert not bundle.mirror
    for more in ([], ["--views", "3x3", "--clip-starts", "slowfast"]):
        assert cli.run(["validate", out, "--per-class", *more]) == 0
        printed = capsys.readouterr()
        assert "3 images" in printed.out
        assert "test/up/" in printed.err
    assert cli.run(["report", out, "--out", str(tmp_path / "page.html")]) == 0
    recipe = json.loads((tmp_path / "run" / "run.json").read_text())
    assert recipe["recipe_name"] == "video"


def test_a_run_resumes_bit_for_bit(data, tmp_path):
    recipe = replace(SHORT, mixup=0.2, cutmix=1.0)
    rows = list(run.train(tmp_path / "whole", NET, data, recipe, RunOptions(task=Video.name)))
    assert len(rows) == 2
    started = run.train(
        tmp_path / "run", NET, data, recipe, RunOptions(task=Video.name, checkpoint_every_steps=2)
    )
    next(started)
    started.close()
    list(run.train(tmp_path / "run", NET, data, recipe, RunOptions(task=Video.name)))
    whole, resumed = (tasks.load(tmp_path / name) for name in ("whole", "run"))
    state = resumed.net.state_dict()
    assert all(torch.equal(v, state[name]) for name, v in whole.net.state_dict().items())


def test_frozen_stages_stay_and_the_other_options_of_training_take_clips(data, tmp_path):
    recipe = replace(
        SHORT, freeze_stages=2, drop_path=0.2, drop_path_by="stage", dropout=0.2, layer_decay=0.9
    )
    recipe = replace(recipe, precise_bn=True, soup=2)
    before, weights = make_bundle(PRE), str(tmp_path / "bundle")
    before.save(weights)
    list(
        run.train(tmp_path / "run", NET, data, recipe, RunOptions(task=Video.name, weights=weights))
    )
    old, new = before.net.state_dict(), tasks.load(tmp_path / "run").net.state_dict()
    changed = {name.rpartition(".")[0] for name in old if not torch.equal(old[name], new[name])}
    assert not [name for name in changed if name.startswith(("stem", "stages.0", "stages.1"))]
    assert {"stages.3.0.branch.conv1.conv", "stages.3.0.branch.conv1.norm"} <= changed


@pytest.mark.parametrize(
    ("model", "task", "named"),
    [("genet_tiny", "video", "resnet3d"), (NET, "classify", "--task video")],
)
def test_a_network_that_takes_other_inputs_than_the_task_has_is_one_line(
    model, task, named, folder, tmp_path, capsys
):
    where = str(folder) if task == "video" else "digits"
    words = ["train", where, "--task", task, "--model", model, "--out", str(tmp_path / "run")]
    assert cli.run(words) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.strip().splitlines()[-1].startswith(f"fullstride: {model} takes")
    assert not (tmp_path / "run").exists()


def test_frames_and_strides_are_those_of_the_recipe_or_of_the_weights_or_the_networks_own(data):
    plain = replace(SHORT, task_options={})
    five = plain.with_task_options({"frames": 5})
    cases = [
        (plain, None, (8, 2)),
        (five.with_task_options({"frame_stride": 1}), None, (5, 1)),
        (plain, make_bundle(Preprocessing(resolution=24, frames=6, frame_stride=3)), (6, 3)),
        (
            five,
            make_bundle(Preprocessing(resolution=24, frames=6, frame_stride=3)),
            (5, 3),
        ),
    ]
    for recipe, start, expected in cases:
        net, pre = initial_network(NET, Video(), data, recipe, start)
        assert (pre.frames, pre.frame_stride) == expected
        assert net.spec.frames == expected[0]


def test_scale_jitter_reaches_the_view_and_fields_of_clips_are_refused_for_images(data):
    recipe = replace(SHORT, hflip_prob=0.7).with_task_options({"short_side": (24, 40)})
    task = Video().with_options(recipe)
    pre = Preprocessing(resolution=24, frames=4)
    batches = training_batches(data, task, BatchOptions(pre), recipe)
    assert batches.view.short_side == (24, 40)
    assert batches.view.augmentation.hflip_prob == 0  # left would be right
    assert next(batches.epoch(0)).x.shape == (4, 3, 4, 24, 24)
    with pytest.raises(ValueError, match=r"recipe.task_options .*short_side.* the task classify"):
        training_batches(data, tasks.find_task(), BatchOptions(pre), recipe)
    for wrong in (dict(decoder="opencv"), dict(grow_from=16), dict(train_resolution_ratio=0.5)):
        with pytest.raises(ValueError, match="leave them out|pillow"):
            training_batches(data, task, BatchOptions(pre), replace(recipe, **wrong))


def test_clips_are_mixed_as_each_of_their_frames():
    x = torch.rand(6, 3, 5, 12, 10)
    labels = torch.arange(6) % 4
    for how in (dict(mixup=0.4, cutmix=0.0), dict(mixup=0.0, cutmix=1.0)):
        mixed, targets = mix(x, labels, 4, **how, rng=np.random.default_rng(3))
        for frame in range(5):
            one, same = mix(x[:, :, frame], labels, 4, **how, rng=np.random.default_rng(3))
            assert torch.equal(mixed[:, :, frame], one)
            assert torch.equal(targets, same)
        assert not torch.equal(mixed, x)


def test_the_default_recipe_is_that_of_images_in_batches_of_at_most_64():
    assert video(1000) == scratch(1000)
    large, images = video(60_000), scratch(60_000)
    assert images.batch_size == 128
    assert (large.batch_size, large.epochs) == (64, images.epochs)
    assert large.lr == pytest.approx(images.lr / math.sqrt(2))  # as Muon's rate
    assert large.ema_decay**2 == pytest.approx(images.ema_decay)
    assert find_recipe("video") == video(1000)


def slow_views(folder, pre, clips, last_start) -> np.ndarray:
    """(clips * 3, T, side, side, 3) float64 in 0..1: each clip, each crop and each frame alone."""
    files = sorted(folder.iterdir())
    side = pre.resolution
    span = pre.frames * pre.frame_stride
    views = []
    for clip in range(clips):
        start = int((len(files) - span) * last_start(clip))
        for crop in range(3):
            frames = []
            for number in range(pre.frames):
                with Image.open(files[start + number * pre.frame_stride]) as file:
                    picture = file.convert("RGB")
                w, h = picture.size
                short = int(side / pre.crop)
                size = (short, h * short // w) if w < h else (w * short // h, short)
                picture = picture.resize(size, Image.Resampling.BILINEAR)
                left, top = (size[0] - side) // 2, (size[1] - side) // 2
                if w < h:
                    top = (0, top, size[1] - side)[crop]
                else:
                    left = (0, left, size[0] - side)[crop]
                frames.append(np.asarray(picture.crop((left, top, left + side, top + side))))
            views.append(np.stack(frames) / 255)
    return np.stack(views)


@pytest.mark.parametrize("size", [(44, 32), (30, 42)])
@pytest.mark.parametrize(
    ("starts", "last_start"),
    [("inclusive", lambda clip: clip / 9), ("slowfast", lambda clip: clip / 10)],
)
def test_thirty_views_are_the_mean_over_clips_and_crops_one_after_the_other(
    starts, last_start, size, tmp_path
):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(31):
            pixels = rng.integers(0, 256, (size[1] // 4, size[0] // 4, 3)).astype(np.uint8)
            frame = Image.fromarray(pixels).resize(size)
            frame.save(tmp_path / name / f"{number:02}.png")
    pre = Preprocessing(
        resolution=24, crop=1.0, frames=4, frame_stride=2, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)
    )
    bundle = make_bundle(pre, temperature=2.5)
    bundle.net.double()  # so that 1e-6 is of the averaging
    task = tasks.task_of(bundle)
    images = Images(("a", "b"), (1, 2), lambda name: None, lambda name: tmp_path / name)

    outputs = []
    net = bundle.net
    bundle = replace(bundle, net=Recorded(net, outputs))
    scores = score_bundle(bundle, images, "cpu", views=views_of("10x3", pre, starts)).scores
    assert all(len(batch) <= task.scoring_batch for batch in outputs)
    rows = []
    for name in ("a", "b"):
        views = slow_views(tmp_path / name, pre, 10, last_start)
        total = np.zeros(4)
        for view in views:
            x = (view - np.array(pre.mean)) / np.array(pre.std)
            with torch.inference_mode():
                logits = net(torch.from_numpy(x.transpose(3, 0, 1, 2)[None]))[0].numpy() / 2.5
            total += np.exp(logits) / np.exp(logits).sum()
        rows.append(total / 30)
    loss = -np.mean([np.log(rows[0][1]), np.log(rows[1][2])])
    assert scores["loss"] == pytest.approx(loss, rel=1e-6)
    assert scores["top1"] == 50 * ((rows[0].argmax() == 1) + (rows[1].argmax() == 2))
    centre = score_bundle(bundle, images, "cpu").scores["loss"]
    assert abs(centre - loss) > 1e-3


class Recorded(torch.nn.Module):
    """The network in float64, whose inputs are kept."""

    def __init__(self, net, inputs):
        super().__init__()
        self.net, self.inputs = net, inputs

    def forward(self, x):
        self.inputs.append(x)
        return self.net(x.double())


def test_views_that_are_none_are_one_line(data, capsys, tmp_path):
    pre = Preprocessing(resolution=24, frames=4)
    for wrong in ("30", "10x2", "10 x 3", "0x3", "-1x1"):
        with pytest.raises(ValueError, match="x3|1 clip or more"):
            views_of(wrong, pre)
    with pytest.raises(ValueError, match="images, not clips"):
        views_of("10x3", Preprocessing())


def test_a_video_that_cannot_be_read_is_named_in_the_scores_of_many_views(folder, tmp_path):
    pre = Preprocessing(resolution=24, frames=4)
    good = next((folder / "test" / "up").iterdir())
    files = {"good": good, "empty": tmp_path}
    images = Images(("good", "empty"), (3, 3), lambda name: None, files.__getitem__)
    result = score_bundle(make_bundle(pre), images, "cpu", views=views_of("2x1", pre))
    assert result.scores["images"] == 1
    assert [*result.skipped] == ["empty"]


def test_epochs_score_the_clip_in_the_middle(data):
    pre = Preprocessing(resolution=32, crop=1.0, frames=3, frame_stride=2)
    batch = next(Batches(data.test, Video().test_view(pre), LoaderOptions(batch=1)).epoch(0))
    files = sorted(data.test.source(0).iterdir())
    numbers = [1, 3, 5]  # of 8 frames, 1 before and 2 behind
    expected = np.stack([np.asarray(Image.open(files[number])) for number in numbers])
    pixels = torch.from_numpy(expected).permute(3, 0, 1, 2)[None] / 255
    mean, std = (torch.tensor(each).view(3, 1, 1, 1) for each in (pre.mean, pre.std))
    assert torch.allclose(batch.x, (pixels - mean) / std)


@pytest.mark.slow
def test_two_processes_have_the_losses_and_the_scores_of_one(tmp_path):
    clip_processes.main(str(tmp_path / "one"))
    main_in_two(clip_processes.main, tmp_path / "two")
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one", "two"))
    assert two[0] == pytest.approx(one[0], rel=1e-6)
    assert two[1] == pytest.approx(one[1], rel=1e-5)


def test_training_begins_with_weights_of_images_and_names_what_is_new(data, capsys):
    def start(name: str) -> Bundle:
        spec = families.SPECS[name]
        return Bundle(net=Network(spec), name=name, classes=("a",), preprocessing=PRE)

    images = start("resnet_rs_tiny")
    net, pre = initial_network(NET, Video(), data, SHORT, images)
    assert (pre.frames, pre.mean) == (4, PRE.mean)
    kernel = dict(net.named_parameters())["stages.2.0.branch.conv1.conv.weight"]
    theirs = dict(images.net.named_parameters())["stages.2.0.branch.conv1.conv.weight"]
    assert torch.equal(kernel[:, :, 1], theirs)
    assert not kernel[:, :, [0, 2]].any()
    assert "resnet_rs_tiny, of images" in capsys.readouterr().err
    with pytest.raises(ValueError, match="genet_tiny does not begin"):
        initial_network(NET, Video(), data, SHORT, start("genet_tiny"))
