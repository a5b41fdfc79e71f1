import errno
import math

import pytest

from fullstride import cli
from fullstride.io.writing import atomic_write, json_output
from fullstride.latency.devices import load_profile
from fullstride.latency.estimator import operators_of
from fullstride.latency.network_times import estimates, unfitted
from fullstride.nets import zoo


@pytest.mark.parametrize(
    "words",
    [["train", "digits", "--model", "genet_tiny"], ["measure", "calibrate"], ["study", "figures"]],
)
def test_a_file_in_the_place_of_a_folder_is_told_by_the_path_that_was_given(
    words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("mine")
    for out in ("FILE/x", "FILE/deep/x"):
        assert cli.run([*words, "--out", out]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"fullstride: {out}")
        assert "because FILE is a file" in error
        assert len(error.splitlines()) == 1
    assert (tmp_path / "FILE").read_text() == "mine"


def test_an_error_while_writing_names_the_path_and_not_the_hidden_one(tmp_path):
    path = tmp_path / "a.json"

    def fail():
        with atomic_write(path, json_output("results", "rows")) as beside:
            raise OSError(errno.ENOSPC, "No space left on device", str(beside))

    with pytest.raises(OSError, match="No space left on device") as caught:
        fail()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert str(caught.value).endswith(f"'{path}'")
    with (
        pytest.raises(FileNotFoundError) as missing,
        atomic_write(path, json_output("results", "rows")),
    ):
        pass  # nothing was written, so that nothing can be renamed
    assert (missing.value.filename, missing.value.filename2) == (str(path), None)


def test_a_resolution_of_nothing_has_one_line(capsys):
    for words in (
        ["measure", "cost", "genet_tiny"],
        ["study", "blocks", "--kinds", "XX", "--width", "8"],
    ):
        assert cli.run([*words, "--resolution", "0"]) == 2
        assert capsys.readouterr().err == "fullstride: resolution 0: use a whole number from 1\n"


@pytest.mark.parametrize(
    ("name", "strange"),
    [
        ("tresnet_m", []),
        ("timm/densenet121", ["batch norms apart from convolutions"]),
        ("timm/vit_tiny_patch16_224", ["layer norms or softmax", "attention"]),
    ],
)
def test_what_a_profile_was_not_fitted_on_is_named(name, strange):
    operators = operators_of(zoo.spec(name), 224)
    assert unfitted(operators, load_profile("v100-fp16").inference.numbers) == strange
    tables_of_timm = load_profile("rtx4090").inference.numbers
    assert unfitted(operators, tables_of_timm) == []
    assert unfitted(operators, tables_of_timm, microbenchmarks=True) == [
        word for word in strange if word == "attention"
    ]


def test_the_estimate_of_a_transformer_by_a_profile_of_convnets_comes_with_a_warning(capsys):
    assert (
        cli.run(
            [
                "measure",
                "estimate",
                "timm/vit_tiny_patch16_224",
                "tresnet_m",
                "--target",
                "v100-fp16",
            ]
        )
        == 0
    )
    warned = [line for line in capsys.readouterr().out.splitlines() if "not fitted on" in line]
    assert len(warned) == 1
    assert warned[0].startswith("timm/vit_tiny_patch16_224: ")
    assert "layer norms or softmax" in warned[0]
    assert "attention" in warned[0]


def estimated(name: str, profile: str, batch: int = 256):
    (row,) = estimates([operators_of(zoo.spec(name), 224)], load_profile(profile), [batch])
    return row


@pytest.mark.parametrize("profile", ["rtx4090", "rtx3090-nchw", "rtx4090-compiled"])
def test_kinds_of_networks_that_take_time_in_uncertain_numbers_have_a_wider_interval(profile):
    """Transformers of timm are 9 to 13 % off, with 88 to 96 % inside, and none was fitted."""

    def width(name: str) -> float:
        row = estimated(name, profile)
        assert not row.unfitted
        return math.log(row.high / row.low)

    usual = max(map(width, ("resnet50", "tresnet_m", "timm/vgg16")))
    assert width("timm/convmixer_1536_20") > 1.2 * usual
    assert width("timm/vit_small_patch16_224") > 1.05 * usual


def test_small_batches_are_named_where_a_profile_assumes_the_time_of_launches():
    assert estimated("resnet50", "rtx4090", 1).unfitted == ("batches this small",)
    assert not estimated("resnet50", "v100-fp16", 1).unfitted
