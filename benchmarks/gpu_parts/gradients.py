"""Are the gradients of compiled steps right, and do CUDA graphs put out what networks do?"""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.measure.workload import compiling, exact_float32
from fullstride.nets import zoo
from fullstride.nets.compile import compile_for_training
from fullstride.nets.network import Network
from gpu_parts.settings import FORMATS, ROOT, Result, Settings, Work

GRAPHS = "tests/latency/test_calibrate.py"
NETWORKS = {"tresnet_m": 160, "resnet_rs_50": 160, "genet_large": 192}  # pixels per side
TINY = {"tresnet_tiny": 32}
IMAGES = 8
MAX_ERROR_RATIO = 2.0  # of a compiled network to an eager one: they add in a different order
NOISE = {"float32": 1e-4, "bfloat16": 1e-2}  # relative errors below it are equal


def correctness(settings: Settings) -> Iterator[Work]:
    if settings.gpu:
        yield "CUDA graphs", graph_tests
    for name, side in (NETWORKS if settings.gpu else TINY).items():
        for precision in NOISE if settings.gpu else ("bfloat16",):  # a minute of g++ for each
            yield (
                f"gradients of {name}, {precision}",
                partial(gradients, settings, name, side, precision),
            )


def graph_tests() -> Result:
    """The result of tests, without settings for warnings of other versions."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "filterwarnings=default", "-m", "gpu", GRAPHS]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ)
    output = process.stdout.strip() or process.stderr.strip() or "pytest printed nothing"
    lines = output.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "ok": process.returncode == 0,
        "summary": lines[-1],
        "failed": failed,
        "end": lines[-60:] if failed else [],
    }


def gradients(settings: Settings, name: str, side: int, precision: str) -> Result:
    """Errors of compiled and eager gradients against eager ones in float64: all, and the worst."""
    torch.manual_seed(0)
    net = zoo.create(name)
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            # The ends of blocks begin at zero. With large gains there, bf16 gradients are noise.
            gains = (0.2, 1.2) if norm.weight.any() else (0.05, 0.2)
            nn.init.uniform_(norm.weight, *gains)
            nn.init.normal_(norm.bias, std=0.1)
    images, labels = torch.randn(IMAGES, 3, side, side), torch.arange(IMAGES) % net.spec.classes
    device, format = settings.device, FORMATS["nhwc"]

    def gradient(compiled: bool, dtype: torch.dtype, autocast: bool) -> list[Tensor]:
        twin = zoo.create(name)
        twin.load_state_dict(net.state_dict())
        twin = twin.to(device, dtype).to(memory_format=format).train()  # pyright: ignore
        assert isinstance(twin, Network)
        call = compile_for_training(twin, dynamic=False) if compiled else twin
        x = images.to(device, dtype).contiguous(memory_format=format)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(call(x, twin.draw(IMAGES)).to(dtype), labels.to(device))
        loss.backward()
        return [p.grad.double().flatten() for p in twin.parameters() if p.grad is not None]

    autocast = precision == "bfloat16"
    with exact_float32(), compiling(True):
        exact = gradient(False, torch.float64, False)
        forms = {
            "compiled": gradient(True, torch.float32, autocast),
            "eager": gradient(False, torch.float32, autocast),
        }
    norm = torch.cat(exact).norm()
    error = {
        form: ((torch.cat(each) - torch.cat(exact)).norm() / norm).item()
        for form, each in forms.items()
    }
    cosine = {
        form: min(
            F.cosine_similarity(a, b, 0).item()
            for a, b in zip(each, exact, strict=True)
            if b.numel() >= 1000
        )
        for form, each in forms.items()
    }
    summary = ", ".join(
        f"{form} error {error[form]:.1e}, worst cosine {cosine[form]:.5f}" for form in forms
    )
    ok = error["compiled"] <= MAX_ERROR_RATIO * error["eager"] + NOISE[precision]
    return {"ok": ok, "errors": error, "worst_cosine": cosine, "summary": summary}
