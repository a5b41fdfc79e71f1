"""docs/extend/add_a_family.md, to the letter: its file is a family, and its class is a block."""

import json
import re
from dataclasses import replace
from types import ModuleType

import pytest
import timm
import torch
from pages import code
from safetensors.torch import save_file
from timm.models.ghostnet import GhostBottleneck
from torch import Tensor, nn

from fullstride import cli
from fullstride.latency.devices import load_profile
from fullstride.latency.estimator import Estimator
from fullstride.measure.tracer import cost
from fullstride.nets import blocks, checkpoints, zoo
from fullstride.nets import spec as specs
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec
from fullstride.train import run
from fullstride.train.recipes.named import DIGITS

DIGITS_ONCE = replace(DIGITS, epochs=1, warmup_epochs=0, batch_size=16, resolution=32)


CODE = code("docs/extend/add_a_family.md")


def named(monkeypatch, networks: dict[str, NetSpec]) -> None:
    for name, spec in networks.items():
        monkeypatch.setitem(SPECS, name, spec)


@pytest.fixture
def family(monkeypatch):
    """The page's file, imported, and its specs named as the page says."""
    module = ModuleType("regnet")
    exec(CODE[0], module.__dict__)
    named(monkeypatch, module.SPECS)


@pytest.fixture
def ghost(monkeypatch):
    """The page's block in both places, and its network by a name."""
    _, block, network = CODE
    module = ModuleType("ghost")
    module.__dict__.update(vars(blocks) | vars(specs) | dict(torch=torch))
    exec(block, module.__dict__)
    monkeypatch.setitem(specs.NAMED, "Ghost", module.Ghost)
    monkeypatch.setitem(specs.NAMES, module.Ghost, "Ghost")
    exec(network, module.__dict__)
    named(monkeypatch, {"ghost": module.GHOST})
    return module.Ghost


def random_state(net: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, value in net.state_dict().items():
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            fan = max(value[0].numel(), 1)
            value = noise.abs() + 0.5 if name.endswith("running_var") else noise / fan**0.5
        state[name] = value
    return state


def regnet_name(name: str) -> str:
    """timm's name for our module."""
    for ours, theirs in (("stem.conv.", "stem."), ("shortcut.project", "downsample")):
        name = name.replace(ours, theirs)
    name = name.replace("branch.", "").replace(".norm.", ".bn.")
    return re.sub(r"^stages\.(\d+)\.(\d+)", lambda m: f"s{int(m[1]) + 1}.b{int(m[2]) + 1}", name)


@pytest.mark.parametrize(
    ("ours", "other"), [("regnet_x_200mf", "regnetx_002"), ("regnet_x_400mf", "regnetx_004")]
)
def test_the_pages_family_equals_timms_with_the_same_random_weights(family, ours, other):
    net, reference = zoo.create(ours).double().eval(), timm.create_model(other).double().eval()
    state = random_state(net)
    net.load_state_dict(state)
    reference.load_state_dict({regnet_name(name): value for name, value in state.items()})
    for size in ((64, 64), (65, 65), (64, 96)):
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        with torch.inference_mode():
            a, b = net(x), reference(x)
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()


def test_the_pages_family_goes_everywhere_with_no_other_change(family, tmp_path, few_digits):
    spec = zoo.spec("regnet_x_200mf")
    assert NetSpec.from_json(spec.to_json()) == spec
    assert cost(lambda: zoo.create("regnet_x_200mf"), 224).params == 2_684_792  # as timm's
    assert zoo.create("regnet_x_200mf", width=0.5, depth=0.5).spec.stages[3].width == 184
    list(run.train(tmp_path / "run", "regnet_x_200mf", few_digits, DIGITS_ONCE))
    assert zoo.load(tmp_path / "run").net.spec.source == spec.source


GHOST_NAMES = {
    "expand.primary.conv": "ghost1.primary_conv.0",
    "expand.primary.norm": "ghost1.primary_conv.1",
    "expand.cheap.conv": "ghost1.cheap_operation.0",
    "expand.cheap.norm": "ghost1.cheap_operation.1",
    "halve.conv": "conv_dw",
    "halve.norm": "bn_dw",
    "project.primary.conv": "ghost2.primary_conv.0",
    "project.primary.norm": "ghost2.primary_conv.1",
    "project.cheap.conv": "ghost2.cheap_operation.0",
    "project.cheap.norm": "ghost2.cheap_operation.1",
}


@pytest.mark.parametrize("stride", [1, 2])
def test_the_pages_block_equals_timms_with_the_same_random_weights(ghost, stride):
    arguments = dict(kernel=3, groups=1, se=None, style=blocks.Style())
    branch = ghost(8, 8, inner=16, stride=stride, **arguments).branch.double().eval()
    reference = GhostBottleneck(8, 16, 8, stride=stride).double().eval()
    state = random_state(branch)
    branch.load_state_dict(state)
    theirs = {}
    for name, value in state.items():
        module, _, leaf = name.rpartition(".")
        theirs[f"{GHOST_NAMES[module]}.{leaf}"] = value
    missing, unexpected = reference.load_state_dict(theirs, strict=False)
    assert not unexpected
    assert all(name.startswith("shortcut") for name in missing)
    x = torch.randn(2, 8, 9, 12, dtype=torch.float64)
    with torch.inference_mode():
        expected = reference(x) - reference.shortcut(x)
        assert (branch(x) - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_the_pages_block_goes_everywhere_with_no_other_change(ghost, tmp_path, few_digits, capsys):
    spec = zoo.spec("ghost")
    assert NetSpec.from_json(spec.to_json()) == spec
    assert cost(lambda: Network(spec), 64).params == sum(
        p.numel() for p in Network(spec).parameters()
    )
    assert cli.run(["measure", "cost", "ghost"]) == 0
    capsys.readouterr()
    assert cli.run(["measure", "estimate", "ghost", "--target", "a100", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["estimates"]
    estimator = Estimator(load_profile("a100"), row["batch"])
    assert estimator(spec) == pytest.approx(row["ms_per_image"])

    folder = tmp_path / "run"
    list(run.train(folder, "ghost", few_digits, DIGITS_ONCE))
    trained = zoo.load(folder).net
    save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    loaded = checkpoints.load(tmp_path / "weights.safetensors", trained.spec).eval()
    x = torch.randn(1, trained.spec.in_channels, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(x), trained(x))
    with pytest.raises(ValueError, match=r"ghost.* -stages\.0\.0\.branch\.expand"):
        checkpoints.convert({"stem.conv.conv.weight": torch.ones(16, 3, 3, 3)}, "ghost")
    out = str(tmp_path / "ghost.onnx")
    assert cli.run(["export", str(folder), "--out", out, "--data", "digits"]) == 0
