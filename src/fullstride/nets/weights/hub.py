"""Finds released weights by name, and exchanges bundles with the Hugging Face hub."""

import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, urlopen

from fullstride.io.console import print_note
from fullstride.nets import families
from fullstride.nets.families import SPECS
from fullstride.nets.preprocessing import Fit, Preprocessing
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import pretrained_config
from fullstride.nets.weights.reader import first_ten, one_line
from fullstride.tables import REPOSITORY

HASH = re.compile(r"-[0-9a-f]{8}$")  # at the end of a name, as in PyTorch's hub
COPY = re.compile(r" ?\(\d+\)$")  # browsers mark repeated downloads so

# GENet's authors resize the shorter side to ceil(resolution / 0.875), and this package to
# floor(resolution / crop): 220 pixels for 192, and 293 for 256.
GENET_CROP = {192: 192 / 220, 256: 256 / 293}


@dataclass(frozen=True)
class ReleasedFile:
    """A released file, and its authors' preprocessing of images."""

    pattern: str  # a regular expression of the name without suffix, in lower case
    network: str
    classes: int
    resolution: int  # pixels a side
    fit: Fit
    crop: float
    source: str


TRESNET, IMAGENET_21K = "Alibaba-MIIL/TResNet@aea5f0f", "Alibaba-MIIL/ImageNet21K"
GENET, RESNET_RS = "idstcv/GPU-Efficient-Networks@392ebb3", "tensorflow/tpu@7dc921f"
# layers of each released ResNet-RS -> resolutions in pixels
SIDES = {50: (160,), 101: (160, 192), 152: (192, 224, 256), 200: (256,), 270: (256,)}
SIDES |= {350: (256, 320), 420: (320,)}
# Names of TResNet with numbers belong to timm's copies of the authors' files. Weights pretrained on
# ImageNet-21K, fine-tuned or not, are evaluated with a square resize.
ROWS: list[tuple[str, str, int, int, Fit, float, str]] = [
    ("tresnet_m(_80_8)?", "tresnet_m", 1000, 224, "crop", 0.875, TRESNET),
    ("tresnet_m_448", "tresnet_m", 1000, 448, "squish", 0.875, TRESNET),
    ("tresnet_l(_81_5)?", "tresnet_l", 1000, 224, "crop", 0.875, TRESNET),
    ("tresnet_l_448", "tresnet_l", 1000, 448, "squish", 0.875, TRESNET),
    ("tresnet_xl(_82_0)?", "tresnet_xl", 1000, 224, "crop", 0.875, TRESNET),
    ("tresnet_xl_448", "tresnet_xl", 1000, 448, "squish", 0.875, TRESNET),
    ("tresnet_m_miil_(in)?21k", "tresnet_m", 11_221, 224, "squish", 0.875, IMAGENET_21K),
    ("tresnet_m_1k_miil_83_1", "tresnet_m", 1000, 224, "squish", 0.875, IMAGENET_21K),
    ("tresnet_l_v2_miil_(in)?21k", "tresnet_v2_l", 11_221, 224, "squish", 0.875, IMAGENET_21K),
    ("tresnet_l_v2_83_9", "tresnet_v2_l", 1000, 224, "squish", 0.875, IMAGENET_21K),
    (
        *("stanford_cars_tresnet-l-v2(_96_27)?", "tresnet_v2_l_cars", 196),
        *(368, "squish", 0.875, "Alibaba-MIIL/TResNet#42"),
    ),
    ("genet_small", "genet_light", 1000, 192, "crop", GENET_CROP[192], GENET),
    ("genet_normal", "genet_normal", 1000, 192, "crop", GENET_CROP[192], GENET),
    ("genet_large", "genet_large", 1000, 256, "crop", GENET_CROP[256], GENET),
    *(
        (f"resnet-rs-{n}-i{side}", f"resnet_rs_{n}", 1000, side, "crop", 0.875, RESNET_RS)
        for n, sides in SIDES.items()
        for side in sides
    ),
]
RELEASED = tuple(ReleasedFile(*row) for row in ROWS)


def by_name(path: Path) -> ReleasedFile | None:
    """The released file with this name, apart from suffix and hash; None if there is none."""
    stem = HASH.sub("", COPY.sub("", path.stem.lower()))
    return next((each for each in RELEASED if re.fullmatch(each.pattern, stem)), None)


def by_shape(network: str, classes: int) -> ReleasedFile | None:
    """The only released file of a network with `classes` classes; None for none or several."""
    files = [each for each in RELEASED if (each.network, each.classes) == (network, classes)]
    return files[0] if len(files) == 1 else None


def has_shape(release: ReleasedFile, spec: NetSpec) -> bool:
    """Whether weights of `spec` have the same shapes as the released file."""
    expected = replace(SPECS[release.network], classes=release.classes)
    return replace(spec, resolution=expected.resolution, style=expected.style) == expected


# Name -> model of the Hugging Face hub under `timm/`. TResNet-M and TResNet-V2-L have the most
# accurate weights, pretrained on ImageNet-21K; a name with a tag selects others.
HUB = {
    "tresnet_m": "tresnet_m.miil_in21k_ft_in1k",
    "tresnet_l": "tresnet_l.miil_in1k",
    "tresnet_xl": "tresnet_xl.miil_in1k",
    "tresnet_v2_l": "tresnet_v2_l.miil_in21k_ft_in1k",
    **{f"resnet_rs_{layers}": f"resnetrs{layers}.tf_in1k" for layers in SIDES},
    "genet_light": "gernet_s.idstcv_in1k",
    "genet_normal": "gernet_m.idstcv_in1k",
    "genet_large": "gernet_l.idstcv_in1k",
    "resnet18": "resnet18.a1_in1k",
    "resnet34": "resnet34.a1_in1k",
    "resnet50": "resnet50.a1_in1k",
    "resnet101": "resnet101.a1h_in1k",
    "resnet152": "resnet152.a1h_in1k",
    "resnet50d": "resnet50d.ra2_in1k",
}

WEIGHTS = "model.safetensors"  # in every repository of the hub

# timm's weights that timm evaluates in another way than their authors -> the network.
BY_AUTHORS = {HUB[name]: name for name in ("genet_light", "genet_normal", "genet_large")}

# timm's crop_mode -> the fit that is equal, for "squash" with a crop_pct of 1, or nearest.
FITS: dict[str, Fit] = {"center": "crop", "squash": "squish", "border": "pad"}


def timm_name(name: str) -> str:
    """timm's name for the weights of a name in `HUB`, of `NAME.TAG`, or of `timm/NAME`.

    Raises ValueError for a name without weights.
    """
    families.refuse_path(name)
    if name.startswith("timm/"):
        return name.removeprefix("timm/")
    own_name, _, tag = name.partition(".")
    families.find(own_name)
    if own_name not in HUB:
        raise ValueError(
            f"no released weights for {own_name}: train it, or choose from {', '.join(HUB)}"
        )
    model = HUB[own_name]
    return f"{model.partition('.')[0]}.{tag}" if tag else model


def hub_config(model: str) -> Any:
    """timm's `PretrainedCfg` of a model and tag. Raises ValueError with the tags that exist."""
    import timm

    config = pretrained_config(model)
    if config is None or not config.hf_hub_id:
        tags = timm.list_pretrained(f"{model.partition('.')[0]}.*")
        hint = f"choose from {', '.join(tags)}" if tags else "it has none"
        raise ValueError(f"timm knows no released weights {model!r}: {hint}")
    return config


def is_offline() -> bool:
    """Whether the hub's host name cannot be resolved; always False behind a proxy."""
    from huggingface_hub.constants import ENDPOINT

    try:
        return not getproxies() and not socket.getaddrinfo(urlsplit(ENDPOINT).hostname, 443)
    except OSError:
        return True


def is_reachable(seconds: float = 5.0) -> bool:
    """Whether the hub answers within `seconds`, also through a proxy."""
    from huggingface_hub.constants import ENDPOINT

    try:
        check_online()
        with urlopen(f"{ENDPOINT}/api/models/timm/resnet18.a1_in1k", timeout=seconds):
            return True
    except (OSError, HTTPException):
        return False


def is_cached(name: str) -> bool:
    """Whether the weights of a name, as for `timm_name`, are in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    repository = str(hub_config(timm_name(name)).hf_hub_id)
    return isinstance(try_to_load_from_cache(repository, WEIGHTS), str)


def hub_preprocessing(model: str, config: Any) -> Preprocessing:
    """timm's preprocessing of a model, or the nearest to it, with a note where it differs."""
    mode, fit = config.crop_mode, FITS[config.crop_mode]
    # The authors resize to 448 x 448 without keeping the aspect ratio: Alibaba-MIIL/TResNet#6.
    if model.startswith("tresnet") and model.endswith("_448"):
        fit = "squish"
    pre = Preprocessing(
        resolution=config.input_size[1],
        mean=config.mean,
        std=config.std,
        kernel=config.interpolation,
        fit=fit,
        crop=min(1.0, config.crop_pct),
    )
    if config.crop_pct > 1 or mode == "border" or (mode == "squash" and config.crop_pct < 1):
        how = f"crop_mode {mode} and crop_pct {config.crop_pct:g}"
        print_note(f"{model}: timm evaluates it with {how}, this package with {pre}")
    return pre


def authors_preprocessing(model: str, config: Any) -> Preprocessing:
    """The authors' preprocessing, where timm's configuration differs from it."""
    pre = hub_preprocessing(model, config)
    if model not in BY_AUTHORS:
        return pre
    release = by_shape(BY_AUTHORS[model], config.num_classes)
    assert release
    return replace(pre, resolution=release.resolution, fit=release.fit, crop=release.crop)


# Bundles and weights on the Hugging Face hub: downloads, and commits of bundles.


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
    If the hub cannot be reached, the files in the cache are taken, which is printed. `limits` maps
    the names of the files to the most bytes of each, checked before the download. Raises ValueError
    in one line.
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


def check_destination(
    repository: str, public: bool, marks: Collection[str]
) -> tuple[str | None, Sequence[str]]:
    """Raise ValueError, in one line, if `commit` would refuse a repository; writes nothing.

    Returns the latest commit, None if the repository does not exist yet, and its files.

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
            return None, ()
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
    return info.sha, files


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
