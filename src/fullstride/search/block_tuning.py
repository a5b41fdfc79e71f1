"""How good is a structure? One trial for each, that tunes exchanged blocks or trains a network."""

import json
import time
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fullstride.data.dataset import DataSet
from fullstride.data.transforms.crop import Augmentation
from fullstride.io.writing import atomic_write, json_output, remove
from fullstride.nets import zoo
from fullstride.nets.backbone import Spec
from fullstride.nets.bundle import WEIGHTS
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import TimmSpec
from fullstride.search.feature_matching import exchanged, matched
from fullstride.study.scores import score_run, train_to
from fullstride.study.trials import Trial, TrialKind
from fullstride.train import run_folder
from fullstride.train.prepare import prepare
from fullstride.train.recipes.choice import RecipeChoice, case_of
from fullstride.train.recipes.named import following, scratch
from fullstride.train.recipes.recipe import Recipe, saved_recipe
from fullstride.train.run import train

# In the folder of a trial: the run, the spec that it trains, and the weights that it begins with.
RUN, SPEC, START = "run", "spec.json", "start"
SPEC_OUTPUT = json_output("the spec of a network", "stem", "stages")
# Fields of the MasterNet's recipe that say what its images were, so that a block learns on the same
VIEW_FIELDS = tuple(field.name for field in fields(Augmentation))
VIEW_FIELDS += ("decoder", "draft", "resolution", "crop", "fit", "score", "deterministic")
VIEW_FIELDS += ("class_weights", "balanced_sampling", "precision", "channels_last")

Method = Literal["block", "full", "feature"]
BY_DEFAULT = RecipeChoice()

# Changes of `tuning_recipe` to the paper's numbers for a million images (arXiv:2006.14090, 4.2).
PAPER_TUNING: Mapping[str, Any] = dict(epochs=30.0, batch_size=256, lr=0.01, weight_decay=4e-5)


@dataclass(frozen=True, kw_only=True)
class TunedScore:
    """What a network of a study achieves on the validation split at the end of its training."""

    spec: Mapping[str, Any]  # of `NetSpec`, as JSON
    seed: int
    score: float  # by the recipe's metric: top-1 in percent unless it has another
    loss: float
    correct: str  # 1 or 0 for each image of the validation split, in order
    epochs: int
    seconds: float  # since the last start


def tune_trial(
    folder: Path,
    *,
    master: Path,
    spec: NetSpec,
    data: DataSet,
    again: Collection[str] = (),
    recipe: RecipeChoice = BY_DEFAULT,
    seed: int = 0,
    method: Method = "block",
    workers: int | None = 0,
    checkpoint_every_steps: int = 0,
) -> Trial:
    """The trial of `tune`: the network of `spec` made of the MasterNet, and tuned.

    Args:
        folder: Of the trial; `run` in it is the run, which keeps its bundle only.
        master: The bundle or the finished run of the MasterNet.
        spec: The structure, see `exchanged`.
        data: Its test split is not used.
        again: Places whose weights are new although the design is the same, such as `stages.2`.
        recipe: Without a source, `tuning_recipe` with the changes.
        seed: Of the new weights, and of the run.
        method: What trains: `block` is what `exchanged` says, `full` is everything. `feature` is
            `block` after `matched`, which brings new parts close to the MasterNet's maps.
        workers: Processes that decode images; None: chosen.
        checkpoint_every_steps: For epochs that are long.
    """
    arguments = dict(master=master, spec=spec, again=tuple(again), method=method)
    common = _common(data, recipe, seed, workers, checkpoint_every_steps)
    return Trial(folder=folder, result=folder / "result.json", arguments=arguments | common)


def train_trial(
    folder: Path,
    *,
    spec: Spec,
    data: DataSet,
    recipe: RecipeChoice = BY_DEFAULT,
    seed: int = 0,
    workers: int | None = 0,
    epochs: float | None = None,
    checkpoint_every_steps: int = 0,
) -> Trial:
    """The trial of `train_network`: the network of `spec` trained from random weights.

    Args:
        folder: Of the trial; `run` in it is the run, with the bundle.
        spec: The network; its resolution is that of training unless the recipe has another.
        data: Its test split is not used.
        recipe: As for `run.train`.
        seed: Of the recipe.
        workers: Processes that decode images; None: chosen.
        epochs: In place of the recipe's length.
        checkpoint_every_steps: For epochs that are long.
    """
    if epochs is not None:
        recipe = replace(recipe, changes={**recipe.changes, "epochs": epochs})
    arguments = dict(spec=spec) | _common(data, recipe, seed, workers, checkpoint_every_steps)
    return Trial(folder=folder, result=folder / "result.json", arguments=arguments)


def _common(
    data: DataSet, recipe: RecipeChoice, seed: int, workers: int | None, every: int
) -> dict[str, Any]:
    unseen = replace(data, test=data.test.subset([]))
    return dict(
        data=unseen, recipe=recipe, seed=seed, workers=workers, checkpoint_every_steps=every
    )


def tune(
    folder: Path,
    device: str,
    *,
    master: Path,
    spec: NetSpec,
    again: Collection[str],
    method: Method,
    data: DataSet,
    recipe: RecipeChoice,
    seed: int,
    workers: int | None,
    checkpoint_every_steps: int,
) -> Generator[str, None, TunedScore]:
    """Exchange blocks of the MasterNet for those of `spec`, tune them, and score the network.

    The loss is the recipe's, half cross-entropy and half the distance from the MasterNet's
    probabilities. The rest of the network is frozen, batch norms included; the statistics of those
    that train are measured anew at the end if the validation split is better so.

    The paper does not say what trains, nor by which loss; it calls the step "distillation" and the
    tuning "fine-tune". The score is that of the whole network, as there.
    """
    teacher = zoo.load(master)
    exchange = exchanged(teacher, spec, seed, again=again)
    start = folder.resolve() / START
    like = saved_recipe(dict(teacher.recipe), teacher.name) if teacher.recipe else None
    frozen = () if method == "full" else exchange.frozen
    changes = dict(recipe.changes, teacher=str(master.resolve()), frozen=frozen)
    choice = RecipeChoice(recipe.source or tuning_recipe(len(data.train), like), changes)
    if not (start.exists() and (folder / RUN / run_folder.CHECKPOINT).exists()):
        if method == "feature":
            named = choice.resolve(case_of(data, str(start)))
            short = replace(named.recipe, seed=seed)
            exchange = matched(exchange, teacher, data, short, device, workers or 0)
        exchange.bundle(teacher).save(start)
    score = yield from _trained(
        folder,
        device,
        spec=spec,
        weights=str(start),
        data=data,
        recipe=choice,
        seed=seed,
        workers=workers,
        checkpoint_every_steps=checkpoint_every_steps,
    )
    delete_weights(folder)
    return score


def delete_weights(folder: Path) -> None:
    """Delete all weights of a tuned network but its bundle: a search has hundreds of such folders.

    A trial that was stopped before its result was written is scored again without them.
    """
    remove(folder / RUN / run_folder.CHECKPOINT)
    for bundle in (folder / RUN / run_folder.BEST, folder / START):
        remove(bundle / WEIGHTS)  # first, as a bundle is recognised by its other file
        remove(bundle)


def train_network(
    folder: Path,
    device: str,
    *,
    spec: Spec,
    data: DataSet,
    recipe: RecipeChoice,
    seed: int,
    workers: int | None,
    checkpoint_every_steps: int,
) -> Generator[str, None, TunedScore]:
    """Train the network of `spec` from random weights, and score it."""
    return (
        yield from _trained(
            folder,
            device,
            spec=spec,
            weights="",
            data=data,
            recipe=recipe,
            seed=seed,
            workers=workers,
            checkpoint_every_steps=checkpoint_every_steps,
        )
    )


def _trained(
    folder: Path,
    device: str,
    *,
    spec: Spec,
    weights: str,
    data: DataSet,
    recipe: RecipeChoice,
    seed: int,
    workers: int | None,
    checkpoint_every_steps: int,
) -> Generator[str, None, TunedScore]:
    """Train the run of a trial to its end, from where it is, and score it."""
    begin = time.perf_counter()
    if isinstance(spec, TimmSpec):
        model = f"timm/{spec.name}"
    else:
        model = str(folder.resolve() / SPEC)  # the run names it, wherever the next call comes from
        with atomic_write(Path(model), SPEC_OUTPUT) as temporary:
            temporary.write_text(spec.to_json())
    changes = dict(recipe.changes, seed=seed)
    if torch.device(device).type == "cuda":
        changes.setdefault("grad_accum_steps", 0)  # the fewest passes that fit
    named = run_folder.resolve(RecipeChoice(recipe.source, changes), folder / RUN, data, weights)
    how: dict[str, Any] = dict(weights=weights, device=device, workers=workers)
    run_at = folder / RUN, model, data, named
    rows = train(*run_at, **how, checkpoint_every_steps=checkpoint_every_steps)
    yield from train_to(folder.name, rows)
    run = prepare(*run_at, **how)
    try:
        scores, correct = score_run(run)
    finally:
        run.close()
    yield f"{folder.name}: validation {run.metric.text(scores[run.metric.name])}"
    return TunedScore(
        spec=json.loads(spec.to_json()),
        seed=seed,
        score=scores[run.metric.name],
        loss=scores["loss"],
        correct=correct,
        epochs=len(run_folder.read_log(run.folder, run.metric)),
        seconds=time.perf_counter() - begin,
    )


KEYS = ("spec", "seed", "score", "correct")
TUNING = TrialKind(
    work=tune, result_type=TunedScore, noun="the score of a tuned network", keys=KEYS
)
TRAINING = TrialKind(
    work=train_network, result_type=TunedScore, noun="the score of a network", keys=KEYS
)


def tuning_recipe(images: int, like: Recipe | None = None) -> Recipe:
    """The recipe for tuning exchanged blocks with `images` training images.

    The paper has 30 epochs of a million images, a quarter of the MasterNet's, and a rate of 0.01
    for batches of 256 (`PAPER_TUNING`), by which new weights would not learn from few images. Here
    it is a quarter of the steps of `scratch` at half of its rate: of 0.015, 0.06 and 0.24 for 300
    digits the first is the worst, and neither of the others is better for all blocks (docs/log.md).
    Labels are not smoothed, as the teacher's are soft. The augmentation and all else that makes an
    input is that of `like`, the recipe of the MasterNet.
    """
    whole = scratch(images)
    steps = whole.epochs * max(1, images // whole.batch_size) / 4
    decay = PAPER_TUNING["weight_decay"]
    recipe = following(images, whole.batch_size, steps, lr=whole.lr / 2, weight_decay=decay)
    views = {name: getattr(like, name) for name in VIEW_FIELDS} if like else {}
    return replace(recipe, label_smoothing=0.0, **views)
