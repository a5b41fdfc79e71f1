"""Which files of a folder are not used, and why? What is left out without a word looks like data.

Counts are by reason: "30 .heic (convert them, for example with pillow-heif)".
"""

import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from fullstride.data.readers.file_kinds import IMAGES, VIDEOS, FileKind

# Formats of photographs that no reader here decodes -> what converts them to JPEG.
CONVERTERS = {
    **dict.fromkeys((".heic", ".heif", ".hif"), "pillow-heif"),
    ".avif": "Pillow",
    ".jxl": "pillow-jxl-plugin",
    **dict.fromkeys((".jp2", ".j2k", ".ppm", ".tga", ".ico", ".jfif"), "Pillow"),
    **dict.fromkeys((".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"), "rawpy"),
    ".psd": "psd-tools",
    ".svg": "CairoSVG",
}


def count_unused(root: Path, used: Collection[str], kind: FileKind = IMAGES) -> dict[str, int]:
    """The number of files below `root` that are not `used`, by reason, the most frequent first.

    `used` has POSIX paths below `root`, of files and of folders of frames. A hidden folder counts
    as one file.
    """
    counts: Counter[str] = Counter()
    folders, visited = [(root, "")], set()
    while folders:
        folder, prefix = folders.pop()
        try:
            status = folder.stat()
            entries = list(os.scandir(folder))
        except OSError:
            counts["folders that cannot be listed"] += 1
            continue
        if (place := (status.st_dev, status.st_ino)) in visited:  # linked twice, or into itself
            continue
        visited.add(place)
        for entry in entries:
            name = prefix + entry.name
            if entry.name.startswith("."):
                counts["hidden"] += 1
            elif name in used:
                continue
            elif is_folder(entry):
                folders.append((folder / entry.name, f"{name}/"))
            elif not is_file(entry):
                counts["neither files nor folders"] += 1
            elif entry.name.lower().endswith(kind.suffixes):
                counts[f"{kind.name} outside of the class folders"] += 1
            else:
                counts[why_unused(name, kind)] += 1
    return dict(counts.most_common())


def first_reason(counts: Mapping[str, int]) -> str:
    """ ", but 12 .heic (convert them ...)" for an error about images that are missing, or ""."""
    return "".join(f", but {count:,} {why}" for why, count in list(counts.items())[:1])


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular link
        return False


def is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def why_unused(name: str, kind: FileKind = IMAGES) -> str:
    """The reason for a file of this name, which is not used."""
    suffix = PurePosixPath(name).suffix.lower()
    if kind is IMAGES and suffix in CONVERTERS:
        return f"{suffix} (convert them to JPEG, for example with {CONVERTERS[suffix]})"
    if kind is IMAGES and suffix in VIDEOS.suffixes:
        return f"{suffix} (videos: extract their frames, for example with ffmpeg)"
    return f"{suffix} (no {kind.name})" if suffix else "files without a suffix"
