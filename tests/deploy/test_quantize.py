"""Files in int8 predict as the network does, and sensitive layers stay in float or are trained."""

import copy
from dataclasses import replace

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from fullstride import tasks
from fullstride.data.dataset import open_data
from fullstride.data.loader import Batches, LoaderOptions, TestView
from fullstride.deploy.exported import Metadata
from fullstride.deploy.fold_batch_norm import fold_batch_norm
from fullstride.deploy.formats import onnx as onnx_format
from fullstride.deploy.formats import openvino
from fullstride.deploy.int8 import (
    INT8_FINETUNE,
    Range,
    fake_quantize,
    fall_back_to_float,
    finetune_int8,
    input_ranges,
    int8_loss,
    int8_outputs,
    outputs,
    quantizable_layers,
    sensitivity,
)
from fullstride.deploy.job import ExportJob
from fullstride.nets import zoo
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.classify import Classify
from fullstride.train.loop import train_epochs
from fullstride.train.recipes.named import DIGITS

GRAY = Preprocessing(resolution=32, mean=(0.2,), std=(0.5,), crop=1.0)
HARD = "stages.1.0.branch.conv2.conv"


@pytest.fixture(scope="module")
def digits():
    return open_data("digits")


@pytest.fixture(scope="module")
def net(digits):
    """Folded, and trained for long enough to know the digits."""
    torch.manual_seed(0)
    net = zoo.create("genet_tiny", in_channels=1)
    recipe = replace(DIGITS, epochs=4, lr=0.1, warmup_epochs=1, ema_decay=0.0)
    for _ in train_epochs(
        net,
        Classify(),
        Batches(digits.train, TestView(GRAY), LoaderOptions(batch=64, shuffle=True)),
        recipe,
    ):
        pass
    return fold_batch_norm(net)


def views(images, count: int) -> Tensor:
    return next(Batches(images, TestView(GRAY), LoaderOptions(batch=count)).epoch(0)).x


@pytest.fixture(scope="module")
def images(digits):
    return views(digits.train, 128)


@pytest.fixture(scope="module")
def tests(digits):
    return views(digits.test, 500)


def pixels(x: Tensor) -> np.ndarray:
    """The uint8 images of which `x` is the normalised form."""
    return ((x * 0.5 + 0.2) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


def make_job(net: nn.Module, images: Tensor, float_layers: tuple[str, ...] = ()) -> ExportJob:
    about = Metadata(
        name="a test",
        classes=tuple("0123456789"),
        preprocessing=GRAY,
        scores={},
        precision="int8",
        input_kind="pixels",
        float_layers=float_layers,
    )
    return ExportJob(
        net, about, pixels(images[:4]), calibration=tuple(pixels(part) for part in images.split(32))
    )


def with_float(job: ExportJob, *paths: str) -> ExportJob:
    return replace(job, metadata=replace(job.metadata, float_layers=paths))


@pytest.fixture(scope="module")
def job(net, images):
    return make_job(net, images)


def made_hard(net: nn.Module, factor: float) -> nn.Module:
    """The same function, with one input channel of `HARD` multiplied and its weights divided."""
    net = copy.deepcopy(net)
    before = net.get_submodule(HARD.replace("conv2", "conv1"))
    with torch.no_grad():
        before.weight[0] *= factor
        before.bias[0] *= factor
        net.get_submodule(HARD).weight[:, 0] /= factor
    return net


@pytest.fixture(scope="module")
def hard_job(net, images):
    return make_job(made_hard(net, 1000), images)


@pytest.fixture(scope="module")
def proto(job):
    return onnx_format.convert(job)


@pytest.fixture(scope="module")
def hard_proto(hard_job):
    return onnx_format.convert(hard_job)


def same(rows: np.ndarray, expected: Tensor) -> float:
    """The share of images on which both name the same class."""
    return (rows.argmax(1) == expected.argmax(1).numpy()).mean().item()


@pytest.mark.parametrize("format", [onnx_format, openvino], ids=["onnx", "openvino"])
def test_an_int8_file_predicts_as_the_network_does(format, job, net, tests, tmp_path, capfd):
    path = tmp_path / ("net.onnx" if format is onnx_format else "net")
    format.write(with_float(job, "head.fc"), path)
    printed = capfd.readouterr()
    assert not printed.out
    assert "quant" not in printed.err.lower()
    model = format.open_file(path, 1)
    assert model.metadata == with_float(job, "head.fc").metadata
    expected = outputs(net, tests)[0]
    rows = model.run(pixels(tests))
    assert same(rows, expected) > 0.98
    assert 0 < np.abs(rows - expected.softmax(1).numpy()).mean() < 0.01


@pytest.fixture(scope="module")
def graph(proto, job):
    return Graph(onnx_format.quantize(proto, job))


class Graph:
    """An ONNX model, with access by the names of layers and tensors."""

    def __init__(self, proto):
        self.nodes = list(proto.graph.node)
        self.maker = {name: node for node in self.nodes for name in node.output}
        self.constant = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}

    def node(self, path: str):
        return next(node for node in self.nodes if node.name == f"net.{path}")

    def numbers(self, name: str) -> list[np.ndarray] | None:
        """Values, scale and zero point of a tensor that is dequantized from int8."""
        maker = self.maker.get(name)
        if maker is None or maker.op_type != "DequantizeLinear":
            return None
        if maker.input[0] in self.maker:
            assert self.maker[maker.input[0]].op_type == "QuantizeLinear"
        return [self.constant.get(each) for each in maker.input]


def test_weights_are_int8_for_each_output_channel_and_activations_unsigned(graph, net):
    for path, layer in quantizable_layers(net).items():
        node = graph.node(path)
        _, scale, zero = graph.numbers(node.input[0])
        assert zero.dtype == np.uint8
        assert scale.size == 1
        values, scale, zero = graph.numbers(node.input[1])
        weight = layer.weight.detach().numpy()
        assert values.dtype == np.int8
        assert not zero.any()
        scale = scale.reshape(-1, *(1,) * (weight.ndim - 1))
        assert scale.size == len(weight)
        assert np.abs(values * scale - weight).max() <= 0.501 * scale.max()


def test_preprocessing_and_the_softmax_are_in_float(graph):
    front = [
        node
        for node in graph.nodes
        if node.op_type in ("Cast", "Div", "Sub", "Transpose", "Softmax")
    ]
    assert len(front) >= 5
    assert not [node.op_type for node in front if graph.numbers(node.input[0])]


def test_what_follows_the_last_layer_is_in_float():
    """Also a product of two outputs, which is no layer, and a group norm between two layers."""
    make, numbers = onnx.helper.make_node, numpy_helper.from_array
    layers = [numbers(np.zeros((2, 2, 1, 1), np.float32), f"net.{name}.weight") for name in "ab"]
    nodes = [
        make("Cast", ["images"], ["x"], "cast", to=1),
        make("Conv", ["x", "net.a.weight"], ["a"], "net.a"),
        make("InstanceNormalization", ["a", "scale", "scale"], ["n"], "norm"),
        make("Relu", ["n"], ["r"], "relu"),
        make("Conv", ["r", "net.b.weight"], ["b"], "net.b"),
        make("Sigmoid", ["b"], ["s"], "scores"),
        make("MatMul", ["s", "s"], ["conflicts"], "suppress"),
        make("Add", ["conflicts", "r"], ["y"], "add"),
    ]
    images, y = (onnx.helper.make_tensor_value_info(each, 1, None) for each in ("images", "y"))
    scale = numbers(np.ones(2, np.float32), "scale")
    graph = onnx.helper.make_graph(nodes, "boxes", [images], [y], [*layers, scale])
    names = onnx_format.outside_network(onnx.helper.make_model(graph))
    assert names == ["cast", "norm", "scores", "suppress", "add"]


def test_symmetric_files_round_activations_around_zero_and_leave_biases_in_float(proto, job, net):
    graph = Graph(onnx_format.quantize(proto, job, symmetric=True))
    for path, layer in quantizable_layers(net).items():
        node = graph.node(path)
        for name in node.input[:2]:
            zero = graph.numbers(name)[2]
            assert zero.dtype == np.int8
            assert not zero.any()
        assert np.array_equal(graph.constant[node.input[2]], layer.bias.detach())
    assert sum(node.op_type == "QuantizeLinear" for node in graph.nodes) <= len(
        quantizable_layers(net)
    )


def in_int8(*nodes: onnx.NodeProto) -> list[str]:
    """The names of the nodes whose first input is int8 in a file of "images" (N, 3) to "y"."""
    numbers = numpy_helper.from_array
    weights = [numbers(np.ones((3, 3), np.float32), f"net.{name}.weight") for name in "abcd"]
    others = [numbers(np.ones(3, np.float32), "scale"), numbers(np.array([2]), "two")]
    first = onnx.helper.make_node("Cast", ["images"], ["x"], "cast", to=1)
    images = onnx.helper.make_tensor_value_info("images", 2, [None, 3])
    y = onnx.helper.make_tensor_value_info("y", 1, [None, 3])
    graph = onnx.helper.make_graph([first, *nodes], "few", [images], [y], [*weights, *others])
    proto = onnx.helper.make_model(
        graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", onnx_format.OPSET)]
    )
    about = make_job(nn.Identity(), torch.zeros(4, 1, 8, 8))
    job = replace(about, calibration=(np.arange(6, dtype=np.uint8).reshape(2, 3),))
    quantized = Graph(onnx_format.quantize(proto, job))
    return [node.name for node in quantized.nodes if quantized.numbers(node.input[0])]


def test_beside_layer_norms_the_inputs_of_layers_alone_are_int8():
    """Not a sum, which has an int8 kernel, as its inputs are float anyway."""
    make = onnx.helper.make_node
    assert in_int8(
        make("MatMul", ["x", "net.a.weight"], ["a"], "net.a"),
        make("LayerNormalization", ["a", "scale"], ["n"], "norm"),
        make("Add", ["n", "a"], ["sum"], "add"),
        make("MatMul", ["sum", "net.b.weight"], ["y"], "net.b"),
    ) == ["net.a", "net.b"]


def test_from_a_choice_to_the_next_layer_all_is_float():
    """Sums and products after the two best rows are chosen, as of proposals; then int8 again."""
    make = onnx.helper.make_node
    assert in_int8(
        make("MatMul", ["x", "net.a.weight"], ["a"], "net.a"),
        make("Add", ["a", "x"], ["sum"], "add"),
        make("MatMul", ["sum", "net.b.weight"], ["b"], "net.b"),
        make("TopK", ["b", "two"], ["best", "index"], "choice", axis=0),
        make("Add", ["best", "best"], ["twice"], "chosen"),
        make("Transpose", ["twice"], ["turned"], "turn", perm=[1, 0]),
        make("MatMul", ["turned", "sum"], ["pairs"], "pairs"),
        make("MatMul", ["pairs", "net.c.weight"], ["c"], "net.c"),
        make("Add", ["c", "c"], ["sum2"], "add2"),
        make("MatMul", ["sum2", "net.d.weight"], ["y"], "net.d"),
    ) == ["net.a", "add", "net.b", "net.c", "add2", "net.d"]


def test_means_over_pixels_become_pools_that_give_the_same():
    axes = numpy_helper.from_array(np.array([2, 3]), "axes")
    nodes = [
        onnx.helper.make_node("ReduceMean", ["x", "axes"], ["gate"], keepdims=1),
        onnx.helper.make_node("ReduceMean", ["x", "axes"], ["flat"], keepdims=0),
    ]
    x, *y = (onnx.helper.make_tensor_value_info(name, 1, None) for name in ("x", "gate", "flat"))
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "means", [x], y, [axes]), ir_version=10
    )
    pooled = onnx_format.means_to_pools(proto)
    assert [node.op_type for node in pooled.graph.node] == ["GlobalAveragePool", "ReduceMean"]
    assert [node.op_type for node in proto.graph.node] == ["ReduceMean", "ReduceMean"]
    images = np.random.default_rng(0).standard_normal((2, 3, 4, 5), np.float32)
    before, after = (
        onnx.reference.ReferenceEvaluator(each).run(None, {"x": images}) for each in (proto, pooled)
    )
    assert all(
        np.allclose(a, b, atol=1e-6) and a.shape == b.shape
        for a, b in zip(before, after, strict=True)
    )


def test_layers_in_float_read_and_hold_float_in_an_onnx_file(hard_proto, hard_job):
    net = hard_job.net
    graph = Graph(onnx_format.quantize(hard_proto, with_float(hard_job, HARD, "stem.conv.conv")))
    for path, layer in quantizable_layers(net).items():
        node = graph.node(path)
        in_float = path in (HARD, "stem.conv.conv")
        assert bool(graph.numbers(node.input[0])) != in_float
        assert bool(graph.numbers(node.input[1])) != in_float
        if in_float:
            assert np.array_equal(graph.constant[node.input[1]], layer.weight.detach())
    assert graph.maker[graph.node(HARD).input[0]].op_type == "Relu"


def test_an_openvino_file_holds_int8_but_for_layers_in_float(job):
    """By the operations before each layer: those of its input, and of its weights."""

    def before(operation) -> str:
        return operation.input_value(0).get_node().get_type_name()

    for chosen in ((), ("stages.3.0.branch.conv2.conv", HARD)):
        model = openvino.convert(with_float(job, *chosen))
        layers = {op.get_friendly_name(): op for op in model.get_ops()}
        for path in quantizable_layers(job.net):
            layer = layers[f"net.{path}/WithoutBiases"]
            source, weight = (
                each.get_source_output().get_node().get_type_name() for each in layer.inputs()
            )
            assert (source == "Multiply") == (path not in chosen)  # by a scale
            if weight == "Reshape":  # into groups
                weight = before(layer.input_value(1).get_node())
            assert (weight == "Multiply") == (path not in chosen)


def test_a_layer_that_is_not_there_cannot_stay_in_float(proto, job):
    with pytest.raises(ValueError, match=r"^stem.act .* no such layer"):
        onnx_format.quantize(proto, with_float(job, "stem.act"))


def by_hand(
    x: np.ndarray, scale: np.ndarray | float, zero: float, low: int, high: int
) -> np.ndarray:
    return (np.clip(np.round(x / scale + zero), low, high) - zero) * scale


def test_sensitivity_is_what_rounding_by_hand_gives():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval(), torch.randn(30, 6)
    first, second = (layer.weight.detach().numpy() for layer in (net[0], net[2]))
    b1, b2 = (layer.bias.detach().numpy() for layer in (net[0], net[2]))
    inputs, middle = x.numpy(), np.maximum(x.numpy() @ first.T + b1, 0)
    plain = middle @ second.T + b2

    def weight(w):
        return by_hand(w, np.abs(w).max(1, keepdims=True) / 127, 0, -127, 127)

    low, high = inputs.min(), inputs.max()
    scale = (high - low) / 255
    one = (
        np.maximum(by_hand(inputs, scale, np.round(-low / scale), 0, 255) @ weight(first).T + b1, 0)
        @ second.T
        + b2
    )
    two = by_hand(middle, middle.max() / 255, 0, 0, 255) @ weight(second).T + b2
    expected = {
        path: ((y - plain) ** 2).mean() / plain.var(ddof=1) for path, y in (("0", one), ("2", two))
    }
    scores = sensitivity(net, x)
    assert dict(scores) == pytest.approx(expected, rel=1e-3)
    assert scores[0][1] >= scores[1][1]


def test_the_layer_that_was_made_hard_comes_first_and_the_network_stays_as_it_is(
    hard_job, images, net
):
    hard = hard_job.net
    state, before = copy.deepcopy(hard.state_dict()), outputs(hard, images)[0]
    scores = sensitivity(hard, images)
    assert scores[0][0] == HARD
    assert scores[0][1] > 100 * scores[1][1]
    assert {path for path, _ in scores} == set(quantizable_layers(net))
    assert all(torch.equal(value, state[name]) for name, value in hard.state_dict().items())
    assert torch.equal(outputs(hard, images)[0], before)


@pytest.mark.parametrize("format", [onnx_format, openvino], ids=["onnx", "openvino"])
def test_a_file_with_the_hard_layer_in_float_predicts_as_the_network_does(
    format, hard_job, tests, tmp_path
):
    expected, shares = outputs(hard_job.net, tests)[0], []
    for layers in ((), (sensitivity(hard_job.net, tests)[0][0],)):
        path = tmp_path / f"{len(layers)}{'.onnx' if format is onnx_format else ''}"
        format.write(with_float(hard_job, *layers), path)
        shares.append(same(format.open_file(path, 1).run(pixels(tests)), expected))
    assert shares[0] < 0.9
    assert shares[1] >= 0.98  # which it is by OpenVINO on an AMD EPYC


@pytest.mark.parametrize("name", ["detect", "segment"])
def test_the_sensitivity_of_a_network_with_a_head_is_that_of_what_it_learns(name, images):
    """Not of boxes, which are few and zero before training."""
    torch.manual_seed(0)
    net, task = zoo.create("genet_tiny", in_channels=1, classes=2), tasks.find_task(name)
    net.task_head = replace(task, head_width=16).head(net)
    hard = made_hard(fold_batch_norm(net), 1000)
    scores = sensitivity(hard, images[:4].repeat(1, 1, 2, 2))
    assert scores[0][0] == HARD
    assert {path for path, _ in scores} == {*quantizable_layers(hard)} - {
        "head.conv.conv",
        "head.fc",
    }
    assert all(score > 0 for _, score in scores)
    assert not hard.task_head.training


def test_ranges_hold_zero_and_all_inputs_of_a_layer():
    net = nn.Sequential(nn.Identity(), nn.Conv1d(1, 1, 1))
    x = torch.tensor([[[2.0, 3.0]], [[2.5, 7.0]]])
    assert input_ranges(net, x) == {"1": Range(0.0, 7.0)}
    assert input_ranges(net, -x) == {"1": Range(-7.0, 0.0)}
    assert fake_quantize(torch.tensor([0.0, 7.0, 9.0]), Range(-2.0, 7.0))[
        :2
    ].tolist() == pytest.approx([0.0, 7.0], abs=9 / 255)


def test_twice_as_many_layers_fall_back_to_float_until_the_loss_is_small_enough():
    attempts = []

    def drop_with(layers):
        attempts.append(list(layers))
        return 3.0 - len(layers)

    assert fall_back_to_float(drop_with, 1.5, ["a", "b", "c", "d"]) == [(1, 2.0), (2, 1.0)]
    assert attempts == [["a"], ["a", "b"]]
    tried = fall_back_to_float(drop_with, -5.0, ["a", "b", "c", "d", "e"])
    assert tried == [(1, 2.0), (2, 1.0), (4, -1.0), (5, -2.0)]
    assert fall_back_to_float(drop_with, 9.0, []) == []


@pytest.mark.slow
def test_finetuning_makes_a_network_that_loses_less_in_int8(net, digits, images, tests):
    hard = made_hard(net, 300)
    expected = outputs(hard, tests)[0].softmax(1)
    few = replace(digits.train, names=digits.train.names[:400], targets=digits.train.targets[:400])
    better = finetune_int8(hard, GRAY, replace(digits, train=few), images)
    before, after = (int8_loss(each, tests, expected) for each in (hard, better))
    assert after < 0.8 * before
    assert same(
        int8_outputs(better, tests, input_ranges(better, images))[0].numpy(), expected
    ) > same(int8_outputs(hard, tests, input_ranges(hard, images))[0].numpy(), expected)
    assert better.state_dict().keys() == hard.state_dict().keys()
    assert torch.equal(outputs(hard, tests)[0].softmax(1), expected)
    assert not [module for module in better.modules() if module._forward_pre_hooks]


def test_the_network_stays_as_it_was_where_finetuning_does_harm(net, digits, images):
    wild = replace(INT8_FINETUNE, lr=0.1, clip_norm=1e6, steps=3)
    result = finetune_int8(net, GRAY, digits, images, recipe=wild)
    assert all(
        torch.equal(value, net.state_dict()[name]) for name, value in result.state_dict().items()
    )
