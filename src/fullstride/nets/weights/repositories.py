"""Downloads weights and bundles from the Hugging Face hub, and commits bundles to it."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fullstride.io.console import print_note
from fullstride.nets.weights.hub import WEIGHTS, is_offline
from fullstride.nets.weights.reader import first_ten, one_line
from fullstride.tables import REPOSITORY

WORD = r"[A-Za-z0-9][\w.-]*"
USER_AND_NAME = re.compile(f"{WORD}/{WORD}", re.ASCII)
WITH_REVISION = re.compile(f"{REPOSITORY}({USER_AND_NAME.pattern})(?:@([\\w./-]+))?", re.ASCII)
CARD, EXPORTED = "README.md", "exported/"  # paths in a repository
OF_THE_HUB = (".gitattributes", CARD)  # files of an empty repository


def fetch_weights(repository: str) -> Path:
    """The weights of one of timm's repositories in the hub's cache, downloaded if need be.

    Raises ValueError in one line.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(repository, WEIGHTS)
    if isinstance(cached, str):
        return Path(cached)
    with hub_errors(repository):
        check_online()  # the hub's client would retry for half a minute
        return Path(hf_hub_download(repository, WEIGHTS))


def fetch(name: str, limits: Mapping[str, int]) -> Path:
    """The folder with some files of a repository, in the hub's cache, downloaded if needed.

    All files are of one commit: the latest, or the branch, tag or hash behind an `@` of the name.
    If the hub cannot be reached, the files in the cache are taken, which is printed. Raises
    ValueError in one line.

    Args:
        name: "hf:USER/NAME" or "hf:USER/NAME@REVISION".
        limits: The names of the files -> the most bytes of each, checked before the download.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    match = WITH_REVISION.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} names no repository: use hf:USER/NAME or hf:USER/NAME@REVISION")
    repository, revision = match.groups()
    with hub_errors(repository):
        try:
            check_online()
            info = HfApi().model_info(repository, revision=revision, files_metadata=True)
        except HfHubHTTPError:
            raise
        except unreachable():
            cached = [
                try_to_load_from_cache(repository, file, revision=revision) for file in limits
            ]
            paths = [Path(each) for each in cached if isinstance(each, str)]
            if len(paths) < len(limits):
                raise
            print_note(f"{name}: the hub cannot be reached, so the copy in the local cache is used")
        else:
            check_files(repository, info, limits)
            # By the revision's name, which the cache remembers for use without a network.
            paths = [Path(hf_hub_download(repository, file, revision=revision)) for file in limits]
            if any(path.parent.name != info.sha for path in paths):
                raise ValueError(
                    f"huggingface.co/{repository} has changed while it was downloaded: try again"
                )
    return paths[0].parent


def check_files(repository: str, info: Any, limits: Mapping[str, int]) -> None:
    """Raise ValueError unless the hub's listing has all files of `limits`, within them."""
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    if missing := [file for file in limits if file not in sizes]:
        hint = "push the bundle again"
        if len(missing) == len(limits):
            hint = "give one that `export --push` wrote"
        if info.library_name == "timm" and repository.startswith("timm/"):
            hint = f"give {repository}, without {REPOSITORY}"
        library = f" of {one_line(info.library_name)}" if info.library_name else ""
        raise ValueError(
            f"huggingface.co/{repository} has no {' and no '.join(missing)}: it is a repository"
            f"{library} with {first_ten([*sizes]) or 'no files'}; {hint}"
        )
    for file, most in limits.items():
        if (size := sizes[file]) is None or size > most:
            stated = "an unknown number of" if size is None else f"{size:,}"
            raise ValueError(
                f"{file} of huggingface.co/{repository} has {stated} bytes, {most:,} are allowed"
            )


class Destination(NamedTuple):
    """A repository that a bundle may be committed to."""

    commit: str | None  # the latest; None if the repository does not exist yet
    files: Sequence[str]


def check_destination(repository: str, public: bool, marks: Collection[str]) -> Destination:
    """Raise ValueError, in one line, if `commit` would refuse a repository; writes nothing.

    Accepted are a new repository, an empty one, and an earlier bundle, which has the files `marks`.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if not USER_AND_NAME.fullmatch(repository):
        raise ValueError(f"{repository!r} names no repository: use USER/NAME")
    if get_token() is None:
        raise ValueError("no token of the Hugging Face hub: run `hf auth login`, or set HF_TOKEN")
    with hub_errors(repository):
        check_online()
        try:
            info = HfApi().model_info(repository)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            return Destination(None, ())
    files = [each.rfilename for each in info.siblings or ()]
    others = [file for file in files if file not in OF_THE_HUB]
    if others and not set(marks) <= set(files):
        raise ValueError(
            f"huggingface.co/{repository} has other files, and not a bundle: {first_ten(others)}; "
            "give another name"
        )
    if info.private is public:
        now, flag = ("private", "without") if public else ("public", "with")
        raise ValueError(
            f"huggingface.co/{repository} is {now}: push {flag} --public, or change that on its "
            "page first"
        )
    return Destination(info.sha, files)


def commit(
    repository: str, files: Mapping[str, Path | bytes], public: bool, marks: Collection[str]
) -> str:
    """Write `files`, by path in the repository, in one commit, and return its address.

    The repository is created if needed. Exported files of an earlier commit that are not among
    `files` are deleted by the same commit. Raises ValueError as `check_destination` does, and if
    someone else commits meanwhile.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    latest, earlier = check_destination(repository, public, marks)
    api = HfApi()
    with hub_errors(repository):
        if latest is None:
            api.create_repo(repository, private=not public)
            latest = api.model_info(repository).sha
        old = [file for file in earlier if file.startswith(EXPORTED) and file not in files]
        info = api.create_commit(
            repository,
            [
                *(CommitOperationDelete(file) for file in old),
                *(CommitOperationAdd(path, content) for path, content in files.items()),
            ],
            commit_message="Bundle of fullstride",
            parent_commit=latest,
        )
    return info.commit_url


def check_online() -> None:
    """Raise ConnectionError, without waiting, if the hub cannot be asked."""
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        raise ConnectionError("HF_HUB_OFFLINE is set")
    if is_offline():
        raise ConnectionError("no network")


def unreachable() -> tuple[type[Exception], ...]:
    """The errors of requests and transfers without an answer, of each library in use."""
    from huggingface_hub import errors

    http, transfer = (getattr(errors, name, OSError) for name in ("HTTPError", "XetDownloadError"))
    return OSError, RuntimeError, http, transfer


@contextmanager
def hub_errors(repository: str) -> Iterator[None]:
    """Turn errors of the hub's client into a ValueError in one line."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    place = f"huggingface.co/{repository}"
    try:
        yield
    except GatedRepoError:
        raise ValueError(
            f"{place} is gated: ask for access on its page, then run `hf auth login`, or set "
            "HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"there is no {place}, or it is private: look at the name, or run `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise ValueError(f"{place} has no such revision: leave out what is behind @") from None
    except HfHubHTTPError as error:
        message = one_line(error.server_message or error.response.reason_phrase)
        raise ValueError(
            f"{place}: the hub answered {error.response.status_code} ({message}): try again later, "
            "or use a token that may do this"
        ) from None
    except unreachable() as error:
        if getattr(error, "filename", None):  # of a local file
            raise
        reason = one_line(str(error)) or type(error).__name__
        raise ValueError(
            f"{place} cannot be reached ({reason}): connect to the network, or give a local path"
        ) from None
