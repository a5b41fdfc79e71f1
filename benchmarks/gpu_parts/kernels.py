"""Are kernels and gradients right, and how near is each pass to the bandwidth of the memory?"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fullstride.measure.workload import exact_float32
from fullstride.nets import zoo
from fullstride.nets.fused import reference
from fullstride.nets.fused.network import to_fused
from fullstride.nets.fused.operators import choose
from fullstride.nets.fused.reference import Affine, Slopes
from fullstride.nets.network import Network
from gpu_parts.settings import FORMATS, ROOT, Result, Settings, Work, size_bytes

FUSED = "tests/nets/fused"
KERNELS = f"{FUSED}/kernels_in_triton.py", f"{FUSED}/int8_in_triton.py"
GRAPHS = "tests/latency/test_calibrate.py"
NETWORKS = {"tresnet_m": 160, "resnet_rs_50": 160, "genet_large": 192}  # pixels per side
TINY = {"tresnet_tiny": 32}
IMAGES = 8
MAX_ERROR_RATIO = 2.0  # of a fused network to a plain one: they add in a different order
NOISE = {"float32": 1e-4, "bfloat16": 1e-2}  # relative errors below it are equal
LARGE_MAP = 2**31  # elements, beyond 32-bit indices
LARGE_MAP_BYTES = 60 * 2**30  # of free GPU memory for the maps of a pass of so many elements


def correctness(settings: Settings) -> Iterator[Work]:
    yield "kernels, main tests", partial(kernel_tests, settings, "not slow", *KERNELS)
    if settings.gpu:
        yield "CUDA graphs", partial(kernel_tests, settings, "gpu", GRAPHS)
    else:
        yield "kernels, compiled for an H100", compiled_kernels
    for name, side in (NETWORKS if settings.gpu else TINY).items():
        for precision in NOISE:
            for layout in FORMATS:
                yield (
                    f"gradients of {name}, {precision}, {layout}",
                    partial(gradients, settings, name, side, precision, layout),
                )
    for layout in FORMATS:
        yield f"maps beyond 2^31 elements, {layout}", partial(large_maps, settings, layout)
    if settings.gpu:
        yield "kernels, all shapes", partial(kernel_tests, settings, "slow", *KERNELS)


def kernel_tests(settings: Settings, mark: str, *files: str) -> Result:
    """The result of tests, without settings for warnings of other versions."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "filterwarnings=default", "-m", mark, *files]
    variables = os.environ | ({} if settings.gpu else {"TRITON_INTERPRET": "1"})
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables)
    output = process.stdout.strip() or process.stderr.strip() or "pytest printed nothing"
    lines = output.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "ok": process.returncode == 0,
        "summary": lines[-1],
        "failed": failed,
        "end": lines[-60:] if failed else [],
    }


def compiled_kernels() -> Result:
    """Without a GPU: whether the compiler has registers for what each kernel computes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.json"
        script = ROOT / "benchmarks" / "compile_kernels.py"
        subprocess.run([sys.executable, script, "--out", out], check=True, capture_output=True)
        kernels = json.loads(out.read_text())["kernels"]
    spilled = [each["form"] for each in kernels if each["spilled_bytes"]]
    summary = f"{len(kernels)} forms, {len(spilled)} of them spill registers"
    return {"ok": not spilled, "spilled": spilled, "summary": summary}


def gradients(settings: Settings, name: str, side: int, precision: str, layout: str) -> Result:
    """Errors of fused and plain gradients against plain ones in float64: of all, and the worst."""
    torch.manual_seed(0)
    net = zoo.create(name)
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            # The ends of blocks begin at zero. With large gains there, bf16 gradients are noise.
            gains = (0.2, 1.2) if norm.weight.any() else (0.05, 0.2)
            nn.init.uniform_(norm.weight, *gains)
            nn.init.normal_(norm.bias, std=0.1)
    images, labels = torch.randn(IMAGES, 3, side, side), torch.arange(IMAGES) % net.spec.classes
    format, device = FORMATS[layout], settings.device

    def gradient(fused: bool, dtype: torch.dtype, autocast: bool) -> list[Tensor]:
        twin = zoo.create(name)
        twin.load_state_dict(net.state_dict())
        twin = twin.to(device, dtype).to(memory_format=format).train()  # pyright: ignore
        assert isinstance(twin, Network)
        twin = to_fused(twin) if fused else twin
        x = images.to(device, dtype).contiguous(memory_format=format)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(twin(x).to(dtype), labels.to(device))
        loss.backward()
        return [p.grad.double().flatten() for p in twin.parameters() if p.grad is not None]

    autocast = precision == "bfloat16"
    with exact_float32():
        exact = gradient(False, torch.float64, False)
        forms = {
            "fused": gradient(True, torch.float32, autocast),
            "plain": gradient(False, torch.float32, autocast),
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
    ok = error["fused"] <= MAX_ERROR_RATIO * error["plain"] + NOISE[precision]
    return {"ok": ok, "errors": error, "worst_cosine": cosine, "summary": summary}


def large_maps(settings: Settings, layout: str) -> Result:
    """The last two images of maps beyond 2^31 elements, against the reference in float64."""
    if settings.gpu and torch.cuda.mem_get_info(settings.device)[0] < LARGE_MAP_BYTES:
        raise ValueError(f"less than {LARGE_MAP_BYTES / 2**30:.0f} GiB are free")
    channels, side = (64, 56) if settings.gpu else (4, 6)
    images = LARGE_MAP // (channels * side**2) + 3 if settings.gpu else 4
    kernels = choose(torch.zeros(1, device=settings.device))
    inputs = random_inputs(settings, images, channels, side, layout)
    tests = kernel_test_module()

    def last_images(t: Tensor) -> Tensor:
        return t[-2:].clone() if t.ndim > 1 and len(t) == images else t

    last = tests.each(inputs, last_images)
    wrong = {}
    for number, form in enumerate(tests.FORMS):
        results = [t[-2:].double() for t in tests.answers(kernels, form, inputs)]
        exact = tests.answers(reference, form, tests.each(last, Tensor.double))
        error = max(
            ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
            for a, b in zip(results, exact, strict=True)
        )
        if not error <= 2**-7:
            wrong[f"{form[0]}-{number}"] = error
    size = inputs.x.numel()
    summary = f"{len(tests.FORMS) - len(wrong)} forms right, {size:,} elements"
    summary += f"; wrong: {', '.join(wrong)}" if wrong else ""
    return {"ok": not wrong, "wrong": wrong, "elements": size, "summary": summary}


@cache
def kernel_test_module() -> Any:
    """The tests' table of all passes, which needs Triton."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # the module reads its device from it
    try:
        return import_module("kernels_in_triton")
    finally:
        os.environ.pop("TRITON_INTERPRET", None)


def random_inputs(settings: Settings, n: int, c: int, side: int, layout: str) -> Any:
    """Random values for each argument of a pass, in bf16 on the device."""
    torch.manual_seed(0)
    device = settings.device
    dtype, format = torch.bfloat16, FORMATS[layout]

    def maps(side: int = side) -> Tensor:
        map_ = torch.empty(n, c, side, side, dtype=dtype, memory_format=format, device=device)
        return map_.normal_()

    def per_map() -> Tensor:
        return torch.rand(n, c, device=settings.device) + 0.5

    def pivot() -> Tensor:
        return torch.randn(c, device=settings.device)

    affines = [Affine(pivot(), per_map(), per_map()) for _ in range(2)]
    slopes = [Slopes(per_map(), per_map(), per_map()) for _ in range(2)]
    four = [maps() for _ in range(4)]
    half = maps((side + 1) // 2)
    return kernel_test_module().Given(*four, half, *affines, *slopes, per_map())


# ---- Bandwidth

SHAPES = ((64, 56), (128, 28), (1024, 14), (2048, 7))  # channels, pixels per side, at stage ends
ELEMENTS = 2**28  # of a map: many times the cache, and calls much longer than their launch
CALLS = 20


def bandwidth(settings: Settings) -> Iterator[Work]:
    for layout in FORMATS:
        for channels, side in SHAPES if settings.gpu else SHAPES[:1]:
            name = f"{side}x{side}x{channels}, {layout}"
            yield name, partial(pass_rates, settings, channels, side, layout)


def pass_rates(settings: Settings, channels: int, side: int, layout: str) -> Result:
    """GB/s of every pass, counting each input and output map once; `copy` is a plain copy."""
    images = max(1, ELEMENTS // (channels * side**2)) if settings.gpu else 2
    inputs = random_inputs(settings, images, channels, side, layout)
    kernels = choose(inputs.x)
    copy = 2 * size_bytes(inputs.x) / seconds(settings, inputs.x.clone) / 1e9
    rates = dict[str, float]()
    for number, (name, select) in enumerate(kernel_test_module().FORMS):
        arguments, call = select(inputs), getattr(kernels, name)
        tensors = (t for t in tree_leaves((arguments, call(*arguments))) if isinstance(t, Tensor))
        moved = sum(size_bytes(t) for t in tensors if t.ndim == 4)
        rates[f"{name}-{number}"] = moved / seconds(settings, partial(call, *arguments)) / 1e9
    low, middle, high = np.percentile([*rates.values()], (0, 50, 100))
    summary = f"copy {copy:,.0f} GB/s, passes {low:,.0f} to {high:,.0f}, median {middle:,.0f}, "
    return {
        "gb_per_s": rates | {"copy": copy},
        "images": images,
        "passes": kernels.__name__,
        "summary": f"{summary}slowest {min(rates, key=rates.__getitem__)}",
    }


def seconds(settings: Settings, call: Callable[[], object]) -> float:
    """The median time of a call."""
    for _ in range(5 if settings.gpu else 1):
        call()
    if not settings.gpu:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
    return float(np.median(times)) / 1e3
