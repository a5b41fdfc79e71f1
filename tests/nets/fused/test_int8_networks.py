"""Networks that save int8 maps for batch norms: gradients near the exact ones, from less memory."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import pytest
import torch
from compiled_steps import Recording, cut, schema
from torch import Tensor, nn

from fullstride import cli
from fullstride.measure.activation_bytes import activation_bytes
from fullstride.measure.compiled_bytes import compiled_bytes
from fullstride.nets import compile, fused_form, zoo
from fullstride.nets.blocks import Block
from fullstride.nets.compile import recompute_options
from fullstride.nets.efficiency import Efficiency
from fullstride.nets.families import SPECS
from fullstride.nets.fused.compile import FUSED
from fullstride.nets.fused.network import fused_layers, to_fused, to_plain
from fullstride.nets.layers import ConvNorm
from fullstride.nets.network import Masks, Network
from fullstride.nets.spec import NetSpec
from fullstride.tasks.classify import Classify
from fullstride.train.autotune import CACHE_KEY_FIELDS
from fullstride.train.compute import SINGLE_PROCESS
from fullstride.train.loop import build_trainer
from fullstride.train.recipes.named import DIGITS

TINY = ("tresnet_tiny", "resnet_rs_tiny", "genet_tiny")


def shaken(spec: str | NetSpec) -> Network:
    net = (
        Network(replace(SPECS[spec] if isinstance(spec, str) else spec, classes=7)).double().train()
    )
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.2, 1.2)
    return net


def step(
    net: Network, x: Tensor, call: Callable[..., Tensor] | None = None, masks: Masks | None = None
) -> tuple[Tensor, Tensor]:
    """Logits with the statistics, and the gradients."""
    y = net(x, masks) if call is None else call(x, masks)
    gradients = torch.autograd.grad(y.sin().sum(), list(net.parameters()))
    return torch.cat([t.detach().double().flatten() for t in (y, *net.buffers())]), flat(gradients)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def ending(net: Network) -> list[Block]:
    """The blocks that may keep codes: a result that no convolution keeps is made again of what its
    norms see."""
    blocks = [
        block for stage in net.stages for block in stage.children() if isinstance(block, Block)
    ]
    return blocks if net.spec.head_width else blocks[:-1]


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("name", TINY)
def test_a_network_that_keeps_codes_has_the_results_of_a_lean_one_and_gradients_within_a_hundredth(
    name,
):
    torch.manual_seed(0)
    net, x = shaken(name), torch.rand(8, 3, 64, 64).double()
    told, exact = step(to_fused(copy.deepcopy(net)), x)
    same, found = step(to_fused(copy.deepcopy(net), int8=True), x)
    assert torch.equal(same, told)
    assert 0 < relative(found, exact) < 0.01
    assert torch.nn.functional.cosine_similarity(found, exact, 0) > 0.9999


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_gradients_of_compiled_steps_with_int8_are_ten_times_nearer_than_those_of_bf16(
    name,
):
    torch.manual_seed(0)
    net, x = shaken(name), torch.rand(8, 3, 64, 64).double()
    told, exact = step(to_fused(copy.deepcopy(net)), x)
    short = copy.deepcopy(net).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = short(x.float()).float()
    short_ones = flat(torch.autograd.grad(y.sin().sum(), list(short.parameters()))).double()
    partitioner, lean = Recording(FUSED), to_fused(net, int8=True)
    same, found = step(lean, x, cut(lean, partitioner))
    assert relative(same, told) < 1e-12
    assert 0 < relative(found, exact) < 0.1 * relative(short_ones, exact)
    assert sum(schema(target) == "fullstride::rejoin" for target in partitioner.backward) > 1
    assert sum(value.dtype == torch.int8 for value in partitioner.saved) == sum(
        1 + any(isinstance(m, ConvNorm) for m in block.shortcut.modules()) for block in ending(net)
    )


@pytest.mark.slow
def test_masks_and_dropout_are_those_of_the_step_in_a_compiled_one_too():
    torch.manual_seed(0)
    net, x = shaken("resnet_rs_tiny"), torch.rand(8, 3, 64, 64).double()
    net.regularise(drop_path=0.5, dropout=0.3)
    branches, pooled = net.draw(8)
    assert pooled is not None
    masks = Masks(
        tuple(keep if keep is None else keep.double() for keep in branches), pooled.double()
    )
    told, exact = step(to_fused(copy.deepcopy(net)), x, masks=masks)
    lean = to_fused(net, int8=True)
    same, found = step(lean, x, cut(lean, Recording(FUSED)), masks=masks)
    assert relative(same, told) < 1e-12
    assert relative(found, exact) < 0.02


@pytest.mark.slow
def test_inductor_keeps_the_operators_that_take_codes():
    torch.manual_seed(0)
    spec = SPECS["resnet_rs_tiny"]
    net, x = (
        shaken(replace(spec, stages=(replace(spec.stages[0], depth=2),))),
        torch.rand(4, 3, 32, 32).double(),
    )
    told, exact = step(to_fused(copy.deepcopy(net), int8=True), x)
    torch._dynamo.reset()
    for options, near in ((None, 1e-9), (recompute_options(FUSED), 0.02)):
        lean = to_fused(copy.deepcopy(net), int8=True)
        same, found = step(lean, x, torch.compile(lean, fullgraph=True, options=options))
        assert relative(same, told) < 1e-9
        assert relative(found, exact) < near


@pytest.mark.parametrize("name", ["tresnet_tiny", "resnet_rs_tiny", "genet_tiny"])
def test_a_network_keeps_one_byte_less_for_each_value_that_only_norms_need(name):
    with torch.device("meta"):
        net = Network(SPECS[name])
    lean, int8 = (
        activation_bytes(to_fused(net, int8=int8), 64).bytes_per_image for int8 in (False, True)
    )
    values: list[int] = []

    def count(block: nn.Module, _, y: Tensor) -> None:
        norms = 1 + any(isinstance(m, ConvNorm) for m in block.get_submodule("shortcut").modules())
        values.append(norms * y[0].numel())

    for block in ending(net):
        block.register_forward_hook(count)
    net(torch.empty(2, 3, 64, 64, device="meta"))
    assert lean - int8 == sum(values) > 0


@pytest.mark.slow
def test_a_compiled_tresnet_m_keeps_no_more_megabytes_an_image_than_its_goal():
    net = fused_form.to_fused(zoo.create("tresnet_m"), int8=True)
    assert isinstance(net, Network)
    assert compiled_bytes(net, 224) <= 12.5e6


def test_states_copies_and_evaluation_know_nothing_of_codes():
    torch.manual_seed(0)
    net, x = shaken("tresnet_tiny"), torch.rand(2, 3, 32, 32).double()
    lean = copy.deepcopy(to_fused(copy.deepcopy(net), int8=True))
    assert all(m.int8 for m in fused_layers(lean))
    assert lean.state_dict().keys() == net.state_dict().keys()
    net.load_state_dict(lean.state_dict())
    assert torch.equal(lean.eval()(x), net.eval()(x))
    assert all(m.int8 for m in fused_layers(lean.train()))
    assert not any(m.int8 for m in fused_layers(to_fused(lean)))
    assert not fused_layers(to_plain(lean))


@pytest.mark.parametrize("efficiency", ["fused", "fused_compiled"])
def test_a_recipe_that_asks_for_codes_trains_by_them(efficiency, monkeypatch):
    monkeypatch.setattr(
        compile,
        "compile_for_training",
        lambda net, operators: compile.Compiled(net, "recompute", ""),
    )
    net = Network(replace(SPECS["tresnet_tiny"], classes=10, in_channels=3))
    recipe = replace(DIGITS, efficiency=efficiency, int8_maps=True, mixup=0.0, cutmix=0.0)
    learner = build_trainer(net.train(), Classify(), recipe.in_epochs(10), 10, None, SINGLE_PROCESS)
    assert all(m.int8 for m in fused_layers(net))
    assert learner.step(torch.rand(4, 3, 32, 32), torch.arange(4), 0).isfinite()


def test_a_recipe_with_int8_maps_has_them_for_fused_modules_only_and_is_measured_anew():
    recipe = replace(DIGITS, efficiency="auto", int8_maps=True)
    assert [recipe.with_efficiency(way).int8_maps for way in get_args(Efficiency)] == [
        False,
        True,
        False,
        True,
    ]
    assert replace(recipe, int8_maps=False).with_efficiency("fused").int8_maps is False
    assert "int8_maps" in CACHE_KEY_FIELDS


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fused_form.to_fused(zoo.create("timm/resnet18"), "timm/resnet18", int8=True),
            "timm/resnet18 has no fused form",
        ),
        (
            lambda: replace(DIGITS, int8_maps=True),
            "recipe.int8_maps is not available for recipe.efficiency plain",
        ),
        (
            lambda: build_trainer(
                zoo.create("timm/resnet18"),
                Classify(),
                replace(DIGITS, efficiency="fused_compiled", int8_maps=True),
                10,
                None,
                SINGLE_PROCESS,
            ),
            "resnet18 has no fused form",
        ),
    ],
)
def test_codes_are_refused_in_one_line_where_nothing_is_lean(call, message):
    with pytest.raises(ValueError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_cost_prints_the_bytes_of_lean_training_with_and_without_codes(capsys):
    assert cli.run(["measure", "cost", "tresnet_tiny", "--train"]) == 0
    out = capsys.readouterr().out
    net = fused_form.to_fused(zoo.create("tresnet_tiny"), int8=True)
    kept = activation_bytes(net, net.spec.resolution).bytes_per_image
    assert f"{kept:,} bytes where it trains fused with int8 activations: {kept / 1e6:.1f} MB" in out
    assert "bytes where it trains fused: " in out
    assert cli.run(["measure", "cost", "timm/resnet18", "--train"]) == 0
    assert "trains fused" not in capsys.readouterr().out
