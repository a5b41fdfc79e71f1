"""How many images train at once? The command that finds the largest batch."""

from typing import Any

from fullstride.commands.flags import Device, Efficiency, Layout, Model, StepRecipe


def capacity(
    model: Model,
    resolution: int | None = None,
    device: Device = "auto",
    precision: str | None = None,
    layout: Layout | None = None,
    compiled: bool = False,
    efficiency: Efficiency | None = None,
    memory_gib: float | None = None,
    step_recipe: StepRecipe = "",
    predict: bool = False,
) -> None:
    """Predict the largest batch that trains, then prove it by real steps in fresh processes.

    Example: fullstride measure capacity tresnet_m --memory-gib 24 --predict

    The result is a multiple of 8, or less than 8.

    Args:
        model: A name that `fullstride zoo` lists, timm/NAME, a run or a bundle.
        resolution: Pixels a side; by default the recipe's, or else the network's own.
        device: Where to train. A prediction alone is for a GPU, which need not be present, unless
            this is cpu.
        precision: fp32, bf16 or fp16; by default the recipe's, or else bf16.
        layout: Memory format; by default the recipe's, or else nchw.
        compiled: For the network compiled by torch.compile; for networks of timm the prediction
            is that of eager steps.
        memory_gib: Use at most this much memory, such as 16 for a card of 16 GB; by default all
            that is free.
        predict: Only predict.
    """
    from fullstride.measure import max_batch
    from fullstride.report.console_lines import capacity_lines, probe_line, proven_line
    from fullstride.train.recipes.named import training_step

    flags: dict[str, Any] = dict(resolution=resolution, precision=precision, layout=layout)
    step = training_step(step_recipe, **flags, efficiency=efficiency, device=device)
    step |= dict(device=device, compiled=compiled, memory_gib=memory_gib)
    plan = max_batch.plan(model, **step, predict_only=predict)
    print(*capacity_lines(model, plan), sep="\n", flush=True)
    if predict:
        return
    probes = []
    for probe in plan.search():
        print(probe_line(probe), flush=True)
        probes.append(probe)
    print(proven_line(probes, model, plan))
