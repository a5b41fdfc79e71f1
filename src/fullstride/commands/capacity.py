"""How many images train at once? The command that finds the largest batch."""

from fullstride.commands.flags import Device, Efficiency, Layout, Model


def capacity(
    model: Model,
    resolution: int | None = None,
    device: Device = "auto",
    precision: str = "bf16",
    layout: Layout = "nchw",
    compiled: bool = False,
    efficiency: Efficiency = "plain",
    memory_gib: float | None = None,
    predict: bool = False,
) -> None:
    """Predict the largest batch that trains, then prove it by real steps in fresh processes.

    The result is a multiple of 8, or less than 8.

    Args:
        model: A name that `fullstride zoo` lists, timm/NAME, a run or a bundle.
        resolution: Pixels a side; by default the network's own.
        device: Where to train. A prediction alone is for a GPU, which need not be present, unless
            this is cpu.
        precision: fp32, bf16 or fp16.
        layout: Memory format.
        compiled: For the network compiled by torch.compile; for networks of timm the prediction
            is that of eager steps.
        memory_gib: Use at most this much memory, such as 16 for a card of 16 GB; by default all
            that is free.
        predict: Only predict.
    """
    from fullstride.measure.memory import max_batch
    from fullstride.report.console_lines import capacity_lines, probe_line, proven_line

    plan = max_batch.plan(
        model,
        resolution,
        device=device,
        precision=precision,
        layout=layout,
        compiled=compiled,
        efficiency=efficiency,
        memory_gib=memory_gib,
        predict_only=predict,
    )
    print(*capacity_lines(model, plan), sep="\n", flush=True)
    if predict:
        return
    probes = []
    for probe in plan.search():
        print(probe_line(probe), flush=True)
        probes.append(probe)
    print(proven_line(probes, model, plan))
