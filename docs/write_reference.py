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
from typing import Any, NamedTuple, get_type_hints
from unittest.mock import patch

import griffe

import fullstride
from fullstride import cli
from fullstride.commands import COMMANDS, GROUPS, USUAL
from fullstride.train.recipes.named import BY_CASE, NOMINAL, RECIPES
from fullstride.train.recipes.recipe import Recipe, field_help

NOTE = "This page is written by `python docs/write_reference.py`: edit the source, not the page.\n"
COLUMNS, WIDE = 100, 2000  # of the pages, and of the help that they are made from
# Functions of `fullstride.zoo` that are for users.
ZOO = ("list", "create", "load", "spec")
# Fields of a recipe that say most about it.
RECIPE_COLUMNS = ("epochs", "batch_size", "lr", "optimizer", "weight_decay", "resolution")


class Flag(NamedTuple):
    names: tuple[str, ...]  # of a positional argument, its metavar
    values: str
    default: str
    meaning: str

    @property
    def field(self) -> str:
        """The name of the parameter or field behind the flag, without its group."""
        return (
            self.names[-1 if self.of_recipe else 0].strip("-").rpartition(".")[2].replace("-", "_")
        )

    @property
    def of_recipe(self) -> bool:
        return any(name.startswith("--recipe.") for name in self.names)

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
    """A paragraph in lines of at most `COLUMNS`."""
    return fill(
        " ".join(text.split()), COLUMNS, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


# Commands.


def commands() -> Iterator[str]:
    """The page of the command line: what each command does, an example, and all its flags."""
    yield "# Commands\n"
    yield NOTE
    yield prose(
        "`fullstride COMMAND --help` prints the usual flags of a command, `--help-all` every one. "
        "Fields of a recipe, `--recipe.FIELD`, are in [recipes.md](recipes.md); "
        f"defaults here are those of `scratch` for {NOMINAL.images:,} images."
    )
    yield ""
    yield "| command | purpose |\n|---|---|"
    for name, command in COMMANDS.items():
        purpose = (command.__doc__ or "").partition("\n")[0]
        yield f"| [{name}](#fullstride-{name.replace(' ', '-')}) | {escape(purpose)} |"
    for group, purpose in GROUPS.items():
        yield ""
        yield prose(f"`fullstride {group}`: {purpose}")
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
    if any(name.startswith("--recipe.") for flag in flags for name in flag.names):
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
    head, *_ = text.partition("╭")
    entries: list[list[str]] = []
    for line in re.findall(r"│ (.*?) *│$", text, re.MULTILINE):
        if re.match(r"--?\w|[A-Z]+(  | \.\.\.|$)", line):
            entries.append(re.split(r"  +", line, maxsplit=1))
        elif entries and line.startswith(" "):
            entries[-1].append(line.strip())
    flags = [read_flag(entry, " ".join(texts)) for entry, *texts in entries]
    paragraphs = [" ".join(each.split()) for each in head.strip().split("\n\n")[1:]]
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
    rest = [flag for flag in flags if flag not in first and flag.names[0][:9] != "--recipe."]
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
    yield "# Recipes\n"
    yield NOTE
    yield prose(
        "A recipe is what a network is trained with. `--recipe NAME` takes one of these, and "
        "`--recipe.FIELD VALUE` changes a field of it. In Python `train_network(..., "
        'recipe="NAME", FIELD=VALUE)` does the same.'
    )
    yield "\n## Names\n"
    yield prose(
        f"The numbers of {', '.join(f'`{name}`' for name in BY_CASE)} follow the data; here they "
        f"are those for {NOMINAL.images:,} images. The other fields of a recipe are printed by "
        "`fullstride train --recipe NAME --recipe.help`."
    )
    yield "\n| name | " + " | ".join(RECIPE_COLUMNS) + " | other fields that differ |"
    yield "|---|" + "---|" * (len(RECIPE_COLUMNS) + 1)
    defaults = {field.name: field.default for field in fields(Recipe)}
    for name, recipe in RECIPES.items():
        values = vars(recipe)
        others = " ".join(
            f"`{field}={short(value)}`"
            for field, value in values.items()
            if field not in RECIPE_COLUMNS and value != defaults[field] and value != {}
        )
        cells = " | ".join(short(values[field]) for field in RECIPE_COLUMNS)
        yield f"| `{name}` | {cells} | {others} |"
    yield "\n## Fields\n"
    yield prose(
        "The default is that of a recipe that does not set the field. A field with a short flag "
        "has both."
    )
    yield "\n| field | value | default | meaning |\n|---|---|---|---|"
    texts = field_help()
    for flag in command_help("train")[1]:
        long = next((name for name in flag.names if name.startswith("--recipe.")), "")
        name = flag.field if len(flag.names) == 1 else long[9:].replace("-", "_")
        if long:
            also = "".join(f" `{each}`" for each in flag.names if each[:9] != "--recipe.")
            default = defaults[name]
            row = Flag((name,), flag.values or "True|False", short(default), texts[name]).row()
            yield row.replace(f"`{name}`", f"`{name}`{also}", 1)


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
    yield "# Python\n"
    yield NOTE
    yield prose(
        "All names are imported from `fullstride`, on first use. Shapes are those of tensors: N "
        "images, C channels, H x W pixels, T frames, K classes."
    )
    yield ""
    yield prose("Notebooks show bundles, measurements, choices and events as tables.")
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
    sections = target.docstring.parse("google") if target.docstring else []
    examples: list[str] = []
    for section in sections:
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
        texts = field_help(kind)
        yield "| field | type | default | meaning |\n|---|---|---|---|"
        for field in fields(kind):
            source = owner(target, field.name)
            default = str(source.value or "")
            default = "" if default.startswith("field(") else f"`{escape(default)}`"
            annotation = re.sub(r"Annotated\[(.+?), \w+\(.*?\)\]", r"\1", str(source.annotation))
            meaning = escape(texts.get(field.name, ""))
            default = default.strip("`") and default
            yield f"| `{field.name}` | `{escape(annotation)}` | {default} | {meaning} |"
        yield ""
    for name, member in target.members.items():
        if name.startswith("_") or not member.docstring or kind is Recipe and not member.docstring:
            continue
        text = member.docstring.value.partition("\n\n")[0]
        if member.is_function:
            call = " ".join(signature(name, member, drop_self=True).split())
            yield prose(f"- `{call}`: {text}", "  ")
        elif "property" in member.labels:
            yield prose(f"- `{name}`: {text}", "  ")
    yield ""


def owner(target: Any, field: str) -> Any:
    """The attribute of a class or of one of its bases."""
    return target.members[field] if field in target.members else target.inherited_members[field]


PAGES = {"commands.md": commands, "recipes.md": recipes, "python.md": python}


def write(out: Path, pages: Iterable[str] = PAGES) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for page in pages:
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(PAGES[page]())).strip()
        (out / page).write_text(f"{text}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reference")
    write(parser.parse_args().out)
