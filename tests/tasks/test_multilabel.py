"""A network learns which of several labels an image has, and uses them like classes."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.loss import AsymmetricLossMultiLabel, BinaryCrossEntropy

from fullstride import cli, tasks
from fullstride.deploy.comparison import ComparisonImages, score_model
from fullstride.deploy.export import export
from fullstride.deploy.formats import open_file
from fullstride.deploy.predict import predict
from fullstride.deploy.settings import ExportOptions
from fullstride.report.training_progress import calibration_line
from fullstride.tasks.multilabel import MultiLabel, multilabel_focal
from fullstride.train import prepare, run, run_folder
from fullstride.train.batches import BatchOptions, training_batches
from fullstride.train.compute import SINGLE_PROCESS
from fullstride.train.loop import build_trainer
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS, RECIPES
from fullstride.train.scoring import score_bundle

SHORT = replace(DIGITS, epochs=2, warmup_epochs=0, batch_size=16, resolution=16, lr=1e-3)
LABELS = ("even", "small", "prime", "square")
DIGITS_OF = ({0, 2, 4, 6, 8}, {0, 1, 2, 3, 4}, {2, 3, 5, 7}, {0, 1, 4, 9})  # of each label
OF_DIGIT = tuple(tuple(k for k in range(4) if digit in DIGITS_OF[k]) for digit in range(10))


@pytest.fixture(scope="module")
def few_labels():
    """Digits and what is true of them."""
    whole = tasks.find_task("classify").open_data("digits")
    numbers = {"train": 64, "val": 40, "test": 20}
    splits = {name: getattr(whole, name).subset(range(n)) for name, n in numbers.items()}
    return replace(whole, **splits).with_targets(LABELS, OF_DIGIT.__getitem__)


@pytest.fixture(scope="module")
def trained(few_labels, tmp_path_factory):
    folder = tmp_path_factory.mktemp("multilabel") / "run"
    rows = list(
        run.train(folder, "genet_tiny", few_labels, SHORT, RunOptions(task=MultiLabel.name))
    )
    return folder, rows


def logits_and_targets(n=40, k=9):
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(n, k, generator=generator)
    return logits.requires_grad_(), (torch.rand(n, k, generator=generator) < 0.3).float()


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("how", [(0, 4, 0.05), (1, 4, 0.05), (2, 2, 0), (0, 0, 0), (0, 0, 0.1)])
def test_the_loss_and_its_gradients_are_timms(how, gradient):
    positive, negative, shift = how
    logits, targets = logits_and_targets()
    theirs = AsymmetricLossMultiLabel(
        negative, positive, shift, 1e-8, not gradient, reduction="sum"
    )
    expected = theirs(logits, targets) / len(logits)
    loss = multilabel_focal(
        logits,
        targets,
        gamma_positive=positive,
        gamma_negative=negative,
        shift=shift,
        weight_gradient=gradient,
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    ours, of_timm = (torch.autograd.grad(each, logits)[0] for each in (loss, expected))
    torch.testing.assert_close(ours, of_timm, rtol=1e-5, atol=1e-7)


def test_without_exponents_and_shift_it_is_the_binary_cross_entropy_of_mixed_targets_too():
    logits, targets = logits_and_targets()
    mixed = 0.7 * targets + 0.3 * targets.roll(1, 0)
    for wanted in (targets, mixed):
        expected = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
        loss = multilabel_focal(logits, wanted)
        assert loss.item() == pytest.approx(expected.item() / len(logits), rel=1e-6)
    weights = torch.rand(logits.shape[1])
    each = F.binary_cross_entropy_with_logits(logits, targets, weights, reduction="sum")
    weighted = multilabel_focal(logits, targets, weights_k=weights)
    assert weighted.item() == pytest.approx(each.item() / len(logits), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_loss_of_large_logits_is_finite_in_every_precision(dtype):
    logits = (
        torch.tensor([[-6e4, -90.0, 0.0, 90.0, 6e4]], dtype=dtype).repeat(2, 1).requires_grad_()
    )
    targets = torch.tensor([[1.0] * 5, [0.0] * 5])
    for gammas in ((0.0, 4.0), (0.5, 0.5), (0.0, 0.0)):
        for shift in (0.0, 0.05):
            how = dict(gamma_positive=gammas[0], gamma_negative=gammas[1], shift=shift)
            loss = multilabel_focal(logits, targets, **how)
            (gradient,) = torch.autograd.grad(loss, logits)
            assert loss.dtype == torch.float32
            assert loss.isfinite()
            assert gradient.isfinite().all()


def test_a_recipe_sets_the_exponents_and_classes_their_weights(few_labels):
    task = MultiLabel().for_data(few_labels)
    logits, targets = torch.randn(8, 4), (torch.rand(8, 4) < 0.5).float()
    ours = task.with_options(RECIPES["tresnet_multilabel"]).loss(logits, targets)
    theirs = AsymmetricLossMultiLabel(4, 0, 0.05, reduction="batchmean")(logits, targets)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    counts = [sum(k in labels for labels in few_labels.train.targets) for k in range(4)]
    assert task.class_counts == tuple(counts)
    raw = sum(counts) / (4 * torch.tensor(counts).float())
    balanced = task.with_options(replace(SHORT, class_weights="balanced")).loss(logits, targets)
    assert balanced.item() == pytest.approx(multilabel_focal(logits, targets, weights_k=raw).item())


def test_the_threshold_and_the_mean_of_bce_are_those_of_timm():
    logits = torch.randn(8, 4)
    targets = torch.tensor([1.0, 0.7, 0.3, 0.1, 0.0, 0.2, 0.9, 0.5])[:, None].expand(8, 4)
    recipe = replace(SHORT, loss="bce", bce_threshold=0.2)
    for reduction in ("mean", "sum"):
        task = MultiLabel(labels=4).with_options(replace(recipe, bce_reduction=reduction))
        theirs = BinaryCrossEntropy(0, 0.2, sum_classes=reduction == "sum")
        expected = theirs(logits, targets.clone())
        assert task.loss(logits, targets).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_run_resumes_bit_for_bit_and_stores_its_thresholds(trained, few_labels, tmp_path):
    folder, rows = trained
    assert all(0 < row["val/map"] <= 100 for row in rows)
    assert run_folder.best_row(rows, MultiLabel.metric) is max(rows, key=lambda r: r["val/map"])
    how = RunOptions(task=MultiLabel.name, checkpoint_every_steps=3)
    started = run.train(tmp_path / "run", "genet_tiny", few_labels, SHORT, how)
    next(started)
    started.close()
    list(
        run.train(
            tmp_path / "run", "genet_tiny", few_labels, SHORT, RunOptions(task=MultiLabel.name)
        )
    )
    whole, resumed = (tasks.load(each) for each in (folder, tmp_path / "run"))
    state = resumed.net.state_dict()
    assert all(torch.equal(v, state[name]) for name, v in whole.net.state_dict().items())
    assert whole.task_state == resumed.task_state
    assert len(whole.task_state["thresholds"]) == 4
    assert tasks.task_of(whole).thresholds == tuple(whole.task_state["thresholds"])
    val = whole.scores["val"]
    assert val["mean_f1_thresholds"] >= val["mean_f1"]
    assert val["map_low"] <= val["map"] <= val["map_high"]
    content = json.loads((folder / "scores.json").read_text())["splits"]["test"]["by_class"]
    assert [row["name"] for row in content] == [*LABELS]
    assert content[0]["threshold"] == 100 * whole.task_state["thresholds"][0]
    assert "thresholds of" in calibration_line(whole, SHORT)
    again = score_bundle(whole, few_labels.test, "cpu")
    assert again.scores == pytest.approx(whole.scores["test"], rel=1e-5)


def test_a_run_may_go_without_thresholds(few_labels, tmp_path):
    recipe = replace(SHORT, epochs=1, calibrate=False)
    list(
        run.train(
            tmp_path / "run", "genet_tiny", few_labels, recipe, RunOptions(task=MultiLabel.name)
        )
    )
    bundle = tasks.load(tmp_path / "run")
    assert not bundle.task_state
    assert tasks.task_of(bundle).decode(torch.tensor([[0.6, 0.4, 0.5, 0]]), LABELS, 5)[0][
        -1
    ].label == ("prime")


@pytest.mark.parametrize(
    "state",
    [{"thresholds": [0.5]}, {"thresholds": [0.5, 0.5, 2, 0.5]}, {"thresholds": 3}, {"x": 1}],
    ids=["too few", "above 1", "no list", "unknown"],
)
def test_a_state_that_does_not_fit_the_task_is_refused(state, trained, tmp_path):
    bundle = tasks.load(trained[0])
    replace(bundle, task_state=state).save(tmp_path / "bundle")
    with pytest.raises(ValueError, match="threshold|state x"):
        tasks.task_of(tasks.load(tmp_path / "bundle"))


def test_bundles_of_classifiers_have_no_state_beside_the_temperature(few_digits, tmp_path):
    list(run.train(tmp_path / "run", "genet_tiny", few_digits, replace(SHORT, epochs=1)))
    content = json.loads((tmp_path / "run" / "bundle" / "bundle.json").read_text())
    assert content["task_state"] == {}
    assert content["temperature"] == tasks.task_of(tasks.load(tmp_path / "run")).temperature != 1


@pytest.mark.parametrize("changes", [dict(mixup=0.2), dict(cutmix=1.0)], ids=str)
def test_mixed_images_have_the_labels_of_both(changes, few_labels):
    task = MultiLabel().for_data(few_labels)
    targets = []

    class Noting(MultiLabel):
        def loss(self, outputs, wanted, teacher=None):
            targets.append(wanted)
            return super().loss(outputs, wanted, teacher)

    recipe = replace(SHORT, **changes)
    net, pre = prepare.initial_network("genet_tiny", task, few_labels, recipe)
    noting = Noting(labels=4)
    learner = build_trainer(net.train(), noting, recipe, 4, None, SINGLE_PROCESS)
    x, wanted, _ = next(training_batches(few_labels, task, BatchOptions(pre), recipe).epoch(0))
    assert learner.step(x, wanted, 0).isfinite()
    (mixed,) = targets
    shares = [(mixed - wanted.roll(1, 0)), (wanted - wanted.roll(1, 0))]
    share = (shares[0][shares[1] != 0] / shares[1][shares[1] != 0]).mean()
    torch.testing.assert_close(mixed, share * wanted + (1 - share) * wanted.roll(1, 0))


@pytest.mark.parametrize("changes", [dict(teacher="runs/x"), dict(per_class=2), dict(triplet=1.0)])
def test_what_needs_one_class_for_each_image_is_refused(changes, few_labels, tmp_path):
    recipe = replace(SHORT, **{"per_class": 2, **changes})
    with pytest.raises(ValueError, match=r"^recipe\.\w+ .* the task multilabel "):
        next(
            run.train(
                tmp_path / "run", "genet_tiny", few_labels, recipe, RunOptions(task=MultiLabel.name)
            )
        )


def test_what_is_for_several_labels_is_refused_for_classes(few_digits, tmp_path):
    recipe = replace(SHORT, loss="focal", task_options={"focal_shift": 0.05})
    with pytest.raises(ValueError, match="^recipe.task_options focal_shift: the task classify "):
        next(run.train(tmp_path / "run", "genet_tiny", few_digits, recipe))


def test_labels_over_their_thresholds_are_predicted_and_else_the_best_is_marked():
    task = MultiLabel(labels=4, thresholds=(0.2, 0.9, 0.5, 0.5))
    rows = torch.tensor([[0.3, 0.8, 0.6, 0.1], [0.1, 0.8, 0.4, 0.45]])
    several, none = task.decode(rows, LABELS, 5)
    assert [guess.label for guess in several] == ["prime", "even"]
    assert [str(guess) for guess in none] == ["small 80.0 % (below its threshold of 90.0 %)"]
    assert [guess.label for guess in task.decode(rows, LABELS, 1)[0]] == ["prime"]


def test_files_agree_where_rounding_exchanges_two_equal_labels_and_not_where_another_is_first():
    expected = torch.tensor([[9.0, 8.99, 1.0]]).repeat(3, 1)
    outputs = torch.tensor([[9.0, 8.98, 1.0], [8.99, 9.0, 1.0], [1.0, 1.0, 9.0]])
    assert MultiLabel(labels=3).agree(outputs, expected).tolist() == [True, True, False]


def test_exported_files_predict_and_score_as_the_bundle_does(trained, few_labels, tmp_path):
    bundle = tasks.load(trained[0])
    with torch.no_grad():  # probabilities of a training of seconds are rounded to 1
        for parameter in bundle.net.get_submodule(bundle.net.classifier).parameters():
            parameter *= 0.02
    expected = score_bundle(bundle, few_labels.test, "cpu").scores
    pictures = [few_labels.test.picture(index) for index in range(4)]
    for input_kind in ("normalised", "pixels"):
        path = tmp_path / f"{input_kind}.onnx"
        export(bundle, path, ComparisonImages(pictures), ExportOptions(input_kind=input_kind))
        model = open_file(path)
        assert model.task_state == bundle.task_state
        rows = (predict(each, pictures) for each in (model, bundle))
        for ours, theirs in zip(*rows, strict=True):
            assert [guess.label for guess in ours.guesses] == [g.label for g in theirs.guesses]
            for guess, other in zip(ours.guesses, theirs.guesses, strict=True):
                assert guess.threshold == other.threshold
                assert guess.probability == pytest.approx(other.probability, rel=1e-3)
        scores = score_model(model, few_labels.test).evaluation.scores
        assert scores == pytest.approx(expected, rel=1e-3)
    outputs = model.run(np.stack([np.zeros((16, 16, 1), np.uint8)]))
    assert ((outputs > 0) & (outputs < 1)).all()  # probabilities


def test_the_worst_images_have_the_largest_losses_as_the_map_of_one_image_is_always_100(
    trained, few_labels
):
    bundle, images = tasks.load(trained[0]), few_labels.test
    with torch.no_grad():  # probabilities of a training of seconds are rounded to 1
        for parameter in bundle.net.get_submodule(bundle.net.classifier).parameters():
            parameter *= 0.02
    pictures = [images.picture(index) for index in range(len(images))]
    losses = {}
    for name, prediction, labels in zip(
        images.names, predict(bundle, pictures, top=len(LABELS)), images.targets, strict=True
    ):
        has = {LABELS[index] for index in labels}
        right = [g.probability if g.label in has else 1 - g.probability for g in prediction.guesses]
        losses[name] = -sum(math.log(each) for each in right) if has else 0.0
    worst = score_model(bundle, images, mistakes=3).worst
    assert [each.image for each in worst] == sorted(losses, key=losses.__getitem__)[:-4:-1]


@pytest.fixture
def table(few_labels, tmp_path):
    """A table of the digits and the names of their labels, with both splits."""
    lines = ["path,labels,split"]
    for split, images in (("train", few_labels.train), ("val", few_labels.val)):
        for index in range(len(images)):
            name = f"{split}{index}.png"
            images.picture(index).save(tmp_path / name)
            names = ";".join(LABELS[k] for k in images.targets[index])
            lines.append(f"{name},{names},{split}")
    path = tmp_path / "labels.csv"
    path.write_text("\n".join(lines))
    return path


def test_the_commands_work_with_several_labels(table, tmp_path, capsys):
    where, page = str(tmp_path / "run"), tmp_path / "page.html"
    words = ["train", str(table), "--task", "multilabel", "--model", "genet_tiny", "--out", where]
    words += ["--recipe", "tresnet_multilabel", "--recipe.steps", "3", "--resolution", "16"]
    assert cli.run([*words, "--batch-size", "16", "--recipe.rand-layers", "0"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"validation mAP \d+\.\d+ %", output)
    assert "thresholds of" in output
    assert cli.run(["validate", where, "--per-class"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"mAP \d+\.\d+ % \(95 % interval \d+\.\d+ to \d+\.\d+\), CF1 ", output)
    assert re.search(r"even +\d+ +\d+ ", output)
    assert cli.run(["predict", where, str(tmp_path / "val0.png"), "--json"]) == 0
    guesses = json.loads(capsys.readouterr().out.splitlines()[0])["guesses"]
    assert {*guesses[0]} == {"label", "probability", "threshold"}
    assert cli.run(["report", where, "--out", str(page)]) == 0
    text = page.read_text()
    assert "average precision" in text
    assert "95 % interval" in text
    assert cli.run(["export", where, "--out", str(tmp_path / "net.onnx")]) == 0
