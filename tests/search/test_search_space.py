"""structures/space.py: structures are networks, and features what they say of these."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from covers import pairwise_cover

from fullstride.nets import zoo
from fullstride.nets.blocks import Basic, Bottleneck, ConvStem
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec, Stage
from fullstride.search.structures.space import Choice, Place, Space, net_choices, net_space

MASTERS = ("genet_tiny", "genet_light", "masternet_1", "resnet18", "resnet_rs_50", "tresnet_m")
CASES = pairwise_cover(MASTERS, (False, True), (False, True), (False, True))


def own_space(master, per_block=False, switch=False, paper=False, **options):
    return net_space(
        zoo.find_spec(master),
        per_block_kernels=per_block,
        switch_blocks=switch,
        paper=paper,
        **options,
    )


def structure_of(space, spec):
    """The structure whose network is `spec`."""
    choices = zip(space.options, net_choices(spec), strict=True)
    return np.array([options.index(choice) for options, choice in choices])


@pytest.mark.parametrize(("master", "per_block", "switch", "paper"), CASES)
def test_structures_become_networks_and_back(master, per_block, switch, paper):
    space = own_space(master, per_block, switch, paper)
    assert space.spec(space.start) == zoo.find_spec(master)
    assert not space.features(space.start[None]).any()
    for row in space.random(np.random.default_rng(0), 40):
        spec = space.spec(row, 96)
        assert spec.resolution == 96
        assert (structure_of(space, spec) == row).all()
        assert space.spec(structure_of(space, NetSpec.from_json(spec.to_json())), 96) == spec


def test_networks_of_random_structures_can_be_built():
    space = own_space("genet_tiny", True, True)
    for row in space.random(np.random.default_rng(1), 2):
        assert Network(space.spec(row)).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_choices_are_those_of_the_paper():
    space = own_space("masternet_1", True, True)
    assert [place.name for place in space.places] == [
        "stem",
        *(f"stages.{i}" for i in range(5)),
        "head",
    ]
    depths = [sorted({choice.depth for choice in options}) for options in space.options]
    assert depths == [
        [1],
        [1, 2, 3],
        [2, 3, 4, 5, 6],
        [6, 7, 8, 9, 10],
        [2, 3, 4, 5, 6],
        [1, 2, 3, 4],
        [1],
    ]
    assert {choice.width for choice in space.options[0]} == set(range(16, 65, 8))
    for options in space.options[1:-1]:
        types = {(choice.block, choice.kernel, choice.ratio) for choice in options}
        assert types == {
            (block, kernel, ratio)
            for block, ratios in (("XX", (1,)), ("BL", (0.5, 0.25)), ("DW", (3, 6, 9)))
            for ratio in ratios
            for kernel in (3, 5)
        }


def test_a_stage_keeps_its_own_type_without_the_options():
    space = own_space("genet_tiny")
    kinds = [{(o.block, o.kernel) for o in options} for options in space.options[1:-1]]
    assert kinds == [{("XX", 3)}, {("XX", 3)}, {("BL", 3)}, {("DW", 3)}, {("DW", 3)}]


@pytest.mark.parametrize("own", [8, 13, 48, 100, 320, 1280, 2560])
@pytest.mark.parametrize("most", [3, 8, 24])
def test_widths_span_the_range_in_about_equal_ratios(own, most):
    master = replace(zoo.find_spec("genet_tiny"), stem_width=own)
    widths = sorted({choice.width for choice in net_space(master, most_widths=most).options[0]})
    every = [width for width in range(8, 8 * own, 8) if own / 2 <= width <= 2 * own]
    assert own in widths
    assert widths[0] == min(*every, own)
    assert widths[-1] == max(*every, own)
    assert set(widths) <= {*every, own}
    assert len(widths) <= most
    if len(every) > 4 * most:
        ratios = np.array(widths[1:]) / widths[:-1]
        assert ratios.max() < 1.5 * 4 ** (1 / (most - 1)), "a gap of more than half a step"


def test_features_of_a_choice_are_what_their_terms_say():
    space = own_space("masternet_1", True, True)
    place, options = space.places[3], space.options[3]  # BL, 8 x 512, kernel 5, ratio 1/4

    def features(*choice) -> dict[str, float]:
        values = place.features[options.index(Choice(*choice))]
        return {term: value for term, value in zip(place.terms, values, strict=True) if value}

    assert features(10, 1024, "BL", 5, 0.25) == {"depth": 2, "log width": np.log(2)}
    assert features(8, 512, "BL", 3, 0.5) == {"kernel 3": 1, "ratio 0.5": 1}
    assert features(8, 512, "DW", 5, 3.0) == {"DW": 1}
    changed = {"DW": 1, "DW depth": -2, "DW log width": -np.log(2), "DW kernel 3": 1}
    assert features(6, 256, "DW", 3, 9.0) == {**changed, "DW ratio 9": 1}


def test_in_the_papers_form_a_change_of_type_alone_is_worth_nothing():
    space = own_space("masternet_1", switch=True, paper=True)
    place, options = space.places[3], space.options[3]
    assert len(place.terms) == 2 * 12, "two slopes for each of 12 types"
    values = place.features[options.index(Choice(9, 1024, "DW", 3, 6.0))]
    named = {term: value for term, value in zip(place.terms, values, strict=True) if value}
    assert named == {"DW k3 r6 depth": 1, "DW k3 r6 width": 512}
    alone = [i for i, choice in enumerate(options) if (choice.depth, choice.width) == (8, 512)]
    assert len(alone) == 12
    assert not place.features[alone].any()


def test_one_kernel_for_the_whole_network_leaves_structures_and_features():
    space = own_space("genet_tiny")
    other = space.with_kernel(5)
    row = space.random(np.random.default_rng(0), 1)
    assert (other.features(row) == space.features(row)).all()
    assert {stage.kernel for stage in other.spec(row[0]).stages} == {5}
    plain = [replace(stage, kernel=3) for stage in other.spec(row[0]).stages]
    assert tuple(plain) == space.spec(row[0]).stages
    assert (structure_of(other, other.spec(row[0])) == row[0]).all()


def test_active_bounds_are_depths_and_widths_at_the_end_of_their_range():
    space = own_space("genet_tiny")
    assert not any("width" in bound for bound in space.active_bounds(space.start))
    wide = replace(zoo.find_spec("genet_tiny"), head_width=512)
    wide = replace(wide, stages=(*wide.stages[:4], replace(wide.stages[4], depth=3)))
    bounds = space.active_bounds(structure_of(space, wide))
    assert "head width 512 (most)" in bounds
    assert "stages.4 depth 3 (most)" in bounds
    assert "stages.0 depth 1 (least)" in bounds, "fewer than its one block is impossible"
    assert not any(bound.startswith(("stem", "stages.1")) for bound in bounds)


def test_squeeze_and_excitation_stays_where_the_type_changes():
    space = own_space("tresnet_m", switch=True)
    gates = [stage.se for stage in zoo.find_spec("tresnet_m").stages]
    for row in space.random(np.random.default_rng(2), 5):
        assert [stage.se for stage in space.spec(row).stages] == gates


@pytest.mark.parametrize(("block", "group_width"), [(Bottleneck, 8), (Basic, 16)])
def test_grouped_blocks_are_refused_by_their_stage(block, group_width):
    stages = (
        Stage(block=Basic, depth=1, width=16),
        Stage(block=block, depth=1, width=32, group_width=group_width),
    )
    spec = NetSpec(source="test", stem=ConvStem, stem_width=16, stages=stages)
    with pytest.raises(ValueError, match=rf"stage 1 .* group_width {group_width}"):
        net_space(spec)


def test_a_range_of_widths_without_the_own_one_is_refused():
    with pytest.raises(ValueError, match="1"):
        own_space("genet_tiny", width_range=(1.2, 2))


def test_a_place_that_nothing_changes_has_one_choice():
    space = own_space("resnet18", width_range=(1, 1), depth_steps=0)
    assert space.size == 1
    assert (space.all() == 0).all()
    assert space.features(space.all()).shape == (1, 0)


def small_space(*sizes: int) -> Space:
    return Space(
        tuple(
            Place(f"place {i}", n, 0, np.eye(n)[:, 1:], tuple(f"choice {j}" for j in range(1, n)))
            for i, n in enumerate(sizes)
        )
    )


def test_every_structure_is_listed_once_and_neighbours_differ_at_one_place():
    space = small_space(3, 4, 2)
    every = space.all()
    assert len({tuple(row) for row in every.tolist()}) == space.size == 24
    near = space.neighbours(np.array([1, 2, 0]))
    expected = [row for row in every.tolist() if sum(np.array(row) != [1, 2, 0]) == 1]
    assert sorted(near.tolist()) == expected


def test_too_many_structures_are_not_listed():
    with pytest.raises(ValueError, match="can be listed"):
        own_space("genet_light").all()
