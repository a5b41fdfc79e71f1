"""Padded channels: the same logits, the same training, and the way back."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from networks import randomise

from fullstride import cli
from fullstride.measure import bench_by_name
from fullstride.measure.settings import BenchSettings
from fullstride.measure.tracer import cost, layer_costs
from fullstride.nets import zoo
from fullstride.nets.blocks import SE, Basic, Bottleneck, SpaceToDepthStem, Style, init_tresnet
from fullstride.nets.bundle import Bundle
from fullstride.nets.families.genet import genet
from fullstride.nets.families.resnet_rs import resnet_rs
from fullstride.nets.network import Network
from fullstride.nets.padding import ONES, corner, padded_spec, to_padded, to_unpadded
from fullstride.nets.spec import NetSpec, Stage
from fullstride.tasks import find_task
from fullstride.train import prepare, run, run_folder
from fullstride.train.optimizer import build_optimizer
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS
from fullstride.train.recipes.recipe import Recipe

TRESNET = NetSpec(
    source="ours: TResNet with odd widths",
    stem=SpaceToDepthStem,
    stem_width=12,
    stages=(
        Stage(block=Basic, depth=2, width=12, se=SE(at="out", ratio=1 / 4, least=5)),
        Stage(
            block=Bottleneck, depth=2, width=20, stride=2, ratio=0.3, se=SE(at="inner", ratio=1 / 2)
        ),
        # both would become 24 channels, and the shortcut's convolution an identity
        Stage(block=Bottleneck, depth=1, width=24, ratio=1 / 4, se=SE(at="out", ratio=1 / 4)),
        Stage(block=Basic, depth=1, width=24),  # as wide as the one before it: 32 then
    ),
    style=Style(slope=1e-3, stem_slope=1e-2, blur=True, average_shortcut=True),
    init=init_tresnet,
    classes=5,
    resolution=32,
)
GENET = replace(genet(32, 13, 30, (1, 12), (2, 20), (1, 44), (1, 20), (1, 12)), classes=5)
RS = resnet_rs("ours: ResNet-RS with odd widths", 32, 1, 1, 2, 1)
WIDTHS = (20, 36, 52, 68)
RS_STAGES = tuple(
    replace(stage, width=width) for stage, width in zip(RS.stages, WIDTHS, strict=True)
)
RS = replace(RS, stem_width=13, stages=RS_STAGES, classes=5)
SPECS = {"tresnet": TRESNET, "genet": GENET, "resnet_rs": RS}

STEPS = {
    "sgd": Recipe(
        epochs=1, batch_size=6, lr=0.01, weight_decay=0.01, decay_on="all", warmup_epochs=0
    ),
    "decoupled": Recipe(
        epochs=1,
        batch_size=6,
        lr=0.01,
        weight_decay=0.01,
        decoupled_weight_decay=True,
        warmup_epochs=0,
    ),
    "rmsprop": Recipe(
        epochs=1, batch_size=6, lr=1e-3, weight_decay=0.01, optimizer="rmsprop", warmup_epochs=0
    ),
    "adamw": Recipe(
        epochs=1, batch_size=6, lr=1e-3, weight_decay=0.01, optimizer="adamw", warmup_epochs=0
    ),
}


def made(spec: NetSpec) -> Network:
    """In float64, with every number that matters drawn at random, and in evaluation mode."""
    torch.manual_seed(0)
    net = Network(spec)
    randomise(net, torch.Generator().manual_seed(1), spec.resolution)
    return net.double()


def images(count: int = 6, side: int = 32) -> torch.Tensor:
    return torch.randn(
        count, 3, side, side, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )


def five_steps(net: Network, recipe: Recipe) -> Network:
    optimizer = build_optimizer(net.train(), recipe)
    x, labels = images(), torch.arange(6) % 5
    for step in range(5):
        torch.manual_seed(step)
        F.cross_entropy(net(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def apart(net: Network, other: Network) -> float:
    """The largest difference of a weight or statistic, to 1 or to the largest of its tensor."""
    pairs = zip(net.state_dict().values(), other.state_dict().values(), strict=True)
    return max(((a - b).abs().max() / max(1, b.abs().max())).item() for a, b in pairs)


def check_padding(wide: Network, narrow: Network) -> None:
    """That all beyond the leading corner is zero, but for gains and variances."""
    whole = wide.state_dict()
    for name, value in narrow.state_dict().items():
        if not name.endswith(ONES):
            beyond = whole[name].clone()
            corner(beyond, value).zero_()
            assert not beyond.any(), name


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@torch.no_grad()
def test_a_padded_network_has_the_same_logits_and_features(spec):
    net = made(spec)
    wide = to_padded(net)
    assert all(n % 8 == 0 for n in wide.channels)
    for side in (32, 45):
        x = images(2, side)
        assert (wide(x) - net(x)).abs().max() < 1e-12 * max(1, net(x).abs().max())
        for ours, theirs in zip(wide.features(x), net.features(x), strict=True):
            assert torch.allclose(ours[:, : theirs.shape[1]], theirs, atol=1e-12)
            assert not ours[:, theirs.shape[1] :].any()


@pytest.mark.parametrize(("name", "by"), [*product(SPECS, STEPS)])
def test_training_moves_a_padded_network_as_it_moves_the_plain_one(name, by):
    spec, steps = SPECS[name], STEPS[by]
    net = made(spec)
    net.regularise(drop_path=0.3)
    wide = to_padded(net)
    before = to_unpadded(wide, spec)
    five_steps(wide, steps)
    five_steps(net, steps)
    assert apart(to_unpadded(wide, spec), net) < 1e-9
    assert apart(before, net) > 1e-3
    check_padding(wide, net)


def test_dropout_draws_the_same_masks_where_the_classifier_sees_as_many_channels():
    spec = replace(TRESNET, head_width=32)
    nets = [made(spec), to_padded(made(spec))]
    assert nets[1].spec != spec
    for net in nets:
        net.regularise(drop_path=0.3, dropout=0.4)
        five_steps(net, STEPS["sgd"])
    assert apart(to_unpadded(nets[1], spec), nets[0]) < 1e-9


def test_a_padded_network_keeps_settings_and_draws_nothing():
    net = made(GENET)
    net.regularise(drop_path=0.2, dropout=0.4)
    net.head.fc.requires_grad_(False)
    net.train().stem.conv.norm.eval()
    net.stem.conv.norm.momentum = 0.01
    torch.manual_seed(3)
    wide = to_padded(net)
    drawn = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4))
    for other in (wide, to_unpadded(wide, GENET)):
        assert (other.drop_paths, other.dropout) == (net.drop_paths, 0.4)
        assert [m.training for m in other.modules()] == [m.training for m in net.modules()]
        assert [p.requires_grad for p in other.parameters()] == [
            p.requires_grad for p in net.parameters()
        ]
        assert {p.dtype for p in other.parameters()} == {torch.float64}
        assert other.stem.conv.norm.momentum == 0.01
    assert apart(to_unpadded(wide, GENET), net) == 0


def test_where_no_channel_is_missing_the_network_itself_comes_back():
    net = Network(zoo.spec("genet_tiny"))
    assert to_padded(net) is net
    assert to_unpadded(net, net.spec) is net


@pytest.mark.parametrize("name", ["tresnet_l", "tresnet_xl", "genet_light"])
def test_every_convolution_of_a_padded_network_has_channels_in_eights(name):
    for row in layer_costs(lambda: to_padded(zoo.create(name)), 64):
        assert row.shape_out[0] % 8 == 0, row
        assert row.shape_in[0] % 8 == 0 or row.name == "stem.conv.conv", row


def test_tresnet_l_pays_for_the_channels_of_its_stem_and_first_stage():
    plain = cost(lambda: zoo.create("tresnet_l"), 224).macs
    wide = cost(lambda: to_padded(zoo.create("tresnet_l")), 224).macs
    basic, se = 2 * 9 * (80**2 - 76**2), 2 * 64 * 4
    first = (
        56**2 * (9 * 48 * 4 + 4 * basic + 9 * 4 * 152) + 4 * se + 28**2 * 4 * 152
    )  # the last: a shortcut
    assert wide - plain == first


@pytest.mark.slow
def test_what_the_docs_say_of_the_price_is_counted():
    shares = []
    for name in ("tresnet_l", "tresnet_xl", "genet_light"):
        plain = cost(lambda n=name: zoo.create(n), 64).macs
        wide = cost(lambda n=name: to_padded(zoo.create(n)), 64).macs
        shares.append(f"{100 * (wide / plain - 1):.1f} %")
    docs = (Path(__file__).parents[2] / "docs/guides/training.md").read_text()
    assert f"{shares[0]}, {shares[1]} and {shares[2]} multiply-adds" in " ".join(docs.split())


def test_a_deep_stem_has_whole_eights_in_its_half_too():
    assert padded_spec(RS).stem_width == 16
    assert padded_spec(replace(RS, stem_width=24)).stem_width == 32


def test_depthwise_groups_grow_and_others_must_divide():
    def grouped(width: int, group_width: int, ratio: float = 1, basic_stem: int = 0) -> NetSpec:
        stage = Stage(
            block=Basic if basic_stem else Bottleneck,
            depth=2,
            width=width,
            stride=2,
            group_width=group_width,
            ratio=ratio,
        )
        return replace(GENET, stages=(stage,), stem_width=basic_stem or GENET.stem_width)

    for spec in (grouped(20, 1), grouped(20, 4), grouped(44, 4, ratio=3)):
        net = made(spec)
        x = images(2)
        assert to_padded(net).spec != spec
        assert (to_padded(net)(x) - net(x)).abs().max() < 1e-12
    with pytest.raises(
        ValueError, match=r"^36 inner channels padded to 40 do not divide into groups of 12"
    ):
        to_padded(Network(grouped(36, 12)))
    same = grouped(12, 6, basic_stem=16)
    with pytest.raises(
        ValueError, match="12 inner channels padded to 16 do not divide into groups of 6"
    ):
        to_padded(Network(same))
    with pytest.raises(ValueError, match=r"^groups of \(8, 4\) channels would become \(6, 4\)"):
        to_padded(Network(grouped(12, 4, basic_stem=24)))
    with pytest.raises(ValueError, match=r"cannot be built \(8 channels in .* into 3 groups"):
        to_padded(Network(grouped(24, 8, basic_stem=6)))


def test_the_way_back_loses_nothing_without_a_word():
    net = made(TRESNET)
    wide = to_padded(net)
    with pytest.raises(
        ValueError,
        match="in more than widths",
    ):
        to_unpadded(wide, replace(TRESNET, classes=6))
    wider = replace(TRESNET.stages[1], width=30, ratio=0.2)
    with pytest.raises(
        ValueError,
        match=r"conv.weight has \(24, 16, 1, 1\), less than \(30, 12, 1, 1\)",
    ):
        to_unpadded(wide, replace(TRESNET, stages=(TRESNET.stages[0], wider, *TRESNET.stages[2:])))
    as_before = replace(
        TRESNET.stages[2], width=20, ratio=0.3
    )  # and so with an identity for its shortcut
    with pytest.raises(
        ValueError,
        match="the network has other modules than that spec",
    ):
        to_unpadded(
            wide, replace(TRESNET, stages=(*TRESNET.stages[:2], as_before, TRESNET.stages[3]))
        )
    for name in (
        "stages.1.0.branch.conv2.conv.weight",
        "stages.2.0.branch.se.reduce.bias",
        "head.fc.weight",
    ):
        moved = to_padded(net)
        moved.state_dict()[name].view(-1)[-1] = 1e-30
        with pytest.raises(ValueError, match=f"the padding of {name} is not zero"):
            to_unpadded(moved, TRESNET)


SHORT = replace(
    DIGITS,
    epochs=2,
    warmup_epochs=0,
    lr=0.02,
    resolution=16,
    batch_size=16,
    dropout=0.2,
    drop_path=0.2,
)


def trained(folder) -> dict[str, torch.Tensor]:
    return Bundle.load(folder / run_folder.BUNDLE).net.state_dict()


@pytest.mark.parametrize("changes", [{}, {"early_stop_patience": 1}], ids=str)
def test_a_run_that_learns_padded_ships_what_was_asked_for_with_the_same_weights(
    changes, few_digits, tmp_path
):
    recipe = replace(SHORT, **changes)
    for name, padding in (("plain", False), ("padded", True)):
        list(
            run.train(
                tmp_path / name, "tresnet_tiny", few_digits, replace(recipe, pad_channels=padding)
            )
        )
    asked = [
        json.loads((tmp_path / name / run_folder.RUN_CONFIG).read_text())["spec"]
        for name in ("plain", "padded")
    ]
    assert asked[0] == asked[1]
    learned = run_folder.load_checkpoint(tmp_path / "padded")
    assert learned
    assert learned["net"]["stem.conv.conv.weight"].shape[0] == 16
    plain, wide = trained(tmp_path / "plain"), trained(tmp_path / "padded")
    for name, value in plain.items():
        assert torch.allclose(value, wide[name], rtol=1e-4, atol=1e-6), name
    scores = [
        Bundle.load(tmp_path / name / run_folder.BEST).scores["val"] for name in ("plain", "padded")
    ]
    assert scores[0]["loss"] == pytest.approx(scores[1]["loss"], rel=1e-3)
    tuned = replace(SHORT, pad_channels=True, epochs=1)
    start = prepare.initial_weights("tresnet_tiny", str(tmp_path / "padded"))
    net, _ = prepare.initial_network("tresnet_tiny", find_task(), few_digits, tuned, start)
    assert (
        apart(
            to_unpadded(to_padded(net), net.spec),
            Bundle.load(tmp_path / "padded" / run_folder.BUNDLE).net,
        )
        == 0
    )


def test_a_padded_run_stopped_within_an_epoch_goes_on_to_the_same_weights(
    few_digits, tmp_path, monkeypatch
):
    recipe = replace(SHORT, pad_channels=True)
    list(run.train(tmp_path / "whole", "tresnet_tiny", few_digits, recipe))
    save, count = run_folder.save_checkpoint, iter(range(100))

    def stop_at_the_third(folder, state):
        save(folder, state)
        if next(count) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "save_checkpoint", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        list(
            run.train(
                tmp_path / "stopped",
                "tresnet_tiny",
                few_digits,
                recipe,
                RunOptions(checkpoint_every_steps=1),
            )
        )
    monkeypatch.setattr(run_folder, "save_checkpoint", save)
    list(
        run.train(
            tmp_path / "stopped",
            "tresnet_tiny",
            few_digits,
            recipe,
            RunOptions(checkpoint_every_steps=1),
        )
    )
    ours, theirs = trained(tmp_path / "stopped"), trained(tmp_path / "whole")
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_bench_measures_padded_networks_beside_an_unpadded_reference(capsys):
    settings = BenchSettings(padded=True, reference="tresnet_tiny")
    nets = bench_by_name.plan(["tresnet_tiny"], settings).nets
    stem_widths = {name: net.spec.stem_width for name, net in nets.items()}
    assert stem_widths == {"tresnet_tiny": 12, "tresnet_tiny padded": 16}
    assert cli.run(["bench", "timm/test_resnet", "--padded", "--device", "cpu"]) == 2
    assert "timm/test_resnet has no padded form" in capsys.readouterr().err


def test_a_network_of_timm_has_no_padded_form(few_digits, tmp_path):
    with pytest.raises(
        ValueError,
        match="timm/test_resnet has no padded form",
    ):
        to_padded(zoo.create("timm/test_resnet"), "timm/test_resnet")
    with pytest.raises(
        ValueError,
        match="timm/test_resnet has no padded form",
    ):
        list(
            run.train(
                tmp_path / "run", "timm/test_resnet", few_digits, replace(SHORT, pad_channels=True)
            )
        )
