"""Holds a user's choices for a training: the recipe, and where and how it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullstride.io.records import check_bounds
from fullstride.nets.preprocessing import WHITE, WeightsKind
from fullstride.train.recipes.named import (
    BY_IMAGES,
    FINETUNE_BATCH,
    MAX_PROBE_CLASSES,
    NOMINAL,
    RECIPES,
    Case,
    batch_for,
    default_recipe,
    find_recipe,
)
from fullstride.train.recipes.recipe import Recipe, check_size

if TYPE_CHECKING:
    from fullstride.data.dataset import DataSet
    from fullstride.tasks.task import Task

LENGTHS = ("epochs", "steps", "images")  # fields that set the length of training


@dataclass(frozen=True, kw_only=True)
class RecipeFields(Recipe):
    """The fields that `--recipe` sets; `--recipe.help` explains them."""

    def __post_init__(self) -> None:
        check_size(self)
        check_bounds(self, "recipe.")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The initial weights of a run, and where it computes; the comment on a field is its help.

    Examples:
        >>> import fullstride
        >>> options = fullstride.RunOptions(device="cpu", width=0.5)
        >>> choice = dict(options=options, steps=2)
        >>> bundle = fullstride.train_network("digits", "genet_tiny", "runs/half", **choice)
        >>> bundle.net.spec.stages[0].width
        24
    """

    # Initial weights: a run, a bundle, a file of released weights, or hub; by default random.
    weights: str = ""
    # The weights to use from a checkpoint with both.
    weights_kind: WeightsKind = "averaged"
    # Multiplier of the network's widths, rounded to multiples of 8.
    width: float = 1.0
    # Multiplier of the numbers of blocks per stage.
    depth: float = 1.0
    # What the network is trained for; by default recognised from the files of the data.
    task: str = "classify"
    # Where to compute: cpu, cuda, cuda:1, or auto: cuda if available.
    device: str = "cpu"
    # Processes that decode images; 0 decodes in the main process, None chooses by the cores, the
    # images and the device.
    workers: int | None = 0
    # Steps between checkpoints within an epoch; 0 writes one only after each scored epoch.
    checkpoint_every_steps: int = 0
    # A folder for the outputs of the recipe's teacher, shared by runs on the same views.
    teacher_cache: Path | None = None


DEFAULTS = RunOptions()
# The default options of a command; the task is recognised from the data.
HERE = RunOptions(device="auto", workers=None, task="")


@dataclass(frozen=True)
class NamedRecipe:
    """A recipe with its name."""

    recipe: Recipe
    name: str = ""  # in `RECIPES`, or "" for another recipe
    case: Case = NOMINAL  # the case that it was resolved for
    deadline: float | None = None  # the end of the run, by `time.perf_counter`; None: no limit


@dataclass(frozen=True)
class RecipeChoice:
    """A user's choice of a recipe, which `resolve` turns into a `NamedRecipe`."""

    # a name in `RECIPES`, the path of a saved recipe, or a recipe; "": the default of the case
    source: str | Recipe = ""
    # fields that the user set, even to the recipe's own value
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [each.name for each in fields(Recipe)]
        for name in (each for each in self.changes if each not in names):
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else "fullstride.Recipe lists them"
            if name in vars(DEFAULTS):
                hint = f"give options=RunOptions({name}=...)"
            raise ValueError(f"a recipe has no field {name!r}: {hint}")

    @property
    def background(self) -> str:
        """The colour behind transparent pixels, unless the weights have their own."""
        recipe = find_recipe(self.source) if isinstance(self.source, str) and self.source else None
        recipe = self.source if isinstance(self.source, Recipe) else recipe
        return self.changes.get("background") or (recipe and recipe.background) or WHITE

    def resolve(self, case: Case, saved: NamedRecipe | None = None) -> NamedRecipe:
        """The recipe for a case; a resumed run keeps its `saved` numbers.

        Raises ValueError in one line for an unknown name, for another recipe's name than the run's,
        and for wrong values.
        """
        case = replace(
            case,
            resolution=self.changes.get("resolution"),
            epochs=epochs_of(self.changes, case.images, self.source or default_recipe(case)),
        )
        if isinstance(self.source, Recipe):
            return NamedRecipe(with_changes(self.source, self.changes, case), case=case)
        if saved and (not self.source or self.source in RECIPES):
            if self.source and saved.name and self.source != saved.name:
                raise ValueError(
                    f"the run has recipe {saved.name}, not {self.source}: give another --out, or "
                    "the same arguments"
                )
            recipe = replace(saved.recipe, **with_all_options(saved.recipe, self.changes))
            return NamedRecipe(recipe, saved.name, case)
        name = self.source or default_recipe(case)
        follows = name in BY_IMAGES
        recipe = with_changes(find_recipe(name, case), self.changes, case, follows_images=follows)
        return NamedRecipe(recipe, name if name in RECIPES else "", case)


def case_of(
    data: "DataSet", weights: str = "", width: float = 1.0, task: "Task | None" = None
) -> Case:
    """The case of training on `data` from `weights`, "" for random, at a multiple of the width.

    The task is classification if None.
    """
    has_one_class = task is None or (task.single_label and not task.open_classes)
    return Case(
        images=max(1, len(data.train)),
        has_weights=bool(weights),
        can_probe=has_one_class and len(data.classes) <= MAX_PROBE_CLASSES,
        is_digits=data.where == "digits",
        width=width,
        of_task=task.default_recipe if task else "",
    )


def epochs_of(changes: Mapping[str, Any], images: int, source: str | Recipe) -> float | None:
    """The length among `changes` in epochs, with the batch size of `changes` or the recipe."""
    if changes.get("images"):
        return changes["images"] / images
    if changes.get("steps"):
        usual = batch_for(images) if source == "scratch" else FINETUNE_BATCH
        return changes["steps"] * changes.get("batch_size", usual) / images
    return changes.get("epochs")


def with_changes(
    recipe: Recipe, changes: Mapping[str, Any], case: Case, *, follows_images: bool = False
) -> Recipe:
    """Apply `changes` to `recipe`, and adapt dependent fields that are not among `changes`.

    The learning rate follows the batch up to the number of images, see `Recipe.lr_for`. A length
    replaces a length in other units, and a shorter length shortens the warmup in proportion. A
    recipe that follows the images keeps its number of images, and the span of its weight average:
    in images if the batch changes, as a fraction of training if the length changes.
    """
    changes = with_all_options(recipe, changes)
    replace(RecipeFields(**vars(recipe)), **changes)
    batch = changes.get("batch_size", recipe.batch_size)
    values: dict[str, Any] = {"steps": recipe.steps, "images": recipe.images}
    if any(name in changes for name in LENGTHS):
        values = {"steps": None, "images": None}
    elif recipe.steps and follows_images:
        values["steps"] = max(1, round(recipe.steps * recipe.batch_size / batch))
    if batch != recipe.batch_size:
        largest = max(recipe.batch_size, case.images)
        optimizer = changes.get("optimizer", recipe.optimizer)
        values["lr"] = recipe.lr_for(min(batch, largest), optimizer)
    values |= changes
    epochs = values.get("epochs", recipe.epochs)
    length = length_in_images(epochs, values["steps"], values["images"], batch, case)
    before = length_in_images(recipe.epochs, recipe.steps, recipe.images, recipe.batch_size, case)
    longer = length / before
    values.setdefault("warmup_epochs", recipe.warmup_epochs * min(1, longer))
    if follows_images:
        span = batch / recipe.batch_size / longer
        values.setdefault("ema_decay", recipe.ema_decay**span if recipe.ema_decay else 0.0)
    return replace(recipe, **values)


def with_all_options(recipe: Recipe, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """`changes` with the task options of `recipe` that they do not set."""
    options = changes.get("task_options")
    if not options:
        return changes
    return {**changes, "task_options": {**recipe.task_options, **options}}


def length_in_images(
    epochs: float, steps: int | None, images: int | None, batch: int, case: Case
) -> float:
    """The number of training images computed, before rounding to whole steps."""
    return images or (steps * batch if steps else epochs * case.images)
