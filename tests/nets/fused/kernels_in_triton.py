"""Tests of the Triton kernels, run by `test_kernels.py` in a process of its own.

On a GPU the kernels are compiled and run. Elsewhere Triton interprets them, if TRITON_INTERPRET=1
is in the environment before anything imports Triton, as torchvision does.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fullstride.nets.fused import reference
from fullstride.nets.fused.operators import choose
from fullstride.nets.fused.ops import statistics
from fullstride.nets.fused.reference import Affine, Slopes, Term
from fullstride.nets.fused.triton import passes as on_triton
from fullstride.nets.fused.triton import tiles
from fullstride.nets.fused.triton.tiles import offsets, place

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
LAST, FIRST = torch.channels_last, torch.contiguous_format
# of a value that is stored; the interpreter cuts bf16 off where a GPU rounds it
ROUNDING = {
    torch.float32: 0.0,
    torch.bfloat16: 2**-7 if DEVICE == "cpu" else 2**-8,
    torch.float16: 2**-11,
}
NOISE = 2e-6  # of sums in float32, of the largest value


@dataclass
class Given:
    """Something for each argument that a pass may have."""

    x: Tensor
    y: Tensor
    other: Tensor
    grad: Tensor
    half: Tensor  # a gradient of the blurred map
    affine: Affine
    other_affine: Affine
    slopes: Slopes
    other_slopes: Slopes
    squeeze: Tensor

    @property
    def normed_x(self) -> Term:
        return Term(self.x, self.affine, self.slopes)

    @property
    def no_x(self) -> Term:
        return Term(None, self.affine, self.slopes)

    @property
    def normed_other(self) -> Term:
        return Term(self.other, self.other_affine, self.other_slopes)


def given(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, shared: bool = False
) -> Given:
    """Of maps in NCHW; numbers of the batch norms are for each image, or `shared` by all where that
    may be."""
    torch.manual_seed(0)
    n, c, h, w = shape
    rows, other_rows = (1, n) if shared else (n, 1)

    def maps(h: int = h, w: int = w) -> Tensor:
        return torch.randn(n, c, h, w).to(DEVICE, dtype)

    def numbers(rows: int) -> Tensor:
        return torch.randn(rows, c, device=DEVICE)

    def scales(rows: int) -> Tensor:
        return numbers(rows).sign() * (0.5 + numbers(rows).sigmoid())

    return Given(
        *(maps() for _ in range(4)),
        half=maps((h + 1) // 2, (w + 1) // 2),
        affine=Affine(numbers(1)[0], scales(rows), numbers(rows)),
        other_affine=Affine(numbers(1)[0], scales(1), numbers(other_rows)),
        slopes=Slopes(scales(rows), numbers(1), numbers(other_rows)),
        other_slopes=Slopes(numbers(other_rows), numbers(other_rows), numbers(other_rows)),
        squeeze=numbers(n),
    )


def each(one: Given, change: Callable[[Tensor], Tensor], maps_only: bool = False) -> Given:
    """With `change` of every tensor."""

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value) if value.ndim == 4 or not maps_only else value
        return type(value)(*map(changed, value))

    return replace(one, **{field.name: changed(getattr(one, field.name)) for field in fields(one)})


Form = tuple[str, Callable[[Given], tuple[Any, ...]]]  # a pass, and its arguments of what is given
FORMS: list[Form] = [
    ("stats", lambda m: (m.x, m.affine.pivot_c)),
    ("bn_add_act", lambda m: (m.normed_x, None, None)),
    ("bn_add_act", lambda m: (m.normed_x, None, 0.01)),
    ("bn_add_act", lambda m: (m.normed_x, Term(m.other), 0)),
    ("bn_add_act", lambda m: (m.normed_x, m.normed_other, None)),
    ("bn_add_act", lambda m: (m.normed_x, m.normed_other, 0.0)),
    ("bn_add_act_sums", lambda m: (m.grad, m.y, m.no_x, None, 0.01)),
    ("bn_add_act_sums", lambda m: (m.grad, m.y, m.no_x, None, None)),
    ("bn_add_act_sums", lambda m: (m.grad, m.y, m.normed_x, None, None)),
    ("bn_add_act_sums", lambda m: (m.grad, m.y, m.normed_x, Term(m.other), 0.0)),
    ("bn_add_act_sums", lambda m: (m.grad, m.y, m.normed_x, m.normed_other, 0.01)),
    ("bn_add_act_gradients", lambda m: (m.grad, m.y, m.no_x, None, 0.01)),
    ("bn_add_act_gradients", lambda m: (m.grad, m.y, m.normed_x, None, None)),
    ("bn_add_act_gradients", lambda m: (m.grad, m.y, m.normed_x, Term(m.other), 0)),
    ("bn_add_act_gradients", lambda m: (m.grad, m.y, m.normed_x, m.normed_other, 0.01)),
    ("bn_add_act_gradients", lambda m: (m.grad, m.y, m.no_x, None, 0.01, m.squeeze)),
    ("bn_add_act_gradients", lambda m: (m.grad, m.y, m.normed_x, Term(m.other), 0.0, m.squeeze)),
    ("slope_means", lambda m: (m.normed_x, 0.01)),
    ("slope_means", lambda m: (m.normed_x, None)),
    ("blurred", lambda m: (m.normed_x, 0.01)),
    ("blurred", lambda m: (m.normed_x, None)),
    ("blurred_sums", lambda m: (m.half, m.squeeze, m.normed_x, 0.0)),
    ("blurred_gradients", lambda m: (m.half, m.squeeze, m.normed_x, None)),
    ("blurred_gradients", lambda m: (m.half, m.squeeze, m.normed_x, 0.01)),
]
all_forms = pytest.mark.parametrize(
    "form", FORMS, ids=[f"{name}-{number}" for number, (name, _) in enumerate(FORMS)]
)


def answers(passes: Any, form: Form, one: Given) -> list[Tensor]:
    """What a pass returns, without its Nones, of which both forms must have the same."""
    found = getattr(passes, form[0])(*form[1](one))
    found = found if isinstance(found, tuple) else (found,)
    return [each for each in found if each is not None]


def check(form: Form, one: Given, dtype: torch.dtype) -> list[Tensor]:
    found, true = answers(on_triton, form, one), answers(reference, form, each(one, Tensor.double))
    for ours, theirs in zip(found, true, strict=True):
        assert ours.dtype == (dtype if theirs.ndim == 4 else torch.float32)
        assert ours.shape == theirs.shape
        if theirs.numel():
            largest = max(theirs.abs().max().item(), 1.0)
            rounding = ROUNDING[ours.dtype] if theirs.ndim == 4 else 0.0
            torch.testing.assert_close(ours.double(), theirs, rtol=rounding, atol=NOISE * largest)
    return found


@all_forms
@pytest.mark.parametrize(
    ("dtype", "format"),
    [
        (torch.float32, LAST),
        (torch.bfloat16, FIRST),
        pytest.param(torch.float32, FIRST, marks=pytest.mark.slow),
        pytest.param(torch.float16, LAST, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_pass_gives_the_numbers_of_its_definition_in_the_format_of_its_maps(form, dtype, format):
    one = each(
        given((2, 37, 5, 8), dtype),
        lambda maps: maps.contiguous(memory_format=format),
        maps_only=True,
    )
    found = check(form, one, dtype)
    assert all(maps.is_contiguous(memory_format=format) for maps in found if maps.ndim == 4)
    terms = (given if isinstance(given, Term) else (given,) for given in form[1](one))
    tensors = found + [given for term in terms for given in term if isinstance(given, Tensor)]
    assert len({each.untyped_storage().data_ptr() for each in tensors}) == len(
        tensors
    )  # as custom operators ask


SHAPES = {
    "one value": (1, 1, 1, 1),
    "one channel": (2, 1, 3, 4),
    "one line": (1, 40, 1, 6),
    "one column": (1, 5, 7, 1),
    "no images": (0, 5, 4, 4),
    "channels beyond a block": (1, 136, 2, 3),
    "pixels beyond a block": (1, 32, 11, 13),
}


@pytest.mark.slow
@all_forms
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_pass_is_right_for_maps_of_any_shape(form, shape):
    one = given(shape, shared=True)
    check(form, one, torch.float32)
    check(
        form,
        each(one, lambda maps: maps.contiguous(memory_format=LAST), maps_only=True),
        torch.float32,
    )


@pytest.mark.slow
@all_forms
def test_a_pass_is_right_for_maps_of_unlike_strides(form):
    def strided(maps: Tensor) -> Tensor:
        """The same values in one of four ways, in turn."""
        ways.append(ways.pop(0))
        wide = torch.zeros(*maps.shape[:2], maps.shape[2] * 2, maps.shape[3] + 1, device=DEVICE)
        if ways[0] == "every second channel":
            wide = torch.zeros(maps.shape[0], maps.shape[1] * 2, *maps.shape[2:], device=DEVICE)
            return wide.contiguous(memory_format=LAST)[:, 1::2].copy_(maps)
        if ways[0] == "part of the pixels":
            return wide[:, :, ::2, 1:].copy_(maps)
        return maps.contiguous(memory_format=LAST if ways[0] == "NHWC" else FIRST)

    ways = ["NHWC", "part of the pixels", "every second channel", "NCHW"]
    one = each(given((2, 6, 5, 4)), strided, maps_only=True)
    check(form, one, torch.float32)
    check(form, each(one, strided, maps_only=True), torch.float32)


def test_a_gradient_that_is_one_number_everywhere_is_taken():
    one = given((2, 6, 5, 4))
    check(
        FORMS[6], replace(one, grad=torch.ones((), device=DEVICE).expand(2, 6, 5, 4)), torch.float32
    )


def test_statistics_about_a_pivot_keep_the_digits_of_maps_far_from_zero():
    one = given((2, 8, 16, 16))
    affine = one.affine._replace(pivot_c=torch.full((8,), 1e4, device=DEVICE))
    check(FORMS[0], replace(one, x=one.x + 1e4, affine=affine), torch.float32)


@pytest.mark.parametrize("format", [LAST, FIRST], ids=str)
def test_statistics_of_maps_a_thousand_deviations_from_zero_are_those_of_float64(format):
    x = 1000 + torch.randn(3, 8, 16, 12, device=DEVICE)
    assert choose(x) is on_triton
    (count, mean, variance), _ = statistics(x.contiguous(memory_format=format), "")
    wide = x.double()
    assert count.tolist() == [3 * 16 * 12] * 8
    assert (mean - wide.mean((0, 2, 3))).abs().max() <= 1e-4  # of a deviation: float32 at 1000
    assert (variance / wide.var((0, 2, 3), correction=0) - 1).abs().max() <= 1e-5


@pytest.mark.slow
@all_forms
@pytest.mark.parametrize("format", [LAST, FIRST], ids=str)
def test_programs_that_share_an_image_are_right_and_give_the_same_bits_whatever_the_batch(
    form, format, monkeypatch
):
    monkeypatch.setattr(tiles, "STEPS", 1)
    batch = each(
        given((2, 6, 11, 13)), lambda maps: maps.contiguous(memory_format=format), maps_only=True
    )
    first = each(batch, lambda t: t[:1] if t.ndim > 1 else t)
    for both, alone in zip(
        check(form, batch, torch.float32), answers(on_triton, form, first), strict=True
    ):
        assert torch.equal(both[:1], alone)


@triton.jit
def corner_kernel(corners, outer, units, cut: tl.constexpr):
    """Where each image's first value lies, in maps that are not there: one program an image."""
    here = place(outer, units, cut)
    n, p, c, pixels, _ = here
    at = offsets(here, p, pixels, cut)
    tl.store(corners + n + 0 * c[None, :], at, mask=c[None, :] == 0)


@pytest.mark.parametrize("nhwc", [True, False])
def test_values_beyond_the_two_to_the_31st_are_found(nhwc):
    pixels, channels = 1 << 20, 1 << 12
    corners = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    outer, inner = (pixels, channels) if nhwc else (channels, pixels)
    cut = tiles.Cut(nhwc, 8, 1, channels, 1 << 20)
    corner_kernel[(3,)](corners, outer, inner // 8, cut, **tiles.OPTIONS)  # pyright: ignore
    assert corners.tolist() == [0, pixels * channels, 2 * pixels * channels]


def test_each_pass_takes_and_returns_what_its_definition_does():
    for name in {name for name, _ in FORMS}:
        assert inspect.signature(getattr(on_triton, name)) == inspect.signature(
            getattr(reference, name)
        )


def test_maps_that_kernels_take_get_them():
    x = torch.zeros(1, device=DEVICE)
    assert choose(x) is choose(x.bfloat16()) is choose(x.half()) is on_triton
    assert choose(x.double()) is reference
