"""Power laws with a floor: planted ones come back, and half of Table 7 predicts its largest."""

import numpy as np
import pytest

from fullstride.search.scale.analysis import fit_power_law
from fullstride.search.scale.finished import table_7

TIMES = np.geomspace(1, 40, 9)


def planted(sizes: np.ndarray) -> np.ndarray:
    return 12 + 9 * sizes**-0.6


def halves(family: str) -> tuple[list[float], list[float]]:
    rows = sorted(table_7(family), key=lambda row: row.ms)
    return [row.ms for row in rows], [row.error for row in rows]


@pytest.mark.parametrize(("family", "half"), [("resnet_rs", 6), ("efficientnet", 5)])
def test_the_cheaper_half_of_table_7_predicts_the_largest_network_within_half_a_point(family, half):
    times, errors = halves(family)
    law = fit_power_law(times[:half], errors[:half])
    pure = fit_power_law(times[:half], errors[:half], saturating=False)
    (largest,) = times[-1:]
    assert law.at([largest]) == pytest.approx(errors[-1], abs=0.5)
    low, high = law.interval(largest)
    assert low < errors[-1] < high
    assert errors[-1] - pure.at([largest]) > 2  # the pure law is that much too optimistic


def test_four_efficientnets_are_too_few_and_the_interval_says_so():
    times, errors = halves("efficientnet")
    law = fit_power_law(times[:4], errors[:4])
    low, high = law.interval(times[-1])
    assert abs(law.at([times[-1]]) - errors[-1]) > 2
    assert low < errors[-1] < high


def test_a_planted_law_comes_back_from_exact_errors():
    law = fit_power_law(TIMES, planted(TIMES))
    assert (law.floor, law.exponents[0]) == pytest.approx((12, 0.6), rel=1e-3)
    assert law.at([100.0]) == pytest.approx(planted(np.array(100.0)), rel=1e-4)
    assert law.rmse < 1e-4


def test_a_planted_law_in_three_sizes_comes_back():
    sizes = np.array([[w, d, r] for w in (0.5, 1, 2) for d in (26, 50, 101) for r in (128, 224)])
    exponents = np.array([0.2, 0.4, 0.9])
    errors = 10 + np.exp(9 - np.log(sizes) @ exponents)
    law = fit_power_law(sizes, errors)
    assert law.exponents == pytest.approx(exponents, rel=1e-2)
    assert law.floor == pytest.approx(10, abs=0.1)


def test_the_fit_and_its_interval_are_those_of_a_search_over_a_grid():
    errors = planted(TIMES) + np.random.default_rng(3).normal(0, 0.2, len(TIMES))
    law, at = fit_power_law(TIMES, errors, noise=0.2), 80.0
    best, inside = np.inf, []
    candidates = []
    for exponent in np.linspace(0.02, 3, 200):
        powers = TIMES**-exponent
        for floor in np.linspace(0, errors.min(), 200):
            scale = max(0.0, powers @ (errors - floor) / (powers @ powers))
            squares = np.sum((floor + scale * powers - errors) ** 2)
            candidates.append((squares, floor + scale * at**-exponent))
            best = min(best, squares)
    variance = max(0.2**2, best / (len(TIMES) - 3))
    inside = [error for squares, error in candidates if squares <= best + 1.96**2 * variance]
    assert law.rmse**2 * len(TIMES) == pytest.approx(best, rel=0.02)
    assert law.interval(at) == pytest.approx((min(inside), max(inside)), abs=0.1)


@pytest.mark.slow
def test_intervals_have_the_planted_error_in_about_95_per_cent_of_repetitions():
    truth, hits, repeats = float(planted(np.array(80.0))), 0, 60
    for seed in range(repeats):
        errors = planted(TIMES) + np.random.default_rng(seed).normal(0, 0.15, len(TIMES))
        low, high = fit_power_law(TIMES, errors).interval(80.0)
        hits += low <= truth <= high
    assert hits >= 52  # of 60: fewer have a probability of 2 % at 95 %


def test_gains_have_the_sign_of_the_law_and_an_interval_around_them():
    errors = planted(TIMES) + np.random.default_rng(1).normal(0, 0.1, len(TIMES))
    law = fit_power_law(TIMES, errors)
    gain, (low, high) = law.gain([20.0], [30.0])
    assert gain == pytest.approx(float(law.at([20.0]) - law.at([30.0])))
    assert low < planted(np.array(20.0)) - planted(np.array(30.0)) < high


def test_errors_that_do_not_fall_give_a_law_that_does_not_fall():
    law = fit_power_law(TIMES, np.linspace(20, 22, len(TIMES)))
    assert law.at([1.0]) == pytest.approx(law.at([40.0]), abs=0.05)


def test_three_points_leave_nothing_for_an_interval():
    assert fit_power_law(TIMES[:3], planted(TIMES[:3])).interval(50.0) is None
