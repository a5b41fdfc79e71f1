import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from fullstride import cli
from fullstride.measure.activation_bytes import activation_bytes
from fullstride.measure.cost import OperatorCost, network_cost, operator_costs, stage_costs
from fullstride.measure.tracer import cost, layer_costs
from fullstride.nets.bundle import Bundle
from fullstride.nets.efficiency import TrainingForm
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.zoo import create


def tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10)
    )


@pytest.mark.parametrize(
    "name", ["tresnet_tiny", "timm/resnet18", "timm/vit_tiny_patch16_224", "timm/regnetx_002"]
)
def test_the_stages_of_a_network_add_up_to_the_whole(name):
    net = create(name)
    rows, whole = stage_costs(net, 224), cost(net, 224)
    assert sum(row.params for row in rows) == whole.params
    assert sum(row.macs for row in rows) == whole.macs
    assert sum(row.activations for row in rows) == whole.activations
    assert not any(module._forward_hooks for module in net.modules())


def test_stem_stages_and_head_of_ours_have_a_row_each():
    spec = SPECS["resnet50"]
    rows = {row.stage: row for row in stage_costs(lambda: Network(spec), 224)}
    assert list(rows) == ["stem", "stages.0", "stages.1", "stages.2", "stages.3", "head"]
    assert (rows["head"].params, rows["head"].macs) == (2048 * 1000 + 1000, 2048 * 1000)
    layers = [
        row for row in layer_costs(lambda: Network(spec), 224) if row.name.startswith("stages.2.")
    ]
    assert rows["stages.2"].macs == sum(row.macs for row in layers)
    assert rows["stages.2"].activations == sum(row.activations for row in layers)


def test_every_operator_tells_its_module_and_the_bytes_that_it_moves():
    image, half_map = 3 * 32 * 32, 8 * 16 * 16
    assert operator_costs(tiny, 32, "float32") == [
        OperatorCost(
            "0", "0", "dense", half_map * 27, half_map, 4 * image, 4 * half_map, 4 * (8 * 27 + 8)
        ),
        OperatorCost("1", "1", "activation", 0, 0, 4 * half_map, 4 * half_map, 0),
        OperatorCost(
            "3", "3", "linear", half_map * 10, 10, 4 * half_map, 40, 4 * (half_map * 10 + 10)
        ),
    ]
    single, half = stage_costs(tiny, 32, "float32"), stage_costs(tiny, 32, "bfloat16")
    assert [row.moved_bytes for row in single] == [2 * row.moved_bytes for row in half]


def test_a_parameter_that_two_stages_share_is_counted_once():
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    assert [row.params for row in stage_costs(net, 6)] == [42, 0, 6]


def test_what_stands_in_no_stage_has_a_row_of_its_own():
    class Shifted(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Conv2d(3, 4, 1))
            self.shift = nn.Parameter(torch.zeros(4, 1, 1))

        def forward(self, input):
            return super().forward(input) + self.shift

    rows = {row.stage: row for row in stage_costs(Shifted, 8, "float32")}
    assert (rows["between stages"].params, rows["between stages"].moved_bytes) == (
        4,
        2 * 4 * 4 * 64,
    )


def test_stage_costs_refuse_an_image_in_one_line():
    with pytest.raises(ValueError, match="takes no 3 x 48 x 48 image") as caught:
        stage_costs(tiny, 48)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_command_tells_flops_from_macs_and_ends_in_the_total(capsys):
    assert cli.run(["measure", "cost", "tresnet_m", "--train"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "31,389,032 parameters, 5,736,545,792 MACs" in lines[1]
    assert lines[2] == "MACs are multiply-adds; FLOPs are 2 x MACs: 11,473,091,584"
    table = {line.split()[0]: line.split()[1:] for line in lines[5:]}
    assert list(table)[:6] == ["stem", "stages.0", "stages.1", "stages.2", "stages.3", "head"]
    for column, whole in enumerate(table["total"]):
        numbers = [
            float(row[column].replace(",", ""))
            for stage, row in table.items()
            if stage not in ("total", "MB")
        ]
        assert sum(numbers) == pytest.approx(float(whole.replace(",", "")), abs=0.05)


@pytest.fixture
def gray(tmp_path):
    """A network of one channel, and the folder of its bundle."""
    net = Network(replace(SPECS["genet_tiny"], classes=7, in_channels=1, resolution=48))
    pre = Preprocessing(resolution=48, mean=(0.5,), std=(0.5,))
    bundle = Bundle(net, name="mine", classes=tuple("abcdefg"), preprocessing=pre)
    bundle.save(tmp_path / "mine")
    return net, str(tmp_path / "mine")


@pytest.mark.parametrize("suffix", ["", "/"])
def test_a_bundle_costs_what_its_network_costs(gray, suffix):
    net, folder = gray
    assert network_cost(folder + suffix, 48).whole == cost(net, 48, 1)


def test_the_file_of_weights_of_a_bundle_is_refused_and_a_copy_costs_the_same(gray, tmp_path):
    net, folder = gray
    with pytest.raises(ValueError, match=f"is a part of a bundle: give its folder, {folder}"):
        network_cost(f"{folder}/weights.safetensors", 48)
    copy = shutil.copy(f"{folder}/weights.safetensors", tmp_path / "copy.safetensors")
    assert network_cost(str(copy), 48).whole == cost(net, 48, 1)


@pytest.mark.slow
def test_a_training_step_of_a_bundle_saves_what_its_network_saves_and_less_if_compiled(gray):
    net, folder = gray
    form = TrainingForm(efficiency="plain_compiled")
    total = network_cost(folder, training=True, form=form)
    saved = activation_bytes(net, 48, in_channels=1).bytes_per_image
    assert total.saved.bytes_per_image == saved
    assert 0 < total.other_bytes["compiled"] < saved


@pytest.mark.parametrize(
    "words", [["measure", "cost"], ["bench", "--rounds", "1", "--device", "cpu"]]
)
def test_a_transformer_of_timm_at_32_pixels_is_one_line(words, capsys):
    assert cli.run([*words, "timm/deit_tiny_patch16_224", "--resolution", "32"]) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    assert "32 x 32" in error
    assert "224 x 224" in error


def test_training_a_transformer_of_timm_at_32_pixels_leaves_no_folder(tmp_path, capsys):
    words = ["--out", str(tmp_path / "out"), "--device", "cpu", "--recipe.resolution", "32"]
    assert cli.run(["train", "digits", "--model", "timm/deit_tiny_patch16_224", *words]) == 2
    assert "224 x 224" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_transposed_convolution_costs_what_counting_by_hand_gives():
    net = nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2, bias=False)
    (row,) = operator_costs(net, 5, "float32", in_channels=6)
    assert row.macs == 6 * 5 * 5 * (4 // 2) * 3 * 3
    assert (row.read_bytes, row.written_bytes) == (4 * 6 * 5 * 5, 4 * 4 * 11 * 11)
    assert row.weight_bytes == 4 * 6 * 2 * 3 * 3
