"""The table of released weights: what the installed timm says, and networks that can be built."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import timm

from fullstride import tables, zoo
from fullstride.latency.devices import find_operators
from fullstride.measure.operators import KIND
from fullstride.nets.weights.hub import HUB, timm_name
from fullstride.tables import pretrained_networks, timm_published

pretrained_table = import_module("pretrained_table")

ROWS = pretrained_networks()


def config(row: tables.PretrainedNetwork):
    """timm's own configuration; None for weights that this timm does not have."""
    name = timm_name(row.weights)
    return timm.get_pretrained_cfg(name) if name in timm.list_pretrained(name) else None


def test_licences_resolutions_and_names_are_those_of_the_installed_timm():
    configs = {row: config(row) for row in ROWS}
    known = {row: cfg for row, cfg in configs.items() if cfg}
    assert len(known) > 0.9 * len(ROWS)
    for row, cfg in known.items():
        assert row.licence == cfg.license, row
        assert row.trained_at == cfg.input_size[1], row
        assert cfg.hf_hub_id == f"timm/{timm_name(row.weights)}"
        assert cfg.num_classes == 1000


@pytest.mark.parametrize(
    "name", ["timm/mobilenetv4_conv_small", "timm/hgnetv2_b0", "timm/rexnet_100", "genet_light"]
)
def test_parameters_are_those_of_the_built_network(name):
    row = next(row for row in ROWS if row.name == name)
    assert row.params == sum(each.numel() for each in zoo.create(name).parameters())


def test_there_are_300_convnets_of_many_families_most_of_them_permissive():
    assert len(ROWS) > 300
    assert len({(row.weights, row.resolution) for row in ROWS}) == len(ROWS)
    assert len({row.family for row in ROWS if row.is_permissive}) >= 20
    assert sum(row.is_permissive for row in ROWS) > 250
    assert {row.licence for row in ROWS if "convnextv2" in row.name} == {"cc-by-nc-4.0"}
    assert all(50 < row.top1 < 90 and 0.8 <= row.crop <= 1 and row.params > 1e6 for row in ROWS)


def test_the_weights_of_the_zoos_own_names_are_in_it():
    assert {row.name for row in ROWS if not row.name.startswith("timm/")} == {*HUB}
    weights = {row.weights for row in ROWS}
    for name, model in HUB.items():
        assert f"{name}.{model.partition('.')[2]}" in weights


def test_operators_are_known_without_tracing_at_every_resolution_of_a_candidate():
    for row in ROWS:
        sides = {row.resolution, *row.resolutions, *tables.SMALL_RESOLUTIONS}
        assert all(find_operators(row.name, side) for side in sides), row


def test_none_of_them_has_attention():
    for name, side in {(row.name, row.resolution) for row in ROWS}:
        operators = find_operators(name, side)
        assert operators is not None
        assert not (operators.kind == KIND["product"]).any(), name


def test_usual_resolutions_are_multiples_of_32_around_that_of_the_weights():
    assert tables.resolutions_around(224) == (192, 224, 288)
    assert tables.resolutions_around(32) == (24, 32, 40)
    for row in ROWS:
        low, *_, high = row.resolutions
        assert row.trained_at in row.resolutions
        assert 0.7 * row.trained_at < low <= row.trained_at <= high < 1.4 * row.trained_at


def test_a_choice_has_all_of_the_table_and_the_rows_of_the_papers_and_builds_none():
    names = {(row.name, row.resolution, row.top1) for row in timm_published()}
    others = [row for row in ROWS if row.name.startswith("timm/")]
    assert {(row.weights, row.resolution, row.top1) for row in others} <= names
    assert {(row.name, row.resolution, row.top1) for row in tables.published("timm")} <= names
    notes = {row.name: row.note for row in timm_published()}
    assert "cc-by-nc-4.0" in notes["timm/convnextv2_tiny.fcmae_ft_in22k_in1k"]
    program = """
import json, resource, sys
from fullstride import cli
words = "choose --target rtx4090 --budget-ms 0.1 --call-batch 256 --json"
assert cli.run(words.split()) == 0
assert not {"torch", "timm"} & set(sys.modules)
used = resource.getrusage(resource.RUSAGE_SELF)
assert used.ru_utime + used.ru_stime < 4
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr
    assert done.stdout.count('"timm/') > len(others)


RESULTS = """model,img_size,top1,top1_err,top5,top5_err,param_count,crop_pct,interpolation
resnet26d.bt_in1k,224,76.7,0,0,0,16,0.875,bicubic
starnet_s1.in1k,224,73.6,0,0,0,2.9,0.875,bicubic
resnet18.a1_in1k,224,71.5,0,0,0,11.7,0.95,bilinear
convnextv2_atto.fcmae_ft_in1k,224,76.6,0,0,0,3.7,0.875,bicubic
lcnet_075.ra2_in1k,224,68.8,0,0,0,2.4,0.875,bicubic
wide_resnet50_2.tv_in1k,224,75,0,0,0,68.9,0.875,bilinear
vit_tiny_patch16_224.augreg_in21k_ft_in1k,224,75.5,0,0,0,5.7,0.9,bicubic
no_such_network.in1k,224,80,0,0,0,1,0.9,bicubic
"""


def test_the_script_keeps_what_no_other_network_beats_and_what_the_zoo_has(tmp_path, monkeypatch):
    results, out = tmp_path / "results.csv", tmp_path / "table.csv"
    results.write_text(RESULTS)
    monkeypatch.setattr(pretrained_table, "PATH", out)
    monkeypatch.setattr(sys, "argv", ["table", str(results), "--source", "here"])
    pretrained_table.main()
    header, *lines = out.read_text().splitlines()
    assert header == (Path(tables.__file__).parent / "pretrained.csv").read_text().splitlines()[0]
    rows = {line.split(",")[0]: line.split(",") for line in lines}
    # ResNet-26-D is more accurate than a wide ResNet here, with less of everything.
    assert rows.keys() == {
        "timm/convnextv2_atto",
        "timm/lcnet_075",
        "timm/resnet26d",
        "timm/starnet_s1",
        "resnet18",
    }
    assert rows["timm/convnextv2_atto"][-2:] == ["cc-by-nc-4.0", "here"]
