"""The right network for a budget: GENet's own choices, a front that nothing beats, and ties said to
be ties."""

import csv
import json
from dataclasses import fields, replace
from inspect import signature
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from fullstride import cli, tables, zoo
from fullstride.commands import measuring
from fullstride.latency import select as choosing
from fullstride.latency.devices import load_profile
from fullstride.latency.network_times import Estimate
from fullstride.latency.select import (
    Option,
    accuracy_of,
    choose,
    genet_paper,
    options_tie,
    options_with_times,
    published_times,
    time_of,
)
from fullstride.measure.budget import Budget, pareto_front
from fullstride.measure.settings import BenchSettings
from fullstride.report.scatter import choice_figure
from fullstride.tables import Published, published

TABLE = Path(tables.__file__).parent / "latency_v100_fp16.csv"


@pytest.fixture(scope="module")
def known():
    """GENet's networks at batch 64, timed by what its authors printed, and by estimates alone."""
    profile = load_profile("v100-fp16")
    return {
        printed: list(options_with_times(genet_paper(), profile, 64, printed, {}))
        for printed in (True, False)
    }


def within(ms: float) -> Budget:
    return Budget(ms_per_image=ms, batch=64)


def option(name: str, top1: float, ms: float, by="estimated", resolvable_ratio=1.1) -> Option:
    times = dict(ms_per_image=ms, low=0.8 * ms, high=1.3 * ms, device_ms=ms, host_ms=0.0)
    one = Estimate(
        profile="p",
        work="inference",
        batch=1,
        bound="memory",
        resolvable_ratio=resolvable_ratio,
        **times,
    )
    printed = ms if by == "published" else None
    return Option(
        network=Published(name, 224, top1, "", ""), estimate=one, published_ms=printed, by=by
    )


@pytest.mark.parametrize(("budget", "name"), [(0.34, "large"), (0.20, "normal"), (0.10, "light")])
def test_within_the_budgets_of_the_paper_its_own_networks_are_chosen(known, budget, name):
    assert choose(known[True], within(budget)).best.network.name == f"genet_{name}"


@pytest.mark.parametrize(("budget", "name"), [(0.34, "large"), (0.20, "normal"), (0.10, "light")])
def test_the_networks_of_the_paper_that_cannot_be_built_here_would_not_have_been_chosen(
    budget, name
):
    rows = [
        row
        for row in csv.DictReader(TABLE.read_text().splitlines())
        if float(row["ms_b64"]) <= budget
    ]
    assert max(rows, key=lambda row: float(row["top1"]))["model"] == f"GENet-{name}"
    assert len(genet_paper()) == 21


def test_estimates_alone_miss_one_of_the_three_by_less_than_they_can_tell(known):
    found = {budget: choose(known[False], within(budget)) for budget in (0.34, 0.20, 0.10)}
    assert [found[b].best.network.name for b in (0.20, 0.10)] == ["genet_normal", "genet_light"]
    large = next(o for o in known[False] if o.network.name == "genet_large")
    assert large in (found[0.34].best, *found[0.34].near)
    assert large.ms < 1.06 * 0.34


def test_published_times_are_those_of_the_table_and_never_replace_an_estimate_without_a_label(
    known,
):
    rows = {
        row["model"]: float(row["ms_b64"]) for row in csv.DictReader(TABLE.read_text().splitlines())
    }
    times = published_times(load_profile("v100-fp16"), 64)
    assert len(times) == 21
    assert times["genet_large", 256] == rows["GENet-large"]
    assert times["timm/efficientnet_b3", 300] == rows["EfficientNet-B3"]
    for one in known[True] + known[False]:
        assert one.ms == (one.published_ms if one.by == "published" else one.estimate.ms_per_image)
    assert {one.by for one in known[True]} == {"published"}
    assert {one.by for one in known[False]} == {"estimated"}
    assert not published_times(load_profile("v100-fp16"), 63)
    assert not published_times(load_profile("rtx3090"), 64)


def test_nothing_is_as_fast_and_more_accurate_than_a_network_on_the_front(known):
    options = known[False]
    line = pareto_front(options, time_of, accuracy_of)
    better = [
        a for a, b in product(options, options) if a.ms >= b.ms and a.network.top1 < b.network.top1
    ]
    same = [
        a for a, b in product(options, options) if a.ms > b.ms and a.network.top1 == b.network.top1
    ]
    assert set(line) == set(options) - set(better) - set(same)
    assert line == sorted(line, key=lambda o: o.ms)


def test_the_runner_up_is_another_network_and_a_looser_budget_buys_the_next_point_of_the_front():
    rows = [
        option("a", 70, 1),
        option("b", 75, 2),
        option("b", 74, 2),
        option("c", 72, 3),
        option("d", 80, 5),
    ]
    found = choose(rows, within(4))
    assert (found.best.network.name, found.runner_up.network.name, found.next.network.name) == (
        "b",
        "c",
        "d",
    )
    assert choose(rows, within(6)).next is None
    assert choose(rows, within(1)).runner_up is None


@pytest.mark.parametrize("low_high", [(0.8, 1.3), (0.5, 0.9), (1.1, 3.0)])
def test_the_probability_to_stay_inside_is_that_of_a_log_normal_with_the_interval_as_its_90_percent(
    low_high,
):
    low, high = low_high
    one = replace(option("a", 70, 2.0).estimate, low=2 * low, high=2 * high)
    times = np.exp(
        np.random.default_rng(0).normal(
            np.log(4 * low * high) / 2, np.log(high / low) / 2 / 1.6449, size=100_000
        )
    )
    for budget in (1.0, 1.5, 2.0, 2.5, 4.0):
        share = float((times <= budget).mean())
        assert one.probability_within(budget) == pytest.approx(share, abs=0.006)
    assert one.probability_within(2 * high) == pytest.approx(0.95)
    exact = replace(one, low=2.0, high=2.0)
    assert [exact.probability_within(ms) for ms in (1.9, 2.0, 2.1)] == [0, 1, 1]
    assert option("p", 70, 1.0, "published").probability_within(0.99) == 0


def test_what_is_worth_measuring_are_the_best_the_most_promising_near_it_and_a_safe_one():
    rows = [
        option("safe", 70, 1.0),
        option("best", 75, 1.9),
        option("slow", 76, 2.19),
        option("good", 80, 2.05),
        option("large", 90, 9.0),
    ]
    choice = choose(rows, within(2))
    assert [o.network.name for o in choice.to_measure] == ["good", "best", "safe"]
    assert choice.safe is rows[0]
    assert choose(rows[:1], within(2)).to_measure == ()
    assert choose([option("p", 70, 1.9, "published")], within(2)).to_measure == ()
    assert choose([rows[1]], within(2)).safe is None


def test_one_of_those_that_are_named_for_measuring_fits_in_nine_of_ten_of_300_budgets():
    """Networks whose true times have the spread that the interval says."""
    random = np.random.default_rng(1)
    middle, deviation = np.log(0.8 * 1.3) / 2, np.log(1.3 / 0.8) / 2 / 1.6449
    best_fits, one_fits = [], []
    for _ in range(10):
        estimated = np.geomspace(0.1, 10, 120)
        true = estimated * np.exp(random.normal(middle, deviation, 120))
        top1 = 70 + 4 * np.log(true / 0.1) + random.normal(0, 1, 120)
        networks = enumerate(zip(top1, estimated, strict=True))
        rows = [option(f"n{i}", accuracy, ms) for i, (accuracy, ms) in networks]
        time_of = {row.label: ms for row, ms in zip(rows, true, strict=True)}
        for budget in np.geomspace(0.3, 5, 30):
            choice = choose(rows, within(budget))
            named = choice.to_measure or (choice.best,)
            assert len(named) <= 3
            best_fits.append(time_of[choice.best.label] <= budget)
            one_fits.append(any(time_of[o.label] <= budget for o in named))
    assert np.mean(best_fits) < 0.8
    assert np.mean(one_fits) > 0.9


def test_what_the_model_cannot_tell_apart_is_a_tie():
    a, b, c = option("a", 70, 1.0), option("b", 71, 1.05), option("c", 72, 1.2)
    assert options_tie(a, b)
    assert not options_tie(a, c)
    assert choose([a, b, c], within(1)).near == (b,)
    printed = option("p", 70, 1.0, "published"), option("q", 70, 1.05, "published")
    assert not options_tie(*printed)
    assert options_tie(printed[0], c)  # 1.0 is inside of 0.96 to 1.56
    assert not options_tie(printed[0], option("d", 70, 1.3))
    assert choose(printed, within(1)).near == ()


def test_every_candidate_can_be_built_and_has_a_source():
    rows = [row for find in choosing.SOURCES.values() for row in find()]
    assert all(row.source and 50 < row.top1 < 90 and row.resolution >= 128 for row in rows)
    for name in {row.name for row in rows}:
        assert zoo.spec(name)
    assert all(row.name.startswith("timm/") for row in published("timm"))


def ask(capsys, *words: str) -> str:
    assert cli.run(["choose", *words]) == 0
    return capsys.readouterr().out


def table(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines))
    return str(path)


def test_accuracies_come_from_a_table_as_timm_publishes_it_and_what_cannot_be_built_is_left_out(
    tmp_path, capsys
):
    rows = [
        "resnet50.a1_in1k,81.2,95.6,25.56,288,0.950,bicubic",
        "genet_light,75.7,,8.2,192,,",
        "no_such_net,99,,,224,,",
    ]
    rows.append("vit_small_patch16_224,81,,,100,,")  # takes no such image
    path = table(
        tmp_path / "results.csv",
        "model,top1,top5,param_count,img_size,crop_pct,interpolation",
        *rows,
    )
    assert (
        cli.run(["choose", "--target", "rtx3090", "--budget-ms", "100", "--from", path, "--json"])
        == 0
    )
    out, err = capsys.readouterr()
    answer = json.loads(out)
    options, left_out = answer["options"], answer["left_out"]
    assert list(left_out) == ["timm/no_such_net at 224", "timm/vit_small_patch16_224 at 100"]
    assert [(o["name"], o["resolution"], o["top1"], o["source"]) for o in options] == [
        ("timm/resnet50.a1_in1k", 288, 81.2, "results.csv"),
        ("genet_light", 192, 75.7, "results.csv"),
    ]
    assert err.startswith(
        "fullstride: left out 2 of 4 networks; the first, timm/no_such_net at 224: "
        "timm has no network"
    )
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("model,top1", "resnet50,80"), "lacks 'img_size'"),
        (("model,img_size,top1", "resnet50,224,80", "resnet18,wide,70"), "line 3: invalid literal"),
        (("model,img_size,top1", "resnet50,224"), "line 2: could not convert"),
        (("model,img_size,top1", "resnet50,224,800"), "line 2: 'resnet50', 224, 800.0"),
        (("model,img_size,top1",), "mine.csv has no line below its header"),
        (("model,img_size,top1", "resnet5,224,80"), "none of 1 network has a time; the first"),
    ],
)
def test_a_table_that_says_no_accuracies_is_named_with_its_line(tmp_path, capsys, lines, said):
    path = table(tmp_path / "mine.csv", *lines)
    assert cli.run(["choose", "--target", "rtx3090", "--budget-ms", "1", "--from", path]) == 2
    assert said in capsys.readouterr().err


GENET = ("--target", "v100-fp16", "--from", "genet_paper", "--call-batch", "64")


def test_the_command_tells_its_choice_the_price_of_the_next_and_draws_it(tmp_path, capsys):
    told = ask(capsys, *GENET, "--budget-ms", "0.2", "--out", str(tmp_path / "a.png"))
    assert "best within 0.2 ms an image (batch 64, NVIDIA V100, fp16): genet_normal" in told
    assert "genet_normal at 192 x 192, 80 %, 0.200 ms (published)" in told
    assert "runner-up: genet_light at 192 x 192" in told
    assert (
        "genet_large at 256 x 256, 81.3 %, 0.330 ms (published): 1.3 points more for 0.130 ms more"
        in told
    )
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads(
        ask(capsys, *GENET, "--budget-ms", "0.2", "--times-from", "estimated", "--json")
    )
    assert {row["time"] for row in data["options"]} == {"estimated"}
    assert 0.5 < data["best"]["probability"] < 0.9
    assert [row["name"] for row in data["measure"]] == ["genet_normal", "genet_light"]
    assert data["best"]["name"] == "genet_normal"
    assert (
        data["best"]["ms_per_image"] == data["best"]["estimated_ms"] != data["best"]["published_ms"]
    )


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (("rtx4090", "--budget-ms", "6"), {"--protocol online", "--layout nhwc"}),
        (
            ("rtx4090-compiled", "--budget-ms", "0.15", "--call-batch", "64"),
            {"--compiled", "--call-batch 64"},
        ),
        (
            (
                "v100-fp16",
                "--budget-ms",
                "0.2",
                "--call-batch",
                "64",
                *("--times-from", "estimated"),
            ),
            set(),
        ),
    ],
)
def test_the_networks_that_are_worth_measuring_stand_in_commands_of_bench(words, flags, capsys):
    answer = ("--target", *words, "--from", "ours")
    named = json.loads(ask(capsys, *answer, "--json"))["measure"]
    lines = [
        line.removeprefix("measure these: ").split()
        for line in ask(capsys, *answer).splitlines()
        if line.startswith("measure these")
    ]
    assert 1 <= len(named) <= 3
    pairs = {(row["name"], str(row["resolution"])) for row in named}
    assert pairs == {
        (name, line[line.index("--resolution") + 1])
        for line in lines
        for name in line[2 : line.index("--resolution")]
    }
    for line in lines:
        assert line[:2] == ["fullstride", "bench"]
        assert all(flag in " ".join(line) for flag in {*flags, "--precision fp16"})
        options = {word[2:].replace("-", "_") for word in line if word.startswith("--")}
        own = {each.name for each in fields(BenchSettings)}
        assert options <= own | {*signature(measuring.bench).parameters}


def test_networks_for_tensorrt_are_measured_as_exported(capsys):
    out = ask(capsys, "--target", "t4-int8", "--budget-ms", "1.5", "--times-from", "estimated")
    assert any(
        line.startswith("measure these, exported to TensorRT: ") for line in out.splitlines()
    )
    assert "fullstride bench" not in out


def test_the_picture_names_the_front_and_marks_the_budget_and_the_best(known):
    found = choose(known[True], within(0.34))
    (axes,) = choice_figure(known[True], found, "here").axes
    names = {t.get_text() for t in axes.texts}
    assert names == {f"{o.network.name} {o.network.resolution}" for o in found.front}
    budget = next(line for line in axes.lines if str(line.get_label()).startswith("budget"))
    assert list(budget.get_xdata()) == [0.34, 0.34]
    best = next(line for line in axes.lines if line.get_label() == "best")
    assert (best.get_xdata()[0], best.get_ydata()[0]) == (0.33, 81.3)


def test_names_of_a_long_front_do_not_touch_and_the_best_has_one():
    selection = choosing.select(load_profile("rtx4090-compiled"), within(0.2))
    figure = choice_figure(selection.options, selection.choice, "here")
    figure.canvas.draw()
    (axes,) = figure.axes
    ends = sorted(axes.transData.transform(each.xy)[0] for each in axes.texts)
    assert min(np.diff(ends)) > 8 * figure.dpi / 72  # points of a line of text
    best = selection.choice.best.network.name.removeprefix("timm/").partition(".")[0]
    assert any(best in each.get_text() for each in axes.texts)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--budget-ms", "0"), "give a time above 0"),
        (("--budget-ms", "inf"), "give a time above 0"),
        (("--budget-ms", "0.001"), "the fastest is genet_light at 192 x 192 with 0.09 ms"),
        (("--budget-ms", "1", "--call-batch", "0"), "--call-batch 0: use"),
        (("--budget-ms", "1", "--target", "v100"), "no profile named 'v100'"),
        (("--budget-ms", "1", "--from", "paper"), "choose from ours, timm, genet_paper"),
    ],
)
def test_what_cannot_be_chosen_is_one_line(words, told, capsys):
    assert cli.run(["choose", *GENET, *words]) == 2
    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1
