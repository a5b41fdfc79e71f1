"""Which images belong to a run? Its data set, and images to score it on that it has not seen."""

from dataclasses import asdict, dataclass
from pathlib import Path

from fullstride.console import print_note
from fullstride.data.dataset import DIGITS, DataSet, Images
from fullstride.data.readers.duplicates import MAX_COMPARED, find_copies
from fullstride.data.readers.listing import Sample, quote_names
from fullstride.data.readers.splits import OnlyCopiesError, SplitRule
from fullstride.nets.bundle import Bundle
from fullstride.nets.class_names import match_classes
from fullstride.tasks import find_task
from fullstride.train import run_folder
from fullstride.train.run_folder import RunConfig

ALL = "all"  # in place of a split: the images of all splits


@dataclass(frozen=True)
class ScoredImages:
    """Images that a network is scored on."""

    data: DataSet
    split: str  # test, minival, train or all
    images: Images
    missing: tuple[str, ...]  # classes that none of them has
    notes: tuple[str, ...]  # why the score may say less than it seems to, a line each


def matching_data(where: str, bundle: Bundle, data: str = "") -> DataSet:
    """The data set `data`, by default that of the run at `where`, for the task of `bundle`.

    The run's own data have the run's splits, wherever they are now. Targets are the outputs of the
    network, by `match_classes`. Raises ValueError if the data are not known, or have classes that
    are not the network's.
    """
    config = _config(where, data)
    whole = _own_data(config, bundle, data) if config else None
    if whole is None:
        whole = _other_data(bundle, data)
    return _matched(whole, where, bundle, data)


def images_to_score(
    where: str, bundle: Bundle, data: str = "", split: str | None = None
) -> ScoredImages:
    """The images of `split`, "all" or None, of the data set of `matching_data`.

    By default they are of the test or, where the data have none, of the minival; of data that are
    not the run's and have no splits of their own, all images. Raises ValueError, also where the
    split has no images.
    """
    config = _config(where, data)
    whole = _own_data(config, bundle, data) if config else None
    is_own, notes = whole is not None, []
    if whole is None:
        everything = _everything(bundle, data)
        if split is None and not everything.own_splits:
            split = ALL
            notes.append(f"all images of {everything.name} are scored, as it has no splits")
        whole = everything
        if split != ALL:
            whole = _other_data(bundle, data)
    trained_on = {*whole.train.names} if is_own else set()
    if split == ALL and is_own:
        whole = _everything(bundle, whole.where)
    whole = _matched(whole, where, bundle, data)
    split = split or whole.score_split
    part = "train" if split == ALL else split
    images = getattr(whole, part)
    if not images:
        raise ValueError(
            f"{whole.name} has no images for the {split}"
            + (": leave --split out" if whole.minival or whole.test else _all_trained_on(where))
        )
    if config and not is_own:
        trained_on = _copies_of_training(config, bundle, images)
    if both := [name for name in images.names if name in trained_on]:
        notes.append(
            f"{len(both):,} of the {len(images):,} images were trained on, so the score is too "
            f"good: {quote_names(both)}"
        )
    return ScoredImages(whole, split, images, whole.missing_classes(part), tuple(notes))


def _all_trained_on(where: str) -> str:
    return f", as {where} was trained on all images: give others by --data, or --split train"


def _config(where: str, data: str) -> RunConfig | None:
    """The configuration of the run at `where`, or of the run whose bundle is there."""
    for folder in (Path(where), Path(where).parent):
        is_bundle = folder != Path(where) and Path(where).name in (
            run_folder.BEST,
            run_folder.BUNDLE,
        )
        if (folder / run_folder.RUN_CONFIG).exists() and (folder == Path(where) or is_bundle):
            hint = "give the bundle in it" if data else "give --data"
            return run_folder.read_config(folder, hint)
    if not data:
        raise ValueError(f"{where} is not a run and does not name its images: give --data")
    return None


def _own_data(config: RunConfig, bundle: Bundle, data: str) -> DataSet | None:
    """The data set of a run with the run's splits, if `data` names it, a copy of it, or nothing."""
    task = find_task(bundle.task)
    if not data or _is_same_place(data, config.data):
        return task.open_data(data or config.data, **asdict(config.rule))
    try:
        other = task.open_data(data, **asdict(config.rule))
    except ValueError:  # it has other splits, or no such groups
        return None
    return other if other.fingerprint == config.fingerprint else None


def _other_data(bundle: Bundle, data: str) -> DataSet:
    """A data set that is not the run's. Copies that training would refuse do not matter here."""
    task = find_task(bundle.task)
    try:
        return task.open_data(data)
    except OnlyCopiesError as error:
        reason = str(error).partition(":")[0]
        print_note(f"{data}: {reason}; nothing is trained on here, so they stay")
        return task.open_data(data, keep_duplicates=True)


def _is_same_place(one: str, other: str) -> bool:
    if one == other or DIGITS in (one, other):
        return one == other
    return Path(one).resolve() == Path(other).resolve()


def _everything(bundle: Bundle, data: str) -> DataSet:
    """A data set with all images in its training split."""
    rule = SplitRule(minival=0, test=0, keep_duplicates=True)
    return find_task(bundle.task).open_data(data, **asdict(rule))


def _matched(images: DataSet, where: str, bundle: Bundle, data: str) -> DataSet:
    data = data or images.where
    task = find_task(bundle.task)
    if images.classes == bundle.classes or task.open_classes:
        return images
    if not task.single_label:
        raise ValueError(f"{data} has other outputs than {where}: give data of the same ones")
    try:
        outputs, how = match_classes(bundle.classes, images.classes, named=bundle.has_class_names)
    except ValueError as error:
        raise ValueError(f"{where} and {data}: {error}") from None
    if how:
        print_note(f"the classes of {data} are matched with those of {where} {how}")
    return images.with_targets(bundle.classes, outputs.__getitem__)


def _copies_of_training(config: RunConfig, bundle: Bundle, images: Images) -> set[str]:
    """The names of those of `images` that have the bytes of a run's training image.

    None where the run's data are gone or have no files, or where there are too many to compare.
    """
    try:
        train = find_task(bundle.task).open_data(config.data, **asdict(config.rule)).train
    except ValueError:
        return set()
    if not train.file or not images.file or len(train) + len(images) > MAX_COMPARED:
        return set()
    sides = {"train": train, "scored": images}
    files = {(side, name): each.file for side, each in sides.items() for name in each.names}
    sizes = {key: _size(file(key[1])) for key, file in files.items() if file}
    common = {sizes["train", name] for name in train.names}
    common &= {sizes["scored", name] for name in images.names}
    keys = {f"{side}/{name}": (side, name) for side, name in files if sizes[side, name] in common}
    samples = [Sample(name, 0, sizes[key]) for name, key in keys.items()]

    def content(name: str) -> Path | bytes:
        file = files[keys[name]]
        assert file
        return file(keys[name][1])

    copies: set[str] = set()
    for _, same in find_copies(samples, content):
        names = [keys[sample.name] for sample in same]
        if any(side == "train" for side, _ in names):
            copies |= {name for side, name in names if side == "scored"}
    return copies


def _size(file: Path | bytes) -> int:
    """Bytes of an image; -1 if it cannot be read."""
    if isinstance(file, bytes):
        return len(file)
    try:
        return file.stat().st_size
    except OSError:
        return -1
