"""What finished trainings say: the front, gains per doubling of the time, and the next step."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from fullstride.search.scale.analysis import Candidate, analyse
from fullstride.search.scale.finished import (
    Size,
    Training,
    points_of,
    read_trainings,
    seed_deviation,
    table_7,
    write_trainings,
)
from fullstride.search.scale.study import points_table

WIDTHS, DEPTHS, SIDES = (0.5, 1.0, 2.0), (1.0, 2.0, 4.0), (64, 128, 256)


def error_of(size: Size) -> float:
    return 8 + 30 * size.width**-0.3 * size.depth**-0.9 * (size.resolution / 64) ** -0.5


def ms_of(size: Size) -> float:
    return size.width**2 * size.depth * (size.resolution / 64) ** 2


def planted(seeds: int = 2, noise: float = 0.05, epochs: float = 100) -> list[Training]:
    rng = np.random.default_rng(0)
    return [
        Training(
            name=f"{size}",
            width=size.width,
            depth=size.depth,
            resolution=size.resolution,
            epochs=epochs,
            seed=seed,
            error=error_of(size) + rng.normal(0, noise),
            ms=ms_of(size),
            images=10_000,
        )
        for size in itertools.starmap(Size, itertools.product(WIDTHS, DEPTHS, SIDES))
        for seed in range(seeds)
    ]


def test_table_7_has_both_families_with_the_printed_errors():
    rows = {each.name: each for family in ("resnet_rs", "efficientnet") for each in table_7(family)}
    assert len(rows) == 19
    assert rows["ResNet-RS-420 at 320"].error == 15.6
    assert rows["ResNet-RS-420 at 320"].depth == 420
    assert rows["EfficientNet-B7 at 600"].error == 15.3
    assert rows["EfficientNet-B7 at 600"].ms == pytest.approx(29.9 / 128 * 1000)


def test_all_resnet_rs_are_on_the_front_and_depth_and_resolution_gain():
    (regime,) = analyse(table_7("resnet_rs"))
    assert len(regime.front) == 11
    assert {gain.axis: gain.pairs for gain in regime.gains} == {"depth": 6, "resolution": 4}
    assert all(gain.points_per_doubling > 0 for gain in regime.gains)
    assert regime.saturating.largest == pytest.approx(15.6, abs=0.5)
    assert regime.pure.largest < 13.6
    assert any("two seeds" in each for each in regime.warnings)


def test_of_both_families_together_efficientnet_b7_alone_is_on_the_front():
    trainings = [*table_7("resnet_rs"), *table_7("efficientnet")]
    (regime,) = analyse(trainings)
    assert [p.name for p in regime.front if p.name.startswith("Eff")] == ["EfficientNet-B7 at 600"]
    assert len(regime.front) == 12


def test_efficientnets_scale_together_so_the_step_follows_the_time():
    (regime,) = analyse(table_7("efficientnet"), budget_ms=300)
    assert regime.gains == ()
    assert regime.law_by == "time"
    assert regime.next.ms <= 300
    low, high = regime.next.interval
    assert low < regime.next.gain < high


def test_the_front_has_no_network_that_a_faster_one_beats():
    (regime,) = analyse(planted(seeds=1))
    points, front = regime.points, {each.name for each in regime.front}
    for each in points:
        beaten = any(o.ms <= each.ms and o.error < each.error for o in points if o is not each)
        assert (each.name in front) is not beaten


def test_the_gain_of_an_axis_is_the_slope_of_the_planted_error():
    (regime,) = analyse(planted(noise=0.0))
    names = {each.name for each in regime.front}
    for gain in regime.gains:
        fall = doublings = 0.0
        values = {"width": WIDTHS, "depth": DEPTHS, "resolution": SIDES}[gain.axis]
        for small, large in itertools.permutations((p.size for p in regime.points), 2):
            a, b = getattr(small, gain.axis), getattr(large, gain.axis)
            is_next = values.index(b) == values.index(a) + 1
            is_pair = is_next and small._replace(**{gain.axis: b}) == large
            if is_pair and {f"{small}", f"{large}"} & names:
                fall += error_of(small) - error_of(large)
                doublings += math.log2(ms_of(large) / ms_of(small))
        assert gain.points_per_doubling == pytest.approx(fall / doublings)
        low, high = gain.interval  # seeds that agree exactly say nothing of the noise
        assert low < gain.points_per_doubling < high
    by_axis = {gain.axis: gain.points_per_doubling for gain in regime.gains}
    assert max(by_axis, key=by_axis.get) == "depth"


def test_sizes_of_one_name_have_the_same_gains_and_places_on_the_front():
    named, nameless = planted(), [replace(each, name="net") for each in planted()]
    (one,), (other,) = analyse(named), analyse(nameless)
    assert one.gains == other.gains
    rows = [points_table(each) for each in (one, other)]
    assert [row[1:] for row in rows[0]] == [row[1:] for row in rows[1]]


def test_the_next_step_is_the_candidate_with_the_most_gain_for_its_time_within_the_budget():
    done = [each for each in planted() if each.depth < 4]
    missing = {each.size for each in planted() if each.depth == 4}
    candidates = [Candidate(f"{size}", size, ms_of(size)) for size in missing]
    (regime,) = analyse(done, budget_ms=40, candidates=candidates)
    best = min((p for p in regime.points if p.ms <= 40), key=lambda point: point.error)
    assert regime.best == best.name

    def rate(size: Size) -> float:
        gain = error_of(best.size) - error_of(size)
        return gain / max(ms_of(size) - best.ms, 0.05 * best.ms)

    within = [size for size in missing if ms_of(size) <= 40]
    assert regime.next.size == max(within, key=rate)
    truth = error_of(best.size) - error_of(regime.next.size)
    low, high = regime.next.interval
    assert low - 0.3 < truth < high + 0.3
    assert all(step.ms <= 40 for step in regime.steps)


def test_another_length_than_the_targets_is_warned_of():
    short, long = analyse([*planted(epochs=10), *planted(epochs=100)])
    assert any("10 epochs, not the target's 100" in each for each in short.warnings)
    assert not any("not the target's" in each for each in long.warnings)
    (only,) = analyse(planted(epochs=10), target_epochs=350)
    assert any("350" in each for each in only.warnings)


@pytest.mark.parametrize("number", [0, -1, math.nan, math.inf])
def test_a_budget_or_a_length_that_is_not_above_0_is_refused(number):
    with pytest.raises(ValueError, match="ms an image: give a time above 0"):
        analyse(planted(), budget_ms=number)
    with pytest.raises(ValueError, match="epochs of the target: give a number above 0"):
        analyse(planted(), target_epochs=number)


def test_error_bars_are_those_of_seeds_and_images():
    trainings = planted(seeds=3, noise=0.4)
    points = points_of(trainings)
    by_hand = np.mean([np.var([t.error for t in p.trainings], ddof=1) for p in points]) ** 0.5
    assert seed_deviation(points) == pytest.approx(by_hand)
    half = points[0].bar(by_hand) / 1.96
    share = points[0].error / 100
    assert half**2 == pytest.approx(by_hand**2 / 3 + 1e4 * share * (1 - share) / 10_000)
    assert seed_deviation(points_of(planted(seeds=1))) is None


def test_neighbours_on_the_front_are_compared_image_by_image():
    rows = [
        Training(
            name=name, width=1, depth=depth, resolution=32, epochs=1, seed=0, error=error, ms=depth,
            images=8, correct=correct,
        )
        for name, depth, error, correct in (
            ("a", 1, 50.0, "11110000"), ("b", 2, 12.5, "11111110"), ("c", 3, 0.0, "11111111"),
        )
    ]  # fmt: skip
    (regime,) = analyse(rows)
    assert [each.p_value for each in regime.front] == [None, 0.25, 1.0]


def test_trainings_come_back_from_their_csv_file(tmp_path):
    path = tmp_path / "trainings.csv"
    path.write_text(write_trainings(table_7("resnet_rs")))
    assert read_trainings(path) == table_7("resnet_rs")


@pytest.mark.parametrize(
    ("line", "message"),
    [("a,1,1,32,10,0,abc,1,10", "line 2: could not"), ("a,1,1,32,10,0,200,1,10", "line 2: error")],
)
def test_a_line_of_a_csv_file_that_does_not_fit_is_named(tmp_path, line, message):
    path = tmp_path / "trainings.csv"
    path.write_text(f"name,width,depth,resolution,epochs,seed,error,ms,images\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read_trainings(path)


def test_equal_times_give_no_law_of_the_time_and_no_gain_per_time():
    rng = np.random.default_rng(0)
    same = [replace(each, ms=1 + 1e-3 * rng.random()) for each in planted()]
    (regime,) = analyse(same)
    assert regime.saturating is None
    assert regime.gains == ()
    assert any("no law of the time" in each for each in regime.warnings)
