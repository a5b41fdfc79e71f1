"""Times of millions of structures: tables of parts against estimates of whole networks."""

import time
from dataclasses import replace

import numpy as np
import pytest

from fullstride.latency import estimator
from fullstride.latency.devices import load_profile
from fullstride.latency.estimator import Estimator
from fullstride.nets import zoo
from fullstride.nets.blocks import SE, SpaceToDepthStem, Style
from fullstride.search.llr.times import LatencyTables
from fullstride.search.structures.proposals import select
from fullstride.search.structures.space import net_space

GENET = zoo.spec("genet_light")
STYLED = replace(
    zoo.spec("genet_tiny"),
    stem=SpaceToDepthStem,
    head_width=0,
    style=Style(average_shortcut=True, blur=True),
    stages=tuple(
        replace(stage, se=SE(ratio=1 / 4, at="out")) for stage in zoo.spec("genet_tiny").stages
    ),
)


@pytest.mark.parametrize(
    ("master", "profile", "batch", "resolution", "options"),
    [
        (GENET, "v100-fp16", 64, 192, {}),
        (GENET, "rtx4090", 1, 256, dict(per_block_kernels=True)),
        (zoo.spec("genet_tiny"), "rtx4090-compiled", 8, 32, dict(switch_blocks=True)),
        (STYLED, "rtx4090", 4, 44, {}),
    ],
)
def test_the_times_of_random_structures_are_those_of_their_specs(
    master, profile, batch, resolution, options
):
    space = net_space(master, **options)
    structures = space.random(np.random.default_rng(0), 40)
    estimator = Estimator(load_profile(profile), batch)
    expected = estimator.many([space.spec(row) for row in structures], resolution)
    tables = LatencyTables(space, load_profile(profile), batch, resolution)
    np.testing.assert_allclose(tables(structures), expected, rtol=1e-9)


def test_each_clock_bounds_its_own_time():
    space, profile = net_space(GENET), load_profile("rtx4090")
    rows = space.random(np.random.default_rng(0), 20)
    both, host = (LatencyTables(space, profile, 1, 192, clock) for clock in ("both", "host"))
    device_s, host_s = both.busy_s(rows)
    device, total = 1e3 * device_s, 1e3 * host_s
    np.testing.assert_allclose(host(rows), total)
    np.testing.assert_allclose(both(rows), (device**4 + total**4) ** 0.25)
    # Two more blocks of two convolutions: each with a norm, two activations, and the sum.
    place = space.places[2]
    names = [(choice.depth, choice.width) for choice in space.options[2]]
    depth, width = names[place.start]
    deeper = space.start.copy()
    deeper[2] = names.index((depth + 2, width))
    more = host(deeper[None])[0] - host(space.start[None])[0]
    launch_ms = profile.inference.numbers["host_us"] / 1e3
    assert more / launch_ms == pytest.approx(2 * (2 + 2 + 2 + 1))


def test_a_million_structures_are_selected_within_a_minute_of_one_core():
    space = net_space(GENET)
    tables = LatencyTables(space, load_profile("v100-fp16"), 64, 192)
    rng = np.random.default_rng(0)
    gains = [rng.standard_normal(place.choices) for place in space.places]
    begin = time.process_time()
    selection = select(space, gains, tables, 0.1, count=200_000, rng=rng)
    seconds = time.process_time() - begin
    assert selection.compared / seconds > 1_000_000 / 60
    assert (tables(selection.structures) <= 0.1).all()


def test_a_network_that_cannot_be_walked_is_refused_in_one_line(monkeypatch):
    space = net_space(GENET)
    monkeypatch.delitem(estimator.WALKS, "ConvStem")
    with pytest.raises(ValueError, match="ConvStem") as error:
        LatencyTables(space, load_profile("v100-fp16"))
    assert "\n" not in str(error.value)
