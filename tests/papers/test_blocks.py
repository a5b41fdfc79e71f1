"""The study of blocks: stacks that cost what counting by hand gives, timed by whatever times
them."""

import json

import pytest
import torch

from fullstride import cli
from fullstride.latency.profiles import PROFILE, Fit, Profile
from fullstride.latency.roofline import Machine
from fullstride.measure.protocols import Protocol
from fullstride.nets.blocks import Basic, Bottleneck
from fullstride.papers.block_study import (
    RATIOS,
    Stack,
    block_figure,
    estimated,
    measured,
    stacks,
    study,
)

QUICK = Protocol(name="throughput", batch=2, warmup_s=0.0, rounds=3, round_s=1e-4)


def by_hand(kind: str, width: int, inner: int, k: int) -> int:
    """Weights of the convolutions of one block: also its multiply-adds at a pixel."""
    return {
        "XX": 2 * k * k * width * inner,
        "BL": 2 * width * inner + k * k * inner * inner,
        "DW": 2 * width * inner + k * k * inner,
    }[kind]


def norms(kind: str, width: int, inner: int) -> int:
    return 2 * (width + inner if kind == "XX" else width + 2 * inner)


def times_of(ms: float):
    """A timer that takes `ms` for every network, and notes what it was asked."""
    calls = []

    def time(nets, channels, side):
        calls.append((list(nets), channels, side))
        return dict.fromkeys(nets, (ms, ms / 2, ms * 2))

    return time, calls


@pytest.mark.parametrize(
    ("kind", "ratio", "k"), [("XX", 1, 3), ("XX", 0.5, 5), ("BL", 0.25, 3), ("DW", 6, 5)]
)
def test_a_stack_costs_what_counting_its_convolutions_by_hand_gives(kind, ratio, k):
    (row,) = study(stacks([kind], [16], [7], [ratio], depth=3, kernel=k), times_of(1.0)[0])
    inner = int(16 * ratio)
    assert row.macs == 3 * 7 * 7 * by_hand(kind, 16, inner, k)
    assert row.params == 3 * (by_hand(kind, 16, inner, k) + norms(kind, 16, inner))


def test_a_stack_is_made_of_the_blocks_that_networks_are_made_of_and_keeps_its_shape():
    for kind, block in (("XX", Basic), ("BL", Bottleneck), ("DW", Bottleneck)):
        net = Stack(kind=kind, ratio=2, width=8, resolution=7, depth=2).build().eval()
        assert [type(part) for part in net] == [block, block]
        assert not any("shortcut" in name for name, _ in net.named_parameters())
        assert net(torch.randn(3, 8, 7, 7)).shape == (3, 8, 7, 7)


def test_every_kind_has_its_own_ratios_unless_some_are_given_for_all():
    found = stacks(["XX", "BL", "DW"], [8, 16], [14, 7])
    assert len(found) == 2 * 2 * sum(map(len, RATIOS.values()))
    assert {(s.kind, s.ratio) for s in found} == {
        (kind, ratio) for kind, row in RATIOS.items() for ratio in row
    }
    assert {s.ratio for s in stacks(["XX", "DW"], [8], [7], [1, 3])} == {1, 3}
    assert len(stacks(["XX", "XX"], [8, 8], [7])) == 1


def test_stacks_of_one_width_and_resolution_are_timed_together_and_others_apart():
    time, calls = times_of(2.0)
    rows = list(study(stacks(["XX", "BL"], [8, 16], [7, 4]), time))
    assert calls == [
        (["XX 1", "BL 0.25", "BL 0.5"], width, side) for side in (7, 4) for width in (8, 16)
    ]
    assert [(r.ms_per_image, r.ms_low, r.ms_high) for r in rows] == [(2.0, 1.0, 4.0)] * 12


def test_measured_times_are_above_zero_between_their_bounds_and_grow_with_the_work():
    asked = stacks(["XX"], [8], [7], depth=1) + stacks(["XX"], [96], [28], depth=2)
    small, large = study(asked, measured("cpu", QUICK, precision="float32"))
    for row in (small, large):
        assert 0 < row.ms_low <= row.ms_per_image <= row.ms_high
    assert large.ms_per_image > 3 * small.ms_per_image  # 4600 times the multiply-adds


@pytest.mark.parametrize(
    ("kinds", "widths", "ratios", "said"),
    [
        (["XY"], [8], (), "no kind of block named 'XY': choose from XX, BL, DW"),
        (["BL"], [30], (), "width 30 x ratio 0.25 is 7.5 channels inside a BL block"),
        (["DW"], [8], [-1], "ratio -1 of a DW block: use a number above 0"),
        (["DW"], [8], [float("nan")], "ratio nan of a DW block"),
        (["XX"], [0], (), "width 0: use a whole number"),
        ([], [8], (), "no blocks to time"),
    ],
)
def test_blocks_that_cannot_be_are_refused_before_anything_is_timed(kinds, widths, ratios, said):
    with pytest.raises(ValueError, match=said.replace("*", r"\*")):
        stacks(kinds, widths, [7], ratios)


def test_the_picture_has_a_line_for_each_kind_and_ratio_at_each_resolution():
    rows = list(study(stacks(["XX", "BL"], [8, 16], [7, 4]), times_of(0.5)[0]))
    figure = block_figure(rows, "estimated")
    times, speeds = figure.axes[:2], figure.axes[2:]
    assert [axes.get_title() for axes in times] == ["7 x 7", "4 x 4"]
    assert [len(axes.lines) for axes in figure.axes] == [3] * 4
    xx = next(row for row in rows if (row.name, row.resolution, row.width) == ("XX 1", 7, 16))
    assert list(times[0].lines[0].get_ydata()) == [0.5, 0.5]
    assert speeds[0].lines[0].get_ydata()[1] == pytest.approx(xx.macs / 1e9 / (0.5 / 1e3))
    with pytest.raises(ValueError, match="no times to draw"):
        block_figure([], "")


def test_the_command_says_measured_and_writes_whole_files(tmp_path, capsys):
    words = "study blocks --kinds XX DW --width 8 --resolution 4 --ratio 1 --depth 1 --rounds 1"
    words += " --device cpu --out"
    assert cli.run([*words.split(), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "measured on" in said
    assert "fp32" in said
    told = json.loads((tmp_path / "out" / "blocks.json").read_text())
    assert told["how"] == "measured"
    assert told["protocol"]["batch"] == 1
    assert told["environment"]["torch"] == torch.__version__
    assert [(row["kind"], row["macs"]) for row in told["rows"]] == [
        (kind, 16 * by_hand(kind, 8, 8, 3)) for kind in ("XX", "DW")
    ]
    assert (tmp_path / "out" / "blocks.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input_to_the_command_is_one_line_and_nothing_on_the_page(capsys):
    for words in (
        "--kinds XY",
        "--width 30",
        "--depth 0",
        "--call-batch 0",
        "--resolution 0",
        "--rounds 0",
        "--device tpu",
    ):
        assert cli.run(["study", "blocks", *words.split()]) == 2
        told = capsys.readouterr()
        assert (told.out, told.err.count("\n")) == ("", 1)


def slow_calculator() -> Profile:
    """A device that has to wait for nothing but its arithmetic: a million FLOPs take a
    millisecond."""
    numbers = {
        "dense": 1.0,
        "1x1": 1.0,
        "depthwise": 1.0,
        "group_channels": 1.0,
        "convolution": 1.0,
        "launch_us": 1e-6,
    }
    about = dict(
        error=9.0,
        resolvable_ratio=1.2,
        networks=3,
        source="by hand",
        software="none",
        date="2026-11-21",
    )
    return Profile(
        name="slow",
        device="calculator",
        layout="nchw",
        precision="fp16",
        machine=Machine(runtime="tensorrt", peak_tflops=1e-3, bandwidth_gb_s=1e6),
        sheet="by hand",
        inference=Fit(numbers=numbers, low=0.8, high=1.25, **about),
    )


def test_where_only_arithmetic_takes_time_the_estimate_is_the_multiply_adds():
    rows = list(study(stacks(["XX", "BL"], [16], [14], depth=2), estimated(slow_calculator(), 4)))
    for row in rows:
        assert row.ms_per_image == pytest.approx(2 * row.macs / 1e6, rel=1e-3)
        assert (row.ms_low, row.ms_high) == pytest.approx(
            (0.8 * row.ms_per_image, 1.25 * row.ms_per_image)
        )


def test_the_command_says_estimated_and_takes_no_flags_that_the_profile_decides(tmp_path, capsys):
    PROFILE.save(tmp_path / "slow.json", slow_calculator())
    asked = ["study", "blocks", "--kinds", "XX", "--width", "8", "--resolution", "7", "--target"]
    words = [*asked, str(tmp_path / "slow.json")]
    assert cli.run([*words, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "estimated for calculator by the profile slow, fp16, batch 64" in said
    assert "90 % interval" in said
    assert "measured" not in said
    told = json.loads((tmp_path / "out" / "blocks.json").read_text())
    assert (told["how"], told["profile"]["name"]) == ("estimated", "slow")
    (tmp_path / "file").touch()
    capsys.readouterr()
    assert cli.run([*words, "--out", str(tmp_path / "file")]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert cli.run([*words, "--rounds", "3", "--layout", "nhwc", "--device", "cuda:7"]) == 2
    assert "--device, --rounds, --layout with --target" in capsys.readouterr().err
