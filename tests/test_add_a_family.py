"""docs/add_a_family.md, followed to the letter: the one file it shows is a family."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch

from fullstride.data.dataset import open_data
from fullstride.measure.cost.flops import cost
from fullstride.nets import zoo
from fullstride.nets.families import SPECS
from fullstride.nets.spec import NetSpec
from fullstride.train import run
from fullstride.train.recipes import DIGITS

PAGE = Path(__file__).parents[1] / "docs" / "add_a_family.md"


@pytest.fixture
def family(tmp_path, monkeypatch):
    """The page's file, imported, and its specs named as the page says."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "regnet.py"
    path.write_text(code)
    found = importlib.util.spec_from_file_location("regnet", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    for name, spec in module.SPECS.items():
        monkeypatch.setitem(SPECS, name, spec)
    return module.SPECS


def theirs(name: str) -> str:
    """timm's name for our module."""
    name = (
        name.replace("stem.conv.", "stem.")
        .replace("shortcut.project", "downsample")
        .replace("branch.", "")
    )
    name = re.sub(r"^stages\.(\d+)\.(\d+)", lambda m: f"s{int(m[1]) + 1}.b{int(m[2]) + 1}", name)
    return name.replace(".norm.", ".bn.")


@pytest.mark.parametrize(
    ("ours", "other"), [("regnet_x_200mf", "regnetx_002"), ("regnet_x_400mf", "regnetx_004")]
)
def test_the_pages_family_equals_timms_with_the_same_random_weights(family, ours, other):
    generator = torch.Generator().manual_seed(0)
    net, reference = zoo.create(ours).double().eval(), timm.create_model(other).double().eval()
    state = {}
    for name, value in net.state_dict().items():
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            value = (
                noise.abs() + 0.5
                if name.endswith("running_var")
                else noise / max(value[0].numel(), 1) ** 0.5
            )
        state[name] = value
    net.load_state_dict(state)
    reference.load_state_dict({theirs(name): value for name, value in state.items()})
    for size in ((64, 64), (65, 65), (64, 96)):
        x = torch.randn(2, 3, *size, generator=generator, dtype=torch.float64)
        with torch.inference_mode():
            a, b = net(x), reference(x)
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()


def test_the_pages_family_goes_everywhere_with_no_other_change(family, tmp_path):
    spec = zoo.spec("regnet_x_200mf")
    assert NetSpec.from_json(spec.to_json()) == spec
    assert cost(lambda: zoo.create("regnet_x_200mf"), 224).params == 2_684_792  # as timm's
    assert zoo.create("regnet_x_200mf", width=0.5, depth=0.5).spec.stages[3].width == 184
    data = open_data("digits")
    few = replace(
        data,
        **{part: getattr(data, part).subset(range(32)) for part in ("train", "minival", "test")},
    )
    recipe = replace(DIGITS, epochs=1, warmup_epochs=0, batch=16, resolution=32)
    list(run.train(tmp_path / "run", "regnet_x_200mf", few, recipe))
    assert zoo.load(tmp_path / "run").net.spec.source == spec.source
