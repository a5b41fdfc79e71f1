"""The pages of docs/reference: the generated ones are as the code is, and the others name what is
there."""

import importlib.util
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from described_files import undescribed

import fullstride
from fullstride.commands import COMMANDS, USUAL
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import RECIPES
from fullstride.train.recipes.recipe import Recipe

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def script():
    place = importlib.util.spec_from_file_location("reference", ROOT / "docs/write_reference.py")
    assert place
    assert place.loader
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["commands.md", "python.md", "recipes.md", "released_weights.md"])
def test_a_generated_page_is_what_the_code_says(page, script, tmp_path):
    script.write(tmp_path, [page])
    assert (tmp_path / page).read_text() == (REFERENCE / page).read_text(), (
        "write it again: python docs/write_reference.py"
    )


def section(page: str, title: str) -> str:
    text = (REFERENCE / page).read_text()
    return text.partition(f"\n{title}\n")[2].partition(f"\n{title.split(' ')[0]} ")[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_a_meaning_for_each_of_its_flags(name):
    text = section("commands.md", f"## fullstride {name}")
    assert f"```text\nfullstride {name}" in text
    rows = [row[2:-2].replace(r"\|", "/").split(" | ") for row in re.findall(r"\| `.*", text)]
    for row in rows:
        assert len(row[3].split()) > 1, row
    flags = " ".join(row[0] for row in rows).replace("-", "_")
    for flag in USUAL.get(name, "").replace("recipe_name", "recipe").split():
        flag = {"source": "from"}.get(flag, flag)  # as `choose` calls it
        assert re.search(rf"`(__)?{flag}`", flags), flag


def test_every_recipe_and_every_field_of_one_is_on_the_page():
    names, table = section("recipes.md", "## Names"), section("recipes.md", "## Fields")
    assert re.findall(r"^\| `(\w+)`", names, re.MULTILINE) == list(RECIPES)
    written = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert set(written) == {field.name for field in fields(Recipe)} - {"task_options"}


@pytest.mark.parametrize("name", fullstride.PUBLIC)
def test_every_public_name_has_an_example_and_a_meaning_for_each_of_its_fields(name):
    text = section("python.md", f"## {name}")
    assert "\n>>> import fullstride\n" in text.partition("```pycon")[2]
    kind = getattr(fullstride, name)
    if is_dataclass(kind) and kind is not Recipe:
        for field in fields(kind):
            assert re.search(rf"^\| `{field.name}` \| .* \| .*[a-z].* \|$", text, re.MULTILINE)


def test_the_files_of_a_run_and_a_bundle_are_those_of_the_page(few_digits, tmp_path):
    changes = dict(steps=8, resolution=16, batch_size=16, soup=2)
    fullstride.train_network(
        few_digits, "genet_tiny", tmp_path / "run", options=RunOptions(), **changes
    )
    assert (tmp_path / "run" / "soup").is_dir()
    assert not undescribed("A run", tmp_path / "run")
    assert not undescribed("A bundle", tmp_path / "run" / "bundle")
    (tmp_path / "run" / "new.json").touch()
    assert undescribed("A run", tmp_path / "run") == ["new.json"]


def test_every_word_of_the_glossary_is_in_use_and_they_are_in_order():
    rows = re.findall(r"^\| (.+?) \| .* \|$", (REFERENCE / "glossary.md").read_text(), re.MULTILINE)
    words = [words for words in rows if words not in ("word", "---")]
    assert words == sorted(words, key=str.lower)
    paths = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py"), ROOT / "README.md"]
    text = " ".join(p.read_text() for p in paths if p.name != "glossary.md")
    text = re.sub(r"[\s\-_]+", " ", text).lower()
    unused = [
        word
        for row in words
        for word in row.split(", ")
        if re.sub(r"[\s\-_]+", " ", word).lower() not in text
    ]
    assert not unused
