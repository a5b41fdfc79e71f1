"""Of the finalists of a fit the most accurate file that stays in the budget ships."""

import errno
import itertools
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from generators import drain

from fullstride.autofit import finalists as file_times
from fullstride.autofit.budget import CandidateTime, CandidateTimes, FitJob
from fullstride.autofit.candidates import Candidate
from fullstride.autofit.finalists import FileRecord, ShippedFile, forms, line_of
from fullstride.autofit.fit import ship_finalists
from fullstride.autofit.halving import Outcome
from fullstride.autofit.settings import FitSettings
from fullstride.autofit.ship import Shipment, better_by_validation, choose, doubts, ship
from fullstride.deploy.predict import open_model
from fullstride.io import writing
from fullstride.io.records import from_json, to_json
from fullstride.measure.budget import Budget
from fullstride.measure.protocols import ONLINE, CallTime
from fullstride.study.driver import run_stage, write_stage
from fullstride.tasks import find_task
from fullstride.train import run
from fullstride.train.recipes.named import DIGITS

METRIC = find_task().metric
SHORT = replace(DIGITS, epochs=2, warmup_epochs=1, batch_size=16)
CANDIDATES = tuple(
    Candidate(model="genet_tiny", resolution=side, licence="apache-2.0") for side in (16, 24)
)
NAMES = tuple(each.name for each in CANDIDATES)
LOOSE = 1e3  # ms per image
FEW = dict(formats=("onnx",), precisions=("fp32", "int8"))


def time_of(name: str, precision="fp32", ms: float = 0.1, **more) -> CandidateTime:
    return CandidateTime(candidate=name, **{"format": "onnx", **more}, precision=precision, ms=ms)


TIMES = tuple(time_of(name, precision) for name in NAMES for precision in ("fp32", "int8"))
OUTCOME = Outcome(scores=(), finalists=NAMES)


def shipping(folder, data, budget_ms=LOOSE, times=TIMES, **settings):
    """The stage that ships."""
    job = FitJob(
        folder=folder, data=data, settings=FitSettings(budget_ms=budget_ms, **FEW | settings)
    )
    found = CandidateTimes(candidates=CANDIDATES, times=tuple(times), budget=job.budget)
    return ship(job, OUTCOME, found)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, few_digits) -> Path:
    """A folder with the runs of two candidates, which have not seen the test part."""
    folder = tmp_path_factory.mktemp("fit")
    data = replace(few_digits, test=few_digits.test.subset([]))
    for each in CANDIDATES:
        recipe = replace(SHORT, resolution=each.resolution)
        list(run.train(folder / "trials" / each.name, each.model, data, recipe))
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(file_times, "ONLINE", replace(ONLINE, rounds=3, warmup_s=0, round_s=0.01))


@dataclass(frozen=True)
class Shipped:
    folder: Path
    shipment: Shipment
    read: list[str]  # names of test images in the order in which they were read
    read_before_the_end: list[str]


@pytest.fixture(scope="module")
def ended(trained, tmp_path_factory, few_digits) -> Shipped:
    """A fit that has shipped, and what it read of the test part."""
    read, reads, decode = [], {}, few_digits.test.read

    def recorded(name: str):
        read.append(name)
        return decode(name)

    data = replace(few_digits, test=replace(few_digits.test, read=recorded))
    folder = tmp_path_factory.mktemp("shipped") / "fit"
    shutil.copytree(trained, folder)
    stage = shipping(folder, data)
    while True:
        try:
            reads[next(stage)] = [*read]
        except StopIteration as end:
            return Shipped(folder, end.value, read, [*itertools.chain(*reads.values())])


@pytest.fixture
def copied(ended, tmp_path) -> Path:
    """A copy of the folder in which everything is there but the file that ships."""
    shutil.copytree(ended.folder, tmp_path / "fit")
    (tmp_path / "fit" / "model.onnx").unlink()
    return tmp_path / "fit"


@pytest.mark.parametrize("exports", [0, 1])
def test_the_same_fit_again_brings_back_a_file_that_is_gone(ended, few_digits, tmp_path, exports):
    folder = Path(shutil.copytree(ended.folder, tmp_path / "fit"))
    write_stage(folder, "shipping", ended.shipment)
    job = FitJob(folder=folder, data=few_digits, settings=FitSettings(budget_ms=LOOSE, **FEW))
    found = CandidateTimes(candidates=CANDIDATES, times=TIMES, budget=job.budget)
    done = {"training": OUTCOME, "budget": found}

    def stage() -> tuple[list[str], Shipment]:
        return drain(run_stage(folder, "shipping", Shipment, ship_finalists(job, done)))

    assert stage() == ([], ended.shipment)
    (folder / (ended.shipment.file.path if exports else "model.onnx")).unlink()
    lines, shipment = stage()
    assert len([line for line in lines if "MiB" in line]) == exports
    assert all((folder / path).exists() for path in shipment.paths)
    assert shipment.paths == ended.shipment.paths
    assert stage() == ([], shipment)


def shipped(*arguments, **settings) -> tuple[list[str], Shipment]:
    stage, lines = shipping(*arguments, **settings), []
    while True:
        try:
            lines.append(next(stage))
        except StopIteration as end:
            return lines, end.value


def test_the_file_that_ships_has_the_scores_of_its_own_outputs(ended, few_digits):
    import onnxruntime

    folder, shipment = ended.folder, ended.shipment
    assert {(each.candidate, each.precision) for each in shipment.files} == {
        (name, precision) for name in NAMES for precision in ("fp32", "int8")
    }
    best = shipment.file
    assert best.within
    assert best.measured
    assert best.low <= best.high
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    model = open_model(str(folder / "model.onnx"))
    assert (model.metadata.licence, model.metadata.input_kind) == ("apache-2.0", "pixels")
    for images, scores in ((few_digits.val, best.val), (few_digits.test, shipment.test)):
        side = best.resolution
        pixels = [
            np.asarray(images.picture(index).resize((side, side), 2))[..., None]
            for index in range(len(images))
        ]
        (rows,) = session.run(None, {"images": np.stack(pixels)})
        correct = 100 * float((rows.argmax(1) == np.array(images.targets)).mean())
        assert scores["top1"] == pytest.approx(correct, abs=5.1)  # one image by other resizing
        assert scores["images"] == len(images)
    wrong = round(len(few_digits.test) * (1 - shipment.test["top1"] / 100))
    assert len(shipment.mistakes) == min(24, wrong)
    certain = [each.probability for each in shipment.mistakes]
    assert certain == sorted(certain, reverse=True)
    assert sum(shipment.confusion.images) == len(few_digits.test)
    assert from_json(Shipment, to_json(shipment), "shipment") == shipment
    assert (folder / "model.onnx").samefile(folder / best.path)


def test_no_test_image_is_read_before_the_choice_and_each_only_once(ended, copied, few_digits):
    assert not ended.read_before_the_end
    assert sorted(ended.read) == sorted(few_digits.test.names)

    def refuse(name: str):
        raise AssertionError(f"{name} is read again")

    data = replace(few_digits, test=replace(few_digits.test, read=refuse))
    lines, shipment = shipped(copied, data)
    assert shipment == ended.shipment
    assert lines == [], "nothing is exported or measured again"


def test_a_later_call_goes_on_where_an_earlier_one_was_stopped(trained, tmp_path, few_digits):
    folder, floats = tmp_path / "fit", dict(precisions=("fp32",))
    shutil.copytree(trained, folder)
    stage = shipping(folder, few_digits, **floats)
    assert NAMES[0] in next(stage)
    stage.close()
    first = folder / "ship" / f"{NAMES[0]}_onnx_fp32.onnx"
    before = first.stat().st_mtime_ns
    lines, shipment = shipped(folder, few_digits, **floats)
    assert not any(line.startswith(NAMES[0]) for line in lines)
    assert lines[0].startswith(NAMES[1])
    assert first.stat().st_mtime_ns == before
    assert (folder / "model.onnx").exists()
    assert shipped(folder, few_digits, **floats) == ([], shipment)


def test_where_no_file_is_within_the_budget_the_fastest_ships_with_a_note(copied, few_digits):
    slow = [replace(each, ms=1e-4) for each in TIMES]
    lines, shipment = shipped(copied, few_digits, 1e-4, slow, precisions=("fp32",))
    assert sum("measuring 2 files" in line for line in lines) == 1  # far beyond it: no noise
    assert not shipment.file.within
    assert shipment.file.ms == min(each.ms for each in shipment.files)
    note = shipment.notes[0]  # on a busy machine there is another
    assert f"{shipment.file.ms:.3g}" in note
    assert note not in lines  # the closing lines of the fit have it


@pytest.mark.parametrize(
    ("rounds", "within", "calls"),
    [
        ([1.2, 1.1, 0.9], True, 3),
        ([1.2] * 5, False, 5),
        ([3.1, 0.9], True, 2),
        ([4.0], False, 1),
        ([0.9], True, 1),
    ],
)
def test_a_file_that_noise_made_slow_is_measured_again(
    copied, few_digits, monkeypatch, rounds, within, calls
):
    (copied / "ship" / "times.json").unlink()
    left, measured = list(rounds), []

    def fake(folder, paths, *_):
        measured.append([*paths])
        ms = left.pop(0)
        all_ms = {path: ms if NAMES[1] in path else 0.5 for path in paths}
        times = {path: CallTime(ms=own, low=own, high=own) for path, own in all_ms.items()}
        return file_times.FileTimes(times=times, measurements=1, environment={})

    monkeypatch.setattr(file_times, "measure_files", fake)
    monkeypatch.setattr(file_times, "PAUSE_S", 0)
    _, shipment = shipped(copied, few_digits, 1.0, precisions=("fp32",))
    assert {each.candidate: each.within for each in shipment.files}[NAMES[1]] is within
    assert [len(paths) for paths in measured] == [2] + [1] * (calls - 1), "only the one in doubt"


def test_a_doubt_about_the_file_of_two_budgets_is_said_once(copied, few_digits, monkeypatch):
    monkeypatch.setattr("fullstride.autofit.ship.doubts", lambda file, _: [f"doubt {file.path}"])
    _, shipment = shipped(copied, few_digits, (LOOSE, 0.9 * LOOSE), precisions=("fp32",))
    assert len(shipment.smaller) == 1
    assert shipment.notes == (f"doubt {shipment.file.path}",)


def test_files_for_a_device_that_is_not_here_have_estimates(copied, few_digits):
    times = [
        time_of(name, "fp16", ms, low=0.8 * ms, high=high, measured=False, format="")
        for name, ms, high in zip(NAMES, (0.2, 0.4), (0.4, 0.9), strict=True)
    ]
    how = dict(target="t4", formats=(), precisions=())
    _, shipment = shipped(copied, few_digits, 0.5, times, **how)
    assert {(each.format, each.precision) for each in shipment.files} == {
        ("onnx", precision) for precision in ("fp16", "fp32", "int8")
    }
    assert not any(each.measured for each in shipment.files)
    assert {each.ms for each in shipment.files if each.precision == "fp16"} == {0.2, 0.4}
    assert (shipment.file.candidate, shipment.file.precision) == (NAMES[0], "fp16")
    assert shipment.environment["profile"] == "t4"
    _, shipment = shipped(copied, few_digits, 0.5, times, maybe=True, **how)
    assert {each.candidate for each in shipment.files if each.within} == set(NAMES)


def test_a_full_disk_leaves_no_half_of_a_file(copied, few_digits, monkeypatch):
    sync = writing._sync

    def full(path: Path):
        if ".model.onnx." in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        sync(path)

    monkeypatch.setattr(writing, "_sync", full)
    with pytest.raises(OSError, match="No space left") as refused:
        shipped(copied, few_digits, precisions=("fp32",))
    assert refused.value.filename == str(copied / "model.onnx")
    assert not [each for each in copied.iterdir() if "model" in each.name]
    monkeypatch.setattr(writing, "_sync", sync)
    shipped(copied, few_digits, precisions=("fp32",))
    assert (copied / "model.onnx").exists()


def test_what_cannot_be_exported_is_one_line(copied, few_digits):
    slow = [replace(each, ms=2e3) for each in TIMES]
    with pytest.raises(ValueError, match="no format and precision is left") as refused:
        shipped(copied, few_digits, times=slow)
    assert "\n" not in str(refused.value)


def record(candidate: str, precision: str, ms: float, correct: str, within: bool = True):
    scores = {"top1": 100 * correct.count("1") / len(correct)}
    file = ShippedFile(
        candidate=candidate,
        path=f"ship/{candidate}_{precision}",
        format="onnx",
        precision=precision,
        ms=ms,
        val=scores,
        within=within,
    )
    return FileRecord(file=file, correct=correct, seconds=0)


ALL, MOST, FEWER = "1" * 1000, "0" * 2 + "1" * 998, "0" * 30 + "1" * 970


@pytest.mark.parametrize(
    ("files", "best"),
    [
        ([record("a", "fp32", 2.0, ALL), record("a", "int8", 1.0, MOST)], 1),  # a tie
        (
            [record("a", "fp32", 2.0, ALL), record("a", "int8", 1.0, FEWER)],
            0,
        ),
        ([record("a", "fp32", 2.0, FEWER), record("b", "int8", 3.0, ALL)], 1),  # larger, in int8
        ([record("a", "fp32", 2.0, FEWER), record("b", "int8", 3.0, ALL, False)], 0),
        ([record("a", "fp32", 2.0, ALL, False), record("b", "int8", 1.9, FEWER, False)], 1),
        # int8 costs 3 points; 5 of 500 lost and none won: p is 0.06, but the difference is 1 point
        ([record("a", "fp32", 2.0, "1" * 500), record("a", "int8", 1.0, "0" * 5 + "1" * 495)], 0),
    ],
)
def test_the_most_accurate_file_within_the_budget_ships_and_of_ties_the_faster(files, best):
    assert choose(files, METRIC) == best


def test_few_images_do_not_choose_a_faster_network_and_a_line_says_so():
    """45 of 50 images are right and 44 other ones; of a hundred times as many as well."""
    fast, slow = "0" * 5 + "1" * 45, "1" * 20 + "0" * 6 + "1" * 24
    for copies, best in ((1, 1), (100, 0)):
        fast_file = record("fast", "int8", 1.0, fast * copies)
        files = [fast_file, record("slow", "int8", 2.0, slow * copies)]
        assert choose(files, METRIC) == best
        lines = better_by_validation(files, files[best].file, METRIC)
        assert len(lines) == best
        for line in lines:
            assert re.search("fast_int8 has top-1 90.00 %.*slow_int8 top-1 88.00 %", line)


def test_layers_that_stay_in_float_are_said_with_the_file():
    plain = record("a", "int8", 1.0, ALL).file
    mixed = replace(plain, float_layers=("stem.conv", "task_head.classes"))
    said = ["ship/a_int8 has layers in float: stem.conv, task_head.classes"]
    assert [doubts(each, Budget(ms_per_image=2.0)) for each in (plain, mixed)] == [[], said]
    line = line_of(FileRecord(file=mixed, correct=ALL, seconds=1.0), METRIC)
    assert "2 layers in float" in line


BUDGET = Budget(ms_per_image=1.0)


def test_programs_ship_only_if_they_are_named():
    times = [time_of("a", format=name) for name in ("onnx", "openvino", "aoti")]
    usual = forms(FitSettings(), BUDGET, times)
    assert ("onnx", "fp32") in usual
    assert not any(format == "aoti" for format, _ in usual)
    assert forms(FitSettings(formats=("aoti",)), BUDGET, times) == [("aoti", "fp32")]


def test_of_a_network_that_was_timed_in_its_first_form_alone_all_forms_are_exported(
    copied, few_digits
):
    once = [time_of(name) for name in NAMES]
    for times, precisions in (
        (once, {"fp32"}),
        ([replace(each, first_s=0.1) for each in once], {"fp32", "int8"}),
    ):
        _, shipment = shipped(copied, few_digits, times=times)
        assert {each.precision for each in shipment.files} == precisions


def test_forms_that_were_too_slow_are_not_exported():
    times = [time_of("a", ms=1.2), time_of("a", "int8", 0.6), time_of("a", "fp16", 0.5)]
    times += [time_of("a", "int8", 0.9, format="openvino")]
    assert forms(FitSettings(), BUDGET, times) == [("onnx", "int8")], "no fp16 without a GPU"
    settings = FitSettings(formats=("onnx",), precisions=("fp16", "fp32"))
    halves = forms(settings, BUDGET, times)
    assert halves == [("onnx", "fp16")]
