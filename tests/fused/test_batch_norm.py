"""Lean operators and networks give what PyTorch's modules give, and keep less of it."""

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fullstride.nets.families import SPECS
from fullstride.nets.fused import batch_norm
from fullstride.nets.fused.network import fused_layers, se_weights, to_fused, to_plain
from fullstride.nets.layers import BlurPool, SqueezeExcite, average_pool
from fullstride.nets.network import Masks, Network

N, C = 3, 5
TINY = ("tresnet_tiny", "resnet_rs_tiny", "genet_tiny")
# All stems and blocks, every style: with and without blur, gates inside and at the end, max-pools.
SMALL = (*TINY, "tresnet_v2_l", "resnet18", "resnet50d")
GAINS = {
    "ordinary": (0.5, 1.0, 1.5, 0.7, 1.2),
    "both signs": (-0.5, 1.0, -1.5, 0.7, -1.2),
    "tiny": (1e-3, -1e-3, 2e-3, 1.0, -2e-3),
    "zero": (0.0, 1.0, 0.0, -0.5, 0.0),
}


class Parts(nn.Module):
    """What the operators are made of, with random numbers in all of it."""

    def __init__(self, gains: Sequence[float] = GAINS["both signs"], channels: int = C):
        super().__init__()
        self.norm, self.shortcut_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.se = SqueezeExcite(channels, 3)
        self.conv = nn.Conv2d(channels, 2 * channels, 3, 2, 1, bias=False)
        self.grouped = nn.Conv2d(channels, channels, 3, 1, 1, groups=channels, bias=False)
        self.project = nn.Conv2d(channels, 2 * channels, 1, bias=False)
        self.pool, self.blur = average_pool(2), BlurPool(channels)
        for norm in (self.norm, self.shortcut_norm):
            nn.init.normal_(norm.bias)
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
        nn.init.normal_(self.shortcut_norm.weight)
        self.norm.weight.data = torch.tensor(gains[:channels])
        self.double()

    def forward(self, operator: Callable, *given: Tensor) -> Tensor:
        return operator(self, *given)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def act(z: Tensor, slope: float | None) -> Tensor:
    return z if slope is None else F.leaky_relu(z, slope)


Operator = tuple[
    Callable[..., Tensor], Callable[..., Tensor]
]  # ours and PyTorch's, of (parts, x, other, keep)


def tail(gated: bool, kept: bool, shortcut: str, slope: float | None, save) -> Operator:
    def ours(m: Parts, x: Tensor, other: Tensor, keep: Tensor) -> Tensor:
        given = None if shortcut == "none" else other
        norm = m.shortcut_norm if shortcut == "normed" else None
        weights = se_weights(m.se) if gated else ()
        return batch_norm.bn_add_relu(
            x, m.norm, given, norm, se=weights, mask=keep if kept else None, slope=slope, saved=save
        )

    def plain(m: Parts, x: Tensor, other: Tensor, keep: Tensor) -> Tensor:
        z = m.se(m.norm(x)) if gated else m.norm(x)
        z = z * keep if kept else z
        if shortcut != "none":
            z = z + (m.shortcut_norm(other) if shortcut == "normed" else other)
        return act(z, slope)

    return ours, plain


def gated_blur(m: Parts, x: Tensor) -> Tensor:
    y, means = batch_norm.bn_act_blur(x, m.norm, 1e-2)
    return y * m.se.gate(means[..., None, None])


TAILS = {
    f"tail{' gated' * gated}{' kept' * kept} {shortcut} {slope} {save}": tail(
        gated, kept, shortcut, slope, save
    )
    for gated in (False, True)
    for kept in (False, True)
    for shortcut, slope, save in (
        ("none", 0.0, "both"),
        ("map", 0.0, "both"),
        ("map", 0.0, "input"),
        ("normed", 0.0, "both"),
        ("normed", 0.1, "input"),
        ("normed", None, "both"),
    )
}
ACTIVATED: dict[str, Operator] = {
    f"abn {slope} {save}": (
        lambda m, x, *_, slope=slope, saved=save: batch_norm.bn_act(x, m.norm, slope, saved=save),
        lambda m, x, *_, slope=slope: act(m.norm(x), slope),
    )
    for slope, save in ((0.0, "both"), (0.0, "input"), (1e-2, "input"), (None, "both"))
}
INVERTED: dict[str, Operator] = {
    f"abn {slope} output": (
        lambda m, x, *_, slope=slope: batch_norm.bn_act(x, m.norm, slope, saved="output"),
        lambda m, x, *_, slope=slope: act(m.norm(x), slope),
    )
    for slope in (1e-3, 0.3, None)
} | {
    "abn_se": (
        lambda m, x, *_: batch_norm.bn_act_se(x, m.norm, se_weights(m.se), 1e-2),
        lambda m, x, *_: m.se(act(m.norm(x), 1e-2)),
    )
}
CONVOLVED: dict[str, Operator] = {
    "abn_conv": (
        lambda m, x, *_: batch_norm.bn_act_conv(x, m.norm, 0.0, m.conv),
        lambda m, x, *_: m.conv(act(m.norm(x), 0.0)),
    ),
    "abn_conv grouped": (
        lambda m, x, *_: batch_norm.bn_act_conv(x, m.norm, 0.1, m.grouped),
        lambda m, x, *_: m.grouped(act(m.norm(x), 0.1)),
    ),
    "pool_conv": (
        lambda m, x, *_: batch_norm.pool_conv(x, m.project),
        lambda m, x, *_: m.project(m.pool(x)),
    ),
    "abn_blur gated": (
        lambda m, x, *_: gated_blur(m, x),
        lambda m, x, *_: m.se(m.blur(act(m.norm(x), 1e-2))),
    ),
    "abn_blur relu": (
        lambda m, x, *_: batch_norm.bn_act_blur(x, m.norm, 0.0)[0],
        lambda m, x, *_: m.blur(act(m.norm(x), 0.0)),
    ),
}
SAVING_INPUT = {**TAILS, **ACTIVATED, **CONVOLVED}
OPERATORS = {**SAVING_INPUT, **INVERTED}


def inputs(n: int = N, c: int = C, h: int = 6, w: int = 5) -> list[Tensor]:
    x, other = random(n, c, h, w) * 2 + 3, random(n, c, h, w)
    return [
        x.requires_grad_(),
        other.requires_grad_(),
        torch.rand(n, 1, 1, 1, dtype=torch.float64).round() / 0.5,
    ]


def outcome(parts: nn.Module, operator: Callable, given: list[Tensor]) -> list[Tensor]:
    """The result, all gradients, and the statistics after it."""
    parts = copy.deepcopy(parts)
    leaves = [t for t in (*given, *parts.parameters()) if t.requires_grad]
    y = operator(parts, *given)
    direction = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape).cos()
    gradients = torch.autograd.grad((y * direction).sum(), leaves, allow_unused=True)
    return [y.detach(), *(torch.zeros(1) if g is None else g for g in gradients), *parts.buffers()]


def same(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert (one.double() - other.double()).norm() <= tolerance * (1 + other.double().norm())


@pytest.mark.parametrize(
    ("name", "gains"),
    [(n, g) for n in OPERATORS for g in GAINS if n in SAVING_INPUT or g != "zero"],
)
def test_an_operator_gives_the_result_the_gradients_and_the_statistics_of_the_modules(name, gains):
    torch.manual_seed(0)
    ours, plain = OPERATORS[name]
    parts, given = Parts(GAINS[gains]), inputs()
    same(outcome(parts, ours, given), outcome(parts, plain, given), 1e-9)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_gradients_of_an_operator_are_its_slopes(name):
    torch.manual_seed(0)
    ours, _ = OPERATORS[name]
    parts, (x, other, keep) = Parts(channels=2), inputs(2, 2, 3, 4)
    names = [name for name, _ in parts.named_parameters()]
    weights = [weight.detach().requires_grad_() for weight in parts.parameters()]
    statistics = {name: value.clone() for name, value in parts.named_buffers()}

    def of(x: Tensor, other: Tensor, *weights: Tensor) -> Tensor:
        state = {
            **dict(zip(names, weights, strict=True)),
            **{k: v.clone() for k, v in statistics.items()},
        }
        return torch.func.functional_call(parts, state, (ours, x, other, keep))

    assert torch.autograd.gradcheck(of, (x, other, *weights), atol=1e-8, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize("name", OPERATORS)
def test_memory_formats_stay_and_change_no_numbers(name):
    torch.manual_seed(0)
    ours, plain = OPERATORS[name]
    parts, (x, other, keep) = Parts(GAINS["both signs"]), inputs()
    wanted = outcome(parts, plain, [x, other, keep])
    last = [t.detach().to(memory_format=torch.channels_last).requires_grad_() for t in (x, other)]
    same(outcome(parts, ours, [*last, keep]), wanted, 1e-9)
    same(outcome(parts, ours, [last[0], other, keep]), wanted, 1e-9)
    sparse = [t.detach().repeat_interleave(2, 3)[..., ::2].requires_grad_() for t in (x, other)]
    same(outcome(parts, ours, [*sparse, keep]), wanted, 1e-9)
    assert ours(parts, last[0], last[1], keep).is_contiguous(memory_format=torch.channels_last)
    assert ours(parts, x, other, keep).is_contiguous()


@pytest.mark.parametrize("name", OPERATORS)
def test_a_single_channel_and_a_single_pixel_are_right(name):
    torch.manual_seed(0)
    ours, plain = OPERATORS[name]
    for shape in ((2, 1, 3, 3), (4, C, 1, 1)):
        parts, given = Parts(channels=shape[1]), inputs(*shape)
        same(outcome(parts, ours, given), outcome(parts, plain, given), 1e-9)


@pytest.mark.parametrize("name", OPERATORS)
def test_no_images_give_no_images_and_gradients_of_zero(name):
    ours, _ = OPERATORS[name]
    parts, given = Parts(), inputs(0)
    y, *rest = outcome(parts, ours, given)
    gradients, statistics = rest[: -len(list(parts.buffers()))], rest[-len(list(parts.buffers())) :]
    assert len(y) == 0
    assert all(not g.any() for g in gradients)
    counts = parts.norm.num_batches_tracked
    for before, after in zip(parts.buffers(), statistics, strict=True):
        assert torch.equal(before, after) or before.shape == counts.shape


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own test looks at it
@pytest.mark.parametrize(
    "name",
    [
        "tail none 0.0 both",
        "tail gated kept normed 0.1 input",
        "abn 0.3 output",
        "abn_se",
        "abn_conv",
        "abn_conv grouped",
        "pool_conv",
        "abn_blur gated",
    ],
)
def test_an_operator_is_registered_as_torch_wants_it(name):
    """Schema, shapes and strides without data, gradients, and both under tracing."""
    ours, _ = OPERATORS[name]
    parts, given = Parts(), inputs(2)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == "fullstride":
                seen.append((op, args))
            return op(*args, **(kwargs or {}))

    for form in (torch.contiguous_format, torch.channels_last):
        x, other = (t.detach().to(memory_format=form).requires_grad_() for t in given[:2])
        with Watch():
            ours(parts, x, other, given[2]).sum().backward()
    assert len(seen) == 4
    for op, args in seen:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    for op, args in (seen[0], seen[2]):
        leaves = torch.utils._pytree.tree_map_only(
            Tensor, lambda t: t.detach().requires_grad_(), args
        )
        torch.library.opcheck(
            op, leaves, test_utils=("test_autograd_registration", "test_aot_dispatch_dynamic")
        )


@pytest.mark.parametrize(
    "name", [name for name in OPERATORS if name != "abn_blur gated"]
)  # whose gate is a module
def test_narrow_formats_stay_near_float64_of_the_same_numbers(name):
    torch.manual_seed(0)
    ours, _ = OPERATORS[name]
    parts, given = Parts(GAINS["ordinary"]), inputs(8, C, 12, 12)
    parts.float()
    for dtype, near in ((torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 4e-2)):
        rounded = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in given]
        found = outcome(parts, ours, rounded)
        wide = [t.detach().double().requires_grad_(t.requires_grad) for t in rounded]
        wanted = outcome(copy.deepcopy(parts).double(), ours, wide)
        assert found[0].dtype == dtype
        for one, other in zip(found, wanted, strict=True):
            assert (one.double() - other).norm() <= near * (1 + other.double().norm())


def net_for(name: str, classes: int = 7) -> Network:
    """With gains of both signs, as in training that has been going on for long."""
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
    branches = tuple(None if keep is None else keep.double() for keep in masks.branches)
    return Masks(branches, None if masks.pooled is None else masks.pooled.double())


def step(net: nn.Module, x: Tensor, masks: Masks | None = None) -> list[Tensor]:
    """Logits, all gradients, statistics."""
    y = net(x) if masks is None else net(x, masks)
    return [
        y.detach(),
        *torch.autograd.grad(y.float().sin().sum(), list(net.parameters())),
        *net.buffers(),
    ]


def relative(found: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = [(a.double(), b.double()) for a, b in zip(found, wanted, strict=True)]
    return max(((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in pairs)


def check_whole(net: Network, px: int, images: int = 3) -> None:
    net.double().regularise(drop_path=0.5, dropout=0.3)
    lean = to_fused(copy.deepcopy(net))
    x, masks = torch.rand(images, 3, px, px, dtype=torch.float64), doubled(net.draw(images))
    assert relative(step(lean, x, masks), step(net, x, masks)) < 1e-9
    net.eval()
    lean.eval()
    assert (lean(x) - net(x)).norm() <= 1e-9 * net(x).norm()  # by the running statistics


@pytest.mark.parametrize("name", SMALL)
def test_every_gradient_of_a_lean_network_is_the_plain_ones(name):
    torch.manual_seed(0)
    check_whole(net_for(name), 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tresnet_m", "resnet_rs_50", "genet_large"])
def test_every_gradient_of_a_published_network_is_the_plain_ones(name):
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
        _, *found = step(net, x)
    return torch.cat([g.double().flatten() for g, _ in zip(found, net.parameters(), strict=False)])


def rounding() -> torch.autograd.graph.saved_tensors_hooks:
    """Maps are kept as bf16 while all arithmetic stays in float32."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda t: (
            t.bfloat16() if t.dim() == 4 and not isinstance(t, nn.Parameter) else t,
            t.dtype,
        ),
        lambda kept: kept[0].to(kept[1]),
    )


def check_rounding(net: Network, x: Tensor) -> None:
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.2, 1.2)
    lean = to_fused(copy.deepcopy(net))
    exact = gradients(net, x, enabled=False)
    with rounding():
        found = gradients(lean, x, enabled=False)
    assert (found - exact).norm() <= 0.01 * exact.norm()
    assert F.cosine_similarity(found, exact, 0) > 0.999


def test_keeping_maps_in_bf16_costs_a_hundredth_of_the_gradient_where_inputs_are_made_again():
    torch.manual_seed(0)
    check_rounding(net_for("tresnet_tiny"), torch.rand(8, 3, 64, 64))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_under_autocast_a_lean_network_is_as_near_to_the_truth_as_a_plain_one(name, layout):
    torch.manual_seed(0)
    net = net_for(name)
    x = torch.rand(8, 3, 64, 64).to(memory_format=layout)
    exact = gradients(copy.deepcopy(net).double(), x.double(), enabled=False)
    plain, lean = ((gradients(n, x) - exact).norm() for n in (net, to_fused(copy.deepcopy(net))))
    assert lean <= 1.25 * plain


@pytest.mark.parametrize("name", TINY[:2])
def test_a_compiled_lean_network_is_one_graph_and_gives_the_same(name):
    torch.manual_seed(0)
    net = net_for(name).double()
    net.regularise(drop_path=0.5, dropout=0.3)
    x, masks = torch.rand(3, 3, 32, 32, dtype=torch.float64), doubled(net.draw(3))
    wanted = step(copy.deepcopy(net), x, masks)
    torch._dynamo.reset()
    compiled = torch.compile(to_fused(net), fullgraph=True, backend="aot_eager")
    assert relative(step_of(compiled, net, x, masks), wanted) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_inductor_keeps_the_operators(name):
    torch.manual_seed(0)
    net = net_for(name).double()
    x = torch.rand(3, 3, 32, 32, dtype=torch.float64).to(memory_format=torch.channels_last)
    wanted = step(copy.deepcopy(net), x)
    torch._dynamo.reset()
    compiled = torch.compile(to_fused(net), fullgraph=True)
    assert relative(step_of(compiled, net, x), wanted) < 1e-9


def step_of(call: Callable, net: nn.Module, *given) -> list[Tensor]:
    y = call(*given)
    return [
        y.detach(),
        *torch.autograd.grad(y.float().sin().sum(), list(net.parameters())),
        *net.buffers(),
    ]


@pytest.mark.parametrize("name", TINY)
def test_a_checkpointed_copied_network_that_was_loaded_gives_the_same(name):
    torch.manual_seed(0)
    net, x = net_for(name).double(), torch.rand(3, 3, 32, 32, dtype=torch.float64)
    lean = to_fused(Network(net.spec).double()).train()
    lean.load_state_dict(net.state_dict())
    lean = copy.deepcopy(lean)
    assert lean.state_dict().keys() == net.state_dict().keys()

    def recomputed(n: Network) -> list[Tensor]:
        def call(x: Tensor) -> Tensor:
            return n.head(
                checkpoint(
                    n.stages, checkpoint(n.stem, x, use_reentrant=False), use_reentrant=False
                )
            )

        # Otherwise the second pass ends where the last tensor is kept: before or after the last statistics move.
        with set_checkpoint_early_stop(False):
            return step_of(call, n, x)

    assert relative(recomputed(lean), recomputed(net)) < 1e-9
    net.load_state_dict(lean.state_dict())
    assert relative([net.eval()(x)], [lean.eval()(x)]) < 1e-9


def test_no_input_is_moved_and_the_same_step_gives_the_same_bits():
    net = to_fused(net_for("tresnet_tiny"))
    x = torch.rand(3, 3, 32, 32)
    before, again = x.clone(), copy.deepcopy(net)
    for one, other in zip(step(net, x), step(again, x), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(x, before)


@pytest.mark.parametrize("which", ["stem", "stages.1", "stages"])
def test_frozen_batch_norms_go_on_by_their_running_statistics(which):
    torch.manual_seed(0)
    net = net_for("tresnet_tiny").double()
    lean = to_fused(copy.deepcopy(net))
    x = torch.rand(3, 3, 32, 32, dtype=torch.float64)
    for n in (net, lean):
        n.get_submodule(which).eval()
    assert relative(step(lean, x), step(net, x)) < 1e-9


@pytest.mark.parametrize(("gain", "bias"), [(-0.1, 0.9), (1e-4, 0.0), (0.0, 0.0)])
def test_a_norm_with_a_small_gain_keeps_its_input_and_the_choice_is_made_anew_by_train(gain, bias):
    net = to_fused(Network(SPECS["tresnet_tiny"])).train()

    def saves() -> list[str]:
        return [m.saved for m in fused_layers(net) if m.slope]

    assert set(saves()) == {"output"}
    with torch.no_grad():
        net.stem.conv.norm.weight[0], net.stem.conv.norm.bias[0] = gain, bias
    assert set(saves()) == {"output"}
    net.train()
    assert saves() == ["both", *["output"] * (len(saves()) - 1)]
    assert not fused_layers(to_plain(net))


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
    subprocess.run([*words, str(tmp_path / "found")], check=True, capture_output=True)
    ranks = [torch.load(tmp_path / f"found.{rank}") for rank in range(2)]
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


def kept_bytes(net: Network, images: int) -> int:
    """What autograd holds after a forward pass without the parameters and buffers, each storage once."""
    own = {t.untyped_storage()._cdata for t in (*net.parameters(), *net.buffers())}
    kept = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage()._cdata] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        _graph = net(torch.empty(images, 3, 224, 224, dtype=torch.bfloat16, device="meta"))
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)


@pytest.mark.parametrize(
    ("name", "plain", "lean"),
    [
        ("tresnet_m", 33.3, 22.6),
        ("resnet_rs_50", 57.6, 36.0),
        ("genet_large", 23.4, 17.0),
        ("resnet50", 43.8, 37.0),
    ],
)
def test_a_lean_network_keeps_no_more_megabytes_per_image(name, plain, lean):
    with torch.device("meta"):
        net = Network(SPECS[name]).bfloat16().train()

    def per_image() -> float:
        return (kept_bytes(net, 3) - kept_bytes(net, 2)) / 1e6

    assert per_image() == pytest.approx(plain, abs=0.06)
    to_fused(net)
    assert per_image() <= lean


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m, x: batch_norm.bn_act(x, m.norm, 0.0, saved="output"),
            "slope 0.0 cannot be inverted: use saved=",
        ),
        (
            lambda m, x: batch_norm.bn_act(x, m.norm, -0.1, saved="output"),
            "slope -0.1 cannot be inverted: use saved=",
        ),
        (
            lambda m, x: batch_norm.bn_act_se(x, m.norm, se_weights(m.se), 0.0),
            "slope 0.0 cannot be inverted: use bn_act and",
        ),
        (
            lambda m, x: batch_norm.bn_add_relu(x.int(), m.norm),
            "batch norm of a map of torch.int32: use a floating-point type",
        ),
        (
            lambda m, x: batch_norm.bn_add_relu(x[:1, :, :1, :1], m.norm),
            "has one value per channel: use more or larger images",
        ),
        (
            lambda m, x: batch_norm.bn_add_relu(x[:, :2], m.norm),
            r"a map of \(3, 2, 6, 5\): use one of \(N, 5, H, W\)",
        ),
        (
            lambda m, x: batch_norm.bn_act_blur(x.to("meta"), m.norm, 0.0),
            "a map on meta and a batch norm on cpu: use one device",
        ),
        (
            lambda m, x: batch_norm.bn_add_relu(x, nn.BatchNorm2d(C, momentum=None)),
            "without gain, running statistics or momentum",
        ),
        (lambda m, x: batch_norm.bn_add_relu(x, m.norm, x[:, :, 1:]), "use maps of equal shape"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as refused:
        call(Parts(), inputs()[0])
    assert "\n" not in str(refused.value)
