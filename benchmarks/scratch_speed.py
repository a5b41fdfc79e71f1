"""How many CPU-seconds take 90 and 93 % on Fashion-MNIST, from random weights?

    python benchmarks/scratch_speed.py --data FOLDER --work FOLDER \\
        --out benchmarks/scratch_speed.json

`fullstride train` with nothing chosen but the network, the resolution and the epochs, beside a
ResNet-9 of about as many parameters in a loop of PyTorch: SGD with one cycle, flips and shifts. Our
network is of ResNet's basic blocks, which are GENet's of early stages, on maps of 14, 7 and 4
pixels, with the averaged shortcuts of TResNet and ResNet-RS. Both train on all 60,000 images (ours
keeps a validation split of them), in one thread, for 1, 2, 4 and 8 epochs until they have 93 % of
the 10,000 test images. CPU-seconds are those of the whole process, and both alternate. What OUT has
is not trained again. DATA has the four files of Debian's package `dataset-fashion-mnist`.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from defaults import fashion, find_file
from finetune import run
from torch import nn

from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.environment import Environment
from fullstride.nets.blocks import Basic, ConvStem, Style, init_resnet
from fullstride.nets.bundle import build
from fullstride.nets.spec import NetSpec, Stage

OUTPUT = json_output("results of a benchmark", "environment", "results")
OURS, PEER = "basic blocks at 56 pixels", "ResNet-9"
SPEC = NetSpec(
    source="ours: basic blocks for small pictures",
    stem=ConvStem,
    stem_width=16,
    stages=tuple(
        Stage(block=Basic, depth=depth, width=width, stride=2)
        for depth, width in ((1, 32), (2, 64), (1, 128))
    ),
    style=Style(average_shortcut=True),
    init=init_resnet,
    classes=10,
    resolution=56,
)
GOALS, LENGTHS = (90, 93), (1, 2, 4, 8)
WIDTH, BATCH, RATE, SIDE, SHIFT = 16, 128, 0.2, 28, 2  # of the ResNet-9


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.branch = nn.Sequential(conv(width, width), conv(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(x)


def conv(c_in: int, c_out: int, *more: nn.Module) -> nn.Sequential:
    convolution = nn.Conv2d(c_in, c_out, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(c_out), nn.ReLU(inplace=True), *more)


def resnet9(w: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(
        conv(1, w),
        conv(w, 2 * w, nn.MaxPool2d(2)),
        Residual(2 * w),
        conv(2 * w, 4 * w, nn.MaxPool2d(2)),
        conv(4 * w, 8 * w, nn.MaxPool2d(2)),
        Residual(8 * w),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * w, 10),
    )


def parameters(net: nn.Module) -> int:
    return sum(each.numel() for each in net.parameters())


def one_cycle(data: Path, epochs: int) -> dict[str, float]:
    """Train the ResNet-9, and its accuracy on the test images in percent."""
    (x, y), (others, answers), _ = fashion(data)

    def ready(pixels: Any) -> torch.Tensor:
        return (torch.from_numpy(pixels).float() / 255 - 0.2860) / 0.3530

    x, y, others = ready(x), torch.from_numpy(y).long(), ready(others)
    net = resnet9().to(memory_format=torch.channels_last).train()
    steps = epochs * (len(x) // BATCH)
    optimizer = torch.optim.SGD(
        net.parameters(), lr=RATE, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, steps, pct_start=0.25, anneal_strategy="linear", cycle_momentum=False
    )
    places = torch.arange(SIDE)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x))[: len(x) // BATCH * BATCH].view(-1, BATCH):
            padded = F.pad(x[chosen], (SHIFT,) * 4)
            rows, columns = torch.randint(0, 2 * SHIFT + 1, (2, BATCH, 1))
            images = padded[
                torch.arange(BATCH)[:, None, None],
                (rows + places)[:, :, None],
                (columns + places)[:, None, :],
            ]
            images = torch.where(torch.rand(BATCH, 1, 1) < 0.5, images.flip(-1), images)
            F.cross_entropy(net(images[:, None]), y[chosen], label_smoothing=0.1).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    net.eval()
    with torch.inference_mode():
        predicted = torch.cat([net(part[:, None]).argmax(1) for part in others.split(500)])
    return {"test": 100 * (predicted.numpy() == answers).mean()}


def ours(data: Path, work: Path, epochs: int) -> tuple[dict[str, float], float]:
    files = find_file(data, "train-images-idx3-ubyte*", "Debian's dataset-fashion-mnist").parent
    out, model = work / f"epochs {epochs}", work / "spec.json"
    model.write_text(SPEC.to_json())
    words = [sys.executable, "-m", "fullstride", "train", files, "--model", model, "--resolution"]
    words += [SPEC.resolution, "--epochs", epochs, "--workers", 0, "--device", "cpu", "--out", out]
    _, cpu_s = run([*map(str, words)])
    scores = json.loads((out / "bundle" / "bundle.json").read_text())["scores"]
    return {"test": scores["test"]["top1"]}, cpu_s


def peer(data: Path, epochs: int) -> tuple[dict[str, float], float]:
    words = [sys.executable, __file__, "--data", data, "--peer", epochs]
    text, cpu_s = run([*map(str, words)])
    return json.loads(text.splitlines()[-1]), cpu_s


def table(results: dict[str, list[dict[str, float]]]) -> str:
    lines = ["| network | epochs | test | CPU-s |", "|---|---|---|---|"]
    for name, rows in results.items():
        lines += [
            f"| {name} | {row['epochs']} | {row['test']:.2f} | {row['cpu_s']:.0f} |" for row in rows
        ]
    lines += ["", "| CPU-seconds to | " + " | ".join(results) + " |", "|---|---|---|"]
    for goal in GOALS:
        costs = []
        for rows in results.values():
            reached = [row["cpu_s"] for row in rows if row["test"] >= goal]
            costs.append(f"{min(reached):.0f}" if reached else "-")
        lines.append(f"| {goal} % | " + " | ".join(costs) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of the files")
    parser.add_argument("--work", type=Path, help="the folder of our runs")
    parser.add_argument("--out", type=Path, help="the JSON to write")
    parser.add_argument("--peer", type=int, help="only train the ResNet-9 for so many epochs")
    args = parser.parse_args()
    if args.peer:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        print(json.dumps(one_cycle(args.data, args.peer)))
        return
    if not (args.work and args.out):
        parser.error("give --work and --out")
    args.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, float]]] = {OURS: [], PEER: []}
    if args.out.exists():
        results |= json.loads(args.out.read_text())["results"]
    begin = time.strftime("%Y-%m-%d")
    for epochs in LENGTHS:
        for name, rows in results.items():
            if rows and (rows[-1]["epochs"] >= epochs or rows[-1]["test"] >= max(GOALS)):
                continue
            how = peer(args.data, epochs) if name == PEER else ours(args.data, args.work, epochs)
            rows.append({"epochs": epochs, **how[0], "cpu_s": how[1]})
            print(name, rows[-1], flush=True)
            with atomic_write(args.out, OUTPUT) as temporary:
                content = {"environment": asdict(Environment.here()), "results": results}
                temporary.write_text(json.dumps(content, indent=1) + "\n")
    environment = Environment.here()
    sizes = parameters(build(replace(SPEC, in_channels=1))), parameters(resnet9())
    text = f"""{table(results)}

Parameters: {sizes[0]:,} and {sizes[1]:,}. One seed, one thread, {len(LENGTHS)} lengths at most.
{environment.device}, torch {environment.torch}, {begin}.
"""
    args.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"scratch_speed.py: {error}")
