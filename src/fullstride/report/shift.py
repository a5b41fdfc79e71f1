"""Says how test images differ from validation images if the test score is lower."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import normalize

from fullstride.io.console import printable
from fullstride.nets.bundle import Bundle, read_metadata
from fullstride.nets.timm_wrapper import TimmNetwork
from fullstride.report.console_tables import wilson
from fullstride.tasks import build_head, task_of
from fullstride.train import run_folder
from fullstride.train.batches import BatchOptions
from fullstride.train.final_weights import features
from fullstride.train.scoring import SplitScores, load_scores

if TYPE_CHECKING:
    from fullstride.data.dataset import DataSet, Images

MOST_IMAGES = 500  # of a split, evenly spaced, to compare
SHOWN = 3  # classes, and images


def shift_lines(
    run: Path, data: "DataSet", test: SplitScores | None = None, device: str = "cpu"
) -> list[str]:
    """Explain a test top-1 below the 95 % interval of the validation top-1.

    The lines say how far below it is, which classes lose most images, which test images are least
    like the training images (by the cosine of embeddings to the nearest one), and how to choose a
    better network for them. There are no lines if the test is as good or too small to tell, without
    a validation split or test, and for tasks without one class per image.

    Args:
        run: The folder of the run, with the bundle and its scores.
        data: The data of the run, with the test images.
        test: Test scores of a file of the network; None: the run's.
        device: Where to compute embeddings.
    """
    bundle = read_metadata(run / run_folder.BUNDLE)
    if not task_of(bundle).single_label or "val" not in bundle.scores or not len(data.test):
        return []
    splits = load_scores(run / run_folder.SCORES).splits
    val, test = splits["val"], test or splits["test"]
    low, high = wilson(val.scores["top1"], int(val.scores["images"]))
    _, most = wilson(test.scores["top1"], int(test.scores["images"]))
    below = low - test.scores["top1"]
    if below <= 0 or most >= val.scores["top1"]:
        return []
    lines = [
        f"shift    the test is {below:.1f} points below the interval of the validation, "
        f"{low:.1f} to {high:.1f} %: its images are of another kind"
    ]
    before = {each.name: each.recall for each in val.by_class}
    falls = [
        (
            each.images * (recall - each.recall),
            f"{printable(each.name)} ({recall:.0f} to {each.recall:.0f} %)",
        )
        for each in test.by_class
        if each.recall is not None and (recall := before.get(each.name)) is not None
    ]
    if classes := [text for fall, text in sorted(falls, reverse=True)[:SHOWN] if fall > 0]:
        lines.append(f"shift    most images are lost in {', '.join(classes)}")
    if names := least_like_training(run / run_folder.BUNDLE, data, device):
        lines.append(f"shift    least like the training images: {', '.join(map(printable, names))}")
    lines.append(
        "shift    a val/ of the new kind, or --group with what images of a kind have in common, "
        "would choose better networks for them"
    )
    return lines


def least_like_training(folder: Path, data: "DataSet", device: str) -> list[str]:
    """The names of the test images whose nearest training image is furthest; none for a network
    without an embedding.
    """
    bundle = Bundle.load(folder, build_head)
    if isinstance(bundle.net, TimmNetwork) and not bundle.net.embeds:
        return []
    how = BatchOptions(bundle.preprocessing, device)

    def embedded(images: "Images") -> tuple[torch.Tensor, list[str]]:
        some = images.spaced(MOST_IMAGES)
        inputs, _, indices = features(bundle.net, task_of(bundle), some, how)
        return normalize(inputs), [some.names[index] for index in indices.tolist()]

    (train, _), (test, names) = embedded(data.train), embedded(data.test)
    nearest = (test @ train.T).amax(1)
    return [names[index] for index in nearest.argsort(stable=True)[:SHOWN].tolist()]
