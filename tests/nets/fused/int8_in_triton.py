"""Tests of the Triton kernels with int8 maps, which `test_int8_maps.py` runs in another process."""

import pytest
import torch
from kernels_in_triton import DEVICE, FIRST, LAST, NOISE, ROUNDING, Given, each, given
from torch import Tensor

from fullstride.nets.fused import reference
from fullstride.nets.fused.reference import Term
from fullstride.nets.fused.triton import passes

SHAPES = {
    "ordinary": (2, 37, 5, 8),
    "one value": (1, 1, 1, 1),
    "one channel": (2, 1, 3, 5),
    "no images": (0, 5, 4, 4),
    "beyond a block": (1, 136, 5, 13),
}
RATE = 127 / 6
every_kind = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
every_type = pytest.mark.parametrize(
    ("dtype", "format"),
    [(torch.float32, LAST), (torch.bfloat16, FIRST), (torch.float16, LAST)],
    ids=str,
)


def maps(shape: tuple[int, ...], dtype: torch.dtype, format: torch.memory_format) -> Given:
    return each(
        given(shape, dtype), lambda map: map.contiguous(memory_format=format), maps_only=True
    )


def near(found: Tensor, wanted: Tensor, rounding: float) -> None:
    largest = max(wanted.abs().max().item(), 1.0) if wanted.numel() else 1.0
    torch.testing.assert_close(found.double(), wanted.double(), rtol=rounding, atol=NOISE * largest)


def codes_of(map: Tensor) -> Tensor:
    return (map.float() * 40).round().clamp(-127, 127).to(torch.int8)


@every_type
@every_kind
@pytest.mark.parametrize("which", ["none", "map", "normed"])
def test_codes_are_those_of_the_definition_and_the_result_is_that_without_codes(
    shape, dtype, format, which
):
    one = maps(shape, dtype, format)
    rates = torch.full((2, shape[1]), RATE, device=DEVICE) * 2
    other = {
        "none": None,
        "map": Term(one.other),
        "normed": Term(one.other, one.other_affine, rate_c=rates[1]),
    }[which]
    x = Term(one.x, one.affine, rate_c=rates[0])
    y, codes, other_int8 = passes.bn_add_act(x, other, 0.0)
    plain = [term and term._replace(rate_c=None) for term in (x, other)]
    assert torch.equal(y, passes.bn_add_act(*plain, 0.0)[0])
    wanted = reference.bn_add_act(x, other, 0.0)
    assert codes is not None
    assert (other_int8 is None) == (wanted[2] is None)
    for found, true in ((codes, wanted[1]), (other_int8, wanted[2])):
        if found is not None and true is not None:
            assert found.dtype == torch.int8
            assert found.is_contiguous(memory_format=format)
            apart = (found.int() - true.int()).abs()
            assert (
                apart.numel() == 0 or apart.max() <= 2
            )  # multiply-adds may put halves on the other side
            assert apart.sum() <= 0.01 * apart.numel()
    assert torch.equal(codes % 2 == 1, y > 0)


def test_codes_end_at_the_largest_ones():
    one = maps((1, 8, 4, 4), torch.float32, LAST)
    zero = one.affine._replace(pivot_c=torch.zeros(8, device=DEVICE))
    x = torch.linspace(-300, 300, 128, device=DEVICE).view(1, 8, 4, 4)
    ones = torch.ones(8, device=DEVICE)
    term = Term(x, zero, rate_c=ones)
    _, codes, other_int8 = passes.bn_add_act(term, term, None)
    assert codes is not None
    assert other_int8 is not None
    assert torch.equal(other_int8.float(), (x + 0.5).floor().clamp(-127, 127))
    assert codes.min() <= -125
    assert codes.max() >= 125
    assert ((codes.float() - x.clamp(-126, 126)).abs() <= 1).all()


@every_type
@every_kind
def test_gradients_are_made_of_codes_as_defined(shape, dtype, format):
    one = maps(shape, dtype, format)
    x, other = codes_of(one.x), codes_of(one.other)
    wide = each(one, Tensor.double)
    ours = Term(x, one.affine, one.slopes)
    ours_wide = Term(x.double(), wide.affine, wide.slopes)
    for theirs, theirs_wide in (
        (Term(other), Term(other.double())),
        (
            Term(other, one.other_affine, one.other_slopes),
            Term(other.double(), wide.other_affine, wide.other_slopes),
        ),
    ):
        given_wide = wide.grad, wide.y, ours_wide, theirs_wide, 0.0
        found = passes.bn_add_act_sums(one.grad, one.y, ours, theirs, 0.0)
        wanted = reference.bn_add_act_sums(*given_wide)
        for result, true in zip(found, wanted, strict=True):
            if result is not None and true is not None:
                near(result, true, 0.0)
        found = passes.bn_add_act_gradients(one.grad, one.y, ours, theirs, 0.0)
        wanted = reference.bn_add_act_gradients(*given_wide)
        for result, true in zip(found, wanted, strict=True):
            assert result is not None
            assert true is not None
            assert result.dtype == dtype
            near(result, true, ROUNDING[dtype])


@every_type
@every_kind
@pytest.mark.parametrize("normed", [False, True])
def test_a_result_is_made_again_of_codes_as_defined(shape, dtype, format, normed):
    one = maps(shape, dtype, format)
    x, other = codes_of(one.x), codes_of(one.other) if normed else one.other
    theirs = Term(other, one.other_affine if normed else None)
    found, *_ = passes.bn_add_act(Term(x, one.affine), theirs, 0.0, dtype)
    wide = each(one, Tensor.double)
    wide_theirs = Term(other.double(), wide.other_affine if normed else None)
    wanted, *_ = reference.bn_add_act(Term(x, wide.affine), wide_theirs, 0.0, torch.float64)
    assert torch.equal(found > 0, x % 2 == 1)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=format) or not found.numel()
    near(found, wanted, ROUNDING[dtype])
