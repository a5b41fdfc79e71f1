"""Which model made these predictions? A hash of its weights or of its file."""

import hashlib
from dataclasses import asdict
from pathlib import Path

from fullstride.deploy.exported import ExportedModel, as_utf8
from fullstride.nets.bundle import Bundle
from fullstride.storage import open_regular
from fullstride.tasks import task_of
from fullstride.train.distill import digest

CHUNK_BYTES = 2**20


def name_of(model: Bundle | ExportedModel) -> str:
    return as_utf8(model.name if isinstance(model, Bundle) else model.metadata.name)


def fingerprint(model: Bundle | ExportedModel) -> str:
    """A hash of the weights of a bundle, or of a file, and of how images are prepared for them."""
    weights = digest(model.net) if isinstance(model, Bundle) else _digest_of_files(model.path)
    how = (weights, asdict(model.preprocessing), model.task, task_of(model).state())
    return hashlib.sha256(repr(how).encode()).hexdigest()[:16]


def _digest_of_files(path: Path) -> str:
    """Of a file, or of all in a folder."""
    whole = hashlib.sha256()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for each in files:
        if each.is_file():
            whole.update(str(each.relative_to(path.parent)).encode(errors="surrogateescape"))
            with open_regular(each) as file:
                while chunk := file.read(CHUNK_BYTES):
                    whole.update(chunk)
    return whole.hexdigest()
