"""Learning: the schedule, the average, the loop, and going on after a stop."""

import copy
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from forks import Fork
from PIL import Image

from fullstride import cli
from fullstride.data.dataset import Images, open_data
from fullstride.data.loader import Batches, LoaderOptions, TrainView
from fullstride.data.readers.splits import SplitRule
from fullstride.data.transforms.crop import Augmentation
from fullstride.nets import zoo
from fullstride.nets.blocks import Basic, ConvStem
from fullstride.nets.bundle import Bundle
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.spec import NetSpec, Stage
from fullstride.tasks import find_task
from fullstride.tasks.classify import Classify
from fullstride.tasks.losses import weighted_triplet
from fullstride.tasks.multilabel import MultiLabel
from fullstride.train import prepare, run, run_folder
from fullstride.train.batches import BatchOptions, training_batches
from fullstride.train.compute import SINGLE_PROCESS
from fullstride.train.distill import (
    CachedTeacher,
    Teacher,
    build_teacher,
    matching_teacher,
    resized,
)
from fullstride.train.loop import build_trainer, train_epochs
from fullstride.train.optimizer import lr_at
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import evaluate, matching_data

GRAY = Preprocessing(resolution=32, mean=(0.0,), std=(1.0,), crop=1.0)
SHORT = replace(DIGITS, epochs=3, warmup_epochs=1, resolution=16, batch_size=16)


@pytest.fixture(scope="module")
def digits():
    """A hundred digits, enough to see that a loop works."""
    data = open_data("digits")
    return replace(
        data,
        train=data.train.subset(range(64)),
        val=data.val.subset(range(20)),
        test=data.test.subset(range(20)),
    )


def test_label_smoothing_equals_cross_entropy_with_softened_targets():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4, 0])
    soft = torch.full((6, 5), 0.1 / 5, dtype=torch.float64)
    soft[torch.arange(6), labels] += 0.9
    by_hand = -(soft * logits.log_softmax(1)).sum(1).mean()
    assert Classify(0.1).loss(logits, labels).item() == pytest.approx(by_hand.item(), rel=1e-12)


def test_scores_of_batches_and_of_processes_are_those_of_the_whole():
    torch.manual_seed(0)
    logits, labels = torch.randn(50, 5), torch.arange(50) % 5
    first, second = Classify().score(), Classify().score()
    for score, part in ((first, slice(0, 8)), (first, slice(8, 20)), (second, slice(20, 50))):
        score.update(logits[part], labels[part])
    first.merge(second)
    right = [int(row.argmax()) == label for row, label in zip(logits, labels, strict=True)]
    assert first.compute()["top1"] == 100 * sum(right) / 50
    loss = -logits.double().log_softmax(1)[torch.arange(50), labels].mean()
    assert first.compute()["loss"] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["tresnet_tiny", "resnet_rs_tiny", "genet_tiny"])
def test_a_network_can_memorise_sixteen_digits(name, digits):
    images = digits.train.subset(range(16))
    recipe = replace(
        SHORT, epochs=80, warmup_epochs=8, lr=0.05, label_smoothing=0.0, weight_decay=0.0
    )
    torch.manual_seed(0)
    net = zoo.create(name, in_channels=1)
    whole = Augmentation(scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip_prob=0.0)
    batches = Batches(images, TrainView(GRAY, whole), LoaderOptions(batch=16, shuffle=True))
    epochs = list(train_epochs(net, Classify(), batches, recipe))
    assert epochs[-1].loss < 0.1 < epochs[0].loss
    assert evaluate(net, Classify(), batches)["top1"] == 100


def test_a_loss_that_is_not_finite_stops_training_and_says_what_to_try(digits):
    net = zoo.create("genet_tiny", in_channels=1)
    batches = Batches(digits.train, TrainView(GRAY), LoaderOptions(batch=16, shuffle=True))
    recipe = replace(SHORT, lr=1e12, warmup_epochs=0)
    with pytest.raises(FloatingPointError, match=r"in step \d of epoch 1, at a .* lower recipe.lr"):
        list(train_epochs(net, Classify(), batches, recipe))


def test_weights_that_are_not_finite_are_never_marked(digits):
    net = zoo.create("genet_tiny", in_channels=1)
    batches = Batches(digits.train, TrainView(GRAY), LoaderOptions(batch=4, shuffle=True))
    recipe = replace(SHORT, batch_size=4, lr=1e12, warmup_epochs=0)
    marks = train_epochs(
        net, Classify(), batches, recipe, checkpoint_every_steps=4
    )  # the loss is gone within three steps
    with pytest.raises(FloatingPointError):
        next(marks)


def test_a_network_trains_with_the_parts_of_its_recipe_or_a_line_says_which_is_missing(digits):
    batches = Batches(digits.train, TrainView(GRAY), LoaderOptions(batch=16, shuffle=True))
    recipe = replace(SHORT, epochs=1, warmup_epochs=0, drop_path=0.5, dropout=0.3)
    losses = []
    for regularised, changes in ((0, {}), (1, dict(drop_path=0.0, dropout=0.0)), (1, {})):
        torch.manual_seed(0)
        net = zoo.create("genet_tiny", in_channels=1)
        if regularised:
            net.regularise(drop_path=0.5, dropout=0.3)
        (epoch,) = train_epochs(net, Classify(), batches, replace(recipe, **changes))
        losses.append(epoch.loss)
    assert losses == losses[:1] * 3
    net = zoo.create("timm/resnet10t", classes=10, in_channels=1)
    next(train_epochs(net, Classify(), batches, recipe))
    assert net.net.drop_rate == 0.3
    for name, value in dict(teacher="resnet152", pad_channels=True).items():
        net = zoo.create("genet_light", classes=10, in_channels=1)
        with pytest.raises(ValueError, match=f"recipe.{name}") as caught:
            next(train_epochs(net, Classify(), batches, replace(recipe, **{name: value})))
        assert "\n" not in str(caught.value)


def test_a_duration_in_steps_ends_within_an_epoch_with_the_schedule_at_its_end(digits):
    net = zoo.create("genet_tiny", in_channels=1)
    batches = Batches(digits.train, TrainView(GRAY), LoaderOptions(batch=16, shuffle=True))
    seen = []
    counted = type(
        "B", (), {"__len__": lambda _: 4, "epoch": lambda _, n, start=0: count(batches, n, seen)}
    )()
    epochs = list(train_epochs(net, Classify(), counted, replace(SHORT, steps=6, warmup_epochs=0)))
    assert seen == [0, 0, 0, 0, 1, 1]
    assert [epoch.number for epoch in epochs] == [0, 1]
    last = replace(SHORT, epochs=1.5, warmup_epochs=0)
    assert epochs[-1].lr == lr_at(1.5 - 0.5 / 4, last) < 0.05 * SHORT.lr


def count(batches, number, seen):
    for batch in batches.epoch(number):
        seen.append(number)
        yield batch


def test_the_network_grows_into_its_resolution(digits):
    sides = []

    class Watched(Network):
        def forward(self, x, masks=None):
            sides.append(x.shape[-1])
            return super().forward(x, masks)

    recipe = replace(SHORT, epochs=4, resolution=32, grow_from=16, grow_share=0.5)
    net = Watched(replace(zoo.spec("genet_tiny"), in_channels=1))
    list(
        train_epochs(
            net,
            Classify(),
            training_batches(digits, Classify(), BatchOptions(GRAY), recipe),
            recipe,
        )
    )
    assert sides == [16] * 4 + [24] * 4 + [32] * 8


def test_reproducible_algorithms_are_used_for_the_steps_alone_where_a_recipe_asks(digits):
    asked = []

    class Watched(Network):
        def forward(self, x, masks=None):
            asked.append(
                (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic)
            )
            return super().forward(x, masks)

    batches = Batches(digits.train, TrainView(GRAY), LoaderOptions(batch=64, shuffle=True))
    for strict in (True, False):
        net = Watched(replace(zoo.spec("tresnet_tiny"), in_channels=1))
        for _ in train_epochs(
            net, Classify(), batches, replace(GENTLE, batch_size=64, deterministic=strict)
        ):
            assert not torch.are_deterministic_algorithms_enabled()
    assert asked == [(True, True), (False, False)]


def rows_of(folder, digits, recipe=SHORT, **how):
    return list(run.train(folder, "genet_tiny", digits, recipe, RunOptions(**how)))


def equal_weights(*folders):
    ours, theirs = (zoo.load(folder).net.state_dict() for folder in folders)
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


def numbers(rows):
    """A log without the times, which differ from run to run."""
    return [
        {k: v for k, v in row.items() if k not in ("images_per_s", "data_wait_fraction")}
        for row in rows
    ]


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "whole"
    return folder, rows_of(folder, digits)


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights_bit_for_bit(
    stop_after, finished, digits, tmp_path
):
    whole, rows = finished
    folder = tmp_path / "stopped"
    started = run.train(folder, "genet_tiny", digits, SHORT)
    for _ in range(stop_after):
        next(started)
    started.close()  # as Ctrl-C between two epochs, or after the last one and before the bundle
    assert not (folder / run_folder.BUNDLE).exists()
    assert numbers(rows_of(folder, digits)) == numbers(rows)
    assert run_folder.load_checkpoint(folder)["epochs"] == SHORT.epochs
    ours, theirs = Bundle.load(folder / run_folder.BUNDLE), Bundle.load(whole / run_folder.BUNDLE)
    for name, value in ours.net.state_dict().items():
        assert torch.equal(value, theirs.net.state_dict()[name])
    assert ours.scores == theirs.scores


def test_a_run_of_an_earlier_version_goes_on_where_what_it_could_not_say_is_as_it_was(
    finished, digits, tmp_path
):
    folder = tmp_path / "old"
    shutil.copytree(finished[0], folder)
    asked = json.loads((folder / run_folder.RUN_CONFIG).read_text())
    for field in ("pad_channels", "ratio"):
        del asked["recipe"][field]
    (folder / run_folder.RUN_CONFIG).write_text(json.dumps(asked))
    assert numbers(rows_of(folder, digits)) == numbers(finished[1])
    with pytest.raises(ValueError, match="recipe.pad_channels is False there and True now"):
        rows_of(folder, digits, replace(SHORT, pad_channels=True))


GENTLE = replace(SHORT, epochs=1, warmup_epochs=0, lr=1e-3)  # rounding does not grow
HARD = replace(
    SHORT,
    mixup=0.2,
    cutmix=1.0,
    drop_path=0.3,
    dropout=0.3,
    rand_layers=2,
    random_erasing_prob=0.5,
    grad_accum_steps=2,
    clip_norm=1.0,
    channels_last=True,
)


def test_a_run_stopped_within_an_epoch_goes_on_to_the_same_weights_at_another_worker_count(
    digits, tmp_path, monkeypatch
):
    rows = rows_of(tmp_path / "whole", digits, HARD)
    save, saved = run_folder.save_checkpoint, []

    def stop_at_the_third(folder, state):
        save(folder, state)
        saved.append(state["index"])
        if len(saved) == 6:  # in the middle of the third epoch, each of four steps
            raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "save_checkpoint", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        rows_of(tmp_path / "stopped", digits, HARD, checkpoint_every_steps=2)
    monkeypatch.setattr(run_folder, "save_checkpoint", save)
    assert saved == [2, 0, 2, 0, 2, 0][: len(saved)]
    assert numbers(rows_of(tmp_path / "stopped", digits, HARD, workers=1)) == numbers(rows)
    assert equal_weights(tmp_path / "stopped", tmp_path / "whole")


def command(_, words: list[str]) -> None:
    cli.run(words)


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_weights(tmp_path):
    words = ["train", "digits", "--model", "genet_tiny", "--checkpoint-every-steps", "3"]
    words += ["--recipe.steps", "24", "--recipe.warmup-epochs", "0", "--recipe.resolution", "16"]
    words += ["--recipe.dropout", "0.2", "--out"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert cli.run([*words, str(whole)]) == 0
    fork = Fork(command, [*words, str(killed)])
    deadline = time.monotonic() + 60
    while not (killed / run_folder.CHECKPOINT).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    fork.kill()
    assert not (killed / run_folder.BUNDLE).exists()
    assert cli.run([*words, str(killed)]) == 0
    assert equal_weights(killed, whole)
    assert numbers(run_folder.read_log(killed, find_task().metric)) == numbers(
        run_folder.read_log(whole, find_task().metric)
    )


def test_accumulating_parts_gives_the_step_of_the_whole_batch_where_no_statistics_are_taken(digits):
    batches = Batches(digits.train, TrainView(GRAY), LoaderOptions(batch=16, shuffle=True))
    after = []
    for steps in (1, 4):
        torch.manual_seed(0)
        net = FrozenNorms(replace(zoo.spec("resnet_rs_tiny"), in_channels=1)).double()
        recipe = replace(GENTLE, grad_accum_steps=steps)
        doubles = type(
            "D", (), {"__len__": lambda _: 2, "epoch": lambda _, n, start=0: two(batches, n)}
        )()
        list(train_epochs(net, Classify(0.1), doubles, recipe))
        after.append(net.state_dict())
    assert all(
        torch.allclose(value, after[1][name], rtol=1e-9, atol=1e-12)
        for name, value in after[0].items()
    )


@pytest.mark.parametrize(("images", "passes", "sizes"), [(13, 4, [3, 3, 3, 4]), (10, 8, [2] * 5)])
def test_passes_of_too_few_images_are_equal_but_for_one_and_statistics_count_them(
    images, passes, sizes
):
    seen, means = [], []
    x, labels = torch.rand(1, 3, 16, 16).expand(images, -1, -1, -1), torch.zeros(images).long()
    for parts in (passes, 1):
        torch.manual_seed(0)
        net = zoo.create("resnet_rs_tiny")
        net.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        recipe = replace(GENTLE, batch_size=16, grad_accum_steps=parts, bn_momentum=0.1)
        list(train_epochs(net, Classify(), OneBatch(x, labels), recipe))
        means.append(next(value for name, value in net.named_buffers() if "running_mean" in name))
    assert seen == [*sizes, images]
    torch.testing.assert_close(means[0], means[1])


class OneBatch:
    """The same batch in each epoch."""

    def __init__(self, x, labels):
        self.batch = x, labels, torch.arange(len(x))

    def __len__(self):
        return 1

    def epoch(self, number, start=0):
        yield self.batch


@pytest.mark.parametrize(("images", "passes"), [(1, 1), (4, 4)])
def test_a_pass_of_one_image_is_refused_where_a_batch_norm_cannot_take_it(images, passes):
    x, labels = torch.rand(images, 3, 64, 64), torch.zeros(images).long()
    recipe = replace(GENTLE, batch_size=images, grad_accum_steps=passes)
    for side, frozen in ((64, False), (8, True), (8, False)):
        source = OneBatch(x[..., :side, :side], labels)
        net = zoo.create("resnet_rs_tiny")
        epochs = train_epochs(net, Classify(), source, replace(recipe, frozen_statistics=frozen))
        if side == 64 or frozen:
            next(epochs)
            continue
        with pytest.raises(ValueError, match=rf"recipe.batch_size \({images}\)") as caught:
            next(epochs)
        assert (f"recipe.grad_accum_steps ({passes})" in str(caught.value)) == (passes > 1)


class FrozenNorms(Network):
    """Batch norms keep their statistics, as in evaluation, while the rest learns."""

    def train(self, mode=True):
        return super().train(False)


def two(batches, number):
    """The first two batches of an epoch, in float64."""
    for _, batch in zip(range(2), batches.epoch(number), strict=False):
        yield batch.x.double(), batch.targets, batch.indices


def test_a_teacher_is_learned_from_in_its_own_preprocessing(finished, digits):
    bundle = Bundle.load(finished[0] / run_folder.BUNDLE)
    student = replace(bundle.preprocessing, mean=(0.3,), std=(0.7,))
    teacher = matching_teacher(bundle, "it", digits.classes, student)
    pixels = torch.rand(4, 1, 16, 16)
    with torch.inference_mode():
        expected = bundle.net(pixels).softmax(1)
    assert torch.allclose(teacher((pixels - 0.3) / 0.7), expected, rtol=1e-4, atol=1e-5)
    net = zoo.create("genet_tiny", in_channels=1)
    batches = Batches(digits.train, TrainView(GRAY), LoaderOptions(batch=16, shuffle=True))
    whole = replace(SHORT, epochs=1, warmup_epochs=0, teacher_share=1.0, lr=1e-9)
    (epoch,) = train_epochs(net, Classify(), batches, whole, teacher=teacher)
    said = [
        torch.nn.functional.cross_entropy(net(x), teacher(x)).item() for x, _, _ in batches.epoch(0)
    ]
    assert epoch.loss == pytest.approx(sum(said) / len(said), rel=0.1)


@pytest.mark.slow
def test_a_teachers_answers_are_asked_once_and_remembered_for_every_student(
    finished, digits, tmp_path, monkeypatch
):
    asked = []
    forward = Teacher.forward
    monkeypatch.setattr(
        Teacher, "forward", lambda self, x, **_: asked.append(len(x)) or forward(self, x)
    )
    recipe = replace(SHORT, teacher=str(finished[0]), teacher_share=1.0, distinct_views=2)
    plain = rows_of(tmp_path / "plain", digits, recipe)
    assert sum(asked) == 3 * 64
    asked.clear()
    first = rows_of(tmp_path / "first", digits, recipe, teacher_cache=tmp_path / "cache")
    assert sum(asked) == 2 * 64  # the third epoch shows the views of the first again
    asked.clear()
    assert numbers(
        rows_of(tmp_path / "second", digits, recipe, teacher_cache=tmp_path / "cache")
    ) == numbers(first)
    assert asked == []
    # of 16 bits; later epochs differ more, as so small a network at so high a rate is chaotic
    assert [row["loss"] for row in first[:2]] == pytest.approx(
        [row["loss"] for row in plain[:2]], rel=0.01
    )
    rows_of(
        tmp_path / "other",
        digits,
        replace(recipe, rotation_degrees=3.0),
        teacher_cache=tmp_path / "cache",
    )
    assert sum(asked) == 2 * 64  # other views are other answers
    for file in (tmp_path / "cache").glob("*/*.f16"):
        file.write_bytes(file.read_bytes()[:100])  # as a copy that was broken off
    asked.clear()
    again = rows_of(tmp_path / "third", digits, recipe, teacher_cache=tmp_path / "cache")
    assert 2 * 58 <= sum(asked) <= 2 * 60  # 20 bytes an image: five were whole
    assert numbers(again) == numbers(first)


def test_the_key_of_a_cache_has_the_augmentations(finished, digits, tmp_path):
    def key(**changes) -> dict:
        recipe = replace(SHORT, teacher=str(finished[0]), **changes)
        cache = build_teacher(digits, GRAY, recipe, "cpu", tmp_path / "cache")
        assert isinstance(cache, CachedTeacher)
        return json.loads(cache.key)

    assert key(trivial_augment=True) == key() | {"trivial_augment": True} != key()


def test_a_cache_that_could_not_serve_is_refused(finished, digits, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match="without a teacher: set recipe.teacher, or leave it out"):
        rows_of(tmp_path / "run", digits, SHORT, teacher_cache=cache)
    recipe = replace(SHORT, teacher=str(finished[0]))
    with pytest.raises(ValueError, match="set recipe.mixup and recipe.cutmix to 0"):
        rows_of(tmp_path / "run", digits, replace(recipe, mixup=0.2), teacher_cache=cache)
    with pytest.raises(ValueError, match="recipe.grow_from to None"):
        rows_of(tmp_path / "run", digits, replace(recipe, grow_from=8), teacher_cache=cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(
        ValueError,
        match="GiB free, the teacher's probabilities of 3 views .* recipe.distinct_views to fewer",
    ):
        rows_of(tmp_path / "run", digits, recipe, teacher_cache=cache)
    assert not (tmp_path / "run").exists()


def test_a_teacher_whose_classes_have_another_order_teaches_the_same(finished, digits):
    bundle = Bundle.load(finished[0] / run_folder.BUNDLE)
    order = [3, 0, 1, 2, 9, 8, 7, 6, 5, 4]
    names = tuple(f"digit_{bundle.classes[index]}" for index in order)
    renamed = replace(bundle, classes=tuple(f"Digit {name}" for name in bundle.classes))
    pixels = torch.rand(4, 1, 16, 16)
    probabilities = matching_teacher(bundle, "it", digits.classes, bundle.preprocessing)(pixels)
    permuted = matching_teacher(renamed, "it", names, bundle.preprocessing)
    torch.testing.assert_close(permuted(pixels), probabilities[:, order])
    with pytest.raises(ValueError, match="the teacher it: .*'a', 'b', 'c', ...") as caught:
        matching_teacher(renamed, "it", tuple("abcdefghij"), bundle.preprocessing)
    assert str(caught.value).endswith("of the network; use another")


@pytest.mark.parametrize("task", [Classify(), MultiLabel()])
def test_initial_weights_of_the_same_classes_in_another_order_begin_with_the_same_outputs(
    task, finished, digits
):
    bundle = Bundle.load(finished[0] / run_folder.BUNDLE)
    order = [3, 0, 1, 2, 9, 8, 7, 6, 5, 4]
    data = replace(digits, classes=tuple(digits.classes[index] for index in order))
    net, _ = prepare.initial_network("genet_tiny", task, data, SHORT, bundle)
    pixels = torch.rand(4, 1, 16, 16)
    with torch.inference_mode():
        expected = bundle.net(pixels)[:, order]
        torch.testing.assert_close(net.eval()(pixels), expected, rtol=1e-5, atol=1e-5)


def test_a_classifier_for_as_many_other_classes_begins_with_zeros_and_one_without_names_is_kept(
    finished, digits
):
    bundle = Bundle.load(finished[0] / run_folder.BUNDLE)
    data = replace(digits, classes=tuple("abcdefghij"))
    net, _ = prepare.initial_network("genet_tiny", Classify(), data, SHORT, bundle)
    assert not net.head.fc.weight.any()
    assert not net.head.fc.bias.any()
    nameless = replace(bundle, recipe={})
    net, _ = prepare.initial_network("genet_tiny", Classify(), data, SHORT, nameless)
    assert torch.equal(net.head.fc.weight, bundle.net.head.fc.weight)


def test_a_teacher_of_other_classes_is_refused_before_anything_is_written(
    finished, digits, tmp_path
):
    other = replace(digits, classes=tuple("abcdefghi"), train=below(digits.train, 9))
    with pytest.raises(
        ValueError, match=r"the teacher .* has the classes 10 \(0, 1, 2, ...\), the images have 9"
    ):
        rows_of(tmp_path / "run", other, replace(SHORT, teacher=str(finished[0])))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_as_float32_does(precision, digits):
    losses = {}
    for kind in ("fp32", precision):
        torch.manual_seed(0)
        net = zoo.create("resnet_rs_tiny", in_channels=1)
        batches = Batches(digits.train, TrainView(GRAY), LoaderOptions(batch=16, shuffle=True))
        losses[kind] = [
            e.loss for e in train_epochs(net, Classify(), batches, replace(GENTLE, precision=kind))
        ]
        assert all(p.dtype == torch.float32 for p in net.parameters())
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses[precision] != losses["fp32"]


@pytest.mark.slow
def test_a_compiled_network_has_the_losses_of_the_plain_one_with_the_same_masks(digits):
    stages = (Stage(block=Basic, depth=2, width=8, stride=2),)
    spec = NetSpec(
        source="two blocks", stem=ConvStem, stem_width=8, stages=stages, in_channels=1, classes=10
    )
    losses = []
    for way in ("plain", "plain_compiled"):
        torch.manual_seed(0)
        net = Network(spec)
        net.regularise(drop_path=0.3, dropout=0.3)
        batches = Batches(digits.train, TrainView(GRAY), LoaderOptions(batch=16, shuffle=True))
        still = replace(GENTLE, lr=1e-9, efficiency=way)  # else rounding grows from step to step
        losses += [[epoch.loss for epoch in train_epochs(net, Classify(), batches, still)]]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_what_computes_wrongly_on_a_cpu_is_refused(digits):
    net = zoo.create("genet_tiny", in_channels=1)
    batches = Batches(digits.train, TrainView(GRAY), LoaderOptions(batch=16, shuffle=True))
    with pytest.raises(ValueError, match="bf16 with recipe.channels_last is not reliable on a CPU"):
        list(
            train_epochs(
                net, Classify(), batches, replace(SHORT, precision="bf16", channels_last=True)
            )
        )


def test_without_a_better_val_training_stops_and_the_best_weights_are_scored(digits, tmp_path):
    recipe = replace(
        SHORT, epochs=30, early_stop_patience=2, lr=1e-9, warmup_epochs=0, ema_decay=0.0
    )  # nothing is learned
    rows = rows_of(tmp_path / "run", digits, recipe)
    top = run_folder.best_row(rows, Classify.metric)
    assert len(rows) == top["epoch"] + 2 < 30
    assert all(
        (row["val/top1"], -row["val/loss"]) <= (top["val/top1"], -top["val/loss"]) for row in rows
    )
    best, bundle = (
        Bundle.load(tmp_path / "run" / name) for name in (run_folder.BEST, run_folder.BUNDLE)
    )
    assert all(
        torch.equal(value, bundle.net.state_dict()[name])
        for name, value in best.net.state_dict().items()
    )
    scores = dict(bundle.scores["val"])
    scores["ece"] = scores.pop("ece_uncalibrated")  # the temperature is fitted after training
    assert scores == best.scores["val"]
    assert (best.scores["val"]["top1"], best.scores["val"]["loss"]) == (
        top["val/top1"],
        top["val/loss"],
    )
    assert "test" not in best.scores


def test_a_run_that_is_out_of_patience_does_not_learn_on_after_a_stop(digits, tmp_path):
    recipe = replace(
        SHORT, epochs=30, early_stop_patience=1, lr=1e-9, warmup_epochs=0, ema_decay=0.0
    )
    rows = rows_of(tmp_path / "whole", digits, recipe)
    started = run.train(tmp_path / "stopped", "genet_tiny", digits, recipe)
    for _ in rows:
        next(started)
    started.close()
    assert not (tmp_path / "stopped" / run_folder.BUNDLE).exists()
    assert numbers(rows_of(tmp_path / "stopped", digits, recipe)) == numbers(rows)
    assert (tmp_path / "stopped" / run_folder.BUNDLE).exists()


def test_the_best_weights_are_kept_beside_the_last_ones(finished):
    folder, rows = finished
    best = Bundle.load(folder / run_folder.BEST)
    assert best.scores["val"]["top1"] == max(row["val/top1"] for row in rows)
    assert best.recipe == json.loads((folder / run_folder.RUN_CONFIG).read_text())["recipe"]


def test_the_share_of_the_val_is_part_of_a_run_and_found_again(tmp_path):
    data = open_data("digits", SplitRule(val=0.02))
    assert len(data.val) == 26  # of 1,297
    list(run.train(tmp_path / "run", "genet_tiny", data, replace(SHORT, steps=2, warmup_epochs=0)))
    again = matching_data(str(tmp_path / "run"), Bundle.load(tmp_path / "run" / run_folder.BUNDLE))
    assert again.val.names == data.val.names
    with pytest.raises(ValueError, match="val is 0.02 there and None now"):
        list(
            run.train(
                tmp_path / "run",
                "genet_tiny",
                open_data("digits"),
                replace(SHORT, steps=2, warmup_epochs=0),
            )
        )


@pytest.mark.slow
def test_the_triplet_loss_is_added_with_its_weight_and_draws_classes_apart(digits):
    recipe = replace(SHORT, batch_size=16, per_class=4, epochs=12, lr=0.05, ema_decay=0.0)
    found = {}
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        net = zoo.create("genet_tiny", in_channels=1)
        batches = training_batches(
            digits, Classify(), BatchOptions(GRAY), replace(recipe, triplet=weight)
        )
        x, labels, _ = next(batches.epoch(0))
        assert labels.bincount().sort(descending=True).values[:4].tolist() == [4, 4, 4, 4]
        with torch.no_grad():
            logits, embedding = copy.deepcopy(net).train().logits_and_embedding(x)
            by_hand = Classify(0.1).loss(logits, labels) + weight * weighted_triplet(
                embedding, labels
            )
        step = build_trainer(
            net.train(),
            Classify(0.1),
            replace(recipe, triplet=weight),
            len(batches),
            None,
            SINGLE_PROCESS,
        ).step
        assert step(x, labels, 0).item() == pytest.approx(by_hand.item(), rel=1e-6)
        list(train_epochs(net, Classify(0.1), batches, replace(recipe, triplet=weight)))
        with torch.no_grad():
            _, embedding = net.eval().logits_and_embedding(x)
            found[weight] = weighted_triplet(embedding, labels).item()
    assert found[1.0] < found[0.0]


def test_a_triplet_loss_that_would_have_nothing_to_compare_is_refused(digits, tmp_path):
    recipe = replace(SHORT, triplet=1.0, per_class=4, grad_accum_steps=4)
    with pytest.raises(
        ValueError, match="among the 4 images .* set recipe.batch_size to a multiple of 32"
    ):
        rows_of(tmp_path / "run", digits, recipe)
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_every_number_of_the_log(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = [
        "train",
        "digits",
        "--model",
        "genet_tiny",
        "--out",
        str(tmp_path / "run"),
        "--tensorboard",
    ]
    words += ["--recipe.epochs", "2", "--recipe.warmup-epochs", "0", "--recipe.resolution", "16"]
    for _ in range(2):  # the second time nothing is trained and everything is written once more
        assert cli.run(words) == 0
        events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
        rows = [
            json.loads(line)
            for line in (tmp_path / "run" / run_folder.LOG).read_text().splitlines()
        ]
        for name in ("loss", "lr", "val/top1", "val/loss", "images_per_s", "data_wait_fraction"):
            said = [(event.step, event.value) for event in events.Scalars(name)]
            assert said == [(row["epoch"], pytest.approx(row[name], rel=1e-6)) for row in rows]


def test_a_row_that_was_written_after_the_last_checkpoint_is_written_again(
    finished, digits, tmp_path
):
    folder = tmp_path / "torn"
    started = run.train(folder, "genet_tiny", digits, SHORT)
    next(started)
    started.close()
    log = folder / run_folder.LOG
    log.write_text(log.read_text() + '{"epoch": 2, "los')
    assert numbers(rows_of(folder, digits)) == numbers(finished[1])
    assert numbers(json.loads(line) for line in log.read_text().splitlines()) == numbers(
        finished[1]
    )


def test_a_finished_run_is_not_trained_again(finished, digits):
    folder, rows = finished
    before = (folder / run_folder.CHECKPOINT).stat().st_mtime_ns
    assert rows_of(folder, digits) == rows
    assert (folder / run_folder.CHECKPOINT).stat().st_mtime_ns == before


@pytest.mark.slow
def test_workers_do_not_change_what_is_learned(finished, digits, tmp_path):
    assert numbers(rows_of(tmp_path / "workers", digits, workers=2)) == numbers(finished[1])


def test_a_folder_with_another_run_is_refused_with_the_difference(finished, digits):
    folder, _ = finished
    with pytest.raises(ValueError, match=f"another run: recipe.lr is {SHORT.lr} there and 0.7 now"):
        rows_of(folder, digits, replace(SHORT, lr=0.7))


def test_a_folder_whose_run_has_no_checkpoint_yet_may_be_asked_otherwise(digits, tmp_path):
    wrong = replace(SHORT, lr=1e12, warmup_epochs=0)
    with pytest.raises(FloatingPointError):
        rows_of(tmp_path / "run", digits, wrong)
    assert (tmp_path / "run" / run_folder.RUN_CONFIG).exists()
    assert len(rows_of(tmp_path / "run", digits, SHORT)) == SHORT.epochs
    assert Bundle.load(tmp_path / "run" / run_folder.BUNDLE).recipe["lr"] == SHORT.lr


def test_a_stop_in_the_middle_of_a_replacement_loses_nothing_and_leaves_nothing_behind(
    finished, digits, tmp_path
):
    folder = tmp_path / "run"
    started = run.train(folder, "genet_tiny", digits, SHORT)
    next(started)
    started.close()
    (folder / run_folder.BEST).rename(folder / ".best.99999999.old")  # as between the two renamings
    (folder / ".checkpoint.pt.99999999.new").write_bytes(b"half")
    assert numbers(rows_of(folder, digits)) == numbers(finished[1])
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_run_whose_broken_checkpoint_was_removed_begins_again_whatever_else_is_there(
    digits, tmp_path
):
    folder = tmp_path / "run"
    started = run.train(folder, "genet_tiny", digits, SHORT)
    next(started)
    started.close()
    (folder / "tensorboard").mkdir()
    (folder / run_folder.CHECKPOINT).unlink()
    assert len(rows_of(folder, digits, replace(SHORT, epochs=2))) == 2


def test_a_run_folder_that_is_spoiled_is_told_of_in_one_line(finished, digits, tmp_path):
    recipe = replace(SHORT, epochs=1, early_stop_patience=5, warmup_epochs=0)
    folder = tmp_path / "run"
    rows_of(folder, digits, recipe)
    shutil.rmtree(folder / run_folder.BUNDLE)
    shutil.rmtree(folder / run_folder.BEST)
    with pytest.raises(ValueError, match="best, the best epoch's weights, is gone"):
        rows_of(folder, digits, recipe)
    (folder / run_folder.LOG).write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"log\.jsonl "):
        rows_of(folder, digits, recipe)
    bundle = Bundle.load(finished[0] / run_folder.BUNDLE)
    for text in ("{}", "[1]"):
        (folder / run_folder.RUN_CONFIG).write_text(text)
        with pytest.raises(ValueError, match="run.json.*give --data$"):
            matching_data(str(folder), bundle)
    with pytest.raises(ValueError, match=r"run\.json .*another"):
        rows_of(folder, digits, recipe)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process")
def test_a_disk_that_is_full_when_the_checkpoint_is_written_is_told_of_in_one_line(tmp_path):
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20, 3 * 2**20)); "
    )
    code += "from fullstride import cli; sys.exit(cli.run(sys.argv[1:]))"
    words = [
        "train",
        "digits",
        "--model",
        "genet_tiny",
        "--out",
        str(tmp_path / "run"),
        "--recipe.steps",
        "2",
    ]
    words += ["--recipe.warmup-epochs", "0", "--recipe.resolution", "16"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("fullstride: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run" / run_folder.CHECKPOINT).exists()


def test_scores_are_of_true_float32(digits):
    asked = []

    class Watched(Network):
        def forward(self, x, masks=None):
            asked.append(torch.backends.cudnn.allow_tf32)
            return super().forward(x, masks)

    net = Watched(replace(zoo.spec("genet_tiny"), in_channels=1))
    evaluate(net, Classify(), Batches(digits.test, TrainView(GRAY), LoaderOptions(batch=20)))
    assert asked == [False]
    assert torch.backends.cudnn.allow_tf32  # as PyTorch has it


def test_a_row_of_the_log_names_the_pictures_that_were_not_named_before(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (9, 9), (number, ord(name), 0)).save(
                tmp_path / "photos" / name / f"{number}.png"
            )
    spoiled = open_data(str(tmp_path / "photos")).train.names[0]
    (tmp_path / "photos" / spoiled).write_bytes(b"words")
    recipe = replace(SHORT, batch_size=4)
    rows = list(
        run.train(tmp_path / "run", "genet_tiny", open_data(str(tmp_path / "photos")), recipe)
    )
    assert [name for row in rows for name in row["skipped"]] == [spoiled]


def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(digits, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not a run, but has thesis.txt"):
        rows_of(tmp_path, digits)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_folder_that_another_process_is_just_making_is_not_called_foreign(tmp_path):
    (tmp_path / f".{run_folder.RUN_CONFIG}.{os.getpid()}-0bbfd16a.new").touch()
    run_folder.check_folder(tmp_path)


def test_a_checkpoint_that_is_cut_short_is_named(finished, digits, tmp_path):
    folder = tmp_path / "cut"
    started = run.train(folder, "genet_tiny", digits, SHORT)
    next(started)
    started.close()
    path = folder / run_folder.CHECKPOINT
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"checkpoint.pt is a damaged .*: .*another --out"):
        rows_of(folder, digits)
    path.unlink()
    assert numbers(rows_of(folder, digits)) == numbers(finished[1])


def test_training_can_begin_from_another_runs_weights_with_other_classes(
    finished, digits, tmp_path
):
    folder, _ = finished
    five = replace(
        digits,
        classes=digits.classes[:5],
        train=below(digits.train, 5),
        val=below(digits.val, 5),
    )
    five = replace(five, test=below(digits.test, 5))
    start = Bundle.load(folder / run_folder.BUNDLE)
    net, _ = prepare.initial_network("genet_tiny", find_task(), five, SHORT, start)
    before = start.net
    assert torch.equal(net.stem.conv.conv.weight, before.stem.conv.conv.weight)
    assert net.head.fc.out_features == 5
    with pytest.raises(ValueError, match="does not begin resnet_rs_tiny"):
        prepare.initial_network("resnet_rs_tiny", find_task(), five, SHORT, start)


def below(images: Images, classes: int) -> Images:
    return images.subset(i for i, label in enumerate(images.targets) if label < classes)


def test_a_network_of_timm_is_trained_and_kept_like_ours(digits, tmp_path):
    list(
        run.train(
            tmp_path / "timm", "timm/resnet10t", digits, replace(SHORT, epochs=1, warmup_epochs=0)
        )
    )
    bundle = Bundle.load(tmp_path / "timm" / run_folder.BUNDLE)
    assert bundle.net.spec.name == "resnet10t"
    assert bundle.scores["test"]["images"] == 20


def test_fit_leaves_the_network_it_was_given_trained(digits):
    net = zoo.create("genet_tiny", in_channels=1)
    before = copy.deepcopy(net.state_dict())
    batches = Batches(digits.train, TrainView(GRAY), LoaderOptions(batch=16, shuffle=True))
    for _ in train_epochs(
        net, Classify(), batches, Recipe(epochs=1, batch_size=16, lr=0.1, warmup_epochs=0)
    ):
        pass
    assert not torch.equal(net.head.fc.weight, before["head.fc.weight"])


def test_a_teacher_for_another_resolution_sees_the_view_at_its_own(digits):
    bundle = Bundle(
        net=zoo.create("resnet_rs_tiny", classes=10, in_channels=1),
        name="it",
        classes=digits.classes,
        preprocessing=Preprocessing(resolution=32, mean=(0.0,), std=(1.0,)),
    )
    sizes = []
    bundle.net.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape))
    for side in (12, 32):
        student = replace(bundle.preprocessing, resolution=side)
        matching_teacher(bundle, "it", digits.classes, student)(torch.rand(2, 1, side, side))
    assert sizes == [(2, 1, 32, 32)] * 2
    ramp = torch.arange(12.0).expand(1, 1, 12, 12)
    # pixel j of 24 is in the middle of (j, j + 1) / 2
    inside = torch.arange(1, 23)
    assert torch.allclose(resized(ramp, 24)[0, 0, 5, inside], (inside + 0.5) / 2 - 0.5)
    clip = torch.rand(2, 3, 4, 12, 10)
    for t in range(4):
        assert torch.equal(resized(clip, 16)[:, :, t], resized(clip[:, :, t], 16))
