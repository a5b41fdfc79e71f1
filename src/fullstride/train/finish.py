"""How does a training run end? With the weights that are chosen, their scores, and a bundle."""

from fullstride.nets import fused_form
from fullstride.nets.bundle import Bundle
from fullstride.tasks import build_head
from fullstride.train import linear_probe, precise_statistics, run_folder, score_file, soup
from fullstride.train.minival_comparison import FinalNetwork
from fullstride.train.prepare import PreparedRun


def finish(run: PreparedRun) -> None:
    """Score the final weights on the minival and the test images, and save them as the bundle.

    Scores that the log has are not computed again. The state of the task, such as a temperature, is
    fitted on the minival before. Raises FloatingPointError if the final scores are not finite.
    """
    final, results = final_network(run), {}
    if run.recipe.measures_statistics:
        final = precise_statistics.better_statistics(run, final)
    if run.recipe.soup:
        final = soup.better_average(run, final)
    if run.recipe.linear_probe:
        final = linear_probe.with_probe(run, final)
    try:
        task, minival = run.calibrate(final.net)
        if minival:
            results["minival"] = minival.with_interval()
        if len(run.data.test):  # data with a minival of their own may have none
            results["test"] = run.score(final.net, run.data.test, task).with_interval()
    except FloatingPointError as error:
        raise FloatingPointError(
            f"{error} at the end of training: lower recipe.lr ({run.recipe.lr:g}), such as "
            f"--lr {run.recipe.lr / 10:.2g}, or set recipe.clip_norm, with another --out"
        ) from None
    names = run.folder.name, run.data.name, run.data.classes
    run.context.on_rank_zero(score_file.save, run.folder / run_folder.SCORES, *names, results)
    scores = {
        split: result.scores | ({"skipped": result.skipped} if result.skipped else {})
        for split, result in results.items()
    }
    bundle = run.bundle(final.net, scores, task, final.epochs)
    run.context.on_rank_zero(bundle.save, run.folder / run_folder.BUNDLE)


def final_network(run: PreparedRun) -> FinalNetwork:
    """The average of the last epoch, or that of the best one if the recipe stops early.

    It has the scores of the log. In a run that has not ended the last epoch may have none.
    """
    last = run_folder.load_checkpoint(run.folder)
    assert last is not None
    rows = run_folder.read_log(run.folder, run.metric, last["epochs"])
    if run.recipe.early_stop_patience and (best := run_folder.best_row(rows, run.metric)):
        path = run.folder / run_folder.BEST
        if not path.is_dir():
            raise ValueError(f"{path}, the best epoch's weights, is gone: train with another --out")
        net = fused_form.unpadded(run.net, run.spec)
        net.load_state_dict(Bundle.load(path, build_head).net.state_dict())
        return FinalNetwork(net, run_folder.minival_scores(best))
    run.net.load_state_dict(last["average"])
    return FinalNetwork(run.net, run_folder.minival_scores(rows[-1]))
