"""How does a data set become shards? `pack` writes the pictures of each part one behind the other into tar files.

A few large files are listed and copied more easily than a million small ones.
"""

import tarfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from PIL import Image

from fullstride.data.dataset import DataSet, Images
from fullstride.data.readers.decode import FORMATS, UnreadableImage, decode
from fullstride.data.readers.folder import SUFFIXES
from fullstride.data.readers.tar_headers import BLOCK, Member, Shard
from fullstride.data.readers.tar_shards import Index, write_index
from fullstride.storage import atomic_write

PARTS = ("train", "minival", "test")
MIB = 2**20


class Packed(NamedTuple):
    """What is done so far."""

    images: int
    shards: int
    bytes_in: int  # of the pictures as they were
    bytes_out: int  # of the pictures as they are packed
    skipped: dict[str, str]  # names of pictures that cannot be read, and why


@dataclass(frozen=True)
class Form:
    """What a picture is packed as: the file that it was or, with `long_side`, a JPEG."""

    long_side: int | None = None  # pixels at most; smaller pictures are not enlarged
    quality: int = 90  # of the JPEG

    def __post_init__(self) -> None:
        if self.long_side is not None and self.long_side < 1:
            raise ValueError(f"long side {self.long_side}: use 1 pixel or more")
        if not 1 <= self.quality <= 100:
            raise ValueError(f"quality {self.quality}: use 1 to 100")


class Picture(NamedTuple):
    name: str
    label: int
    suffix: str
    data: bytes
    bytes_in: int


def pack(
    data: DataSet, out: Path, form: Form = Form(), *, shard_mib: int = 256
) -> Generator[Packed, None, None]:
    """Write `data` as shards in the new folder `out`; yields after each shard, and once more when `out` is there.

    Each part has shards of its own, so that `open_data` finds the same classes and images in each. A shard ends with
    the picture that makes it `shard_mib` or more.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{str(out)!r} exists: give the name of a new folder")
    if Path(data.where).is_dir() and out.resolve().is_relative_to(data.where):
        raise ValueError(f"{str(out)!r} would be inside of the data: give a folder beside it")
    if shard_mib < 1:
        raise ValueError(f"shards of {shard_mib} MiB: use 1 or more")
    shards: dict[str, Shard] = {}
    done = Packed(0, 0, 0, 0, {})
    with atomic_write(out) as beside:
        beside.mkdir()
        for part in PARTS:
            pictures = _pictures(getattr(data, part), data.channels, form, done.skipped)
            for number in count():
                name = f"{part}-{number:06}.tar"
                shard, bytes_in = _fill(
                    beside / name, pictures, data.classes, done.images, shard_mib * MIB
                )
                if not shard.members:
                    (beside / name).unlink()
                    break
                shards[name] = shard
                done = Packed(
                    done.images + len(shard.members),
                    len(shards),
                    done.bytes_in + bytes_in,
                    done.bytes_out + sum(member.size for member in shard.members),
                    done.skipped,
                )
                yield done
            if f"{part}-000000.tar" not in shards:
                first, reason = next(iter(done.skipped.items()))
                raise ValueError(f"no picture of the part {part} can be read; {first!r}: {reason}")
        write_index(beside, Index(data.classes, data.channels, data.mirror, shards))
    yield done


def _fill(
    path: Path, pictures: Iterator[Picture], classes: tuple[str, ...], first: int, limit: int
) -> tuple[Shard, int]:
    """A tar of the next pictures, until it has `limit` bytes; `first` is the number of the first one. And bytes in."""
    members, bytes_in = [], 0
    with path.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for number, picture in enumerate(pictures, first):
                offset = (
                    file.tell() + BLOCK
                )  # behind the header, one block for names as short as these
                _add(tar, f"{number:06}{picture.suffix}", picture.data)
                _add(tar, f"{number:06}.cls", str(picture.label).encode())
                members.append(
                    Member(picture.name, classes[picture.label], offset, len(picture.data))
                )
                bytes_in += picture.bytes_in
                if file.tell() >= limit:
                    break
        return Shard(file.tell(), members), bytes_in


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    header = tarfile.TarInfo(
        name
    )  # of nobody and of 1970, so that the same pictures give the same bytes
    header.size = len(data)
    tar.addfile(header, BytesIO(data))


def _pictures(
    images: Images, channels: int, form: Form, skipped: dict[str, str]
) -> Iterator[Picture]:
    """The pictures that can be read, in their order; the others are noted in `skipped`."""
    for index, name in enumerate(images.names):
        try:
            picture = _picture(images, index, channels, form)
        except UnreadableImage as error:
            skipped[name] = error.reason
        except OSError as error:
            skipped[name] = error.strerror or type(error).__name__
        else:
            yield picture


def _picture(images: Images, index: int, channels: int, form: Form) -> Picture:
    name, label = images.names[index], images.targets[index]
    if images.file is None:  # pixels without a file
        picture = images.picture(index)
        suffix, data = (
            _jpeg(picture, form.long_side, form.quality) if form.long_side else _png(picture)
        )
        return Picture(name, label, suffix, data, picture.width * picture.height * channels)
    source = images.file(name)
    file = source.read_bytes() if isinstance(source, Path) else source
    if form.long_side:
        suffix, data = _jpeg(decode(file, channels), form.long_side, form.quality)
    else:
        suffix, data = _suffix(name, file), file
    return Picture(name, label, suffix, data, len(file))


def _jpeg(picture: Image.Image, long_side: int, quality: int) -> tuple[str, bytes]:
    shrink = min(1.0, long_side / max(picture.size))
    if shrink < 1:
        width, height = (max(1, round(side * shrink)) for side in picture.size)
        picture = picture.resize(
            (width, height), Image.Resampling.LANCZOS
        )  # antialiased: PIL widens its window
    written = BytesIO()
    picture.save(written, "JPEG", quality=quality)
    return ".jpg", written.getvalue()


def _png(picture: Image.Image) -> tuple[str, bytes]:
    written = BytesIO()
    picture.save(written, "PNG")
    return ".png", written.getvalue()


def _suffix(name: str, file: bytes) -> str:
    """The name's own or, where it says nothing of pictures, one after the content."""
    suffix = PurePosixPath(name).suffix.lower()
    if suffix in SUFFIXES:
        return suffix
    decode(file, 3)  # raises in our own words
    with Image.open(BytesIO(file), formats=FORMATS) as opened:
        suffix = f".{(opened.format or '').lower()}"
    return (
        suffix if suffix in SUFFIXES else ".jpg"
    )  # a JPEG of several pictures has a format of its own
