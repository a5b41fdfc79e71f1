"""The posterior of the additive model is the textbook's, and its intervals cover what is true."""

from functools import partial

import numpy as np
import pytest
from scipy import stats

from fullstride.nets import zoo
from fullstride.search.structures.proposals import AdditiveModel, first_design, fit, fit_paper
from fullstride.search.structures.space import NetSpace, Place, Space, net_space

REPETITIONS = 200


@pytest.fixture(scope="module")
def space() -> NetSpace:
    return net_space(zoo.find_spec("genet_tiny"), per_block_kernels=True)


@pytest.fixture(scope="module")
def planted(space) -> np.ndarray:
    """(P,) points for one unit of each feature."""
    return np.random.default_rng(5).normal(0, 0.5, len(space.terms))


def trainings(space, planted, structures, noise, seed) -> np.ndarray:
    noises = noise * np.random.default_rng(seed).standard_normal(len(structures))
    return 90 + space.features(structures) @ planted + noises


def covered(model: AdditiveModel, truth: np.ndarray) -> np.ndarray:
    """Whether each coefficient's interval of 95 % has its true value."""
    errors = np.array([row.standard_error for row in model.slopes()])
    return np.abs(model.mean - truth) <= stats.norm.ppf(0.975) * errors


def test_intervals_of_95_percent_cover_the_planted_gradient_in_95_percent(space, planted):
    structures = first_design(space, np.random.default_rng(0)).structures
    hits = [
        covered(fit(space, structures, scores, noise=0.3, prior=10.0), planted)
        for scores in (
            trainings(space, planted, structures, 0.3, seed) for seed in range(REPETITIONS)
        )
    ]
    # Each of the coefficients on its own, at one chance of a false alarm in 1,000 for all of them.
    least, most = stats.binom.ppf(
        np.array([0.5, 1 - 0.5]) + np.array([-1, 1]) * (0.5 - 0.0005 / len(planted)),
        REPETITIONS,
        0.95,
    )
    counts = np.sum(hits, axis=0)
    assert (counts >= least).all(), (counts, least)
    assert (counts <= most).all(), (counts, most)


def test_the_posterior_is_that_of_a_gaussian_process_with_the_same_covariance(space, planted):
    rng = np.random.default_rng(1)
    structures, new = space.random(rng, 30), space.random(rng, 5)
    structures[0] = space.start
    scores = trainings(space, planted, structures, 0.2, 1)
    model = fit(space, structures, scores, noise=0.2, prior=0.7)
    largest = np.concatenate([np.abs(place.features).max(axis=0) for place in space.places])

    names = [term for _, term in space.terms]
    prior = np.array([[0.5 * (a == b) for a in names] for b in names]) + 0.5 * np.eye(len(names))
    prior *= np.outer(0.7 / largest, 0.7 / largest)

    def kernel(a, b):
        # The last number is the variance of the reference, which is as good as flat.
        return space.features(a) @ prior @ space.features(b).T + 1e4

    inverse = np.linalg.inv(kernel(structures, structures) + 0.2**2 * np.eye(30))
    cross = kernel(new, structures)
    mean = 90 + cross @ inverse @ (scores - 90)
    variance = np.diag(kernel(new, new) - cross @ inverse @ cross.T) + 0.2**2
    predicted, errors = model.predict(new)
    assert predicted == pytest.approx(mean, abs=1e-3)
    assert errors**2 == pytest.approx(variance, abs=1e-3)


def test_prediction_intervals_cover_new_trainings(space, planted):
    rng = np.random.default_rng(2)
    structures = space.random(rng, 60)
    structures[0] = space.start
    hits = []
    for seed in range(50):
        scores = trainings(space, planted, structures, 0.3, seed)
        new = space.random(rng, 40)
        predicted, errors = fit(space, structures, scores).predict(new)
        again = trainings(space, planted, new, 0.3, 10_000 + seed)
        hits.append(np.mean(np.abs(again - predicted) <= 1.96 * errors))
    assert 0.92 < np.mean(hits) < 0.98, "noise and prior are estimated here"


def test_the_noise_is_recovered_from_the_residuals(space, planted):
    structures = space.random(np.random.default_rng(3), 80)
    structures[0] = space.start
    noises = [
        fit(space, structures, trainings(space, planted, structures, noise, seed)).noise / noise
        for noise in (0.1, 0.4)
        for seed in range(10)
    ]
    assert np.median(noises) == pytest.approx(1, abs=0.15)


def test_groups_have_references_of_their_own(space, planted):
    design = first_design(space, np.random.default_rng(0))
    scores = trainings(space, planted, design.structures, 0.1, 0)
    structures = np.concatenate([space.start[None], design.structures])
    groups = np.append(0, 1 + design.places)
    below = np.append(0.0, np.linspace(-9, 9, len(space.places))[design.places])
    known = partial(fit, space, structures, groups=groups, noise=0.1, prior=1.0)
    plain, shifted = known(np.append(92.0, scores)), known(np.append(92.0, scores) + below)
    assert shifted.mean == pytest.approx(plain.mean, abs=1e-9)
    assert plain.reference == shifted.reference == pytest.approx(92), "of group 0"
    estimated = fit(space, structures, np.append(92.0, scores) + below, groups=groups)
    assert covered(estimated, planted).mean() > 0.8


def test_what_no_training_has_shown_keeps_the_prior(space):
    structures = np.repeat(space.start[None], 6, axis=0)
    structures[3:, 1] = [0, 3, 6]
    model = fit(space, structures, 90 + np.arange(6.0), noise=0.5, prior=2.0)
    names = np.array([term for _, term in space.terms])
    shown = space.features(structures).any(axis=0)
    hidden = ~np.isin(names, names[shown])
    largest = np.concatenate([np.abs(place.features).max(axis=0) for place in space.places])
    errors = np.sqrt(np.diag(model.covariance)) * largest
    assert hidden.sum() > 5
    assert model.mean[hidden] == pytest.approx(0)
    assert errors[hidden] == pytest.approx(2.0)
    assert (errors[~hidden] < 2.0 - 1e-6).all(), "terms of the same name at other places too"


def test_a_term_at_one_place_says_something_of_the_same_term_at_others():
    terms = ("depth", "width")
    corners = np.array([[0, 0], [1, 0], [0, 1], [1, 1.0]])
    space = Space(tuple(Place(f"place {i}", 4, 0, corners, terms) for i in range(4)))
    structures = np.zeros((7, 4), int)
    for i in range(3):
        structures[1 + i, i], structures[4 + i, i] = 1, 2
    scores = 90 + np.array([0, 1, 1, 1, -1, -1, -1.0])
    model = fit(space, structures, scores, noise=0.05, prior=2.0)
    depth, width = model.mean[space.columns[3]]
    assert depth == pytest.approx(0.75, abs=0.02), "3 r / (1 + 2 r) of the others, with r = 1/2"
    assert width == pytest.approx(-0.75, abs=0.02)


def test_a_few_equal_trainings_still_give_a_model(space):
    for n in (1, 3):
        model = fit(space, np.repeat(space.start[None], n, axis=0), np.full(n, 91.0))
        assert model.reference == pytest.approx(91)
        assert not model.mean.any()
        assert np.isfinite(model.joint).all()
        assert model.noise > 0


def test_draws_have_the_posteriors_mean_and_covariance(space, planted):
    structures = first_design(space, np.random.default_rng(0)).structures
    scores = trainings(space, planted, structures, 0.3, 0)
    model = fit(space, structures, scores, noise=0.3, prior=1.0)
    rng = np.random.default_rng(0)
    place, columns = space.places[3], space.columns[3]
    draws = np.array([model.draw(rng)[3] for _ in range(4000)])
    covariance = place.features @ model.covariance[columns, columns] @ place.features.T
    errors = np.sqrt(np.diag(covariance))
    assert draws.mean(axis=0) == pytest.approx(model.gains()[3], abs=5 * errors.max() / 4000**0.5)
    assert draws.std(axis=0) == pytest.approx(errors, rel=0.06, abs=1e-9)


def paper_space() -> NetSpace:
    return net_space(zoo.find_spec("genet_tiny"), paper=True)


def test_the_papers_fit_is_one_least_squares_fit_for_each_place_and_type():
    space = paper_space()
    design = first_design(space, np.random.default_rng(0), per_place=40, spread=False)
    rng = np.random.default_rng(1)
    scores = 90 + rng.normal(0, 1, len(design.places))
    model = fit_paper(space, design.structures, scores, 90.5)
    rows = {(row.place, row.term): row for row in model.slopes()}
    master = space.spec(space.start)
    squares, spare = 0.0, 0
    for i, stage in enumerate(master.stages, 1):
        by_type: dict[tuple, list[int]] = {}
        for n in np.flatnonzero(design.places == i):
            choice = space.options[i][design.structures[n, i]]
            by_type.setdefault((choice.block, choice.kernel, choice.ratio), []).append(n)
        for (block, kernel, ratio), own in by_type.items():
            choices = [space.options[i][design.structures[n, i]] for n in own]
            x = np.array([(c.depth - stage.depth, c.width - stage.width) for c in choices])
            slopes = np.linalg.lstsq(x, scores[own] - 90.5)[0]
            for term, value in zip(("depth", "width"), slopes, strict=True):
                name = f"{block} k{kernel} r{ratio:g} {term}"
                assert rows[f"stages.{i - 1}", name].value == pytest.approx(value)
            squares += ((scores[own] - 90.5 - x @ slopes)[x.any(axis=1)] ** 2).sum()
            spare += int(x.any(axis=1).sum()) - 2
    stem = np.flatnonzero(design.places == 0)
    x = np.array([space.options[0][n].width for n in design.structures[stem, 0]]) - 16
    slope = (x * (scores[stem] - 90.5)).sum() / (x**2).sum()
    assert rows["stem", "width"].value == pytest.approx(slope)
    error = rows["stem", "width"].standard_error
    assert error == pytest.approx(model.noise / np.sqrt((x**2).sum()))
    assert model.noise == pytest.approx(np.std(scores), rel=0.2)
    assert spare > 0


def test_the_papers_fit_knows_its_limits():
    space = paper_space()
    structures = np.array([space.start, space.start])
    structures[1, 0] = 0
    model = fit_paper(space, structures, np.array([90.0, 89.0]), 90.0)
    assert model.gains()[0][0] == pytest.approx(-1)
    assert not model.gains()[1].any()
    assert model.noise == np.inf
    structures[1, 1] = 0
    with pytest.raises(ValueError, match="one place only"):
        fit_paper(space, structures, np.array([90.0, 89.0]), 90.0)
