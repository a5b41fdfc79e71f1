import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchvision  # noqa: F401  # for an operator that is not ours
from functorch.compile import make_boxed_func
from torch import nn
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx

from fullstride.measure.workload import Step
from fullstride.nets.families import SPECS
from fullstride.nets.fused import compile
from fullstride.nets.fused.compile import (
    RECOMPUTE,
    KeepLittle,
    compiled_for_training,
    costly,
    gradient_error,
)
from fullstride.nets.fused.network import to_fused
from fullstride.nets.layers import ConvNorm
from fullstride.nets.network import Masks, Network
from fullstride.nets.spec import NetSpec

CPU = torch.device("cpu")
TINY = ["tresnet_tiny", "resnet_rs_tiny", "genet_tiny"]
CONVOLUTIONS = ["aten::convolution", "fullstride::conv", "fullstride::pool"]


class Watched(KeepLittle):
    """Remembers what it handed from the forward to the backward pass."""

    def __call__(self, gm, joint_inputs, **settings):
        forward, backward = super().__call__(gm, joint_inputs, **settings)
        kept = forward.graph.output_node().args[0][settings["num_fwd_outputs"] :]
        self.kept = [node for node in kept if node.op != "placeholder"]
        self.again = [node.target for node in backward.graph.nodes if node.op == "call_function"]
        return forward, backward

    def uuid(self):
        """Else what was cut before would be taken from the compiler's store."""


def cut(net: nn.Module, partitioner: KeepLittle | None = None) -> Callable:
    """`net` as torch.compile cuts it into two passes, which are then run by PyTorch: quick, as no kernel is made."""

    def backend(gm, inputs):
        with config.patch(custom_partitioner_fn=partitioner or RECOMPUTE["custom_partitioner_fn"]):
            return compile_fx(
                gm, inputs, inner_compile=lambda graph, *_, **__: make_boxed_func(graph)
            )

    torch._dynamo.reset()
    return torch.compile(net, fullgraph=True, backend=backend)


def prepared(spec: NetSpec) -> tuple[Network, torch.Tensor, Masks]:
    torch.manual_seed(0)
    net = Network(spec).double().train()
    net.regularise(drop_path=0.5, dropout=0.3)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            assert module.running_mean is not None
            nn.init.normal_(module.running_mean)
    branches, pooled = net.draw(3)
    assert pooled is not None
    masks = Masks(tuple(b if b is None else b.double() for b in branches), pooled.double())
    return net, torch.rand(3, 3, 32, 32, dtype=torch.float64), masks


def step(call: Callable, net: Network, x: torch.Tensor, masks: Masks) -> torch.Tensor:
    """All that a training step leaves: logits, gradients, running statistics."""
    y = call(x, masks)
    found = [
        y.detach(),
        *torch.autograd.grad(y.sin().sum(), list(net.parameters())),
        *net.buffers(),
    ]
    return torch.cat([each.double().flatten() for each in found])


def schema(target) -> str:
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


@pytest.mark.parametrize(
    ("name", "lean"), [("resnet_rs_tiny", False), *((name, True) for name in TINY)]
)
def test_a_step_that_recomputes_is_the_plain_one_and_keeps_a_map_for_each_convolution(name, lean):
    net, x, masks = prepared(SPECS[name])
    plain = copy.deepcopy(net)
    wanted = step(plain, plain, x, masks)
    watched = Watched()
    assert (
        step(cut(to_fused(net) if lean else net, watched), net, x, masks) - wanted
    ).norm() <= 1e-9 * wanted.norm()
    maps = [
        v
        for n in watched.kept
        if (v := n.meta["val"]).dim() == 4 and v.is_floating_point() and v[0, 0].numel() > 1
    ]
    images = 1  # space-to-depth of them
    assert 0 < len(maps) <= sum(isinstance(module, ConvNorm) for module in net.modules()) + images
    assert not [target for target in watched.again if schema(target) in CONVOLUTIONS]


@pytest.mark.parametrize("int8", [False, True])
def test_of_blocks_in_a_row_every_fourth_result_is_kept_and_no_number_changes(int8, monkeypatch):
    spec = SPECS["tresnet_tiny"]
    longest = replace(spec.stages[-1], depth=10)  # of which the fifth and the ninth keep theirs
    net, _, masks = prepared(replace(spec, stages=(*spec.stages[:-1], longest)))
    x = torch.rand(3, 3, 64, 64, dtype=torch.float64)
    found, kept = [], []
    for segment in (compile.SEGMENT, 100):
        monkeypatch.setattr(compile, "SEGMENT", segment)
        watched, own = Watched(), to_fused(copy.deepcopy(net), int8=int8)
        found.append(step(cut(own, watched), own, x, masks))
        kept.append(
            [
                v.shape
                for n in watched.kept
                if (v := n.meta["val"]).is_floating_point() and v.dim() == 4
            ]
        )
    assert kept[0].count((3, longest.width, 2, 2)) == kept[1].count((3, longest.width, 2, 2)) + 2
    if not int8:  # results that are made again of codes are others
        assert (found[0] - found[1]).norm() <= 1e-9 * found[1].norm()


def test_masks_that_are_drawn_inside_are_right_and_cost_memory_with_a_word():
    with pytest.warns(UserWarning, match="draws at random"):
        assert gradient_error(cut, CPU, drawn="in") <= 1e-12


def test_the_check_tells_gradients_whose_masks_were_drawn_a_second_time():
    class Redrawn(nn.Module):
        """Wrong as a compiler is that draws again: the last map and its gradient have different masks."""

        def __init__(self, probe: compile.Probe):
            super().__init__()
            self.probe = probe

        def forward(self, *given):
            value = self.probe(*given)
            return value.detach() + (other := self.probe(*given)) - other.detach()

    assert gradient_error(lambda probe: probe, CPU, drawn="in") <= 1e-12
    assert gradient_error(Redrawn, CPU, drawn="in") > 0.01


def test_operators_with_convolutions_of_others_or_between_processes_are_not_computed_twice():
    graph = torch.fx.Graph()
    ours, theirs = torch.ops.fullstride, torch.ops.torchvision.nms.default
    twice = [
        graph.call_function(op, ("", ""))
        for op in (ours.join.default, ours.gate.default, ours.blur.default)
    ]
    once = [
        graph.call_function(op, ("", "")) for op in (ours.conv.default, ours.pool.default, theirs)
    ]
    once.append(graph.call_function(ours.join.default, ("", "0")))
    assert [costly(node) for node in twice + once] == [False] * len(twice) + [True] * len(once)


def test_where_the_check_fails_recomputing_is_refused_with_the_reason(monkeypatch):
    net = Network(SPECS["genet_tiny"])
    for wrong, reason in (
        (lambda *_: 0.04, "wrong gradients on cpu: off by 4e-02"),
        (broken, "no way: x"),
    ):
        compile.recompute_is_safe.cache_clear()
        monkeypatch.setattr(compile, "gradient_error", wrong)
        found = compiled_for_training(net)
        assert found.mode == "plain"
        assert reason in found.reason
        assert "\n" not in found.reason
    compile.recompute_is_safe.cache_clear()
    assert compiled_for_training(net, recompute=False).mode == "plain"


def broken(*_):
    raise RuntimeError("no way: x\nmore")


@pytest.mark.slow
def test_with_masks_from_outside_recomputing_is_right_on_this_torch_and_the_check_knows_of_masks_from_inside():
    def recomputing(probe: nn.Module) -> Callable:
        torch._dynamo.reset()
        call = torch.compile(probe, fullgraph=True)

        def run(*given):
            with torch._functorch.config.patch(aggressive_recomputation=True):
                return call(*given)

        return run

    assert gradient_error(recomputing, CPU, drawn="out") <= 1e-12
    inside = gradient_error(recomputing, CPU, drawn="in")  # torch 2.11 and 2.15: wrong
    assert (
        inside <= 1e-12 or inside > 100 * compile.LARGEST_ERROR
    )  # nothing that one could be in doubt of


@pytest.mark.slow
def test_a_network_compiled_for_training_is_right_and_leaves_settings_and_random_numbers_alone():
    spec = SPECS["resnet_rs_tiny"]
    net, x, masks = prepared(replace(spec, stages=(replace(spec.stages[0], depth=2),)))
    plain = copy.deepcopy(net)
    wanted = step(plain, plain, x, masks)
    settings, chance = torch._functorch.config.get_config_copy(), torch.get_rng_state()
    compile.recompute_is_safe.cache_clear()
    call, mode, reason = compiled_for_training(to_fused(net))
    assert (mode, reason) == ("recompute", "")
    assert (step(call, net, x, masks) - wanted).norm() <= 1e-9 * wanted.norm()
    assert torch._functorch.config.get_config_copy() == settings
    assert torch.equal(torch.get_rng_state(), chance)


def test_compiled_training_steps_of_ours_are_those_of_a_recipe_and_others_are_torchs_own(
    monkeypatch,
):
    asked: list[tuple[type, dict]] = []

    def compile_ours(net: nn.Module, **how: object) -> compile.Compiled:
        asked.append((type(net), how))
        return compile.Compiled(net, "plain", "too old")

    monkeypatch.setattr(compile, "compiled_for_training", compile_ours)
    how: dict[str, Any] = dict(batch=2, resolution=32, device=CPU, compiled=True)
    with pytest.warns(UserWarning, match="compiled without recomputing: too old"):
        Step(Network(SPECS["genet_tiny"]), "training", **how)()
    Step(
        Network(SPECS["genet_tiny"]), "inference", **how
    )  # nothing is compiled before the first call
    Step(nn.Conv2d(3, 4, 3), "training", **how)
    assert asked == [(Network, {"dynamic": False})]
