"""Files of weights: what is read of them, and one clear line for every other file."""

import argparse
import io
import json
import os
import pickle
import struct
import types
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fullstride.nets import checkpoints
from fullstride.nets.weights import reader


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def one_line(caught):
    return "\n" not in str(caught.value) and len(str(caught.value)) < 2000


MODULES = {
    "compiled": torch.compile,
    "parallel": nn.DataParallel,
    "averaged": AveragedModel,
    "averaged parallel": lambda net: AveragedModel(nn.DataParallel(net)),
    "Lightning": lambda net: nn.ModuleDict({"model": net}),
    "compiled in Lightning": lambda net: nn.ModuleDict({"net": torch.compile(net)}),
    "a compiled part": lambda net: nn.Sequential(OrderedDict(a=torch.compile(net.a), b=net.b)),
}


@pytest.mark.parametrize("wrap", MODULES.values(), ids=MODULES)
def test_names_are_those_of_the_module_in_every_wrapper(wrap):
    net = nn.Sequential(OrderedDict(a=nn.Linear(1, 2), b=nn.BatchNorm1d(2)))
    state = reader.unwrap({"model": wrap(net).state_dict()}).state
    expected = net.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_names_stay_where_a_prefix_is_not_common_to_all():
    for state in ({"model.a": 1, "b": 2}, {"a._orig_mod.w": 1, "a.w": 2}):
        tensors = {name: torch.tensor(value) for name, value in state.items()}
        assert reader.unwrap(tensors).state == tensors


@pytest.mark.parametrize(
    ("raw", "averaged"),
    [
        ("state_dict", "state_dict_ema"),
        ("model", "model_ema"),
        ("model", "ema"),
        ("net", "average"),
    ],
)
def test_of_raw_and_averaged_weights_the_averaged_ones_are_taken_unless_raw_is_asked_for(
    raw, averaged, tmp_path
):
    torch.save(
        {raw: {"w": torch.tensor(1.0)}, averaged: {"w": torch.tensor(2.0)}, "epoch": 3},
        tmp_path / "both.pth",
    )
    taken = reader.read_wrapped(tmp_path / "both.pth")
    assert (taken.state["w"], taken.key, taken.other) == (2, averaged, raw)
    taken = reader.read_wrapped(tmp_path / "both.pth", "raw")
    assert (taken.state["w"], taken.key, taken.other) == (1, raw, averaged)
    torch.save({averaged: {"w": torch.tensor(2.0)}}, tmp_path / "one.pth")
    assert checkpoints.read(tmp_path / "one.pth")["w"] == 2
    with pytest.raises(ValueError, match=f"averaged weights only, in {averaged}") as caught:
        reader.read(tmp_path / "one.pth", "raw")
    assert one_line(caught)


def test_an_average_without_tensors_does_not_hide_the_weights():
    data = {"state_dict": {"w": torch.tensor(1.0)}, "ema": {"decay": 0.999}}
    assert reader.unwrap(data).state["w"] == 1


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_settings_beside_the_weights_are_read_as_data(new, tmp_path):
    settings = argparse.Namespace(lr=0.1, scales=[1, 2], more=types.SimpleNamespace(seed=0))
    data = {"args": settings, "model": {"w": torch.ones(2)}}
    torch.save(data, tmp_path / "w.pth", _use_new_zipfile_serialization=new)
    assert torch.equal(checkpoints.read(tmp_path / "w.pth")["w"], torch.ones(2))
    settings.trap = Trap(tmp_path / "ran")
    torch.save(data, tmp_path / "w.pth", _use_new_zipfile_serialization=new)
    with pytest.raises(ValueError, match="would run code on loading"):
        checkpoints.read(tmp_path / "w.pth")
    assert not (tmp_path / "ran").exists()


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_a_file_that_would_run_code_is_refused_and_runs_none(new, tmp_path):
    state = {"weight": torch.ones(1), "args": Trap(tmp_path / "ran")}
    torch.save(state, tmp_path / "trap.pth", _use_new_zipfile_serialization=new)
    with pytest.raises(
        ValueError, match=r"would run code on loading .it needs \w+.mkdir.*safetensors"
    ) as caught:
        checkpoints.read(tmp_path / "trap.pth")
    assert one_line(caught)
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(state["args"]))
    with pytest.raises(
        ValueError, match=r"could run code on loading: save its weights as safetensors"
    ) as caught:
        checkpoints.read(tmp_path / "plain.pkl")
    assert one_line(caught)
    assert not (tmp_path / "ran").exists()


def saved(save, *args, **options):
    buffer = io.BytesIO()
    save(*args, buffer, **options)
    return buffer.getvalue()


def zipped(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "."), data)
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


STATE = {"weight": torch.arange(1000.0)}
TORCH = saved(torch.save, STATE)
LEGACY = saved(torch.save, STATE, _use_new_zipfile_serialization=False)
SAFE = safetensors.torch.save(STATE)
HEADER = json.dumps({"weight": {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]}}).encode()
NPZ = zipped(weight__npy=npy(np.arange(1000.0)))

WRONG_FILES = {
    "nothing in it": (b"", "is empty"),
    "web page": (b"\n<!DOCTYPE html><html>forbidden</html>", "is a web page"),
    "text": (b"404: not found", "is not a file of weights"),
    "one byte": (b"{", "is not a file of weights"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    "gzip": (b"\x1f\x8b\x08\x00", "unpack it"),
    "keras": (b"\x89HDF\r\n\x1a\n", "HDF5"),
    "safetensors cut in the data": (SAFE[:-100], "damaged or incomplete"),
    "safetensors cut in the header": (SAFE[:20], "damaged or incomplete"),
    "safetensors with an oversized header": (
        struct.pack("<Q", 10**12) + b"{" * 100,
        "header has 1000000000000 bytes",
    ),
    "safetensors that overlaps": (
        struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 8,
        "damaged or incomplete",
    ),
    "torch cut in half": (TORCH[: len(TORCH) // 2], "damaged or incomplete zip"),
    "torch with a cut pickle": (
        zipped(**{"a/data.pkl": b"\x80\x02}q", "a/version": b"3"}),
        "damaged or incomplete",
    ),
    "legacy cut early": (LEGACY[:30], "damaged or incomplete"),
    "legacy cut in the data": (LEGACY[:-100], "damaged or incomplete"),
    "program": (zipped(**{"a/data.pkl": b"", "a/constants.pkl": b""}), "TorchScript"),
    "zip without weights": (zipped(readme__txt=b"hello"), "zip archive without weights"),
    "npz cut in half": (NPZ[: len(NPZ) // 2], "damaged or incomplete zip"),
    "npz bomb": (zipped(bomb__npy=npy(np.zeros(10**7))), "would unpack from"),
    "torch bomb": (zipped(**{"a/data.pkl": b"\0" * 10**8}), "would unpack from"),
    "npz with objects": (
        zipped(weight__npy=npy(np.array([{}, []], dtype=object))),
        "damaged or incomplete",
    ),
    "npz with text": (zipped(weight__npy=npy(np.array(["a"]))), "holds no tensors by name"),
    "npz shorter than it says": (
        zipped(weight__npy=npy(np.arange(1000.0))[:-100]),
        "damaged or incomplete",
    ),
    "list": (saved(torch.save, [torch.ones(1)]), "holds a list and not tensors by name"),
    "no tensors": (
        saved(torch.save, {"epoch": 3, "model": {"lr": 0.1}}),
        "holds no tensors by name, only: epoch, model",
    ),
    "tensor larger than its storage": (
        saved(torch.save, {"a": torch.ones(1).expand(10**12)}),
        "fewer numbers",
    ),
    "tensor without numbers": (
        saved(torch.save, {"a": torch.empty(3, device="meta")}),
        "not a plain tensor",
    ),
    "sparse tensor": (saved(torch.save, {"a": torch.eye(3).to_sparse()}), "not a plain tensor"),
}


@pytest.mark.parametrize(("data", "says"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file_is_one_line(data, says, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=says) as caught:
        checkpoints.read(path)
    assert one_line(caught)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_folder_are_one_line(tmp_path):
    for path, says in ((tmp_path / "none", "No such file"), (tmp_path, "is a folder")):
        with pytest.raises(ValueError, match=says) as caught:
            checkpoints.load(path)
        assert one_line(caught)


@pytest.mark.parametrize(
    "data", [TORCH, LEGACY, SAFE, NPZ], ids=["torch", "legacy", "safetensors", "npz"]
)
def test_damage_anywhere_gives_weights_or_one_line(data, tmp_path, generator):
    path = tmp_path / "weights"
    for _ in range(100):
        damaged = bytearray(data)
        for position in torch.randint(0, min(len(data), 600), (3,), generator=generator).tolist():
            damaged[position] = int(torch.randint(0, 256, (1,), generator=generator))
        path.write_bytes(damaged)
        try:
            checkpoints.read(path)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017
