"""Which devices have a profile? Those of the package, and the files of users, by name or path."""

from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from fullstride.latency.device_sheets import BASES, DeviceSheet, profile_of
from fullstride.latency.profiles import Profile
from fullstride.storage import read_regular
from fullstride.strict_json import from_json, parse_json

MEASURED = resources.files("fullstride.latency").joinpath("device_profiles")
SHEETS = resources.files("fullstride.latency").joinpath("sheets")
MAX_BYTES = 100_000  # of a profile's file; those of the package have two thousand
THIS_MACHINE = {"auto", "cpu", "cuda", "gpu", "here"}  # names that other flags have for it


def profile_names() -> list[str]:
    files = [entry.name for folder in (MEASURED, SHEETS) for entry in folder.iterdir()]
    return sorted(name.removesuffix(".json") for name in files if name.endswith(".json"))


def load_profile(name_or_path: str | Path) -> Profile:
    """One of `profile_names()`, or a JSON file: a profile, or a data sheet of a device.

    Raises ValueError in one line.
    """
    name, names = str(name_or_path), profile_names()
    if name in names:
        folder = MEASURED if MEASURED.joinpath(f"{name}.json").is_file() else SHEETS
        return profile_from(folder.joinpath(f"{name}.json").read_bytes(), name, name)
    path = Path(name_or_path)
    if path.suffix != ".json" and not path.exists():
        close = get_close_matches(name, names, n=3, cutoff=0.4)
        if name in THIS_MACHINE:
            advice = (
                "fullstride calibrate writes that of this machine, and without --device fit and "
                "search measure here"
            )
        elif close:
            advice = f"did you mean {' or '.join(close)}, or the path of a JSON file?"
        else:
            advice = f"choose from {', '.join(names)}, or give the path of a JSON file"
        raise ValueError(f"no profile named {name!r}: {advice}")
    try:
        text = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    return profile_from(text, str(path), path.stem)


def profile_from(text: bytes, where: str, name: str) -> Profile:
    """The profile that JSON has, or that follows from the data sheet that it has."""
    data = parse_json(text, where)
    if isinstance(data, dict) and {"machine", "inference"} & data.keys():
        return Profile.from_json(text, where)
    sheet = from_json(DeviceSheet, data, where)
    bases = BASES[sheet.runtime, sheet.layout, sheet.precision]
    return profile_of(sheet, name, [load_profile(basis) for basis in bases])
