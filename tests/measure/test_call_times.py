"""Times of calls: percentiles by hand, and measurements that something disturbs."""

from dataclasses import replace

import pytest

from fullstride.measure.environment import Environment
from fullstride.measure.protocols import ATTEMPTS, MEDIANS, Measurement, call_time, quiet_times
from fullstride.nets import zoo
from fullstride.search.llr import times as times_here

ROUNDS = MEDIANS.rounds


def measurement(name: str, ms: list[float], batch: int = 1) -> Measurement:
    """With one call in each round."""
    return Measurement(
        name=name,
        protocol=replace(MEDIANS, batch=batch, resolution=32),
        images_per_s=1000 * batch / sorted(ms)[len(ms) // 2],
        spread=0.0,
        samples=tuple(ms),
        precision="fp32",
        layout="nchw",
        compiled=False,
        environment=Environment.here(),
    )


def result_of(work):
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value


def test_the_time_of_an_image_is_a_percentile_of_the_calls():
    row = measurement("net", [4.0] * (ROUNDS - 1) + [12.0], batch=4)
    assert call_time(row).ms == 1.0
    assert (call_time(row).low, call_time(row).high) == (1.0, pytest.approx(3 - 2 * 0.35))
    assert call_time(row, 100).ms == 3.0


def test_the_interval_of_a_time_contains_it_however_few_rounds_there_are():
    base = measurement("net", [1.0] * 9)
    # the interpolated interval of the first one would be 5.9 to 9.2, and the median is 5.1
    for samples in (
        [5.0, 5.0, 5.1, 9.2, 5.1, 9.3, 5.1, 9.2, 9.2],
        [1.0] * 3 + [2.0] * 3 + [9.0] * 3,
    ):
        row = replace(base, samples=samples, protocol=replace(base.protocol, rounds=3))
        time = call_time(row)
        assert time.low <= time.ms <= time.high


def test_a_measurement_is_repeated_while_the_machine_is_busy_and_the_shortest_time_stays():
    uneven = [1.0, 9.0] * (ROUNDS // 2)
    runs = [[1.5] * ROUNDS, uneven, uneven]
    slow = iter([(7.0, runs[1]), (8.0, runs[2]), (9.0, runs[0])])

    def measure():
        large, small = next(slow)
        return [measurement("large", [large * 10] * ROUNDS), measurement("small", small)]

    times = quiet_times(measure)
    assert times["large"].ms == 70
    assert times["small"].ms == 1.5
    assert next(slow, None) is None
    assert len(runs) == ATTEMPTS


def test_networks_are_measured_in_several_passes(monkeypatch, tmp_path):
    """In the first a program beside makes all of the second group slow."""
    count = times_here.GROUP + 1
    passes = dict[str, int]()

    def prepared(specs, batch, label, folder):
        def measure():
            rows = []
            for name in specs:
                number = passes[name] = passes.get(name, 0) + 1
                slow = 3 if name == str(count - 1) and number == 1 else 1
                rows.append(measurement(name, [slow * (1.0 + int(name))] * ROUNDS))
            return rows

        return measure

    monkeypatch.setattr(times_here, "prepared", prepared)
    monkeypatch.setattr(times_here, "PAUSE_S", 0)
    work = times_here.measure_specs([zoo.spec("genet_tiny")] * count, 1, None, tmp_path / "scratch")
    times = result_of(work)
    assert [each.ms for each in times] == [1.0 + number for number in range(count)]
