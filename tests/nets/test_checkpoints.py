"""Released files become our weights, by names and shapes, or the difference is a line."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision
from networks import randomise
from PIL import Image
from timm.layers import BlurPool2d, ConvNormAct
from timm.models.tresnet import TResNet
from torch import nn
from torchvision import transforms

from fullstride.data.transforms.crop import test_view
from fullstride.nets import checkpoints, zoo
from fullstride.nets.families import SPECS
from fullstride.nets.families.tresnet import tresnet, tresnet_v2
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.weights import convert, hub, key_maps, reader

EPSILON = 1e-5  # of in-place activated batch norm

SMALL = {False: tresnet("test", 16, 1, 2, 2, 1), True: tresnet_v2("test", 16, 1, 2, 2, 1)}
SMALL_RS = SPECS["resnet_rs_50"].scaled(depth=0.1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def small_tresnet(v2=False):
    return TResNet([1, 2, 2, 1], width_factor=0.25, v2=v2)


def images(generator, dtype=torch.float64):
    return torch.randn(2, 3, 64, 96, generator=generator, dtype=dtype)


@torch.inference_mode()
def same_logits(ours, theirs, generator, bound=1e-9):
    x = images(generator)
    expected, got = theirs.eval().double()(x), ours.eval().double()(x)
    return expected.std() > 0.1 and (got - expected).abs().max() <= bound * expected.abs().max()


def network(spec, state):
    net = Network(spec).double()
    net.load_state_dict(state)
    return net


def identify(state):
    match = convert.find(convert.normalize(reader.unwrap(state).state, ema=None), None)
    return match.format, match.name


def official_tresnet(theirs, generator, *, count=True, filters=True):
    """What the authors' code would have saved for `theirs`, whose gains are set to |w| + 1e-5
    here."""
    blurred = [
        name
        for name, layer in theirs.named_modules()
        if isinstance(layer, ConvNormAct) and isinstance(layer.aa, BlurPool2d)
    ]
    assert len(blurred) == 3
    gains = {}
    for name, layer in theirs.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            gains[name] = torch.randn(layer.weight.shape, generator=generator)
            gains[name][::5] = 0
            layer.weight.data = gains[name].abs() + EPSILON
    state = {}
    for key, value in theirs.state_dict().items():
        layer, _, leaf = key.rpartition(".")
        parent, _, last = layer.rpartition(".")
        if leaf == "num_batches_tracked" and not count:
            continue
        if last in ("conv", "bn"):
            layer = f"{parent}{'.0' if parent in blurred else ''}.{0 if last == 'conv' else 1}"
        state[f"{layer}.{leaf}"] = (
            gains[f"{parent}.bn"] if last == "bn" and leaf == "weight" else value.clone()
        )
    if filters:
        for name in blurred:
            c = theirs.get_submodule(name).bn.num_features
            state[f"{name}.1.op.filt"] = torch.full((c, 1, 3, 3), 1 / 16)
    return state


WRAPPERS = {
    "bare": lambda state: state,
    "model": lambda state: {"model": state},
    "state_dict": lambda state: {
        "epoch": 3,
        "state_dict": state,
        "optimizer": {"lr": 0.1},
        "score": torch.ones(1),
    },
    "parallel": lambda state: {"model": {f"module.{name}": value for name, value in state.items()}},
    "averaged": lambda state: {"state_dict_ema": state},
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_official_tresnet_is_timm_with_the_magnitude_of_gains(v2, wrap, tmp_path, generator):
    theirs = randomise(small_tresnet(v2), generator)
    torch.save(
        wrap(official_tresnet(theirs, generator, count=v2, filters=not v2)),
        tmp_path / "weights.pth",
    )
    ours = network(SMALL[v2], checkpoints.from_official(tmp_path / "weights.pth", SMALL[v2]))
    assert same_logits(ours, theirs, generator)


def test_old_files_of_torch_are_read_too(tmp_path, generator):
    theirs = randomise(small_tresnet(), generator)
    state = official_tresnet(theirs, generator)
    torch.save(state, tmp_path / "weights.pth", _use_new_zipfile_serialization=False)
    assert same_logits(checkpoints.load(tmp_path / "weights.pth", SMALL[False]), theirs, generator)


def test_the_gain_is_converted_exactly_once(generator):
    theirs = randomise(small_tresnet(), generator)
    once = checkpoints.from_official(official_tresnet(theirs, generator), SMALL[False])
    assert torch.equal(once["stem.conv.norm.weight"], theirs.body.conv1.bn.weight)
    by_timm = checkpoints.from_official(theirs.state_dict(), SMALL[False])
    twice = checkpoints.from_official(once, SMALL[False])
    again = checkpoints.from_timm(once, SMALL[False])
    for name, value in once.items():
        assert torch.equal(value, by_timm[name])
        assert torch.equal(value, twice[name])
        assert torch.equal(value, again[name])


def test_negative_gains_of_timm_stay_negative(generator):
    theirs = randomise(small_tresnet(), generator)
    ours = checkpoints.from_official(theirs.state_dict(), SMALL[False])
    assert (ours["stem.conv.norm.weight"] < 0).any()


def cars_of_timm(classes=196):
    """TResNet-V2-L of timm, with the slopes of the authors' weights for Stanford Cars."""
    theirs = timm.create_model("tresnet_v2_l", num_classes=classes)
    for layer in theirs.modules():
        if isinstance(layer, nn.LeakyReLU):
            layer.negative_slope = 1e-6
    return theirs


@pytest.mark.slow
def test_the_official_weights_for_cars_have_their_own_slopes(tmp_path, generator):
    theirs = randomise(cars_of_timm(), generator)
    torch.save({"model": official_tresnet(theirs, generator)}, tmp_path / "any name.pth")
    ours = checkpoints.load(tmp_path / "any name.pth")
    assert same_logits(ours, theirs, generator)
    other = checkpoints.load(tmp_path / "any name.pth", "tresnet_v2_l")
    assert not same_logits(other, theirs, generator, bound=1e-3)


def meta_official(name, classes=1000):
    """Weights without numbers in the authors' names, for what is known by names and shapes."""
    spec = replace(SPECS[name], classes=classes)
    names = convert.parameter_names("official", spec)
    state = key_maps.meta_network(spec).state_dict()
    return {names[key]: value for key, value in state.items()}


def test_of_two_networks_with_the_same_shapes_the_authors_classes_decide():
    for classes, name, other in (
        (196, "tresnet_v2_l_cars", "tresnet_v2_l"),
        (1000, "tresnet_v2_l", "tresnet_v2_l_cars"),
        (11_221, "tresnet_v2_l", "tresnet_v2_l_cars"),
    ):
        match = convert.find(meta_official("tresnet_v2_l", classes), None)
        assert (match.name, match.others) == (name, (other,))
    # timm has one network of these shapes, whatever its classes
    match = convert.find(meta_state("tresnet_v2_l", num_classes=196), None)
    assert (match.name, match.others) == ("tresnet_v2_l", ())


RELEASED = {
    "tresnet_m.pth": ("tresnet_m", 1000, 224, "crop"),
    "tresnet_m_448.pth": ("tresnet_m", 1000, 448, "squish"),
    "tresnet_m_448-bc359d10.pth": ("tresnet_m", 1000, 448, "squish"),
    "TResNet_L_448 (1).pth": ("tresnet_l", 1000, 448, "squish"),
    "tresnet_xl_82_0-a2d51b00.pth": ("tresnet_xl", 1000, 224, "crop"),
    "tresnet_m_1k_miil_83_1-d236afcb.pth": ("tresnet_m", 1000, 224, "squish"),
    "tresnet_m_miil_21k.pth": ("tresnet_m", 11_221, 224, "squish"),
    "stanford_cars_tresnet-l-v2_96_27.pth": ("tresnet_v2_l_cars", 196, 368, "squish"),
    "GENet_small.pth": ("genet_light", 1000, 192, "crop"),
    "GENet_normal.pth": ("genet_normal", 1000, 192, "crop"),
    "GENet_large.pth": ("genet_large", 1000, 256, "crop"),
    "resnet-rs-152-i224.npz": ("resnet_rs_152", 1000, 224, "crop"),
}


@pytest.mark.parametrize(("file", "row"), RELEASED.items(), ids=RELEASED)
def test_a_released_file_is_known_by_its_name_and_its_shape(file, row):
    name, classes, resolution, fit = row
    known = hub.by_name(Path(file))
    assert (known.network, known.classes, known.resolution, known.fit) == row
    assert hub.has_shape(known, replace(SPECS[name], classes=classes))
    assert not hub.has_shape(known, replace(SPECS[name], classes=10))
    assert not hub.has_shape(known, SPECS["tresnet_tiny"])


def test_of_a_renamed_file_the_shape_tells_where_one_file_has_it():
    assert hub.by_shape("tresnet_v2_l_cars", 196).fit == "squish"
    assert hub.by_shape("genet_large", 1000).resolution == 256
    assert hub.by_shape("tresnet_m", 1000) is None
    assert hub.by_shape("genet_large", 10) is None


def test_other_names_are_not_known():
    for file in ("weights.pth", "tresnet_m_448_mine.pth", "tresnet_s.pth", "genet_medium.pth"):
        assert hub.by_name(Path(file)) is None


@pytest.mark.parametrize(("size", "side"), [("small", 220), ("normal", 220), ("large", 293)])
def test_genet_resizes_to_its_authors_size_which_is_rounded_up(size, side):
    known = hub.by_name(Path(f"GENet_{size}.pth"))
    assert side == math.ceil(known.resolution / 0.875)
    picture = Image.fromarray(
        np.random.default_rng(0).integers(256, size=(300, 340, 3), dtype="u1")
    )
    theirs = transforms.CenterCrop(known.resolution)(transforms.Resize(side)(picture))
    pre = Preprocessing(resolution=known.resolution, crop=known.crop)
    assert np.array_equal(test_view(picture, pre), np.asarray(theirs))


def test_official_genet_is_timm_under_other_names(tmp_path, generator):
    theirs = randomise(timm.create_model("gernet_s"), generator)
    convs = {"conv1_kxk": 0, "conv2_kxk": 3, "conv1_1x1": 0, "conv3_1x1": 6}
    state = {}
    for key, value in theirs.state_dict().items():
        if match := re.fullmatch(r"stages\.(\d)\.(\d)\.(\w+)\.(conv|bn)\.(\w+)", key):
            stage, block, name, kind, leaf = match.groups()
            at = 0 if name == "shortcut" else convs[name]
            kind_of_list = "shortcut_list" if name == "shortcut" else "conv_list"
            key = (
                f"module_list.{int(stage) + 3}.{kind_of_list}.{block}.{at + (kind == 'bn')}.{leaf}"
            )
        else:
            for old, new in {
                "stem.conv.": "module_list.0.netblock.",
                "stem.bn.": "module_list.1.netblock.",
                "final_conv.conv.": "module_list.8.netblock.",
                "final_conv.bn.": "module_list.9.netblock.",
                "head.fc.": "fc_linear.",
            }.items():
                key = key.replace(old, new)
        state[key] = value
    torch.save({"state_dict": state}, tmp_path / "GENet.pth")
    assert identify(state) == ("official", "genet_light")
    assert same_logits(checkpoints.load(tmp_path / "GENet.pth"), theirs, generator)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "without_a_suffix"])
def test_files_of_timm_load_by_content_alone(file, tmp_path, generator):
    theirs = randomise(
        timm.create_model("gernet_s", num_classes=7, in_chans=4), generator, channels=4
    )
    save = torch.save if file.endswith("bin") else safetensors.torch.save_file
    save(theirs.state_dict(), tmp_path / file)
    ours = checkpoints.load(tmp_path / file)
    assert (ours.spec.classes, ours.spec.in_channels) == (7, 4)
    x = torch.randn(2, 4, 64, 64, generator=generator)
    with torch.inference_mode():
        torch.testing.assert_close(ours.eval()(x), theirs(x))


def tf_variables(theirs, scope="", suffix="", average=True):
    """Variables of the TPU code for a ResNet-RS of timm: counted in the order in which that code
    creates layers."""
    arrays = {"global_step": np.int64(109475)}
    numbers = {"conv2d": 0, "batch_normalization": 0}

    def put(name, value):
        raw, copy = (value + 1, value) if average else (value, None)
        arrays[f"{scope}{name}{suffix}"] = raw
        arrays[f"{scope}{name}/Momentum{suffix}"] = raw
        if average:
            arrays[f"{scope}{name}/ExponentialMovingAverage{suffix}"] = copy

    def layer(kind):
        n = numbers[kind]
        numbers[kind] += 1
        return f"{kind}_{n}" if n else kind

    def conv(module):
        name = layer("conv2d")
        put(f"{name}/kernel", module.weight.detach().permute(2, 3, 1, 0).numpy())
        if module.bias is not None:
            put(f"{name}/bias", module.bias.detach().numpy())

    def norm(module):
        name = layer("batch_normalization")
        put(f"{name}/gamma", module.weight.detach().numpy())
        put(f"{name}/beta", module.bias.detach().numpy())
        put(f"{name}/moving_mean", module.running_mean.numpy())
        put(f"{name}/moving_variance", module.running_var.numpy())

    for convolution, statistics in (
        (theirs.conv1[0], theirs.conv1[1]),
        (theirs.conv1[3], theirs.conv1[4]),
        (theirs.conv1[6], theirs.bn1),
        (theirs.maxpool[0], theirs.maxpool[1]),
    ):
        conv(convolution)
        norm(statistics)
    for stage in (theirs.layer1, theirs.layer2, theirs.layer3, theirs.layer4):
        for block in stage:
            if block.downsample is not None:
                conv(block.downsample[1])
                norm(block.downsample[2])
            for k in "123":
                conv(getattr(block, f"conv{k}"))
                norm(getattr(block, f"bn{k}"))
            conv(block.se.fc1)
            conv(block.se.fc2)
    put("dense/kernel", theirs.fc.weight.detach().T.numpy())
    put("dense/bias", theirs.fc.bias.detach().numpy())
    return arrays


def small_resnet_rs(generator):
    return randomise(
        timm.create_model("resnetrs50", layers=[1, 1, 1, 1], num_classes=10), generator
    )


@pytest.mark.parametrize(
    ("scope", "suffix"), [("", ""), ("resnet/", ":0")], ids=["plain", "scoped"]
)
def test_tensorflow_variables_are_timm_in_another_order(scope, suffix, tmp_path, generator):
    theirs = small_resnet_rs(generator)
    np.savez(tmp_path / "rs.npz", **tf_variables(theirs, scope, suffix))
    spec = replace(SMALL_RS, classes=10)
    assert same_logits(
        network(spec, checkpoints.from_tf(tmp_path / "rs.npz", spec)), theirs, generator
    )
    assert same_logits(checkpoints.load(tmp_path / "rs.npz", spec), theirs, generator)


def test_tensorflow_files_of_the_published_networks_are_identified():
    with torch.device("meta"):
        theirs = timm.create_model("resnetrs50")
    state = reader.from_arrays(tf_variables(theirs.to_empty(device="cpu"), average=False))
    assert identify(state) == ("tf", "resnet_rs_50")


def test_plain_tensorflow_variables_are_taken_when_asked_for(tmp_path, generator):
    theirs = small_resnet_rs(generator)
    ours = checkpoints.from_tf(tf_variables(theirs, average=False), SMALL_RS, ema=False)
    assert same_logits(network(replace(SMALL_RS, classes=10), ours), theirs, generator)
    np.savez(tmp_path / "rs.npz", **tf_variables(theirs, average=False))
    with pytest.raises(ValueError, match="plain variables, by --weights-kind raw"):
        checkpoints.load(tmp_path / "rs.npz", SMALL_RS)
    raw = checkpoints.load_with_notes(tmp_path / "rs.npz", SMALL_RS, "raw").net
    assert same_logits(raw, theirs, generator)


def test_tensorflow_variables_need_all_their_averages(generator):
    theirs = small_resnet_rs(generator)
    with pytest.raises(ValueError, match="are from one batch: export the averages too"):
        checkpoints.from_tf(tf_variables(theirs, average=False), SMALL_RS)
    arrays = tf_variables(theirs)
    del arrays["conv2d_3/kernel/ExponentialMovingAverage"]
    with pytest.raises(
        ValueError, match="1 variable has no ExponentialMovingAverage copy: conv2d_3/kernel"
    ):
        checkpoints.from_tf(arrays, SMALL_RS)
    del arrays["conv2d_3/kernel"]
    with pytest.raises(ValueError, match="-conv2d_3/kernel"):
        checkpoints.from_tf(arrays, SMALL_RS)


DEEP = [name for name, spec in SPECS.items() if sum(stage.depth for stage in spec.stages) > 60]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in DEEP else ()) for name in SPECS],
)
def test_every_network_is_identified_by_its_own_weights(name):
    state = key_maps.meta_network(replace(SPECS[name], classes=11)).state_dict()
    form, found = identify(state)
    assert form == "fullstride"
    if name != "tresnet_v2_l_cars":  # has the shapes of tresnet_v2_l
        assert found == name or replace(SPECS[found], source="") == replace(SPECS[name], source="")


@pytest.mark.parametrize("name", SPECS)
def test_paths_are_given_once_for_every_layer_with_parameters(name):
    state = key_maps.meta_network(SPECS[name]).state_dict()
    layers = {key.rpartition(".")[0] for key in state}
    for names in convert.FORMATS.values():
        pairs = list(names(SPECS[name]))
        ours, theirs = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
        assert not pairs or ours == layers
        assert len(ours) == len(theirs) == len(pairs)
    of_timm = set() if SPECS[name].frames else layers  # timm has no networks of clips
    assert dict(key_maps.timm(SPECS[name])).keys() == of_timm


def meta_state(name, **options):
    with torch.device("meta"):
        return timm.create_model(name, **options).state_dict()


def test_the_two_tresnet_l_are_told_apart():
    assert identify(meta_state("tresnet_l")) == ("timm", "tresnet_l")
    assert identify(meta_state("tresnet_v2_l")) == ("timm", "tresnet_v2_l")
    with pytest.raises(
        ValueError,
        match="belong to tresnet_v2_l .timm names. and not to tresnet_l: use tresnet_v2_l",
    ):
        checkpoints.convert(meta_state("tresnet_v2_l"), "tresnet_l")


def test_any_number_of_classes_is_identified():
    state = meta_state("tresnet_m")
    state["head.fc.weight"] = torch.empty(11221, 2048, device="meta")
    state["head.fc.bias"] = torch.empty(11221, device="meta")
    assert identify(state) == ("timm", "tresnet_m")


def test_an_unfit_state_names_the_closest_network_and_the_difference():
    state = meta_state("tresnet_m")
    state["more"] = state.pop("body.layer1.0.se.fc1.bias")
    with pytest.raises(
        ValueError, match="closest is tresnet_m .timm names.: -body.layer1.0.se.fc1.bias; .more"
    ) as caught:
        identify(state)
    assert one_line(caught)
    with pytest.raises(ValueError, match="no network has weights of these names: a, b"):
        identify({"a": torch.ones(1), "b": torch.ones(1)})


def test_a_misfit_to_a_given_network_says_so(generator):
    state = official_tresnet(small_tresnet(), generator)
    del state["body.layer2.0.conv1.0.1.bias"]
    with pytest.raises(
        ValueError,
        match=r"do not fit the given spec .official names.: -body.layer2.0.conv1.0.1.bias$",
    ):
        checkpoints.from_official(state, SMALL[False])


def test_a_resnet_of_torchvision_has_the_names_of_timm():
    with torch.device("meta"):
        state = torchvision.models.resnet50().state_dict()
    assert identify(state) == ("timm", "resnet50")


def test_unknown_names_hint_at_near_ones():
    with pytest.raises(ValueError, match="no network named 'tresnet_s': did you mean tresnet_"):
        checkpoints.from_timm({"a": torch.ones(1)}, "tresnet_s")


def test_a_file_of_another_format_names_the_function_that_reads_it(generator):
    state = official_tresnet(small_tresnet(), generator)
    with pytest.raises(ValueError, match="the weights have official names: use from_official"):
        checkpoints.from_timm(state, SMALL[False])


@pytest.mark.parametrize(
    ("key", "head"),
    [("head.fc.embedding_generator.0.weight", "bottleneck"), ("head.decoder.query", "ML-Decoder")],
)
def test_heads_that_are_not_built_are_refused_by_name(key, head, generator):
    state = official_tresnet(small_tresnet(), generator)
    for name in ("head.fc.weight", "head.fc.bias"):
        del state[name]
    state[key] = torch.ones(2, 2)
    with pytest.raises(
        ValueError, match=f"{head} head .*use weights with a plain classifier"
    ) as caught:
        checkpoints.from_official(state, SMALL[False])
    assert one_line(caught)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(dtype, generator):
    state = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in official_tresnet(small_tresnet(), generator).items()
    }
    ours = checkpoints.from_official(state, SMALL[False])
    assert {value.dtype for value in ours.values()} == {torch.float32, torch.int64}
    gains = state["body.conv1.1.weight"].float().abs() + EPSILON
    assert torch.equal(ours["stem.conv.norm.weight"], gains)


def test_numbers_that_are_not_finite_are_refused_by_name():
    state = small_tresnet().state_dict()
    state["body.conv1.bn.running_var"][3] = float("inf")
    with pytest.raises(
        ValueError, match=r"^body.conv1.bn.running_var holds a number that is not finite"
    ):
        checkpoints.from_timm(state, SMALL[False])
    state["body.conv1.bn.running_var"] = torch.ones(16, dtype=torch.int8)
    for dtype in (torch.int8, torch.bool, torch.complex64):
        state["body.conv1.bn.running_var"] = torch.ones(16, dtype=dtype)
        with pytest.raises(ValueError, match=rf"^body.conv1.bn.running_var is {dtype}"):
            checkpoints.from_timm(state, SMALL[False])
    state["body.conv1.bn.running_var"] = torch.ones(16)
    state["body.conv1.bn.num_batches_tracked"] = torch.tensor(1j)
    with pytest.raises(ValueError, match=r"num_batches_tracked is torch.complex64"):
        checkpoints.from_timm(state, SMALL[False])


def test_a_difference_lists_missing_unexpected_and_misshapen_ten_each():
    expected = {"conv.weight": (64, 3, 7, 7), "kept": (2,), **{f"m{i}": (1,) for i in range(12)}}
    state = {
        "conv.weight": torch.ones(64, 1, 7, 7),
        "kept": torch.ones(2),
        "new\nline": torch.ones(1),
    }
    with pytest.raises(ValueError, match="do not fit") as caught:
        checkpoints.check(expected, state)
    text = str(caught.value)
    assert "-m0, -m1, " in text
    assert "-m9 and 2 more; " in text
    assert "+new line; " in text
    assert "conv.weight (64, 3, 7, 7) is (64, 1, 7, 7)" in text
    assert "kept" not in text
    assert one_line(caught)
    checkpoints.check({"a": (1,)}, {"a": torch.ones(1)})


def one_line(caught):
    return "\n" not in str(caught.value) and len(str(caught.value)) < 2000


@pytest.mark.parametrize("classes", [1000, 7])
def test_a_file_of_any_network_of_timm_is_read_by_its_name(classes, tmp_path, generator):
    theirs = randomise(timm.create_model("mobilenetv3_small_050", num_classes=classes), generator)
    torch.save({"model": theirs.state_dict()}, tmp_path / "a.pth")
    bundle = zoo.load(tmp_path / "a.pth", "timm/mobilenetv3_small_050")
    x = torch.randn(2, 3, 64, 64, generator=generator)
    assert torch.equal(bundle.net(x), theirs.eval()(x))
    assert len(bundle.classes) == classes
    config = timm.get_pretrained_cfg("mobilenetv3_small_050")
    assert (bundle.preprocessing.kernel, bundle.preprocessing.crop) == ("bicubic", config.crop_pct)
    with pytest.raises(ValueError, match=r"a\.pth: not weights of timm/mobilenetv3_small_075"):
        zoo.load(tmp_path / "a.pth", "timm/mobilenetv3_small_075")
