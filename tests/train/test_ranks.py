"""A run of several processes equals a run of one, and reports an error once."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import two_processes
from PIL import Image
from torch import nn
from torchruns import TORCHRUN, in_two, main_in_two, messages, run_two, torchrun

from fullstride import cli
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.tasks import find_task
from fullstride.train.compute import (
    SINGLE_PROCESS,
    DistributedContext,
    init_distributed,
    share_batch_statistics,
)
from fullstride.train.loop import build_trainer
from fullstride.train.recipes.recipe import Recipe

# The processes find each other whether or not a name server knows this machine.
TORCHRUN += ["--local-addr", "localhost"]
TRAIN = ["train", "digits", "--model", "genet_tiny", "--recipe.warmup-epochs", "0"]
TRAIN += ["--recipe.resolution", "16"]


@pytest.mark.slow
def test_two_processes_have_the_losses_the_average_and_the_score_of_one(tmp_path):
    two_processes.main(str(tmp_path / "one"))
    main_in_two(two_processes.main, tmp_path / "two")
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one", "two"))
    assert two[0] == pytest.approx(one[0], rel=1e-6)  # losses, which are of float32
    assert two[1]["images"] == 21  # which two processes cannot halve
    assert two[1] == pytest.approx(one[1], rel=1e-6)  # scores are of float32
    assert two[2] == pytest.approx(one[2], rel=1e-9, abs=1e-9)  # weights of the averages
    # a thread of the group that is still there when the process ends may abort it
    assert not [thread for thread in two[3] if "gloo" in thread]


@pytest.fixture
def group(tmp_path):
    """This process as the only one of a group, in a run that counts two."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DistributedContext(0, 2)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # of DDP, which the command filters
@pytest.mark.parametrize("passes", [1, 4])
def test_gradients_of_a_batch_are_averaged_over_processes_once(group, passes):
    net = zoo.create("resnet_rs_tiny", in_channels=1, resolution=16)
    recipe = Recipe(epochs=1, batch_size=16, lr=0.1, grad_accum_steps=passes)
    learner = build_trainer(net.train(), find_task(), recipe, 4, None, group)
    elements = []

    def count(_, bucket):
        elements.append(bucket.buffer().numel())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    learner.forward.register_comm_hook(None, count)
    learner.step(torch.rand(16, 1, 16, 16), torch.arange(16) % 10, 0)
    assert sum(elements) == sum(parameter.numel() for parameter in net.parameters())


def test_batch_statistics_of_all_processes_need_a_gpu(group):
    net = zoo.create("resnet_rs_tiny", in_channels=1, resolution=16)
    recipe = Recipe(epochs=1, batch_size=16, lr=0.1, sync_bn=True)
    with pytest.raises(ValueError, match="recipe.sync_bn is for GPUs: leave it out"):
        build_trainer(net, find_task(), recipe, 4, None, group)
    build_trainer(net, find_task(), recipe, 4, None, SINGLE_PROCESS)  # one process has them anyway


@pytest.mark.parametrize("name", ["tresnet_tiny", "timm/test_resnet", "timm/test_efficientnet"])
def test_norms_that_share_statistics_compute_and_are_named_as_before(name):
    net = zoo.create(name, classes=7).eval()
    x, before = torch.rand(2, 3, 64, 64), net.state_dict()
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():
        expected = net(x)
        share_batch_statistics(net, torch.device("cuda"))
        assert torch.equal(net(x), expected)  # in evaluation, so the activations are kept too
    shared = [module for module in net.modules() if isinstance(module, nn.SyncBatchNorm)]
    assert len(shared) == len(norms) > 3
    assert not any(isinstance(module, nn.BatchNorm2d) for module in net.modules())
    assert list(net.state_dict()) == list(before)
    assert {id(each) for each in net.parameters()} >= {id(norm.weight) for norm in norms}


def wait_for_rank_one(done: Path) -> None:
    """Rank 1 comes when rank 0 has waited, after 20 s at the latest."""
    with init_distributed(torch.device("cpu"), 3) as (context, _):
        began = time.monotonic()
        while context.rank and not done.exists() and time.monotonic() < began + 20:
            time.sleep(0.05)
        try:
            context.mean(torch.ones(1))
        except RuntimeError:
            waited = time.monotonic() - began
            print(f"rank {context.rank} waited {waited}")
        done.touch()


@pytest.mark.slow
def test_a_process_waits_for_another_one_as_long_as_it_is_told_to(tmp_path):
    status, output, errors = in_two(wait_for_rank_one, tmp_path / "done")
    assert status == 0, errors
    assert 2 < float(output.partition("rank 0 waited ")[2].split()[0]) < 15
    refused = pytest.raises(ValueError, match="ddp_timeout_s 0: use a number of seconds above 0")
    with refused, init_distributed(torch.device("cpu"), 0):
        pass


@pytest.mark.slow
def test_torchrun_needs_no_other_flag_and_every_image_is_scored_once(tmp_path, capsys):
    out = tmp_path / "run"
    words = ["-m", "fullstride", *TRAIN, "--recipe.epochs", "2", "--out", str(out)]
    run = torchrun(*words)
    lines = run.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("epoch")] == ["1/2", "2/2"]
    assert Bundle.load(out / "bundle").scores["test"]["images"] == 500
    assert cli.run(words[2:]) == 0
    # one process reads what two have written
    assert capsys.readouterr().out.splitlines()[-1] == lines[-1]


@pytest.mark.slow
def test_a_batch_that_two_processes_cannot_halve_is_refused_in_one_line(tmp_path):
    out = tmp_path / "run"
    status, _, errors = run_two(*TRAIN, "--recipe.batch-size", "33", "--out", str(out))
    assert status != 0
    (line,) = messages(errors)
    assert "recipe.batch_size 33 of 1037 images" in line
    assert not out.exists()


@pytest.mark.slow
def test_an_error_of_one_process_or_of_all_is_reported_once(tmp_path):
    for folder, name in enumerate(("train/a", "train/b", "val/a", "val/b")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(8 if "train" in name else 1):
            image = Image.new("RGB", (9, 9), (number, folder, 0))
            image.save(tmp_path / "photos" / name / f"{number}.png")
    # the only validation image of the second process
    (tmp_path / "photos/val/b/0.png").write_bytes(b"words")
    words = ["train", str(tmp_path / "photos"), "--model", "genet_tiny", "--recipe.resolution"]
    words += ["16", "--recipe.warmup-epochs", "0", "--recipe.batch-size", "4"]
    words += ["--out", str(tmp_path / "run")]
    status, _, errors = run_two(*words, "--recipe.steps", "2")
    assert status == 0, errors
    assert errors.count("skipped 1 unreadable: val/b/0.png") == 1
    assert "deprecated" not in errors
    status, _, errors = run_two(*words, "--recipe.steps", "3")
    assert status != 0
    (line,) = messages(errors)
    assert "recipe.steps is 2 there and 3 now" in line


@pytest.mark.slow
def test_a_killed_process_ends_all_within_a_minute_and_the_run_resumes(tmp_path):
    out = tmp_path / "run"
    words = ["-m", "fullstride", *TRAIN, "--recipe.epochs", "5", "--out", str(out)]
    run = subprocess.Popen(
        [*TORCHRUN, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while not (out / "checkpoint.pt").exists():
        assert run.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    killed = time.monotonic()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, errors = run.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert run.returncode != 0
    assert "SIGKILL" in errors or "Signal 9" in errors
    epochs = len((out / "log.jsonl").read_text().splitlines())
    assert 0 < epochs < 5
    assert not (out / "bundle").exists()
    status, output, errors = run_two(*words[2:])
    assert status == 0, errors
    assert output.count("epoch ") == 5
