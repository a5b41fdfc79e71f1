"""What only batch norms need may be kept as codes of a byte: gradients stay near, results stay the same."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullstride.nets.fused import batch_norm
from fullstride.nets.fused.network import se_weights
from fullstride.nets.layers import SqueezeExcite

STEP = 6 / 127  # deviations between two codes
LAST, FIRST = torch.channels_last, torch.contiguous_format
GAINS = {"both signs": (-0.5, 1.0, -1.5, 0.7, 1.2), "zero": (0.0, 1.0, 0.0, -0.5, 0.0)}
FORMS = [
    (gated, kept, shortcut)
    for gated in (False, True)
    for kept in (False, True)
    for shortcut in ("none", "map")
]
FORMS += [(gated, True, "normed") for gated in (False, True)]
all_forms = pytest.mark.parametrize(("gated", "kept", "shortcut"), FORMS)


class Tail(nn.Module):
    """The end of a block with random numbers in all of it."""

    def __init__(
        self, gated: bool, kept: bool, shortcut: str, gains: tuple[float, ...] = GAINS["both signs"]
    ):
        super().__init__()
        self.kept, self.shortcut = kept, shortcut
        self.norm, self.shortcut_norm = nn.BatchNorm2d(len(gains)), nn.BatchNorm2d(len(gains))
        self.se = SqueezeExcite(len(gains), 3) if gated else None
        for norm in (self.norm, self.shortcut_norm):
            nn.init.normal_(norm.bias)
            norm.running_mean = torch.randn(len(gains))
        self.norm.weight.data = torch.tensor(gains)
        nn.init.normal_(self.shortcut_norm.weight)
        self.double()

    def forward(self, x: Tensor, other: Tensor, keep: Tensor, **how) -> Tensor:
        weights = se_weights(self.se) if self.se else ()
        given = None if self.shortcut == "none" else other
        norm = self.shortcut_norm if self.shortcut == "normed" else None
        return batch_norm.bn_add_relu(
            x, self.norm, given, norm, se=weights, mask=keep if self.kept else None, **how
        )


def inputs(
    n: int = 3, c: int = 5, h: int = 7, w: int = 5, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    x, other = torch.randn(2, n, c, h, w, dtype=torch.float64) * 2 + 3
    keep = torch.tensor([2.0, 0.0, 2.0, 2.0], dtype=torch.float64)[:n].view(-1, 1, 1, 1)
    return [x.to(dtype).requires_grad_(), other.to(dtype).requires_grad_(), keep]


def outcome(tail: Tail, given: list[Tensor], direction: Tensor, **how) -> dict[str, Tensor]:
    """The result, the statistics after it, and the gradients."""
    tail = copy.deepcopy(tail)
    leaves = {"x": given[0], "other": given[1], **dict(tail.named_parameters())}
    y = tail(*given, **how)
    found = torch.autograd.grad((y * direction).sum(), list(leaves.values()), allow_unused=True)
    gradients = {name: each for name, each in zip(leaves, found, strict=True) if each is not None}
    return {"y": y.detach(), **dict(tail.named_buffers()), **gradients}


def normalised(x: Tensor, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """The normalised map, and 1 / deviation."""
    mean, rstd = (
        x.mean((0, 2, 3), keepdim=True),
        (x.var((0, 2, 3), unbiased=False, keepdim=True) + norm.eps).rsqrt(),
    )
    return (x - mean) * rstd, rstd


def rounded(exact: Tensor, y: Tensor | None) -> Tensor:
    """As codes give it back: of all codes the nearest, odd ones where y > 0 and even ones elsewhere."""
    codes = torch.arange(-127, 128).double()
    far = (exact[..., None] / STEP - codes).abs()
    if y is not None:
        far += 1e9 * ((codes % 2 == 1) != (y > 0)[..., None])
    return codes[far.argmin(-1)] * STEP


def of_norm(
    d: Tensor, squeezed: Tensor, x: Tensor, norm: nn.BatchNorm2d, y: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a batch norm's input, gain and bias by the textbook, with the input rounded.

    `squeezed`, of the gate's means, is the same for all pixels of an image, whose exact means are known.
    """
    exact, rstd = normalised(x, norm)
    seen = rounded(exact, y)
    of_gain = (d * seen + squeezed * exact).sum((0, 2, 3), keepdim=True)
    dz = d + squeezed
    of_bias, count = dz.sum((0, 2, 3), keepdim=True), dz.numel() / dz.shape[1]
    of_x = norm.weight[:, None, None] * rstd * (dz - of_bias / count - seen * of_gain / count)
    return of_x, of_gain.flatten(), of_bias.flatten()


@torch.no_grad()
def by_formulas(tail: Tail, given: list[Tensor], direction: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradients of a tail, slowly: by hand, one image's gate after the other."""
    x, other, keep = given
    found, d = {}, direction * (y > 0)
    scale = keep.expand(-1, x.shape[1], 1, 1) if tail.kept else torch.ones_like(x[:, :, :1, :1])
    squeezed = torch.zeros_like(x)
    if se := tail.se:
        normal, _ = normalised(x, tail.norm)
        exact, seen_rounded = (
            each * tail.norm.weight[:, None, None] + tail.norm.bias[:, None, None]
            for each in (normal, rounded(normal, y))
        )
        weights = reduce, reduce_bias, expand, _ = [
            p.flatten(1) if p.dim() == 4 else p for p in se_weights(se)
        ]
        totals = [torch.zeros_like(p) for p in weights]
        for i in range(len(x)):
            seen = exact[i].mean((1, 2))
            inside = (reduce @ seen + reduce_bias).relu()
            gate = (expand @ inside + weights[3]).sigmoid()
            of_gate = (d[i] * seen_rounded[i]).sum((1, 2)) * (keep[i].flatten() if tail.kept else 1)
            of_expanded = of_gate * gate * (1 - gate)
            of_reduced = (expand.T @ of_expanded) * (inside > 0)
            parts = (
                torch.outer(of_reduced, seen),
                of_reduced,
                torch.outer(of_expanded, inside),
                of_expanded,
            )
            for total, part in zip(totals, parts, strict=True):
                total += part
            squeezed[i] = ((reduce.T @ of_reduced) / x[i, 0].numel())[:, None, None]
            scale = scale.clone()
            scale[i] *= gate[:, None, None]
        names = ("se.reduce.weight", "se.reduce.bias", "se.expand.weight", "se.expand.bias")
        found |= {n: t.view(p.shape) for n, t, p in zip(names, totals, se_weights(se), strict=True)}
    found["x"], found["norm.weight"], found["norm.bias"] = of_norm(
        d * scale, squeezed, x, tail.norm, y
    )
    if tail.shortcut == "map":
        found["other"] = d
    elif tail.shortcut == "normed":
        names = ("other", "shortcut_norm.weight", "shortcut_norm.bias")
        found |= dict(
            zip(
                names, of_norm(d, torch.zeros_like(d), other, tail.shortcut_norm, None), strict=True
            )
        )
    return found


def distance(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / (1 + wanted.double().norm())).item()


@all_forms
@pytest.mark.parametrize("gains", GAINS.values(), ids=GAINS)
@pytest.mark.parametrize("shape", [(3, 5, 7, 5), (2, 1, 3, 3), (4, 5, 1, 1)], ids=str)
def test_gradients_of_a_tail_that_keeps_codes_are_those_of_formulas_with_the_same_rounding(
    gated, kept, shortcut, gains, shape
):
    torch.manual_seed(0)
    tail, given = Tail(gated, kept, shortcut, gains[: shape[1]]), inputs(*shape)
    direction = torch.randn(shape).double()
    found = outcome(tail, given, direction, int8=True)
    wanted = by_formulas(tail, given, direction, found["y"])
    for name in wanted:
        assert distance(found[name], wanted[name]) < 1e-9, name
    assert wanted.keys() == found.keys() - {"y", *dict(tail.named_buffers())}


@all_forms
def test_codes_change_neither_result_nor_statistics_and_gradients_by_less_than_a_fiftieth(
    gated, kept, shortcut
):
    torch.manual_seed(0)
    tail, given, direction = (
        Tail(gated, kept, shortcut),
        inputs(4, 5, 24, 24),
        torch.rand(4, 5, 24, 24).double(),
    )
    found, wanted = (outcome(tail, given, direction, int8=int8) for int8 in (True, False))
    for name in ("y", *dict(tail.named_buffers())):
        assert torch.equal(found[name], wanted[name])
    for name in found:
        assert distance(found[name], wanted[name]) < 0.02, name
    assert any(not torch.equal(found[name], wanted[name]) for name in found)


@all_forms
def test_memory_formats_stay_and_change_no_numbers(gated, kept, shortcut):
    torch.manual_seed(0)
    tail, (x, other, keep), direction = (
        Tail(gated, kept, shortcut),
        inputs(),
        torch.randn(3, 5, 7, 5).double(),
    )
    wanted = outcome(tail, [x, other, keep], direction, int8=True)
    for one, two in ((LAST, LAST), (LAST, FIRST), (FIRST, LAST)):
        laid = [
            t.detach().contiguous(memory_format=f).requires_grad_()
            for t, f in ((x, one), (other, two))
        ]
        found = outcome(tail, [*laid, keep], direction, int8=True)
        assert found["y"].is_contiguous(memory_format=one)
        for name in wanted:
            assert distance(found[name], wanted[name]) < 1e-9, name


@all_forms
@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02), (torch.float16, 5e-3)]
)
def test_narrow_formats_stay_near_the_formulas_for_the_same_numbers(
    gated, kept, shortcut, dtype, near
):
    torch.manual_seed(0)
    tail, given, direction = (
        Tail(gated, kept, shortcut),
        inputs(dtype=dtype),
        torch.randn(3, 5, 7, 5).double(),
    )
    found = outcome(
        copy.deepcopy(tail).float(), [*given[:2], given[2].float()], direction.to(dtype), int8=True
    )
    wide = [t.detach().double() for t in given]
    wanted = by_formulas(tail, wide, direction.to(dtype).double(), found["y"].double())
    assert found["x"].dtype == dtype
    for name in wanted:
        assert distance(found[name], wanted[name]) < near, name


def test_no_images_give_gradients_of_zero():
    tail, given = Tail(True, True, "normed"), inputs(0)
    found = outcome(tail, given, torch.zeros(()), int8=True)
    assert found["y"].shape == (0, 5, 7, 5)
    assert all(not found[name].any() for name, _ in tail.named_parameters())


def test_values_beyond_the_last_code_count_as_far_as_it_reaches():
    torch.manual_seed(0)
    tail, (x, *rest) = Tail(False, False, "none"), inputs()
    x.data[0, :, 0, 0] = 1e4
    assert normalised(x, tail.norm)[0].max() > 6.5
    direction = torch.randn(3, 5, 7, 5).double()
    found = outcome(tail, [x, *rest], direction, int8=True)
    for name, wanted in by_formulas(tail, [x, *rest], direction, found["y"]).items():
        assert distance(found[name], wanted) < 1e-9, name


def test_where_the_result_is_not_kept_no_code_is():
    torch.manual_seed(0)
    tail, given, direction = Tail(True, True, "normed"), inputs(), torch.randn(3, 5, 7, 5).double()
    found, wanted = (
        outcome(tail, given, direction, int8=int8, saved="input") for int8 in (True, False)
    )
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_processes_that_share_statistics_share_those_of_codes(tmp_path):
    torch.manual_seed(0)
    tail, given, direction = Tail(True, True, "normed"), inputs(), torch.randn(3, 5, 7, 5).double()
    wanted = outcome(tail, given, direction, int8=True)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.distributed_c10d._get_default_group().group_name
        found = outcome(tail, given, direction, int8=True, group=group)
    finally:
        dist.destroy_process_group()
    assert all(distance(found[name], wanted[name]) < 1e-9 for name in wanted)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own test looks at it
@all_forms
def test_operators_that_give_and_take_codes_are_registered_as_torch_wants_it(gated, kept, shortcut):
    tail, given = Tail(gated, kept, shortcut), inputs(2)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            found = op(*args, **(kwargs or {}))
            if op.namespace == "fullstride":
                seen.append((op, args, found))
            return found

    with Watch():
        tail(
            *(t.detach().to(memory_format=LAST).requires_grad_() for t in given[:2]),
            given[2],
            int8=True,
        ).sum().backward()
    (forward, args, (y, moments, means, codes, other_codes)), (backward, taken, _) = seen
    for op, what in ((forward, args), (backward, taken)):
        torch.library.opcheck(op, what, test_utils=("test_schema", "test_faketensor"))
    assert codes.dtype == other_codes.dtype == torch.int8
    assert [codes.shape == y.shape, other_codes.shape == y.shape] == [True, shortcut == "normed"]
    _, gain, bias, _, se, keep, other, slope, eps, *_ = args
    other = [other_codes, *other[1:3]] if len(other) > 1 else other
    again = codes, gain, bias, moments, means, se, keep, other, slope, eps, y.dtype
    torch.library.opcheck(
        torch.ops.fullstride.rejoin.default, again, test_utils=("test_schema", "test_faketensor")
    )
    made = torch.ops.fullstride.rejoin(*again)
    assert distance(made, y) < 0.05
    assert torch.equal(made > 0, y > 0)


def test_the_triton_forms_give_the_numbers_of_their_definitions():
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
