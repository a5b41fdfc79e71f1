"""How do images get labels without people? The command that lets a teacher label them."""

from pathlib import Path

from fullstride.commands.flags import Device, Images, Loading, Run
from fullstride.commands.offline import OFFLINE, Offline
from fullstride.console import console
from fullstride.nets.load_options import BY_DEFAULT


def pseudo_label(
    teacher: Run,
    images: Images,
    out: Path,
    top: int = 10,
    min_confidence: float = 0.3,
    per_class: int = 0,
    batch: int = 128,
    device: Device = "auto",
    trust: bool = False,
    offline: Offline = OFFLINE,
    loading: Loading = BY_DEFAULT,
) -> None:
    """Store a teacher's probabilities for images without labels, for --recipe.unlabelled.

    Example: fullstride pseudo-label runs/teacher photos --out labels

    The same command goes on after a stop, and several processes share the work by --rank and
    --ranks, or under torchrun.

    Args:
        teacher: A run, a bundle, an exported file, a file of weights, or a name with released
            weights.
        images: A folder with images at any depth, a list of them in a .txt, .csv or .tsv file, tar
            shards, IDX files or digits.
        out: The folder of the store, or a single .parquet file.
        top: Probabilities that are stored for each image, the largest; the rest of the mass is
            spread over the other classes.
        min_confidence: For the table that is printed: probability of the best class below which an
            image is left out, as by --recipe.unlabelled-min-confidence.
        per_class: For the same: images of each class, as by --recipe.unlabelled-per-class.
        batch: Images at a time.
        device: Where a run or a bundle computes; an exported file has its own device.
        trust: Open files of the formats pt2 and aoti too, which are programs.
    """
    from fullstride.deploy.offline.by_name import write_pseudo_labels
    from fullstride.deploy.open_model import open_model
    from fullstride.report.console_tables import pseudo_label_table
    from fullstride.train.pseudo_labels import read_pseudo_labels, select

    if top < 1 or per_class < 0 or not 0 <= min_confidence <= 1:
        raise ValueError(
            f"--top {top} --per-class {per_class} --min-confidence {min_confidence:g}: use 1 or "
            "more, 0 or more, and a number from 0 to 1"
        )
    model = open_model(teacher, trust=trust, options=loading)
    if not offline.write(write_pseudo_labels, model, images, out, top, batch, device).missing:
        chosen = select(read_pseudo_labels(out), min_confidence, per_class)
        console().print(pseudo_label_table(chosen))
