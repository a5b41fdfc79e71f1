"""A network says what each pixel shows, and is trained and scored by the pixels with a class."""

import json
from dataclasses import replace

import numpy as np
import pixel_processes
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pixels import write_pictures
from sklearn.metrics import confusion_matrix, jaccard_score
from torchruns import main_in_two

from fullstride import cli, tasks
from fullstride.data.readers.masks import IGNORED
from fullstride.nets import zoo
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.dense import PixelHead, class_colours
from fullstride.tasks.segment import Segment, SegmentScore
from fullstride.train import run, run_folder
from fullstride.train.batches import BatchOptions, training_batches
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import RECIPES
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import score_bundle

SHORT = Recipe(
    epochs=8,
    batch_size=8,
    lr=4e-3,
    optimizer="adamw",
    warmup_epochs=0,
    ema_decay=0.8,
    resolution=64,
    task_options={"head_width": 16, "jitter": (0.8, 1.3)},
)


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    folder = write_pictures(tmp_path_factory.mktemp("boxes"), {"train": 32, "val": 8, "test": 8})
    return Segment().open_data(str(folder))


@pytest.fixture(scope="module")
def trained(boxes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("segment") / "run"
    return folder, list(
        run.train(folder, "resnet_rs_tiny", boxes, SHORT, RunOptions(task=Segment.name))
    )


def logits_and_classes(n=6, k=5, side=12, absent=()):
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(0, k, (n, side, side), generator=generator)
    for each in absent:
        classes[classes == each] = 0
    hints = 1.5 * F.one_hot(classes, k).permute(0, 3, 1, 2)
    classes[:, :2] = IGNORED
    logits = torch.randn(n, k, side, side, generator=generator) + hints
    return logits, classes.to(torch.uint8)


@pytest.mark.parametrize("absent", [(), (3,)])
def test_the_ious_are_those_of_scikit_learn_over_the_whole_set_in_any_batches(absent):
    logits, classes = logits_and_classes(absent=absent)
    logits[:, list(absent)] = -100
    parts = [SegmentScore(), SegmentScore(), SegmentScore()]
    for start, score in ((0, parts[0]), (2, parts[0]), (4, parts[1])):
        score.update(logits[start : start + 2], classes[start : start + 2])
    parts[2].merge(parts[0])  # of a process without images
    parts[2].merge(parts[1])
    values = parts[2].compute()
    valid = classes != IGNORED
    true, predicted = classes[valid].numpy(), logits.argmax(1)[valid].numpy()
    present = [k for k in range(5) if k not in absent]
    ious = jaccard_score(true, predicted, labels=present, average=None)
    each = dict(zip(present, ious, strict=True))
    assert values["miou"] == pytest.approx(100 * np.mean([*each.values()]), rel=1e-6)
    assert values["absent_classes"] == len(absent)
    np.testing.assert_array_equal(
        parts[2].counts_kk, confusion_matrix(true, predicted, labels=range(5))
    )
    assert values["pixel_accuracy"] == pytest.approx(100 * (true == predicted).mean(), rel=1e-6)
    most = np.full_like(true, np.bincount(true).argmax())
    classes_of_set = [*set(true.tolist())]
    constant = jaccard_score(true, most, labels=classes_of_set, average="macro")
    assert values["miou_constant"] == pytest.approx(100 * constant, rel=1e-6)
    loss = F.cross_entropy(logits, classes.long(), ignore_index=IGNORED)
    assert values["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for k, row in enumerate(parts[2].by_class("abcde")):
        assert row.iou == (pytest.approx(100 * each[k]) if k in each else None)


def test_images_without_a_class_cannot_be_scored_but_trained_on():
    score = SegmentScore()
    nothing = torch.full((2, 8, 8), IGNORED, dtype=torch.uint8)
    score.update(torch.zeros(2, 3, 8, 8), nothing)
    with pytest.raises(ValueError, match="a pixel with a class"):
        score.compute()
    outputs = torch.zeros(2, 3, 2, 2, requires_grad=True)
    loss = Segment().loss(outputs, nothing)
    loss.backward()
    assert loss.item() == 0
    assert (outputs.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_loss_is_the_mean_over_pixels_with_a_class(dtype):
    logits, classes = logits_and_classes()
    small = logits[..., ::4, ::4].to(dtype)
    loss = Segment().loss(small, classes)
    large = F.interpolate(small.float(), (12, 12), mode="bilinear", align_corners=False)
    expected = F.cross_entropy(large, classes.long(), ignore_index=IGNORED)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("model", ["resnet_rs_tiny", "tresnet_tiny", "genet_tiny"])
def test_the_head_sums_all_levels_at_stride_4_and_ends_at_the_size_of_the_input(model):
    net = zoo.create(model, classes=7, resolution=64).eval()
    head = Segment(head_width=16).head(net).eval()
    with torch.inference_mode():
        maps = net.features(torch.randn(2, 3, 64, 96))
        levels = head.pyramid(maps)
        total = sum(
            F.interpolate(each, (16, 24), mode="bilinear", align_corners=False) for each in levels
        )
        small = head.output(head.convolutions(total))
        outputs = head(maps)
        assert len(levels) == 5
        assert small.shape == (2, 7, 16, 24)
        assert outputs.shape == (2, 7, 64, 96)
        large = F.interpolate(small, (64, 96), mode="bilinear", align_corners=False)
        torch.testing.assert_close(outputs, large)
        assert head.train()(maps).shape == small.shape
    kinds = [type(each) for each in head.convolutions.modules()]
    assert kinds.count(torch.nn.Conv2d) == kinds.count(torch.nn.BatchNorm2d) == 3


def test_the_network_exports_with_any_batch_and_any_sides():
    net = zoo.create("resnet_rs_tiny", classes=3, resolution=64)
    net.task_head = PixelHead(net.channels, net.strides, 3, width=8)
    n, h, w = torch.export.Dim("n"), torch.export.Dim("h", min=2), torch.export.Dim("w", min=2)
    x, shapes = torch.randn(2, 3, 160, 288), ({0: n, 2: 32 * h, 3: 32 * w},)
    exported = torch.export.export(net.eval(), (x,), dynamic_shapes=shapes).module()
    other = torch.randn(1, 3, 192, 160)
    torch.testing.assert_close(exported(other), net(other), rtol=1e-4, atol=1e-4)


def test_training_finds_boxes_that_no_constant_finds(trained, boxes):
    folder, rows = trained
    scores = json.loads((folder / "scores.json").read_text())["splits"]["test"]
    background = 100 * np.mean([(each.read() == 0).mean() for each in boxes.test.targets])
    assert scores["scores"]["pixel_accuracy"] > background + 5
    assert scores["scores"]["miou"] > background / 2 + 15  # the IoU of the box would be 0
    assert [row["name"] for row in scores["by_class"]] == ["floor", "box"]
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_run_resumes_bit_for_bit_and_its_bundle_has_the_scores(trained, boxes, tmp_path):
    folder, _ = trained
    how = RunOptions(task=Segment.name, checkpoint_every_steps=3)
    started = run.train(tmp_path / "run", "resnet_rs_tiny", boxes, SHORT, how)
    next(started)
    started.close()
    list(run.train(tmp_path / "run", "resnet_rs_tiny", boxes, SHORT, RunOptions(task=Segment.name)))
    whole, resumed = (tasks.load(each) for each in (folder, tmp_path / "run"))
    state = resumed.net.state_dict()
    assert all(torch.equal(v, state[name]) for name, v in whole.net.state_dict().items())
    assert whole.task_state == {"head_width": 16}
    scores = score_bundle(whole, boxes.test, "cpu").scores
    saved = json.loads((folder / "scores.json").read_text())["splits"]["test"]["scores"]
    assert scores["miou"] == pytest.approx(saved["miou"], abs=0.05)
    assert run_folder.final_scores(folder, "val", Segment.metric)


def test_the_command_and_the_report_have_the_baseline_and_the_scores_of_classes(trained, capsys):
    folder, _ = trained
    assert cli.run(["validate", str(folder), "--per-class"]) == 0
    lines = capsys.readouterr().out
    scores = tasks.load(folder).scores["test"]
    assert f"{scores['miou']:.2f} %" in lines
    assert f"{scores['miou_constant']:.2f} %" in lines
    assert "IoU" in lines
    page = folder.parent / "page.html"
    assert cli.run(["report", str(folder), "--out", str(page)]) == 0
    assert f"{scores['miou_constant']:.2f} %" in page.read_text()
    assert ">predicted pixels<" in page.read_text()


def test_a_view_of_training_is_a_function_of_seed_epoch_and_sample(boxes):
    pre = Preprocessing(resolution=64, fit="pad")
    task = Segment().with_options(SHORT)

    def views(workers):
        batches = training_batches(boxes, task, BatchOptions(pre, workers=workers), SHORT)
        both = [next(batches.epoch(1)), next(batches.epoch(2))]
        batches.close()
        return both

    here, there = views(0), views(2)
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.targets, b.targets)
        assert a.targets.dtype == torch.uint8
    assert not torch.equal(here[0].targets, here[1].targets)


def test_broken_masks_are_skipped_by_name_and_the_rest_goes_on(tmp_path):
    folder = write_pictures(tmp_path / "data", {"train": 10, "val": 2, "test": 2}, (32, 32))
    Image.fromarray(np.full((32, 32), 9, np.uint8)).save(folder / "masks" / "train" / "003.png")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "masks" / "test" / "001.png")
    data = Segment().open_data(str(folder))
    recipe = replace(SHORT, epochs=1, resolution=32, batch_size=4)
    rows = list(
        run.train(tmp_path / "run", "resnet_rs_tiny", data, recipe, RunOptions(task=Segment.name))
    )
    skipped = rows[-1]["skipped"]
    assert list(skipped) == ["train/003.png"]
    assert "9" in skipped["train/003.png"]
    scores = tasks.load(tmp_path / "run").scores["test"]
    assert scores["images"] == 1
    assert "8 x 8" in scores["skipped"]["test/001.png"]


def test_predictions_are_regions_of_the_picture_without_the_padding_of_the_view():
    pre = Preprocessing(resolution=64, fit="pad")
    logits = torch.zeros(1, 3, 64, 64)
    logits[0, 1, :, :32] = 1  # the left half
    logits[0, 2, 32:] = 2  # all of the padding
    task = Segment()
    ((regions,),) = task.decode(logits, ("a", "b", "c"), 5)
    assert regions.percent == {"c": 50, "a": 25, "b": 25}
    (placed,) = task.place((regions,), (128, 64), pre)
    assert placed.map.shape == (64, 128)
    assert placed.percent == {"a": 50, "b": 50}
    assert str(placed) == "a 50.0 %, b 50.0 %"
    image = task.maps((placed,))
    assert image.mode == "P"
    np.testing.assert_array_equal(np.asarray(image), placed.map)
    black = Image.new("RGB", (128, 64))
    drawn = np.asarray(task.draw(black, (placed,), ("a", "b", "c")))
    assert drawn.shape == (64, 128, 3)
    assert len(np.unique(class_colours(), axis=0)) == 256
    assert (drawn[0, 0] > 0).any()
    assert (drawn[0, -1] == 0).all()  # class a is black


@pytest.mark.parametrize("name", ["resnet_rs_voc_seg", "resnet_rs_nyu_depth"])
def test_a_recipe_of_the_paper_trains_its_task(name, boxes, tmp_path):
    recipe = replace(RECIPES[name], steps=2, batch_size=8, resolution=32, warmup_epochs=0)
    recipe = recipe.with_task_options({"head_width": 8})
    task = tasks.find_task("depth" if "depth" in name else "segment")
    data = task.open_data(boxes.where)
    (row,) = run.train(tmp_path / "run", "resnet_rs_tiny", data, recipe, RunOptions(task=task.name))
    assert np.isfinite(row["loss"])
    assert tasks.load(tmp_path / "run").preprocessing.fit == "pad"


def test_the_recipe_of_the_paper_is_for_this_task_alone(boxes):
    recipe = RECIPES["resnet_rs_voc_seg"]
    assert (recipe.resolution, recipe.batch_size) == (512, 64)
    assert recipe.task_options == {"jitter": (0.5, 2.0)}
    assert recipe.weight_decay == 1e-4
    assert recipe.schedule == "cosine"
    classify = tasks.find_task("classify")
    with pytest.raises(ValueError, match="recipe.task_options jitter: the task classify"):
        training_batches(
            classify.open_data("digits"), classify, BatchOptions(Preprocessing()), recipe
        )


@pytest.mark.slow
def test_two_processes_have_the_losses_the_scores_and_the_weights_of_one(tmp_path):
    pixel_processes.main(str(tmp_path / "one"))
    main_in_two(pixel_processes.main, tmp_path / "two")
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one", "two"))
    for (losses, scores, weights), expected in zip(two, one, strict=True):
        assert losses == pytest.approx(expected[0], rel=1e-6)
        assert scores == pytest.approx(expected[1], rel=1e-5)
        assert weights == pytest.approx(expected[2], rel=1e-6)
        assert scores["images"] == 5
