"""Networks with branches for training are measured, estimated and shipped with merged ones."""

from copy import deepcopy

import onnx
import pytest
import torch
from bundles import COLOUR, make_bundle
from networks import randomise
from torch import nn

from fullstride import tasks
from fullstride.data.dataset import open_data
from fullstride.deploy.comparison import MAX_DIFFERENCE, ComparisonImages
from fullstride.deploy.export import export
from fullstride.deploy.fold_batch_norm import folding
from fullstride.latency.devices import estimate_by_name, find_operators, load_profile
from fullstride.latency.estimator import estimate, operators_of
from fullstride.measure.operators import KIND, Operators
from fullstride.measure.tracer import traced
from fullstride.measure.workload import Step
from fullstride.nets import zoo
from fullstride.nets.blocks import has_branches, merge_branches

# One of each of timm's files that have such modules, and a side that it takes.
SIDES = {
    "fastvit_t8": 64,
    "lcnetv2_small": 64,
    "levit_128s": 224,
    "repghostnet_050": 64,
    "repvgg_a0": 64,
    "repvit_m0_9": 64,
}
SLOW = {
    "efficientvit_m0": 224,
    "ghostnetv3_050": 64,
    "mobileone_s0": 64,
    "tiny_vit_5m_224": 224,
    "efficientvim_m1_dist": 224,
    "iformer_m_distilled": 224,
    "nextvit_small": 64,
    "shvit_s1": 224,
}
CASES = [*SIDES.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())]


def count(operators: Operators, *kinds: str) -> int:
    return int(sum(operators.count[operators.kind == KIND[kind]].sum() for kind in kinds))


@pytest.mark.parametrize(("name", "side"), CASES)
@torch.no_grad()
def test_a_file_of_merged_branches_gives_the_outputs_of_the_network_that_trained(name, side):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    net = randomise(zoo.create(f"timm/{name}", classes=10), generator, side).double()
    x = torch.randn(1, 3, side, side, generator=generator, dtype=torch.float64)
    expected = net(x)
    merged = folding(net, x).net  # compares all outputs too
    assert has_branches(net)
    assert (merged(x) - expected).abs().max() < 1e-9 * expected.abs().max()
    assert torch.equal(net(x), expected)  # the network itself still trains
    ships = traced(merge_branches(deepcopy(net.float())), side)
    assert ships.count.sum() < traced(net, side).count.sum()


@torch.no_grad()
def test_the_maps_of_a_merged_network_are_those_that_a_head_was_trained_on():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    net = tasks.find_network("timm/repghostnet_050", "segment", 3).build()
    randomise(net, generator).double()
    x = torch.randn(1, 3, 64, 64, generator=generator, dtype=torch.float64)
    expected, found = net(x), folding(net, x).net(x)
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


def test_other_networks_stay_as_they_are():
    for name in ("timm/resnet10t", "genet_tiny"):
        net = zoo.create(name)
        before = [*net.modules()]
        assert merge_branches(net) is net
        assert [*net.modules()] == before


def test_a_merged_mobileone_has_a_depthwise_and_a_pointwise_convolution_per_block():
    # 2 + 8 + 10 + 1 blocks, 2.1 M parameters and 275 M multiply-adds in arXiv:2206.04040
    rows = find_operators("timm/mobileone_s0", 224)
    assert rows is not None
    assert [count(rows, kind) for kind in ("dense", "depthwise", "1x1")] == [1, 21, 21]
    assert count(rows, "batch_norm", "norm", "add") == 0
    assert round(rows.total_weights / 1e6, 1) == 2.1
    assert round(rows.total_macs / 1e6) == 275
    trains = find_operators("timm/mobileone_s0", 224, training=True)
    assert trains is not None
    assert count(trains, "dense", "depthwise", "1x1") > 4 * 43
    assert trains.total_macs > 3 * rows.total_macs


def test_a_merged_repvgg_is_a_plain_stack_of_convolutions():
    # 1 + 2 + 4 + 14 + 1 layers of 3 x 3, 8.30 M parameters in arXiv:2101.03697
    rows = find_operators("timm/repvgg_a0", 224)
    assert rows is not None
    assert [count(rows, kind) for kind in ("dense", "1x1", "batch_norm", "add")] == [22, 0, 0, 0]
    assert rows.total_weights / 1e6 == pytest.approx(8.30, abs=0.02)


@pytest.mark.parametrize("training", [False, True])
def test_estimates_of_a_name_a_spec_and_a_module_are_of_the_same_form(training):
    name, profile = "timm/repghostnet_050", load_profile("rtx3090")
    net, side = zoo.create(name), 64
    found = estimate(net, profile, 8, side, training=training).ms_per_image
    (row,) = estimate_by_name([name], profile, 8, side, training=training)
    assert row.estimate.ms_per_image == pytest.approx(found)
    operators = operators_of(net.spec, side, training=training)
    ms = estimate(operators, profile, 8, training=training).ms_per_image
    assert ms == pytest.approx(found)
    other = estimate(operators_of(net.spec, side, training=not training), profile, 8)
    assert other.ms_per_image != pytest.approx(found)


def test_inference_is_measured_with_merged_branches_and_a_training_step_with_all():
    net = zoo.create("timm/repghostnet_050", classes=10)
    steps = {
        work: Step(net, work, 2, 64, torch.device("cpu")) for work in ("inference", "training")
    }
    convolutions = {
        work: sum(isinstance(module, nn.Conv2d) for module in step.net.modules())
        for work, step in steps.items()
    }
    whole = sum(isinstance(module, nn.Conv2d) for module in net.modules())
    assert convolutions["training"] == whole
    assert convolutions["inference"] == count(
        operators_of(net.spec, 64), "dense", "1x1", "depthwise", "grouped"
    )


@pytest.mark.slow
def test_an_exported_file_has_as_many_convolutions_as_the_estimate(tmp_path):
    bundle = make_bundle("timm/repghostnet_050", COLOUR)
    digits = open_data("digits").test
    images = ComparisonImages([digits.picture(index) for index in range(6)])
    comparison = export(bundle, tmp_path / "net.onnx", images).comparison
    assert comparison.relative_difference < MAX_DIFFERENCE["fp32"]
    nodes = [node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node]
    rows = operators_of(bundle.net.spec, 64)
    assert nodes.count("Conv") == count(rows, "dense", "1x1", "depthwise", "grouped")
    assert any(isinstance(m, nn.BatchNorm2d) for m in bundle.net.modules())
