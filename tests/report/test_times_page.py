"""The pages of `choose` and `bench` have the numbers of their objects, and a plot of all."""

import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from fullstride import cli
from fullstride.latency.devices import load_profile
from fullstride.latency.select import select
from fullstride.measure.bench import BenchOptions, bench
from fullstride.measure.budget import Budget
from fullstride.measure.protocols import ONLINE, THROUGHPUT, Measurement
from fullstride.nets import zoo
from fullstride.report.scatter import measured_figure
from fullstride.report.times_page import bench_page, choice_page


def words(page: str) -> str:
    text = re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]*>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(text).split())


def rows_of(page: str) -> list[str]:
    return [words(row) for row in re.findall(r"<tr><th scope=\"row\">.*?</tr>", page)]


@pytest.fixture(scope="module")
def measured() -> list[Measurement]:
    nets = {
        f"runs/{name}": zoo.create(name, in_channels=1) for name in ("genet_tiny", "resnet_rs_tiny")
    }
    quick = dict(resolution=16, rounds=4, warmup_s=0, round_s=1e-3)
    options = BenchOptions(in_channels=1)
    return [
        row
        for protocol in (ONLINE, replace(THROUGHPUT, batch=4))
        for row in bench(nets, replace(protocol, **quick), options=options)
    ]


def test_the_page_of_a_choice_has_the_front_with_intervals_and_says_which_is_the_best():
    budget = Budget(ms_per_image=0.34, batch=64)
    selection = select(load_profile("v100-fp16"), budget, sources=("genet_paper",))
    page = choice_page(selection)
    rows = rows_of(page)
    assert len(rows) == len(selection.choice.front)
    for row, option in zip(rows, selection.choice.front, strict=True):
        assert row.startswith(option.network.name)
        assert f"{option.network.top1:g} %" in row
        assert ("yes" if option.ms <= 0.34 else "no") in row.split()
        assert ("the best" in row) == (option == selection.choice.best)
        if option.by == "estimated":
            low, high = option.estimate.low, option.estimate.high
            (span,) = re.findall(r"estimated, ([\d.]+) to ([\d.]+)", row)
            assert [*map(float, span)] == pytest.approx([low, high], rel=0.01)
    assert page.count("<svg") == 1


def test_the_page_of_measurements_has_a_table_for_each_protocol_and_names_the_fastest(measured):
    page = bench_page(measured, 1)
    rows = rows_of(page)
    for row in measured:
        name = row.name.removeprefix("runs/")
        (line,) = (
            each for each in rows if each.startswith(name) and f"batch {row.protocol.batch}" in each
        )
        number = row.images_per_s if row.ms_p50 is None else row.ms_p50
        assert f"{number:,.{1 if row.ms_p50 is None else 3}f}" in line
    fastest = min(measured[:2], key=lambda row: row.ms_p50 or 0)
    assert f"{fastest.name.removeprefix('runs/')} is the fastest of 2 networks" in words(page)
    assert measured[0].environment.device in words(page)


def test_networks_of_other_resolutions_are_compared_for_the_fastest(measured):
    big, small, *_ = measured
    small = replace(small, protocol=replace(small.protocol, resolution=8), images_per_s=1e6)
    assert "resnet_rs_tiny is the fastest of 2 networks" in words(bench_page([big, small], 1))


def test_the_samples_of_an_image_are_times_of_calls_or_of_rounds(measured):
    online, rounds = measured[0], measured[-1]
    assert online.ms_per_image_samples == online.samples  # a call is one image
    expected = [1e3 / images_per_s for images_per_s in rounds.samples]
    np.testing.assert_allclose(rounds.ms_per_image_samples, expected)


def test_a_plot_without_a_time_is_refused():
    with pytest.raises(ValueError, match="measure at least one network"):
        measured_figure([])


def test_the_ending_of_out_says_whether_a_plot_or_a_page_is_written(tmp_path, capsys):
    words = ["choose", "--target", "v100-fp16", "--budget-ms", "0.3", "--call-batch", "64"]
    words += ["--from", "genet_paper"]
    for name, begins in (("a.png", b"\x89PNG"), ("a.html", b"<!DOCTYPE html>")):
        assert cli.run([*words, "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(begins)
    assert cli.run([*words, "--out", str(tmp_path / "a.pdf")]) == 2
    assert "give a name that ends in .png" in capsys.readouterr().err
