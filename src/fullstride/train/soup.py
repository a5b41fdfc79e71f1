"""Is an average of several epochs better than the last one? Greedy soups, chosen by the minival.

Source: model soups, arXiv:2203.05482, of epochs of one run. Batch statistics are averaged as the
weights are, and with the recipe's `precise_bn` measured for each average.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullstride.console import print_note
from fullstride.nets import fused_form
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import OUTPUT, Bundle, read_metadata
from fullstride.tasks import build_head
from fullstride.train import precise_statistics, run_folder
from fullstride.train.minival_comparison import FinalNetwork, averaged, quality
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


def better_average(run: PreparedRun, final: FinalNetwork) -> FinalNetwork:
    """`final`; or an average of epochs whose minival score is better.

    The epochs are tried from the best one on; each stays in the average if that is better with it.
    """
    candidates = [
        (quality(scores, run.metric), -int(scores[EPOCH]), slot)
        for slot in slots(run)
        if (scores := saved_scores(slot))
    ]
    best, states = None, []
    for _, minus_epoch, slot in sorted(candidates, reverse=True):
        state = Bundle.load(slot, build_head).net.state_dict()
        net = copy.deepcopy(fused_form.unpadded(final.net, run.spec))
        net.load_state_dict(averaged([*states, state]))
        if run.recipe.measures_statistics:
            net = precise_statistics.of_run(run, net)
        is_saved = not states and not run.recipe.measures_statistics  # whose scores are known
        scores = saved_scores(slot) if is_saved else run.minival_scores(net)
        trial = FinalNetwork(net, scores, (*(best.epochs if best else ()), -minus_epoch))
        if best is None or trial.is_better(best, run.metric):
            best, states = trial, [*states, state]
    is_better = best and len(states) > 1 and best.is_better(final, run.metric)
    if run.context.is_rank_zero:
        alone = f"the final weights ({final.described(run.metric)})"
        print_note(
            f"the bundle is the average of epochs {', '.join(map(str, sorted(best.epochs)))}, on "
            f"the minival {best.described(run.metric)}, and not {alone}"
            if best and is_better
            else f"no average of epochs is better on the minival than {alone}"
        )
    return replace(best, epochs=tuple(sorted(best.epochs))) if best and is_better else final


def slots(run: PreparedRun) -> list[Path]:
    return [run.folder / SOUP / str(number) for number in range(1, run.recipe.soup + 1)]


def saved_scores(slot: Path) -> Mapping[str, float]:
    """The epoch and the minival scores of the network in `slot`; empty where there is none."""
    return read_metadata(slot).scores["minival"] if slot.is_dir() else {}
