"""The page of a fit shows its numbers by the names of what they are, whatever is missing."""

import json
import pickle
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from fullstride.autofit.budget import CandidateTime
from fullstride.autofit.candidates import Candidate
from fullstride.autofit.data_report import DataReport, Pair
from fullstride.autofit.finalists import ShippedFile
from fullstride.autofit.halving import Outcome, RungScore
from fullstride.autofit.plan import FitPlan, Rung
from fullstride.autofit.results import (
    FitResults,
    closing_lines,
    elimination_reason,
    fit_json,
    other_scores,
    point,
    render,
    shares_of_budget,
    write_results,
)
from fullstride.autofit.ship import BudgetFile, Shipment
from fullstride.data.dataset import open_data
from fullstride.deploy.comparison import Mistake
from fullstride.io.records import to_json
from fullstride.measure.budget import Budget
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.report import plots
from fullstride.report.page import worst_classes
from fullstride.tasks.task import Calibration, ConfusionMatrix

DATA = open_data("digits")
ROW = {"epochs": 3, "lr": 0.1, "images_per_s": 9.0, "data_wait_fraction": 0.0, "skipped": {}}
SMALL, LARGE, SLOW = (
    Candidate(model=model, resolution=side, family=family, top1=top1, licence="apache-2.0")
    for model, side, family, top1 in (
        ("timm/small", 16, "small", 70.25),
        ("timm/large", 24, "large", 80.5),
        ("timm/slow", 32, "large", 84.75),
    )
)


def times(*pairs: tuple[Candidate, float]) -> tuple[CandidateTime, ...]:
    return tuple(
        CandidateTime(candidate=each.name, format="onnx", precision="fp32", ms=ms)
        for each, ms in pairs
    )


def rung(candidate: Candidate, number: int, top1: float) -> RungScore:
    return RungScore(
        candidate=candidate.name,
        rung=number,
        epochs=number,
        scores={"top1": top1, "images": 200},
        correct="1" * 200,
        seconds=2.5,
    )


def file(candidate: Candidate, precision: str, ms: float, top1: float) -> ShippedFile:
    name = f"ship/{candidate.name}_onnx_{precision}.onnx"
    return ShippedFile(
        candidate=candidate.name,
        path=name,
        format="onnx",
        precision=precision,
        ms=ms,
        low=0.9 * ms,
        high=1.2 * ms,
        val={"top1": top1, "images": 200},
        within=ms <= 2,
        resolution=candidate.resolution,
        size_mib=3.25,
        runtime="ONNX Runtime",
    )


FILES = (file(LARGE, "fp32", 1.9, 93.0), file(LARGE, "int8", 0.9, 91.5))
RESULTS = FitResults(
    data_name="digits",
    task="classify",
    budget=Budget(ms_per_image=2.0),
    percentile=50,
    settings={"budget_ms": 2.0},
    data=DataReport(
        images={"train": 900, "val": 200, "test": 150},
        classes=10,
        smallest=("3", 80),
        largest=("7", 99),
        sides=(8, 8, 8),
        channels=1,
        unreadable={"a/broken.png": "it is cut off"},
        across_splits=(Pair(names=("a/1", "b/2"), splits=("train", "test"), classes=("1", "1")),),
        across_classes=(),
        notes=("images are grey",),
    ),
    candidates=(SMALL, LARGE, SLOW),
    times=times((SMALL, 0.5), (LARGE, 1.5), (SLOW, 3.5)),
    plan=FitPlan(
        candidates=(SMALL.name, LARGE.name),
        left_out={},
        epochs=3,
        rungs=(Rung(number=1, epochs=1, candidates=2, keep=1),),
        times={},
        train_s=60.0,
        ship_s=30.0,
    ),
    outcome=Outcome(
        scores=(rung(SMALL, 1, 81.25), rung(LARGE, 1, 80.75), rung(LARGE, 3, 93.0)),
        finalists=(LARGE.name,),
    ),
    shipment=Shipment(
        files=FILES,
        best=0,
        test={"top1": 92.0, "images": 150, "macro_f1": 91.0},
        split="test",
        bundle=f"trials/{LARGE.name}/bundle",
        environment={"device": "a <processor>", "cuda": None},
        model="model.onnx",
        confusion=ConfusionMatrix(10, (0, 1, 2), (0, 1, 1), (60, 78, 12)),
        calibration=Calibration((0, 50, 100), (0, 30, 96), (0.0, 27.5, 95.0)),
        mistakes=(
            Mistake(DATA.test.names[3], DATA.classes[1], DATA.classes[7], 0.987),
            Mistake("no longer there.png", DATA.classes[1], DATA.classes[7], 0.5),
        ),
    ),
    seconds={"data": 1.5, "training": 75.0, "shipping": 25.0},
)


class Parsed(HTMLParser):
    """The text of a page, its sections, and the tags that are open at the end."""

    VOID = ("meta", "br", "img", "link", "input", "path", "use", "rect", "circle")

    def __init__(self, html: str):
        super().__init__()
        self.open, self.text, self.links = [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A fit folder with the logs and the bundle that the page reads."""
    folder = tmp_path_factory.mktemp("fit")
    torch.manual_seed(0)
    for each in (SMALL, LARGE):
        trial = folder / "trials" / each.name
        trial.mkdir(parents=True)
        rows = [ROW | {"epoch": n, "loss": 2 / n, "val/top1": 70.0 + n} for n in (1, 2, 3)]
        (trial / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    net = zoo.create("genet_tiny", classes=10, in_channels=1, resolution=24)
    pre = Preprocessing(resolution=24, mean=(0.3,), std=(0.3,), crop=1.0)
    bundle = Bundle(net.eval(), name="large", classes=DATA.classes, preprocessing=pre)
    bundle.save(folder / RESULTS.shipment.bundle)
    return folder


@pytest.fixture(autouse=True, scope="module")
def _equal_figures_are_drawn_once():
    """Most pages have the same curves and matrix, and drawing is most of the time of a page."""
    drawn: dict[tuple[str, bytes], str] = {}

    def once(name: str):
        draw = getattr(plots, name)

        def figure(*shown) -> str:
            key = name, pickle.dumps(shown)
            if key not in drawn:
                drawn[key] = draw(*shown)
            return drawn[key]

        return figure

    with pytest.MonkeyPatch.context() as patch:
        for name in ("heat_map", "learning_curves", "reliability"):
            patch.setattr(plots, name, once(name))
        yield


def headings(html: str) -> list[str]:
    return re.findall("<h2>(.*?)</h2>", html)


def test_the_page_names_each_number_by_what_it_is(folder):
    html = render(folder, DATA, RESULTS)
    page = Parsed(html)
    assert not page.open
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert "large-24 as onnx fp32: test top-1 92.00 % (95 % interval 86.5 to 95.4)" in page.text
    assert (
        "1.90 ms an image, p50 of calls (batch 1, a <processor>); the budget is 2 ms" in page.text
    )
    assert "validation top-1 91.50 %" in page.text, "the best file within half the time"
    assert "published ImageNet top-1 84.8 %" in page.text, "within twice the time"
    for text in ("a/broken.png: it is cut off", "a/1 (train), b/2 (test)", "images are grey"):
        assert text in page.text
    assert "1.2 min" in page.text or "75.0 s" in page.text, "training took 75 s"
    assert headings(html)[0] == "Accuracy of the files against their time"
    assert html.count("<img") == 2, "the mistake whose picture is there, and what speaks for it"
    assert "The expected calibration error is 2.3 %" in page.text


def test_the_page_marks_the_files_that_ship_for_smaller_budgets(folder):
    assert render(folder, DATA, RESULTS).count(", ships</small>") == 1
    small = BudgetFile(budget_ms=1.0, best=1, model="model-1ms.onnx", test={"top1": 90.0})
    results = replace(RESULTS, shipment=replace(SHIPMENT, smaller=(small,)))
    assert render(folder, DATA, results).count(", ships</small>") == 2
    marked = [(each.ships, each.test) for each in (point(file, results) for file in FILES)]
    assert marked == [(True, 92.0), (True, 90.0)]
    assert [point(file, RESULTS).ships for file in FILES] == [True, False]


def test_each_candidate_has_its_end():
    assert elimination_reason(LARGE.name, RESULTS) == "finalist 1 of 1"
    assert elimination_reason(SMALL.name, RESULTS) == "out after rung 1"
    assert elimination_reason(SLOW.name, RESULTS) == "not within the budget"
    outcome = replace(RESULTS.outcome, failures={SMALL.name: "out of memory"})
    taught = replace(outcome, scores=(*outcome.scores, rung(SLOW, 2, 95.0)))
    results = replace(RESULTS, outcome=taught)
    assert elimination_reason(SMALL.name, results) == "out of memory"
    assert "teacher" in elimination_reason(SLOW.name, results)


def test_candidates_that_were_not_tried_are_counted_with_the_reason(folder):
    reason = "not measured: 20 others are more promising"
    slow = replace(RESULTS.times[2], ms=None, measured=False, left_out=reason)
    plan = replace(RESULTS.plan, left_out={SMALL.name: "no time"})
    results = replace(RESULTS, times=(*RESULTS.times[:2], slow), plan=plan)
    assert results.left_out == {SLOW.name: reason, SMALL.name: "no time"}
    assert elimination_reason(SLOW.name, results) == reason
    assert f"Left out, 1 of 3: {reason}." in Parsed(render(folder, DATA, results)).text
    assert fit_json(results)["left_out"] == results.left_out
    assert "Left out" not in render(folder, DATA, RESULTS)


def test_problems_are_counted_in_full_where_only_the_first_are_listed(folder):
    report = replace(REPORT, totals={"unreadable": 1234, "across_splits": 5678})
    page = Parsed(render(folder, DATA, replace(RESULTS, data=report))).text
    assert "(1,234)" in page
    assert "(5,678)" in page


def test_half_and_twice_the_time_buy_what_fits():
    half, whole, twice = shares_of_budget(RESULTS)
    assert (half.file, half.trained, half.published) == (1, SMALL.name, None)
    assert (whole.file, whole.trained, whole.published) == (0, LARGE.name, None)
    assert (twice.file, twice.published) == (0, SLOW.name)


def test_of_files_with_equal_scores_the_fastest_is_the_best():
    files = tuple(file(LARGE, name, ms, 93.0) for name, ms in (("fp32", 1.9), ("int8", 0.9)))
    rows = shares_of_budget(replace(RESULTS, shipment=replace(RESULTS.shipment, files=files)))
    assert [each.file for each in rows] == [1, 1, 1]


def test_the_page_claims_a_score_on_test_images_only_where_there_is_one(folder):
    untested = replace(RESULTS, shipment=replace(RESULTS.shipment, test={}, split="val"))
    claim = "its score on the test images was measured once"
    assert claim in Parsed(render(folder, DATA, RESULTS)).text
    assert claim not in Parsed(render(folder, DATA, untested)).text


def test_the_headline_has_a_loss_with_the_digits_of_other_pages():
    test = dict(top1=90.0, loss=0.2749833, ece=7.648, images=24)
    shipment = replace(RESULTS.shipment, test=test, split="test")
    assert other_scores(replace(RESULTS, shipment=shipment)) == "loss 0.2750, ECE 7.6 %"


CLASSES = tuple(f"class {number}" for number in range(40_000))
SHIPMENT, REPORT = RESULTS.shipment, RESULTS.data
ESTIMATES = tuple(replace(each, measured=False) for each in FILES)
NO_ESTIMATE = replace(ESTIMATES[1], ms=None, low=None, high=None, within=False)
FAILED = replace(FILES[1], path="", ms=None, low=None, high=None, failure="no such operator")


@pytest.mark.parametrize(
    ("shipment", "words"),
    [
        (dict(files=FILES[:1]), []),
        (dict(test={}, split="val"), ["validation top-1 93.00 %", "by which it was chosen"]),
        (dict(files=(ESTIMATES[0], NO_ESTIMATE)), ["estimated, 90 % interval", "no estimate"]),
        (dict(files=(FILES[0], FAILED)), ["no such operator"]),
        (dict(confusion=None, calibration=None, mistakes=()), []),
        (dict(notes=("no file is within <2 ms>",)), ["no file is within <2 ms>"]),
        (dict(files=(replace(FILES[0], within=False),)), []),
    ],
)
def test_the_page_stands_whatever_is_missing(folder, shipment, words):
    results = replace(RESULTS, shipment=replace(SHIPMENT, **shipment))
    page = Parsed(render(folder, DATA, results))
    assert not page.open
    for each in words:
        assert each in page.text


def test_small_lines_are_apart_from_what_they_stand_under_where_styles_are_not_read(folder):
    html = render(folder, DATA, RESULTS)
    assert f"truth: {DATA.classes[1]} {DATA.test.names[3]}" in Parsed(html).text
    assert html.count("<small>") > 10
    assert not re.search(r"\S<small>", html)


def test_many_classes_have_no_matrix_and_a_table_of_the_worst(folder):
    matrix = ConfusionMatrix(40_000, tuple(range(500)), (0,) * 500, (1,) * 500)
    table = worst_classes(matrix.by_class(CLASSES))
    shipment = replace(SHIPMENT, confusion=matrix, class_table=table)
    results = replace(RESULTS, shipment=shipment)
    html = render(folder, replace(DATA, classes=CLASSES), results)
    assert "50 of 40000 classes" in html
    assert "Confusion matrix" not in html
    assert len(html) < 2_000_000


def test_data_without_problems_and_without_trials_have_a_page(tmp_path, folder):
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / LARGE.name).symlink_to(folder / "trials" / LARGE.name)
    clean = replace(REPORT, unreadable={}, across_splits=(), notes=())
    results = replace(RESULTS, data=clean, outcome=replace(RESULTS.outcome, scores=()))
    html = render(tmp_path, DATA, results)
    assert "no picture in two splits" in html
    assert "Learning curves" not in headings(html)


def test_fit_json_has_the_numbers_of_all_stages(folder):
    path = write_results(folder, DATA, RESULTS)
    assert path.name == "report.html"
    data = json.loads((folder / "fit.json").read_text())
    assert data == json.loads(to_json(fit_json(RESULTS)))
    assert data["shipment"]["test"]["top1"] == 92.0
    assert data["times"][2]["ms"] == 3.5
    assert data["plan"]["total_s"] == 90.0
    assert data["outcome"]["scores"][0]["scores"]["top1"] == 81.25
    assert data["budget"]["budget_ms"] == 2.0
    assert data["seconds"]["training"] == 75.0
    assert (folder / "files.png").read_bytes().startswith(b"\x89PNG")
    write_results(folder, DATA, RESULTS)  # in place of the earlier ones


def test_masks_stand_beside_the_score_of_an_answer_that_ignores_the_images(tmp_path):
    test = dict(miou=8.75, miou_constant=8.5, images=24)
    files = tuple(replace(each, val=test) for each in FILES)
    shipment = replace(SHIPMENT, metric="miou", files=files, test=test, mistakes=())
    scores = tuple(replace(each, scores=test) for each in RESULTS.outcome.scores)
    outcome = replace(RESULTS.outcome, scores=scores)
    report = replace(REPORT, smallest=("", 0), largest=("", 0))  # targets are no classes
    results = replace(RESULTS, task="segment", data=report, shipment=shipment, outcome=outcome)
    line = "the most frequent class for all pixels has mIoU 8.50 %"
    assert line in closing_lines(results, Path("runs/mine"))
    text = Parsed(render(tmp_path, DATA, results)).text
    assert line in text
    of_classes = replace(results, data=REPORT)
    assert "smallest class" in Parsed(render(tmp_path, DATA, of_classes)).text
    assert "smallest class" not in text
    assert "largest class" not in text


def test_the_last_lines_name_the_file_and_the_command_that_predicts_with_it():
    lines = closing_lines(RESULTS, Path("runs/mine"))
    assert "95 % interval 86.5 to 95.4" in lines[0]
    assert "1.90 ms" in lines[1]
    assert lines[-2].startswith(f"runs/mine/trials/{LARGE.name}/bundle: its network")
    assert lines[-1] == "fullstride predict runs/mine/model.onnx PICTURES"
    spaced = closing_lines(RESULTS, Path("my runs/mine"))[-1]
    assert spaced == "fullstride predict 'my runs/mine/model.onnx' PICTURES"
    program = replace(FILES[0], format="aoti")
    results = replace(RESULTS, shipment=replace(SHIPMENT, files=(program,)))
    assert closing_lines(results, Path("runs/mine"))[-1].endswith("--trust")
