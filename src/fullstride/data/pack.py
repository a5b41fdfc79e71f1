"""Writes the images of each split of a data set into tar files, which are shards.

A few large files are listed and copied more easily than a million small ones.
"""

import json
import os
import tarfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import count
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from PIL import Image

from fullstride.data.dataset import DataSet, Images
from fullstride.data.readers.decode import (
    SUFFIXES,
    Crop,
    Size,
    UnreadableImage,
    decode_crop,
    file_bytes,
    image_format,
)
from fullstride.data.readers.folder import VIDEOS
from fullstride.data.readers.listing import Objects
from fullstride.data.readers.shards import BLOCK, Index, Member, Shard, write_index
from fullstride.data.transforms.crop import TEST_OVERSAMPLING
from fullstride.io.writing import Output, atomic_write, check_output
from fullstride.nets.preprocessing import WHITE, check_colour

SPLITS = ("train", "val", "test")
MIB = 2**20
OUTPUT = Output("a set of shards", "", lambda path: False, ("*.tar", "index.json"))


class Progress(NamedTuple):
    """The counts so far."""

    images: int
    shards: int
    bytes_in: int  # of the source images
    bytes_out: int  # of the images in the shards
    skipped: dict[str, str]  # name of each image that cannot be read -> reason


@dataclass(frozen=True)
class Encoding:
    """How an image is packed: its file unchanged or, with `long_side`, a JPEG."""

    long_side: int | None = None  # maximum in pixels; smaller images are not enlarged
    quality: int = 90  # of the JPEG
    background: str = WHITE  # of the JPEG, behind transparent pixels

    def __post_init__(self) -> None:
        if self.long_side is not None and self.long_side < 1:
            raise ValueError(f"long side {self.long_side}: use 1 pixel or more")
        if not 1 <= self.quality <= 100:
            raise ValueError(f"quality {self.quality}: use 1 to 100")
        check_colour("background", self.background)
        if self.background != WHITE and not self.long_side:
            raise ValueError(
                f"background {self.background}: files are copied with their transparent pixels; "
                "give --long-side too, or --background when training"
            )


class EncodedImage(NamedTuple):
    name: str
    target: int | tuple[int, ...]  # the class, or all labels
    suffix: str
    data: bytes
    bytes_in: int


def pack(
    data: DataSet, out: Path, encoding: Encoding = Encoding(), *, shard_mib: int = 256
) -> Generator[Progress, None, None]:
    """Write `data` as shards into the new folder `out`.

    Yields after each shard, and once more when `out` is complete. Each split has its own shards, so
    that `open_data` reads the same classes and images in each. A shard ends with the image that
    makes it `shard_mib` or larger. Raises ValueError if targets are neither classes nor labels.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{str(out)!r} exists: give the name of a new folder")
    if os.path.isdir(data.where) and out.resolve().is_relative_to(data.where):  # noqa: PTH112
        raise ValueError(f"{str(out)!r} would be inside of the data: give a folder outside")
    check_output(out, OUTPUT)
    if shard_mib < 1:
        raise ValueError(f"shards of {shard_mib} MiB: use 1 or more")
    has_boxes = any(isinstance(target, Objects) for target in data.train.targets)
    if has_boxes or any(data.labels(split) is None for split in SPLITS):
        raise ValueError(
            f"the targets of {data.where!r} are neither classes nor labels, which shards store: "
            "give other data, or another task"
        )
    shards: dict[str, Shard] = {}
    progress = Progress(0, 0, 0, 0, {})
    with atomic_write(out, OUTPUT) as folder:
        folder.mkdir()
        for split in SPLITS:
            if not len(getattr(data, split)):  # data with their own validation may have no test
                continue
            images = _encoded(getattr(data, split), data.channels, encoding, progress.skipped)
            for number in count():
                path, limit = folder / f"{split}-{number:06}.tar", shard_mib * MIB
                shard, bytes_in = _fill(path, images, data.classes, progress.images, limit)
                if not shard.members:
                    path.unlink()
                    break
                shards[path.name] = shard
                progress = Progress(
                    progress.images + len(shard.members),
                    len(shards),
                    progress.bytes_in + bytes_in,
                    progress.bytes_out + sum(member.size for member in shard.members),
                    progress.skipped,
                )
                yield progress
            if f"{split}-000000.tar" not in shards:
                first, reason = next(iter(progress.skipped.items()))
                raise ValueError(f"no image of the split {split} can be read; {first!r}: {reason}")
        write_index(folder, Index(data.classes, data.channels, data.mirror, shards))
    yield progress


def _fill(
    path: Path, images: Iterator[EncodedImage], classes: tuple[str, ...], first: int, limit: int
) -> tuple[Shard, int]:
    """Write a tar of the next images, numbered from `first`, until it has `limit` bytes.

    Returns the shard and the number of bytes of the source images.
    """
    members, bytes_in = [], 0
    with path.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for number, image in enumerate(images, first):
                offset = file.tell() + BLOCK  # after the header: one block, since names are short
                _add(tar, f"{number:06}{image.suffix}", image.data)
                if isinstance(image.target, tuple):
                    suffix, text = ".json", json.dumps({"labels": image.target})
                    label = tuple(classes[target] for target in image.target)
                else:
                    suffix, text, label = ".cls", str(image.target), classes[image.target]
                _add(tar, f"{number:06}{suffix}", text.encode())
                members.append(Member(image.name, label, offset, len(image.data)))
                bytes_in += image.bytes_in
                if file.tell() >= limit:
                    break
        return Shard(file.tell(), members), bytes_in


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    header = tarfile.TarInfo(name)  # without owner and time: equal images give equal bytes
    header.size = len(data)
    tar.addfile(header, BytesIO(data))


def _encoded(
    images: Images, channels: int, encoding: Encoding, skipped: dict[str, str]
) -> Iterator[EncodedImage]:
    """The images that can be read, in order; adds the others to `skipped`."""
    for index, name in enumerate(images.names):
        try:
            image = _encode(images, index, channels, encoding)
        except UnreadableImage as error:
            skipped[name] = error.reason
        except OSError as error:
            skipped[name] = error.strerror or type(error).__name__
        else:
            yield image


def _encode(images: Images, index: int, channels: int, encoding: Encoding) -> EncodedImage:
    name, target = images.names[index], images.targets[index]
    side, quality = encoding.long_side, encoding.quality
    if images.file is None:  # pixels without a file
        picture = images.picture(index)
        if side:
            suffix, data = _jpeg(picture, _shrunk(picture.size, side), quality)
        else:
            suffix, data = ".png", _encoded_as("PNG", picture)
        return EncodedImage(name, target, suffix, data, picture.width * picture.height * channels)
    source = images.file(name)
    if isinstance(source, Path) and source.is_dir():
        raise UnreadableImage(name, "it is a folder of frames, and shards take video files only")
    file = file_bytes(source)
    if side:
        picture, crop = decode_crop(
            file,
            channels,
            partial(_shrunk, long_side=side),
            oversampling=TEST_OVERSAMPLING,
            background=encoding.background,
        )
        suffix, data = _jpeg(picture, crop, quality)
    else:
        suffix, data = _suffix(name, file), file
    return EncodedImage(name, target, suffix, data, len(file))


def _shrunk(size: Size, long_side: int) -> Crop:
    """The whole image, with at most `long_side` pixels along a side."""
    shrink = min(1.0, long_side / max(size))
    width, height = (max(1, round(side * shrink)) for side in size)
    return Crop((0, 0, *size), (width, height))


def _jpeg(picture: Image.Image, crop: Crop, quality: int) -> tuple[str, bytes]:
    if crop.size != picture.size:
        # antialiased: Pillow widens its window
        picture = picture.resize(crop.size, Image.Resampling.LANCZOS, crop.box)
    return ".jpg", _encoded_as("JPEG", picture, quality=quality)


def _encoded_as(kind: str, picture: Image.Image, **options: int) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def _suffix(name: str, file: bytes) -> str:
    """The suffix of the name if images or videos have it, else the suffix of the content."""
    suffix = PurePosixPath(name).suffix.lower()
    if suffix in (*SUFFIXES, *VIDEOS.suffixes):
        return suffix
    suffix = f".{image_format(file).lower()}"  # raises UnreadableImage
    # a JPEG with several images has a format of its own
    return suffix if suffix in SUFFIXES else ".jpg"
