"""Does the quick suite run, does training learn on this device, and does the loader keep up?"""

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.papers import suite
from gpu_parts.settings import TIME_SHARE, Result, Settings, Work


def papers(settings: Settings) -> Iterator[Work]:
    yield "quick suite", partial(quick_suite, settings)


def quick_suite(settings: Settings) -> Result:
    """Raises ValueError where contests are left for the next call, which goes on after them."""
    options: dict[str, Any] = {}
    if not settings.gpu:
        options = dict(networks=("genet_tiny",), resolution=32)
    minutes = TIME_SHARE * settings.seconds / 60
    failed, count, out = [], 0, settings.out / "papers"
    for row in suite.run(out, device=settings.device, quick=True, minutes=minutes, **options):
        print(row.summary(), flush=True)
        count, failed = count + 1, [*failed, *row.failed]
    missing = (out / suite.PAGE).read_text().count("not measured yet")
    if missing:
        raise ValueError(f"{missing} cells wait for the next call, after {count} contests")
    return {
        "ok": not failed,
        "contests": count,
        "failed": failed,
        "summary": f"{count} contests, {len(failed)} failures; see papers/{suite.PAGE}",
    }


def training(settings: Settings) -> Iterator[Work]:
    from fullstride.train.recipes.named import DIGITS

    changes: dict[str, Any] = dict(channels_last=True, efficiency="fused")
    if not settings.gpu:  # on a CPU, bf16 with channels last is refused
        changes = dict(steps=2, warmup_epochs=0, batch_size=16, resolution=32)
    recipe = replace(DIGITS, precision="bf16", **changes)
    yield "digits, tresnet_tiny", partial(learn, settings, recipe)
    yield "data bench on the digits", partial(bench_data, settings, recipe)


def learn(settings: Settings, recipe: Any) -> Result:
    """Epochs for two minutes of a longer recipe, scored with the weights at that time."""
    from fullstride.data.dataset import open_data
    from fullstride.train import run
    from fullstride.train.recipes.choice import RunOptions

    last, limit = {}, min(120.0, 0.6 * settings.seconds) if settings.gpu else 1.0
    start, rates = time.perf_counter(), []
    options = RunOptions(device=str(settings.device), workers=workers(settings))
    with tempfile.TemporaryDirectory() as folder:
        data = open_data("digits")
        rows = run.train(Path(folder), "tresnet_tiny", data, recipe, options)
        for last in rows:
            rates.append(last["images_per_s"])
            if time.perf_counter() - start > limit:
                break
        rows.close()  # pyright: ignore[reportAttributeAccessIssue]
    top1 = last["val/top1"]
    summary = f"{len(rates)} epochs, loss {last['loss']:.3f}, validation {top1:.1f} %"
    summary += (
        f", {np.median(rates):,.0f} images/s, {last['data_wait_fraction']:.0%} of the time waiting"
    )
    return {
        "ok": not settings.gpu or top1 > 90,
        "images_per_s": rates,
        "last": last,
        "summary": summary,
    }


def bench_data(settings: Settings, recipe: Any) -> Result:
    from fullstride.data.dataset import open_data
    from fullstride.train import timing

    options: dict[str, Any] = dict(workers=workers(settings), device=settings.device)
    options["seconds"] = 5.0 if settings.gpu else 0.1
    result = timing.bench_data("tresnet_tiny", open_data("digits"), recipe, **options)
    return {**asdict(result), "summary": result.verdict()}


def workers(settings: Settings) -> int:
    return max(1, min(8, (os.cpu_count() or 1) - 1)) if settings.gpu else 0
