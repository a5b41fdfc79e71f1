"""Trials that score a structure, by tuning exchanged blocks or training a network."""

import json
import time
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.data.dataset import DataSet
from fullstride.data.transforms.crop import Augmentation
from fullstride.io.writing import atomic_write, json_output, remove
from fullstride.nets import zoo
from fullstride.nets.backbone import Backbone, Masks, Spec
from fullstride.nets.bundle import WEIGHTS, Bundle
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec, TimmSpec
from fullstride.study.scores import train_and_score
from fullstride.study.trials import Trial, TrialKind, Work
from fullstride.tasks.classify import Classify
from fullstride.train import run_folder
from fullstride.train.batches import BatchOptions, recipe_in_epochs, training_batches
from fullstride.train.loop import Epoch, train_epochs
from fullstride.train.recipes.choice import RecipeChoice, RunOptions, case_of
from fullstride.train.recipes.named import following, scratch
from fullstride.train.recipes.recipe import Recipe, saved_recipe

# Super-blocks of a trained network are exchanged, and new ones are fitted to its maps.

# A part is the stem, a stage, the head's convolution or the classifier. All parts but the
# classifier are places of a search, such as `stem`, `stages.2` and `head`; GENet
# (arXiv:2006.14090) calls them the super-blocks of a MasterNet.

HEAD, CLASSIFIER = "head.conv", Network.classifier


@dataclass(frozen=True, eq=False)
class Exchange:
    """A network with some new layers. Layers are named by the paths of modules."""

    net: Network
    fresh: tuple[str, ...]  # layers with random weights; they train
    # layers with the MasterNet's weights that read the output of a new part; they train too
    adapted: tuple[str, ...]
    frozen: tuple[str, ...]  # other layers, with the MasterNet's weights and batch statistics

    def bundle(self, master: Bundle) -> Bundle:
        """The network as a start for training, with the other fields of `master`."""
        source = f"{master.name} with new weights in {', '.join(self.fresh)}"
        untrained: dict[str, Any] = dict(scores={}, recipe={}, temperature=1.0, task_state={})
        return replace(master, net=self.net, source=source, **untrained)


class Part(NamedTuple):
    """A sequence of layers of a network, as in its spec."""

    path: str
    c_in: int
    design: Any  # equal designs with equal `c_in` have equal shapes

    @property
    def place(self) -> str:
        return "head" if self.path == HEAD else self.path


def exchanged(master: Bundle, spec: NetSpec, seed: int, *, again: Collection[str] = ()) -> Exchange:
    """The network of `spec`, with the weights of `master` in every part that both have.

    Parts that differ are new, with random weights by `seed`, and so are the places `again`: as a
    control, a place with the same design shows the cost of new weights alone. Layers that read a
    new part learn with it: the first convolution, the batch norm after it, and the projection of
    the shortcut. Their weights are random too if their input width changes, else the weights of
    `master`. A kernel is never sliced. All other layers are frozen.

    The paper says that a super-block is exchanged and tuned, but not what happens to the layers
    that read it, whose shapes change with its width; that part is ours.
    """
    parts = parts_of(spec)
    before = {part.path: part for part in parts_of(cast(NetSpec, master.net.spec))}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Network(spec)
    fresh, adapted = list[str](), list[str]()
    follows_new = False
    for part in parts:
        earlier = before.get(part.path)
        is_new = earlier is None or earlier.design != part.design or part.place in again
        if is_new:
            fresh.append(part.path)
        elif earlier and earlier.c_in != part.c_in:
            fresh += input_layers(net, part.path)
        elif follows_new:
            adapted += input_layers(net, part.path)
        follows_new = is_new
    state, old = net.state_dict(), master.net.state_dict()
    net.load_state_dict({name: old[name] for name in state if not is_below(name, fresh)}, False)
    frozen = tuple(untouched(net, (*fresh, *adapted)))
    return Exchange(net.eval(), tuple(fresh), tuple(adapted), frozen)


def parts_of(spec: NetSpec) -> list[Part]:
    """The parts from the input to the classifier, which is the last."""
    parts, width = [Part("stem", spec.in_channels, (spec.stem, spec.stem_width))], spec.stem_width
    for number, stage in enumerate(spec.stages):
        parts.append(Part(f"stages.{number}", width, stage))
        width = stage.width
    if spec.head_width:
        parts.append(Part(HEAD, width, spec.head_width))
    return [*parts, Part(CLASSIFIER, spec.head_width or width, spec.classes)]


def input_layers(net: Network, path: str) -> list[str]:
    """The layers of a part that read its input."""
    if not path.startswith("stages."):
        return [path]
    block = f"{path}.0"
    first, _ = next(net.get_submodule(f"{block}.branch").named_children())
    layers = [f"{block}.branch.{first}", f"{block}.shortcut"]
    return [each for each in layers if has_parameters(net.get_submodule(each))]


def is_below(name: str, paths: Collection[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def untouched(
    module: nn.Module, paths: Collection[str], at: str = ""
) -> Generator[str, None, None]:
    """The shortest paths that cover all parameters of `module` except at and below `paths`."""
    for child, part in module.named_children():
        path = f"{at}.{child}" if at else child
        if is_below(path, paths) or not has_parameters(part):
            continue
        if any(is_below(each, [path]) for each in paths):
            yield from untouched(part, paths, path)
        else:
            yield path


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


LENGTH = 0.25  # of feature matching, as a share of the tuning recipe's epochs


@dataclass(frozen=True)
class MatchMaps(Classify):
    """The mean squared distance to the MasterNet's maps, in place of a loss of logits."""

    name: ClassVar[str] = "match_maps"
    places: tuple[str, ...] = ()

    def training_module(self, net: Backbone) -> nn.Module:
        return AdaptedMaps(cast(Network, net), self.places)

    def loss(self, outputs: Tensor, targets: Any, teacher: Tensor | None = None) -> Tensor:
        assert teacher is not None
        return F.mse_loss(outputs.float(), teacher)


class AdaptedMaps(nn.Module):
    """The maps at `places` through the network's `task_head`: (N, C, H, W) -> (N, D)."""

    def __init__(self, net: Network, places: Sequence[str]):
        super().__init__()
        self.net, self.places = net, places

    def forward(self, x: Tensor, masks: Masks | None = None) -> Tensor:
        adapters = cast(nn.ModuleList, self.net.task_head)
        maps = maps_at(self.net, self.places, x)
        return flat(adapter(each) for adapter, each in zip(adapters, maps, strict=True))


def matched(
    exchange: Exchange,
    master: Bundle,
    data: DataSet,
    recipe: Recipe,
    device: torch.device | str = "cpu",
    workers: int = 0,
) -> Exchange:
    """`exchange` after the output of each new part has learned the MasterNet's maps.

    A 1 x 1 convolution adapts maps of another width, and is dropped at the end. Layers after the
    last new part do not train. The paper cites such feature distillation (DNA, arXiv:1911.13053)
    as a baseline, and does not say whether its own method uses it.
    """
    net, own = exchange.net, cast(Network, master.net)
    order = [part.path for part in parts_of(net.spec)[:-1]]
    of_both = {*exchange.fresh} & {part.path for part in parts_of(own.spec)}
    places = [path for path in order if path in of_both]  # new parts, except for the classifier
    if not places:
        return exchange
    side = recipe.resolution or master.preprocessing.resolution
    pre = replace(master.preprocessing, resolution=side, draft=recipe.draft is not False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net.task_head = adapters_between(net, own, places, torch.zeros(1, pre.channels, side, side))
    later = [*order[order.index(places[-1]) + 1 :], CLASSIFIER]
    behind = [path for path in (*exchange.fresh, *exchange.adapted) if is_below(path, later)]
    teacher = own.to(device).eval().requires_grad_(False)

    def maps(x: Tensor, epoch: int, indices: Tensor) -> Tensor:
        with torch.no_grad():
            return flat(maps_at(teacher, places, x)).float()

    whole = recipe_in_epochs(data, recipe)
    short = replace(
        whole,
        epochs=LENGTH * whole.epochs,
        warmup_epochs=LENGTH * whole.warmup_epochs,
        frozen=(*exchange.frozen, *behind),
        teacher="",
        drop_path=0.0,
        dropout=0.0,
        pad_channels=False,
        efficiency="plain",
        grad_accum_steps=max(1, whole.grad_accum_steps),
    )
    batches = training_batches(data, Classify(), BatchOptions(pre, device, workers), short)
    try:
        task = MatchMaps(places=tuple(places))
        *_, epoch = train_epochs(net.to(device), task, batches, short, teacher=maps)
    finally:
        batches.close()
    assert isinstance(epoch, Epoch)
    matching = cast(Network, epoch.average.cpu().requires_grad_(True))
    matching.task_head = None
    return replace(exchange, net=matching)


def maps_at(net: Network, places: Sequence[str], x: Tensor) -> list[Tensor]:
    """The outputs of the parts `places`, in order: (N, C, H, W) each. Later parts do not run."""
    maps = list[Tensor]()
    for part in parts_of(net.spec):
        if len(maps) == len(places):
            break
        x = net.get_submodule(part.path)(x)
        if part.path in places:
            maps.append(x)
    return maps


def flat(maps: Iterable[Tensor]) -> Tensor:
    return torch.cat([each.flatten(1) for each in maps], 1)


@torch.no_grad()
def adapters_between(
    net: Network, own: Network, places: Sequence[str], blank: Tensor
) -> nn.ModuleList:
    """A module for each place that gives the network's map the shape of the MasterNet's map."""
    adapters = nn.ModuleList()
    both = (maps_at(each.eval(), places, blank) for each in (net, own))
    for ours, theirs in zip(*both, strict=True):
        same = ours.shape[1] == theirs.shape[1]
        adapters.append(nn.Identity() if same else nn.Conv2d(ours.shape[1], theirs.shape[1], 1))
    return adapters


# The trials.

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
