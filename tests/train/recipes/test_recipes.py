"""Recipes as data: bounds, lengths, JSON and the help of their fields."""

import json
import math
from dataclasses import asdict, fields, replace
from itertools import combinations

import numpy as np
import pytest
from PIL import Image
from torch import nn

from fullstride.cli import find_recipe, run
from fullstride.data.transforms.crop import Augmentation, train_view
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.train.optimizer import build_optimizer, lr_at
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import FINETUNE, RECIPES
from fullstride.train.recipes.papers import RESNET_RS_SIZES, resnet_rs, scaling
from fullstride.train.recipes.recipe import SHORT_FLAGS, Recipe, field_help, saved_recipe
from fullstride.train.run import train as run_training

FIELDS_OF_AUGMENTATION = [field.name for field in fields(Augmentation)]

# Together these have every pair of features that any named recipe has.
SAMPLE = (
    "tresnet_timm",
    "tresnet_448",
    "resnet_rs_200_256",
    "tresnet_finegrained",
    "genet",
    "digits",
)
SAMPLE += ("finetune", "resnet", "scratch", "rsb_a1", "torchvision_600", "tresnet_multilabel")
# These are trained by the tests of their tasks, and are no recipes for digits.
OF_OTHER_TASKS = {"dense", "tresnet_fcos", "resnet_rs_voc"}
OF_OTHER_TASKS |= {"resnet_rs_voc_seg", "resnet_rs_nyu_depth"}
NUMBERS = {
    "epochs",
    "batch_size",
    "lr",
    "resolution",
    "weight_decay",
    "warmup_epochs",
    "teacher_share",
}
PART_OF = {"rand_form": "rand_layers", "random_erasing_fill": "random_erasing_prob"}
PART_OF |= {"drop_path_by": "drop_path"}
PART_OF |= {f"unlabelled_{each}": "unlabelled" for each in ("ratio", "min_confidence", "per_class")}
NUMBERS |= {"rand_magnitude", "crop", "scale", "ratio", "seed"}


def pairs_of_features(recipe):
    """Pairs of fields that are on, or have one of several choices."""
    features = [
        (name, value if isinstance(value, str) and name != "teacher" else bool(value))
        for name, value in asdict(recipe).items()
        if value and name not in NUMBERS and getattr(recipe, PART_OF.get(name, name))
    ]
    return set(combinations(sorted(features, key=str), 2))


def test_the_sample_has_every_pair_of_features_of_the_named_recipes():
    covered = set().union(*(pairs_of_features(RECIPES[name]) for name in SAMPLE))
    for name in RECIPES.keys() - OF_OTHER_TASKS:
        assert pairs_of_features(RECIPES[name]) <= covered, name


@pytest.fixture(scope="module")
def teacher(few_digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "bundle"
    net = zoo.create("genet_tiny", in_channels=1, classes=10)
    gray = Preprocessing(resolution=16, mean=(0.0,), std=(1.0,))
    Bundle(net=net, name="it", classes=few_digits.classes, preprocessing=gray).save(folder)
    return str(folder)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_named_recipe_trains_an_epoch(name, teacher, few_digits, tmp_path):
    recipe = replace(RECIPES[name], epochs=1, warmup_epochs=0, batch_size=32, resolution=16)
    if recipe.teacher:
        recipe = replace(recipe, teacher=teacher)
    data, task = few_digits, "classify"
    if name == "tresnet_multilabel":
        data, task = data.with_targets(data.classes, lambda label: (label,)), "multilabel"
    weights = teacher if recipe.linear_probe else ""
    options = RunOptions(task=task, weights=weights)
    (row,) = run_training(tmp_path / "run", "genet_tiny", data, recipe, options)
    assert math.isfinite(row["loss"])


@pytest.mark.parametrize("name", RECIPES)
def test_a_named_recipe_has_an_optimizer_a_schedule_and_an_augmentation(name):
    recipe = RECIPES[name]
    assert build_optimizer(nn.BatchNorm2d(1), recipe).param_groups
    rates = [lr_at(recipe.epochs * step / 1000, recipe) for step in range(1001)]
    assert max(rates) == pytest.approx(recipe.lr, rel=0.02)
    assert 0 <= min(rates) < recipe.lr / 10
    augmentation = {name: getattr(recipe, name) for name in FIELDS_OF_AUGMENTATION}
    view = train_view(
        Image.new("RGB", (40, 30)),
        Preprocessing(resolution=16),
        Augmentation(**augmentation),
        np.random.default_rng(0),
    )
    assert view.shape == (16, 16, 3)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_goes_to_json_and_back_unchanged(name):
    assert saved_recipe(json.loads(json.dumps(asdict(RECIPES[name]))), "it") == RECIPES[name]


def test_the_recipe_of_a_run_a_bundle_or_a_file_is_found_and_its_fields_can_be_changed(
    tmp_path, capsys
):
    recipe = replace(FINETUNE, lr=0.123, milestones=(0.25, 0.5))
    (tmp_path / "mine.json").write_text(json.dumps(asdict(recipe)))
    for folder, file in (("run", "run.json"), ("bundle", "bundle.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(json.dumps({"recipe": asdict(recipe)}))
    for name in ("mine.json", "run", "run/run.json", "bundle"):
        assert find_recipe(str(tmp_path / name)) == recipe
    words = ["train", "digits", "--model", "genet_tiny", "--out", str(tmp_path / "out")]
    words += [
        "--recipe",
        str(tmp_path / "mine.json"),
        "--recipe.resolution",
        "16",
        "--recipe.steps",
        "3",
    ]
    assert run([*words, "--recipe.warmup-epochs", "0"]) == 0
    asked = json.loads((tmp_path / "out" / "run.json").read_text())["recipe"]
    assert asked == json.loads(
        json.dumps(asdict(replace(recipe, resolution=16, steps=3, warmup_epochs=0)))
    )
    assert "epoch   1/1 " in capsys.readouterr().out


def test_the_help_of_a_field_has_the_bounds_of_its_type():
    text = field_help()
    assert text["momentum"].endswith("(at least 0 and below 1)")
    assert text["milestones"].endswith("(above 0 and below 1)")
    assert "(" not in text["seed"].removesuffix("(at least 0)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "mine.json has no recipe: give the JSON"),
        ('{"recipe": 3}', "mine.json has no recipe"),
        ('{"epochs": 3, "batch_size": 8}', "mine.json lacks lr"),
        (
            '{"epochs": 3, "batch_size": 8, "lr": 1, "lable_smoothing": 0}',
            "did you mean 'label_smoothing'",
        ),
        (
            '{"epochs": 3, "batch_size": 8.5, "lr": 1}',
            "mine.json: batch_size is 8.5: use a whole number",
        ),
        (
            '{"epochs": 3, "batch_size": true, "lr": 1}',
            "mine.json: batch_size is True: use a whole number",
        ),
        ('{"epochs": 3, "batch_size": 8, "lr": "high"}', "mine.json: lr is 'high': use"),
        (
            '{"epochs": 3, "batch_size": 8, "lr": 1, "optimizer": "lion"}',
            "mine.json: optimizer is 'lion': use 'sgd' or",
        ),
        (
            '{"epochs": 3, "batch_size": 8, "lr": 1, "scale": [1]}',
            r"mine.json: scale is \[1\]: use a list of 2",
        ),
        (
            '{"epochs": 3, "batch_size": 0, "lr": 1}',
            "mine.json: batch_size is 0: use a whole number, at least 1",
        ),
        (
            '{"epochs": Infinity, "batch_size": 8, "lr": 1}',
            "mine.json: epochs is inf: use a finite number",
        ),
        (
            '{"epochs": 3, "batch_size": 8, "lr": 1' + 400 * "0" + "}",
            "mine.json: lr is 10000000.*: use a finite number",
        ),
        ('{"epochs": 3', "is not whole JSON"),
    ],
)
def test_a_saved_recipe_that_is_none_is_refused(text, message, tmp_path):
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_recipe(str(tmp_path / "mine.json"))


def test_a_recipe_that_is_not_there_is_refused_with_near_misses(tmp_path):
    with pytest.raises(
        ValueError, match="no recipe named 'tresnet_4': did you mean tresnet_448 or"
    ):
        find_recipe("tresnet_4")
    with pytest.raises(ValueError, match="no recipe named 'x': choose from finetune, .* a file"):
        find_recipe("x")
    with pytest.raises(ValueError, match="no such file or folder: runs/x.json"):
        find_recipe("runs/x.json")
    with pytest.raises(
        ValueError, match="no recipe in the folder .*: give a run, a bundle or a JSON file"
    ):
        find_recipe(str(tmp_path))


def test_only_commands_that_train_take_a_recipe(capsys):
    assert run(["zoo", "--recipe", "genet"]) == 2
    assert "--recipe" in capsys.readouterr().err


def test_the_help_of_a_recipe_names_every_field_with_its_value_and_meaning(capsys):
    assert run(["train", "--recipe", "genet", "--recipe.help"]) == 0
    text = capsys.readouterr().out
    lines = text[text.index("--recipe.") :].splitlines()
    assert [line.split()[0] for line in lines] == [
        f"--recipe.{field.name.replace('_', '-')}"
        for field in fields(Recipe)
        if field.name != "task_options"
    ]
    assert all(len(line.split("  ", 1)[1].split()) >= 3 for line in lines)
    assert [line.split()[1] for line in lines if "teacher " in line] == ["resnet152"]
    short = {line.split()[0]: flag for line in lines for flag in SHORT_FLAGS if f"({flag})" in line}
    assert short == {
        f"--recipe.{field.replace('_', '-')}": flag for flag, field in SHORT_FLAGS.items()
    }


def test_a_duration_in_steps_or_images_is_one_in_epochs():
    short = replace(FINETUNE, batch_size=64, warmup_epochs=0)
    assert replace(short, steps=150).in_epochs(60).epochs == 2.5
    assert replace(short, images=64 * 150).in_epochs(60) == replace(short, steps=150).in_epochs(60)
    assert replace(short, images=64 * 150 + 1).in_epochs(60).epochs == pytest.approx(151 / 60)
    assert short.in_epochs(60) == short
    assert replace(short, epochs=0.001).in_epochs(60).epochs == 1 / 60  # a step at least
    assert (
        replace(short, images=320).in_epochs(1, images_per_step=16).epochs == 20
    )  # a set smaller than a batch
    assert (
        replace(FINETUNE, steps=30, warmup_epochs=1, schedule="one_cycle").in_epochs(60).epochs
        == 0.5
    )


@pytest.mark.parametrize("schedule", ["cosine", "steps", "exponential"])
def test_a_warmup_as_long_as_training_becomes_a_tenth_of_it_and_a_shorter_one_stays(schedule):
    recipe = replace(FINETUNE, schedule=schedule, warmup_epochs=5)
    for change in (dict(epochs=1), dict(steps=60), dict(images=60 * recipe.batch_size)):
        short = replace(recipe, **change)
        assert short.warmup_epochs == 5  # a longer training begins with the same recipe
        resolved = short.in_epochs(60)
        assert (resolved.epochs, resolved.warmup_epochs) == (1, pytest.approx(0.1))
        assert resolved.in_epochs(60) == resolved
        rates = [lr_at((step + 0.5) / 60, resolved) for step in range(60)]
        assert rates.index(max(rates)) == 6
        assert all(0 < rate <= recipe.lr for rate in rates)
    for epochs in (5.1, 20):  # of the tenths that are shown
        assert replace(recipe, epochs=epochs).in_epochs(10).warmup_epochs == 5
    one_cycle = replace(recipe, schedule="one_cycle", epochs=1)
    assert one_cycle.in_epochs(60) == one_cycle


def test_the_side_grows_evenly_in_eights_and_ends_at_the_resolution():
    growing = replace(FINETUNE, epochs=10, grow_from=128, grow_share=0.5)
    assert growing.resolutions(224) == (128, 144, 168, 184, 208)
    assert FINETUNE.resolutions(224) == ()
    with pytest.raises(ValueError, match="recipe.grow_from 128: use less than the resolution 96"):
        growing.resolutions(96)


def test_training_and_evaluation_may_have_different_resolutions():
    assert set(RECIPES["rsb_a3"].resolutions(224)) == {160}
    recipe = replace(RECIPES["torchvision_600"], epochs=3.5)
    assert recipe.resolutions(224) == (176,) * 4
    assert recipe.resolutions(48) == (40,) * 4
    assert replace(recipe, train_resolution_ratio=1.01).resolutions(224) == ()
    growing = replace(recipe, epochs=4, grow_from=128, grow_share=0.5)
    assert growing.resolutions(224) == (128, 152, 176, 176)


def test_each_step_of_the_additive_study_changes_what_its_name_says_and_nothing_else():
    steps = [name for name in RECIPES if name.startswith("study_")]
    changed = []
    for before, after in zip(["resnet", *steps], steps, strict=False):
        old, new = asdict(RECIPES[before]), asdict(RECIPES[after])
        changed.append({field for field in old if old[field] != new[field]})
    assert changed == [
        {"schedule"},
        {"epochs"},
        {"ema_decay"},
        {"label_smoothing"},
        {"drop_path", "drop_path_by"},
        {"rand_form", "rand_layers", "rand_magnitude"},
        {"dropout"},
        {"weight_decay"},
    ]


def test_regularisation_grows_with_the_network():
    recipes = [resnet_rs(*size) for size in RESNET_RS_SIZES]
    wide = [scaling(350, width) for width in (0.25, 0.5, 1.0, 1.5, 2.0)]
    for row in (recipes, wide):
        for name in ("dropout", "rand_magnitude", "drop_path"):
            values = [getattr(recipe, name) for recipe in row]
            assert values == sorted(values)


@pytest.mark.parametrize(
    ("epochs", "width", "resolution", "magnitude", "drop_path", "dropout"),
    [
        (10, 1.0, 224, None, 0.0, 0.0),
        (100, 2.0, 320, None, 0.0, 0.0),
        (350, 0.25, 448, 10, 0.0, 0.0),
        (350, 0.5, 320, 10, 0.2, 0.1),
        (350, 2.0, 160, 10, 0.0, 0.75),
        (350, 2.0, 224, 15, 0.2, 0.75),
        (350, 1.0, 320, 15, 0.2, 0.25),
        (350, 1.5, 448, 20, 0.2, 0.6),
    ],
)
def test_the_scaling_study_has_the_numbers_of_the_papers_appendix(
    epochs, width, resolution, magnitude, drop_path, dropout
):
    recipe = scaling(epochs, width, resolution)
    assert (recipe.epochs, recipe.resolution, recipe.weight_decay) == (epochs, resolution, 4e-5)
    assert recipe.label_smoothing == (0.1 if epochs == 350 else 0.0)
    assert (recipe.rand_magnitude if recipe.rand_layers else None) == magnitude
    assert (recipe.drop_path, recipe.dropout) == (drop_path, dropout)


def test_the_candidates_of_genets_search_train_without_the_regularisation_of_the_final_network():
    recipe = RECIPES["genet_nas"]
    assert (recipe.epochs, recipe.teacher, recipe.auto_augment) == (120, "", False)
    assert (recipe.label_smoothing, recipe.mixup, recipe.random_erasing_prob) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(epochs=0), "recipe.epochs 0: use a finite number, above 0"),
        (dict(lr=-1), "recipe.lr -1: use a finite number, above 0"),
        (dict(batch_size=0), "recipe.batch_size 0: use a whole number, at least 1"),
        (dict(steps=0), "recipe.steps 0: use a whole number, at least 1"),
        (dict(steps=5, images=5), "recipe.steps 5 and recipe.images 5 both set the length"),
        (dict(momentum=1.0), "recipe.momentum 1.0: use .* below 1"),
        (dict(weight_decay=-1.0), "recipe.weight_decay -1.0"),
        (dict(weight_decay=float("nan")), "recipe.weight_decay nan: use numbers up to 1e"),
        (dict(seed=10**19), "recipe.seed 10000000000000000000: use numbers up to"),
        (dict(scale=(0.1, float("inf"))), "use numbers up to"),
        (dict(epochs=1e6), "recipe.epochs 1000000.0: use .* at most 100,000"),
        (dict(grow_share=1.5), "recipe.grow_share 1.5: use .* at most 1"),
        (dict(milestones=(0.5, 0.25)), "recipe.milestones .* use increasing"),
        (dict(batch_size=10, grad_accum_steps=4), "recipe.batch_size 10 is not divisible by .* 4"),
        (dict(triplet=1.0), "recipe.triplet 1 compares .* set recipe.per_class to 2 or more"),
        (dict(triplet=1.0, per_class=4, mixup=0.2), "recipe.mixup and recipe.cutmix to 0"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(FINETUNE, **change)
