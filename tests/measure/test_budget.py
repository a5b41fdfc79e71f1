"""One meaning of a time budget everywhere: the time of one call divided by its images."""

import json
import math

import pytest

from fullstride import cli
from fullstride.measure.budget import Budget, find_budget
from fullstride.measure.protocols import Protocol


def answer(capsys, *words: str) -> dict:
    assert cli.run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_time_and_the_rate_that_it_means_are_one_budget():
    assert find_budget(0.5, None, 8) == find_budget(None, 2000, 8)
    assert find_budget(None, None) is None
    assert Budget(ms_per_image=4).batch == 1
    with pytest.raises(ValueError, match="two budgets"):
        find_budget(0.5, 2000)
    with pytest.raises(ValueError, match="--call-batch 8"):
        find_budget(None, None, 8)
    for budget_ms in (None, 1.0):
        with pytest.raises(ValueError, match="--call-batch 0: use a whole number from 1"):
            find_budget(budget_ms, None, 0)
    with pytest.raises(ValueError, match="call batch 0: use a whole number from 1"):
        Protocol(name="online", batch=0)


@pytest.mark.parametrize("number", [0, -1, math.nan, math.inf])
def test_a_budget_is_a_time_or_a_rate_above_0(number):
    for one in ((number, None), (None, number)):
        with pytest.raises(ValueError, match="above 0"):
            find_budget(*one)


@pytest.mark.parametrize(
    ("words", "batch", "least_ms"),
    [(("6",), 1, 6), (("0.5", "--call-batch", "64"), 64, 0.5)],
)
def test_no_network_is_chosen_that_takes_more_than_the_budget_at_the_batch_of_the_budget(
    words, batch, least_ms, capsys
):
    choice = answer(
        capsys, "choose", "--target", "rtx4090", "--from", "ours", "--budget-ms", *words
    )
    assert (choice["batch"], choice["budget_ms"]) == (batch, least_ms)
    best = choice["best"]
    times = answer(
        capsys, "measure", "estimate", best["name"], "--target", "rtx4090",
        "--call-batch", str(batch), "--resolution", str(best["resolution"]),
    )  # fmt: skip
    (time,) = times["estimates"]
    assert time["batch"] == batch
    assert max(time["device_ms"], time["host_ms"]) / batch <= time["ms_per_image"] <= least_ms
    assert time["ms_per_image"] == pytest.approx(best["estimated_ms"])


def test_a_budget_that_one_image_never_fits_names_nothing_and_says_at_which_batch(capsys):
    words = ("--target", "rtx4090", "--from", "ours", "--budget-ms", "0.5")
    assert cli.run(["choose", *words]) == 2
    line = capsys.readouterr().err
    assert "batch 1" in line
    assert "--call-batch" in line


def test_a_rate_is_a_budget_and_every_answer_repeats_its_conditions(capsys):
    words = ("choose", "--target", "v100-fp16", "--from", "genet_paper", "--call-batch", "64")
    one, other = (
        answer(capsys, *words, *budget)
        for budget in (("--budget-ms", "0.2"), ("--images-per-s", "5000"))
    )
    assert one == other
    assert (one["device"], one["precision"], one["batch"]) == ("NVIDIA V100", "fp16", 64)
    for command in (
        [*words, "--images-per-s", "5000"],
        ["measure", "estimate", "resnet18", "--target", "v100-fp16", "--call-batch", "64"],
        [
            "measure",
            "estimate",
            "resnet18",
            "resnet34",
            "--target",
            "v100-fp16",
            "--call-batch",
            "64",
        ],
    ):
        assert cli.run(command) == 0
        assert "batch 64, NVIDIA V100, fp16" in capsys.readouterr().out


def test_choose_and_estimate_time_one_image_unless_a_batch_is_given(capsys):
    choice = answer(
        capsys, "choose", "--target", "v100-fp16", "--from", "genet_paper", "--budget-ms", "9"
    )
    times = answer(capsys, "measure", "estimate", "resnet18", "--target", "v100-fp16")
    assert (choice["batch"], times["estimates"][0]["batch"]) == (1, 1)


def test_a_choice_without_a_budget_is_one_line(capsys):
    assert cli.run(["choose", "--target", "rtx4090"]) == 2
    line = capsys.readouterr().err
    assert "--budget-ms" in line
    assert line.count("\n") == 1
