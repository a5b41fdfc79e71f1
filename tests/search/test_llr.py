"""A search: its stages, what it stores, and how it goes on after a stop."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from described_files import undescribed
from forks import Fork
from scipy.stats import spearmanr

from fullstride import cli
from fullstride.data.dataset import open_data
from fullstride.latency.devices import load_profile
from fullstride.latency.estimator import Estimator
from fullstride.nets import zoo
from fullstride.nets.blocks import Style
from fullstride.search.block_tuning import TunedScore
from fullstride.search.llr.plan import WHOLE, SearchJob, Tuning, Variant, find_master
from fullstride.search.llr.study import SEARCH
from fullstride.search.llr.tunings import model_of
from fullstride.search.settings import PAPER, SearchSettings
from fullstride.search.structures.space import net_space
from fullstride.study.driver import run_study
from fullstride.study.settings import StudyOptions
from fullstride.train.recipes.choice import RecipeChoice

PROFILE = "rtx4090-compiled"
SETTINGS = SearchSettings(
    master="genet_tiny",
    budget_ms=0.47,
    target=PROFILE,
    resolutions=(16,),
    kernel_sizes=(3,),
    samples=2,
    trainings=16,
    depth_steps=1,
    most_widths=3,
    count=20_000,
    finalists=3,
    whole=2,
    winners=1,
    tune_epochs=1.0,
)
SHORT = RecipeChoice(changes={"epochs": 1.0, "batch_size": 16})
HOW = StudyOptions(device="cpu", workers=0)


@pytest.fixture(scope="module")
def data():
    """32 images to train on and 20 each to choose by and to score on."""
    digits = open_data("digits")
    return replace(
        digits,
        train=digits.train.subset(range(32)),
        val=digits.val.subset(range(20)),
        test=digits.test.subset(range(20)),
    )


def job_of(data, settings=SETTINGS, folder=Path("unused")):
    return SearchJob(folder=folder, data=data, settings=settings, recipe=SHORT, options=HOW)


def master_score(score):
    return TunedScore(spec={}, seed=0, score=score, loss=1.0, correct="", epochs=1, seconds=1.0)


# ---- the parts


def planted_tunings(job, slope, drop, noise, rng):
    """Scores that depend on the log width of each place, below the MasterNet by `drop`."""
    design = job.design
    scores = [
        80 - drop + slope * np.log(own_width(job, row, place) / own_width(job, None, place))
        for row, place in zip(design.structures, design.places, strict=True)
    ]
    rows = zip(design.structures.tolist(), design.places.tolist(), scores, strict=True)
    return [
        Tuning(trial=f"design-{n}", structure=tuple(row), place=place, score=score + noise * draw)
        for n, ((row, place, score), draw) in enumerate(
            zip(rows, rng.standard_normal(len(scores)), strict=True)
        )
    ]


def own_width(job, row, place):
    structure = job.space.start if row is None else row
    return job.space.choices_of(np.array(structure))[place].width


def test_what_training_a_block_again_costs_is_no_gain_of_its_changes(data):
    job = job_of(data, replace(SETTINGS, samples=9, most_widths=9))
    rng = np.random.default_rng(0)
    model = model_of(job, master_score(80.0), planted_tunings(job, 2.0, 7.0, 0.05, rng))
    slopes = {(each.place, each.term): each for each in model.slopes()}
    assert model.reference == pytest.approx(80, abs=0.1)
    for place in job.space.places:
        each = slopes[place.name, "log width"]
        assert each.value == pytest.approx(2.0, abs=5 * each.standard_error)
        assert each.standard_error < 0.3
    compared = replace(job.settings, baseline="master")
    own = replace(job, settings=compared)
    wrong = model_of(own, master_score(80.0), planted_tunings(own, 2.0, 7.0, 0.05, rng))
    assert wrong.noise > 10 * model.noise, "the paper's reference takes the drop for noise"


def test_the_paper_is_one_shot_with_one_winner_and_no_control(data):
    settings = SearchSettings(preset="paper", master="masternet_1", budget_ms=1.0, target="t4-fp16")
    assert settings.method == PAPER
    assert replace(settings, winners=3).method == replace(PAPER, winners=3)
    job = job_of(data, settings)
    design = job.design
    changed = (design.structures != job.space.start).sum(axis=1)
    assert (changed == 1).all()
    # The stem has six other widths only.
    assert np.bincount(design.places).tolist() == [6, 9, 9, 9, 9, 9, 9]
    assert {each.kernel for each in job.variants} == {0}
    assert [each.resolution for each in job.variants] == [192, 224, 256]
    rng = np.random.default_rng(0)
    tunings = planted_tunings(job, 2.0, 0.0, 0.0, rng)
    model = model_of(job, master_score(80.0), tunings)
    assert model.reference == 80.0


def test_whole_trainings_say_what_tunings_do_not(data):
    """By tunings depth is worth nothing, and in whole networks a block costs three points."""
    job = job_of(data, replace(SETTINGS, samples=5, depth_steps=2, most_widths=9, whole=20))
    rng = np.random.default_rng(0)
    tunings = planted_tunings(job, 2.0, 7.0, 0.3, rng)
    depth = np.array([term == "depth" for _, term in job.space.terms])

    def true(rows):
        return 80 - 3.0 * job.space.features(rows)[:, depth].sum(axis=1)

    random, others = job.random_structures, job.space.random(rng, 100)
    whole = [
        Tuning(trial=f"whole-{n}", structure=tuple(row), place=WHOLE, score=score)
        for n, (row, score) in enumerate(zip(random.tolist(), true(random), strict=True))
    ]
    without = model_of(job, master_score(80.0), tunings).predict(others)[0]
    model = model_of(job, master_score(80.0), [*tunings, *whole])
    both = model.predict(others)[0]
    assert abs(spearmanr(without, true(others))[0]) < 0.4
    assert spearmanr(both, true(others))[0] > 0.95
    assert model.reference == pytest.approx(80, abs=2)


@pytest.mark.parametrize(
    ("master", "changes", "variants"),
    [
        ("genet_tiny", {}, [(32, 3), (32, 5)]),
        ("genet_tiny", dict(kernels="block"), [(32, 0)]),
        ("masternet_1", {}, [(s, k) for s in (192, 224, 256) for k in (3, 5)]),
        ("masternet_1", dict(resolutions=(64,), kernel_sizes=()), [(64, 0)]),
    ],
)
def test_resolutions_and_kernels_are_chosen_outside_of_the_structures(
    data, master, changes, variants
):
    settings = SearchSettings(master=master, budget_ms=1, **changes)
    job = job_of(data, settings)
    assert [*job.variants] == [Variant(*each) for each in variants]
    assert job.home in job.variants
    spec = job.spec(job.space.start, job.variants[0])
    assert spec.resolution == variants[0][0]
    kernels = {stage.kernel for stage in spec.stages}
    assert kernels == ({variants[0][1]} if variants[0][1] else kernels)


# ---- a whole search


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The folder of a search, and its events."""
    folder = tmp_path_factory.mktemp("search") / "mine"
    return folder, [*run_study(SEARCH, data, folder, SETTINGS, SHORT, HOW)]


@pytest.mark.slow
def test_a_search_ends_with_a_network_within_the_budget(whole, data):
    folder, events = whole
    assert not undescribed("A search", folder)
    results = events[-1].result
    net = zoo.load(folder / results.bundle).net
    estimator = Estimator(load_profile(PROFILE), 1)
    assert estimator(net.spec, 16) == pytest.approx(results.best.finalist.ms, rel=1e-6)
    assert results.best.finalist.ms <= 0.47
    # The space has it, and it is what the row of choices says.
    space = net_space(find_master(SETTINGS, data), depth_steps=1, most_widths=3, kernels=(3,))
    chosen = space.spec(np.array(results.best.finalist.structure), net.spec.resolution)
    assert replace(chosen, source="") == replace(net.spec, source="")
    assert results.test["images"] == 20
    assert json.loads((folder / "search.json").read_text())["val"] == results.val


@pytest.mark.slow
def test_every_training_is_a_folder_with_its_spec_its_log_and_its_result(whole):
    folder, events = whole
    design = next(each.result for each in events if each.stage == "design" and not each.line)
    further = next(each.result for each in events if each.stage == "sequential" and not each.line)
    assert len(design) + len(further) == 16
    assert [each.place for each in design if each.structure == design[0].structure] == [*range(7)]
    assert further[0].structure == design[0].structure, "the control of structures tuned whole"
    for each in (*design, *further):
        trial = folder / "trials" / each.trial
        assert each.failure == ""
        assert json.loads((trial / "result.json").read_text())["score"] == each.score
        assert (trial / "run" / "log.jsonl").exists()
        assert (trial / "spec.json").exists()


@pytest.mark.slow
def test_the_same_search_again_trains_nothing_and_ends_the_same(whole, data):
    folder, events = whole
    before = {path: path.stat().st_mtime_ns for path in folder.glob("trials/**/*")}
    again = [*run_study(SEARCH, data, folder, SETTINGS, SHORT, HOW)]
    assert not [each for each in again if each.line]
    assert again[-1].result == events[-1].result
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("trials/**/*")}
    with pytest.raises(ValueError, match="budget_ms is 0.47 there and 0.5 now"):
        [*run_study(SEARCH, data, folder, replace(SETTINGS, budget_ms=0.5), SHORT, HOW)]


@pytest.mark.slow
def test_every_result_is_shown_as_lines_and_tables(whole):
    folder, events = whole
    parts = {each.stage: each.parts for each in events if not each.line}
    for stage in ("times", "plan", "regression", "selection", "winners", "results"):
        assert parts[stage]
    lines = [line for rows in parts.values() for line in rows if isinstance(line, str)]
    assert not any("\n" in line for line in lines)
    assert any("search.json" in line for line in parts["results"])


def search(say: Callable[[str], object], data, folder: Path) -> None:
    for event in run_study(SEARCH, data, folder, SETTINGS, SHORT, HOW):
        say(f"{event.stage} {event.line}")


@pytest.mark.slow
def test_a_killed_search_goes_on_and_trains_nothing_twice(whole, data, tmp_path):
    _, events = whole
    folder = tmp_path / "killed"
    finished: dict[Path, int] = {}
    for mark in ("design-003", "refit 1", "winners"):  # in the middle of a stage, and between two
        process = Fork(search, data, folder)
        assert any(mark in line for line in process.said())
        time.sleep(0.5)
        process.kill()
        results = folder.glob("trials/*/result.json")
        now = {path: path.stat().st_mtime_ns for path in results}
        assert finished.items() <= now.items(), "a finished trial has run twice"
        finished = now
    last = [*run_study(SEARCH, data, folder, SETTINGS, SHORT, HOW)][-1].result
    expected = events[-1].result
    assert finished == {path: path.stat().st_mtime_ns for path in finished}
    assert last.best.finalist == expected.best.finalist
    assert (last.val, last.test) == (expected.val, expected.test)


# ---- the command, and errors


def test_a_dry_run_prints_the_total_cost_and_trains_nothing(tmp_path, capsys):
    words = [
        "study",
        "search",
        "digits",
        "--master",
        "genet_tiny",
        "--budget-ms",
        "0.5",
        "--dry-run",
    ]
    words += ["--target", PROFILE, "--resolutions", "16", "--device", "cpu", "--workers", "0"]
    words += ["--kernel-sizes", "3", "--most-widths", "3", "--out", str(tmp_path / "s")]
    words += ["--whole", "5"]
    assert cli.run(words) == 0
    out = capsys.readouterr().out
    assert any(line.startswith("time     about") for line in out.splitlines())
    plan = json.loads((tmp_path / "s" / "plan.json").read_text())["result"]
    count = {each["stage"]: each["trainings"] for each in plan["trainings"]}
    assert count["sequential"] == 16
    assert count["whole"] == 5
    assert count["winners"] == 2
    assert count["master"] == 1
    assert not (tmp_path / "s" / "trials").exists()


@pytest.mark.parametrize(
    ("changes", "recipe", "hint"),
    [
        ({"budget_ms": None}, {}, "--budget-ms"),
        ({"budget_ms": 1e-6}, {}, "the fastest structure takes"),
        ({"target": "rtx9999"}, {}, "rtx9999"),
        ({"master": "genet_tinny"}, {}, "genet_tiny"),
        ({"master": "resnet_rs_nowhere.json"}, {}, "resnet_rs_nowhere"),
        ({"master": "timm/resnet18"}, {}, "super-blocks"),
        ({"master": "resnet3d_50"}, {}, "resnet3d_50 takes clips"),
        ({"format": "onnx"}, {}, "--format with --target"),
        ({"measured": 40}, {}, "--measured with --target"),
        ({"final_epochs": 5}, {}, "--final-epochs is for --final"),
        ({"final": "nosuch"}, {}, "no recipe named 'nosuch'"),
        ({"next": "none"}, {}, "--trainings with --next none"),
        ({"trainings": 3}, {}, "takes 1[0-9]; give at least 1[0-9], or fewer --samples"),
        ({"regression": "paper", "whole": 3}, {}, "--whole 3"),
        ({"regression": "paper", "whole": 0}, {}, "--next thompson: .* give --next none"),
        ({"preset": "paper", "next": "greedy", "whole": 0}, {}, "--next greedy"),
        ({"target": "here", "format": "onxx"}, {}, "onnx"),
        ({}, {"resolution": 32}, "--resolutions"),
        ({}, {"seed": 3}, "--seed"),
        ({}, {"score": "loss"}, "recipe.score loss is lower for a better network"),
        ({}, {"score": "ece"}, "recipe.score ece"),
        ({"width_range": (1.5, 2.0)}, {}, "range that has 1"),
    ],
)
def test_what_cannot_be_searched_is_one_line(data, tmp_path, changes, recipe, hint):
    settings = replace(SETTINGS, **changes)
    with pytest.raises((ValueError, FileNotFoundError), match=hint) as error:
        [*run_study(SEARCH, data, tmp_path / "s", settings, RecipeChoice("", recipe), HOW)]
    assert "\n" not in str(error.value)
    assert not (tmp_path / "s" / "trials").exists()


def test_a_masternet_with_self_gates_is_refused_before_anything_is_written(data, tmp_path):
    path = tmp_path / "gated.json"
    path.write_text(replace(zoo.spec("genet_tiny"), style=Style(self_gate=True)).to_json())
    settings = replace(SETTINGS, master=str(path))
    with pytest.raises(ValueError, match=r"gated.json has self_gate, .* set it to false"):
        [*run_study(SEARCH, data, tmp_path / "s", settings, SHORT, HOW)]
    assert not (tmp_path / "s").exists()


def test_the_help_of_the_seed_is_its_own_and_a_negative_one_is_refused(capsys):
    assert cli.run(["study", "search", "--help-all"]) == 0
    page = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert page.partition("--seed INT ")[2].startswith("Seed of the samples")
    with pytest.raises(ValueError, match="seed -1: use"):
        replace(SETTINGS, seed=-1)


def test_a_choice_that_no_field_has_is_refused_with_those_it_has():
    with pytest.raises(ValueError, match="--preset 'mine': use ours or paper"):
        replace(SETTINGS, preset="mine")
    with pytest.raises(ValueError, match="--next 'gredy': use thompson or greedy or none"):
        replace(SETTINGS, next="gredy")
