"""What Python offers in one call: names of networks, training, predictions, and short reprs."""

from dataclasses import replace
from fnmatch import fnmatch

import numpy as np
import pytest
import timm
import torch

import fullstride
from fullstride.deploy.exported import ExportedModel, Metadata
from fullstride.latency.devices import load_profile
from fullstride.latency.estimator import estimate
from fullstride.measure.bench import BenchOptions, bench
from fullstride.measure.protocols import ONLINE
from fullstride.nets import zoo
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.train.loop import Epoch
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS, RECIPES
from fullstride.train.recipes.recipe import Recipe

WIDTH = 420  # characters of a repr
SHORT = dict(steps=2, resolution=16, batch_size=16)


@pytest.fixture(scope="module")
def bundle(few_digits, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "few"
    return fullstride.train_network(few_digits, "genet_tiny", out, options=RunOptions(), **SHORT)


def test_the_zoo_lists_its_networks_and_those_of_timm_by_a_pattern():
    assert set(zoo.list()) == set(SPECS)
    assert zoo.list("genet_*") == tuple(name for name in SPECS if name.startswith("genet_"))
    expected = {f"timm/{name}" for name in timm.list_models() if fnmatch(name, "gernet_*")}
    assert set(zoo.list("timm/gernet_*")) == expected
    assert len(expected) >= 3
    assert zoo.list("nothing*") == ()


def test_one_call_trains_and_returns_the_bundle_that_the_run_left(few_digits, bundle, tmp_path):
    rows = []
    again = fullstride.train_network(
        few_digits, "genet_tiny", tmp_path / "run", recipe="digits", options=RunOptions(),
        on_epoch=rows.append, **SHORT,
    )  # fmt: skip
    assert [row["epoch"] for row in rows] == [1]
    assert again.recipe["steps"] == 2
    assert again.recipe["rotation_degrees"] == DIGITS.rotation_degrees
    saved = zoo.load(tmp_path / "run")
    for net in (saved.net, bundle.net):
        for name, value in again.net.state_dict().items():
            assert torch.equal(value, net.state_dict()[name])
    with pytest.raises(ValueError, match="has another run"):
        fullstride.train_network(few_digits, "genet_tiny", tmp_path / "run", lr=0.5, **SHORT)


def test_a_bundle_predicts_a_path_a_picture_and_a_list(few_digits, bundle, tmp_path):
    pictures = [few_digits.test.picture(index) for index in range(3)]
    paths = [tmp_path / f"{index}.png" for index in range(3)]
    for path, picture in zip(paths, pictures, strict=True):
        picture.save(path)
    expected = [row.guesses for row in fullstride.predict(bundle, paths, top=2)]
    assert [row.guesses for row in fullstride.predict(bundle, pictures, top=2)] == expected
    for one in (str(paths[1]), paths[1], pictures[1], np.asarray(pictures[1])):
        (row,) = fullstride.predict(bundle, one, top=2)
        assert row.guesses == expected[1]
    (row,) = fullstride.predict(bundle, str(paths[0]), top=1)
    assert str(row).startswith(f"{paths[0]}: ")
    (tmp_path / "text.png").write_text("no picture")
    (row,) = fullstride.predict(bundle, tmp_path / "text.png")
    assert row.unreadable


def reprs(few_digits, bundle):
    net = zoo.create("genet_tiny", classes=1000)
    many = replace(bundle, classes=tuple(f"a class with a long name {i}" for i in range(1000)))
    metadata = Metadata(
        name="x", classes=many.classes, preprocessing=bundle.preprocessing, scores=bundle.scores
    )
    profile = load_profile("rtx4090")
    protocol = replace(ONLINE, resolution=16, rounds=1, round_s=1e-6)
    tiny = zoo.create("genet_tiny", in_channels=1)
    return [
        net,
        net.spec,
        zoo.create("timm/resnet10t"),
        bundle,
        many,
        few_digits,
        few_digits.train,
        *fullstride.predict(bundle, few_digits.test.picture(0)),
        bench({"genet_tiny": tiny}, protocol, options=BenchOptions(in_channels=1))[0],
        estimate(net, profile, 8, 64),
        profile,
        ExportedModel(few_digits.where, metadata, lambda x: x, "ONNX Runtime"),
        Epoch({"net": net.state_dict()}, 0, 1.0, 0.1, 10.0, 0.0, net, 1),
        *RECIPES.values(),
    ]


def test_a_repr_has_at_most_three_lines(few_digits, bundle):
    for each in reprs(few_digits, bundle):
        text = repr(each)
        assert text.startswith(f"{type(each).__name__}(")
        lines = text.splitlines()
        assert len(lines) <= 3, text
        assert max(map(len, lines)) <= WIDTH, text


def test_the_repr_of_a_recipe_is_what_differs_and_makes_the_same_recipe():
    for recipe in RECIPES.values():
        assert eval(repr(recipe), {"Recipe": Recipe}) == recipe
    assert repr(Recipe(epochs=1, batch_size=2, lr=0.1)) == "Recipe(epochs=1, batch_size=2, lr=0.1)"


def test_printing_a_network_shows_its_modules_and_its_repr_its_size():
    net = zoo.create("genet_tiny")
    assert isinstance(net, Network)
    count = sum(parameter.numel() for parameter in net.parameters())
    assert f"{count:,} parameters" in repr(net)
    assert "(stages): Sequential(" in str(net)


def test_every_public_name_is_there():
    for name in fullstride.__all__:
        assert getattr(fullstride, name) is not None
