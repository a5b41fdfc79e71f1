"""How are recipes read from JSON, and what is the help of their fields?"""

import inspect
import re
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from fullstride.strict_json import Bounds, from_json
from fullstride.train.recipe import Recipe


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
        data: Parsed JSON.
        where: Origin of the data, for error messages.

    Raises ValueError, in one line, for what is not a recipe.
    """
    recipe = data.get("recipe", data) if isinstance(data, dict) else None
    if not isinstance(recipe, dict):
        raise ValueError(
            f"{where} has no recipe: give the JSON file of a recipe, or of a run or a bundle"
        )
    return from_json(Recipe, recipe, where)
