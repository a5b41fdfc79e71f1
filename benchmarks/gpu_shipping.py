"""How fast does a folded network answer on this GPU by each way there is? Eager, compiled, ahead of time, TensorRT.

    python benchmarks/gpu_shipping.py --out benchmarks/gpu_shipping.json --commit $(git rev-parse --short HEAD)

Needs torch and timm, and for its rows ONNX and TensorRT; the package need not be installed. TResNet-M, ResNet-RS-50 and
GENet-large at 224 pixels in bf16, channels last; batches of 1 (each image waited for, p50 and p99 in ms), 8, 64 and
256. Every way takes its turn in every round, beside timm's network compiled; images are on the GPU already. Answers are
compared with eager ones first. `--device cpu --tiny` shows that the script itself works.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from fullstride.deploy.fold_batch_norm import fold_batch_norm  # noqa: E402
from fullstride.measure.bench import measure_all  # noqa: E402
from fullstride.measure.environment import Environment  # noqa: E402
from fullstride.measure.protocols import ONLINE, THROUGHPUT  # noqa: E402
from fullstride.nets import zoo  # noqa: E402

PAIRS = {
    "tresnet_m": "timm/tresnet_m",
    "resnet_rs_50": "timm/resnetrs50",
    "genet_large": "timm/gernet_l",
}
Call = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    pairs, side, batches = (
        (PAIRS, 224, (1, 8, 64, 256))
        if not asked.tiny
        else ({"genet_tiny": "timm/resnet10t"}, 32, (1, 4))
    )
    found: dict[str, Any] = {
        "commit": asked.commit,
        "environment": asdict(Environment.here(device)),
        "rows": [],
    }
    for name, theirs in pairs.items():
        ours = fold_batch_norm(zoo.create(name)).to(
            device, torch.bfloat16, memory_format=torch.channels_last
        )
        timm = (
            zoo.create(theirs).eval().to(device, torch.bfloat16, memory_format=torch.channels_last)
        )
        for batch in batches:
            x = torch.randn(batch, 3, side, side, device=device, dtype=torch.bfloat16)
            x = x.contiguous(memory_format=torch.channels_last)
            found["rows"] += contest(name, ways(ours, timm, x, device), x, asked.tiny)
            asked.out.write_text(json.dumps(found, indent=1) + "\n")


def ways(
    ours: nn.Module, timm: nn.Module, x: Tensor, device: torch.device
) -> dict[str, Call | str]:
    """Each way to answer a batch like `x`; of one that is not to be had here, why."""
    makers: dict[str, Callable[[], Call]] = {
        "timm compiled": partial(torch.compile, timm, dynamic=False),
        "timm CUDA graph": partial(torch.compile, timm, dynamic=False, mode="reduce-overhead"),
        "eager": lambda: ours,
        "compiled": partial(torch.compile, ours, dynamic=False),
        "CUDA graph": partial(torch.compile, ours, dynamic=False, mode="reduce-overhead"),
        "AOTInductor": partial(ahead_of_time, ours, x),
        "TensorRT": partial(by_tensorrt, ours, x),
    }
    if device.type == "cpu":
        del makers["timm CUDA graph"], makers["CUDA graph"]
    torch.compiler.reset()
    found: dict[str, Call | str] = {}
    with torch.inference_mode():
        expected = ours(x).float()
        for way, make in makers.items():
            try:
                call = make()
                answers = call(x).float()
                if (
                    not way.startswith("timm")
                    and (answers - expected).abs().max() > 0.05 * expected.abs().max()
                ):
                    raise ValueError("its answers differ by more than a twentieth of the largest")
                found[way] = call
            except Exception as error:  # whatever fails is written down and stops nothing else
                found[way] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
                )
    return found


def ahead_of_time(net: nn.Module, x: Tensor) -> Call:
    program = torch.export.export(net, (x,))
    with tempfile.TemporaryDirectory() as scratch:
        path = str(Path(scratch) / "net.pt2")
        torch._inductor.aoti_compile_and_package(
            program, package_path=path, inductor_configs={"freezing": True}
        )
        return torch._inductor.aoti_load_package(path)


def by_tensorrt(net: nn.Module, x: Tensor) -> Call:
    import torch_tensorrt  # pyright: ignore[reportMissingImports]

    return torch_tensorrt.compile(net, ir="dynamo", inputs=[x], enabled_precisions={torch.bfloat16})


def contest(name: str, calls: dict[str, Call | str], x: Tensor, tiny: bool) -> list[dict[str, Any]]:
    protocol = replace(
        ONLINE if len(x) == 1 else replace(THROUGHPUT, batch=len(x)), resolution=x.shape[-1]
    )
    if tiny:
        protocol = replace(protocol, rounds=2, warmup_s=0.0, round_s=0.01)
    with torch.inference_mode():
        steps = {way: partial(call, x) for way, call in calls.items() if not isinstance(call, str)}
        against = "timm compiled" if "timm compiled" in steps else "eager"
        rows = measure_all(
            steps, protocol, x.device, precision="bfloat16", layout="nhwc", reference=against
        )
    told = [{"network": name, **asdict(row), "environment": None} for row in rows]
    for row in rows:
        speed = f"p50 {row.ms_p50:.3f} ms" if row.ms_p50 else f"{row.images_per_s:,.0f} images/s"
        print(f"{name:14}{len(x):>4}  {row.name:16}{speed:>20}  x {row.ratio:.2f}", flush=True)
    missing = {way: why for way, why in calls.items() if isinstance(why, str)}
    for way, why in missing.items():
        print(f"{name:14}{len(x):>4}  {way:16}{why}", flush=True)
    return [
        *told,
        *(
            {"network": name, "name": way, "batch": len(x), "failed": why}
            for way, why in missing.items()
        ),
    ]


if __name__ == "__main__":
    main()
