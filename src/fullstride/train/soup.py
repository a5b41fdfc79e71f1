"""Is an average of several epochs better than the last one? Greedy soups, chosen by the minival.

Source: model soups, arXiv:2203.05482, of epochs of one run. Batch statistics are averaged as the
weights are.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullstride.console import print_note
from fullstride.nets import fused_form
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import OUTPUT, Bundle, read_metadata
from fullstride.tasks import build_head
from fullstride.tasks.task import Metric
from fullstride.train import run_folder
from fullstride.train.prepare import PreparedRun
from fullstride.writing import check_output

SOUP = "soup"  # the folder of the ingredients in that of a run
EPOCH = "epoch"  # of an ingredient, among its scores


def check_slots(run: PreparedRun) -> None:
    """Raise ValueError if something else is where epochs will be saved; writes nothing."""
    for slot in slots(run):
        check_output(slot, OUTPUT)


def save_epoch(
    run: PreparedRun, rows: list[dict[str, Any]], average: Backbone, scores: Mapping[str, float]
) -> None:
    """Save the network of the last of `rows` if it is among the best of them.

    It takes the place of one that no longer is. This is done before the log has the row: after a
    stop between the two the epoch is trained again, with the same result.
    """
    count, epoch = run.recipe.soup, rows[-1]["epoch"]
    best = {row["epoch"] for row in run_folder.best_rows(rows, run.metric, count)}
    if epoch in best:
        held = {slot: saved_scores(slot).get(EPOCH) for slot in slots(run)}
        slot = next(
            slot for slot, other in held.items() if other == epoch or other not in best - {epoch}
        )
        run.bundle(average, {"minival": {**scores, EPOCH: epoch}}).save(slot)


def better_average(run: PreparedRun, net: Backbone) -> tuple[Backbone, tuple[int, ...]]:
    """`net`, the final network; or an average of epochs whose minival score is better, and these.

    The epochs are tried from the best one on; each stays in the average if that is better with it.
    """
    final = run.score(net, run.data.minival).scores
    candidates = [
        (quality(scores, run.metric), -int(scores[EPOCH]), slot)
        for slot in slots(run)
        if (scores := saved_scores(slot))
    ]
    soup, scores = copy.deepcopy(fused_form.unpadded(net, run.spec)), {}
    epochs, states = [], []
    for _, minus_epoch, slot in sorted(candidates, reverse=True):
        state = Bundle.load(slot, build_head).net.state_dict()
        soup.load_state_dict(averaged([*states, state]))
        trial = run.score(soup, run.data.minival).scores
        if not states or quality(trial, run.metric) > quality(scores, run.metric):
            scores, epochs, states = trial, [*epochs, -minus_epoch], [*states, state]
    is_better = len(states) > 1 and quality(scores, run.metric) > quality(final, run.metric)
    if run.context.is_rank_zero:
        alone = f"the final weights ({described(final, run.metric)})"
        numbers = ", ".join(map(str, sorted(epochs)))
        print_note(
            f"the bundle is the average of epochs {numbers}, on the minival "
            f"{described(scores, run.metric)}, and not {alone}"
            if is_better
            else f"no average of epochs is better on the minival than {alone}"
        )
    if not is_better:
        return net, ()
    soup.load_state_dict(averaged(states))
    return soup, tuple(sorted(epochs))


def described(scores: Mapping[str, float], metric: Metric) -> str:
    """For example "top-1 97.50 %, loss 0.1200"."""
    loss = f", loss {scores['loss']:.4f}" if "loss" in scores and metric.name != "loss" else ""
    return f"{metric.text(scores[metric.name])}{loss}"


def averaged(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each tensor over `states`, summed in float64; integers are those of the first."""

    def mean(name: str, first: Tensor) -> Tensor:
        if not first.is_floating_point():
            return first
        total = torch.zeros_like(first, dtype=torch.float64)
        for state in states:
            total += state[name]
        return (total / len(states)).to(first.dtype)

    return {name: mean(name, first) for name, first in states[0].items()}


def slots(run: PreparedRun) -> list[Path]:
    return [run.folder / SOUP / str(number) for number in range(1, run.recipe.soup + 1)]


def saved_scores(slot: Path) -> Mapping[str, float]:
    """The epoch and the minival scores of the network in `slot`; empty where there is none."""
    return read_metadata(slot).scores["minival"] if slot.is_dir() else {}


def quality(scores: Mapping[str, float], metric: Metric) -> tuple[float, float]:
    """Higher for better scores; of equal ones the lower loss is better."""
    return metric.rank(scores[metric.name]), -scores.get("loss", 0.0)
