"""Runs with one wrong value: in any field of any file, it is one line, or it changes nothing."""

import copy
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from fullstride import cli
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.tasks.classify import Classify
from fullstride.train.compute import SINGLE_PROCESS
from fullstride.train.loop import Trainer, build_trainer
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.run_folder import load_checkpoint, read_log

RECIPE = Recipe(epochs=3, batch_size=4, lr=0.1, warmup_epochs=0, efficiency="plain")
RECIPES = {
    "sgd": RECIPE,
    "adamw": replace(RECIPE, optimizer="adamw"),
    "rmsprop": replace(RECIPE, optimizer="rmsprop"),
    "lamb": replace(RECIPE, optimizer="lamb", lr=0.01),
    "muon": replace(RECIPE, optimizer="muon", lr=0.01),
    "sgdw": replace(RECIPE, decoupled_weight_decay=True),
    "fp16": replace(RECIPE, precision="fp16"),
}
NUMBERS = [7, -1, math.nan, 10**12, 10**30]
TENSORS = [torch.ones(3, 5), torch.tensor(math.nan), torch.ones(2, dtype=torch.complex64)]
TENSORS += [torch.ones(2, dtype=torch.long), torch.empty(0), torch.eye(2).to_sparse()]
VALUES = [*NUMBERS, "text", None, [], {}, *TENSORS]


def learner(recipe: Recipe) -> Trainer:
    torch.manual_seed(0)
    net = Network(replace(SPECS["genet_tiny"], classes=2, stages=SPECS["genet_tiny"].stages[:1]))
    return build_trainer(net, Classify(), recipe, 4, None, SINGLE_PROCESS)


def step(trained: Trainer, number: int) -> Tensor:
    x = torch.linspace(0, 1, 4 * 3 * 64).reshape(4, 3, 8, 8)
    return trained.step(x, torch.tensor([0, 1, 0, 1]), number)


def state_of(recipe: Recipe) -> dict[str, Any]:
    trained = learner(recipe)
    trained.net.train()
    losses = [step(trained, number) for number in range(4, 6)]
    return copy.deepcopy(trained.state(1, 2, losses))


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of each value; of mappings from names or numbers the first and the last."""
    if path:
        yield path
    if isinstance(data, Mapping):
        keys = list(data)
        for key in keys if len(keys) < 30 else (keys[0], keys[-1]):
            yield from places(data[key], (*path, key))
    elif isinstance(data, list | tuple) and data:
        yield from places(data[0], (*path, 0))


def changed(data: Any, path: tuple[Any, ...], *value: Any) -> Any:
    """A shallow copy of `data` with `value` at `path`, or without that item."""
    if not path:
        return value[0]
    items = dict(data) if isinstance(data, Mapping) else dict(enumerate(data))
    if len(path) == 1 and not value:
        del items[path[0]]
    else:
        items[path[0]] = changed(items[path[0]], path[1:], *value)
    return items if isinstance(data, Mapping) else type(data)(items.values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_wrong_value_in_a_checkpoint_is_one_line_or_leaves_training_as_it_is(name):
    recipe = RECIPES[name]
    valid, fresh = state_of(recipe), learner(recipe)
    refused = 0
    for path in places(valid):
        for change in ([], *([value] for value in VALUES)):
            data, lines = changed(valid, path, *change), [""]
            try:
                fresh.resume(data)
            except ValueError as error:
                refused += 1
                lines = str(error).splitlines()
            except Exception as error:
                raise AssertionError(f"{path} {change}: {type(error).__name__} {error}") from error
            assert len(lines) == 1, path
    count = len(list(places(valid)))
    assert refused > 5 * count  # of 16 values, some are valid where a number or object is
    assert fresh.resume(valid)[:2] == (1, 2)
    fresh.net.train()
    assert math.isfinite(step(fresh, 6))


def test_a_checkpoint_resumes_to_the_same_bits_after_its_checks():
    for recipe in RECIPES.values():
        whole, resumed = learner(recipe), learner(recipe)
        whole.net.train()
        losses = [step(whole, number) for number in range(4, 6)]
        state = copy.deepcopy(whole.state(1, 2, losses))
        resumed.resume(state)
        resumed.net.train()
        assert torch.equal(step(whole, 6), step(resumed, 6))
        pairs = zip(whole.net.parameters(), resumed.net.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run, and one that can be resumed, on 24 small images."""
    root = tmp_path_factory.mktemp("runs")
    for name in "ab":
        for number in range(12):
            path = root / "data" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (20 * number, ord(name), 0)).save(path)
    assert cli.run([*train(root), str(root / "finished")]) == 0
    shutil.copytree(root / "finished", root / "stopped")
    shutil.rmtree(root / "stopped" / "bundle")
    return root


def train(root) -> list[str]:
    words = "--model genet_tiny --device cpu --epochs 2 --batch-size 16 --resolution 8"
    return ["train", str(root / "data"), *words.split(), "--recipe.warmup-epochs", "0", "--out"]


WRONG: list[Any] = ["text", None, math.nan, -1, 10**30, [], {}]
LOG_FIELDS = ["epoch", "epochs", "loss", "lr", "images_per_s", "data_wait_fraction", "skipped"]
LOG_FIELDS += ["val/top1", "val/loss"]
FIELDS = {
    "run.json": ["model", "data", "val", "fingerprint", "classes", "spec", "preprocessing"]
    + ["recipe", "efficiency", "task", "recipe.lr", "recipe.epochs", "spec.stages"],
    "bundle/bundle.json": ["format", "name", "classes", "spec", "preprocessing", "recipe"]
    + ["scores", "scores.test", "scores.test.top1", "scores.test.images", "environment", "task"]
    + ["preprocessing.resolution", "spec.stages.0.width", "spec.stages.0.kernel", "spec.classes"],
}


def check_command(words: list[str], place: str, capsys: Any) -> int:
    code = cli.run(words)
    error = capsys.readouterr().err
    assert "defect" not in error, (place, error)
    assert "remove" not in error, (place, error)
    assert code in (0, 2), (place, code, error)
    assert len(error.splitlines()) == (code == 2), (place, error)
    return code


def spoiled(text: str, field: str, *value: Any) -> str:
    """JSON `text` with `value` at a field like "scores.test.top1", or without it."""
    path = [int(part) if part.isdigit() else part for part in field.split(".")]
    return json.dumps(changed(json.loads(text), tuple(path), *value))


@pytest.mark.parametrize("index", range(len(LOG_FIELDS)), ids=LOG_FIELDS)
def test_a_wrong_field_of_a_log_is_one_line_for_training_and_for_reports(index, runs, capsys):
    field, refused = LOG_FIELDS[index], 0
    path = runs / "finished" / "log.jsonl"
    valid = path.read_text()
    rows = valid.splitlines()
    words = ["report", str(runs / "finished"), "--out", str(runs / "page.html")]
    try:
        for number, change in enumerate(([], *([value] for value in WRONG))):
            row = changed(json.loads(rows[0]), (field,), *change)
            path.write_text("\n".join([json.dumps(row), *rows[1:]]))
            lines = [""]
            try:
                read_log(path.parent, Classify().metric)
            except ValueError as error:
                refused += 1
                lines = str(error).splitlines()
            assert len(lines) == 1, change
            if number in (0, 1 + index % len(WRONG)):  # the command takes longer than its reading
                code = check_command(words, f"{field} {change}", capsys)
                assert code == (2 if lines[0] else 0)
    finally:
        path.write_text(valid)
    assert refused >= 5


@pytest.mark.parametrize("text", ["{}", "[]", "null", "", "{", "\x00", "{}\n{}", "[" * 10_000])
def test_a_damaged_log_is_one_line_wherever_it_is_read(text, runs, capsys):
    for folder, words in (
        ("finished", ["report", str(runs / "finished"), "--out", str(runs / "page.html")]),
        ("stopped", [*train(runs), str(runs / "stopped")]),
    ):
        path = runs / folder / "log.jsonl"
        valid = path.read_text()
        path.write_text(text)
        try:
            code = check_command(words, text[:9], capsys)
        finally:
            path.write_text(valid)
        assert code == 2 or not text


@pytest.mark.slow
@pytest.mark.parametrize("file", FIELDS)
def test_a_wrong_field_of_a_record_is_one_line_for_its_readers(file, runs, capsys):
    run, refused = str(runs / "finished"), 0
    path = runs / "finished" / file
    valid = path.read_text()
    readers = [["validate", run], ["report", run, "--out", str(runs / "page.html")]]
    picture = str(runs / "data" / "a" / "0.png")
    readers += [["predict", run, picture], [*train(runs), run], ["measure", "cost", run]]
    try:
        for number, field in enumerate(FIELDS[file]):
            for position, change in enumerate(([], *([value] for value in WRONG))):
                path.write_text(spoiled(valid, field, *change))
                words = readers[(number + position) % len(readers)]
                refused += check_command(words, f"{words[0]} {field} {change}", capsys) == 2
    finally:
        path.write_text(valid)
    assert refused > 3 * len(FIELDS[file])


def test_a_checkpoint_of_another_kind_is_named_and_never_to_be_removed(runs, capsys):
    path = runs / "stopped" / "checkpoint.pt"
    valid = path.read_bytes()
    contents = {"weights": {"stem": torch.ones(3)}, "a list": [1, 2], "a number": 3, "none": None}
    try:
        for name, content in contents.items():
            torch.save(content, path)
            assert check_command([*train(runs), str(path.parent)], name, capsys) == 2
        for damaged in (valid[:1000], valid[:-1000], b"PK\3\4", b"\0" * 100, b""):
            path.write_bytes(damaged)
            check_command([*train(runs), str(path.parent)], "damaged", capsys)
    finally:
        path.write_bytes(valid)
    state = load_checkpoint(path.parent)
    assert state is not None
    assert state["epochs"] == 2
