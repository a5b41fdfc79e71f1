"""benchmarks/study.py: rows that follow the recipes, resuming, tables that flag what is worse."""

import json
from dataclasses import asdict, replace
from importlib import import_module
from math import isfinite

import pytest

from fullstride.measure.environment import Environment
from fullstride.nets.network import Network
from fullstride.train.recipes.named import RECIPES

study = import_module("study")

ADAPTED = {
    "epochs",
    "batch_size",
    "lr",
    "warmup_epochs",
    "ema_decay",
    "teacher",
    "resolution",
    "crop",
    "fit",
}
ADAPTED |= {"scale", "hflip_prob"}
PROTOCOL = {"short_epochs": 1, "long_epochs": 2, "train": 1037, "val": 260, "test": 500}


@pytest.mark.parametrize("name", RECIPES)
def test_the_miniature_of_a_recipe_keeps_all_that_distinguishes_it(name):
    published = RECIPES[name]
    small = study.miniature(published, short_epochs=24, long_epochs=93)
    changed = {
        field for field, value in asdict(published).items() if getattr(small, field) != value
    }
    assert changed <= ADAPTED
    assert bool(small.ema_decay) == bool(published.ema_decay)
    assert bool(small.teacher) == bool(published.teacher)
    assert small.warmup_epochs / small.epochs == pytest.approx(
        published.warmup_epochs / published.epochs
    )
    ratio = small.batch_size / published.batch_size
    factor = ratio if published.optimizer == "sgd" else ratio**0.5
    assert small.lr == pytest.approx(study.RATE * published.lr * factor)
    assert small.epochs == (24 if published.epochs <= 90 else 93)


def test_each_row_of_the_study_changes_one_thing_of_the_row_above():
    rows = [row for row in study.rows(24, 93) if row.table == study.STUDY]
    steps = []
    for above, row in zip(rows, rows[1:], strict=False):
        assert row.against == above.name
        before, after = asdict(above.recipe), asdict(row.recipe)
        steps.append({name for name in after if after[name] != before[name]})
        if row.network != above.network:
            steps[-1].add("network")
    assert steps == [
        {"schedule"},
        {"epochs", "warmup_epochs"},
        {"ema_decay"},
        {"label_smoothing"},
        {"drop_path", "drop_path_by"},
        {"rand_form", "rand_layers", "rand_magnitude"},
        {"dropout"},
        {"weight_decay"},
        {"network"},
        {"network"},
    ]


def test_the_networks_of_the_study_differ_by_squeeze_and_excitation_and_by_resnet_d_alone():
    plain, squeezed, d = (
        {name: tuple(value.shape) for name, value in Network(spec).state_dict().items()}
        for spec in (study.RESNET, study.SQUEEZED, study.RESNET_D)
    )
    assert {name for name in squeezed if ".se." not in name} == set(plain)
    assert plain.items() < squeezed.items()
    differ = {name for name in {**squeezed, **d} if squeezed.get(name) != d.get(name)}
    assert differ
    assert all(
        name.startswith("stem.") for name in differ
    )  # the shortcuts' averages have no weights
    assert study.RESNET_D.style.average_shortcut
    assert not study.SQUEEZED.style.average_shortcut


def test_the_recipes_are_compared_on_one_network_for_equally_long():
    rows = [row for row in study.rows(24, 93) if row.table == study.FAMILIES]
    assert len({row.network for row in rows}) == 1
    assert {row.recipe.epochs for row in rows} == {93}
    plain, *others = rows
    assert all(row.against == plain.name for row in others)
    assert (plain.recipe.schedule, plain.recipe.scale, plain.recipe.ema_decay) == (
        "steps",
        (1.0, 1.0),
        0.0,
    )


@pytest.fixture(scope="module")
def two_rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "study.json"
    rows = study.rows(1, 2)[:2]
    return out, rows, list(study.study(out, rows, PROTOCOL, seeds=2, processes=2))


@pytest.fixture(scope="module")
def written_rows(tmp_path_factory):
    """The file of a study as `two_rows` has it, with scores of no training."""
    out = tmp_path_factory.mktemp("written") / "study.json"
    environment = asdict(Environment.here())
    scores = {
        seed: {"val": val, "test": test, "cpu_s": 1.5, "commit": environment["commit"]}
        for seed, val, test in (("0", 91.2, 88.4), ("1", 90.0, 89.2))
    }
    rows = study.rows(1, 2)[:2]
    entries = [study.as_json(row, scores) for row in rows]
    result = {"protocol": PROTOCOL, "environment": environment, "rows": entries}
    out.write_text(json.dumps(result, indent=1) + "\n")
    return out, rows


@pytest.mark.slow
def test_the_file_of_a_study_has_the_form_that_other_tests_write(two_rows, written_rows):
    trained, written = (json.loads(out.read_text()) for out, *_ in (two_rows, written_rows))
    for row in (*trained["rows"], *written["rows"]):
        row["scores"] = {
            seed: {name: type(value) for name, value in score.items()}
            for seed, score in row["scores"].items()
        }
    del trained["environment"]["date"], written["environment"]["date"]
    assert trained == written


@pytest.mark.slow
def test_a_study_keeps_every_score_and_computes_none_twice(two_rows):
    out, rows, lines = two_rows
    assert len(lines) == 4
    result = json.loads(out.read_text())
    assert [row["name"] for row in result["rows"]] == ["ResNet", "+ cosine schedule"]
    for row in result["rows"]:
        assert set(row["scores"]) == {"0", "1"}
        assert all(
            isfinite(score[part]) for score in row["scores"].values() for part in ("val", "test")
        )
    assert list(study.study(out, rows, PROTOCOL, seeds=2, processes=2)) == []


@pytest.mark.slow
def test_a_row_is_trained_again_only_where_its_recipe_or_network_is_another(two_rows):
    out, (first, _), _ = two_rows
    row = json.loads(out.read_text())["rows"][0]
    assert study.reusable_scores(row, first, out) == row["scores"]
    assert (
        study.reusable_scores(row, replace(first, recipe=replace(first.recipe, lr=0.7)), out) == {}
    )
    assert study.reusable_scores(row, replace(first, network=study.RESNET_D), out) == {}
    del row["recipe"]["dropout"]  # as a file from before a field was added
    assert study.reusable_scores(row, first, out) == row["scores"]


def test_a_file_with_a_study_of_other_lengths_is_refused_and_stays(written_rows):
    out, rows = written_rows
    before = out.read_text()
    with pytest.raises(
        ValueError, match=r"is a study with .*'long_epochs': 2.*: give another --out"
    ):
        list(study.study(out, rows, {**PROTOCOL, "long_epochs": 93}, seeds=2, processes=2))
    assert out.read_text() == before


def test_the_table_is_printed_again_from_its_file(written_rows, capsys):
    out, _ = written_rows
    study.main(["--table", str(out)])
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "+ cosine schedule" in line]
    _, val, test, change, published = [cell.strip() for cell in line.strip("|").split("|")]
    assert published == "79.3"
    for cell in (val, test):
        mean, deviation = cell.split(" ± ")
        assert isfinite(float(mean))
        assert isfinite(float(deviation))
    assert isfinite(float(change.removesuffix(" (worse)")))


def test_a_row_is_marked_where_it_is_worse_by_more_than_the_spread():
    def scores(*values):
        return study.Summary.of(
            {str(seed): {"test": value} for seed, value in enumerate(values)}, "test"
        )

    assert str(scores(97.0, 98.0, 99.0)) == "98.00 ± 1.00"
    assert (
        study.difference(scores(95.0, 96.0, 97.0), scores(97.0, 98.0, 99.0)) == "-2.00 (worse)"
    )  # spread 1.41
    assert study.difference(scores(96.0, 97.0, 98.0), scores(97.0, 98.0, 99.0)) == "-1.00"
    assert study.difference(scores(99.0, 100.0), scores(97.0, 97.0)) == "+2.50"
    assert study.difference(scores(90.0), scores(97.0)) == "-7.00"  # one seed has no spread
