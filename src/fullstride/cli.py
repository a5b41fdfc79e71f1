"""The roof: how do words become a command? What goes wrong becomes one line."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from difflib import get_close_matches
from functools import partial, wraps
from io import StringIO
from pathlib import Path
from typing import get_type_hints

import tyro

import fullstride
from fullstride.commands import COMMANDS
from fullstride.console import complain, unboxed
from fullstride.train.recipe import Recipe, field_help, saved_recipe, with_current_flags
from fullstride.train.recipes import RECIPES

ABOUT = "The toolkit for GPU-efficient ConvNets: TResNet, ResNet-RS and GENet, trained, measured, ready to ship."
TAKE_A_RECIPE = ("train", "bench-data")


def main() -> None:
    """Run one command and exit. 0: done; 1: the work or the machine failed; 2: the input; 130: interrupted."""
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Run the command that `words` spell; what goes wrong is one line on the standard error stream."""
    if list(words) == ["--version"]:
        print(f"fullstride {fullstride.__version__}")
        return 0
    try:
        recipe, words = take_recipe(with_current_flags(words))
        if "--recipe.help" in words:
            explain(recipe)
            return 0
        command = parse(words, recipe)
        command()
    except KeyboardInterrupt:
        goes_on = (
            "; the same command goes on from the last checkpoint"
            if list(words[:1]) == ["train"]
            else ""
        )
        return complain(f"interrupted{goes_on}", 130)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (
        ValueError,
        FileNotFoundError,
        PermissionError,
        IsADirectoryError,
        NotADirectoryError,
    ) as error:
        return complain(error, 2)
    except (FloatingPointError, OSError) as error:
        return complain(error, 1)
    except (MemoryError, RuntimeError) as error:
        from fullstride.measure.memory.limits import lacks_memory

        if "DataLoader worker" in str(
            error
        ):  # torch says so from a signal, wherever the program is
            return complain(
                "a process that decodes images was killed, often for lack of memory: use fewer --workers; "
                "the same command goes on",
                1,
            )
        if not lacks_memory(error):
            raise
        return complain("out of memory: use a smaller batch or resolution", 2)
    return 0


def parse(words: Sequence[str], recipe: Recipe) -> Callable[[], None]:
    """The command that `words` spell, ready to be called; `recipe` gives the defaults of its fields.

    Raises ValueError in one line where the parser would draw a box.
    """

    def later(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
        return wraps(command)(lambda *args, **kwargs: partial(command, *args, **kwargs))

    commands = {name: later(command) for name, command in COMMANDS.items()}
    for name in TAKE_A_RECIPE:
        commands[name] = partial(commands[name], recipe=recipe)
    drawn = StringIO()
    try:
        with redirect_stderr(drawn):
            return tyro.extras.subcommand_cli_from_dict(
                commands, args=words, prog="fullstride", description=ABOUT
            )
    except SystemExit as stop:
        if not stop.code:  # it was --help
            raise
        raise ValueError(unboxed(drawn.getvalue())) from None


def take_recipe(words: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The recipe that `--recipe NAME` names, and the other words: the flags of its fields are left to tyro."""
    if not words or words[0] not in TAKE_A_RECIPE:
        return RECIPES["finetune"], list(words)
    switches = [
        name.replace("_", "-") for name, kind in get_type_hints(Recipe).items() if kind is bool
    ]
    alone = {"--tensorboard", *(f"--recipe.{name}" for name in switches)}
    flags = [
        i
        for i, word in enumerate(words)
        if word.startswith("--") and word.replace("_", "-") not in alone
    ]
    after_flag = {i + 1 for i in flags}  # as in --out digits
    digits = any(word == "digits" and i not in after_flag for i, word in enumerate(words))
    name = "digits" if digits else "finetune"
    kept = []
    rest = iter(words)
    for word in rest:
        if word == "--recipe":
            name = next(rest, "")
        elif word.startswith("--recipe="):
            name = word.removeprefix("--recipe=")
        else:
            kept.append(word)
    return find_recipe(name), kept


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, or one that was saved: a JSON file, or the folder of a run or a bundle."""
    if name in RECIPES:
        return RECIPES[name]
    path = Path(name)
    if name and path.is_dir():
        found = [path / file for file in ("run.json", "bundle.json") if (path / file).exists()]
        if not found:
            raise ValueError(
                f"no recipe in the folder {name!r}: give that of a run or a bundle, or a JSON file"
            )
        path = found[0]
    if not name or not path.is_file():
        close = get_close_matches(name, RECIPES, n=3)
        hint = (
            f"did you mean {' or '.join(close)}?"
            if close
            else f"choose from {', '.join(RECIPES)}, or give a file"
        )
        raise ValueError(f"no recipe named {name!r}: {hint}")
    from fullstride.storage import read_json

    return saved_recipe(read_json(path), name)


def explain(recipe: Recipe) -> None:
    """Print each field of a recipe with its value and its help."""
    for name, text in field_help().items():
        value = getattr(recipe, name)
        if isinstance(value, tuple):
            value = " ".join(f"{number:.4g}" for number in value)
        print(f"--recipe.{name.replace('_', '-'):22} {value!s:>21}  {text}")
