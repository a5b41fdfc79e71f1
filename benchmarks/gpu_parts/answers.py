"""How fast do networks answer: eager, compiled, as CUDA graphs, and as files of TensorRT?"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import shipping as files
import torch
from torch import Tensor

from fullstride.data.transforms.crop import to_input
from fullstride.deploy.exported import ExportedModule, Precision
from fullstride.deploy.fold_batch_norm import fold_batch_norm
from fullstride.deploy.formats import FORMATS, open_file
from fullstride.deploy.formats.tensorrt import engine_missing
from fullstride.latency.devices import estimate_by_name
from fullstride.latency.microbenchmarks import by_sheet
from fullstride.measure.bench import BenchOptions, measure_all
from fullstride.measure.protocols import ONLINE, THROUGHPUT
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.papers.suite import reason
from gpu_parts.settings import Result, Settings, Work, run_command

PAIRS, SIDE = files.PAIRS, files.SIDE
BATCHES = (1, 256, 8, 64)
GOAL = 1.15  # times the speed of timm's network, both compiled
MAX_ERROR = 0.05  # of the largest logit in float32: weights are random
REFERENCE = "timm compiled"
FILES: dict[str, tuple[tuple[str, Precision], ...]] = {  # by the device
    "cuda": (("tensorrt", "fp16"), ("tensorrt", "int8"), ("aoti", "bf16")),
    "cpu": (("onnx", "fp32"),),
}
Call = Callable[[Tensor], Tensor]


def shipping(settings: Settings) -> Iterator[Work]:
    pairs = PAIRS if settings.gpu else {"genet_tiny": "timm/resnet10t"}
    for batch in BATCHES if settings.gpu else (1, 4):
        for name, theirs in pairs.items():
            yield f"{name}, batch {batch}", partial(contest, settings, name, theirs, batch)


def contest(settings: Settings, name: str, theirs: str, batch: int) -> Result:
    """Images/s, or ms of a call, of all forms in turn; those whose logits differ are errors."""
    device, dtype = settings.device, torch.bfloat16
    bundle = files.random_bundle(name)
    kind: Any = dict(device=device, dtype=dtype, memory_format=torch.channels_last)
    ours = fold_batch_norm(bundle.net).eval().to(**kind)
    timm = zoo.create(theirs).eval().to(**kind)
    x = pictures(bundle, batch).to(**kind)
    compiled: dict[str, Any] = dict(dynamic=False)
    graph = compiled | dict(mode="reduce-overhead")
    makers: dict[str, Callable[[], Any]] = {
        "timm eager": lambda: timm,
        REFERENCE: partial(torch.compile, timm, **compiled),
        "eager": lambda: ours,
        "compiled": partial(torch.compile, ours, **compiled),
    }
    if settings.gpu:
        makers["timm CUDA graph"] = partial(torch.compile, timm, **graph)
        makers["CUDA graph"] = partial(torch.compile, ours, **graph)
    makers |= {
        f"{format} {precision}": partial(as_file, bundle, format, precision, x)
        for format, precision in FILES["cuda" if settings.gpu else "cpu"]
    }
    torch.compiler.reset()
    calls, failed = dict[str, Callable[[], object]](), dict[str, str]()
    with torch.inference_mode():
        expected = ours(x).float()
        for form, make in makers.items():
            try:
                call = make()
                logits = call(x).float().to(device)
                if not form.startswith("timm"):
                    error = (logits - expected).abs().max() / expected.abs().max()
                    if not error <= MAX_ERROR:
                        raise ValueError(f"its logits differ by {error:.0%} of the largest")
                calls[form] = partial(call, x)
            except Exception as error:  # the others go on
                failed[form] = reason(error)
        protocol = replace(ONLINE if batch == 1 else THROUGHPUT, batch=batch, resolution=SIDE)
        if not settings.gpu:
            protocol = replace(protocol, rounds=2, warmup_s=0.0, round_s=0.01)
        reference = REFERENCE if REFERENCE in calls else "eager"
        options = BenchOptions(precision="bfloat16", layout="nhwc", reference=reference)
        rows = measure_all(calls, protocol, device, options)
    ratios = {row.name: row.ratio for row in rows}
    best = max((form for form in ratios if "timm" not in form), key=lambda form: ratios[form] or 0)
    note = f"; failed: {', '.join(failed)}" if failed else ""
    return {
        "ok": not settings.gpu or batch < max(BATCHES) or (ratios[best] or 0) >= GOAL,
        "summary": f"{best} is {ratios[best]:.2f}x {reference}{note}",
        "batch": batch,
        "resolution": SIDE,
        "ms_per_image": {row.name: row.ms_per_image or 1e3 / row.images_per_s for row in rows},
        "ms_p99": {row.name: row.ms_p99 for row in rows},
        "ratios": ratios,
        "reference": reference,
        "spreads": {row.name: row.spread for row in rows},
        "estimated": estimated(settings, theirs, batch),
        "failed": failed,
    }


def pictures(bundle: Bundle, count: int) -> Tensor:
    """(N, 3, H, W) as the network takes them, of the kind from which int8 has its ranges."""
    few = np.stack([np.asarray(each) for each in files.smooth_pictures(min(count, 8))])
    pixels = torch.from_numpy(few).repeat(-(-count // len(few)), 1, 1, 1)[:count]
    return to_input(pixels, bundle.preprocessing)


def as_file(bundle: Bundle, format: str, precision: Precision, x: Tensor) -> Call:
    """The file that ships, which takes images of the host and returns logits there."""
    if format == "tensorrt" and (why := engine_missing()):  # its folder would be an ONNX file
        raise ValueError(why)
    images = x.float().cpu().contiguous()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file{FORMATS[format].suffix}"
        files.export_random(bundle, path, format, precision, x.device.type)
        module = ExportedModule(open_file(path, threads=files.THREADS, trust=True))
    return lambda _: module(images)


def estimated(settings: Settings, name: str, batch: int) -> list[float]:
    """ms an image of an eager network by the GPU's data sheet, with its interval; [] without one"""
    profile = by_sheet(torch.cuda.get_device_name(settings.device)) if settings.gpu else None
    if profile is None:
        return []
    time = estimate_by_name([name], profile, batch, SIDE)[0].estimate
    return [time.low, time.ms_per_image, time.high]


def profile(settings: Settings) -> Iterator[Work]:
    """A profile of this GPU for each runtime; its command has tests on a CPU."""
    if settings.gpu:
        yield "measure calibrate", partial(calibrate, settings)


def calibrate(settings: Settings) -> Result:
    minutes = f"{settings.seconds / 60 * 0.8:.2f}"  # the rest is for the fits
    words = ["--device", str(settings.device), "--minutes", minutes, "--name", "gpu"]
    words += ["--out", str(settings.out / "profile_of_gpu.json")]
    words += ["--times-out", str(settings.out / "profile_times.json")]
    code, lines = run_command("measure", "calibrate", *words)
    fits = [line.strip() for line in lines if " times fitted" in line]
    return {"ok": code == 0, "summary": "; ".join(fits or lines[-1:]), "lines": lines}
