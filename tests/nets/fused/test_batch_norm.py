"""Fused operators have the results and gradients of PyTorch's modules."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covers import pairwise_cover
from torch import Tensor, nn

from fullstride.nets.fused import batch_norm
from fullstride.nets.fused.network import se_weights
from fullstride.nets.layers import BlurPool, SqueezeExcite, average_pool

N, C = 3, 5
GAINS = {
    "ordinary": (0.5, 1.0, 1.5, 0.7, 1.2),
    "both signs": (-0.5, 1.0, -1.5, 0.7, -1.2),
    "tiny": (1e-3, -1e-3, 2e-3, 1.0, -2e-3),
    "zero": (0.0, 1.0, 0.0, -0.5, 0.0),
}


class Modules(nn.Module):
    """The modules that the operators compute, with random numbers in all of them."""

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

    def forward(self, operator: Callable, *arguments: Tensor) -> Tensor:
        return operator(self, *arguments)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def act(z: Tensor, slope: float | None) -> Tensor:
    return z if slope is None else F.leaky_relu(z, slope)


# An operator and the same computation by PyTorch's modules, of (modules, x, shortcut, mask).
Operator = tuple[Callable[..., Tensor], Callable[..., Tensor]]


def bn_add_relu(
    gated: bool, masked: bool, shortcut: str, slope: float | None, saved: Any
) -> Operator:
    def fused(m: Modules, x: Tensor, other: Tensor, mask: Tensor) -> Tensor:
        return batch_norm.bn_add_relu(
            x,
            m.norm,
            {"none": (), "map": (other,), "normed": (other, m.shortcut_norm)}[shortcut],
            se=se_weights(m.se) if gated else (),
            mask=mask if masked else None,
            slope=slope,
            saved=saved,
        )

    def plain(m: Modules, x: Tensor, other: Tensor, mask: Tensor) -> Tensor:
        z = m.se(m.norm(x)) if gated else m.norm(x)
        z = z * mask if masked else z
        if shortcut != "none":
            z = z + (m.shortcut_norm(other) if shortcut == "normed" else other)
        return act(z, slope)

    return fused, plain


def bn_act(slope: float | None, saved: Any) -> Operator:
    return (
        lambda m, x, *_: batch_norm.bn_act(x, m.norm, slope, saved=saved),
        lambda m, x, *_: act(m.norm(x), slope),
    )


def gated_blur(m: Modules, x: Tensor) -> Tensor:
    y, means = batch_norm.bn_act_blur(x, m.norm, 1e-2)
    return y * m.se.gate(means[..., None, None])


BOOLEANS, SHORTCUTS, SLOPES = (False, True), ("none", "map", "normed"), (0.0, 0.1, None)
END = BOOLEANS, BOOLEANS, SHORTCUTS, SLOPES, ("both", "input")  # of a block
ACT = (0.0, 1e-2, 0.3, None), ("both", "input", "output")


def is_possible(slope: float | None, saved: str, gains: str = "") -> bool:
    """An output is inverted only where neither a slope nor a gain is zero."""
    return saved != "output" or (slope != 0.0 and gains != "zero")


GATED: dict[str, Operator] = {
    "bn_act_se": (
        lambda m, x, *_: batch_norm.bn_act_se(x, m.norm, se_weights(m.se), 1e-2),
        lambda m, x, *_: m.se(act(m.norm(x), 1e-2)),
    )
}
CONVOLVED: dict[str, Operator] = {
    "bn_act_conv": (
        lambda m, x, *_: batch_norm.bn_act_conv(x, m.norm, 0.0, m.conv),
        lambda m, x, *_: m.conv(act(m.norm(x), 0.0)),
    ),
    "bn_act_conv grouped": (
        lambda m, x, *_: batch_norm.bn_act_conv(x, m.norm, 0.1, m.grouped),
        lambda m, x, *_: m.grouped(act(m.norm(x), 0.1)),
    ),
    "pool_conv": (
        lambda m, x, *_: batch_norm.pool_conv(x, m.project),
        lambda m, x, *_: m.project(m.pool(x)),
    ),
    "bn_act_blur gated": (
        lambda m, x, *_: gated_blur(m, x),
        lambda m, x, *_: m.se(m.blur(act(m.norm(x), 1e-2))),
    ),
    "bn_act_blur relu": (
        lambda m, x, *_: batch_norm.bn_act_blur(x, m.norm, 0.0)[0],
        lambda m, x, *_: m.blur(act(m.norm(x), 0.0)),
    ),
}


def label(*values: Any) -> str:
    return " ".join(map(str, values))


OPERATORS = {
    **{label("bn_add_relu", *row): bn_add_relu(*row) for row in pairwise_cover(*END)},
    **{
        label("bn_act", *row): bn_act(*row)
        for row in ((0.0, "both"), (1e-2, "input"), (0.3, "output"), (None, "both"))
    },
    **GATED,
    **CONVOLVED,
}
# One row for each pair of an operator's options and the gains.
WITH_GAINS = {
    **{
        label("bn_add_relu", *row): (bn_add_relu(*row[:-1]), row[-1])
        for row in pairwise_cover(*END, [*GAINS])
    },
    **{
        label("bn_act", *row): (bn_act(*row[:-1]), row[-1])
        for row in pairwise_cover(*ACT, [*GAINS], allowed=is_possible)
    },
    **{
        label(name, gains): (operator, gains)
        for name, operator in {**GATED, **CONVOLVED}.items()
        for gains in GAINS
        if name not in GATED or gains != "zero"
    },
}


def inputs(n: int = N, c: int = C, h: int = 6, w: int = 5) -> list[Tensor]:
    x, other = random(n, c, h, w) * 2 + 3, random(n, c, h, w)
    return [
        x.requires_grad_(),
        other.requires_grad_(),
        torch.rand(n, 1, 1, 1, dtype=torch.float64).round() / 0.5,
    ]


def outcome(modules: nn.Module, operator: Callable, arguments: list[Tensor]) -> list[Tensor]:
    """The result, all gradients, and the statistics after it."""
    modules = copy.deepcopy(modules)
    leaves = [t for t in (*arguments, *modules.parameters()) if t.requires_grad]
    y = operator(modules, *arguments)
    direction = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape).cos()
    gradients = torch.autograd.grad((y * direction).sum(), leaves, allow_unused=True)
    return [
        y.detach(),
        *(torch.zeros(1) if g is None else g for g in gradients),
        *modules.buffers(),
    ]


def same(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert (one.double() - other.double()).norm() <= tolerance * (1 + other.double().norm())


@pytest.mark.parametrize(("operator", "gains"), WITH_GAINS.values(), ids=WITH_GAINS)
def test_an_operator_has_the_result_the_gradients_and_the_statistics_of_the_modules(
    operator, gains
):
    torch.manual_seed(0)
    fused, plain = operator
    modules, arguments = Modules(GAINS[gains]), inputs()
    same(outcome(modules, fused, arguments), outcome(modules, plain, arguments), 1e-9)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_gradients_of_an_operator_are_its_slopes(name):
    torch.manual_seed(0)
    fused, _ = OPERATORS[name]
    modules, (x, other, mask) = Modules(channels=2), inputs(2, 2, 3, 4)
    names = [name for name, _ in modules.named_parameters()]
    weights = [weight.detach().requires_grad_() for weight in modules.parameters()]
    statistics = {name: value.clone() for name, value in modules.named_buffers()}

    def of(x: Tensor, other: Tensor, *weights: Tensor) -> Tensor:
        state = {
            **dict(zip(names, weights, strict=True)),
            **{k: v.clone() for k, v in statistics.items()},
        }
        return torch.func.functional_call(modules, state, (fused, x, other, mask))

    assert torch.autograd.gradcheck(of, (x, other, *weights), atol=1e-8, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize("name", OPERATORS)
def test_memory_formats_are_kept_and_change_no_numbers(name):
    torch.manual_seed(0)
    fused, plain = OPERATORS[name]
    modules, (x, other, mask) = Modules(GAINS["both signs"]), inputs()
    expected = outcome(modules, plain, [x, other, mask])
    last = [t.detach().to(memory_format=torch.channels_last).requires_grad_() for t in (x, other)]
    same(outcome(modules, fused, [*last, mask]), expected, 1e-9)
    same(outcome(modules, fused, [last[0], other, mask]), expected, 1e-9)
    sparse = [t.detach().repeat_interleave(2, 3)[..., ::2].requires_grad_() for t in (x, other)]
    same(outcome(modules, fused, [*sparse, mask]), expected, 1e-9)
    assert fused(modules, last[0], last[1], mask).is_contiguous(memory_format=torch.channels_last)
    assert fused(modules, x, other, mask).is_contiguous()


@pytest.mark.parametrize("name", OPERATORS)
def test_a_single_channel_and_a_single_pixel_are_right(name):
    torch.manual_seed(0)
    fused, plain = OPERATORS[name]
    for shape in ((2, 1, 3, 3), (4, C, 1, 1)):
        modules, arguments = Modules(channels=shape[1]), inputs(*shape)
        same(outcome(modules, fused, arguments), outcome(modules, plain, arguments), 1e-9)


@pytest.mark.parametrize("name", OPERATORS)
def test_no_images_give_no_images_and_gradients_of_zero(name):
    fused, _ = OPERATORS[name]
    modules, arguments = Modules(), inputs(0)
    y, *rest = outcome(modules, fused, arguments)
    gradients, statistics = (
        rest[: -len(list(modules.buffers()))],
        rest[-len(list(modules.buffers())) :],
    )
    assert len(y) == 0
    assert all(not g.any() for g in gradients)
    counts = modules.norm.num_batches_tracked
    for before, after in zip(modules.buffers(), statistics, strict=True):
        assert torch.equal(before, after) or before.shape == counts.shape


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own test looks at it
@pytest.mark.parametrize(
    "name",
    [
        *(name for name in OPERATORS if name.startswith("bn_add_relu True True")),
        "bn_act 0.3 output",
        "bn_act_se",
        "bn_act_conv",
        "bn_act_conv grouped",
        "pool_conv",
        "bn_act_blur gated",
    ],
)
def test_an_operator_passes_opcheck(name):
    """Schema, shapes and strides without data, gradients, and both under tracing."""
    fused, _ = OPERATORS[name]
    modules, arguments = Modules(), inputs(2)
    calls = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == "fullstride":
                calls.append((op, args))
            return op(*args, **(kwargs or {}))

    for form in (torch.contiguous_format, torch.channels_last):
        x, other = (t.detach().to(memory_format=form).requires_grad_() for t in arguments[:2])
        with Watch():
            fused(modules, x, other, arguments[2]).sum().backward()
    assert len(calls) == 4
    for op, args in calls:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    for op, args in (calls[0], calls[2]):
        leaves = torch.utils._pytree.tree_map_only(
            Tensor, lambda t: t.detach().requires_grad_(), args
        )
        torch.library.opcheck(
            op, leaves, test_utils=("test_autograd_registration", "test_aot_dispatch_dynamic")
        )


@pytest.mark.parametrize(
    "name", [name for name in OPERATORS if name != "bn_act_blur gated"]
)  # whose gate is a module
def test_half_precision_stays_near_float64_of_the_same_numbers(name):
    torch.manual_seed(0)
    fused, _ = OPERATORS[name]
    modules, arguments = Modules(GAINS["ordinary"]), inputs(8, C, 12, 12)
    modules.float()
    for dtype, near in ((torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 4e-2)):
        rounded = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in arguments]
        actual = outcome(modules, fused, rounded)
        wide = [t.detach().double().requires_grad_(t.requires_grad) for t in rounded]
        expected = outcome(copy.deepcopy(modules).double(), fused, wide)
        assert actual[0].dtype == dtype
        for one, other in zip(actual, expected, strict=True):
            assert (one.double() - other).norm() <= near * (1 + other.double().norm())


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "pool_conv"])
def test_maps_a_thousand_deviations_from_zero_have_the_statistics_of_float64(name):
    """With running means near zero, which say nothing of the batch."""
    torch.manual_seed(0)
    fused, _ = OPERATORS[name]
    modules = Modules(GAINS["ordinary"]).float()
    x, other, mask = inputs(8, C, 12, 12)
    maps = [(1000 + t.detach()).float().requires_grad_() for t in (x, other)]
    wide = copy.deepcopy(modules).double()
    for net, arguments in (
        (modules, [*maps, mask.float()]),
        (wide, [t.detach().double().requires_grad_() for t in [*maps, mask.float()]]),
    ):
        for norm in (net.norm, net.shortcut_norm):
            norm.momentum = 1.0
        fused(net, *arguments)
    for one, exact in ((modules.norm, wide.norm), (modules.shortcut_norm, wide.shortcut_norm)):
        assert (one.running_var / exact.running_var - 1).abs().max() <= 1e-5
        assert (one.running_mean - exact.running_mean).abs().max() <= 1e-4  # of float32 at 1000


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
        (lambda m, x: batch_norm.bn_add_relu(x, m.norm, (x[:, :, 1:],)), "use maps of equal shape"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as refused:
        call(Modules(), inputs()[0])
    assert "\n" not in str(refused.value)
