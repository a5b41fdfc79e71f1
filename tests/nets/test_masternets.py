"""GENet's twenty hand-made networks are those of its Table 6, counted by hand."""

from dataclasses import replace

import pytest
import torch

from fullstride.nets.blocks import Basic, Bottleneck
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec
from fullstride.tables import networks, published

# Table 6 as printed: kinds, depths, widths, strides and top-1. Behind them millions of parameters
# and 1e9 multiply-adds at 224 pixels, counted on the blocks of the authors' code.
TABLE_6 = """
1  CXXBDDC 1,1,4,8,4,2,1 32,64,96,512,320,320,1280   2,2,2,2,2,1,1 77.6 16.20 3.31
2  CXXDDDC 1,1,4,8,4,2,1 32,48,64,160,320,320,1280   2,2,2,2,2,1,1 77.6 12.65 1.91
3  CXXDDC  1,1,4,8,6,1   32,48,64,160,320,1280       2,2,2,2,2,1   77.5 12.65 1.91
4  CXBBDC  1,1,4,8,6,1   32,64,256,512,320,1280      2,2,2,2,2,1   77.4 15.08 2.39
5  CXBDDDC 1,1,4,8,4,2,1 32,32,256,144,288,288,1280  2,2,2,2,2,1,1 77.4 10.64 1.53
6  CXXBDC  1,1,4,8,6,1   32,64,96,512,320,1280       2,2,2,2,2,1   77.3 16.20 3.31
7  CXBDDC  1,1,4,8,6,1   32,32,256,144,288,1280      2,2,2,2,2,1   77.3 10.64 1.53
8  CDDDDDC 1,1,4,8,4,2,1 32,24,64,128,256,256,1280   2,2,2,2,2,1,1 77.2  8.39 0.93
9  CXXDDDC 1,1,4,4,4,4,1 32,48,64,160,160,320,1280   2,2,2,2,1,2,1 77.1 10.08 1.78
10 CDDDDC  1,1,4,8,6,1   32,24,64,128,256,1280       2,2,2,2,2,1   77.0  8.39 0.93
11 CXXDDDC 1,1,4,6,2,4,1 32,48,64,160,160,320,1280   2,2,2,2,1,2,1 76.9 10.08 1.78
12 CXXBBDC 1,1,4,6,2,4,1 32,64,96,512,512,320,1280   2,2,2,2,1,2,1 76.9 13.63 3.19
13 CXXBBDC 1,1,4,4,4,4,1 32,64,96,512,512,320,1280   2,2,2,2,1,2,1 76.8 13.63 3.19
14 CXBDDDC 1,1,4,6,2,4,1 32,32,256,144,144,288,1280  2,2,2,2,1,2,1 76.7  8.55 1.43
15 CXXBBBC 1,1,4,8,4,2,1 32,64,96,512,1024,1024,1280 2,2,2,2,2,1,1 76.6 22.25 3.48
16 CDDDDDC 1,1,4,6,2,4,1 32,24,64,128,128,256,1280   2,2,2,2,1,2,1 76.5  6.73 0.85
17 CXBBBC  1,1,4,8,6,1   32,64,256,512,1024,1280     2,2,2,2,2,1   76.3 21.13 2.56
18 CXXBBBC 1,1,4,6,2,4,1 32,64,96,512,512,1024,1280  2,2,2,2,1,2,1 76.0 17.92 3.27
19 CXXBBC  1,1,4,8,6,1   32,64,96,512,1024,1280      2,2,2,2,2,1   76.0 22.25 3.48
20 CXXBBBC 1,1,4,4,4,4,1 32,64,96,512,512,1024,1280  2,2,2,2,1,2,1 75.8 17.92 3.27
"""
ROWS = {f"masternet_{row.split()[0]}": row.split()[1:] for row in TABLE_6.strip().splitlines()}


def convolution(c_in: int, c_out: int, kernel: int, groups: int = 1) -> int:
    return c_in // groups * c_out * kernel**2 + 2 * c_out  # and the gain and bias of its norm


def count_by_hand(kinds: str, depths: str, widths: str, strides: str) -> int:
    """Parameters of a row: kernels of 5 x 5, ratio 1/4 in B and 6 in D, 1000 classes."""
    total, c_in, is_stem = 0, 3, True
    columns = [[int(n) for n in column.split(",")] for column in (depths, widths, strides)]
    for kind, depth, width, stride in zip(kinds, *columns, strict=True):
        for block in range(depth):
            if kind == "C":
                total += convolution(c_in, width, 3 if is_stem else 1)
                is_stem, c_in = False, width
                continue
            inner = {"X": width, "B": width // 4, "D": width * 6}[kind]
            if kind == "X":
                total += convolution(c_in, inner, 5)
            else:
                total += convolution(c_in, inner, 1)
                total += convolution(inner, inner, 5, inner if kind == "D" else 1)
            total += convolution(inner, width, 5 if kind == "X" else 1)
            if c_in != width or (block == 0 and stride == 2):
                total += convolution(c_in, width, 1)  # the shortcut
            c_in = width
    return total + c_in * 1000 + 1000


@pytest.mark.parametrize("name", ROWS)
def test_a_masternet_has_the_parameters_of_its_row(name):
    *row, _, millions, _ = ROWS[name]
    with torch.device("meta"):
        total = sum(p.numel() for p in Network(SPECS[name]).parameters())
    assert total == count_by_hand(*row)
    assert f"{total / 1e6:.2f}" == millions


def test_the_multiply_adds_and_accuracies_of_the_masternets_stand_in_the_tables():
    macs = {row.name: f"{row.macs / 1e9:.2f}" for row in networks()}
    top1 = {row.name: f"{row.top1:.1f}" for row in published()}
    assert {name: [top1[name], macs[name]] for name in ROWS} == {
        name: [row[-3], row[-1]] for name, row in ROWS.items()
    }


@pytest.mark.parametrize("name", ROWS)
def test_a_masternet_keeps_the_super_blocks_of_its_row(name):
    kinds, depths, widths, strides, *_ = ROWS[name]
    spec = NetSpec.from_json(SPECS[name].to_json())
    letters = [
        "X" if stage.block is Basic else "D" if stage.group_width == 1 else "B"
        for stage in spec.stages
    ]
    assert all(stage.block in (Basic, Bottleneck) for stage in spec.stages)
    assert f"C{''.join(letters)}C" == kinds
    assert [1, *(stage.depth for stage in spec.stages), 1] == [int(n) for n in depths.split(",")]
    printed = [spec.stem_width, *(stage.width for stage in spec.stages), spec.head_width]
    assert printed == [int(n) for n in widths.split(",")]
    assert [2, *(stage.stride for stage in spec.stages), 1] == [int(n) for n in strides.split(",")]


@pytest.mark.parametrize("name", ROWS)
def test_a_thin_masternet_halves_an_image_five_times(name):
    net = Network(replace(SPECS[name].scaled(width=1 / 8), classes=7)).eval()
    with torch.inference_mode():
        maps, logits = net.features(torch.rand(2, 3, 64, 64)), net(torch.rand(2, 3, 64, 64))
    assert logits.shape == (2, 7)
    assert maps[-1].shape[2:] == (2, 2)


@pytest.mark.parametrize(
    ("first", "again"),
    [(1, 6), (2, 3), (5, 7), (8, 10), (9, 11), (12, 13), (15, 19), (18, 20)],
    ids=str,
)
def test_two_rows_of_the_same_network_compute_the_same(first, again):
    one, other = (
        Network(SPECS[f"masternet_{row}"].scaled(width=1 / 8)).eval() for row in (first, again)
    )
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) != list(theirs)  # borders of super-blocks are in the names
    other.load_state_dict(dict(zip(theirs, mine.values(), strict=True)))
    x = torch.rand(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(one(x), other(x))
