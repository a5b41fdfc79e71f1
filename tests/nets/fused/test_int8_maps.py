"""Batch-norm inputs stored as int8: results stay the same, gradients stay near."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from covers import pairwise_cover
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullstride.nets.fused import batch_norm
from fullstride.nets.fused.network import se_weights
from fullstride.nets.layers import SqueezeExcite

STEP = 6 / 127  # standard deviations between two int8 values
LAST, FIRST = torch.channels_last, torch.contiguous_format
GAINS = {"both signs": (-0.5, 1.0, -1.5, 0.7, 1.2), "zero": (0.0, 1.0, 0.0, -0.5, 0.0)}
SHAPES = {"map": (3, 5, 7, 5), "channel": (2, 1, 3, 3), "pixel": (4, 5, 1, 1)}
DTYPES = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 5e-3}
END = (False, True), (False, True), ("none", "map", "normed")  # gated, masked, shortcut
all_ends = pytest.mark.parametrize(("gated", "masked", "shortcut"), pairwise_cover(*END))


class BlockEnd(nn.Module):
    """The end of a block with random numbers in all of its modules."""

    def __init__(
        self,
        gated: bool,
        masked: bool,
        shortcut: str,
        gains: tuple[float, ...] = GAINS["both signs"],
    ):
        super().__init__()
        self.masked, self.shortcut = masked, shortcut
        self.norm, self.shortcut_norm = nn.BatchNorm2d(len(gains)), nn.BatchNorm2d(len(gains))
        self.se = SqueezeExcite(len(gains), 3) if gated else None
        for norm in (self.norm, self.shortcut_norm):
            nn.init.normal_(norm.bias)
            norm.running_mean = torch.randn(len(gains))
        self.norm.weight.data = torch.tensor(gains)
        nn.init.normal_(self.shortcut_norm.weight)
        self.double()

    def forward(
        self, x: Tensor, other: Tensor, mask: Tensor, int8: bool = False, group: str = ""
    ) -> Tensor:
        weights = se_weights(self.se) if self.se else ()
        shortcut = {"none": (), "map": (other,), "normed": (other, self.shortcut_norm)}
        return batch_norm.bn_add_relu(
            x,
            self.norm,
            shortcut[self.shortcut],
            se=weights,
            mask=mask if self.masked else None,
            saved="int8" if int8 else "both",
            group=group,
        )


def inputs(
    n: int = 3, c: int = 5, h: int = 7, w: int = 5, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    x, other = torch.randn(2, n, c, h, w, dtype=torch.float64) * 2 + 3
    mask = torch.tensor([2.0, 0.0, 2.0, 2.0], dtype=torch.float64)[:n].view(-1, 1, 1, 1)
    return [x.to(dtype).requires_grad_(), other.to(dtype).requires_grad_(), mask]


def outcome(end: BlockEnd, arguments: list[Tensor], direction: Tensor, **how) -> dict[str, Tensor]:
    """The result, the statistics after it, and the gradients."""
    end = copy.deepcopy(end)
    leaves = {"x": arguments[0], "other": arguments[1], **dict(end.named_parameters())}
    y = end(*arguments, **how)
    actual = torch.autograd.grad((y * direction).sum(), list(leaves.values()), allow_unused=True)
    gradients = {name: each for name, each in zip(leaves, actual, strict=True) if each is not None}
    return {"y": y.detach(), **dict(end.named_buffers()), **gradients}


def normalised(x: Tensor, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """The normalised map, and 1 / deviation."""
    mean, rstd = (
        x.mean((0, 2, 3), keepdim=True),
        (x.var((0, 2, 3), unbiased=False, keepdim=True) + norm.eps).rsqrt(),
    )
    return (x - mean) * rstd, rstd


def rounded(exact: Tensor, y: Tensor | None) -> Tensor:
    """As int8 restores it: the nearest value, odd where y > 0 and even elsewhere."""
    codes = torch.arange(-127, 128).double()
    far = (exact[..., None] / STEP - codes).abs()
    if y is not None:
        far += 1e9 * ((codes % 2 == 1) != (y > 0)[..., None])
    return codes[far.argmin(-1)] * STEP


def of_norm(
    d: Tensor, squeezed: Tensor, x: Tensor, norm: nn.BatchNorm2d, y: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a batch norm's input, gain and bias by the textbook, with the input rounded.

    `squeezed`, of the gate's means, is the same for all pixels of an image, whose exact means are
    known.
    """
    exact, rstd = normalised(x, norm)
    calls = rounded(exact, y)
    grad_gain = (d * calls + squeezed * exact).sum((0, 2, 3), keepdim=True)
    dz = d + squeezed
    grad_bias, count = dz.sum((0, 2, 3), keepdim=True), dz.numel() / dz.shape[1]
    grad_x = (
        norm.weight[:, None, None] * rstd * (dz - grad_bias / count - calls * grad_gain / count)
    )
    return grad_x, grad_gain.flatten(), grad_bias.flatten()


@torch.no_grad()
def by_formulas(
    end: BlockEnd, arguments: list[Tensor], direction: Tensor, y: Tensor
) -> dict[str, Tensor]:
    """The gradients of a end, slowly: by hand, one image's gate after the other."""
    x, other, mask = arguments
    actual, d = {}, direction * (y > 0)
    scale = mask.expand(-1, x.shape[1], 1, 1) if end.masked else torch.ones_like(x[:, :, :1, :1])
    squeezed = torch.zeros_like(x)
    if se := end.se:
        normal, _ = normalised(x, end.norm)
        exact, seen_rounded = (
            each * end.norm.weight[:, None, None] + end.norm.bias[:, None, None]
            for each in (normal, rounded(normal, y))
        )
        weights = reduce, reduce_bias, expand, _ = [
            p.flatten(1) if p.dim() == 4 else p for p in se_weights(se)
        ]
        totals = [torch.zeros_like(p) for p in weights]
        for i in range(len(x)):
            calls = exact[i].mean((1, 2))
            inside = (reduce @ calls + reduce_bias).relu()
            gate = (expand @ inside + weights[3]).sigmoid()
            grad_gate = (d[i] * seen_rounded[i]).sum((1, 2)) * (
                mask[i].flatten() if end.masked else 1
            )
            grad_expanded = grad_gate * gate * (1 - gate)
            grad_reduced = (expand.T @ grad_expanded) * (inside > 0)
            parts = (
                torch.outer(grad_reduced, calls),
                grad_reduced,
                torch.outer(grad_expanded, inside),
                grad_expanded,
            )
            for total, part in zip(totals, parts, strict=True):
                total += part
            squeezed[i] = ((reduce.T @ grad_reduced) / x[i, 0].numel())[:, None, None]
            scale = scale.clone()
            scale[i] *= gate[:, None, None]
        names = ("se.reduce.weight", "se.reduce.bias", "se.expand.weight", "se.expand.bias")
        actual |= {
            n: t.view(p.shape) for n, t, p in zip(names, totals, se_weights(se), strict=True)
        }
    actual["x"], actual["norm.weight"], actual["norm.bias"] = of_norm(
        d * scale, squeezed, x, end.norm, y
    )
    if end.shortcut == "map":
        actual["other"] = d
    elif end.shortcut == "normed":
        names = ("other", "shortcut_norm.weight", "shortcut_norm.bias")
        actual |= dict(
            zip(names, of_norm(d, torch.zeros_like(d), other, end.shortcut_norm, None), strict=True)
        )
    return actual


def distance(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / (1 + expected.double().norm())).item()


@pytest.mark.parametrize(
    ("gated", "masked", "shortcut", "gains", "shape"), pairwise_cover(*END, [*GAINS], [*SHAPES])
)
def test_gradients_are_those_of_formulas_with_the_same_rounding(
    gated, masked, shortcut, gains, shape
):
    torch.manual_seed(0)
    shape = SHAPES[shape]
    end, arguments = BlockEnd(gated, masked, shortcut, GAINS[gains][: shape[1]]), inputs(*shape)
    direction = torch.randn(shape).double()
    actual = outcome(end, arguments, direction, int8=True)
    expected = by_formulas(end, arguments, direction, actual["y"])
    for name in expected:
        assert distance(actual[name], expected[name]) < 1e-9, name
    assert expected.keys() == actual.keys() - {"y", *dict(end.named_buffers())}


@all_ends
def test_int8_changes_neither_result_nor_statistics_and_gradients_by_less_than_a_fiftieth(
    gated, masked, shortcut
):
    torch.manual_seed(0)
    end, arguments, direction = (
        BlockEnd(gated, masked, shortcut),
        inputs(4, 5, 24, 24),
        torch.rand(4, 5, 24, 24).double(),
    )
    actual, expected = (outcome(end, arguments, direction, int8=int8) for int8 in (True, False))
    for name in ("y", *dict(end.named_buffers())):
        assert torch.equal(actual[name], expected[name])
    for name in actual:
        assert distance(actual[name], expected[name]) < 0.02, name
    assert any(not torch.equal(actual[name], expected[name]) for name in actual)


@all_ends
def test_memory_formats_are_kept_and_change_no_numbers(gated, masked, shortcut):
    torch.manual_seed(0)
    end, (x, other, mask), direction = (
        BlockEnd(gated, masked, shortcut),
        inputs(),
        torch.randn(3, 5, 7, 5).double(),
    )
    expected = outcome(end, [x, other, mask], direction, int8=True)
    for one, two in ((LAST, LAST), (LAST, FIRST), (FIRST, LAST)):
        in_format_of = [
            t.detach().contiguous(memory_format=f).requires_grad_()
            for t, f in ((x, one), (other, two))
        ]
        actual = outcome(end, [*in_format_of, mask], direction, int8=True)
        assert actual["y"].is_contiguous(memory_format=one)
        for name in expected:
            assert distance(actual[name], expected[name]) < 1e-9, name


@pytest.mark.parametrize(("gated", "masked", "shortcut", "dtype"), pairwise_cover(*END, [*DTYPES]))
def test_half_precision_stays_near_the_formulas_for_the_same_numbers(
    gated, masked, shortcut, dtype
):
    torch.manual_seed(0)
    end, arguments, direction = (
        BlockEnd(gated, masked, shortcut),
        inputs(dtype=dtype),
        torch.randn(3, 5, 7, 5).double(),
    )
    actual = outcome(
        copy.deepcopy(end).float(),
        [*arguments[:2], arguments[2].float()],
        direction.to(dtype),
        int8=True,
    )
    wide = [t.detach().double() for t in arguments]
    expected = by_formulas(end, wide, direction.to(dtype).double(), actual["y"].double())
    assert actual["x"].dtype == dtype
    for name in expected:
        assert distance(actual[name], expected[name]) < DTYPES[dtype], name


def test_no_images_give_gradients_of_zero():
    end, arguments = BlockEnd(True, True, "normed"), inputs(0)
    actual = outcome(end, arguments, torch.zeros(()), int8=True)
    assert actual["y"].shape == (0, 5, 7, 5)
    assert all(not actual[name].any() for name, _ in end.named_parameters())


def test_values_beyond_the_range_of_int8_are_clamped_to_it():
    torch.manual_seed(0)
    end, (x, *rest) = BlockEnd(False, False, "none"), inputs()
    x.data[0, :, 0, 0] = 1e4
    assert normalised(x, end.norm)[0].max() > 6.5
    direction = torch.randn(3, 5, 7, 5).double()
    actual = outcome(end, [x, *rest], direction, int8=True)
    for name, expected in by_formulas(end, [x, *rest], direction, actual["y"]).items():
        assert distance(actual[name], expected) < 1e-9, name


def test_processes_that_share_statistics_share_those_of_int8_maps(tmp_path):
    torch.manual_seed(0)
    end, arguments, direction = (
        BlockEnd(True, True, "normed"),
        inputs(),
        torch.randn(3, 5, 7, 5).double(),
    )
    expected = outcome(end, arguments, direction, int8=True)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.distributed_c10d._get_default_group().group_name
        actual = outcome(end, arguments, direction, int8=True, group=group)
    finally:
        dist.destroy_process_group()
    assert all(distance(actual[name], expected[name]) < 1e-9 for name in expected)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own test looks at it
@all_ends
def test_operators_with_int8_maps_pass_opcheck(gated, masked, shortcut):
    end, arguments = BlockEnd(gated, masked, shortcut), inputs(2)
    calls = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            actual = op(*args, **(kwargs or {}))
            if op.namespace == "fullstride":
                calls.append((op, args, actual))
            return actual

    with Watch():
        end(
            *(t.detach().to(memory_format=LAST).requires_grad_() for t in arguments[:2]),
            arguments[2],
            int8=True,
        ).sum().backward()
    (forward, args, (y, batch_stats, means, codes, other_int8)), (backward, inputs_, _) = calls
    for op, what in ((forward, args), (backward, inputs_)):
        torch.library.opcheck(op, what, test_utils=("test_schema", "test_faketensor"))
    assert codes.dtype == other_int8.dtype == torch.int8
    assert [codes.shape == y.shape, other_int8.shape == y.shape] == [True, shortcut == "normed"]
    _, gain, bias, se, other, mask, slope, eps, *_ = args
    other = [other_int8, *other[1:]] if len(other) > 1 else other
    again = codes, gain, bias, batch_stats, means, se, other, mask, slope, eps, y.dtype
    torch.library.opcheck(
        torch.ops.fullstride.rejoin.default, again, test_utils=("test_schema", "test_faketensor")
    )
    made = torch.ops.fullstride.rejoin(*again)
    assert distance(made, y) < 0.05
    assert torch.equal(made > 0, y > 0)


@pytest.mark.slow
def test_the_triton_kernels_have_the_numbers_of_the_reference():
    pytest.importorskip(
        "triton", reason="the kernels are written in Triton, which is not installed here"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    script = str(Path(__file__).with_name("int8_in_triton.py"))
    done = subprocess.run(
        [*words, script], env=inherited | interpret, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
