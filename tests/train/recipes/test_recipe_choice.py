"""How a user's choice becomes numbers: by the data, the weights, the batch and the run."""

import json
import re
from contextlib import closing
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

import fullstride
from fullstride import cli
from fullstride.nets import zoo
from fullstride.report.training_progress import plan_lines
from fullstride.train import run, run_folder
from fullstride.train.prepare import PreparedRun
from fullstride.train.recipes.choice import NamedRecipe, RecipeChoice, RunOptions
from fullstride.train.recipes.named import BY_IMAGES, DIGITS, RECIPES, Case, find_recipe
from fullstride.train.recipes.papers import scaling
from fullstride.train.recipes.recipe import Recipe

OPTIMIZERS = get_args(get_type_hints(Recipe)["optimizer"])
CASE = Case(images=2000)


def resolved(source="", case=CASE, **changes):
    return RecipeChoice(source, changes).resolve(case).recipe


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lrr", "did you mean lr?"),
        ("workers", "options=RunOptions(workers=...)"),
        ("q", "fullstride.Recipe"),
    ],
)
def test_an_unknown_field_is_refused_before_the_data_are_opened(name, hint, tmp_path):
    with pytest.raises(ValueError, match=re.escape(hint)):
        fullstride.train_network("no/data", "genet_tiny", tmp_path / "run", **{name: 1})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_rate_follows_the_batch_alone_and_a_given_rate_stays(optimizer):
    base = replace(RECIPES["resnet_rs"], optimizer=optimizer, batch_size=4096, lr=1.6)
    for batch in (32, 1024, 4096):
        factor = batch / 4096 if optimizer == "sgd" else (batch / 4096) ** 0.5
        assert resolved(base, batch_size=batch).lr == pytest.approx(1.6 * factor)
        assert resolved(base, batch_size=batch) == base.at_batch(batch)
        assert resolved(base, batch_size=batch, lr=1.6).lr == 1.6
    assert resolved("resnet_rs", batch_size=32, optimizer=optimizer).lr == pytest.approx(
        RECIPES["resnet_rs"].lr * (1 / 128 if optimizer == "sgd" else (1 / 128) ** 0.5)
    )


def test_the_rate_grows_with_a_batch_up_to_the_number_of_images():
    base = replace(DIGITS, batch_size=64, lr=0.1)
    assert resolved(base, batch_size=500).lr == pytest.approx(0.1 * 500 / 64)
    assert resolved(base, batch_size=5000).lr == pytest.approx(0.1 * 2000 / 64)
    assert resolved(base, Case(images=10), batch_size=128).lr == 0.1


def test_the_default_is_by_weights_and_data():
    for images in (60, 100_000):
        case = Case(images=images)
        choices = {
            "scratch": case,
            "finetune": replace(case, has_weights=True),
            "digits": replace(case, is_digits=True, has_weights=True),
        }
        for name, case in choices.items():
            named = RecipeChoice().resolve(case)
            assert named == NamedRecipe(find_recipe(name, case), name, case)


def test_the_crops_of_training_from_scratch_follow_a_length_in_any_unit():
    case = Case(images=60_000)
    recipe = find_recipe("scratch", case)
    by_epochs = resolved("scratch", case, epochs=20.0)
    steps = 20 * 60_000 // recipe.batch_size
    assert resolved("scratch", case, steps=steps).scale == by_epochs.scale != recipe.scale
    assert resolved("", case, images=20 * 60_000).scale == by_epochs.scale


@pytest.mark.parametrize("name", BY_IMAGES)
@pytest.mark.parametrize("images", [60, 10_000])
def test_a_batch_keeps_the_images_and_the_span_of_the_average(name, images):
    case = Case(images=images)
    base = resolved(name, case)
    assert resolved(name, case, batch_size=base.batch_size) == base
    half = resolved(name, case, batch_size=base.batch_size // 2)
    assert (half.epochs, half.warmup_epochs) == (base.epochs, base.warmup_epochs)
    if base.ema_decay:
        assert half.ema_decay == pytest.approx(base.ema_decay**0.5)
    if name in ("finetune", "scratch"):  # which follow the length
        return
    longer = resolved(name, case, epochs=4 * base.epochs)
    assert longer.warmup_epochs == base.warmup_epochs
    assert longer.ema_decay == pytest.approx(base.ema_decay**0.25)
    assert resolved(name, case, epochs=4 * base.epochs, ema_decay=0.5).ema_decay == 0.5


def test_a_shorter_training_has_a_shorter_warmup_and_a_length_replaces_another():
    base = RECIPES["genet"]
    assert (base.epochs, base.warmup_epochs) == (480, 5)
    short = resolved("genet", epochs=48)
    assert short == replace(base, epochs=48, warmup_epochs=0.5)
    assert resolved("genet", epochs=48, warmup_epochs=5).warmup_epochs == 5
    assert resolved("genet", images=48 * CASE.images).warmup_epochs == pytest.approx(0.5)
    by_steps = replace(base, steps=960)
    assert resolved(by_steps, epochs=3).steps is None
    assert resolved(by_steps, images=30).steps is None


@pytest.mark.parametrize("batch", [0, -3, 10**13])
def test_a_value_out_of_bounds_is_refused_by_its_own_name(batch):
    with pytest.raises(ValueError, match="recipe.batch_size"):
        resolved(batch_size=batch)


def test_flags_and_changes_that_fit_only_together_are_one_recipe():
    base = replace(DIGITS, batch_size=64, grad_accum_steps=4)
    assert resolved(base, batch_size=6, grad_accum_steps=3).grad_accum_steps == 3


def test_a_flag_is_set_also_where_its_value_is_the_default():
    words = ["train", "photos", "--model", "m", "--out", "o"]
    default = RECIPES["scratch"]
    flags = [f"--lr={default.lr}", "--recipe.nesterov", "--recipe.resolution", "None"]
    flags += ["--recipe.scale", *map(str, default.scale), "--recipe.teacher", ""]
    choice = cli.parse([*words, *flags]).keywords["recipe"]
    assert choice.changes == {
        "lr": default.lr, "nesterov": True, "resolution": None, "scale": default.scale,
        "teacher": "",
    }  # fmt: skip
    assert cli.parse(words).keywords["recipe"].changes == {}


def test_a_run_keeps_its_numbers_and_refuses_others(few_digits, tmp_path):
    settings = dict(epochs=1, resolution=16, options=RunOptions())
    folder = tmp_path / "run"
    fullstride.train_network(
        few_digits, "genet_tiny", folder, recipe="scratch", batch_size=8, **settings
    )
    config = json.loads((folder / run_folder.RUN_CONFIG).read_text())
    images = len(few_digits.train)
    assert config["recipe_name"] == "scratch"
    assert config["recipe"]["lr"] == pytest.approx(
        find_recipe("scratch", Case(images=images)).at_batch(8).lr
    )
    # A later version with other defaults, and a version that wrote no name
    config["recipe"]["lr"] = 0.0123
    for name in ("scratch", ""):
        config["recipe_name"] = name
        (folder / run_folder.RUN_CONFIG).write_text(json.dumps(config))
        for recipe in ("scratch", ""):
            fullstride.train_network(few_digits, "genet_tiny", folder, recipe=recipe, **settings)
        for change in (dict(lr=0.5), dict(batch_size=16), dict(seed=1)):
            with pytest.raises(ValueError, match=f"has another run: recipe.{next(iter(change))}"):
                fullstride.train_network(few_digits, "genet_tiny", folder, **settings | change)
    config["recipe_name"] = "scratch"
    (folder / run_folder.RUN_CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has recipe scratch, not genet_nas"):
        fullstride.train_network(few_digits, "genet_tiny", folder, recipe="genet_nas", **settings)


@pytest.mark.parametrize("first", [{}, {"embedding_size": 0}])
def test_an_option_of_the_task_that_has_its_default_is_no_other_run(first, few_digits, tmp_path):
    options = RunOptions(task="retrieval")
    recipe = Recipe(epochs=2, batch_size=16, lr=0.01, warmup_epochs=0, resolution=16)

    def first_row(given):
        own = replace(recipe, task_options=given)
        with closing(run.train(tmp_path / "run", "genet_tiny", few_digits, own, options)) as rows:
            return next(rows)

    row = first_row(first)
    for given in ({}, {"embedding_size": 0}, {"normalise_embedding": True}):
        assert first_row(given) == row
    with pytest.raises(ValueError, match="recipe.task_options.normalise_embedding is True there"):
        first_row({"normalise_embedding": False})


def plan_of(folder, data, source="", weights="", **changes):
    """The lines of the plan by their first word."""
    plans: list[PreparedRun] = []
    options = RunOptions(weights=weights)
    named = run_folder.resolve(RecipeChoice(source, changes), folder, data, options)
    rows = run.train(folder, "genet_tiny", data, named, options, announce=plans.append)
    next(iter(rows))
    return plans[0], {line.split()[0]: line for line in plan_lines(plans[0])}


def test_the_plan_says_the_recipe_its_numbers_and_what_followed(few_digits, tmp_path):
    images = len(few_digits.train)
    base = find_recipe("scratch", Case(images=images))
    settings = dict(epochs=1, resolution=16)
    plan, lines = plan_of(tmp_path / "a", few_digits, "scratch", seed=3, batch_size=8, **settings)
    assert f"scratch for {images} images with " in lines["recipe"]
    assert "seed 3" in lines["recipe"]
    assert (
        f"{images // 8} steps of 8 images; learning rate {plan.recipe.lr:.4g} after"
        in lines["recipe"]
    )
    assert f"for batch 8; the recipe has {base.lr:.4g} for {base.batch_size}" in lines["rate"]
    assert "warmup" not in lines  # as the recipe follows the length
    assert f"{plan.steps} steps; scratch takes " in lines["length"]
    _, lines = plan_of(tmp_path / "b", few_digits, "scratch", batch_size=2 * images, **settings)
    assert f"{2 * images} is above the {images} training images" in lines["batch"]
    for name, changes in (("e", {}), ("f", dict(lr=0.001))):
        _, lines = plan_of(
            tmp_path / name,
            few_digits,
            "scratch",
            batch_size=8,
            optimizer="adamw",
            **changes,
            **settings,
        )
        assert ("of sgd, not of adamw" in lines.get("rate", "")) == (not changes)
    _, lines = plan_of(tmp_path / "c", few_digits, "scratch", batch_size=images, **settings)
    assert "one step is an epoch" in lines["batch"]
    _, lines = plan_of(
        tmp_path / "d", few_digits, "genet_nas", epochs=1, batch_size=8, resolution=16
    )
    assert "genet_nas" in lines["recipe"]
    assert "in place of 5" in lines["warmup"]


def test_fine_tuning_begins_at_the_resolution_of_the_weights(few_digits, tmp_path):
    settings = dict(epochs=1, batch_size=8)
    weights = str(tmp_path / "weights")
    fullstride.train_network(
        few_digits, "genet_tiny", weights, options=RunOptions(), resolution=48, **settings
    )
    plan, lines = plan_of(tmp_path / "a", few_digits, weights=weights, **settings)
    assert plan.pre.resolution == 48 != zoo.create("genet_tiny").spec.resolution
    assert "48 x 48" in lines["network"]
    assert "weights" not in lines
    plan, lines = plan_of(tmp_path / "b", few_digits, weights=weights, resolution=16, **settings)
    assert plan.pre.resolution == 16
    assert "48 x 48 pixels go on at 16 x 16; --resolution 48 " in lines["weights"]


def test_a_network_is_trained_at_multiples_of_its_width_and_depth(few_digits, tmp_path):
    folder = tmp_path / "run"
    words = ["train", "digits", "--model", "resnet_rs_tiny", "--out", "o", "--width", "2"]
    assert cli.parse([*words, "--depth", "1.5"]).keywords["options"].depth == 1.5
    settings = dict(resolution=32, epochs=1, batch_size=16, recipe="scratch")
    scale = dict(width=2, depth=2)
    for _ in range(2):  # the second call finds the run that the first has left
        bundle = fullstride.train_network(
            few_digits, "resnet_rs_tiny", folder, options=RunOptions(**scale), **settings
        )
    channels = dict(classes=10, in_channels=1)
    expected = zoo.create("resnet_rs_tiny", **channels, **scale)
    plain = zoo.create("resnet_rs_tiny", **channels)
    shapes = [
        {name: value.shape for name, value in net.state_dict().items()}
        for net in (bundle.net, zoo.load(folder).net, expected, plain)
    ]
    assert shapes[0] == shapes[1] == shapes[2] != shapes[3]
    with pytest.raises(ValueError, match="has another run: spec"):
        fullstride.train_network(
            few_digits, "resnet_rs_tiny", folder, options=RunOptions(), **settings
        )


def test_the_recipe_of_the_scaling_study_follows_width_and_resolution(capsys):
    for width, side in ((0.25, 128), (1.0, 224), (2.0, 448)):
        case = Case(width=width)
        recipe = resolved("scaling_350", case, resolution=side)
        assert recipe == scaling(350, width, side)
    words = ["train", "--recipe", "scaling_350", "--width", "2", "--recipe.help"]
    assert cli.run(words) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (dropout,) = [line[1] for line in lines if line[0] == "--recipe.dropout"]
    assert float(dropout) == scaling(350, 2.0).dropout != scaling(350).dropout


def test_the_help_of_a_recipe_that_follows_the_images_says_for_how_many(capsys):
    for words, name in ((["--weights", "w"], "finetune"), ([], "scratch")):
        assert cli.run(["train", "photos", *words, "--recipe.help"]) == 0
        text = capsys.readouterr().out
        first, *lines = text[text.index(f"\n{name} for") + 1 :].splitlines()
        assert first.startswith(f"{name} for 1,000 images")
        values = {line.split()[0]: line.split()[1] for line in lines}
        assert float(values["--recipe.lr"]) == RECIPES[name].lr
        assert int(values["--recipe.batch-size"]) == RECIPES[name].batch_size
