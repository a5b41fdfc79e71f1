"""Does training on a CPU take as little time per image as the best of plain PyTorch?

    python benchmarks/training_speed.py --out benchmarks/training_speed.json

One thread, float32, AdamW, label smoothing and an average of the weights; images are in memory. The
peers are timm's networks in a loop of PyTorch: eager in both memory layouts, and by torch.compile
in the one that is faster eagerly. Each contestant is a process of its own, and peers keep freed
memory as training does here. In every round all take some steps one after the other, and the ratio
is computed within the round. A peer that ends with a crash is "-".
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.environment import Environment
from fullstride.train.compute import keep_freed_memory

OUTPUT = json_output("results of a benchmark", "environment", "rows")
NETWORKS = {  # ours, and timm's
    "timm/tf_efficientnet_lite0": "tf_efficientnet_lite0",
    "timm/resnet50": "resnet50",
    "genet_light": "gernet_s",
}
SIDES, BATCH, CLASSES, RATE = (96, 160, 224), 16, 10, 1e-4
PEERS = ("eager nchw", "eager nhwc", "compiled nhwc")
OURS = "fullstride"
ROUND_S = 2.0  # of each contestant in a round
Step = Callable[[], object]


def plain_step(name: str, compiles: bool, layout: torch.memory_format, x: Any, y: Any) -> Step:
    import timm

    net = timm.create_model(NETWORKS[name], num_classes=CLASSES).train()
    net.to(memory_format=layout)
    forward = torch.compile(net) if compiles else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.01)
    averaging = torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=averaging, use_buffers=True)

    def step() -> None:
        logits = forward(x.contiguous(memory_format=layout))
        F.cross_entropy(logits, y, label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)

    return step


def own_step(name: str, x: Any, y: Any) -> Step:
    from fullstride.nets import zoo
    from fullstride.tasks import find_task
    from fullstride.train.compute import SINGLE_PROCESS
    from fullstride.train.loop import build_trainer
    from fullstride.train.recipes.recipe import Recipe

    recipe = Recipe(epochs=1000, batch_size=BATCH, lr=RATE, weight_decay=0.01, optimizer="adamw")
    net = zoo.create(name, classes=CLASSES, resolution=x.shape[-1]).train()
    learner = build_trainer(net, find_task(), recipe, 1000, None, SINGLE_PROCESS)
    numbers = count()

    def step() -> None:
        with learner.numerics():
            learner.step(x, y, next(numbers))

    return step


def contestant(who: str, name: str, side: int, pipe: Any) -> None:
    """Takes as many steps as it is told, and answers with their CPU-seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, 3, side, side), torch.arange(BATCH) % CLASSES
    if who == OURS:
        step = own_step(name, x, y)
    else:
        form, layout = who.split()
        formats = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
        step = plain_step(name, form == "compiled", formats[layout], x, y)
    with keep_freed_memory(x.device):
        for steps in iter(pipe.recv, 0):
            begin_s = time.process_time()
            for _ in range(steps):
                step()
            pipe.send(time.process_time() - begin_s)


def race(name: str, side: int, rounds: int) -> dict[str, Any]:
    """Images per CPU-second of all, by round, and the ratio to the best peer."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for who in (*PEERS, OURS):
        pipes[who], end = context.Pipe()
        processes.append(context.Process(target=contestant, args=(who, name, side, end)))
        processes[-1].start()
        end.close()  # so that a process that ends is an error here
    rates: dict[str, list[float]] = {}
    steps: dict[str, int] = {}

    def seconds(who: str, number: int) -> float:
        pipes[who].send(number)
        return pipes[who].recv()

    for who in list(pipes):
        try:
            seconds(who, 2)  # compiles and chooses kernels
            steps[who] = max(1, round(ROUND_S / seconds(who, 1)))
            rates[who] = []
        except (EOFError, OSError):
            if who == OURS:
                raise
            del pipes[who]
    for _ in range(rounds):
        for who in pipes:
            rates[who].append(BATCH * steps[who] / seconds(who, steps[who]))
    for who in pipes:
        pipes[who].send(0)
    for process in processes:
        process.join()
    medians = {who: statistics.median(each) for who, each in rates.items()}
    own = medians.pop(OURS)
    result: dict[str, Any] = {"network": name, "side": side, "peers": medians, "own": own}
    for kind in ("eager", "compiled"):
        names = [who for who in medians if who.startswith(kind)]
        if not names:
            continue
        best = max(names, key=medians.__getitem__)
        ratios = [ours / peer for ours, peer in zip(rates[OURS], rates[best], strict=True)]
        result[kind] = {"best": best, "ratio": statistics.median(ratios), "ratios": ratios}
    return result


def table(rows: list[dict[str, Any]]) -> str:
    head = ("network", "pixels", *PEERS, OURS, "to best eager", "to best compiled")
    lines = [head, ["-" * len(name) for name in head]]
    for row in rows:
        peers = (f"{row['peers'][who]:.1f}" if who in row["peers"] else "-" for who in PEERS)
        ratios = (
            f"{row[kind]['ratio']:.2f}" if kind in row else "-" for kind in ("eager", "compiled")
        )
        lines.append((row["network"], str(row["side"]), *peers, f"{row['own']:.1f}", *ratios))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rows = []
    environment = Environment.here()
    for name in NETWORKS:
        for side in SIDES:
            rows.append(race(name, side, args.rounds))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            with atomic_write(args.out, OUTPUT) as temporary:
                content = {"environment": asdict(environment), "rows": rows}
                temporary.write_text(json.dumps(content, indent=1) + "\n")
    text = f"""{table(rows)}

Images per CPU-second of training steps, {BATCH} images each; medians of {args.rounds} rounds. The
ratios are ours to the better peer of a kind in the same round: above 1, ours is faster.
{environment.device}, torch {environment.torch}, one thread.
"""
    args.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"training_speed.py: {error}")
