"""The command line's own logic: thin commands, recipes found by the parser, old flags, the bar."""

import ast
import io
import re
import shlex
from dataclasses import fields, is_dataclass, replace
from inspect import getsource, signature
from itertools import islice
from typing import get_type_hints

import pytest
from rich.console import Console
from rich.progress import Progress

from fullstride import cli, tables
from fullstride.commands import COMMANDS, GROUPS, PROFILES, USUAL
from fullstride.deploy.formats import FORMATS
from fullstride.io import console
from fullstride.latency.devices import profile_names
from fullstride.measure.workload import find_precision
from fullstride.tasks import TASKS
from fullstride.train.recipes.choice import RecipeChoice, RecipeFields
from fullstride.train.recipes.named import FINETUNE, NOMINAL, RECIPES
from fullstride.train.recipes.recipe import SHORT_FLAGS, Recipe

MOST_LINES, MOST_USUAL = 32, 12
SWITCHES = [name for name, hint in get_type_hints(Recipe).items() if hint is bool]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_parses_calls_and_prints_in_few_lines(name):
    (function,) = ast.parse(getsource(COMMANDS[name])).body
    assert isinstance(function, ast.FunctionDef)
    first = function.body[1]  # after the docstring
    assert isinstance(function.body[0].value.value, str)
    assert function.body[-1].end_lineno - first.lineno + 1 <= MOST_LINES


PAGES: dict[tuple[str, ...], str] = {}  # of help, each of which takes a quarter of a second


def help_of(capsys, *words, flag="--help"):
    if (*words, flag) not in PAGES:
        assert cli.run([*words, flag]) == 0
        PAGES[*words, flag] = capsys.readouterr().out
    return PAGES[*words, flag]


def choice_of(*words):
    """The recipe that a command is called with."""
    required = ("--model", "genet_tiny") + ("--out", "o") * (words[0] == "train")
    return cli.parse([*words, *required]).keywords["recipe"]


def shown_by_help(*words):
    name, arguments = cli.command_in(words)
    return cli.recipe_in(name, [*arguments, "--help"]).recipe


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_before_the_data_does_not_hide_which_data_they_are(switch):
    """The forms of a flag and the two commands alternate: each pair is there for some switch."""
    dashed = switch.replace("_", "-")
    flags = (f"--recipe.{switch}", f"--recipe.{dashed}", f"--recipe.no-{dashed}")
    for number, flag in enumerate(flags, SWITCHES.index(switch)):
        words = ["data", "bench", "digits", flag] if number % 2 else ["train", flag, "digits"]
        assert shown_by_help(*words) == RECIPES["digits"]
        assert choice_of(*words) == RecipeChoice("", {switch: "no-" not in flag})


def test_frozen_layers_are_words_after_their_flag():
    choice = choice_of("train", "photos", "--recipe.frozen", "stem", "stages.0")
    assert choice == RecipeChoice("", {"frozen": ("stem", "stages.0")})


def test_a_value_that_the_recipe_has_anyway_is_chosen_too():
    choice = choice_of("train", "--recipe.lr=0.3", "photos", "--recipe", "genet", "--epochs", "90")
    assert choice == RecipeChoice("genet", {"lr": 0.3, "epochs": 90})


def test_the_digits_recipe_is_for_the_data_digits_alone():
    for words in (["--epochs", "3", "digits"], ["--epochs=3", "--lr", ".1", "digits"]):
        assert shown_by_help("train", *words) == RECIPES["digits"]
    for words in (["--out", "digits", "photos"], ["photos", "--out=digits"], ["--model", "digits"]):
        assert shown_by_help("train", *words) == RECIPES["scratch"]
        assert shown_by_help("train", *words, "--weights", "w") == RECIPES["finetune"]
    for words in (["--recipe", "genet", "digits"], ["digits", "--recipe=genet"]):
        assert shown_by_help("train", *words) == RECIPES["genet"]
    assert shown_by_help("train", "digits", "--tensorboard") == RECIPES["digits"]


def test_the_fields_of_the_chosen_recipe_are_the_defaults_of_its_flags(capsys):
    recipe = choice_of("train", "digits", "--recipe", "genet", "--recipe.lr", "0.3").resolve(
        NOMINAL
    )
    assert recipe.recipe == replace(RECIPES["genet"], lr=0.3)
    assert cli.run(["train", "digits", "--recipe", "genet", "--help-all"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert f"peak learning rate for this batch size (default: {RECIPES['genet'].lr:g})" in page


def flags_in(page):
    """The flags that a page of help describes, each by its first name."""
    return re.findall(r"^  (--\w[\w.-]+)", page, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_the_usual_flags_and_says_how_many_more_the_whole_help_has(name, capsys):
    pages = [help_of(capsys, *name.split(), flag=flag) for flag in ("--help", "--help-all")]
    short, whole = map(flags_in, pages)
    assert len(short) <= MOST_USUAL
    assert set(short) <= set(whole)
    assert len(set(whole)) == len(whole)
    hidden = len(whole) - len(short)
    line = f"{hidden} more flags: fullstride {name} --help-all"
    assert pages[0].splitlines()[-1] == line if hidden else line not in pages[0]
    assert "more flags" not in pages[1]
    assert pages[0].count("(required)") == pages[1].count("(required)")


@pytest.mark.parametrize("name", ["fit", "train", "study scale", "data bench", "predict"])
def test_a_command_without_words_names_what_is_missing(name, capsys):
    assert cli.run(name.split()) == 2
    assert f"Missing from fullstride {name}: " in capsys.readouterr().err


def test_the_help_lists_the_values_of_closed_lists(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert tuple(FORMATS) == tables.FORMATS
    assert set(PROFILES) == set(profile_names())
    shown = {
        "train": [f"--task {{{','.join(TASKS)}}}"],
        "fit": [f"--formats {{{','.join(FORMATS)}}} ...", "--target {here,a10,", "--license"],
        "export": [
            f"--format {{None,{','.join(FORMATS)},auto}}",
            "--precision {None,fp32,bf16,fp16,int8}",
        ],
        "bench": ["--protocol {online,", "--device cpu|cuda|cuda:N|auto"],
        "measure estimate": ["--target {a10,"],
    }
    for name, flags in shown.items():
        assert cli.run([*name.split(), "--help-all"]) == 0
        page = " ".join(capsys.readouterr().out.split())
        assert [flag for flag in flags if flag not in page] == []


@pytest.mark.parametrize("name", USUAL)
def test_each_usual_flag_is_one_of_its_command(name):
    types = [hint for hint in get_type_hints(COMMANDS[name]).values() if is_dataclass(hint)]
    types = [RecipeFields if hint is RecipeChoice else hint for hint in types]
    flags = {"recipe_name", *signature(COMMANDS[name]).parameters}
    for hint in types:  # grows by the types of fields that are flags of their own
        hints = get_type_hints(hint)
        flags |= {field.name for field in fields(hint)}
        types += [hints[each.name] for each in fields(hint) if is_dataclass(hints[each.name])]
    assert set(USUAL[name].split()) <= flags


def test_the_help_names_positionals_and_the_recipe(capsys):
    for name in COMMANDS:
        positionals = help_of(capsys, *name.split()).partition(" positional arguments ")[2]
        assert not {"STR", "PATH"} & set(
            positionals.partition(" options ")[0].replace("[", " ").split()
        )
    help_text = help_of(capsys, "train")
    assert "[OPTIONS] DATA" in help_text
    assert "--recipe NAME" in help_text


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_first_lines_of_help_have_an_example_that_the_parser_takes(name, capsys):
    lines = help_of(capsys, *name.split()).splitlines()
    (example,) = [line for line in lines if line.startswith("Example: fullstride ")]
    assert len([line for line in lines[: lines.index(example)] if line]) <= 2  # usage, summary
    words = shlex.split(example)[2:]
    assert cli.parse(words).func is COMMANDS[name or "train"]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("train digits --model m --out o --batch 3", ["--batch, 3", "mean --batch-size?"]),
        ("train digits --model m --out o --epochs x", ["--epochs", "'x'"]),
        ("train digits --model m --out o --epochs -1", ["recipe.epochs -1.0: use "]),
        ("train digits --model m", ["train: --out PATH; see"]),
        ("train digits --modle m --out x", ["--model STR; Unrecognized options: --modle m;"]),
        ("train digits --model m --out", ["--out"]),
        ("export a --out x --precision fp12", ["fp12", "--precision"]),
        ("zoo x", ["x; see fullstride zoo --help"]),
        ("predict", ["RUN"]),
        ("trian digits", ["did you mean train"]),
        ("xyzzy", ["see fullstride --help"]),
    ],
)
def test_words_that_the_parser_refuses_are_one_short_line(words, facts, capsys):
    assert cli.run(words.split()) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 200
    for fact in facts:
        assert fact in captured.err


def test_no_words_at_all_show_the_commands(capsys):
    assert cli.run([]) == 0
    page = capsys.readouterr().out
    alone = [name for name in COMMANDS if " " not in name]
    assert len(alone) == 9
    assert all(f" {name} " in page for name in [*alone, *GROUPS])


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_lists_its_commands_and_a_word_of_another_place_is_told_where_it_is(group, capsys):
    assert cli.run([group]) == 0
    own = [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{group} ")]
    page = capsys.readouterr().out
    assert re.findall(r"^  (\w+)", page, re.MULTILINE) == own
    assert help_of(capsys, group) == page
    for words in ([own[0]], [group, "nothing"], ["zoo", group]):
        assert cli.run(words) == 2
        if words == [own[0]] and own[0] not in COMMANDS:
            assert f"did you mean {group} {own[0]}?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "data bench"])
def test_the_short_flags_of_a_recipe_set_its_fields_and_are_in_the_help(command, capsys):
    page = help_of(capsys, *command.split(), flag="--help-all")
    required = ["photos", "--model", "m", *(["--out", "o"] if command == "train" else [])]
    short = ["--epochs", "7", "--batch-size=24", "--lr", "0.3", "--resolution", "64"]
    recipe = cli.parse([*command.split(), *required, *short]).keywords["recipe"]
    assert recipe == RecipeChoice("", dict(epochs=7, batch_size=24, lr=0.3, resolution=64))
    for flag, field in SHORT_FLAGS.items():
        assert f"{flag} " in page
        assert f"--recipe.{field.replace('_', '-')} " in page


def test_a_short_flag_and_its_field_may_not_differ(capsys):
    words = ["train", "photos", "--model", "m", "--out", "o", "--batch_size", "8"]
    assert cli.parse([*words, "--recipe.batch-size=8"]).keywords["recipe"].changes == {
        "batch_size": 8
    }
    assert cli.run([*words, "--recipe.batch-size", "16"]) == 2
    error = capsys.readouterr().err
    assert "--batch_size 8 and --recipe.batch-size 16" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("old", "new"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_precisions_are_spelled_one_way_and_the_long_names_are_read(old, new, capsys):
    recipe = replace(FINETUNE, precision=new)
    assert replace(FINETUNE, precision=old) == recipe
    assert find_precision(old) == find_precision(new) == old
    assert cli.run(["measure", "cost", "genet_tiny", "--precision", new]) == 0
    printed = capsys.readouterr().out
    assert f"write in {new}," in printed
    assert old not in printed


class Epochs:
    """Two epochs of five batches, which count how many were closed."""

    closed = 0

    def __len__(self):
        return 5

    def epoch(self, number, start=0):
        try:
            yield from range(start, 5)
        finally:
            self.closed += 1


def test_a_bar_leaves_no_line_behind_an_epoch_of_which_only_a_part_is_taken():
    screen = Console(file=io.StringIO(), force_terminal=True)
    batches, progress = Epochs(), Progress(console=screen)
    counted = console.CountedBatches(batches, progress)
    for number in range(2):
        assert list(islice(counted.epoch(number, 1), 3)) == [1, 2, 3]
        assert not progress.tasks
        assert not progress.live.is_started
    assert batches.closed == 2
