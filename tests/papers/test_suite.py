"""Does the suite of the papers' tables measure what they print, go on where it was stopped, and
tell what failed?"""

import json
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import nn

from fullstride import cli
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import TRESNET, Measurement
from fullstride.nets.families import SPECS
from fullstride.nets.layers import BlurPool, SqueezeExcite
from fullstride.nets.network import Network
from fullstride.papers import lines as papers
from fullstride.papers import suite
from fullstride.papers.lines import QUANTITIES, Row
from fullstride.tables import speeds

CPU = torch.device("cpu")
NAMES = ("resnet_rs_tiny", "timm/test_resnet")
SMALL: dict[str, Any] = dict(quick=True, networks=NAMES, resolution=32)


def layers(net: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(layer, kind) for layer in net.modules())


def test_the_published_numbers_are_those_of_the_papers():
    found = {(s.table, s.line, s.resolution, s.quantity): s.value for s in speeds()}
    assert len(found) == len(speeds())
    assert found["TResNet 3", "TResNet-M", 224, "largest batch"] == 512
    assert found["TResNet 1", "SE-ResNeXt-50", 224, "training images/s"] == 400
    assert found["TResNet 4", "+InplaceABN", 224, "inference images/s"] == 3470
    assert found["TResNet 5", "none", 224, "training images/s"] == 670
    assert found["GENet 3", "GENet-large", 256, "ms per image"] == 0.34
    assert found["GENet 7", "ResNet-50", 224, "ms per image"] == 0.40
    assert found["ResNet-RS 7", "ResNet-RS-350", 320, "seconds per 128 images"] == 8.48
    assert all(
        "V100" in s.source and "arXiv" in s.source and s.quantity in QUANTITIES for s in speeds()
    )


def test_every_printed_line_has_networks_that_are_there_or_a_reason():
    printed = {(s.table, s.line, s.resolution) for s in speeds()}
    assert {(line.table, line.name, line.resolution) for line in papers.lines()} == printed
    for line in papers.lines():
        assert bool(line.entries) != bool(line.why_not)
        for entry in line.entries:
            assert entry.kind != "timm" or timm.is_model(entry.name.removeprefix("timm/"))


def test_networks_of_ours_stand_beside_timms_of_as_many_weights():
    found = {
        line.name: line.entries
        for line in papers.lines()
        if line.table in ("TResNet 3", "GENet 3", "ResNet-RS 7")
    }
    for name in ("ResNet-50", "TResNet-M", "GENet-light", "ResNet-RS-50"):
        with torch.device("meta"):
            theirs, ours = (entry.build() for entry in found[name])
        assert [entry.kind for entry in found[name]] == ["timm", "plain"]
        assert sum(p.numel() for p in theirs.parameters()) == sum(
            p.numel() for p in ours.parameters()
        )
        assert isinstance(ours, Network)


def test_the_refinements_of_tresnet_come_one_by_one():
    with torch.device("meta"):
        nets = {name: entries[-1].build() for name, entries in papers.refinements().items()}
    counted = {
        name: [layers(net, kind) for kind in (nn.MaxPool2d, nn.LeakyReLU, SqueezeExcite, BlurPool)]
        for name, net in nets.items()
    }
    slopes = layers(nets["+AA"], nn.LeakyReLU)
    assert counted == {
        "+SpaceToDepth": [0, 0, 0, 0],
        "+BlockTypeSelection": [0, 0, 0, 0],
        "+InplaceABN": [0, slopes, 0, 0],
        "+OptimizedSE": [0, slopes, 18, 0],  # 3 + 4 + 11 blocks
        "+AA": [0, slopes, 18, 3],
    }
    assert slopes > 18
    blocks = [
        sum(stage.depth for stage in net.spec.stages)
        for net in nets.values()
        if isinstance(net, Network)
    ]
    assert blocks == [16, 21, 21, 21, 21]
    assert papers.refinements()["+AA"][-1].spec == SPECS["tresnet_m"]


@pytest.mark.slow
def test_the_suite_measures_ours_and_timms_and_goes_on_without_measuring_again(
    tmp_path, monkeypatch, capsys
):
    words = [
        "bench",
        *NAMES,
        "--suite",
        "papers",
        "--quick",
        "--resolution",
        "32",
        "--device",
        "cpu",
    ]
    assert cli.run([*words, "--out", str(tmp_path)]) == 0
    assert str(tmp_path / "results.md") in capsys.readouterr().out
    first = json.loads((tmp_path / "results.json").read_text())
    asked = {(o["table"], o["network"], o["quantity"], o["layout"]) for o in first["numbers"]}
    kinds = {
        "training images/s",
        "inference images/s",
        "ms per image",
        "seconds per 128 images",
    }
    for quantity in kinds:  # of timm's network and ours, in two layouts
        assert len({one for one in asked if one[2] == quantity}) == 4
    assert first["not_measured"] == []
    assert all(o["measured"] > 0 and o["published"] is None for o in first["numbers"])

    monkeypatch.setattr(suite, "measure", None)
    rows = list(suite.run(tmp_path, **SMALL))
    assert len(rows) == len(list((tmp_path / "rows").iterdir())) == 12
    again = json.loads((tmp_path / "results.json").read_text())
    assert again["numbers"] == first["numbers"]


def test_a_row_of_another_environment_or_half_a_file_is_measured_again(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        suite, "measure", lambda contest, _: made.append(contest) or row_of(contest)
    )
    one: dict[str, Any] = dict(quick=True, networks=("genet_tiny",), resolution=32)
    total = len(list(suite.run(tmp_path, **one)))
    assert len(made) == total == 6
    list(suite.run(tmp_path, **one))
    assert len(made) == total
    next((tmp_path / "rows").iterdir()).write_text("{")
    list(suite.run(tmp_path, **one))
    assert len(made) == total + 1
    list(suite.run(tmp_path, **{**one, "precision": "bfloat16"}))
    assert len(made) == 2 * total + 1
    here = Environment.here()
    monkeypatch.setattr(Environment, "here", lambda *_: replace(here, driver="other"))
    list(suite.run(tmp_path, **one))
    assert len(made) == 3 * total + 1


def rate(
    name: str, samples: tuple[float, ...], protocol=TRESNET, reference: str | None = None
) -> Measurement:
    how: dict[str, Any] = dict(
        precision="float32", layout="nhwc", compiled=False, environment=Environment.here()
    )
    middle = sorted(samples)[len(samples) // 2]
    return Measurement(
        name=name,
        protocol=protocol,
        images_per_s=middle,
        spread=0.0,
        samples=samples,
        reference=reference,
        **how,
    )


def row_of(contest: papers.Contest, failed: dict[str, str] | None = None) -> Row:
    """Timm's rate is 100, 200 and 300 in turn, that of all others 150, 220 and 600."""
    measured: dict[papers.Kind, tuple[Measurement, ...]] = {}
    for entry in contest.entries:
        samples = (100.0, 200.0, 300.0) if entry.kind == "timm" else (150.0, 220.0, 600.0)
        for part in contest.parts:
            one = rate(entry.name, samples, part, contest.entries[0].name)
            one = replace(
                one, ms_per_image=1 / 150, layout=contest.layout, compiled=contest.compiled
            )
            measured[entry.kind] = (*measured.get(entry.kind, ()), one)
    return Row(contest=contest, measured=measured, failed=failed or {})


def test_a_line_of_progress_has_every_rate_and_failure():
    network = papers.lines_of(["genet_tiny"], 32)[0]
    (contest, *_) = papers.contests(network, quick=False, device=CPU, precision=None, memory_gib=1)
    line = row_of(contest, {"a (training)": "out of memory"}).summary()
    assert "\n" not in line
    assert "a (training): out of memory" in line
    for entry in contest.entries:
        assert f"{entry.name} " in line


def test_measured_and_published_numbers_stand_in_columns_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "measure", lambda contest, _: row_of(contest))
    list(suite.run(tmp_path, quick=True))
    page = (tmp_path / "results.md").read_text()
    _, _, rest = page.partition("## TResNet 3: training images/s")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in rest.splitlines()[2:8]
    ]
    assert lines[0][3:] == [
        "measured: timm eager",
        "measured: plain eager",
        "published",
    ]
    row = next(line for line in lines if line[:3] == ["TResNet-M", "224", "nhwc"])
    assert row[3:] == [
        "200 (8)",
        "220 (8, x1.50)",
        "730",
    ]  # the median of 1.5, 1.1 and 2
    assert "TResNet 5" not in page  # not of the quick ones
    assert "Quick" in page


def test_calls_that_take_half_the_time_are_twice_as_fast():
    (contest, *_) = papers.contests(
        papers.lines_of(["genet_light"], 32)[1],
        quick=True,
        device=CPU,
        precision=None,
        memory_gib=None,
    )
    row = row_of(contest)
    assert row.ratio("plain", "timm", "inference") == pytest.approx(200 / 220, rel=0.3)
    assert row.ratio("timm", "timm", "inference") is None
    alone = {
        **row.measured,
        "plain": tuple(replace(one, reference=None) for one in row.measured["plain"]),
    }
    assert replace(row, measured=alone).ratio("plain", "timm", "inference") is None


def test_a_network_that_fails_is_told_in_one_line_and_stops_no_other(tmp_path, monkeypatch):
    true = suite.bench

    def failing(nets, part, *rest, **how):
        if "genet_tiny" in nets and part.work == "training":
            raise RuntimeError("no\nsuch kernel")
        return true(nets, part, *rest, **how)

    monkeypatch.setattr(suite, "bench", failing)
    row = next(suite.run(tmp_path, **{**SMALL, "networks": ("genet_tiny",)}))
    assert row.failed == {"genet_tiny, training": "RuntimeError no such kernel"}
    assert row.find("plain", "inference")
    assert (
        "genet_tiny, training: RuntimeError no such kernel" in (tmp_path / "results.md").read_text()
    )


def test_batches_are_searched_for_unless_the_suite_is_quick(monkeypatch):
    looked = []

    def found(nets, *_, **how):
        (name,) = nets
        looked.append(name)
        if name == papers.REFERENCE:
            raise ValueError("does not fit at batch 1")
        return {name: 24}

    monkeypatch.setattr(suite, "find_batches", found)
    line = papers.lines_of(["genet_tiny"], 32)[0]
    (contest, *_) = papers.contests(line, quick=False, device=CPU, precision=None, memory_gib=1)
    brief = [replace(part, warmup_s=0.0, rounds=2, round_s=1e-3) for part in contest.parts]
    row = suite.measure(replace(contest, parts=tuple(brief)), CPU)
    assert looked == [papers.REFERENCE, "genet_tiny"]
    assert row.failed == {f"{papers.REFERENCE}, finding its batch": "does not fit at batch 1"}
    one = row.find("plain", "training")
    assert one
    assert (one.largest_batch, one.protocol.batch) == (24, 16)  # nine tenths, to a multiple of 8


def test_when_the_time_is_over_nothing_begins_and_the_page_says_what_is_left(tmp_path):
    assert list(suite.run(tmp_path, **SMALL, minutes=0)) == []
    assert (tmp_path / "results.md").read_text().count("not measured yet") == 12


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["bench", "genet_tiny", "--quick"], "say --suite papers too"),
        (["bench", "--suite", "papers", "--protocol", "genet", "--compiled"], "leave it out"),
        (["bench", "--suite", "papers", "--layout", "nhwc"], "--layout with --suite papers"),
        (
            ["bench", "genet_tinny", "--suite", "papers", "--device", "cpu"],
            "did you mean genet_tiny",
        ),
        (
            ["bench", "timm/resnet5", "--suite", "papers", "--device", "cpu"],
            "did you mean timm/resnet5",
        ),
    ],
)
def test_what_the_suite_cannot_do_is_refused_in_one_line(
    words, hint, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert cli.run(words) == 2
    told = capsys.readouterr().err
    assert hint in told
    assert told.count("\n") == 1
