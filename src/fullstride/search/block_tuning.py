"""Trials that score a structure, by tuning exchanged blocks or training a network."""

import json
import time
from collections.abc import Collection, Mapping
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
from fullstride.study.scores import train_and_score
from fullstride.study.trials import Trial, TrialKind, Work
from fullstride.train import run_folder
from fullstride.train.recipes.choice import RecipeChoice, RunOptions, case_of
from fullstride.train.recipes.named import following, scratch
from fullstride.train.recipes.recipe import Recipe, saved_recipe

# In the folder of a trial: the run, the spec of its network, and its initial weights.
RUN, SPEC, START = "run", "spec.json", "start"
SPEC_OUTPUT = json_output("the spec of a network", "stem", "stages")
# Fields of the MasterNet's recipe that shape its input images; a block learns on the same images.
VIEW_FIELDS = tuple(field.name for field in fields(Augmentation))
VIEW_FIELDS += (
    "decoder", "draft", "background", "resolution", "crop", "fit", "score", "deterministic",
    "class_weights", "balanced_sampling", "precision", "channels_last",
)  # fmt: skip

Method = Literal["block", "full", "feature"]
BY_DEFAULT = RecipeChoice()

# Changes of `tuning_recipe` to the paper's numbers for a million images (arXiv:2006.14090, 4.2).
PAPER_TUNING: Mapping[str, Any] = dict(epochs=30.0, batch_size=256, lr=0.01, weight_decay=4e-5)


@dataclass(frozen=True, kw_only=True)
class TunedScore:
    """The validation scores of a trained network."""

    spec: Mapping[str, Any]  # JSON of a `NetSpec`
    seed: int
    score: float  # by the recipe's metric, by default top-1 in percent
    loss: float
    correct: str  # 1 or 0 for each image of the validation split, in order
    epochs: int
    seconds: float  # since the last start


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkTraining:
    """A training from random weights, with its run in the trial's folder."""

    spec: Spec  # has the resolution of training, unless the recipe sets it
    data: DataSet  # the test split is not used
    recipe: RecipeChoice = BY_DEFAULT
    seed: int = 0  # of new weights, and of the run
    workers: int | None = 0  # processes that decode images; None: automatic
    checkpoint_every_steps: int = 0  # for long epochs


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockTuning(NetworkTraining):
    """The tuning of a network that shares parts with the MasterNet.

    Without a source the recipe is `tuning_recipe` with the changes.
    """

    spec: NetSpec
    master: Path  # the bundle or the finished run of the MasterNet
    # Places with new weights although the design is the same, such as `stages.2`.
    again: Collection[str] = ()
    # `block` trains the layers that `exchanged` does not freeze, `full` all layers; `feature` is
    # `block` after `matched`, which brings new parts close to the MasterNet's maps.
    method: Method = "block"


def write_spec(spec: Spec, path: Path) -> str:
    """Write a spec to `path`; returns the path as the network's name in a run."""
    with atomic_write(path, SPEC_OUTPUT) as temporary:
        temporary.write_text(spec.to_json())
    return str(path)


def training_trial(folder: Path, training: NetworkTraining) -> Trial:
    """The trial of `train_network`, or of `tune` for a `BlockTuning`."""
    unseen = replace(training.data, test=training.data.test.subset([]))
    arguments = {"training": replace(training, data=unseen)}
    return Trial(folder=folder, result=folder / "result.json", arguments=arguments)


def tune(folder: Path, device: str, *, training: BlockTuning) -> Work[TunedScore]:
    """Exchange blocks of the MasterNet for blocks of the spec, tune them, and score the network.

    The loss is half cross-entropy and half the distance from the MasterNet's probabilities. The
    rest of the network is frozen, batch norms included. The paper does not say which layers train,
    nor by which loss; it calls the step "distillation" and the tuning "fine-tune".
    """
    data, recipe, seed = training.data, training.recipe, training.seed
    teacher = zoo.load(training.master)
    exchange = exchanged(teacher, training.spec, seed, again=training.again)
    start = folder.resolve() / START
    like = saved_recipe(dict(teacher.recipe), teacher.name) if teacher.recipe else None
    frozen = () if training.method == "full" else exchange.frozen
    changes = {**recipe.changes, "teacher": str(training.master.resolve()), "frozen": frozen}
    choice = RecipeChoice(recipe.source or tuning_recipe(len(data.train), like), changes)
    if not (start.exists() and (folder / RUN / run_folder.CHECKPOINT).exists()):
        if training.method == "feature":
            named = choice.resolve(case_of(data, str(start)))
            short, workers = replace(named.recipe, seed=seed), training.workers or 0
            exchange = matched(exchange, teacher, data, short, device, workers)
        exchange.bundle(teacher).save(start)
    job = replace(training, recipe=choice)
    score = yield from train_network(folder, device, training=job, weights=str(start))
    delete_weights(folder)
    return score


def delete_weights(folder: Path) -> None:
    """Delete all weights of a tuned network but its bundle: a search has hundreds of such folders.

    The bundle is enough to score a trial that was stopped before its result was written.
    """
    remove(folder / RUN / run_folder.CHECKPOINT)
    for bundle in (folder / RUN / run_folder.BEST, folder / START):
        remove(bundle / WEIGHTS)  # first, as a bundle is recognised by its other file
        remove(bundle)


def train_network(
    folder: Path, device: str, *, training: NetworkTraining, weights: str = ""
) -> Work[TunedScore]:
    """Train a network to the end, from its run's last state or from `weights`, and score it."""
    begin = time.perf_counter()
    spec, data, recipe = training.spec, training.data, training.recipe
    if isinstance(spec, TimmSpec):
        model = f"timm/{spec.name}"
    else:
        path = folder.resolve() / SPEC  # absolute, as the next call may have another directory
        model = write_spec(spec, path)
    changes = {**recipe.changes, "seed": training.seed}
    if torch.device(device).type == "cuda":
        changes.setdefault("grad_accum_steps", 0)  # the fewest passes that fit
    options = RunOptions(
        weights=weights,
        device=device,
        workers=training.workers,
        checkpoint_every_steps=training.checkpoint_every_steps,
    )
    named = run_folder.resolve(RecipeChoice(recipe.source, changes), folder / RUN, data, options)
    arguments = folder / RUN, model, data, named, options
    run, result, _ = yield from train_and_score(folder.name, arguments)
    yield f"{folder.name}: validation {run.metric.text(result.scores[run.metric.name])}"
    return TunedScore(
        spec=json.loads(spec.to_json()),
        seed=training.seed,
        score=result.scores[run.metric.name],
        loss=result.scores["loss"],
        correct=result.correct,
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

    By the paper's numbers (`PAPER_TUNING`) new weights would not learn from few images. This recipe
    has a quarter of the steps of `scratch`, at half of its learning rate: among 0.015, 0.06 and
    0.24 for 300 digits the first is the worst, and no other is better for all blocks (docs/log.md).
    Labels are not smoothed, as the teacher's are soft. Inputs are as in `like`, the MasterNet's
    recipe.
    """
    whole = scratch(images)
    steps = whole.epochs * max(1, images // whole.batch_size) / 4
    decay = PAPER_TUNING["weight_decay"]
    recipe = following(images, whole.batch_size, steps, lr=whole.lr / 2, weight_decay=decay)
    views = {name: getattr(like, name) for name in VIEW_FIELDS} if like else {}
    return replace(recipe, label_smoothing=0.0, **views)
