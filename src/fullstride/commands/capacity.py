"""How many images train at once? The command that finds the largest batch."""

from typing import Any, Literal

from tyro.conf import Positional

from fullstride.commands.flags import Device, Efficiency


def capacity(
    model: Positional[str],
    resolution: int | None = None,
    device: Device = "auto",
    precision: str = "bf16",
    layout: Literal["nchw", "nhwc"] = "nchw",
    compiled: bool = False,
    efficiency: Efficiency = "plain",
    memory_gib: float | None = None,
    predict: bool = False,
) -> None:
    """Predict the largest batch that trains, then prove it: real steps in fresh processes, to a multiple of 8.

    Args:
        model: A name that `fullstride zoo` lists, timm/NAME, a run or a bundle.
        resolution: Pixels a side; the network's own where not given.
        device: Where to train; a prediction is for a GPU, which need not be here, unless this is cpu.
        precision: fp32, bf16 or fp16.
        layout: Order of channels in memory.
        compiled: For what torch.compile makes of the network; of timm's, a prediction is of eager steps.
        memory_gib: Use no more memory: 16 for a card of 16 GB; what is free where not given.
        predict: Only predict.
    """
    import torch

    from fullstride.measure.environment import choose_device
    from fullstride.measure.memory import max_batch as finding
    from fullstride.measure.memory.limits import asked_bytes, check_gib
    from fullstride.measure.workload import find_precision, lean_form
    from fullstride.nets.zoo import measurable

    check_gib(memory_gib)
    imagined = predict and device in ("auto", "cuda") and not torch.cuda.is_available()
    place = torch.device("cuda") if imagined else choose_device(device)
    if memory_gib is None and (imagined or place.type == "cpu"):
        raise ValueError(
            f"no GPU to ask for its memory, on {device}: say with --memory-gib how much to fill"
        )
    if place.type == "cpu" and precision in ("fp16", "float16"):
        raise ValueError("training in float16 is for GPUs: on the CPU say --precision bf16 or fp32")
    room = (memory_gib or 0) * 2**30 if imagined else asked_bytes(memory_gib, place)
    net = measurable([model])[model]
    side = net.spec.resolution if resolution is None else resolution
    if efficiency != "plain":
        if compiled:
            raise ValueError(
                f"--compiled with --efficiency {efficiency}: say --efficiency compiled, or leave one out"
            )
        lean_form(net, model)
    size: dict[str, Any] = dict(
        resolution=side, precision=find_precision(precision), in_channels=net.spec.in_channels
    )
    size |= dict(compiled=compiled, efficiency=efficiency)
    guess = finding.predict(net, room, **size, device="cpu" if place.type == "cpu" else "cuda")
    kept, fixed = guess.bytes_per_image / 1e6, guess.fixed_bytes / 1e6
    told = f"{efficiency}, by torch.compile" if compiled else efficiency
    print(
        f"{model} at {side} x {side}, {size['precision']}, {layout}, {told}, {room / 2**30:.1f} GiB"
    )
    print(
        f"predicted: batch {guess.batch}, from {kept:.1f} MB an image and {fixed:.0f} MB whatever the batch"
    )
    if guess.batch > guess.map_batch:
        print(
            f"from batch {guess.map_batch + 1} on, a map has 2^31 elements or more, which not every GPU kernel takes"
        )
    if predict:
        return
    trial = finding.Trial(
        net=net,
        layout=layout,
        device=str(place),
        memory_bytes=room,
        map_batch=guess.map_batch,
        **size,
    )
    probes = []
    for probe in finding.search(trial.probe, guess.batch):
        peak = f", {probe.peak_memory_mib:,.0f} MiB" if probe.peak_memory_mib else ""
        why = {
            "memory": "out of memory",
            "elements": f"a map has 2^31 elements or more: {probe.why}",
        }
        print(f"batch {probe.batch}: {why.get(probe.outcome, 'trains')}{peak}", flush=True)
        probes.append(probe)
    found = finding.largest(probes, f"{model} at {side} x {side}")
    bound = {p.outcome for p in probes if p.batch > found}
    limit = "2^31 elements in a map, not memory" if bound == {"elements"} else "memory"
    print(
        f"proven: batch {found}, bounded by {limit}; the prediction is {guess.batch / found - 1:+.1%} off"
    )
