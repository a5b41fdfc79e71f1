"""How does a training run end? With the weights that are chosen, their scores, and a bundle."""

from fullstride.nets import fused_form
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import Bundle
from fullstride.tasks import build_head
from fullstride.train import precise_statistics, run_folder, score_file, soup
from fullstride.train.prepare import PreparedRun


def finish(run: PreparedRun) -> None:
    """Score the final weights on the minival and the test images, and save them as the bundle.

    The temperature of the bundle is fitted on the minival before.
    """
    net, epochs, results = final_network(run), (), {}
    if run.recipe.soup:
        net, epochs = soup.better_average(run, net)
    if run.recipe.precise_bn:
        net = precise_statistics.better_statistics(run, net)
    temperature = run.temperature(net)
    for split in ("minival", "test"):
        images = getattr(run.data, split)
        if not len(images):  # data with a minival of their own may have no test
            continue
        results[split] = run.score(net, images, temperature)
    names = run.folder.name, run.data.name, run.data.classes
    run.context.on_rank_zero(score_file.save, run.folder / run_folder.SCORES, *names, results)
    scores = {
        split: result.scores | ({"skipped": result.skipped} if result.skipped else {})
        for split, result in results.items()
    }
    bundle = run.bundle(net, scores, temperature, epochs)
    run.context.on_rank_zero(bundle.save, run.folder / run_folder.BUNDLE)


def final_network(run: PreparedRun) -> Backbone:
    """The average of the last epoch, or that of the best one if the recipe stops early."""
    if run.recipe.early_stop_patience:
        path = run.folder / run_folder.BEST
        if not path.is_dir():
            raise ValueError(f"{path}, the best epoch's weights, is gone: train with another --out")
        net = fused_form.unpadded(run.net, run.spec)
        net.load_state_dict(Bundle.load(path, build_head).net.state_dict())
        return net
    last = run_folder.load_checkpoint(run.folder)
    assert last is not None
    run.net.load_state_dict(last["average"])
    return run.net
