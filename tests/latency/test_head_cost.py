"""What networks with the head of a task cost, and how long they take on a device."""

from functools import partial

import pytest
import torch
from torch import nn
from toy_bundles import bundle_of

from fullstride import tasks
from fullstride.latency.devices import estimate_by_name, load_profile
from fullstride.latency.select import select
from fullstride.measure.budget import Budget
from fullstride.measure.cost import network_cost

SIDE, CLASSES = 64, 3


def counted_by_hooks(net: nn.Module) -> tuple[int, int]:
    """Parameters of all modules that run, and the MACs of convolutions and linear layers."""
    params, macs = {}, []

    def count(module, inputs, output):
        params.update({id(each): each.numel() for each in module.parameters(recurse=False)})
        if isinstance(module, nn.Conv2d | nn.Linear):
            macs.append(output.numel() * module.weight[0].numel())

    for module in net.modules():
        module.register_forward_hook(count)
    net.eval()(torch.zeros(1, 3, SIDE, SIDE))
    return sum(params.values()), sum(macs)


@pytest.mark.parametrize("task", ["detect", "segment", "depth"])
def test_the_cost_counts_the_head_and_no_unused_classifier(task):
    network = tasks.find_network("genet_tiny", task, CLASSES)
    total = network_cost(network, SIDE)
    params, macs = counted_by_hooks(network.build())
    products = 0
    if task == "detect":  # of 32 rounds of suppression, in which each candidate meets the others
        cells = sum((SIDE // stride) ** 2 for stride in (8, 16, 32)) + 1 + 1
        products = 32 * (CLASSES * cells) ** 2
    assert (total.whole.params, total.whole.macs) == (params, macs + products)
    assert sum(row.params for row in total.stages) == params
    assert sum(row.macs for row in total.stages) == macs + products
    plain = network_cost("genet_tiny", SIDE)
    assert {row.stage for row in total.stages} - {row.stage for row in plain.stages} == {
        "task_head"
    }


def test_an_estimate_says_which_operators_of_a_head_no_profile_was_fitted_on():
    networks = [tasks.find_network("resnet_rs_tiny", task) for task in ("classify", "detect")]
    rows = estimate_by_name(networks, load_profile("rtx3090"), 8, SIDE)
    plain, detector = rows  # the fastest first
    outside = {"sorting", "choosing of candidates", "suppression of boxes"}
    assert outside <= {*detector.estimate.unfitted}
    assert not outside & {*plain.estimate.unfitted}
    assert "attention" not in detector.estimate.unfitted


def test_a_bundle_has_its_own_task(tmp_path):
    bundle_of("segment").save(tmp_path / "bundle")
    network = tasks.find_network(str(tmp_path / "bundle"))
    params, _ = counted_by_hooks(network.build())
    assert network_cost(network, SIDE).whole.params == params
    with pytest.raises(ValueError, match="has its own"):
        tasks.find_network(str(tmp_path / "bundle"), "detect")


def test_choose_times_the_candidates_with_the_head_at_one_resolution(tmp_path):
    accuracies = tmp_path / "a.csv"
    rows = ["model,img_size,top1", "genet_tiny,32,50", "genet_tiny,64,60", "resnet_rs_tiny,32,40"]
    accuracies.write_text("\n".join(rows))
    profile, budget = load_profile("rtx3090"), Budget(ms_per_image=1e3, batch=8)
    how = dict(sources=[str(accuracies)], resolution=SIDE)
    plain = select(profile, budget, **how)
    heads = select(profile, budget, **how, with_head=partial(tasks.find_network, task="segment"))
    assert [(o.network.name, o.network.top1) for o in heads.options] == [
        ("resnet_rs_tiny", 40),
        ("genet_tiny", 60),
    ]
    for without, option in zip(plain.options, heads.options, strict=True):
        (row,) = estimate_by_name(
            [tasks.find_network(option.network.name, "segment")], profile, 8, SIDE
        )
        assert option.ms == pytest.approx(row.estimate.ms_per_image)
        assert option.ms > without.ms
