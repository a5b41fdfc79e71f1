"""docs/extend/add_a_task.md, followed to the letter: the one file it shows is a task."""

import importlib.util
import json
import re
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from pages import code
from torch import nn

from fullstride import cli, tables, tasks
from fullstride.deploy.predict import predict
from fullstride.deploy.settings import ExportOptions
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.train import prepare, run, run_folder
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS
from fullstride.train.recipes.recipe import saved_recipe

SHORT = replace(DIGITS, epochs=2, warmup_epochs=0, batch_size=16, resolution=16, lr=0.01)


@pytest.fixture
def age(tmp_path, monkeypatch):
    """The page's file, imported, and its task named as the page says."""
    path = tmp_path / "age.py"
    path.write_text(*code("docs/extend/add_a_task.md"))
    spec = importlib.util.spec_from_file_location("age", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "age", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    monkeypatch.setitem(tables.TASKS, "age", "age:Age")
    monkeypatch.setitem(tasks.TASKS, "age", module.Age)
    return module


class PyramidHead(nn.Module):
    """A number from the means of all maps."""

    def __init__(self, channels):
        super().__init__()
        self.linear = nn.Linear(sum(channels), 1)

    def forward(self, maps):
        return self.linear(torch.cat([each.mean((2, 3)) for each in maps], 1))


@pytest.fixture
def age_with_head(age, monkeypatch):
    class AgeWithHead(age.Age):
        name = "age_with_head"

        def head(self, net):
            return PyramidHead(net.channels)

    monkeypatch.setitem(tasks.TASKS, AgeWithHead.name, AgeWithHead)
    return AgeWithHead()


@pytest.fixture
def few_ages(age, few_digits):
    """Digits, whose age is their value."""
    whole = age.Age().open_data("digits")
    splits = {
        split: getattr(whole, split).subset(range(len(getattr(few_digits, split))))
        for split in ("train", "val", "test")
    }
    return replace(whole, **splits)


def weights_of(folder):
    return tasks.load(folder).net.state_dict()


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(v, theirs[k]) for k, v in ours.items())


def test_the_pages_score_and_loss_are_those_computed_by_hand(age):
    outputs, targets = torch.tensor([[1.0], [4.0], [2.5]]), torch.tensor([3.0, 4.0, 2.0])
    first, second = age.Age().score(), age.Age().score()
    first.update(outputs[:1], targets[:1])
    second.update(outputs[1:], targets[1:])
    first.merge(second)
    assert first.compute() == {"mae": pytest.approx(2.5 / 3)}
    assert age.Age().loss(outputs, targets).item() == pytest.approx((1.5 + 0 + 0.125) / 3)


@pytest.mark.parametrize("name", ["age", "age_with_head"])
def test_a_task_trains_resumes_bit_for_bit_and_is_loaded_from_its_bundle(
    name, age_with_head, few_ages, few_digits, tmp_path
):
    task = tasks.find_task(name)
    rows = list(
        run.train(tmp_path / "whole", "genet_tiny", few_ages, SHORT, RunOptions(task=task.name))
    )
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(row["val/mae"] > 0 for row in rows)
    best = min(rows, key=lambda row: row["val/mae"])
    assert run_folder.best_row(rows, task.metric) is best

    started = run.train(
        tmp_path / "stopped",
        "genet_tiny",
        few_ages,
        SHORT,
        RunOptions(task=task.name, checkpoint_every_steps=3),
    )
    next(started)
    started.close()
    list(run.train(tmp_path / "stopped", "genet_tiny", few_ages, SHORT, RunOptions(task=task.name)))
    assert equal(weights_of(tmp_path / "stopped"), weights_of(tmp_path / "whole"))

    bundle = tasks.load(tmp_path / "whole")
    assert (bundle.task, bundle.classes) == (name, ("years",))
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["task"] == name
    bundle.save(tmp_path / "again")
    assert equal(weights_of(tmp_path / "again"), bundle.net.state_dict())
    with pytest.raises(ValueError, match="task is 'age.*' there and 'classify' now"):
        list(run.train(tmp_path / "whole", "genet_tiny", few_digits, SHORT))


def test_networks_with_the_head_of_a_task_are_not_loaded_without_it(
    age_with_head, few_ages, tmp_path
):
    net, pre = prepare.initial_network("genet_tiny", age_with_head, few_ages, SHORT)
    x = torch.rand(2, 1, 16, 16)
    assert torch.equal(net(x), net.task_head(net.features(x)))
    bundle = Bundle(
        net, name="tiny", classes=few_ages.classes, preprocessing=pre, task=age_with_head.name
    )
    bundle.save(tmp_path / "bundle")
    with pytest.raises(ValueError, match="load it by fullstride.tasks.load"):
        zoo.load(tmp_path / "bundle")
    with torch.no_grad():
        assert torch.equal(tasks.load(tmp_path / "bundle").net(x), net.eval()(x))
    padded = replace(SHORT, pad_channels=True)
    with pytest.raises(ValueError, match="recipe.pad_channels"):
        prepare.initial_network("genet_tiny", age_with_head, few_ages, padded)


@pytest.mark.parametrize(
    "changes",
    [dict(mixup=0.2), dict(cutmix=1.0), dict(teacher="runs/x"), dict(per_class=2)],
    ids=lambda changes: next(iter(changes)),
)
def test_what_needs_one_class_for_each_image_is_refused(changes, age, few_ages, tmp_path):
    recipe = replace(SHORT, **changes)
    with pytest.raises(ValueError, match=f"^recipe.{next(iter(changes))} .* the task age "):
        next(
            run.train(
                tmp_path / "run", "genet_tiny", few_ages, recipe, RunOptions(task=age.Age.name)
            )
        )


def test_the_pages_option_is_one_of_the_command_line_and_of_recipes(
    age, few_ages, tmp_path, capsys
):
    words = ["train", "digits", "--task", "age", "--model", "genet_tiny", "--out", str(tmp_path)]
    for flag in ("--help", "--help-all", "--recipe.help"):
        assert cli.run(["train", "--task", "age", flag]) == 0
        page = capsys.readouterr().out
        assert "--task.beta" in page
        assert "error in years from which" in page
    assert cli.run(["train", "--help-all"]) == 0
    assert "--task.beta" not in capsys.readouterr().out
    choice = cli.parse([*words, "--task.beta", "5"]).keywords["recipe"]
    assert choice.changes == {"task_options": {"beta": 5.0}}
    recipe = replace(SHORT, steps=2, **choice.changes)
    assert age.Age().with_options(recipe) == age.Age(beta=5.0)
    assert saved_recipe(json.loads(json.dumps(asdict(recipe))), "it") == recipe
    losses = [
        next(run.train(tmp_path / name, "genet_tiny", few_ages, each, RunOptions(task="age")))[
            "loss"
        ]
        for name, each in (("one", replace(SHORT, steps=2)), ("five", recipe))
    ]
    assert losses[1] < losses[0]
    saved = json.loads((tmp_path / "five" / "run.json").read_text())
    assert saved["recipe"]["task_options"] == {"beta": 5.0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "age", "--task.beta", "0"], "beta is 0.0: use a finite number, above 0"),
        (["--task", "age", "--task.alpha", "1"], "--task.alpha"),
        (["--task=classify", "--task.beta", "1"], "the task classify has no options of its own"),
        (["--task.beta", "1"], "--task.beta: name the task that has this option, by --task NAME"),
        (["--task", "agee", "--task.beta", "1"], "no task named 'agee': choose from"),
    ],
)
def test_options_that_the_task_does_not_have_are_refused_in_one_line(flags, message, age, capsys):
    assert cli.run(["train", "digits", "--model", "genet_tiny", "--out", "x", *flags]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_commands_know_the_task_of_a_run(age, few_ages, tmp_path, capsys):
    words = ["train", "digits", "--task", "age", "--model", "genet_tiny", "--recipe.steps", "2"]
    words += ["--recipe.warmup-epochs", "0", "--recipe.resolution", "16", "--out"]
    assert cli.run([*words, str(tmp_path / "run")]) == 0
    assert re.search(r"validation mean absolute error \d+\.\d+ years", capsys.readouterr().out)
    assert cli.run(["validate", str(tmp_path / "run")]) == 0
    assert re.search(r"test mean absolute error \d+\.\d+ years", capsys.readouterr().out)
    picture = tmp_path / "digit.png"
    few_ages.test.picture(0).save(picture)
    assert cli.run(["predict", str(tmp_path / "run"), str(picture)]) == 0
    assert re.search(r"digit.png: -?\d+\.\d years$", capsys.readouterr().out.strip())
    assert cli.run(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert "mean absolute error" in (tmp_path / "page.html").read_text()


def test_an_exported_file_predicts_what_the_bundle_does(age, few_ages, tmp_path):
    from fullstride.deploy.comparison import ComparisonImages
    from fullstride.deploy.export import export
    from fullstride.deploy.formats import open_file

    net, pre = prepare.initial_network("genet_tiny", age.Age(), few_ages, SHORT)
    bundle = Bundle(
        net.eval(), name="tiny", classes=few_ages.classes, preprocessing=pre, task="age"
    )
    pictures = [few_ages.test.picture(index) for index in range(3)]
    paths = [tmp_path / f"{index}.png" for index in range(3)]
    for picture, path in zip(pictures, paths, strict=True):
        picture.save(path)
    images = ComparisonImages(pictures)
    export(bundle, tmp_path / "net.onnx", images, ExportOptions(input_kind="pixels"))
    ours, theirs = (
        [prediction.guesses[0].years for prediction in predict(model, paths)]
        for model in (open_file(tmp_path / "net.onnx"), bundle)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
