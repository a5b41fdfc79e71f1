"""Training steps that are compiled, and what they save and recompute."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torchvision  # noqa: F401  # for an operator that is not ours
from functorch.compile import make_boxed_func
from torch import nn
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx

from fullstride.nets import compile, zoo
from fullstride.nets.compile import (
    RecomputePartitioner,
    compile_for_training,
    gradient_error,
    residual_blocks,
)
from fullstride.nets.families import SPECS
from fullstride.nets.layers import ConvNorm
from fullstride.nets.network import Masks, Network
from fullstride.nets.spec import NetSpec

CPU = torch.device("cpu")
TINY = ["tresnet_tiny", "resnet_rs_tiny", "genet_tiny"]
CONVOLUTIONS = ["aten::convolution"]


class Recording(RecomputePartitioner):
    """Records which tensors are saved for the backward pass and which operators that pass runs."""

    def __call__(self, gm, joint_inputs, **settings):
        self.blocks = residual_blocks(gm.graph)
        forward, backward = super().__call__(gm, joint_inputs, **settings)
        saved = forward.graph.output_node().args[0][settings["num_fwd_outputs"] :]
        self.saved = [node.meta["val"] for node in saved if node.op != "placeholder"]
        self.backward = [n.target for n in backward.graph.nodes if n.op == "call_function"]
        return forward, backward

    def uuid(self):
        """None, so that no graph comes from the compiler's cache."""

    def maps(self, *shape: int) -> int:
        """How many saved tensors are floating-point maps, of `shape` where given."""
        maps = [v for v in self.saved if v.dim() == 4 and v.is_floating_point()]
        return sum(tuple(v.shape) == shape if shape else v[0, 0].numel() > 1 for v in maps)


def cut(net: nn.Module, partitioner: RecomputePartitioner | None = None) -> Callable:
    """`net`, cut into two passes as torch.compile does and run eagerly: quick, without kernels."""

    def backend(gm, inputs):
        with config.patch(custom_partitioner_fn=partitioner or Recording()):
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
    """The results of a training step: logits, gradients, running statistics."""
    y = call(x, masks)
    results = [
        y.detach(),
        *torch.autograd.grad(y.sin().sum(), list(net.parameters())),
        *net.buffers(),
    ]
    return torch.cat([each.double().flatten() for each in results])


def schema(target) -> str:
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


@pytest.mark.slow
def test_a_step_that_recomputes_is_the_eager_one_and_saves_a_map_for_each_convolution():
    spec = SPECS["resnet_rs_tiny"]
    net, *_ = prepared(spec)
    eager, x, masks = prepared(spec)
    expected = step(eager, eager, x, masks)
    partitioner = Recording()
    result = step(cut(net, partitioner), net, x, masks)
    assert (result - expected).norm() <= 1e-9 * expected.norm()
    images = 1  # the input of the space-to-depth stem
    convolutions = sum(isinstance(module, ConvNorm) for module in net.modules())
    assert 0 < partitioner.maps() <= convolutions + images
    assert not [target for target in partitioner.backward if schema(target) in CONVOLUTIONS]


@pytest.mark.slow
def test_checkpoints_among_blocks_in_a_row_are_saved_and_no_number_changes(monkeypatch):
    spec = SPECS["tresnet_tiny"]
    row = replace(spec.stages[0], depth=6)
    net, x, masks = prepared(replace(spec, stages=(row,)))
    results, maps = [], []
    for every in (2, 100):  # the third and the fifth result are saved, or none
        monkeypatch.setattr(compile, "CHECKPOINT_EVERY", every)
        own = copy.deepcopy(net)
        partitioner = Recording()
        results.append(step(cut(own, partitioner), own, x, masks))
        maps.append(partitioner.maps(3, row.width, 8, 8))
    assert maps[0] == maps[1] + 2
    assert (results[0] - results[1]).norm() <= 1e-9 * results[1].norm()


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


@pytest.mark.slow
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
        with pytest.warns(UserWarning, match=f"^compiled without recomputation: .*{reason}[^\n]*$"):
            compile_for_training(net)
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
    net, *_ = prepared(spec)
    eager, x, masks = prepared(spec)
    expected = step(eager, eager, x, masks)
    settings, generator = torch._functorch.config.get_config_copy(), torch.get_rng_state()
    compile.why_not_recompute.cache_clear()
    call = compile_for_training(net)
    assert not compile.why_not_recompute(CPU)
    assert (step(call, net, x, masks) - expected).norm() <= 1e-9 * expected.norm()
    assert torch._functorch.config.get_config_copy() == settings
    assert torch.equal(torch.get_rng_state(), generator)
