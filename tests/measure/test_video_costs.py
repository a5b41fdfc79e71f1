"""What do networks of clips cost, how long do they take, and which recipes has their paper?"""

import re
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from fullstride.latency.devices import estimate_by_name, load_profile
from fullstride.measure import bench_by_name
from fullstride.measure.activation_bytes import activation_bytes
from fullstride.measure.cost import network_cost
from fullstride.measure.max_batch import predict
from fullstride.measure.settings import BenchSettings
from fullstride.measure.tracer import cost, traced
from fullstride.measure.workload import Step, StepOptions
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.tasks import find_network
from fullstride.train.recipes.named import RECIPES

TINY = SPECS["resnet3d_rs_tiny"]


def macs_of_resnet3d_50(frames: int, side: int) -> int:
    """By the table of layers: stem, (depth, inner width, time kernel) of each stage, classifier."""
    t, hw = frames // 2, (side // 2) ** 2
    macs = 3 * 64 * 5 * 7 * 7 * t * hw
    hw, c_in = hw // 4, 64
    stages = ((3, 64, 1), (4, 128, 1), (6, 256, 3), (3, 512, 3))
    for i, (depth, inner, kernel) in enumerate(stages):
        for j in range(depth):
            before = t * hw
            if i and not j:
                hw //= 4
            after = t * hw
            macs += c_in * inner * kernel * before
            macs += inner * inner * 9 * after + inner * 4 * inner * after
            if not j:
                macs += c_in * 4 * inner * after
            c_in = 4 * inner
    return macs + 2048 * 400


@pytest.mark.parametrize(("frames", "side"), [(32, 224), (8, 64)])
def test_macs_are_those_of_the_table_of_layers(frames, side):
    spec = replace(SPECS["resnet3d_50"], frames=frames)
    build = partial(Network, spec)
    expected = macs_of_resnet3d_50(frames, side)
    assert cost(build, side).macs == expected
    assert traced(build, side).macs.sum() == expected


def test_costs_of_stages_add_up_and_follow_the_frames():
    one, two = (
        network_cost(find_network("resnet3d_rs_tiny", frames=frames), training=True)
        for frames in (8, 16)
    )
    for total in (one, two):
        assert sum(row.macs for row in total.stages) == total.whole.macs
        assert sum(row.params for row in total.stages) == total.whole.params
    assert (one.frames, two.frames) == (8, 16)
    assert one.whole.params == two.whole.params
    # all but the gates and the classifier, which see no frames
    assert two.whole.macs / one.whole.macs == pytest.approx(2, rel=0.01)
    assert one.saved
    assert two.saved
    ratio = two.saved.bytes_per_image / one.saved.bytes_per_image
    assert ratio == pytest.approx(2, rel=0.02)


def test_the_memory_of_a_batch_counts_every_frame():
    net = Network(TINY)
    prediction = predict(net, 2**30, 32)
    saved = activation_bytes(net, 32).bytes_per_image
    assert prediction.bytes_per_image == saved + 3 * 8 * 32 * 32 * 4


def test_an_estimate_says_that_its_profile_saw_no_convolutions_of_frames():
    profile = load_profile("rtx4090")
    clips = [find_network("resnet3d_50", frames=frames) for frames in (8, 32)]
    rows = estimate_by_name([*clips, "resnet50"], profile, batch=64)
    assert [row.network for row in rows] == ["resnet50", "resnet3d_50", "resnet3d_50"]
    assert rows[0].estimate.unfitted == ()
    for row in rows[1:]:
        assert row.estimate.unfitted == ("convolutions of frames",)
    assert 2.5 < rows[2].estimate.ms_per_image / rows[1].estimate.ms_per_image <= 4.1


@pytest.mark.parametrize("work", ["inference", "training"])
def test_a_network_of_clips_is_timed_in_both_layouts(work):
    device = torch.device("cpu")
    for layout in ("nchw", "nhwc"):
        step = Step(Network(TINY), work, 2, 32, device, options=StepOptions(layout=layout))
        assert step.shape == (2, 3, 8, 32, 32)
        weight = step.net.get_parameter("stem.conv2.conv.weight")
        assert weight.is_contiguous(memory_format=step.format)
        assert step().isfinite().all()


def test_bench_measures_clips_beside_images_of_the_same_resolution():
    names = ["resnet3d_rs_tiny", "resnet_rs_tiny"]
    settings = BenchSettings(
        protocol=("throughput",), call_batch=2, rounds=2, reference="none", device="cpu"
    )
    plan = bench_by_name.plan(names, settings)
    ((rows,),) = plan.run()
    assert [row.name for row in rows] == names
    assert {row.protocol.resolution for row in rows} == {32}
    assert all(row.images_per_s > 0 for row in rows)


def test_frames_are_refused_where_there_are_none():
    for name, frames in (("resnet50", 8), ("resnet3d_50", 0)):
        with pytest.raises(ValueError, match=re.escape(f"--frames {frames} of {name}")):
            find_network(name, frames=frames)


# arXiv:2103.07579 Table 6, in its order, up to the rows that change the network.
ROWS = {
    "resnet3d_dropout": {"dropout"},
    "resnet3d_smoothing": {"label_smoothing"},
    "resnet3d_drop_path": {"drop_path", "drop_path_by"},
    "resnet3d_average": {"ema_decay"},
    "resnet3d_decay": {"weight_decay"},
    "resnet3d_longer": {"epochs"},
    "resnet3d_jitter": {"scale"},
}


def test_each_row_of_table_6_changes_one_thing_of_the_row_before():
    before = asdict(RECIPES["resnet3d"])
    for name, changed in ROWS.items():
        row = asdict(RECIPES[name])
        assert {key for key in row if row[key] != before[key]} == changed, name
        before = row
    last = RECIPES["resnet3d_rs"]
    assert (last.batch_size, last.lr, last.epochs, last.weight_decay) == (1024, 0.8, 350, 4e-5)
    assert (last.dropout, last.drop_path, last.label_smoothing) == (0.5, 0.1, 0.1)
    assert (last.ema_decay, last.bn_momentum, last.resolution) == (0.9999, 1.0, 224)
    # 73,682 steps, of which 1,050 are warmup
    assert last.warmup_epochs / last.epochs == pytest.approx(1050 / 73_682, rel=0.01)


def test_the_last_rows_of_table_6_change_the_network():
    before, gated, last = (SPECS[f"resnet3d{part}_50"] for part in ("", "_se", "_rs"))
    assert before.stages[0].se is None
    assert gated.stages[0].se == last.stages[0].se
    assert gated.stem is before.stem
    assert last.stem is not before.stem
