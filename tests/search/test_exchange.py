"""Which layers of an exchanged network are new, which learn, and which are the MasterNet's."""

from dataclasses import replace

import pytest
import torch

from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec
from fullstride.search.block_tuning import exchanged

MASTER = "genet_tiny"


def master_of(name: str = MASTER) -> Bundle:
    """A network none of whose tensors has an initial value."""
    torch.manual_seed(1)
    net = zoo.create(name, in_channels=1, classes=10).eval()
    with torch.no_grad():
        for value in net.state_dict().values():
            if value.is_floating_point():
                value.add_(0.01 * torch.rand_like(value) + 0.01)
    pre = zoo.family_preprocessing(net.spec)
    return Bundle(net, name=name, classes=tuple("abcdefghij"), preprocessing=pre)


def with_stage(number: int, name: str = MASTER, **changes) -> NetSpec:
    spec = master_of(name).net.spec
    stages = list(spec.stages)
    stages[number] = replace(stages[number], **changes)
    return replace(spec, stages=tuple(stages))


SPEC = master_of().net.spec
# (name, spec, again, new layers, layers that learn from the MasterNet's weights)
CASES = {
    "depth": (
        with_stage(1, depth=2), (),
        ("stages.1.",), ("stages.2.0.branch.conv1.", "stages.2.0.shortcut."),
    ),
    "width": (
        with_stage(1, width=72), (),
        ("stages.1.", "stages.2.0.branch.conv1.", "stages.2.0.shortcut."), (),
    ),
    "width that needs no projection after it": (
        with_stage(3, width=64), (), ("stages.3.", "stages.4.0.branch.conv1."), (),
    ),
    "last stage": (with_stage(4, width=32), (), ("stages.4.", "head.conv."), ()),
    "kernel": (with_stage(4, kernel=5), (), ("stages.4.",), ("head.conv.",)),
    "control": (
        SPEC, ("stages.0",),
        ("stages.0.",), ("stages.1.0.branch.conv1.", "stages.1.0.shortcut."),
    ),
    "stem": (
        replace(SPEC, stem_width=24), (),
        ("stem.", "stages.0.0.branch.conv1.", "stages.0.0.shortcut."), (),
    ),
    "head": (replace(SPEC, head_width=128), (), ("head.",), ()),
    "control of the head": (SPEC, ("head",), ("head.conv.",), ("head.fc.",)),
    "no head": (replace(SPEC, head_width=0), (), ("head.fc.",), ()),
    "two stages": (
        replace(with_stage(0, depth=2), stages=(with_stage(0, depth=2).stages[0],
                *with_stage(1, width=48).stages[1:])), (),
        ("stages.0.", "stages.1.", "stages.2.0.branch.conv1.", "stages.2.0.shortcut."), (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_but_those_of_new_layers_is_the_masternets_bit_for_bit(case):
    spec, again, new, learning = CASES[case]
    master = master_of()
    old = master.net.state_dict()
    exchange = exchanged(master, spec, seed=0, again=again)
    for name, value in exchange.net.state_dict().items():
        is_own = name in old and value.shape == old[name].shape and torch.equal(value, old[name])
        assert is_own == (not name.startswith(new)) or name.endswith("num_batches_tracked"), name
    for name, _ in exchange.net.named_parameters():
        groups = [
            any(name.startswith(f"{path}.") for path in paths)
            for paths in (exchange.fresh, exchange.adapted, exchange.frozen)
        ]
        is_new, learns = name.startswith(new), name.startswith(learning or "-")
        assert groups == [is_new, learns, not (is_new or learns)], name
    exchange.net(torch.zeros(2, 1, 32, 32))


def test_the_last_stage_is_read_by_the_classifier_of_a_network_without_a_head():
    master = master_of("resnet_rs_tiny")
    width = master.net.spec.stages[-1].width
    for changes, fresh in (
        (dict(width=2 * width), ("stages.3", "head.fc")),
        (dict(depth=2), ("stages.3",)),
    ):
        exchange = exchanged(master, with_stage(3, "resnet_rs_tiny", **changes), seed=0)
        assert exchange.fresh == fresh
        assert ("head.fc" in exchange.adapted) != ("head.fc" in fresh)


def test_new_weights_are_those_of_a_new_network_of_the_seed():
    spec = CASES["width"][0]
    nets = {seed: exchanged(master_of(), spec, seed=seed).net.state_dict() for seed in (3, 4)}
    torch.manual_seed(3)
    fresh = Network(spec).state_dict()
    new = [name for name in fresh if name.startswith("stages.1.") and name.endswith("conv.weight")]
    assert new
    for name in new:
        assert torch.equal(nets[3][name], fresh[name])
        assert not torch.equal(nets[4][name], fresh[name])


def test_an_exchange_draws_from_no_generator_of_the_caller():
    master = master_of()
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    exchanged(master, CASES["width"][0], seed=3)
    assert torch.equal(torch.rand(4), expected)


def test_the_masternet_stays_as_it_is():
    master = master_of()
    before = {name: value.clone() for name, value in master.net.state_dict().items()}
    exchange = exchanged(master, CASES["control"][0], seed=0, again=("stages.0",))
    with torch.no_grad():
        for value in exchange.net.parameters():
            value.zero_()
    assert all(torch.equal(value, before[name]) for name, value in master.net.state_dict().items())
