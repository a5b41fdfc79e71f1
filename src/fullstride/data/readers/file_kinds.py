"""What is a folder, a table or a shard searched for? Images, or videos."""

from dataclasses import dataclass

from fullstride.data.readers.decode import SUFFIXES
from fullstride.data.readers.videos import SUFFIXES as VIDEO_SUFFIXES


@dataclass(frozen=True)
class FileKind:
    """What the files of a data set are."""

    name: str  # for messages
    suffixes: tuple[str, ...]
    frames: bool = False  # whether a folder of frames is one too


IMAGES = FileKind("images", SUFFIXES)
VIDEOS = FileKind("videos", VIDEO_SUFFIXES, frames=True)
