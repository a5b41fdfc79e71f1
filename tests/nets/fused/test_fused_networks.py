"""Fused networks have the results and gradients of plain ones and save less for backward."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fullstride.nets.blocks import Basic
from fullstride.nets.families import SPECS
from fullstride.nets.fused.network import FusedConvNorm, fused_layers, to_fused, to_plain
from fullstride.nets.layers import ConvNorm
from fullstride.nets.network import Masks, Network

TINY = ("tresnet_tiny", "resnet_rs_tiny", "genet_tiny")
# All stems and blocks, every style: with and without blur, gates inside and at the end, max-pools.
SMALL = (*TINY, "tresnet_v2_l", "resnet18", "resnet50d")


def net_for(name: str, classes: int = 7) -> Network:
    """With gains of both signs, as late in training."""
    spec = SPECS[name] if name in TINY else SPECS[name].scaled(width=1 / 8, depth=1 / 4)
    return shaken(Network(replace(spec, classes=classes)))


def shaken(net: Network) -> Network:
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.4, 1.2)
            norm.weight.data[::3] *= -1
            nn.init.normal_(norm.bias, 0, 0.2)
    return net.train()


def doubled(masks: Masks) -> Masks:
    branches = tuple(None if mask is None else mask.double() for mask in masks.branches)
    return Masks(branches, None if masks.pooled is None else masks.pooled.double())


def step(net: nn.Module, x: Tensor, masks: Masks | None = None) -> list[Tensor]:
    """Logits, all gradients, statistics."""
    y = net(x) if masks is None else net(x, masks)
    return [
        y.detach(),
        *torch.autograd.grad(y.float().sin().sum(), list(net.parameters())),
        *net.buffers(),
    ]


def relative(actual: list[Tensor], expected: list[Tensor]) -> float:
    pairs = [(a.double(), b.double()) for a, b in zip(actual, expected, strict=True)]
    return max(((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in pairs)


def check_whole(net: Network, px: int, images: int = 3) -> None:
    net.double().regularise(drop_path=0.5, dropout=0.3)
    fused = to_fused(copy.deepcopy(net))
    x, masks = torch.rand(images, 3, px, px, dtype=torch.float64), doubled(net.draw(images))
    assert relative(step(fused, x, masks), step(net, x, masks)) < 1e-9
    net.eval()
    fused.eval()
    assert (fused(x) - net(x)).norm() <= 1e-9 * net(x).norm()  # by the running statistics


@pytest.mark.parametrize("name", SMALL)
def test_every_gradient_of_a_fused_network_is_that_of_the_plain_one(name):
    torch.manual_seed(0)
    check_whole(net_for(name), 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tresnet_m", "resnet_rs_50", "genet_large"])
def test_every_gradient_of_a_published_network_is_that_of_the_plain_one(name):
    torch.manual_seed(0)
    check_whole(shaken(Network(SPECS[name])), 64, 2)


@pytest.mark.parametrize("name", TINY)
def test_zero_gains_as_in_a_fresh_network_are_right(name):
    torch.manual_seed(0)
    net = Network(SPECS[name]).train()
    for block in (block for stage in net.stages for block in stage.children()):
        nn.init.zeros_(
            [m for m in block.branch.modules() if isinstance(m, nn.BatchNorm2d)][-1].weight
        )
    check_whole(net, 32)


def gradients(net: Network, x: Tensor, **autocast) -> Tensor:
    net = copy.deepcopy(net)
    with torch.autocast("cpu", torch.bfloat16, **autocast):
        _, *actual = step(net, x)
    return torch.cat([g.double().flatten() for g, _ in zip(actual, net.parameters(), strict=False)])


def rounding() -> torch.autograd.graph.saved_tensors_hooks:
    """Maps are saved as bf16 while all arithmetic stays in float32."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda t: (
            t.bfloat16() if t.dim() == 4 and not isinstance(t, nn.Parameter) else t,
            t.dtype,
        ),
        lambda saved: saved[0].to(saved[1]),
    )


def check_rounding(net: Network, x: Tensor) -> None:
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.2, 1.2)
    fused = to_fused(copy.deepcopy(net))
    exact = gradients(net, x, enabled=False)
    with rounding():
        actual = gradients(fused, x, enabled=False)
    assert (actual - exact).norm() <= 0.01 * exact.norm()
    assert F.cosine_similarity(actual, exact, 0) > 0.999


def test_saving_maps_in_bf16_costs_a_hundredth_of_the_gradient_where_inputs_are_recomputed():
    torch.manual_seed(0)
    check_rounding(net_for("tresnet_tiny"), torch.rand(8, 3, 64, 64))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_under_autocast_a_fused_network_is_as_near_to_float64_as_a_plain_one(name, layout):
    torch.manual_seed(0)
    net = net_for(name)
    x = torch.rand(8, 3, 64, 64).to(memory_format=layout)
    exact = gradients(copy.deepcopy(net).double(), x.double(), enabled=False)
    plain, fused = ((gradients(n, x) - exact).norm() for n in (net, to_fused(copy.deepcopy(net))))
    assert fused <= 1.25 * plain


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY[:2])
def test_a_compiled_fused_network_is_one_graph_with_the_same_gradients(name):
    torch.manual_seed(0)
    net = net_for(name).double()
    net.regularise(drop_path=0.5, dropout=0.3)
    x, masks = torch.rand(3, 3, 32, 32, dtype=torch.float64), doubled(net.draw(3))
    expected = step(copy.deepcopy(net), x, masks)
    torch._dynamo.reset()
    compiled = torch.compile(to_fused(net), fullgraph=True, backend="aot_eager")
    assert relative(step_of(compiled, net, x, masks), expected) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_inductor_keeps_the_operators(name):
    torch.manual_seed(0)
    net = net_for(name).double()
    x = torch.rand(3, 3, 32, 32, dtype=torch.float64).to(memory_format=torch.channels_last)
    expected = step(copy.deepcopy(net), x)
    torch._dynamo.reset()
    compiled = torch.compile(to_fused(net), fullgraph=True)
    assert relative(step_of(compiled, net, x), expected) < 1e-9


def step_of(call: Callable, net: nn.Module, *arguments) -> list[Tensor]:
    y = call(*arguments)
    return [
        y.detach(),
        *torch.autograd.grad(y.float().sin().sum(), list(net.parameters())),
        *net.buffers(),
    ]


@pytest.mark.parametrize("name", TINY)
def test_a_checkpointed_copied_network_that_was_loaded_gives_the_same(name):
    torch.manual_seed(0)
    net, x = net_for(name).double(), torch.rand(3, 3, 32, 32, dtype=torch.float64)
    fused = to_fused(Network(net.spec).double()).train()
    fused.load_state_dict(net.state_dict())
    fused = copy.deepcopy(fused)
    assert fused.state_dict().keys() == net.state_dict().keys()

    def recomputed(n: Network) -> list[Tensor]:
        def call(x: Tensor) -> Tensor:
            return n.head(
                checkpoint(
                    n.stages, checkpoint(n.stem, x, use_reentrant=False), use_reentrant=False
                )
            )

        # An early stop ends the second pass at the last saved tensor, before or after the last
        # update of running statistics.
        with set_checkpoint_early_stop(False):
            return step_of(call, n, x)

    assert relative(recomputed(fused), recomputed(net)) < 1e-9
    net.load_state_dict(fused.state_dict())
    assert relative([net.eval()(x)], [fused.eval()(x)]) < 1e-9


@pytest.mark.parametrize("name", TINY)
def test_a_network_pickles_copies_and_becomes_plain_again_with_the_same_modules(name):
    net = net_for(name)
    fused = to_fused(copy.deepcopy(net), int8=True)
    x = torch.rand(3, 3, 32, 32)
    for other in (pickle.loads(pickle.dumps(fused)), copy.deepcopy(fused)):
        assert [type(m) for m in other.modules()] == [type(m) for m in fused.modules()]
        assert other.saved_tensor_choices() == fused.saved_tensor_choices()
        assert relative(step(other, x), step(copy.deepcopy(fused), x)) == 0
    plain = to_plain(copy.deepcopy(fused))
    for one, other in zip(plain.modules(), net.modules(), strict=True):
        assert type(one) is type(other)
        assert vars(one).keys() == vars(other).keys()
    assert relative(step(plain, x), step(net, x)) == 0
    assert torch.equal(fused.eval()(x), to_plain(copy.deepcopy(fused))(x))


def test_a_block_with_a_forward_pass_of_its_own_stays_as_it_is():
    class Scaled(Basic):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return 2 * super().forward(x, mask)

    torch.manual_seed(0)
    spec = SPECS["genet_tiny"]
    stages = (replace(spec.stages[0], block=Scaled), *spec.stages[1:])
    net = shaken(Network(replace(spec, stages=stages))).double()
    fused = to_fused(copy.deepcopy(net))
    assert type(fused.stages[0][0]) is Scaled
    assert type(fused.stages[0][0].branch.conv1) is ConvNorm
    assert isinstance(fused.stages[1][0].branch.conv1, FusedConvNorm)
    x = torch.rand(3, 3, 32, 32, dtype=torch.float64)
    assert relative(step(fused, x), step(net, x)) < 1e-9


def test_no_input_is_moved_and_the_same_step_gives_the_same_bits():
    net = to_fused(net_for("tresnet_tiny"))
    x = torch.rand(3, 3, 32, 32)
    before, again = x.clone(), copy.deepcopy(net)
    for one, other in zip(step(net, x), step(again, x), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "which",
    ["stem", "stages.1", "stages", "stages.2.0.shortcut", "stages.2.0.branch.conv3.norm"],
)
def test_frozen_batch_norms_go_on_by_their_running_statistics(which):
    torch.manual_seed(0)
    net = net_for("tresnet_tiny").double()
    fused = to_fused(copy.deepcopy(net))
    x = torch.rand(3, 3, 32, 32, dtype=torch.float64)
    for n in (net, fused):
        n.get_submodule(which).eval()
    assert relative(step(fused, x), step(net, x)) < 1e-9


@pytest.mark.parametrize(("gain", "bias"), [(-0.1, 0.9), (1e-4, 0.0), (0.0, 0.0)])
def test_a_norm_with_a_small_gain_saves_its_input_and_train_chooses_anew(gain, bias):
    net = to_fused(Network(SPECS["tresnet_tiny"])).train()

    def choices() -> list[str]:
        return [m.saved for m in fused_layers(net) if m.slope]

    assert set(choices()) == {"output"}
    with torch.no_grad():
        net.stem.conv.norm.weight[0], net.stem.conv.norm.bias[0] = gain, bias
    assert set(choices()) == {"output"}
    net.train()
    assert choices() == ["both", *["output"] * (len(choices()) - 1)]
    assert not fused_layers(to_plain(net))


@pytest.mark.slow
def test_two_processes_that_share_their_statistics_learn_as_one_does(tmp_path):
    script = Path(__file__).with_name("two_ranks.py")
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    subprocess.run([*words, str(tmp_path / "actual")], check=True, capture_output=True)
    ranks = [torch.load(tmp_path / f"actual.{rank}") for rank in range(2)]
    for name in TINY:
        torch.manual_seed(0)
        net = Network(replace(SPECS[name], classes=7)).double().train()
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.uniform_(norm.weight, 0.5, 1.5)
        y = net(torch.rand(6, 3, 32, 32, dtype=torch.float64))
        gradients = torch.autograd.grad(y.sin().sum(), list(net.parameters()))
        assert relative([torch.cat([rank[name][0] for rank in ranks])], [y]) < 1e-9
        for rank in ranks:
            assert relative(rank[name][1], list(gradients)) < 1e-9
            assert relative(rank[name][2], list(net.buffers())) < 1e-9


def saved_bytes(net: Network, images: int) -> int:
    """Bytes that autograd saves in a forward pass, without parameters and buffers."""
    own = {t.untyped_storage()._cdata for t in (*net.parameters(), *net.buffers())}
    storages = {}

    def save(t: Tensor) -> Tensor:
        storages[t.untyped_storage()._cdata] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        _graph = net(torch.empty(images, 3, 224, 224, dtype=torch.bfloat16, device="meta"))
    return sum(t.untyped_storage().nbytes() for key, t in storages.items() if key not in own)


@pytest.mark.parametrize(
    ("name", "plain", "fused"),
    [
        ("tresnet_m", 33.3, 22.6),
        ("resnet_rs_50", 57.6, 36.0),
        ("genet_large", 23.4, 17.0),
        ("resnet50", 43.8, 37.0),
    ],
)
def test_a_fused_network_saves_no_more_megabytes_per_image(name, plain, fused):
    with torch.device("meta"):
        net = Network(SPECS[name]).bfloat16().train()

    def per_image() -> float:
        return (saved_bytes(net, 3) - saved_bytes(net, 2)) / 1e6

    assert per_image() == pytest.approx(plain, abs=0.06)
    to_fused(net)
    assert per_image() <= fused


def test_choices_of_saved_tensors_are_those_of_the_gains_where_none_are_restored():
    net = to_fused(Network(SPECS["tresnet_tiny"]))
    chosen = net.saved_tensor_choices()
    assert {"output", "both"} <= set(chosen)
    net.restore_saved_tensor_choices(["both"] * len(chosen))
    assert set(net.saved_tensor_choices()) == {"both"}
    net.restore_saved_tensor_choices([])
    assert net.saved_tensor_choices() == chosen
