"""A network says how far each pixel is, beside what its row says without a network."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pixels import picture_with_maps, write_pictures

from fullstride import cli, tasks
from fullstride.nets import zoo
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.depth import OUTSIDE, SAMPLES, Depth, DepthScore, fit_priors
from fullstride.train import run
from fullstride.train.batches import check_task
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import RECIPES
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import score_bundle

SHORT = Recipe(
    epochs=10,
    batch_size=8,
    lr=4e-3,
    optimizer="adamw",
    warmup_epochs=0,
    ema_decay=0.8,
    resolution=64,
    task_options={"head_width": 16},
)


@pytest.fixture(scope="module")
def floors(tmp_path_factory):
    folder = write_pictures(tmp_path_factory.mktemp("floors"), {"train": 32, "val": 8, "test": 8})
    return Depth().open_data(str(folder))


@pytest.fixture(scope="module")
def trained(floors, tmp_path_factory):
    folder = tmp_path_factory.mktemp("depth") / "run"
    return folder, list(
        run.train(folder, "resnet_rs_tiny", floors, SHORT, RunOptions(task=Depth.name))
    )


def depths(seed, invalid=True):
    rng = np.random.default_rng(seed)
    true = rng.uniform(0.5, 8, (4, 10, 12)).astype(np.float32)
    if invalid:
        true[:, :, :3] = 0
        true[:, 8:] = OUTSIDE
    predicted = true.clip(0.5) * np.exp(rng.normal(0, 0.3, true.shape))
    return torch.from_numpy(predicted.astype(np.float32))[:, None], torch.from_numpy(true)


@pytest.mark.parametrize("max_depth", [0.0, 6.0])
def test_scores_are_those_of_the_valid_pixels_of_the_set_counted_one_by_one(max_depth):
    predicted, true = depths(0)
    score, other = (DepthScore(max_depth=max_depth) for _ in range(2))
    score.update(predicted[:3], true[:3])
    other.update(predicted[3:], true[3:])
    score.merge(other)
    values = score.compute()
    pairs = [
        (d, g)
        for d, g in zip(predicted.flatten().tolist(), true.flatten().tolist(), strict=True)
        if g > 0 and not 0 < max_depth < g
    ]
    for power in (1, 2, 3):
        share = np.mean([max(d / g, g / d) < 1.25**power for d, g in pairs])
        assert values[f"delta{power}"] == pytest.approx(100 * share)
    assert values["mae"] == pytest.approx(np.mean([abs(d - g) for d, g in pairs]))
    assert values["rmse"] == pytest.approx(np.mean([(d - g) ** 2 for d, g in pairs]) ** 0.5)
    assert values["loss"] == pytest.approx(np.mean([abs(np.log(d / g)) for d, g in pairs]))
    assert "delta1_rows" not in values


def test_priors_are_the_medians_of_the_training_and_are_scored_by_the_rows_of_pictures(floors):
    constant, by_row = fit_priors(floors.train)
    maps = np.stack([each.read() for each in floors.train.targets])
    assert constant == pytest.approx(np.median(maps), rel=0.05)
    rows = np.median(maps, axis=(0, 2))  # 48, of which the priors sample 64
    expected = rows[((np.arange(SAMPLES) + 0.5) * 48 / SAMPLES).astype(int)]
    np.testing.assert_allclose(by_row, expected, rtol=0.05)
    # pictures of 64 x 48 have 48 rows of a view of 64
    view = Depth().test_view(Preprocessing(resolution=64, fit="pad"))
    picture, target = floors.test.picture(0), floors.test.targets[0]
    _, true = view(picture, target, np.random.default_rng(0))
    score = DepthScore(constant, by_row)
    score.update(torch.ones(1, 1, 64, 64), torch.from_numpy(true)[None])
    values = score.compute()
    metres = target.read()
    for name, prior in (
        ("constant", np.full(metres.shape, constant)),
        ("rows", np.repeat(rows[:, None], 64, 1)),
    ):
        share = (np.maximum(prior / metres, metres / prior) < 1.25).mean()
        assert values[f"delta1_{name}"] == pytest.approx(100 * share, abs=3)
    assert values["delta1_rows"] > values["delta1_constant"]


def test_priors_skip_what_is_too_far_and_maps_without_depths_are_refused(floors, tmp_path):
    assert max(fit_priors(floors.train, max_depth=2)[1]) <= 2
    folder = write_pictures(tmp_path, {"train": 3, "val": 1, "test": 1}, (32, 32))
    for path in (folder / "depth" / "train").iterdir():
        Image.fromarray(np.zeros((32, 32), np.uint16)).save(path)
    with pytest.raises(ValueError, match="no training image has a depth"):
        Depth().for_data(Depth().open_data(str(folder)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_loss_is_the_mean_ratio_of_valid_pixels_in_logarithms(dtype):
    predicted, true = depths(1)
    logs = predicted.log().to(dtype).requires_grad_()
    loss = Depth(max_depth=5).loss(logs, true)
    valid = (true > 0) & (true <= 5)
    expected = (logs.float()[:, 0].exp() / true)[valid].log().abs().mean()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    assert (logs.grad[:, 0][~valid] == 0).all()
    nothing = Depth().loss(logs.detach().requires_grad_(), torch.zeros_like(true))
    nothing.backward()
    assert nothing.item() == 0


def test_an_untrained_network_predicts_the_constant(floors):
    task = Depth(head_width=16).for_data(floors)
    net = zoo.create("resnet_rs_tiny", classes=1, resolution=64).eval()
    net.task_head = task.head(net).eval()
    with torch.inference_mode():
        metres = net(torch.zeros(1, 3, 64, 64))
    assert metres.shape == (1, 1, 64, 64)
    torch.testing.assert_close(metres, torch.full_like(metres, task.constant), rtol=0.2, atol=0)


def test_training_is_better_than_both_priors(trained):
    folder, rows = trained
    scores = tasks.load(folder).scores["test"]
    assert scores["delta1"] > scores["delta1_rows"] + 5
    assert scores["delta1_rows"] > scores["delta1_constant"]
    assert {"val/delta1_rows", "val/delta1_constant"} <= {*rows[-1]}


def test_the_command_prints_both_priors(trained, capsys):
    folder, _ = trained
    assert cli.run(["validate", str(folder)]) == 0
    scores, lines = tasks.load(folder).scores["test"], capsys.readouterr().out
    for name in ("constant", "rows"):
        assert f"{scores[f'delta1_{name}']:.2f} %" in lines


def test_a_run_resumes_bit_for_bit_and_its_bundle_has_the_priors(trained, floors, tmp_path):
    folder, _ = trained
    how = RunOptions(task=Depth.name, checkpoint_every_steps=3)
    started = run.train(tmp_path / "run", "resnet_rs_tiny", floors, SHORT, how)
    next(started)
    started.close()
    list(run.train(tmp_path / "run", "resnet_rs_tiny", floors, SHORT, RunOptions(task=Depth.name)))
    whole, resumed = (tasks.load(each) for each in (folder, tmp_path / "run"))
    state = resumed.net.state_dict()
    assert all(torch.equal(v, state[name]) for name, v in whole.net.state_dict().items())
    assert whole.task_state == resumed.task_state
    assert len(whole.task_state["rows"]) == SAMPLES
    again = score_bundle(whole, floors.test, "cpu").scores
    assert again == pytest.approx(whole.scores["test"], rel=1e-4)
    saved = json.loads((folder / "scores.json").read_text())["splits"]["test"]["scores"]
    assert saved["delta1_rows"] == again["delta1_rows"]


def test_predictions_are_depths_of_the_picture_and_maps_in_millimetres(floors):
    task, pre = Depth(), Preprocessing(resolution=64, fit="pad")
    _, _, metres = picture_with_maps(0, (64, 48))
    outputs = F.pad(torch.from_numpy(metres)[None, None].float(), (0, 0, 0, 16), value=99.0)
    ((depth,),) = task.decode(outputs, ("depth",), 1)
    assert depth.max_m == 99
    (placed,) = task.place((depth,), (128, 96), pre)
    assert placed.map.shape == (96, 128)
    assert (placed.min_m, placed.max_m) == pytest.approx((0.3, metres.max()))
    image = task.maps((placed,))
    assert image.mode == "I;16"
    np.testing.assert_array_equal(np.asarray(image)[::2, ::2], np.rint(1000 * metres))
    drawn = np.asarray(task.draw(Image.new("RGB", (128, 96)), (placed,), ("depth",)))
    near, far = drawn[placed.map == placed.min_m], drawn[placed.map == placed.max_m]
    assert near.sum(1).min() > far.sum(1).max()
    assert f"0.30 to {metres.max():.2f} m" in str(placed)


def test_files_agree_where_nearly_all_depths_are_within_a_hundredth():
    expected = torch.full((3, 1, 20, 20), 2.0)
    outputs = expected.clone()
    outputs[1] *= 1.02
    outputs[2, 0, 0, :3] *= 2
    assert Depth().agree(outputs, expected).tolist() == [True, False, True]


def test_the_recipe_of_the_paper_is_for_this_task(floors):
    recipe = RECIPES["resnet_rs_nyu_depth"]
    assert (recipe.resolution, recipe.batch_size) == (640, 64)
    assert 10_000 <= recipe.steps <= 40_000
    task = Depth().with_options(recipe)
    assert (task.max_depth, task.head_width, task.jitter) == (10, 256, (0.5, 2.0))
    segment = tasks.find_task("segment")
    check_task(task, recipe)
    with pytest.raises(ValueError, match="max_depth: the task segment has the options head_width"):
        check_task(segment, SHORT.with_task_options({"max_depth": 10.0}))
