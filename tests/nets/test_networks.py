"""Every network, through the same sentences."""

import copy
import json
import re
from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from fullstride.nets import zoo
from fullstride.nets.blocks import Basic, Block, Bottleneck
from fullstride.nets.families import SPECS
from fullstride.nets.layers import BlurPool, SpaceToDepth
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec, Stage
from fullstride.nets.timm_wrapper import TimmNetwork

TINY = ("tresnet_tiny", "resnet_rs_tiny", "genet_tiny")
# One of each shape of network, small enough to be run: every stem, every block, every style.
SMALL = (*TINY, "tresnet_v2_l", "resnet18", "resnet50d", "masternet_1", "profilingnet_132")


def small(name: str, **changes: int) -> Network:
    spec = SPECS[name] if name in TINY else SPECS[name].scaled(width=1 / 8, depth=1 / 4)
    return Network(replace(spec, classes=7, **changes)).eval()


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_goes_to_json_and_back_unchanged(name):
    assert NetSpec.from_json(SPECS[name].to_json()) == SPECS[name]


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_names_its_source(name):
    assert "arXiv:" in SPECS[name].source or SPECS[name].source.startswith("ours:")


@pytest.mark.parametrize("name", TINY)
def test_the_tiny_networks_have_less_than_half_a_million_parameters(name):
    assert sum(p.numel() for p in Network(SPECS[name]).parameters()) < 500_000


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (31, 33), (64, 40)], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_any_image_size_is_accepted_and_the_pyramid_is_as_described(name, size):
    net = small(name)
    x = torch.rand(2, 3, *size)
    with torch.inference_mode():
        maps, logits = net.features(x), net(x)
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()
    assert [m.shape[1] for m in maps] == list(net.channels)
    for m, stride in zip(maps, net.strides, strict=True):
        assert tuple(m.shape[2:]) == tuple(-(-side // stride) for side in size)


@pytest.mark.parametrize("name", SMALL)
def test_the_logits_come_from_the_last_map_of_the_pyramid(name):
    net = small(name)
    x = torch.rand(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(net(x), net.head(net.features(x)[-1]))


@pytest.mark.parametrize("name", SMALL)
def test_one_image_does_not_change_the_logits_of_another(name):
    net = small(name).double()
    x = torch.rand(3, 3, 48, 48, dtype=torch.float64)
    with torch.inference_mode():
        together, alone = net(x)[:1], net(x[:1])
    assert (together - alone).abs().max() <= 1e-9 * alone.abs().max()


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("name", SMALL)
def test_input_channels_and_classes_are_as_asked(name, channels):
    net = small(name, in_channels=channels)
    with torch.inference_mode():
        assert net(torch.rand(1, channels, 32, 32)).shape == (1, 7)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_of_a_network_gets_a_gradient(name):
    net = small(name).train()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(
                norm.weight, 0.5, 1.5
            )  # zero gains of a fresh network would stop gradients
    net(torch.rand(4, 3, 64, 64)).square().sum().backward()
    assert [n for n, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []


def test_a_multiplier_of_one_changes_nothing_and_others_multiply_every_width_and_depth():
    spec = SPECS["tresnet_xl"]
    assert spec.scaled() == spec
    half = SPECS["resnet_rs_50"].scaled(width=0.5, depth=2)
    assert half.stem_width == 32
    assert [(s.width, s.inner, s.depth) for s in half.stages] == [
        (128, 32, 6),
        (256, 64, 8),
        (512, 128, 12),
        (1024, 256, 6),
    ]


def test_halves_are_rounded_up_when_a_network_is_scaled():
    stage = Stage(block=Bottleneck, depth=1, width=64, ratio=1)
    spec = replace(SPECS["resnet50"], stages=tuple(replace(stage, depth=d) for d in range(1, 11)))
    assert [s.depth for s in spec.scaled(depth=0.5).stages] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    for eighths in range(8, 64):  # TResNet's own code: int((64 * width + 4) / 8) * 8
        width = eighths / 32
        assert spec.scaled(width=width).stages[0].width == int((64 * width + 4) / 8) * 8


def test_scaled_widths_are_multiples_of_eight_and_of_the_group_width():
    spec = replace(
        SPECS["resnet50"],
        stages=(Stage(block=Bottleneck, depth=2, width=96, ratio=1, group_width=24),),
    )
    (stage,) = spec.scaled(width=1.7).stages
    assert stage.width % 8 == 0
    assert stage.inner % 24 == 0


def fits(stage: Stage) -> bool:
    return stage.width % 8 == 0 and stage.inner % stage.group_width == 0


@pytest.mark.parametrize(
    ("width", "ratio", "group_width"),
    [(32, 3, 16), (24, 1, 12), (96, 1 / 3, 16), (160, 0.3, 16), (64, 0.25, 8), (120, 5 / 6, 20)],
)
def test_a_scaled_width_is_the_nearest_multiple_of_eight_that_the_groups_allow(
    width, ratio, group_width
):
    first = Stage(block=Bottleneck, depth=1, width=width, ratio=ratio, group_width=group_width)
    spec = replace(SPECS["resnet50"], stages=(first,))
    for multiplier in (0.01, 0.3, 0.75, 1.25, 1.5, 3.7):
        (stage,) = spec.scaled(width=multiplier).stages
        assert fits(stage)
        off = abs(stage.width - multiplier * width)
        for other in range(8, 2048, 8):
            if round(other * ratio) and round(other * ratio) % group_width == 0:
                assert abs(other - multiplier * width) >= off, (multiplier, other)


def test_a_multiplier_that_no_width_allows_is_refused():
    first = Stage(block=Bottleneck, depth=1, width=64, ratio=1, group_width=32)
    with pytest.raises(ValueError, match="width 131072"):
        replace(SPECS["resnet50"], stages=(replace(first, width=2048),)).scaled(width=64)


def test_space_to_depth_orders_channels_by_row_then_column_then_colour():
    x = torch.arange(3 * 8 * 8.0).view(1, 3, 8, 8)
    folded = SpaceToDepth()(x)
    for row in range(4):
        for column in range(4):
            for colour in range(3):
                assert (
                    folded[0, (row * 4 + column) * 3 + colour, 1, 0]
                    == x[0, colour, 4 + row, column]
                )


def test_the_blur_keeps_a_constant_map_and_halves_it_rounding_up():
    blurred = BlurPool(2)(torch.full((1, 2, 5, 6), 3.0))
    assert blurred.shape == (1, 2, 3, 3)
    assert torch.allclose(blurred, torch.tensor(3.0))


@pytest.mark.parametrize("name", ["tresnet_tiny", "resnet_rs_tiny"])
def test_a_fresh_block_of_tresnet_and_resnet_rs_is_its_shortcut(name):
    net = small(name)
    for block in net.modules():
        if isinstance(block, Block):
            x = torch.rand(1, *next(p for p in block.branch.parameters()).shape[1:2], 8, 8)
            assert torch.allclose(block(x), block.shortcut(x).relu())


def test_fresh_weights_have_the_spread_that_their_paper_gives_them():
    torch.manual_seed(0)

    def spread(name: str) -> float:
        kernel = (
            Network(SPECS[name].scaled(width=1 / 2, depth=1 / 4))
            .stages[1][0]
            .branch.conv2.conv.weight
        )
        assert kernel.shape == ((96, 96, 3, 3) if name == "genet_normal" else (64, 64, 3, 3))
        return kernel.std().item()

    assert spread("tresnet_m") == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)
    assert spread("resnet_rs_50") == pytest.approx((1 / (9 * 64)) ** 0.5, rel=0.02)
    assert spread("genet_normal") == pytest.approx(3.26033 * (2 / (9 * 192)) ** 0.5, rel=0.02)


def test_stochastic_depth_leaves_out_whole_branches_and_keeps_the_mean():
    net = small("resnet_rs_tiny").train()
    net.regularise(drop_path=0.8, dropout=0.5)
    assert net.drop_paths == pytest.approx((0.0, 0.2, 0.4, 0.6, 0.8))
    masks = net.draw(4000)
    assert masks.branches[0] is None
    for rate, mask in zip(net.drop_paths[1:], masks.branches[1:], strict=True):
        assert mask.shape == (4000, 1, 1, 1)
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)])
        assert mask.mean().item() == pytest.approx(1, abs=0.1)
    net.regularise(drop_path=0.1, by="stage")
    assert net.drop_paths == pytest.approx(
        (0.04, 0.06, 0.08, 0.08, 0.1)
    )  # tensorflow/tpu@7dc921f: rate * (i + 2) / 5


def test_a_dropped_branch_leaves_the_shortcut_and_masks_change_nothing_in_evaluation():
    net = small("resnet18")
    x = torch.rand(2, 3, 32, 32)
    block = net.stages[0][0]
    inside = torch.rand(2, 8, 8, 8)
    with torch.inference_mode():
        assert torch.equal(block(inside, torch.zeros(2, 1, 1, 1)), block.shortcut(inside).relu())
        before = net(x)
        net.regularise(drop_path=0.9, dropout=0.9)
        assert torch.equal(net(x), before)
        ones = net.draw(2)._replace(
            branches=(None,) * len(net.drop_paths), pooled=torch.ones(2, 64)
        )
        assert torch.equal(net(x, ones), before)


def test_a_masked_branch_in_16_bits_is_the_exact_product_rounded_once():
    block = small("resnet18").stages[0][0].train()
    x, mask = torch.randn(4, 8, 8, 8), torch.tensor([0.0, 1 / 0.9, 1 / 0.7, 1.0]).view(-1, 1, 1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        branch, y = block.branch(x), block(x.bfloat16(), mask)
    product = (branch.double() * mask.double()).bfloat16()
    assert (branch.dtype, y.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(y, (product + x.bfloat16()).relu())
    assert torch.equal(block(x, mask), (block.branch(x) * mask + x).relu())


def test_masks_are_inputs_so_that_the_same_ones_give_the_same_step():
    net = small("genet_tiny").train()
    net.regularise(drop_path=0.5, dropout=0.5)
    x, masks = torch.rand(4, 3, 32, 32), net.draw(4)
    assert torch.equal(net(x, masks), net(x, masks))
    assert not torch.equal(net(x), net(x))


@pytest.mark.parametrize("name", SMALL)
def test_an_embedding_is_what_the_classifier_sees_and_comes_with_the_same_logits(name):
    net = small(name)
    net.regularise(drop_path=0.5, dropout=0.5)
    x, masks = torch.rand(4, 3, 32, 32), net.draw(4)
    seen = []
    net.head.fc.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for training in (False, True):
        net.train(training)
        for given in (None, masks) if not training else (masks,):
            seen.clear()
            wanted = net(x, given)
            logits, embedding = net.logits_and_embedding(x, given)
            assert torch.equal(logits, wanted)
            assert torch.equal(embedding, net.embed(x, given))
            assert embedding.shape == (4, net.head.fc.in_features)
            keep = given.pooled if given else None
            assert torch.equal(embedding if keep is None else embedding * keep, seen[0])
    torch.manual_seed(0)
    drawn = net(x)
    torch.manual_seed(0)
    assert torch.equal(net.logits_and_embedding(x)[0], drawn)


@pytest.mark.parametrize("name", ["timm/resnet18", "timm/mobilenetv3_small_050", "timm/gernet_s"])
def test_a_network_of_timm_gives_its_embedding_with_the_same_logits(name):
    net = zoo.create(name, classes=5, resolution=64)
    assert isinstance(net, TimmNetwork)
    if name != "timm/mobilenetv3_small_050":
        net.regularise(drop_path=0.5)
    x, seen = torch.rand(4, 3, 64, 64), []
    before = copy.deepcopy(net.state_dict())
    net.get_submodule(net.classifier).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    for training in (False, True):
        net.train(training)
        answers = []
        for call in (lambda: (net(x), seen[-1]), lambda: net.logits_and_embedding(x)):
            net.load_state_dict(before)
            torch.manual_seed(0)
            answers.append((*call(), *net.state_dict().values()))
        assert net.training == training
        assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))
        assert answers[0][1].shape == (4, net.get_submodule(net.classifier).in_features)
    assert net.embed(x).shape == answers[0][1].shape


@pytest.mark.parametrize("name", ["timm/efficientvit_m0", "timm/dla46_c", "timm/crossvit_tiny_240"])
def test_a_network_of_timm_whose_logits_are_not_of_its_embedding_is_refused(name):
    net = zoo.create(name, classes=5)  # a norm in between; a convolution; two classifiers
    assert isinstance(net, TimmNetwork)
    with pytest.raises(ValueError, match=f"^{name} .*embedding"):
        net.embed(torch.rand(1, 3, 224, 224))


def test_an_embedding_of_timm_is_not_trained_with_dropout():
    net = zoo.create("timm/resnet18", classes=5, resolution=64)
    net.regularise(dropout=0.5)
    assert isinstance(net, TimmNetwork)
    with pytest.raises(ValueError, match="timm/resnet18 .*dropout"):
        net.train().logits_and_embedding(torch.rand(2, 3, 64, 64))
    assert net.eval().embed(torch.rand(2, 3, 64, 64)).shape == (2, 512)


def test_an_unknown_network_is_refused_with_near_misses():
    with pytest.raises(ValueError, match="no network named 'tresnet_s': did you mean tresnet_"):
        zoo.create("tresnet_s")
    with pytest.raises(
        ValueError, match="timm has no network named 'resnet51': did you mean timm/resnet"
    ):
        zoo.create("timm/resnet51")
    with pytest.raises(ValueError, match="named 'efficientnet_b0': did you mean timm/effic"):
        zoo.spec("efficientnet_b0")
    with pytest.raises(ValueError, match="timm has no network named 'hf-hub:evil/net'"):
        zoo.create("timm/hf-hub:evil/net")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(stride=3), "stride 3 of a stage: use 1 or 2"),
        (dict(kernel=4), "kernel 4 of a stage: use an odd number"),
        (dict(depth=0), "depth 0: use a whole number"),
        (dict(width=10**9), "width 1000000000: use a whole number"),
        (dict(width=400, group_width=48), "set width=384, or another group_width"),
        (dict(width=8, group_width=10**6), "groups of 1000000: set another group_width"),
    ],
)
def test_a_stage_that_cannot_be_built_is_refused_with_what_would_work(change, message):
    with pytest.raises(ValueError, match=message):
        Stage(**{"block": Basic, "depth": 1, "width": 64, **change})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(width=48, group_width=1), "16 channels in and 48 out do not divide into 48 groups"),
        (dict(width=32, ratio=0.375, group_width=4), "16 channels in and 32 out .* into 3 groups"),
    ],
)
def test_groups_that_do_not_divide_the_channels_of_basic_blocks_are_refused(change, told):
    stage = Stage(block=Basic, depth=1, **change)
    with pytest.raises(ValueError, match=told) as error:
        replace(SPECS["genet_tiny"], stages=(stage,))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("width", [5, 37, 101])
@pytest.mark.parametrize("ratio", [3, 1 / 3, 0.7])
@pytest.mark.parametrize("group_width", [16, 22, 48])
def test_the_width_that_an_error_recommends_can_be_built(width, ratio, group_width):
    settings = dict(block=Bottleneck, depth=1, ratio=ratio, group_width=group_width)
    with pytest.raises(ValueError, match=r"set width=\d+") as error:
        Stage(width=width, **settings)
    fitting = int(re.findall(r"set width=(\d+)", str(error.value))[0])
    assert Stage(width=fitting, **settings).groups >= 1


@pytest.mark.parametrize(
    "change",
    [
        {"stem": "os.system"},
        {"stem": "Basic"},
        {"init": "ConvStem"},
        {"stages": [{"block": "ConvStem", "depth": 1, "width": 8}]},
        {"stages": [{"block": "Basic", "depth": 10**9, "width": 8}]},
        {"stages": [{"block": "Basic", "depth": 1000, "width": 8}] * 3},
        {"stages": "many"},
        {"colour": "red"},
        {"classes": -1},
        {"style": {"slope": 0, "speed": 1}},
    ],
    ids=str,
)
def test_json_that_names_anything_else_than_our_parts_is_refused(change):
    text = json.dumps({**json.loads(SPECS["genet_tiny"].to_json()), **change})
    with pytest.raises(ValueError, match=r"\w") as refused:
        NetSpec.from_json(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["timm/resnet18", "timm/tresnet_m", "timm/mobilenetv3_small_050"])
def test_a_network_of_timm_stands_where_ours_stand(name):
    net = zoo.create(name, classes=5, in_channels=1, resolution=64).eval()
    with torch.inference_mode():
        x = torch.rand(2, 1, 64, 64)
        assert net(x).shape == (2, 5)
        maps = net.features(x)
    assert [m.shape[1] for m in maps] == list(net.channels)
    assert [64 // m.shape[2] for m in maps] == list(net.strides)


@pytest.mark.parametrize("chosen", [(1, 3), (3, 1), (-1,), (2, -3)])
def test_out_indices_choose_the_maps_that_timm_chooses(chosen):
    theirs = timm.create_model("resnet10t", features_only=True, out_indices=chosen).eval()
    net = zoo.create("timm/resnet10t").eval()
    net.net.load_state_dict(theirs.state_dict(), strict=False)  # theirs has no classifier
    x = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        for ours, expected in zip(net.features(x, chosen), theirs(x), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", ["genet_tiny", "resnet_rs_tiny", "timm/resnet10t"])
def test_out_indices_are_numbers_of_channels_and_strides(name):
    net, x = zoo.create(name, in_channels=1).eval(), torch.rand(1, 1, 64, 64)
    with torch.inference_mode():
        maps = net.features(x)
        for chosen in ([0], [1, 2], [0, -1], range(len(net.strides))):
            expected = [maps[i] for i in chosen]
            for ours, theirs in zip(net.features(x, chosen), expected, strict=True):
                assert torch.equal(ours, theirs)
            assert [m.shape[1] for m in expected] == [net.channels[i] for i in chosen]
    for chosen in ([], [len(maps)], [-1 - len(maps)]):
        with pytest.raises(ValueError, match=f"{len(maps)} maps, so use numbers from 0 to"):
            net.features(x, chosen)


def test_out_indices_are_refused_where_maps_of_two_strides_have_one_size():
    net = zoo.create("timm/resnet10t").eval()
    assert (len(net.strides), len(net.features(torch.rand(1, 3, 16, 16)))) == (5, 4)
    for chosen in ([4], [0, 3]):
        with pytest.raises(ValueError, match="4 sizes of maps for 16 x 16 images and 5 strides"):
            net.features(torch.rand(1, 3, 16, 16), chosen)


def test_stages_behind_the_last_chosen_map_are_not_computed():
    net = zoo.create("genet_tiny")
    net.stages[-1] = None
    assert len(net.features(torch.rand(1, 3, 64, 64), (0, 1))) == 2


def test_strides_are_whole_where_the_resolution_of_the_weights_does_not_divide():
    net = zoo.create("timm/resnet10t").eval()  # 176 pixels, whose last map has 6
    with torch.inference_mode():
        maps = net.features(torch.rand(1, 3, 64, 64))
    assert list(net.strides) == [64 // m.shape[2] for m in maps] == [2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    ("name", "side", "works"),
    [("deit_tiny_patch16_224", 32, 224), ("levit_128", 64, 224), ("inception_v3", 8, 299)],
)
def test_a_size_that_a_network_of_timm_does_not_take_is_refused_with_one_that_it_takes(
    name, side, works
):
    net = zoo.create(f"timm/{name}", classes=2, in_channels=1, resolution=side).eval()
    assert isinstance(net, TimmNetwork)
    with pytest.raises(ValueError, match=f"takes no {side} x {side}.* {works} x {works}"):
        net(torch.rand(1, 1, side, side))
    net.check_size(works, works)


def test_another_error_of_a_network_of_timm_is_not_taken_for_its_size():
    net = zoo.create("timm/resnet18", classes=2).eval()
    net.get_submodule("net.fc").register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(torch.rand(1, 3, 32, 32))
    with pytest.raises(RuntimeError, match="channels"):
        net(torch.rand(1, 4, 32, 32))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(frames=8), "images, and no clips of 8 frames"),
        (dict(classes=0), "classes 0: use"),
        (dict(in_channels=0), "in_channels 0: use"),
    ],
)
def test_what_a_network_of_timm_cannot_be_is_refused_in_one_line(changes, says):
    with pytest.raises(ValueError, match=says) as error:
        zoo.create("timm/resnet10t", **changes)
    assert "\n" not in str(error.value)
    assert zoo.create("timm/resnet10t", frames=0, classes=1).spec.frames == 0


def test_networks_of_timm_are_not_scaled():
    with pytest.raises(ValueError, match="timm/resnet18 cannot be scaled"):
        zoo.create("timm/resnet18", width=0.5)
