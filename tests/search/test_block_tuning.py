"""Tuning changes what is new and nothing else, goes on after a stop, and sees no test image."""

import json
import os
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forks import Fork

from fullstride.deploy.predict import predict
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.spec import NetSpec
from fullstride.search import block_tuning
from fullstride.search.block_tuning import (
    PAPER_TUNING,
    RUN,
    TRAINING,
    TUNING,
    BlockTuning,
    NetworkTraining,
    TunedScore,
    exchanged,
    maps_at,
    matched,
    training_trial,
    tuning_recipe,
)
from fullstride.study import scores
from fullstride.study.trials import Failure, LocalExecutor, run_trials
from fullstride.train import run_folder
from fullstride.train.recipes.choice import RecipeChoice
from fullstride.train.recipes.named import DIGITS, Case

SMALL = RecipeChoice("digits", dict(epochs=2, batch_size=16, resolution=16, lr=0.05))
QUICK = RecipeChoice("", dict(epochs=2, batch_size=16, lr=0.01))
SPEC = replace(zoo.spec("genet_tiny"), in_channels=1)
# stage 1 is deeper, so that only the input layers of stage 2 learn with it
DEEPER = replace(SPEC, stages=(SPEC.stages[0], replace(SPEC.stages[1], depth=2), *SPEC.stages[2:]))
TRAINED = ("stages.1.", "stages.2.0.branch.conv1.", "stages.2.0.shortcut.")


def finished(study, trial) -> TunedScore:
    steps = run_trials(study, [trial], LocalExecutor(("cpu",)))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            (result,) = end.value
            assert not isinstance(result, Failure), result
            return result


@pytest.fixture(scope="module")
def master(few_digits, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("master")
    finished(
        TRAINING, training_trial(folder, NetworkTraining(spec=SPEC, data=few_digits, recipe=SMALL))
    )
    return folder / RUN


def state_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(Bundle.load(path).net.state_dict())


def test_only_the_new_block_and_the_layers_that_read_it_learn(master, few_digits, tmp_path):
    trial = training_trial(
        tmp_path / "t", BlockTuning(master=master, spec=DEEPER, data=few_digits, recipe=QUICK)
    )
    result = finished(TUNING, trial)
    before, after = state_of(master / "bundle"), state_of(tmp_path / "t" / RUN / "bundle")
    start = exchanged(zoo.load(master), DEEPER, seed=0).net.state_dict()
    for name, value in after.items():
        learns = name.startswith(TRAINED)
        assert torch.equal(value, start[name]) != learns, name
        if not learns:
            assert torch.equal(value, before[name]), name
    assert NetSpec.from_json(result.spec) == DEEPER
    assert (result.seed, result.epochs) == (0, 2)


def test_a_tuned_network_is_the_plain_network_of_its_spec_and_scores_as_it_does(
    master, few_digits, tmp_path
):
    trial = training_trial(
        tmp_path / "t", BlockTuning(master=master, spec=DEEPER, data=few_digits, recipe=QUICK)
    )
    result = finished(TUNING, trial)
    bundle = Bundle.load(tmp_path / "t" / RUN / "bundle")
    net = zoo.create(str(tmp_path / "t" / "spec.json")).eval()
    net.load_state_dict(bundle.net.state_dict())
    images = few_digits.val
    pictures = [images.picture(index) for index in range(len(images))]
    predictions = [*predict(replace(bundle, net=net), pictures, top=1)]
    names = [few_digits.classes[target] for target in images.targets]
    right = [each.guesses[0].label == name for each, name in zip(predictions, names, strict=True)]
    assert result.correct == "".join(str(int(each)) for each in right)
    assert result.score == pytest.approx(100 * sum(right) / len(right))
    assert bundle.preprocessing.resolution == 16  # the views are the MasterNet's


def test_everything_learns_where_every_part_is_new_or_the_method_is_full(
    master, few_digits, tmp_path
):
    wide = SPEC.scaled(width=0.5)
    for name, spec, method in (("wide", wide, "feature"), ("full", DEEPER, "full")):
        trial = training_trial(
            tmp_path / name,
            BlockTuning(master=master, spec=spec, data=few_digits, recipe=QUICK, method=method),
        )
        finished(TUNING, trial)
        start = exchanged(zoo.load(master), spec, seed=0).net.state_dict()
        after = state_of(tmp_path / name / RUN / "bundle")
        assert not [key for key, value in after.items() if torch.equal(value, start[key])]
        config = json.loads((tmp_path / name / RUN / "run.json").read_text())
        assert (config["recipe"]["frozen"], config["recipe"]["teacher_share"]) == ([], 0.5)
        assert Path(config["recipe"]["teacher"]) == master


class Stop:
    """Raises KeyboardInterrupt at a call of `module.name`, or after it."""

    def __init__(self, monkeypatch, module, name: str, call: int, *, is_after: bool):
        self.function, self.left, self.is_after = getattr(module, name), call, is_after
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if not self.left and not self.is_after:
            raise KeyboardInterrupt
        result = self.function(*args, **kwargs)
        if not self.left:
            raise KeyboardInterrupt
        return result


STOPS = {
    "before the run": (scores, "train", 1, False),
    "in an epoch": (run_folder, "save_checkpoint", 1, True),
    "in the next epoch": (run_folder, "save_checkpoint", 2, True),
    "before the score": (scores, "score_run", 1, False),
    "before weights are deleted": (scores, "score_run", 1, True),
    "while weights are deleted": (block_tuning, "remove", 4, True),
    "before the result": (block_tuning, "delete_weights", 1, True),
}


def test_a_stopped_trial_goes_on_to_the_same_bits(master, few_digits, tmp_path, monkeypatch):
    how = dict(master=master, spec=DEEPER, data=few_digits, recipe=QUICK, checkpoint_every_steps=2)
    whole = finished(TUNING, training_trial(tmp_path / "whole", BlockTuning(**how)))
    weights = state_of(tmp_path / "whole" / RUN / "bundle")
    trial = training_trial(tmp_path / "stopped", BlockTuning(**how))
    for module, name, call, is_after in STOPS.values():  # of one trial, one after the other
        with monkeypatch.context() as patch:
            Stop(patch, module, name, call, is_after=is_after)
            with pytest.raises(KeyboardInterrupt):
                finished(TUNING, trial)
    result = finished(TUNING, trial)
    assert replace(result, seconds=0.0) == replace(whole, seconds=0.0)
    after = state_of(tmp_path / "stopped" / RUN / "bundle")
    assert all(torch.equal(value, weights[name]) for name, value in after.items())
    files = {path.relative_to(trial.folder).as_posix() for path in trial.folder.rglob("*")}
    assert "run/bundle/weights.safetensors" in files
    assert not files & {"start", "run/best", "run/checkpoint.pt"}
    stamp = trial.result.stat().st_mtime_ns
    finished(TUNING, trial)
    assert trial.result.stat().st_mtime_ns == stamp


def test_a_stopped_trial_goes_on_where_its_study_has_moved(
    master, few_digits, tmp_path, monkeypatch
):
    study, moved = tmp_path / "study", tmp_path / "moved"
    shutil.copytree(master, study / "master")

    def trials(folder: Path) -> dict:
        how = dict(spec=DEEPER, data=few_digits, recipe=QUICK, checkpoint_every_steps=2)
        tuning = BlockTuning(master=folder / "master", **how)
        whole = NetworkTraining(**{**how, "recipe": SMALL})
        return {
            TUNING: training_trial(folder / "tuning", tuning),
            TRAINING: training_trial(folder / "whole", whole),
        }

    for kind, trial in trials(study).items():
        with monkeypatch.context() as patch:
            Stop(patch, run_folder, "save_checkpoint", 1, is_after=True)
            with pytest.raises(KeyboardInterrupt):
                finished(kind, trial)
    study.rename(moved)
    for kind, trial in trials(moved).items():
        assert finished(kind, trial).epochs == 2
        config = json.loads((trial.folder / RUN / "run.json").read_text())
        assert config["model"] == str(trial.folder / "spec.json")
        assert str(study) not in json.dumps(config)


def tune_and_kill(_, trial, saves: int) -> None:
    """The process ends itself after so many checkpoints."""
    save, left = run_folder.save_checkpoint, [saves]

    def save_and_kill(folder, state):
        save(folder, state)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    run_folder.save_checkpoint = save_and_kill
    list(run_trials(TUNING, [trial], LocalExecutor(("cpu",))))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["block", "feature"])
def test_a_killed_trial_goes_on_to_the_same_bits(method, master, few_digits, tmp_path):
    how = dict(master=master, spec=DEEPER, data=few_digits, recipe=QUICK, checkpoint_every_steps=2)
    whole = finished(TUNING, training_trial(tmp_path / "whole", BlockTuning(method=method, **how)))
    trial = training_trial(tmp_path / "killed", BlockTuning(method=method, **how))
    for saves in (1, 2):
        assert Fork(tune_and_kill, trial, saves).end() == -signal.SIGKILL
        assert (tmp_path / "killed" / RUN / "checkpoint.pt").exists()
    result = finished(TUNING, trial)
    assert replace(result, seconds=0.0) == replace(whole, seconds=0.0)
    ours, theirs = (state_of(tmp_path / name / RUN / "bundle") for name in ("killed", "whole"))
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


def test_the_test_images_are_never_read(master, few_digits, tmp_path):
    def fail(name: str):
        raise AssertionError(name)

    data = replace(few_digits, test=replace(few_digits.test, read=fail, file=None))
    for study, trial in (
        (
            TRAINING,
            training_trial(tmp_path / "a", NetworkTraining(spec=SPEC, data=data, recipe=SMALL)),
        ),
        (
            TUNING,
            training_trial(
                tmp_path / "b", BlockTuning(master=master, spec=DEEPER, data=data, recipe=QUICK)
            ),
        ),
    ):
        result = finished(study, trial)
        scores = json.loads((trial.folder / RUN / "scores.json").read_text())
        assert [*scores["splits"]] == ["val"]
        assert result.epochs == 2


def test_trials_are_sent_to_other_processes(master, few_digits, tmp_path):
    trial = training_trial(tmp_path / "t", BlockTuning(master=master, spec=DEEPER, data=few_digits))
    assert pickle.loads(pickle.dumps(trial)).arguments["training"].spec == DEEPER


def test_a_trial_that_cannot_be_is_a_failure_in_one_line(master, few_digits, tmp_path):
    trial = training_trial(tmp_path / "t", BlockTuning(master=master, spec=SPEC, data=few_digits))
    with pytest.raises(AssertionError, match="nothing to train"):
        finished(TUNING, trial)


def test_the_recipe_is_the_papers_for_its_images_and_has_the_masternets_views():
    case = Case(images=1_231_167, has_weights=True)
    ours = tuning_recipe(case.images)
    paper = RecipeChoice(ours, PAPER_TUNING).resolve(case).recipe
    assert (paper.lr, paper.batch_size, paper.epochs, paper.weight_decay) == (0.01, 256, 30, 4e-5)
    assert ours.batch_size == 256
    assert ours.epochs <= 30
    few = tuning_recipe(1000, like=DIGITS)
    for name in ("resolution", "crop", "scale", "rotation_degrees", "hflip_prob"):
        assert getattr(few, name) == getattr(DIGITS, name)
    assert (few.optimizer, few.nesterov, few.momentum, few.weight_decay) == ("sgd", True, 0.9, 4e-5)
    assert few.precise_bn
    assert few.label_smoothing == 0


@pytest.mark.parametrize(("changes", "falls_to"), [(dict(depth=2), 0.7), (dict(width=72), None)])
def test_a_new_block_learns_the_masternets_maps_and_nothing_else_changes(
    changes, falls_to, master, few_digits
):
    """Maps of another width are compared by what an adapter makes of them, which is not kept."""
    bundle = zoo.load(master)
    stages = (SPEC.stages[0], replace(SPEC.stages[1], **changes), *SPEC.stages[2:])
    exchange = exchanged(bundle, replace(SPEC, stages=stages), seed=0)
    start = {name: value.clone() for name, value in exchange.net.state_dict().items()}
    x = torch.rand(8, 1, 16, 16, generator=torch.Generator().manual_seed(0))

    def distance(net) -> float:
        with torch.no_grad():
            ours, theirs = (maps_at(each, ["stages.1"], x)[0] for each in (net, bundle.net))
        return torch.nn.functional.mse_loss(ours, theirs).item()

    before = distance(exchange.net) if falls_to else 0.0
    recipe = replace(tuning_recipe(64), epochs=16, batch_size=16, resolution=16)
    after = matched(exchange, bundle, few_digits, recipe)
    if falls_to:
        assert distance(after.net) < falls_to * before
    for name, value in after.net.state_dict().items():
        assert torch.equal(value, start[name]) != name.startswith("stages.1."), name
    assert after.net.task_head is None
    assert after.frozen == exchange.frozen
