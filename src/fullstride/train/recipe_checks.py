"""Which fields of a recipe exclude each other? Checks that raise ValueError in one line."""

from dataclasses import fields
from typing import Any

MAX_NUMBER = 1e12  # larger numbers are typing errors, and some would make a loop endless


def check_size(recipe: Any) -> None:
    """Raises ValueError for a number beyond `MAX_NUMBER`, infinity or NaN."""
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not -MAX_NUMBER <= number <= MAX_NUMBER:
                raise ValueError(
                    f"recipe.{field.name} {str(value)[:20]}: use numbers up to {MAX_NUMBER:g}"
                )


def check_batch(recipe: Any) -> None:
    """Raises ValueError for a batch that cannot be made of images as the fields ask for."""
    if recipe.grad_accum_steps and recipe.batch % recipe.grad_accum_steps:
        raise ValueError(
            f"recipe.batch {recipe.batch} is not divisible by recipe.grad_accum_steps "
            f"{recipe.grad_accum_steps}: change one of them"
        )
    if recipe.triplet and (recipe.per_class < 2 or recipe.mixup or recipe.cutmix):
        raise ValueError(
            f"recipe.triplet {recipe.triplet:g} compares unmixed images of one class: set "
            "recipe.per_class to 2 or more, and recipe.mixup and recipe.cutmix to 0"
        )
    low, high = recipe.jitter
    if not low <= high <= 4:
        raise ValueError(f"recipe.jitter {recipe.jitter}: use two rising numbers up to 4")


def check_length(recipe: Any) -> None:
    """Raises ValueError for a length of training, or scores in it, that exclude each other."""
    if list(recipe.milestones) != sorted(recipe.milestones):
        raise ValueError(f"recipe.milestones {recipe.milestones}: use increasing fractions")
    if 0 < recipe.early_stop_patience < recipe.score_every_epochs:
        raise ValueError(
            f"recipe.early_stop_patience {recipe.early_stop_patience} ends before there is a "
            f"second score, after recipe.score_every_epochs {recipe.score_every_epochs}: use as "
            "many epochs or more, or 0"
        )
    if recipe.soup == 1:
        raise ValueError("recipe.soup 1 has nothing to average: use 2 epochs or more, or 0")
    if recipe.steps and recipe.images:
        raise ValueError(
            f"recipe.steps {recipe.steps} and recipe.images {recipe.images} both set the length of "
            "training: use one of them"
        )


def check_balance(recipe: Any) -> None:
    """Raises ValueError for losses and ways to balance classes that exclude each other."""
    if recipe.loss == "bce" and recipe.teacher:
        raise ValueError(
            "recipe.loss bce trains a probability for each class alone, and recipe.teacher one "
            "distribution over all: use cross_entropy or focal, or no teacher"
        )
    if recipe.balanced_sampling and recipe.class_weights != "none":
        raise ValueError(
            f"recipe.balanced_sampling {recipe.balanced_sampling:g} and recipe.class_weights "
            f"{recipe.class_weights} would balance the classes twice: use one of them"
        )
    for name, off in (("balanced_sampling", 0), ("repeated_augmentation", 1)):
        value = getattr(recipe, name)
        if value != off and recipe.per_class:
            raise ValueError(
                f"recipe.{name} {value:g} and recipe.per_class {recipe.per_class} both choose the "
                "images of a batch: use one of them"
            )


def check_unlabelled(recipe: Any) -> None:
    """Raises ValueError for what cannot be combined with images without labels."""
    if not recipe.unlabelled:
        return
    excluded = {
        "loss": ("bce", "is not linear in the targets: use cross_entropy or focal"),
        "teacher": (recipe.teacher or None, "would teach labelled images too: leave it out"),
        "triplet": (recipe.triplet or None, "needs the class of each image: set it to 0"),
        "grow_from": (recipe.grow_from, "grows with the epochs of labelled images: leave it out"),
    }
    for name, (value, why) in excluded.items():
        if value is not None and getattr(recipe, name) == value:
            raise ValueError(f"recipe.unlabelled with recipe.{name} {value}, which {why}")
