"""structures/proposals.py, proposals.py: the best within a budget, against exhaustive search."""

import time

import numpy as np
import pytest

from fullstride.nets import zoo
from fullstride.search.structures.proposals import first_design, fit, next_structures, select
from fullstride.search.structures.space import Place, Space, net_space, values

CHOICES = (6, 9, 8, 7, 5)


def small_space(sizes=CHOICES) -> Space:
    return Space(
        tuple(
            Place(f"place {i}", n, 1, np.arange(n)[:, None] - 1.0, ("size",))
            for i, n in enumerate(sizes)
        )
    )


class Chain:
    """Times like those of blocks: each depends on its choice and on the one before, beside a host
    whose launches run at the same time."""

    def __init__(self, sizes, rng):
        self.device = [
            rng.uniform(0.5, 1.5) + np.add.outer(np.arange(a), 2 * np.arange(b)) * rng.random()
            for a, b in zip((1, *sizes[:-1]), sizes, strict=True)
        ]
        self.host = [np.sort(4 * rng.random(n)) for n in sizes]

    def __call__(self, structures: np.ndarray) -> np.ndarray:
        before = np.zeros(len(structures), int)
        device, host = 1.0, 0.0
        for i, table in enumerate(self.device):
            device = device + table[before, structures[:, i]]
            host = host + self.host[i][structures[:, i]]
            before = structures[:, i]
        return (np.asarray(device) ** 4 + np.asarray(host) ** 4) ** 0.25


@pytest.mark.parametrize("seed", range(12))
def test_the_selection_is_the_optimum_of_exhaustive_search(seed):
    rng = np.random.default_rng(seed)
    space, costs = small_space(), Chain(CHOICES, rng)
    gains = [np.cumsum(rng.normal(0.3, 1, n)) for n in CHOICES]
    every = space.all()
    ms, value = costs(every), values(gains, every)
    for share in (0.02, 0.2, 0.6):
        budget = float(np.quantile(ms, share))
        best = every[ms <= budget][value[ms <= budget].argmax()]
        selection = select(space, gains, costs, budget, top=3, count=300, rng=rng)
        assert selection.structures[0].tolist() == best.tolist()
        assert selection.compared > 300, "random ones and moves, not the list of all"


def test_a_space_that_cannot_be_listed_is_not_searched_whole_whatever_the_count():
    sizes = (200, 200, 100)
    space, rng = small_space(sizes), np.random.default_rng(0)
    gains = [np.arange(n, dtype=float) for n in sizes]
    costs = Chain(sizes, rng)
    budget = float(costs(space.start[None])[0])
    selection = select(space, gains, costs, budget, top=1, count=space.size, rng=rng)
    assert costs(selection.structures)[0] <= budget


@pytest.mark.parametrize("seed", range(3))
def test_changes_of_two_places_reach_an_optimum_that_single_ones_miss(seed):
    rng = np.random.default_rng(seed)
    sizes = (30, 30, 30, 30)
    space, costs = small_space(sizes), Chain(sizes, rng)
    gains = [np.cumsum(rng.normal(0.3, 1, n)) for n in sizes]
    every = space.all()
    ms, value = costs(every), values(gains, every)
    for share in (0.02, 0.2, 0.6):
        budget = float(np.quantile(ms, share))
        selection = select(space, gains, costs, budget, count=1000, rng=rng)
        assert selection.values[0] == pytest.approx(value[ms <= budget].max())


def test_regression_and_selection_reach_the_optimum_of_a_planted_linear_accuracy():
    space = net_space(zoo.find_spec("resnet18"), depth_steps=1, most_widths=3)
    assert space.size == 3 * 9**4
    rng = np.random.default_rng(0)
    planted = rng.uniform(-0.2, 1, len(space.terms))
    structures = first_design(space, rng, per_place=5).structures
    noises = 0.01 * rng.standard_normal(len(structures))
    model = fit(space, structures, 90 + space.features(structures) @ planted + noises)
    costs, every = Chain(space.sizes.tolist(), rng), space.all()
    ms, accuracy = costs(every), space.features(every) @ planted
    for share in (0.1, 0.3, 0.7):
        budget = float(np.quantile(ms, share))
        selection = select(space, model.gains(), costs, budget, count=2000, rng=rng)
        best = every[ms <= budget][accuracy[ms <= budget].argmax()]
        assert selection.structures[0].tolist() == best.tolist()


def test_a_space_of_one_structure_is_that_structure():
    space = net_space(zoo.find_spec("resnet18"), depth_steps=0, width_range=(1, 1))
    gains = [np.zeros(1)] * len(space.places)
    rng = np.random.default_rng(0)
    selection = select(space, gains, lambda rows: np.full(len(rows), 2.0), 2.0, rng=rng)
    assert (selection.structures == space.start).all()
    with pytest.raises(ValueError, match="2 ms"):
        select(space, gains, lambda rows: np.full(len(rows), 2.0), 1.0, rng=rng)


def test_the_top_are_distinct_within_the_budget_and_in_order():
    rng = np.random.default_rng(0)
    space, costs = small_space(), Chain(CHOICES, rng)
    gains = [rng.random(n) for n in CHOICES]
    every = space.all()
    ms, value = costs(every), values(gains, every)
    budget = float(np.median(ms))
    selection = select(space, gains, costs, budget, top=20, rng=rng)
    inside = np.sort(value[ms <= budget])[::-1]
    assert selection.values == pytest.approx(inside[:20])
    assert selection.ms == pytest.approx(costs(selection.structures))
    assert (selection.ms <= budget).all()
    assert len(np.unique(selection.structures, axis=0)) == 20


@pytest.mark.parametrize("count", [100, 100_000])
def test_of_structures_of_equal_value_the_fastest_is_selected(count):
    rng = np.random.default_rng(0)
    space, costs = small_space(), Chain(CHOICES, rng)
    gains = [np.ones(n) for n in CHOICES]
    selection = select(space, gains, costs, 1e9, top=3, count=count, rng=rng)
    assert selection.ms[0] == costs(space.all()).min()
    assert (np.diff(selection.ms) >= 0).all()


def test_the_same_generator_selects_the_same_structures():
    rng = np.random.default_rng(0)
    space, costs = small_space((30, 30, 30, 30)), Chain((30, 30, 30, 30), rng)
    gains = [np.cumsum(rng.normal(0.3, 1, 30)) for _ in range(4)]
    one, two = (
        select(space, gains, costs, 60.0, count=1000, rng=np.random.default_rng(3))
        for _ in range(2)
    )
    assert (one.structures == two.structures).all()


def test_a_million_structures_take_less_than_a_minute():
    rng = np.random.default_rng(0)
    space = net_space(zoo.find_spec("masternet_1"), per_block_kernels=True)
    sizes = space.sizes.tolist()
    costs = Chain(sizes, rng)
    gains = [place.features @ rng.random(len(place.terms)) for place in space.places]
    budget = float(costs(space.start[None])[0])
    begin = time.perf_counter()
    selection = select(space, gains, costs, budget, count=400_000, rng=rng)
    seconds = time.perf_counter() - begin
    assert 60 * selection.compared / seconds > 1_000_000
    assert selection.values[0] > 0


@pytest.mark.parametrize("count", [100, 1_000_000])
def test_a_budget_below_everything_names_the_shortest_time(count):
    rng = np.random.default_rng(1)
    space, costs = small_space(), Chain(CHOICES, rng)
    shortest = costs(space.all()).min()
    with pytest.raises(ValueError, match=rf"nothing fits 0\.1 ms: .* {shortest:.4g} ms"):
        select(space, [np.ones(n) for n in CHOICES], costs, 0.1, count=count, rng=rng)


def test_the_fastest_structure_is_reached_where_random_ones_never_fit():
    rng = np.random.default_rng(1)
    sizes = (200, 200, 200, 200)
    space, costs = small_space(sizes), Chain(sizes, rng)
    budget = 1.001 * float(costs(np.zeros((1, 4), int))[0])
    gains = [np.arange(200.0)] * 4
    selection = select(space, gains, costs, budget, count=100, rng=rng)
    assert (selection.structures[0] < 2).all()


# Designs ------------------------------------------------------------------------------------------


def test_the_first_design_changes_one_place_and_has_a_control_for_each():
    space = net_space(zoo.find_spec("masternet_1"), per_block_kernels=True)
    design = first_design(space, np.random.default_rng(0))
    changed = design.structures != space.start
    assert (np.bincount(design.places) == [7, *[9] * 6]).all(), "the stem has 7 widths"
    for i in range(len(space.places)):
        own = changed[design.places == i]
        assert not own[0].any(), "the control"
        assert (own[1:, i]).all()
        assert own.sum() == len(own) - 1
        assert len(np.unique(design.structures[design.places == i], axis=0)) == len(own)


def test_samples_reach_the_ends_of_depth_and_width_and_each_kernel_and_ratio():
    space = net_space(zoo.find_spec("masternet_1"), per_block_kernels=True)
    design = first_design(space, np.random.default_rng(0))
    for i, options in enumerate(space.options):
        chosen = [options[n] for n in design.structures[design.places == i, i]]
        for name in ("depth", "width"):
            every = {getattr(choice, name) for choice in options}
            assert {min(every), max(every)} <= {getattr(choice, name) for choice in chosen}
        for name in ("kernel", "ratio"):
            every = {getattr(choice, name) for choice in options}
            assert every == {getattr(choice, name) for choice in chosen}


def test_every_class_has_its_samples_and_the_class_alone():
    space = net_space(zoo.find_spec("masternet_1"), switch_blocks=True)
    design = first_design(space, np.random.default_rng(0), per_place=6)
    chosen = [space.options[3][n] for n in design.structures[design.places == 3, 3]]
    blocks = [choice.block for choice in chosen]
    assert {block: blocks.count(block) for block in blocks} == {"XX": 6, "BL": 6, "DW": 6}
    alone = {choice.block for choice in chosen if (choice.depth, choice.width) == (8, 512)}
    assert alone == {"XX", "BL", "DW"}


def test_a_few_choices_are_trained_once_each():
    space = small_space((3, 3, 2))
    design = first_design(space, np.random.default_rng(0), control_each=False)
    assert sorted(design.structures.tolist()) == [
        [0, 1, 1],
        [1, 0, 1],
        [1, 1, 0],
        [1, 2, 1],
        [2, 1, 1],
    ]


@pytest.mark.parametrize("spread", [True, False])
def test_a_design_is_a_function_of_its_generator(spread):
    space = net_space(zoo.find_spec("genet_tiny"), per_block_kernels=True)
    one, two, other = (
        first_design(space, np.random.default_rng(seed), spread=spread).structures.tolist()
        for seed in (0, 0, 1)
    )
    assert one == two != other


def test_spread_samples_know_the_gradient_better_than_uniform_ones():
    space = net_space(zoo.find_spec("masternet_1"), per_block_kernels=True)

    def error(spread: bool) -> float:
        structures = first_design(space, np.random.default_rng(0), spread=spread).structures
        model = fit(space, structures, np.zeros(len(structures)), noise=1.0, prior=10.0)
        return float(np.mean([row.standard_error for row in model.slopes()]))

    assert error(True) < 0.8 * error(False)


# Proposals ----------------------------------------------------------------------------------------


@pytest.fixture
def model():
    space = small_space()
    rng = np.random.default_rng(0)
    structures = np.concatenate([space.start[None], space.random(rng, 20)])
    scores = 90 + space.features(structures) @ np.array([0.5, -0.2, 0.3, 0.1, 0.4])
    return fit(space, structures, scores + rng.normal(0, 0.1, 21))


@pytest.mark.parametrize("method", ["thompson", "greedy"])
def test_proposals_are_new_distinct_and_within_the_budget(model, method):
    rng = np.random.default_rng(1)
    space, costs = model.space, Chain(CHOICES, rng)
    every = space.all()
    budget = float(np.quantile(costs(every), 0.01))  # 151 structures
    inside = every[costs(every) <= budget]
    tried = inside[: len(inside) // 2]
    picks = next_structures(model, costs, budget, tried, rng, count=8, method=method)
    rows = {tuple(row) for row in picks.tolist()}
    assert len(rows) == 8
    assert not rows & {tuple(row) for row in tried.tolist()}
    assert (costs(picks) <= budget).all()
    rest = next_structures(model, costs, budget, inside[3:], rng, count=8, method=method)
    assert sorted(rest.tolist()) == sorted(inside[:3].tolist()), "no more are left"
    assert next_structures(model, costs, budget, inside, rng, method=method).shape == (0, 5)


def test_greedy_proposals_are_the_best_predicted(model):
    rng = np.random.default_rng(1)
    costs = Chain(CHOICES, rng)
    every = model.space.all()
    budget = float(np.median(costs(every)))
    inside = every[costs(every) <= budget]
    order = np.argsort(-model.predict(inside)[0])
    tried = inside[order[[0, 2]]]
    picks = next_structures(model, costs, budget, tried, rng, count=3, method="greedy")
    assert picks.tolist() == inside[order[[1, 3, 4]]].tolist()


def test_thompson_sampling_proposes_what_is_best_in_some_draw(model):
    costs = Chain(CHOICES, np.random.default_rng(1))
    every = model.space.all()
    budget = float(np.median(costs(every)))
    inside = every[costs(every) <= budget]
    none = every[:0]
    picks = next_structures(model, costs, budget, none, np.random.default_rng(5), count=1)
    best = values(model.draw(np.random.default_rng(5)), inside).argmax()
    assert picks[0].tolist() == inside[best].tolist()
