from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torchvision  # noqa: F401  # for an operator that is not ours
from compiled_steps import (
    CPU,
    TINY,
    Recording,
    check_checkpoints,
    check_compiled_step,
    check_recomputing_step,
    cut,
    prepared,
)
from torch import nn

from fullstride.nets import compile, zoo
from fullstride.nets.compile import (
    compile_for_training,
    gradient_error,
)
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network


@pytest.mark.slow
def test_a_step_that_recomputes_is_the_eager_one_and_saves_a_map_for_each_convolution():
    net, *_ = prepared(SPECS["resnet_rs_tiny"])
    check_recomputing_step(net, SPECS["resnet_rs_tiny"])


@pytest.mark.slow
def test_checkpoints_among_blocks_in_a_row_are_saved_and_no_number_changes(monkeypatch):
    check_checkpoints(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TINY, "timm/resnet18"])
def test_the_ends_of_residual_blocks_are_found_in_plain_graphs(name):
    net = zoo.create(name).train()
    partitioner = Recording()
    with torch.autocast("cpu", torch.bfloat16):
        cut(net, partitioner)(torch.rand(2, 3, 64, 64)).sum().backward()
    if isinstance(net, Network):
        blocks = [block for stage in net.stages for block in stage.children()]
        projects = [list(block.shortcut.children()) != [] for block in blocks]
    else:
        blocks = [module for module in net.modules() if type(module).__name__ == "BasicBlock"]
        projects = [block.downsample is not None for block in blocks]
    projects[0] = True  # the stem before it is no block
    assert [shortcut is None for shortcut in partitioner.blocks.values()] == projects


def test_masks_that_are_drawn_inside_are_right_and_turn_recomputation_off_with_a_warning():
    probe = compile.Probe().double()
    x, weights = torch.randn(2, 16, 4, 8, 8, dtype=torch.float64)
    with pytest.warns(UserWarning, match="draws random numbers"):
        result = cut(probe)(x, weights)
    result.backward()
    gradient = probe.last.weight.grad
    assert gradient is not None
    assert abs(result - (probe.last.weight * gradient).sum()) <= 1e-12 * gradient.norm()


def test_the_check_detects_gradients_whose_masks_were_drawn_a_second_time():
    class Redrawn(nn.Module):
        """As a compiler that draws again: the last map and its gradient have different masks."""

        def __init__(self, probe: compile.Probe):
            super().__init__()
            self.probe = probe

        def forward(self, *inputs):
            value, other = self.probe(*inputs), self.probe(*inputs[:2])
            return value.detach() + other - other.detach()

    assert gradient_error(lambda probe: probe, CPU) <= 1e-12
    assert gradient_error(Redrawn, CPU) > 0.01


def test_where_the_check_fails_recomputation_is_off_with_the_reason(monkeypatch):
    net = Network(SPECS["genet_tiny"])
    for wrong, reason in (
        (lambda *_: 0.04, "wrong gradients on cpu: relative error 4e-02"),
        (broken, "no way: x"),
    ):
        compile.why_not_recompute.cache_clear()
        monkeypatch.setattr(compile, "gradient_error", wrong)
        compiled = compile_for_training(net)
        assert compiled.mode == "plain"
        assert reason in compiled.reason
        assert "\n" not in compiled.reason
    compile.why_not_recompute.cache_clear()


def broken(*_):
    raise RuntimeError("no way: x\nmore")


@pytest.mark.slow
def test_recomputation_is_right_on_this_torch_with_masks_from_outside():
    def recomputing(probe: nn.Module) -> Callable:
        torch._dynamo.reset()
        call = torch.compile(probe, fullgraph=True)

        def run(*inputs):
            with torch._functorch.config.patch(aggressive_recomputation=True):
                return call(*inputs)

        return run

    assert gradient_error(recomputing, CPU) <= 1e-12


@pytest.mark.slow
def test_a_compiled_step_is_right_and_leaves_settings_and_random_numbers_alone():
    spec = SPECS["resnet_rs_tiny"]
    spec = replace(spec, stages=(replace(spec.stages[0], depth=2),))
    check_compiled_step(prepared(spec)[0], spec)
