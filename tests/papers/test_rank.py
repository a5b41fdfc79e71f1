"""Intrinsic rank: singular values by another library, chance that stands at one, a command that
says what it took."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from fullstride import cli, tasks
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.papers.kernel_rank import by_stage, mean_curve, random_spectrum, rank_figure, ranks


def conv(*shape: int, groups: int = 1, seed: int = 0, **how) -> nn.Conv2d:
    layer = nn.Conv2d(shape[1] * groups, shape[0], shape[2:], groups=groups, **how)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(seed))
    return layer


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (64, 4, 3, 3), (16, 16, 1, 1), (5, 3, 1, 7)])
def test_the_values_are_those_that_numpy_finds_in_the_kernel_as_a_matrix(shape):
    layer = conv(*shape)
    expected = np.linalg.svd(
        layer.weight.detach().double().numpy().reshape(shape[0], -1), compute_uv=False
    )
    (row,) = ranks(nn.Sequential(layer), 0.4)
    np.testing.assert_allclose(row.values, expected / expected[0], atol=1e-7)
    assert row.rank == np.mean(expected > 0.4 * expected[0])


@pytest.mark.parametrize(("shape", "groups"), [((6, 2, 3, 3), 3), ((8, 1, 5, 5), 8)])
def test_the_values_of_a_grouped_kernel_are_those_of_the_matrix_with_its_groups_on_the_diagonal(
    shape, groups
):
    layer = conv(*shape, groups=groups)
    blocks = layer.weight.detach().double().reshape(groups, shape[0] // groups, -1)
    dense = np.linalg.svd(torch.block_diag(*blocks).numpy(), compute_uv=False)[: shape[0]]
    np.testing.assert_allclose(ranks(nn.Sequential(layer))[0].values, dense / dense[0], atol=1e-7)


def test_the_kernels_of_clips_are_matrices_too():
    layer = nn.Conv3d(4, 8, 3, groups=2)
    blocks = layer.weight.detach().double().reshape(2, 4, -1)
    dense = np.linalg.svd(torch.block_diag(*blocks).numpy(), compute_uv=False)
    (row,) = ranks(nn.Sequential(layer))
    np.testing.assert_allclose(row.values, dense / dense[0], atol=1e-7)
    assert row.kind == "3 x 3 x 3 in 2 groups"
    video = zoo.create("resnet3d_rs_50", classes=3)
    rows = ranks(video)
    assert len(rows) == sum(isinstance(part, nn.Conv3d) for part in video.modules())
    assert {"1 x 1 x 1", "1 x 3 x 3"} <= {row.kind for row in rows}
    figure = rank_figure(rows, "clips")
    assert len(figure.axes[0].lines) > 2
    assert len(by_stage(rows)) < len(rows)


def test_chance_is_what_marchenko_and_pastur_say_of_wide_matrices():
    # smallest over largest singular value tend to (1 - sqrt(q)) / (1 + sqrt(q)) for rows / columns
    # = q
    for rows, columns, kernel in ((256, 256, 9), (512, 256, 9), (256, 256, 1)):
        q = rows / (columns * kernel)
        low, high = 1 - math.sqrt(q), 1 + math.sqrt(q)
        assert random_spectrum(1, rows, columns * kernel)[:, -1].mean() == pytest.approx(
            low / high, abs=0.02
        )


def test_fresh_gaussian_kernels_have_the_rank_of_chance_whatever_their_shape():
    layers = [
        conv(64, 64, 1, 1),
        conv(128, 64, 3, 3, stride=2),
        conv(64, 64, 3, 3),
        conv(512, 1, 3, 3, groups=512),
    ]
    rows = ranks(nn.Sequential(*layers))
    assert [row.relative for row in rows] == pytest.approx([1] * 4, abs=0.1)
    assert rows[0].rank < 0.6 < 0.95 < rows[2].rank  # what would pass for low rank without it


def test_a_kernel_made_of_two_patterns_has_two_values():
    layer = conv(32, 16, 3, 3)
    with torch.no_grad():
        layer.weight.copy_((torch.randn(32, 2) @ torch.randn(2, 16 * 9)).view(32, 16, 3, 3))
    (row,) = ranks(nn.Sequential(layer), 1e-4)
    assert row.rank == 2 / 32
    assert row.relative == 2 / 32


def test_scaling_a_kernel_changes_no_value_and_an_empty_one_has_rank_0():
    layer, empty = conv(8, 8, 3, 3), conv(8, 8, 3, 3)
    with torch.no_grad():
        empty.weight.zero_()
    before = ranks(nn.Sequential(layer))
    with torch.no_grad():
        layer.weight *= -40
    assert ranks(nn.Sequential(layer))[0].values == pytest.approx(before[0].values)
    assert ranks(nn.Sequential(empty))[0].rank == 0


@pytest.mark.parametrize("name", ["genet_tiny", "timm/test_resnet"])
def test_every_convolution_stands_in_a_stage_of_its_network(name):
    net = zoo.create(name)
    rows = ranks(net)
    assert len(rows) == sum(isinstance(part, nn.Conv2d) for part in net.modules())
    assert all(row.name == row.stage or row.name.startswith(f"{row.stage}.") for row in rows)
    stages = by_stage(rows)
    assert sum(stage.layers for stage in stages) == len(rows)
    expected = {"genet_tiny": ["stem", *(f"stages.{i}" for i in range(5)), "head"]}
    four = [f"layer{i}" for i in range(1, 5)]
    assert list(dict.fromkeys(stage.stage for stage in stages)) == expected.get(
        name, ["conv1", *four]
    )
    assert min(row.relative for row in rows) == min(stage.lowest.relative for stage in stages)


@pytest.mark.parametrize("threshold", [0.0, 1.0, -1.0, float("nan")])
def test_a_threshold_outside_of_0_to_1_is_refused(threshold):
    with pytest.raises(ValueError, match=r"threshold .*: use a number between 0 and 1"):
        ranks(nn.Sequential(conv(4, 4, 3, 3)), threshold)


def test_a_network_without_kernels_and_one_that_is_not_finite_are_refused():
    with pytest.raises(ValueError, match="no convolutions"):
        ranks(nn.Sequential(nn.Linear(3, 4)))
    broken = conv(4, 4, 3, 3)
    with torch.no_grad():
        broken.weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="kernel of 0 is not finite"):
        ranks(nn.Sequential(broken))


def test_layers_of_different_sizes_are_averaged_over_the_share_of_their_values():
    np.testing.assert_allclose(
        mean_curve([(1.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.75, 0.5)])[[0, 50, 100]],
        [1, 7 / 12, 1 / 6],
    )


def test_the_picture_draws_a_curve_and_its_chance_for_every_stage_with_wide_kernels():
    rows = ranks(zoo.create("genet_tiny"))
    falling, layers = rank_figure(rows, "genet_tiny").axes
    assert len(falling.lines) == 2 * sum(stage.kind != "1 x 1" for stage in by_stage(rows))
    assert sum(len(line.get_xdata()) for line in layers.lines[:-1]) == len(rows)


def test_the_command_says_that_fresh_weights_tell_of_chance_alone_and_draws(tmp_path, capsys):
    assert cli.run(["study", "rank", "genet_tiny", "--out", str(tmp_path / "rank.png")]) == 0
    said = capsys.readouterr().out
    assert "weights: fresh" in said
    assert said.count("3 x 3 depthwise") == 2
    assert (tmp_path / "rank.png").read_bytes().startswith(b"\x89PNG")
    assert cli.run(["study", "rank", "genet_tiny", "--layers"]) == 0
    assert "48 x 16 x 3 x 3" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["classify", "segment"])
def test_the_command_reads_a_bundle_and_writes_json(tmp_path, capsys, task):
    net = tasks.find_network("genet_tiny", task, 10).build()
    classes = tuple(map(str, range(10)))
    about = Preprocessing(resolution=32, mean=(0.0,) * 3, std=(1.0,) * 3)
    Bundle(
        net=net,
        name="mine",
        classes=classes,
        preprocessing=about,
        source="trained on leaves",
        task=task,
    ).save(tmp_path / "b")
    assert cli.run(["study", "rank", str(tmp_path / "b"), "--json", "--threshold", "0.3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["weights"], told["threshold"]) == ("trained on leaves", 0.3)
    assert [row["rank"] for row in told["layers"]] == [row.rank for row in ranks(net, 0.3)]


def test_the_command_says_where_most_layers_are_linear_and_not_in(capsys):
    assert cli.run(["study", "rank", "timm/vit_tiny_patch16_224"]) == 0
    assert "49 linear layers" in capsys.readouterr().out
    assert cli.run(["study", "rank", "genet_tiny"]) == 0
    assert "linear" not in capsys.readouterr().out


def test_bad_input_to_the_command_is_one_line(capsys):
    for words in (
        ["genet_tini"],
        ["genet_tiny", "--threshold", "2"],
        ["genet_tiny", "--pretrained"],
    ):
        assert cli.run(["study", "rank", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
