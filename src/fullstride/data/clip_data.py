"""Where do videos come from? `open_clips` opens videos with classes as `open_data` opens images."""

from dataclasses import replace
from typing import Any

from fullstride.data.dataset import DataSet, Images, from_source, open_files
from fullstride.data.readers.file_kinds import VIDEOS
from fullstride.data.readers.splits import SplitRule
from fullstride.data.readers.video_files import check_decoder
from fullstride.data.readers.videos import MiddleFrame


def open_clips(where: str, **how: Any) -> DataSet:
    """The data set at `where`, whose items are videos with one class each.

    What `open_data` opens of images, this opens of videos: a folder with one subfolder per class,
    or with train/ beside val/ or test/, a table with the columns path, label and optionally split,
    and tar shards as `fullstride pack` writes them. A video is a file or, but for shards, a folder
    of frames: JPEGs or PNGs in natural order. `Images.source` is the path or the bytes of a video,
    and `Images.picture` its middle frame.

    Splits are taken by the rules of `open_data`. Clips cut from one recording must be in one split:
    name the recording by `group`. Copies are recognised of files, not of folders of frames.

    Classes whose names differ by "left" and "right" alone are directions, which a mirror image
    exchanges: `DataSet.mirror` is then False, and a note says so.

    Args:
        where: The data set.
        how: The keyword arguments of `open_data`.

    Raises ValueError in one line.
    """
    left_out = how.pop("left_out", ())
    unseen_classes = how.pop("unseen_classes", False)
    rule = SplitRule(**how)
    source = open_files(where, rule.group, unseen_classes, VIDEOS)
    data = from_source(source, rule)
    if any(name.lower().endswith(VIDEOS.suffixes) for name in data.train.names):
        check_decoder()

    def with_middle_frames(images: Images) -> Images:
        return replace(images, read=MiddleFrame(source.listing.file))

    data = replace(
        data,
        train=with_middle_frames(data.train),
        minival=with_middle_frames(data.minival),
        test=with_middle_frames(data.test),
    )
    if pair := _directions(data.classes):
        note = f"clips are not mirrored, as {pair[0]!r} and {pair[1]!r} are directions"
        data = replace(data, mirror=False, notes=(*data.notes, note))
    return data.without(left_out) if left_out else data


def _directions(classes: tuple[str, ...]) -> tuple[str, str] | None:
    """Two classes of which one is the other with "right" in place of "left"; None without any."""
    names = {name.lower(): name for name in classes}
    for name in classes:
        other = name.lower().replace("left", "right")
        if other != name.lower() and other in names:
            return name, names[other]
    return None
