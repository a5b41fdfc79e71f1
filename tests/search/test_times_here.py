"""Times on this machine: a profile fitted to a few measured networks, and selections by it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fullstride.data.dataset import open_data
from fullstride.latency.devices import CPU
from fullstride.latency.estimator import Estimator
from fullstride.nets import zoo
from fullstride.search.llr import tunings
from fullstride.search.llr.plan import DeviceTimes, MeasuredStructure, SearchJob
from fullstride.search.llr.times import MODULE, find_label, fit_profile, measure_specs
from fullstride.search.settings import SearchSettings
from fullstride.search.structures.space import net_space

FILE = ("onnx", "fp32")
# A machine that differs from the rough profile: slow depthwise convolutions, quick launches.
NUMBERS = {**CPU.inference.numbers, "depthwise": 0.08, "convolution": 0.4, "launch_us": 0.5}
MACHINE = replace(CPU, inference=replace(CPU.inference, numbers={**NUMBERS, "start_us": 20.0}))


def result_of(generator):
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            return stop.value


def test_a_profile_fitted_to_sixteen_networks_estimates_others_within_a_tenth():
    space, rng = net_space(zoo.spec("genet_tiny")), np.random.default_rng(0)
    true = Estimator(MACHINE, 1)
    specs = [space.spec(row) for row in space.random(rng, 16)]
    noise = np.exp(0.03 * rng.standard_normal(len(specs)))
    profile = fit_profile(specs, true.many(specs) * noise, 1, FILE)
    others = [space.spec(row) for row in space.random(rng, 50)]
    ratio = Estimator(profile, 1).many(others) / true.many(others)
    rough = Estimator(CPU, 1).many(others) / true.many(others)
    assert np.abs(np.log(ratio)).max() < np.log(1.15)
    assert np.abs(np.log(ratio)).mean() < np.abs(np.log(rough)).mean() / 2
    assert profile.inference.networks == 16


def test_modules_are_measured_where_no_format_is_named_so(tmp_path):
    assert find_label(MODULE) is None
    spec = replace(zoo.spec("genet_tiny"), resolution=16)
    large = replace(spec.scaled(width=2), resolution=64)
    small_ms, large_ms = (
        each.ms for each in result_of(measure_specs([spec, large], 1, None, tmp_path / "scratch"))
    )
    assert 0 < small_ms < large_ms
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def job():
    data = open_data("digits")
    settings = SearchSettings(
        master="genet_tiny",
        budget_ms=1.0,
        resolutions=(32,),
        kernel_sizes=(),
        most_widths=4,
        count=20_000,
        finalists=3,
        format="onnx",
    )
    return SearchJob(folder=Path("unused"), data=data, settings=settings)


def test_where_measured_times_exceed_the_budget_the_selection_is_repeated(job, monkeypatch):
    (variant,) = job.variants
    true, structures = Estimator(MACHINE, 1), job.space.random(np.random.default_rng(0), 12)

    def measured(job, rows):
        yield "measuring"
        return [
            MeasuredStructure(tuple(structure), variant, ms, ms, ms)
            for structure, ms in ((row, true(job.spec(row, variant))) for row, variant in rows)
        ]

    monkeypatch.setattr(tunings, "measure_structures", measured)
    # The rough profile believes that everything is quick.
    slow = {**CPU.inference.numbers, "dense": 1.3, "1x1": 1.3, "depthwise": 1.0}
    wrong = replace(CPU, inference=replace(CPU.inference, numbers=slow))
    own_ms = float(job.tables(wrong, variant)(job.space.start[None])[0])
    job = replace(job, settings=replace(job.settings, budget_ms=own_ms))
    rows = result_of(measured(job, [(tuple(row), variant) for row in structures.tolist()]))
    times = DeviceTimes(profile=wrong, measured=tuple(rows))
    model = LargerIsBetter(job.space)
    monkeypatch.setattr(tunings, "model_of", lambda *_: model)
    done = {"times": times, "master": None, "design": ()}
    chosen = result_of(tunings.select_all(job, done))
    assert all(true(job.spec(each.structure, variant)) > own_ms for each in chosen)
    assert {(each.low, each.high) for each in chosen} == {(0, 100)}  # percent, errors are 60
    done["selection"] = chosen
    inside = result_of(tunings.measure_finalists(job, done))
    assert inside
    for each in inside:
        assert each.measured
        assert each.ms == pytest.approx(true(job.spec(each.structure, variant)))
        assert each.ms <= own_ms
    tiny = replace(job, settings=replace(job.settings, budget_ms=own_ms / 1e3))
    with pytest.raises(ValueError, match="when it is measured"):
        result_of(tunings.measure_finalists(tiny, done))


def test_a_budget_that_estimates_leave_unused_is_used_after_the_measurement(job, monkeypatch):
    """The machine is twice as fast as the profile says."""
    (variant,) = job.variants
    estimates = Estimator(CPU, 1)

    def measured(job, rows):
        yield "measuring"
        return [
            MeasuredStructure(tuple(structure), variant, ms, ms, ms)
            for structure, ms in (
                (row, estimates(job.spec(row, variant)) / 2) for row, variant in rows
            )
        ]

    monkeypatch.setattr(tunings, "measure_structures", measured)
    monkeypatch.setattr(tunings, "profile_of", lambda job, measured: CPU)
    own_ms = float(job.tables(CPU, variant)(job.space.start[None])[0])
    job = replace(job, settings=replace(job.settings, budget_ms=own_ms))
    rows = [(tuple(job.space.start.tolist()), variant)]
    times = DeviceTimes(profile=CPU, measured=tuple(result_of(measured(job, rows))))
    model = LargerIsBetter(job.space)
    monkeypatch.setattr(tunings, "model_of", lambda *_: model)
    done = {"times": times, "master": None, "design": ()}
    chosen = result_of(tunings.select_all(job, done))
    inside = result_of(tunings.measure_finalists(job, {**done, "selection": chosen}))
    assert max(each.ms for each in chosen) == pytest.approx(own_ms, rel=0.1)  # as estimated
    assert max(each.ms for each in inside) == pytest.approx(own_ms, rel=0.1)  # as measured
    assert inside[0].predicted > chosen[0].predicted


class LargerIsBetter:
    """A model of the accuracy that grows with all choices."""

    def __init__(self, space):
        self.space = space

    def gains(self):
        return [np.linspace(0, 1, size) for size in self.space.sizes]

    def predict(self, rows):
        rows = np.asarray(rows)
        scores = sum(gains[rows[:, k]] for k, gains in enumerate(self.gains()))
        return 80 + scores, np.full(len(rows), 60.0)
