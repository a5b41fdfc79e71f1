"""How fast do networks answer: eager, compiled, as CUDA graphs, and as files of TensorRT?"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import shipping as files
import torch
from torch import Tensor, nn

from fullstride.data.transforms.crop import to_input
from fullstride.deploy.exported import ExportedModule, Precision
from fullstride.deploy.fold_batch_norm import fold_batch_norm
from fullstride.deploy.formats import FORMATS, open_file
from fullstride.deploy.formats.tensorrt import engine_missing
from fullstride.latency.devices import estimate_by_name
from fullstride.latency.microbenchmarks import by_sheet
from fullstride.measure.protocols import ONLINE, THROUGHPUT
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from gpu_parts.in_turn import time_in_turn
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


def shipping(settings: Settings) -> Iterator[Work]:
    pairs = PAIRS if settings.gpu else {"genet_tiny": "timm/test_resnet"}
    for batch in BATCHES if settings.gpu else (1, 4):
        for name, theirs in pairs.items():
            yield f"{name}, batch {batch}", partial(contest, settings, name, theirs, batch)


@dataclass(frozen=True)
class AnswerMaker:
    """Makes the call of a form on a batch. Raises ValueError for other logits than eager ones."""

    name: str
    theirs: str  # timm's network
    form: str
    batch: int
    device: torch.device

    def __call__(self) -> tuple[Callable[[], Tensor], dict[str, Any]]:
        kind: Any = dict(
            device=self.device, dtype=torch.bfloat16, memory_format=torch.channels_last
        )
        bundle = files.random_bundle(self.name)
        x = pictures(bundle, self.batch).to(**kind)
        if self.form.startswith("timm"):
            return inference(as_run(zoo.create(self.theirs).eval().to(**kind), self.form), x), {}
        eager = fold_batch_norm(bundle.net).eval().to(**kind)
        if self.form in (file := {" ".join(each): each for each in FILES[self.device.type]}):
            net = as_file(bundle, *file[self.form], x)
        else:
            net = as_run(eager, self.form)
        call = inference(net, x)
        with torch.inference_mode():
            expected, logits = eager(x).float(), call().float().to(self.device)
        error = (logits - expected).abs().max() / expected.abs().max()
        if not error <= MAX_ERROR:
            raise ValueError(f"its logits differ by {error:.0%} of the largest")
        return call, {"error": error.item()}


def as_run(net: nn.Module, form: str) -> Callable[[Tensor], Tensor]:
    """The network, eager, compiled, or compiled and captured."""
    if form.endswith("eager"):
        return net
    mode = "reduce-overhead" if form.endswith("CUDA graph") else None
    return torch.compile(net, dynamic=False, mode=mode)


def inference(net: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.inference_mode():
            return net(x)

    call()  # compiles, and selects algorithms
    return call


def contest(settings: Settings, name: str, theirs: str, batch: int) -> Result:
    """Images/s, or ms of a call, of all forms in turn; those whose logits differ are errors."""
    device = settings.device
    forms = ["timm eager", "eager"]
    if settings.gpu or batch == 1:  # g++ takes half a minute for each of the two
        forms += [REFERENCE, "compiled"]
    if settings.gpu:
        forms += ["timm CUDA graph", "CUDA graph"]
    forms += [" ".join(each) for each in FILES[device.type]]
    makers = {form: AnswerMaker(name, theirs, form, batch, device) for form in forms}
    protocol = replace(ONLINE if batch == 1 else THROUGHPUT, batch=batch, resolution=SIDE)
    if not settings.gpu:
        protocol = replace(protocol, rounds=2, warmup_s=0.0, round_s=0.01)
    rows, failed = time_in_turn(makers, protocol, device, settings.seconds / 2)
    reference = REFERENCE if REFERENCE in rows else "eager"
    first = rows[reference].images_per_s
    ratios = {
        form: float(np.median(np.divide(row.images_per_s, first))) for form, row in rows.items()
    }
    best = max((form for form in ratios if "timm" not in form), key=ratios.__getitem__)
    note = f"; failed: {', '.join(failed)}" if failed else ""
    return {
        "ok": not settings.gpu or batch < max(BATCHES) or ratios[best] >= GOAL,
        "summary": f"{best} is {ratios[best]:.2f}x {reference}{note}",
        "batch": batch,
        "resolution": SIDE,
        "ms_per_image": {form: 1e3 / row.rate for form, row in rows.items()},
        "ms_p99": {
            form: float(np.percentile(row.samples, 99)) if protocol.waits else None
            for form, row in rows.items()
        },
        "ratios": ratios,
        "reference": reference,
        "spreads": {form: row.spread for form, row in rows.items()},
        "errors": {form: row.facts["error"] for form, row in rows.items() if row.facts},
        "estimated": estimated(settings, theirs, batch),
        "failed": failed,
    }


def pictures(bundle: Bundle, count: int) -> Tensor:
    """(N, 3, H, W) as the network takes them, of the kind from which int8 has its ranges."""
    few = np.stack([np.asarray(each) for each in files.smooth_pictures(min(count, 8))])
    pixels = torch.from_numpy(few).repeat(-(-count // len(few)), 1, 1, 1)[:count]
    return to_input(pixels, bundle.preprocessing)


def as_file(
    bundle: Bundle, format: str, precision: Precision, x: Tensor
) -> Callable[[Tensor], Tensor]:
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
