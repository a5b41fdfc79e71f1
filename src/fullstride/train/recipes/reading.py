"""How are recipes read? From JSON, under the names of earlier versions too, and with their help."""

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from fullstride.nets.efficiency import current_name
from fullstride.nets.precision import short_precision
from fullstride.strict_json import Bounds, from_json
from fullstride.train.recipe import Recipe

# Fields that had another name in version 0.1. Saved recipes and flags with the old name are read.
RENAMED = {
    "views": "distinct_views",
    "turn": "rotation_degrees",
    "flip": "hflip_prob",
    "erase": "random_erasing_prob",
    "accumulate": "grad_accum_steps",
    "decoupled": "decoupled_weight_decay",
    "patience": "early_stop_patience",
    "padded": "pad_channels",
    "engine": "decoder",
}

# Until version 0.2 the factor of both schedules; today it depends on the schedule if left out.
OLD_FACTOR = 0.1

# Flags of which some values have another name, and the function that gives the current one.
RENAMED_VALUES = {
    "--efficiency": current_name,
    "--recipe.efficiency": current_name,
    "--precision": short_precision,
    "--recipe.precision": short_precision,
}


# Fields that were switches in version 0.2. They may be None now, so that their flags have values.
SWITCHES = {"channels_last"}


def field_help() -> dict[str, str]:
    """The help of each field: the comment beside or above it, and the bounds of its type."""
    text, comment = {}, ""
    for line in inspect.getsource(Recipe).splitlines():
        field = re.match(r"    (\w+): .*?(?:  # (.*))?$", line)
        if field:
            text[field[1]], comment = field[2] or comment.strip(), ""
        elif line.startswith("    # "):
            comment += line[5:]
        elif line.startswith("    def "):
            break
    for name, hint in get_type_hints(Recipe, include_extras=True).items():
        if limits := bounds_of(hint):
            text[name] += f" ({limits[0]})"
    return text


def bounds_of(hint: Any) -> list[Bounds]:
    if get_origin(hint) is Annotated:
        return [part for part in get_args(hint) if isinstance(part, Bounds)]
    return [bounds for part in get_args(hint) for bounds in bounds_of(part)]


def saved_recipe(data: Any, where: str) -> Recipe:
    """A recipe from parsed JSON: its fields, or the `recipe` of a run or a bundle.

    Args:
        data: Parsed JSON. Fields may have the names of an earlier version.
        where: Origin of the data, for error messages.

    Raises ValueError, in one line, for what is not a recipe.
    """
    recipe = data.get("recipe", data) if isinstance(data, dict) else None
    if not isinstance(recipe, dict):
        raise ValueError(
            f"{where} has no recipe: give the JSON file of a recipe, or of a run or a bundle"
        )
    return from_json(Recipe, with_current_names(recipe), where)


def with_current_names(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A saved recipe with the names of this version, of fields and of their values."""
    current = {RENAMED.get(name, name): value for name, value in recipe.items()}
    for name, rename in (("efficiency", current_name), ("precision", short_precision)):
        if isinstance(current.get(name), str):
            current[name] = rename(current[name])
    if current.get("factor") == OLD_FACTOR and current.get("schedule") != "exponential":
        del current["factor"]
    return current


def with_current_flags(words: Sequence[str]) -> list[str]:
    """Command-line words with each `--recipe.OLD` replaced by `--recipe.NEW`, and a warning.

    The values of the flags in `RENAMED_VALUES` are replaced as well, and flags of `SWITCHES` may
    lack a value.
    """
    current: list[str] = []
    for word, following in zip(words, [*words, ""][1:], strict=True):
        flag, equals, value = word.rpartition("=")
        flag = flag if equals else (current or [""])[-1]
        if (rename := RENAMED_VALUES.get(flag)) and (new := rename(value)) != value:
            print(f"fullstride: {flag} {value} is deprecated, use {new}", file=sys.stderr)
            word = f"{flag}={new}" if equals else new
        old = re.fullmatch(r"--recipe\.(no-)?([a-z_-]+)(=.*)?", word)
        if old and old[2] in RENAMED:
            flag = f"--recipe.{old[1] or ''}{RENAMED[old[2]].replace('_', '-')}"
            deprecated = word.partition("=")[0]
            print(f"fullstride: {deprecated} is deprecated, use {flag}", file=sys.stderr)
            word = flag + (old[3] or "")
        if old and old[2].replace("-", "_") in SWITCHES and not old[3]:
            flag, value = f"--recipe.{old[2]}", str(not old[1])
            has_value = not old[1] and following in ("True", "False", "None")
            current += [flag] if has_value else [flag, value]
            continue
        current.append(word)
    return current
