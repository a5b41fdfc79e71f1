import json
import subprocess

import pytest
import torch
from torch import nn

from fullstride import cli
from fullstride.measure import max_batch
from fullstride.measure.max_batch import Probe, Trial, largest, predict, search
from fullstride.measure.workload import StepOptions
from fullstride.nets import zoo


def deep(width: int = 8, depth: int = 6) -> nn.Module:
    layers = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def device_for(limit: int):
    """A probe of a device that holds `limit` images, and what was batches on it."""
    batches: list[int] = []

    def probe(batch: int) -> Probe:
        batches.append(batch)
        return Probe(batch=batch, outcome="fits" if batch <= limit else "memory")

    return probe, batches


@pytest.mark.parametrize("start", [0, 8, 288, 300, 5000])
@pytest.mark.parametrize("limit", [1, 2, 5, 7, 8, 9, 15, 16, 63, 287, 288, 1001, 4229])
def test_the_search_finds_the_largest_multiple_of_eight_wherever_it_starts(limit, start):
    probe, batches = device_for(limit)
    assert largest(search(probe, start), "net") == (limit // 8 * 8 or limit)
    assert len(batches) == len(set(batches)) <= 26


def test_a_good_prediction_needs_few_probes():
    probe, batches = device_for(4000)
    assert largest(search(probe, 4100), "net") == 4000
    assert len(batches) <= 7


def test_a_network_that_does_not_fit_at_one_image_is_refused():
    probe, batches = device_for(0)
    with pytest.raises(
        ValueError, match="net does not fit into memory at batch 1: use a smaller resolution"
    ):
        largest(search(probe, 64), "net")
    assert min(batches) == 1


@pytest.mark.parametrize(
    ("name", "gib", "batch"),
    [
        ("resnet50", 16, 346),
        ("tresnet_m", 16, 452),
        ("tresnet_l", 16, 273),
        ("resnetrs50", 139, 2446),
    ],
)
def test_predictions_are_within_three_percent_of_those_worked_out_by_hand(name, gib, batch):
    net = zoo.create(f"timm/{name}")
    assert predict(net, gib * 2**30, 224).batch == pytest.approx(batch, rel=0.03)


def test_the_batch_at_which_a_map_has_too_many_elements_is_known():
    prediction = predict(zoo.create("timm/resnet50"), 16 * 2**30, 224)
    assert prediction.map_batch == (2**31 - 1) // (64 * 112 * 112) == 2674


def answering(monkeypatch, stdout: bytes, stderr: bytes = b"", code: int = 0) -> None:
    done = subprocess.CompletedProcess([], code, stdout, stderr)
    monkeypatch.setattr(max_batch.subprocess, "run", lambda *_, **__: done)


BF16 = StepOptions(precision="bfloat16")


def trial(**changes) -> Trial:
    return Trial(
        net=deep(), resolution=32, device="cpu", memory_bytes=2**30, options=BF16, **changes
    )


def test_an_error_that_is_not_about_memory_stops_the_search_with_its_line(monkeypatch):
    answering(monkeypatch, json.dumps({"error": "RuntimeError no kernel"}).encode())
    with pytest.raises(
        ValueError, match="training steps at batch 8 failed: RuntimeError no kernel"
    ):
        list(search(trial().probe, 8))
    answering(monkeypatch, b"", b"a\nterminated by the kernel\n", -9)
    with pytest.raises(
        ValueError, match="at batch 8 failed: exit code -9, terminated by the kernel"
    ):
        list(search(trial().probe, 8))


def test_an_error_beyond_the_limit_of_elements_is_named_as_such(monkeypatch):
    answering(monkeypatch, json.dumps({"error": "RuntimeError too many elements"}).encode())
    monkeypatch.setattr(max_batch, "MAP_LIMIT", 1 + 7 * trial().prediction.largest_map)
    assert trial().probe(8).outcome == "elements"


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("an illegal memory access was encountered"), False),
        (ValueError("Expected more than 1 value per channel"), False),
    ],
)
def test_only_lack_of_memory_counts_as_a_batch_that_does_not_fit(monkeypatch, error, lacks):
    def step(_net, _work, batch, *_, **__):
        if batch > 2:  # the one of two images comes before memory is limited
            raise error
        return lambda: None

    monkeypatch.setattr(max_batch, "limit_memory", lambda *_: None)
    monkeypatch.setattr(max_batch, "Step", step)
    if lacks:
        assert trial().run(64).outcome == "memory"
    else:
        with pytest.raises(type(error)):
            trial().run(64)


@pytest.mark.slow
def test_on_the_cpu_a_small_network_is_proven_to_fit_near_its_prediction():
    net, memory, side = deep(depth=12), 0.2 * 2**30, 64
    guess = predict(net, memory, side, "float32", device="cpu")
    proof = Trial(
        net=net, resolution=side, device="cpu", memory_bytes=memory, options=StepOptions()
    )
    probes = list(search(proof.probe, guess.batch))
    batch = largest(probes, "net")
    assert batch == pytest.approx(guess.batch, rel=0.3)
    assert {probe.batch: probe.fits for probe in probes}[batch + 8] is False
    with pytest.raises(ValueError, match="takes no|channels"):
        Trial(
            net=net,
            resolution=side,
            device="cpu",
            memory_bytes=memory,
            options=StepOptions(),
            in_channels=4,
        ).probe(8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["genet_tiny", "--memory-gib", "0"], "memory of 0 GiB: use a number above 0"),
        (["genet_tiny", "--memory-gib", "nan"], "memory of nan GiB: use a number above 0"),
        (
            ["genet_tiny", "--memory-gib", "1e300", "--predict"],
            "memory of 1e+300 GiB: use a number",
        ),
        (["genet_tiny", "--device", "cpu", "--memory-gib", "1e6"], "cpu has"),
        (["genet_tiny", "--device", "cpu"], "--memory-gib"),
        (["genet_tiny", "--device", "cuda:99", "--memory-gib", "16"], "cuda:99 is not here"),
        (
            ["genet_tiny", "--device", "cpu", "--memory-gib", "1", "--precision", "fp16"],
            "fp16 is for GPUs",
        ),
        (
            ["genet_tiny", "--resolution", "0", "--memory-gib", "1", "--predict"],
            "takes no 3 x 0 x 0 image",
        ),
        (["genet_tini", "--memory-gib", "1", "--predict"], "did you mean genet_tiny"),
    ],
)
def test_a_capacity_that_cannot_be_found_is_refused_in_one_line(words, message, capsys):
    assert cli.run(["measure", "capacity", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_prediction_needs_no_gpu(capsys):
    assert (
        cli.run(
            [
                "measure",
                "capacity",
                "timm/resnet50",
                "--resolution",
                "224",
                "--memory-gib",
                "16",
                "--predict",
            ]
        )
        == 0
    )
    assert "predicted: batch 344" in capsys.readouterr().out


def test_the_command_tells_how_far_prediction_and_proof_are_apart(monkeypatch, capsys):
    probe, _ = device_for(300)
    monkeypatch.setattr(Trial, "probe", lambda self, batch: probe(batch))
    assert (
        cli.run(
            [
                "measure",
                "capacity",
                "genet_tiny",
                "--device",
                "cpu",
                "--memory-gib",
                "0.1",
                "--precision",
                "fp32",
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    predicted = int(lines[1].split()[2].strip(","))
    assert lines[-1].startswith("proven: batch 296, bounded by memory")
    assert f"{predicted / 296 - 1:+.1%}" in lines[-1]
