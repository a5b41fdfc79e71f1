"""Does Faster R-CNN train, resume, and ship as the other detectors do?"""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from rectangles import write_rectangles
from torchruns import run_two

from fullstride import tasks
from fullstride.data.targets import open_boxes
from fullstride.deploy.export import export, make_reference
from fullstride.deploy.export_runs import images_for_ranges, images_to_compare
from fullstride.deploy.fold_batch_norm import fold_batch_norm
from fullstride.deploy.int8 import quantizable_layers, sensitivity
from fullstride.deploy.settings import ExportOptions
from fullstride.tasks.detect.faster_rcnn import FasterRcnnHead
from fullstride.tasks.detect.task import Detect
from fullstride.train import run
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import RECIPES
from fullstride.train.recipes.recipe import Recipe

SHORT = Recipe(
    epochs=3,
    batch_size=8,
    lr=2e-3,
    optimizer="adamw",
    warmup_epochs=0,
    ema_decay=0.5,
    resolution=64,
    task_options={"detector": "faster_rcnn", "head_width": 16, "head_convs": 1},
    clip_norm=5.0,
)
HOW = RunOptions(task=Detect.name)


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("boxes") / "data"
    return open_boxes(str(write_rectangles(folder, {"train": 24, "val": 5, "test": 5})))


@pytest.fixture(scope="module")
def trained(boxes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faster") / "run"
    return folder, list(run.train(folder, "resnet_rs_tiny", boxes, SHORT, HOW))


def test_the_loss_falls_and_the_bundle_knows_its_detector(trained, boxes):
    folder, rows = trained
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    bundle = tasks.load(folder)
    assert isinstance(bundle.net.task_head, FasterRcnnHead)
    assert bundle.task_state["detector"] == "faster_rcnn"
    assert bundle.preprocessing.fit == "pad"
    with torch.inference_mode():
        assert bundle.net.eval()(torch.zeros(1, 3, 64, 96)).shape == (1, 100, 6)


def test_a_run_resumes_bit_for_bit(trained, boxes, tmp_path):
    folder, _ = trained
    started = run.train(
        tmp_path / "run",
        "resnet_rs_tiny",
        boxes,
        SHORT,
        replace(HOW, checkpoint_every_steps=2),
    )
    next(started)
    started.close()
    list(run.train(tmp_path / "run", "resnet_rs_tiny", boxes, SHORT, HOW))
    whole, resumed = (tasks.load(each).net.state_dict() for each in (folder, tmp_path / "run"))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_the_recipe_of_the_paper_trains(boxes, tmp_path):
    recipe = RECIPES["resnet_rs_voc"]
    assert (recipe.resolution, recipe.batch_size) == (896, 32)
    assert recipe.task_options == {"jitter": (0.5, 2.0), "detector": "faster_rcnn"}
    assert (recipe.weight_decay, recipe.schedule) == (1e-4, "cosine")
    small = replace(recipe, steps=2, batch_size=4, resolution=64, warmup_epochs=0)
    small = small.with_task_options({"head_width": 8})
    (row,) = run.train(tmp_path / "run", "resnet_rs_tiny", boxes, small, HOW)
    assert np.isfinite(row["loss"])


@pytest.mark.parametrize("efficiency", ["plain_compiled", "auto"])
def test_steps_are_not_compiled(boxes, tmp_path, efficiency):
    with pytest.raises(ValueError, match=f"recipe.efficiency {efficiency}.*use plain"):
        next(
            run.train(
                tmp_path / "run",
                "resnet_rs_tiny",
                boxes,
                replace(SHORT, efficiency=efficiency),
                HOW,
            )
        )
    assert not (tmp_path / "run").exists()


def test_int8_is_judged_by_all_layers_and_finds_the_one_that_it_would_ruin(trained, boxes):
    net = fold_batch_norm(tasks.load(trained[0]).net)
    first, after = (net.get_submodule(f"stem.{name}.conv") for name in ("conv1", "conv2"))
    with torch.no_grad():
        for parameter in first.parameters():
            parameter[0] *= 3000
        after.get_parameter("weight")[:, 0] /= 3000
    pixels = np.stack([np.asarray(boxes.train.picture(index)) for index in range(4)])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    found = dict(sensitivity(net.eval(), images))
    assert {*quantizable_layers(net)} - {*found} == {"head.fc"}  # which boxes do not use
    assert max(found, key=lambda path: found[path]) == "stem.conv2.conv"
    assert net(images).shape == (4, 100, 6)


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_a_file_has_the_detections_of_pytorch_and_in_int8_float_where_proposals_are_chosen(
    trained, boxes, tmp_path
):
    """Both files have one ONNX graph, which takes half of the time."""
    bundle, path = tasks.load(trained[0]), tmp_path / "net.onnx"
    images = images_to_compare(replace(boxes, val=boxes.train), bundle)
    how = dict(
        calibration=images_for_ranges(boxes, 8),
        reference=make_reference(bundle, images, "pixels"),
    )
    options = ExportOptions(input_kind="pixels", max_drop=5)
    check = export(bundle, tmp_path / "float.onnx", images, options, **how).comparison
    assert check.same_class == len(images.pictures)
    assert check.relative_difference < 1e-3
    result = export(bundle, path, images, replace(options, precision="int8"), **how)
    assert result.metadata.float_layers == ()
    nodes = onnx.load(path).graph.node
    rounded = {each.output[0] for each in nodes if each.op_type == "DequantizeLinear"}
    in_int8 = {each.name.split("/")[0] for each in nodes if rounded.issuperset(each.input[:2])}
    layers = {f"net.{name}" for name in quantizable_layers(bundle.net)}
    assert layers - in_int8 == {"net.head.fc"}  # which boxes do not use
    products = [each for each in nodes if each.op_type == "MatMul" and "net." not in each.name]
    assert len(products) == 4 * 6  # rounds of suppression: on five levels, and of the detections
    assert not any(rounded.intersection(each.input) for each in products)
    ours, theirs = result.comparison.accuracy, result.comparison.file_accuracy
    assert ours is not None
    assert theirs is not None
    assert theirs > ours - 5 > 0


@pytest.mark.slow
def test_two_processes_train_and_score(boxes, tmp_path):
    words = ["train", boxes.where, "--task", "detect", "--model", "resnet_rs_tiny"]
    words += ["--task.detector", "faster_rcnn", "--task.head-width", "8", "--epochs", "1"]
    words += ["--task.head-convs", "1", "--resolution", "64", "--batch-size", "8"]
    status, _, errors = run_two(*words, "--out", str(tmp_path / "run"), "--lr", "0.01")
    assert status == 0, errors
    assert np.isfinite(tasks.load(tmp_path / "run").scores["test"]["ap50"])


def test_passes_of_a_batch_have_their_own_targets(boxes, tmp_path):
    recipe = replace(SHORT, steps=2, grad_accum_steps=4).with_task_options(
        {"box_augmentation": "ssd", "jitter": (0.6, 1.5)}
    )
    (row,) = run.train(tmp_path / "run", "resnet_rs_tiny", boxes, recipe, HOW)
    assert np.isfinite(row["loss"])
