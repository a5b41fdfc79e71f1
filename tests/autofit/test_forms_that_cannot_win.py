"""Forms of candidates that cannot win are not measured, and the choice of `fit` stays the same."""

import math
from collections import Counter

import pytest

from fullstride.autofit import times as candidate_times
from fullstride.autofit.budget import (
    CandidateTime,
    FitJob,
    fastest_of,
    is_slow,
    may_win,
    within_budget,
)
from fullstride.autofit.candidates import Candidate
from fullstride.autofit.settings import FitSettings
from fullstride.data.dataset import open_data
from fullstride.measure.budget import Budget

# ms of networks in the forms of FORMS, by one thread of a busy machine; 0: it cannot be written.
FORMS = [("onnx", "fp32"), ("onnx", "int8")]
FORMS += [("openvino", precision) for precision in ("fp32", "bf16", "int8")]
RECORDED = {
    "genet_tiny-w0.5-16": (0.051, 0.0598, 0.251, 0.237, 0.258),
    "genet_tiny-32": (0.155, 0.104, 0.596, 0.348, 0.329),
    "genet_tiny-48": (0.317, 0.21, 0.739, 0.433, 0.37),
    "genet_tiny-d2-32": (0.335, 0.175, 1.33, 0.633, 0.719),
    "genet_tiny-w1.5-24": (0.217, 0.125, 0.749, 0.471, 0.382),
    "genet_tiny-w1.5-32": (0.32, 0.154, 1.63, 0.429, 0.372),
    "genet_tiny-w2-16": (0.293, 0.182, 2.85, 0.955, 0.651),
    "resnet_rs_50-w0.5-160": (26.1, 14.3, 28.5, 16.4, 12.0),
    "resnet_rs_50-w0.5-224": (47.5, 17.5, 50.2, 26.7, 19.3),
    "resnet_rs_tiny-d2-16": (0.141, 0.149, 0, 0, 0),
    "resnet_rs_tiny-d2-24": (0.178, 0.156, 0.461, 0.399, 0.466),
    "resnet_rs_tiny-w1.5-d2-24": (0.237, 0.183, 1.07, 0.697, 0.739),
    "resnet_rs_tiny-w1.5-d2-32": (0.261, 0.202, 0.825, 0.597, 0.514),
    "resnet_rs_tiny-w2-d2-24": (0.297, 0.215, 0.872, 0.599, 0.496),
    "tresnet_m-224": (115, 34.5, 208, 108, 63.6),
    "tresnet_tiny-d2-32": (0.267, 0.219, 1.51, 0.685, 1.03),
    "tresnet_tiny-w1.5-d2-24": (0.446, 0.258, 1.09, 0.68, 0.923),
    "tresnet_tiny-w2-24": (0.361, 0.185, 0.875, 0.541, 0.618),
    "tresnet_tiny-w2-32": (0.312, 0.193, 1.0, 0.507, 0.505),
    "tresnet_tiny-w3-32": (1.19, 0.428, 4.05, 2.62, 1.43),
}


def time_of(candidate, label, ms, **fields):
    return CandidateTime(candidate=candidate, format=label[0], precision=label[1], ms=ms, **fields)


def measure_all(listed, folder, budget):
    """The times of the candidates by the stage of a fit."""
    settings = FitSettings(budget_ms=budget.ms_per_image)
    stage = candidate_times.time_candidates(
        FitJob(folder=folder, data=open_data("digits"), settings=settings), listed
    )
    while True:
        try:
            next(stage)
        except StopIteration as end:
            return end.value


def candidate_named(name):
    model, *scales, side = name.split("-")
    scale = {each[0]: float(each[1:]) for each in scales}
    width, depth = scale.get("w", 1.0), scale.get("d", 1.0)
    return Candidate(model=model, resolution=int(side), width=width, depth=depth)


@pytest.fixture
def recorded(monkeypatch):
    """Lets forms take the recorded times without writing them, and counts those that are timed."""
    count = Counter()

    class Files:
        def __init__(self, name):
            self.ms = dict(zip(FORMS, RECORDED[name], strict=True))

        def open(self, *label, **_):
            if not self.ms[label[:2]]:
                raise ValueError("cannot be written")
            count[label[:2]] += 1

    def timed(candidate, models, *_):
        ms = dict(zip(FORMS, RECORDED[candidate.name], strict=True))
        rounds = {label: dict(low=0.95 * ms[label], high=1.1 * ms[label]) for label in models}
        return {
            label: time_of(candidate.name, label, ms[label], **rounds[label]) for label in models
        }

    monkeypatch.setattr(candidate_times, "files_of", lambda candidate, *_: Files(candidate.name))
    monkeypatch.setattr(candidate_times, "timed", timed)
    monkeypatch.setattr(FitJob, "labels", property(lambda _: tuple(FORMS)))
    return count


def shipped(times, budget):
    """The most accurate form within the budget, of a tie the fastest, and the choice of each."""
    loss = {"fp32": 0.0, "bf16": 0.02, "int8": 0.3}

    def key(each):
        slow = max(RECORDED[each.candidate])  # a network that computes more is more accurate
        return math.log(slow) - loss[each.precision], -each.ms

    inside = within_budget(times, budget)
    names = {each.candidate for each in inside}
    by_name = {
        name: max((each for each in inside if each.candidate == name), key=key) for name in names
    }
    best = max(inside, key=key, default=None)
    return (best and (best.candidate, best.format, best.precision)), {
        name: (each.format, each.precision) for name, each in by_name.items()
    }


def test_with_ten_budgets_the_network_and_the_form_are_those_of_measuring_all(
    tmp_path, recorded, monkeypatch
):
    """Half of OpenVINO's files are not timed, and each network keeps its best and fastest form."""
    listed, counts = [candidate_named(name) for name in RECORDED], {}
    chosen = {}
    for prune in (True, False):
        if not prune:
            monkeypatch.setattr(candidate_times, "is_worth_timing", lambda *_: True)
        recorded.clear()
        for number, ms in enumerate((0.06, 0.12, 0.18, 0.25, 0.4, 0.7, 3.0, 15.0, 30.0, 120.0)):
            budget, folder = Budget(ms_per_image=ms), tmp_path / f"{prune}-{number}"
            times = measure_all(listed, folder, budget)
            inside = within_budget(times, budget)
            fastest = {name: (t.format, t.precision) for name, t in fastest_of(inside).items()}
            floats = {t.candidate for t in inside if t.precision != "int8"}
            chosen[prune, ms] = *shipped(times, budget), fastest, floats
        counts[prune] = recorded.copy()
    for (prune, ms), choice in chosen.items():
        assert choice == chosen[False, ms], (prune, ms)
    slow = [label for label in FORMS if label[0] == "openvino"]
    assert sum(counts[True][each] for each in slow) < 0.6 * sum(
        counts[False][each] for each in slow
    )
    assert counts[True]["onnx", "fp32"] == counts[False]["onnx", "fp32"]


def forms_of(*ms):
    """The times of a network in ONNX fp32 and int8, and in OpenVINO's int8."""
    labels = FORMS[0], FORMS[1], FORMS[4]
    return tuple(
        time_of("a", label, each, low=each, high=each)
        for label, each in zip(labels, ms, strict=False)
    )


@pytest.mark.parametrize(
    ("slow_ms", "others", "may"),
    [
        (2.0, 2, False),  # at least 2 / 1.5 of the time of the other int8 file
        (1.4, 2, True),
        (2.0, 1, True),  # one network is too few
    ],
)
def test_a_form_that_is_slow_for_other_networks_is_not_measured(slow_ms, others, may):
    known = [forms_of(2.0, 1.0, slow_ms + 0.01 * number) for number in range(others)]
    own = forms_of(2.0, 1.0)
    assert may_win(FORMS[4], own, known, longest_ms=100.0) is may
    assert may_win(FORMS[4], own, known, longest_ms=0.1) is (others < 2)


@pytest.mark.parametrize(
    ("slow_ms", "others", "first_ms", "slow"),
    [
        (1.6, 2, 2.0, True),
        (1.4, 2, 2.0, False),
        (1.6, 1, 2.0, False),  # one network is too few
        (2.3, 1, 2.0, True),  # but for a ratio that is that of two
        (1.6, 2, 9.0, False),  # and networks of other sizes say nothing
    ],
)
def test_a_format_that_is_slow_for_similar_networks_of_any_model_is_not_tried(
    slow_ms, others, first_ms, slow
):
    known = [forms_of(2.0, 1.0, slow_ms + 0.01 * number) for number in range(others)]
    assert is_slow("openvino", forms_of(first_ms)[0], known) is slow
    known.append(forms_of(2.0, 1.0, 0.9))  # nor if one network is fast in it
    assert not is_slow("openvino", forms_of(first_ms)[0], known)
