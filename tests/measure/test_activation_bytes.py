import json
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from fullstride import cli
from fullstride.measure import max_batch
from fullstride.measure.activation_bytes import activation_bytes, stages
from fullstride.measure.cost import network_cost
from fullstride.nets import padding, zoo
from fullstride.nets.efficiency import TrainingForm
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.train.recipes.named import FINETUNE, training_step

# MB per image in bfloat16 at 224 pixels, measured with real tensors and checked by the allocator's
# peak on a CPU.
MEASURED = {
    "resnet50": 43.8,
    "tresnet_m": 33.3,
    "tresnet_l": 53.9,
    "resnetrs50": 57.6,
    "gernet_l": 23.4,
    "efficientnet_b1": 61.4,
}


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10)
    )


@pytest.mark.parametrize("name", MEASURED)
def test_a_network_of_timm_saves_the_bytes_that_were_measured(name):
    result = activation_bytes(lambda: zoo.create(f"timm/{name}"), 224)
    assert result.bytes_per_image / 1e6 == pytest.approx(MEASURED[name], rel=0.01)
    assert sum(result.by_stage.values()) == result.bytes_per_image


def test_a_small_network_saves_what_counting_by_hand_gives():
    result = activation_bytes(small, 32, "float32")
    image, activation = 3 * 32 * 32 * 4, 8 * 16 * 16 * 4
    loss = 10 * 4 + 8  # log-probabilities and the class, a 64-bit number
    assert result.by_stage == {
        "0": image,
        "1": activation,
        "loss": loss,
    }  # the linear layer's input is the activation
    assert result.by_layer == {"0": image, "1": activation, "": loss}
    assert (result.bytes_per_image, result.largest_map) == (image + activation + loss, 3 * 32 * 32)


def saved_bytes(net: nn.Module, batch: int, precision: torch.dtype) -> int:
    """Bytes of the storages that autograd saves in a real step on the CPU, without weights."""
    storages = {}
    own = {t.data_ptr() for t in (*net.parameters(), *net.buffers())}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", precision, enabled=precision != torch.float32),
    ):
        logits = net(torch.randn(batch, 3, 64, 64)).float()
        loss = nn.functional.cross_entropy(logits, torch.zeros(batch, dtype=torch.long))
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tresnet_tiny", "resnet_rs_tiny", "genet_tiny"])
def test_saved_bytes_are_those_of_real_tensors_with_drop_path_and_dropout_on(name, precision):
    net = Network(SPECS[name]).train()
    net.regularise(drop_path=0.3, dropout=0.2)
    few, more = (saved_bytes(net, batch, getattr(torch, precision)) for batch in (3, 5))
    predicted = activation_bytes(net, 64, precision, device="cpu")
    assert predicted.bytes_per_image == (more - few) / 2


@pytest.mark.parametrize(
    ("form", "precision"),
    [
        (dict(efficiency="plain"), "bf16"),
        (dict(pad_channels=True), "float32"),
    ],
)
def test_a_prediction_for_a_recipe_is_of_the_bytes_that_its_step_saves(form, precision, tmp_path):
    rates = dict(drop_path=0.3, drop_path_by="stage", dropout=0.2)
    recipe = replace(FINETUNE, resolution=64, precision=precision, **rates, **form)
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(asdict(recipe)))
    step = training_step(str(path))
    predicted = max_batch.plan("genet_tiny", step, device="cpu", memory_gib=1).prediction

    net = Network(SPECS["genet_tiny"])
    net.regularise(drop_path=0.3, by="stage", dropout=0.2)
    net = padding.to_padded(net) if recipe.pad_channels else net
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    few, more = (saved_bytes(net.train(), batch, dtype) for batch in (3, 5))
    image = 3 * 64 * 64 * 4 if precision == "bf16" else 0
    assert predicted.bytes_per_image == (more - few) / 2 + image


def test_flags_have_precedence_over_the_recipe_of_a_prediction():
    step = training_step("study_drop_path", resolution=96, precision="fp16", layout="nhwc")
    assert (step.resolution, step.precision, step.layout) == (96, "fp16", "nhwc")
    assert step.form == TrainingForm(drop_path=0.1, drop_path_by="stage")
    compiled = training_step("study_drop_path", efficiency="plain_compiled")
    assert compiled.form.efficiency == "plain_compiled"
    assert training_step("").form == TrainingForm()


@pytest.mark.slow
def test_cost_counts_the_step_of_a_recipe_eager_and_compiled():
    form = TrainingForm(efficiency="plain_compiled", drop_path=0.3)
    cost = network_cost("genet_tiny", 64, training=True, form=form)
    net = Network(SPECS["genet_tiny"])
    net.regularise(drop_path=0.3)
    assert cost.saved == activation_bytes(net, 64)
    assert 0 < cost.other_bytes["compiled"] < cost.saved.bytes_per_image


@pytest.mark.parametrize("name", ["tresnet_tiny", "resnet_rs_tiny", "genet_tiny"])
def test_drop_path_saves_one_number_a_block_and_no_map_of_32_bits(name):
    plain, regularised = (Network(SPECS[name]) for _ in range(2))
    regularised.regularise(drop_path=0.2)
    extra = (
        activation_bytes(regularised, 64).bytes_per_image
        - activation_bytes(plain, 64).bytes_per_image
    )
    assert extra == 4 * sum(rate > 0 for rate in regularised.drop_paths)


def test_a_gpu_saves_padded_maps_in_16_bits_and_the_cpu_in_32():
    gpu, cpu = (
        activation_bytes(lambda: zoo.create("timm/tresnet_m"), 224, device=device)
        for device in ("cuda", "cpu")
    )
    padded = (
        128 * 58**2 + 128 * 30**2 + 256 * 16**2
    )  # elements, of the three blurs with reflected borders
    assert cpu.bytes_per_image > gpu.bytes_per_image + 2 * padded


def test_the_stages_of_a_network_are_stem_stages_and_head():
    result = activation_bytes(lambda: Network(SPECS["tresnet_tiny"]), 64)
    assert list(result.by_stage) == ["stem", *(f"stages.{i}" for i in range(4)), "head", "loss"]
    for stage, size in result.by_stage.items():
        inside = [
            size for layer, size in result.by_layer.items() if (layer or "loss").startswith(stage)
        ]
        assert sum(inside) == size


def test_masks_that_go_around_a_stage_leave_its_bytes_to_it():
    net = Network(SPECS["genet_tiny"])
    plain = activation_bytes(net, 64)
    net.regularise(drop_path=0.5)
    assert set(activation_bytes(net, 64).by_stage) - set(plain.by_stage) <= {
        "between stages"
    }  # the masks
    assert activation_bytes(net, 64).by_stage["stages.1"] >= plain.by_stage["stages.1"]


def test_a_child_with_nearly_all_modules_is_no_stage():
    assert "body.layer3" in stages(zoo.create("timm/tresnet_m"))
    assert "layer3" in stages(zoo.create("timm/resnet50"))


def test_counting_leaves_the_network_and_autocast_alone():
    net = small().eval()
    before = [p.clone() for p in net.parameters()]
    activation_bytes(net, 32)
    assert not net.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert all(
        torch.equal(a, b) and a.device == b.device
        for a, b in zip(before, net.parameters(), strict=True)
    )
    assert not torch.is_autocast_enabled("cuda")


def test_an_image_that_a_network_cannot_take_is_refused_in_one_line():
    with pytest.raises(ValueError, match="takes no 3 x 48 x 48 image") as caught:
        activation_bytes(small, 48)
    assert "\n" not in str(caught.value)


def test_cost_prints_the_bytes_of_training_in_total_and_by_stage(capsys):
    assert (
        cli.run(
            [
                "measure",
                "cost",
                "timm/gernet_l",
                "--resolution",
                "224",
                "--train",
                "--precision",
                "bf16",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "saved for backward in bf16: 23.4 MB" in out
    assert "stages.2" in out
    assert cli.run(["measure", "cost", "genet_tiny", "--train", "--precision", "fp8"]) == 2
    assert "invalid choice 'fp8' for argument '--precision'" in capsys.readouterr().err


def test_a_recipe_of_cost_is_for_training_and_has_a_known_efficiency(tmp_path, capsys):
    assert cli.run(["measure", "cost", "genet_tiny", "--recipe", "genet"]) == 2
    assert "--train" in capsys.readouterr().err
    (tmp_path / "r.json").write_text(json.dumps(asdict(replace(FINETUNE, efficiency="auto"))))
    recipe = ["--recipe", str(tmp_path / "r.json")]
    assert (
        cli.run(["measure", "capacity", "genet_tiny", "--memory-gib", "1", "--predict", *recipe])
        == 2
    )
    assert "--efficiency" in capsys.readouterr().err
