"""Writes the reference pages from the parsers, the docstrings and the recipes of the package.

    python docs/write_reference.py [--out docs/reference]

A test runs it and compares its pages with those in the repository.
"""

import argparse
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints
from unittest.mock import patch

import griffe

import fullstride
from fullstride import cli
from fullstride.commands import COMMANDS, GROUPS, USUAL
from fullstride.io import records
from fullstride.tables import PERMISSIVE, PretrainedNetwork, pretrained_networks
from fullstride.train.recipes.named import BY_CASE, NOMINAL, RECIPES
from fullstride.train.recipes.recipe import Recipe, field_help

NOTE = "This page is written by `python docs/write_reference.py`: edit the source, not the page.\n"
COLUMNS, WIDE = 100, 2000  # of the pages, and of the help that they are made from
# Functions of `fullstride.zoo` that are for users.
ZOO = ("list", "create", "load", "spec")
# The names of bounded numbers, and what they are.
BOUNDED = {
    name: get_args(hint)[0].__name__
    for name, hint in vars(records).items()
    if get_origin(hint) is Annotated
}
RECIPE = "--recipe."  # how flags of its fields begin
# Fields of a recipe that say most about it.
NUMBERS = {
    **{"epochs": "{} epochs", "batch_size": "batch {}", "lr": "lr {}", "optimizer": "{}"},
    **{"weight_decay": "weight decay {}", "resolution": "{} pixels"},
}


class Flag(NamedTuple):
    names: tuple[str, ...]  # of a positional argument, its metavar
    values: str
    default: str
    meaning: str

    @property
    def field(self) -> str:
        """The name of the parameter or field behind the flag, without its group."""
        name = next((each for each in self.names if each.startswith(RECIPE)), self.names[0])
        return name.strip("-").rpartition(".")[2].replace("-", "_")

    @property
    def of_recipe(self) -> bool:
        return any(name.startswith(RECIPE) for name in self.names)

    def row(self) -> str:
        names = " ".join(f"`{name}`" for name in self.names)
        values = f"`{escape(self.values)}`" if self.values else ""
        default = f"`{self.default}`" if self.default not in ("", "required") else self.default
        return f"| {names} | {values} | {default} | {escape(self.meaning)} |"


HEADER = "| flag | value | default | meaning |\n|---|---|---|---|"


def escape(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", r"\|").replace("*", r"\*") if "`" not in text else text


def prose(text: str, indent: str = "") -> str:
    """A paragraph in lines of at most `COLUMNS`, with links to other pages of docs/."""
    text = re.sub(r"\bdocs/([\w/]+\.md)", r"[\1](../\1)", text)
    return fill(
        " ".join(text.split()), COLUMNS, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


# Commands.


def commands() -> Iterator[str]:
    """The page of the command line: what each command does, an example, and all its flags."""
    yield f"# Commands\n\n{NOTE}"
    yield prose(
        "`fullstride COMMAND --help` prints the usual flags of a command, `--help-all` every one. "
        "Fields of a recipe, `--recipe.FIELD`, are in [recipes.md](recipes.md); "
        f"defaults here are those of `scratch` for {NOMINAL.images:,} images."
    )
    yield "\n| command | purpose |\n|---|---|"
    for name, command in COMMANDS.items():
        purpose = (command.__doc__ or "").partition("\n")[0]
        yield f"| [{name}](#fullstride-{name.replace(' ', '-')}) | {escape(purpose)} |"
    for group, purpose in GROUPS.items():
        yield "\n" + prose(f"`fullstride {group}`: {purpose}")
    for name in COMMANDS:
        yield from command_page(name)


def command_page(name: str) -> Iterator[str]:
    described, flags = command_help(name)
    yield f"\n## fullstride {name}\n"
    for paragraph in described:
        example = paragraph.removeprefix("Example: ")
        yield f"```text\n{example}\n```\n" if example != paragraph else prose(paragraph) + "\n"
    for title, rows in by_group(name, flags):
        yield f"{title}\n\n{HEADER}"
        yield from (flag.row() for flag in rows)
        yield ""
    if any(flag.of_recipe for flag in flags):
        yield "All fields of the recipe: [recipes.md](recipes.md#fields)."


def command_help(name: str) -> tuple[list[str], list[Flag]]:
    """The paragraphs and the flags of what `--help-all` prints."""
    with (
        io.TextIOWrapper(io.BytesIO(), "utf-8") as output,
        patch.dict(os.environ, COLUMNS=str(WIDE)),
        redirect_stdout(output),
    ):
        cli.print_help(name, ["--help-all"])
        output.seek(0)
        text = output.read()
    entries: list[list[str]] = []
    for line in re.findall(r"│ (.*?) *│$", text, re.MULTILINE):
        if re.match(r"--?\w|[A-Z]+(  | \.\.\.|$)", line):
            entries.append(re.split(r"  +", line, maxsplit=1))
        elif entries and line.startswith(" "):
            entries[-1].append(line.strip())
    flags = [read_flag(entry, " ".join(texts)) for entry, *texts in entries]
    paragraphs = [
        " ".join(each.split()) for each in text.partition("╭")[0].strip().split("\n\n")[1:]
    ]
    return paragraphs, [flag for flag in flags if "--help" not in flag.names]


def read_flag(entry: str, text: str) -> Flag:
    """A flag by its line in the help, and the text after it."""
    meaning, _, default = text.rpartition(" (")
    default = default.removesuffix(")").removeprefix("default: ")
    default = "" if default in ("''", "None") else default
    if default == "default:":
        default = ""
    if not entry.startswith("-"):
        return Flag((entry,), "", default, meaning)
    parts = [part.split(" ", 1) for part in entry.split(", ")]
    values = parts[0][1] if len(parts[0]) > 1 else ""
    values = re.sub(r"^\[(.*) \[\1 \.\.\.\]\]$", r"\1 ...", values.replace("{None}|", ""))
    values = values.replace("{None,", "{")
    return Flag(tuple(part[0] for part in parts), values, default, meaning)


def by_group(name: str, flags: Sequence[Flag]) -> Iterator[tuple[str, list[Flag]]]:
    """The flags under titles: what is required and usual, the command's own, and shared ones."""
    owners = owners_of(COMMANDS[name])
    usual = USUAL.get(name, "").replace("recipe_name", "recipe").split()
    places = {owners[field].flag if field in owners else field: i for i, field in enumerate(usual)}
    first = [flag for flag in flags if flag.default == "required" or flag.names[0][0] != "-"]
    common = [flag for flag in flags if flag.field in places and flag not in first]
    first += sorted(common, key=lambda flag: places[flag.field])
    rest = [flag for flag in flags if flag not in first and not flag.names[0].startswith(RECIPE)]
    if not usual:
        yield "Flags:", [*first, *rest]
        return
    yield "Required and usual flags:", first
    titles = {owner.flag: owner.title for owner in owners.values()}
    groups: dict[str, list[Flag]] = {}
    for flag in rest:
        title = "Of the recipe" if flag.of_recipe else titles.get(flag.field, "Of this command")
        groups.setdefault(title, []).append(flag)
    yield from ((f"{title}:", rows) for title, rows in groups.items())


class Owner(NamedTuple):
    flag: str  # without dashes
    title: str  # of its group: what the dataclass that has it says first


def owners_of(command: Any) -> dict[str, Owner]:
    """The flag and the group of each field of the dataclasses that a command takes."""
    owners: dict[str, Owner] = {}
    kinds = [hint for hint in get_type_hints(command).values() if is_dataclass(hint)]
    for kind in kinds:
        for each in (each for each in kind.__mro__ if is_dataclass(each)):
            title = re.split(r"[.:;]", each.__doc__ or "")[0]
            kinds += [hint for hint in get_type_hints(each).values() if is_dataclass(hint)]
            hints = get_type_hints(each, include_extras=True)
            for name in vars(each).get("__annotations__", {}):
                extras = getattr(hints[name], "__metadata__", ())
                names = [extra.name for extra in extras if getattr(extra, "name", None)]
                owners.setdefault(name, Owner((names or [name])[0].replace("-", "_"), title))
    return owners


# Recipes.


def recipes() -> Iterator[str]:
    """The page of recipes: those that have names, and the fields of one."""
    yield f"# Recipes\n\n{NOTE}"
    yield prose(
        "A recipe is what a network is trained with. `--recipe NAME` takes one of these, and "
        "`--recipe.FIELD VALUE` changes a field of it. In Python `train_network(..., "
        'recipe="NAME", FIELD=VALUE)` does the same.'
    )
    yield "\n## Names\n"
    yield prose(
        f"Some follow the data: {', '.join(f'`{name}`' for name in BY_CASE)}. Here are their "
        f"numbers for {NOMINAL.images:,} images. `fullstride train --recipe NAME --recipe.help` "
        "prints all fields of a recipe."
    )
    yield "\n| name | numbers | other fields that differ |\n|---|---|---|"
    defaults = {field.name: field.default for field in fields(Recipe)}
    for name, recipe in RECIPES.items():
        others = ", ".join(
            f"{field} {short(value)}"
            for field, value in vars(recipe).items()
            if field not in NUMBERS and value != defaults[field] and value != {}
        )
        numbers = (NUMBERS[field].format(short(getattr(recipe, field))) for field in NUMBERS)
        yield f"| `{name}` | {', '.join(numbers).removesuffix(',  pixels')} | {others} |"
    yield "\n## Fields\n"
    yield prose(
        "The default is that of a recipe that does not set the field. A field with a short flag "
        "has both."
    )
    yield "\n| field | value | default | meaning |\n|---|---|---|---|"
    texts = field_help()
    for flag in command_help("train")[1]:
        if flag.of_recipe:
            name, also = flag.field, [each for each in flag.names if not each.startswith(RECIPE)]
            default = short(defaults[name])
            yield Flag((name, *also), flag.values or "True|False", default, texts[name]).row()


def short(value: Any) -> str:
    """A value of a recipe in few characters; none for no value."""
    if isinstance(value, tuple):
        return " ".join(map(short, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}={short(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None or not isinstance(value, int | str) else str(value)


# Python.


def python() -> Iterator[str]:
    """The page of the public names: signatures, docstrings, fields, errors and examples."""
    package = griffe.load("fullstride", search_paths=[Path(fullstride.__file__).parents[1]])
    yield f"# Python\n\n{NOTE}"
    yield prose(
        "All names are imported from `fullstride`, on first use. Shapes are those of tensors: N "
        "images, C channels, H x W pixels, T frames, K classes."
    )
    yield "\n" + prose(
        "IPython and its notebooks show bundles, measurements, choices and events as tables: "
        "docs/notebooks/index.md has examples."
    )
    results: dict[str, griffe.Object] = {}
    for name, place in fullstride.PUBLIC.items():
        module = package[place.removeprefix("fullstride.")]
        if name == "zoo":
            yield "\n## zoo\n"
            yield prose(module.docstring.value)
            for function in ZOO:
                yield from entry(f"zoo.{function}", module[function], "###")
            continue
        target = module[name].final_target if module[name].is_alias else module[name]
        yield from entry(name, target, "##")
        results |= returned(target)
    yield "\n## What the calls return\n"
    for name in sorted(set(results) - set(fullstride.PUBLIC)):
        yield from entry(name, results[name], "###")


def returned(function: griffe.Object) -> dict[str, griffe.Object]:
    """The classes of this package that a function returns or yields, by name."""
    if not function.is_function or function.returns is None:
        return {}
    names = [each for each in function.returns.iterate() if isinstance(each, griffe.ExprName)]
    paths = {each.name: each.canonical_path for each in names}
    return {
        name: function.package[path.removeprefix("fullstride.")]
        for name, path in paths.items()
        if path.startswith("fullstride.")
    }


def entry(name: str, target: Any, level: str) -> Iterator[str]:
    """One function or class."""
    yield f"\n{level} {name}\n"
    if target.is_function:
        yield f"```python\n{signature(name, target)}\n```\n"
    examples: list[str] = []
    for section in target.docstring.parse("google"):
        if section.kind is griffe.DocstringSectionKind.text:
            yield from paragraphs(section.value)
        elif section.kind is griffe.DocstringSectionKind.parameters:
            for each in section.value:
                yield prose(f"- `{each.name}`: {each.description}", "  ")
            yield ""
        elif section.kind is griffe.DocstringSectionKind.examples:
            examples += [text for _, text in section.value]
    if target.is_class:
        yield from members(target)
    for text in examples:
        yield f"```pycon\n{text}\n```"


def signature(name: str, function: Any, drop_self: bool = False) -> str:
    """The signature in lines that fit, one parameter a line where it is long."""
    line = function.signature(name=name)
    line = line.replace("(self, ", "(").replace("(self)", "()") if drop_self else line
    if len(line) <= COLUMNS:
        return line
    inner, _, result = line.partition("(")[2].rpartition(")")
    parts = re.split(r", (?=\*|\w+(?::|=)|\w+, )", inner)
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){result}"])


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a docstring; what is raised stands apart."""
    for paragraph in text.split("\n\n"):
        for part in re.split(r"(?=\bRaises )", " ".join(paragraph.split())):
            if part:
                yield prose(part.replace("Raises ", "**Errors.** Raises ", 1)) + "\n"


def members(target: Any) -> Iterator[str]:
    """The fields of a dataclass, and the public methods of a class."""
    kind = getattr(import_module(target.module.path), target.name)
    if kind is Recipe:
        yield "Its fields are in [recipes.md](recipes.md#fields).\n"
    elif is_dataclass(kind):
        texts, attributes = field_help(kind), {**target.inherited_members, **target.members}
        yield "| field | type | default | meaning |\n|---|---|---|---|"
        for field in fields(kind):
            source = attributes[field.name]
            default = str(source.value or "")
            default = f"`{escape(default)}`" if default and "field(" not in default else ""
            annotation = re.sub(r"Annotated\[(.+?), \w+\(.*?\)\]", r"\1", str(source.annotation))
            annotation = re.sub(r"\w+", lambda match: BOUNDED.get(match[0], match[0]), annotation)
            meaning = escape(texts.get(field.name, ""))
            yield f"| `{field.name}` | `{escape(annotation)}` | {default} | {meaning} |"
        yield ""
    for name, member in target.members.items():
        if name.startswith("_") or not member.docstring:
            continue
        text = member.docstring.value.partition("\n\n")[0]
        if member.is_function:
            call = " ".join(signature(name, member, drop_self=True).split())
            yield prose(f"- `{call}`: {text}", "  ")
        elif "property" in member.labels:
            yield prose(f"- `{name}`: {text}", "  ")
    yield ""


# Released weights.


def weights() -> Iterator[str]:
    """The page of networks whose weights are released, with the licences of these."""
    yield f"# Released weights\n\n{NOTE}"
    yield prose(
        "`fit` begins with these where the hub is in reach. `zoo.load` and `predict` take the "
        "name too. Top-1 is that on ImageNet, with the pixels a side in brackets. By default `fit` "
        f"takes the licences {', '.join(sorted(PERMISSIVE))}; `--licence any` takes all."
    )
    yield "\n| name | parameters M | top-1 % (pixels) | licence |\n|---|--:|---|---|"
    by_name: dict[str, list[PretrainedNetwork]] = {}
    for row in pretrained_networks():
        by_name.setdefault(row.weights, []).append(row)
    for name, rows in by_name.items():
        scores = ", ".join(f"{row.top1:.2f} ({row.resolution})" for row in rows)
        licence = rows[0].licence or "unknown"
        yield f"| `{name}` | {rows[0].params / 1e6:.2f} | {scores} | {licence} |"


PAGES = {
    "commands.md": commands,
    "python.md": python,
    "recipes.md": recipes,
    "released_weights.md": weights,
}


def write(out: Path, pages: Iterable[str] = PAGES) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for page in pages:
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(PAGES[page]())).strip()
        (out / page).write_text(f"{text}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reference")
    write(parser.parse_args().out)
