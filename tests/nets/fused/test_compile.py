"""Compiled steps of fused networks recompute what is cheap and give the eager numbers."""

from dataclasses import replace

import pytest
import torch
import torchvision  # noqa: F401  # for an operator that is neither PyTorch's nor fused
from compiled_steps import (
    TINY,
    check_checkpoints,
    check_compiled_step,
    check_recomputing_step,
    prepared,
)

from fullstride.nets.compile import RecomputePartitioner
from fullstride.nets.families import SPECS
from fullstride.nets.fused.compile import FUSED
from fullstride.nets.fused.network import to_fused


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_step_that_recomputes_is_the_eager_one_and_saves_a_map_for_each_convolution(name):
    check_recomputing_step(to_fused(prepared(SPECS[name])[0]), SPECS[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("int8", "tolerance"),
    [(False, 1e-9), (True, 0.02)],  # recomputed from int8 activations, results differ
)
def test_checkpoints_among_blocks_in_a_row_are_saved(int8, tolerance, monkeypatch):
    check_checkpoints(lambda net: to_fused(net, int8=int8), monkeypatch, tolerance)


def test_only_cheap_fused_operators_within_one_process_are_computed_twice():
    graph = torch.fx.Graph()
    ours, foreign = torch.ops.fullstride, torch.ops.torchvision.nms.default
    twice = [
        graph.call_function(op, ("", ""))
        for op in (ours.join.default, ours.gate.default, ours.blur.default)
    ]
    once = [
        graph.call_function(op, ("", "")) for op in (ours.conv.default, ours.pool.default, foreign)
    ]
    once.append(graph.call_function(ours.join.default, ("", "0")))
    fused, plain = RecomputePartitioner(FUSED), RecomputePartitioner()
    assert not any(map(fused.is_expensive, twice))
    assert all(map(fused.is_expensive, once))
    assert all(map(plain.is_expensive, twice + once))


@pytest.mark.slow
def test_a_compiled_step_is_right_and_leaves_settings_and_random_numbers_alone():
    spec = SPECS["resnet_rs_tiny"]
    spec = replace(spec, stages=(replace(spec.stages[0], depth=2),))
    check_compiled_step(to_fused(prepared(spec)[0]), spec)
