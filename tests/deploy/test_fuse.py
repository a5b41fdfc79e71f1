"""A network whose batch norms are folded into its convolutions has the same outputs."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from networks import randomise
from torch import Tensor, nn

from fullstride.deploy.fold_batch_norm import fold_batch_norm, folding
from fullstride.nets import zoo

COUNTS = {
    "tresnet_m": 60,
    "tresnet_tiny": 19,
    "resnet_rs_tiny": 23,
    "genet_tiny": 24,
    "resnet18": 20,
    "timm/tresnet_m": 60,
    "timm/resnetrs50": 56,
    "timm/gernet_s": 45,
    "timm/efficientnet_b0": 49,
    "timm/tf_efficientnet_b0": 49,  # pads by its own kind of convolution
    "torchvision/resnet18": 20,
}


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def make(name: str, generator: torch.Generator) -> nn.Module:
    torch.manual_seed(0)
    where, _, theirs = name.rpartition("/")
    if where == "timm":
        net = timm.create_model(theirs, num_classes=10)
    elif where:
        net = torchvision.models.get_model(theirs, num_classes=10)
    else:
        net = zoo.create(name, classes=10, in_channels=3)
    return randomise(net, generator)


def norms(net: nn.Module) -> list[nn.Module]:
    return [
        module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]


def error(outputs: Tensor, expected: Tensor) -> float:
    return ((outputs - expected).abs().max() / expected.abs().max()).item()


def settle(net: nn.Module, x: Tensor) -> None:
    for norm in norms(net):
        if norm.affine:
            nn.init.uniform_(norm.weight, -1.5, 1.5)
            nn.init.uniform_(norm.bias, -0.5, 0.5)
    for _ in range(3):
        net.train()(x)
    net.eval()


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
@torch.no_grad()
def test_a_folded_network_has_no_batch_norm_and_the_same_outputs(name, count, generator):
    net = make(name, generator)
    x = torch.randn(2, 3, 64, 64, generator=generator)
    rounded, net = net(x), net.double()
    state = copy.deepcopy(net.state_dict())
    fold = folding(net, x[:1])
    assert len(norms(net)) == len(fold.layers) == count
    assert not norms(fold.net)
    assert not fold.skipped
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    exact = net(x.double())
    assert error(fold.net(x.double()), exact) < 1e-9
    # A random ResNet-50 is off by 1e-5 by its own rounding.
    assert error(fold.net.float()(x), exact) < max(1e-5, 2 * error(rounded, exact))


class Odd(nn.Module):
    """Every batch norm that cannot be folded, and one that can: (N, 4, H, W) -> twice that."""

    def __init__(self):
        super().__init__()
        plain = ["fine", "shared", "forked", "both", "viewed", "tied", "twice", "again"]
        plain += ["adding", "batch", "split", "changed", "returned"]
        self.conv = nn.ModuleDict({name: nn.Conv2d(4, 4, 3, padding=1) for name in plain})
        self.conv["standard"] = timm.layers.StdConv2d(4, 4, 1)
        self.conv["weighed"] = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))
        self.conv["line"] = nn.Linear(4, 4)
        self.norm = nn.ModuleDict(
            {name: nn.BatchNorm2d(4) for name in (*self.conv, "second", "added", "unused")}
        )
        self.norm["batch"] = nn.BatchNorm2d(4, track_running_stats=False)
        self.norm["split"] = timm.layers.SplitBatchNorm2d(4)
        self.norm["line"] = nn.BatchNorm1d(8)
        del self.norm["again"], self.norm["adding"]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        conv, norm = self.conv, self.norm
        for name in ("fine", "batch", "split", "standard", "weighed"):
            x = norm[name](conv[name](x))
        x = norm["shared"](conv["shared"](conv["shared"](x)))
        y = conv["forked"](x)
        x = norm["forked"](y) + y
        y = conv["both"](x)
        x = norm["both"](y) + norm["second"](y)
        y = conv["viewed"](x)
        x = norm["viewed"](y) + y.flatten(2)[:, :, :1, None]
        x = norm["tied"](conv["tied"](x)) + F.conv2d(
            x, conv["tied"].get_parameter("weight"), padding=1
        )
        x = norm["twice"](conv["twice"](x)) + norm["twice"](conv["again"](x))
        x = norm["added"](conv["adding"](x) + x)
        x = norm["changed"](conv["changed"](x).relu_())
        x = x + norm["line"](conv["line"](x[:, :, :2, :4].flatten(1, 2)))[:, :4, :1, None]
        y = conv["returned"](x)
        return norm["returned"](y), y


@torch.no_grad()
def test_a_batch_norm_that_does_not_have_a_convolution_for_itself_stays_and_says_why(generator):
    net, x = Odd(), torch.randn(2, 4, 8, 8, generator=generator)
    settle(net, x)
    fold = folding(net, x)
    assert fold.layers == {"norm.fine": "conv.fine"}
    no_layer = "its input is not the output of a convolution or linear layer"
    assert fold.skipped == {
        "norm.shared": "the layer before it is called 2 times",
        "norm.forked": "its input is used elsewhere too",
        "norm.returned": "its input is used elsewhere too",
        "norm.both": "its input is used elsewhere too",
        "norm.second": "its input is used elsewhere too",
        "norm.viewed": "its input is used elsewhere too",
        "norm.changed": "its input is used elsewhere too",
        "norm.tied": "its weights, or the weights of the layer before it, are used elsewhere too",
        "norm.twice": "it is called 2 times",
        "norm.unused": "it is called 0 times",
        "norm.split.aux_bn.0": "it is called 0 times",
        "norm.added": no_layer,
        "norm.standard": no_layer,
        "norm.weighed": no_layer,
        "norm.batch": "it uses the statistics of the batch",
        "norm.split": "SplitBatchNorm2d is not a known kind of batch norm",
        "norm.line": "its channels differ from the layer before it",
    }
    for outputs, expected in zip(fold.net(x), net(x), strict=True):
        assert error(outputs, expected) < 1e-5


@pytest.mark.parametrize(
    ("before", "norm", "shape"),
    [
        (nn.Linear(6, 4), nn.BatchNorm1d(4), (5, 6)),
        (nn.Conv1d(6, 4, 3, bias=False), nn.BatchNorm1d(4), (5, 6, 7)),
        (
            nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect", groups=2),
            nn.BatchNorm2d(4, affine=False),
            (5, 6, 7, 7),
        ),
        (nn.Conv3d(6, 4, 3), nn.BatchNorm3d(4, eps=0.1), (5, 6, 4, 4, 4)),
    ],
    ids=["linear", "1d", "2d", "3d"],
)
def test_layers_of_every_dimension_are_folded(before, norm, shape, generator):
    net = nn.Sequential(before, norm)
    x = torch.randn(shape, generator=generator)
    settle(net, x)
    fold = folding(net, x)
    assert fold.layers == {"1": "0"}
    assert error(fold.net(x), net(x)) < 1e-5


def test_a_network_whose_outputs_would_differ_is_refused():
    class Growing(nn.Sequential):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(input) * self.calls

    net = Growing(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    with pytest.raises(
        ValueError,
        match=r"by 1.0e\+00 .* 1e-09 is allowed",
    ):
        folding(net)


def test_a_network_in_bf16_is_rounded_once(generator):
    net = make("genet_tiny", generator)
    half = copy.deepcopy(net).bfloat16()
    weights = fold_batch_norm(half).state_dict()
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    exact = fold_batch_norm(half.float()).state_dict()
    assert all(torch.equal(value, exact[key].bfloat16()) for key, value in weights.items())
