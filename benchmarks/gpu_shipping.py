"""How fast is a folded network on this GPU? Eager, compiled, ahead of time, TensorRT.

    python benchmarks/gpu_shipping.py --out benchmarks/gpu_shipping.json --commit COMMIT

Needs torch and timm, and ONNX and TensorRT for their rows; the package need not be installed.
TResNet-M, ResNet-RS-50 and GENet-large at 224 pixels in bf16, channels last; batches of 1 (p50 and
p99 latency in ms), 8, 64 and 256. Every variant has its turn in every round, with timm's compiled
network; images are on the GPU already. Outputs are compared with eager ones first. `--device cpu
--tiny` shows that the script itself works.
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
from fullstride.measure.bench import (
    BenchOptions,
    measure_all,  # noqa: E402
)
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
    args = parser.parse_args()
    device = torch.device(args.device)
    pairs, side, batches = (
        (PAIRS, 224, (1, 8, 64, 256))
        if not args.tiny
        else ({"genet_tiny": "timm/resnet10t"}, 32, (1, 4))
    )
    results: dict[str, Any] = {
        "commit": args.commit,
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
            results["rows"] += measure(name, variants(ours, timm, x, device), x, args.tiny)
            args.out.write_text(json.dumps(results, indent=1) + "\n")


def variants(
    ours: nn.Module, timm: nn.Module, x: Tensor, device: torch.device
) -> dict[str, Call | str]:
    """Functions that compute the logits of a batch like `x`; or why that is not available here."""
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
    calls: dict[str, Call | str] = {}
    with torch.inference_mode():
        expected = ours(x).float()
        for name, make in makers.items():
            try:
                call = make()
                logits = call(x).float()
                if (
                    not name.startswith("timm")
                    and (logits - expected).abs().max() > 0.05 * expected.abs().max()
                ):
                    raise ValueError("its logits differ by more than 5 % of the largest")
                calls[name] = call
            except Exception as error:  # a failure is recorded, and the others go on
                lines = str(error).splitlines() or [""]
                calls[name] = f"{type(error).__name__}: {lines[0][:200]}"
    return calls


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


def measure(name: str, calls: dict[str, Call | str], x: Tensor, tiny: bool) -> list[dict[str, Any]]:
    protocol = replace(
        ONLINE if len(x) == 1 else replace(THROUGHPUT, batch=len(x)), resolution=x.shape[-1]
    )
    if tiny:
        protocol = replace(protocol, rounds=2, warmup_s=0.0, round_s=0.01)
    with torch.inference_mode():
        steps = {key: partial(call, x) for key, call in calls.items() if not isinstance(call, str)}
        reference = "timm compiled" if "timm compiled" in steps else "eager"
        options = BenchOptions(precision="bfloat16", layout="nhwc", reference=reference)
        rows = measure_all(steps, protocol, x.device, options)
    measurements = [{"network": name, **asdict(row), "environment": None} for row in rows]
    for row in rows:
        speed = f"p50 {row.ms_p50:.3f} ms" if row.ms_p50 else f"{row.images_per_s:,.0f} images/s"
        print(f"{name:14}{len(x):>4}  {row.name:16}{speed:>20}  x {row.ratio:.2f}", flush=True)
    missing = {key: reason for key, reason in calls.items() if isinstance(reason, str)}
    for key, reason in missing.items():
        print(f"{name:14}{len(x):>4}  {key:16}{reason}", flush=True)
    return [
        *measurements,
        *(
            {"network": name, "name": key, "batch": len(x), "failed": reason}
            for key, reason in missing.items()
        ),
    ]


if __name__ == "__main__":
    main()
