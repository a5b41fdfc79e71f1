"""Times data loading, training steps and whole runs, to train within a time limit."""

import math
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from fullstride.data.dataset import DataSet, Images
from fullstride.data.loader import Batches
from fullstride.io.console import count_of, print_note
from fullstride.io.records import write_json
from fullstride.io.writing import cores, json_output, scratch_folder
from fullstride.measure.environment import Environment, find_device
from fullstride.measure.protocols import timed_calls
from fullstride.tasks import find_task
from fullstride.tasks.task import Task
from fullstride.train import compute, final_weights, run_folder
from fullstride.train.autotune import BLOCK_S, choose_efficiency, timed_blocks, timed_steps
from fullstride.train.batches import (
    BatchOptions,
    endless,
    measurement_batches,
    recipe_in_epochs,
    repeat,
    training_batches,
)
from fullstride.train.loop import Pause, Trainer, build_trainer
from fullstride.train.optimizer import Course
from fullstride.train.prepare import PreparedRun, epochs_text, network_to_train, prepare
from fullstride.train.recipes.choice import DEFAULTS, LENGTHS, NamedRecipe, RecipeChoice, RunOptions
from fullstride.train.recipes.named import RECIPES
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import scoring_batches

DATA_BENCH = json_output("a benchmark of the data path", "recipe", "verdict", "waiting")
SIZES = 9  # images to read the size of
PACKED_SIDE = 400 / 224  # long side / resolution recommended for `fullstride data pack`


@dataclass(frozen=True, kw_only=True)
class DataLoading:
    """Rates of data loading without training, as medians of their samples."""

    workers: int
    images_per_s: float  # with the workers, after their start
    images_per_s_alone: float  # of one process, with waits for a disk
    images_per_cpu_s: float  # of one process, by its user and system time
    long_side: float  # pixels, median of a few images
    samples: tuple[float, ...] = field(repr=False)  # of images_per_s
    samples_alone: tuple[float, ...] = field(repr=False)
    samples_cpu: tuple[float, ...] = field(repr=False)
    skipped: dict[str, str]  # unreadable images -> reason


@dataclass(frozen=True, kw_only=True)
class TrainingSteps:
    """The rate of training steps on a ready batch, as the median of the samples."""

    batch: int
    images_per_s: float
    samples: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class DataBench:
    """Data loading compared with training steps."""

    loading: DataLoading
    steps: TrainingSteps
    device: str  # cpu or cuda
    cores: int  # available to this process
    resolution: int  # pixels per side of the network's input

    @property
    def ratio(self) -> float:
        return self.loading.images_per_s / self.steps.images_per_s

    @property
    def is_sequential(self) -> bool:
        """Whether one process decodes and trains alternately; a GPU trains while it decodes."""
        return self.device == "cpu" and not self.loading.workers

    @property
    def waiting(self) -> float:
        """The fraction of time that the network waits for images."""
        return 1 / (1 + self.ratio) if self.is_sequential else max(0.0, 1 - self.ratio)

    @property
    def workers_needed(self) -> int:
        """Workers needed, at the rate of one alone, or the lower rate of several sharing cores."""
        loading, busy = self.loading, min(self.loading.workers, self.max_busy_workers)
        each = min(loading.images_per_s_alone, loading.images_per_s / max(1, busy))
        return math.ceil(self.steps.images_per_s / each)

    @property
    def cores_needed(self) -> int:
        return math.ceil(self.steps.images_per_s / self.loading.images_per_cpu_s)

    @property
    def max_busy_workers(self) -> int:
        """Workers that saturate the cores; more than the cores if they wait for a disk."""
        loading = self.loading
        return max(1, int(self.cores * loading.images_per_cpu_s / loading.images_per_s_alone))

    def verdict(self) -> str:
        percent = f"{100 * self.waiting:.0f} % of the time"
        if self.ratio >= 1:
            enough = f"data loading is {self.ratio:.1f} times as fast as the training steps"
            sequential = f"; in the same process, it still takes {percent}"
            return enough + sequential if self.is_sequential else enough
        name = "network" if self.device == "cpu" else "GPU"
        workers = count_of(self.workers_needed, "worker")
        cores = count_of(self.cores_needed, "such core")
        return (
            f"the {name} will wait {percent}: it needs about {workers} (have "
            f"{self.loading.workers}) and {cores} (have {self.cores})"
        )

    def suggestions(self, recipe: Recipe, from_files: bool) -> list[str]:
        """Options for faster data loading, the cheapest first; none if it is fast enough.

        `from_files` says whether images are decoded from files.
        """
        if self.ratio >= 1:
            return []
        options = []
        workers = min(self.workers_needed, self.max_busy_workers)
        if workers > self.loading.workers:
            options.append(f"--workers {workers}")
        if from_files and recipe.decoder == "pillow":
            options.append(
                "--recipe.decoder opencv: faster, with slightly different pixels; "
                "pip install 'fullstride[fast]'"
            )
        small, long_side = math.ceil(self.resolution * PACKED_SIDE), self.loading.long_side
        if from_files and long_side > 1.5 * small:
            options.append(
                f"fullstride data pack --long-side {small}: images have {long_side:.0f} pixels here"
            )
        return options


def bench_data(
    model: str,
    data: DataSet,
    recipe: Recipe,
    *,
    task: Task | None = None,
    workers: int | None = 0,
    device: torch.device | str = "cpu",
    seconds: float = 5,
) -> DataBench:
    """Measure data loading in one process and with `workers`, and steps without a teacher.

    Each of the three takes about `seconds`. `task` None is classification, and `workers` None is
    the number that `train` would start.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds {seconds:g}: use a number above 0")
    device = find_device(device)
    recipe = compute.on_device(recipe, device)
    task = (task or find_task()).with_options(recipe).for_data(data)
    _, net, pre = network_to_train(model, task, data, recipe, None)
    how = BatchOptions(pre, device, workers or 0)
    per_epoch = len(training_batches(data, task, how, recipe))
    workers = compute.choose_workers(data.train, per_epoch, device) if workers is None else workers

    def batches(batch: int, workers: int) -> Batches:
        return measurement_batches(data, task, replace(how, workers=workers), recipe, batch)

    example = next(batches(8, 0).epoch(0))
    recipe = choose_efficiency(recipe.in_epochs(per_epoch), task, net, example, device)
    whole = replace(recipe, freeze_epochs=0.0)  # all parameters train, as after the first epochs
    learner = build_trainer(net.to(device).train(), task, whole, per_epoch)
    loading = measure_loading(batches, workers, device, seconds, data.train)
    batch = min(recipe.batch_size, len(data.train))
    samples = timed_steps(learner, repeat(example, batch), seconds)
    rate = statistics.median(samples)
    steps = TrainingSteps(batch=batch, images_per_s=rate, samples=tuple(samples))
    return DataBench(
        loading=loading, steps=steps, device=device.type, cores=cores(), resolution=pre.resolution
    )


def save_data_bench(
    path: Path,
    bench: DataBench,
    model: str,
    data: DataSet,
    recipe: Recipe,
    environment: Environment,
) -> None:
    """Write all samples, the recipe and the environment as JSON."""
    content = {
        "model": model,
        "data": data.where,
        "fingerprint": data.fingerprint,
        "recipe": recipe,
        **asdict(bench),
        "verdict": bench.verdict(),
        "waiting": bench.waiting,
        "suggestions": bench.suggestions(recipe, from_files=data.train.file is not None),
        "environment": environment,
    }
    write_json(path, DATA_BENCH, content)


def measure_loading(
    batches: Callable[[int, int], Batches],
    workers: int,
    device: torch.device,
    seconds: float,
    images: Images,
) -> DataLoading:
    """Measure rates of `batches(images per batch, workers)`, in one process and with workers."""
    stream = endless(batches(8, 0), 0)
    first = next(stream)  # imports the decoder and opens files
    (batch_s,), _ = timed_calls(lambda: next(stream), 1, device)
    block = round(len(first.x) / batch_s * BLOCK_S)  # images

    def samples(workers: int) -> tuple[list[float], list[float], dict[str, str]]:
        source = batches(block, workers)
        # Other epochs begin with other images, which are not in the file cache yet.
        stream = endless(source, 1 + workers)
        batch = len(next(stream).x)
        # Batches of several workers arrive together.
        calls = max(1, workers) * max(1, round(block / batch))
        for _ in range(calls):  # until all workers have started
            next(stream)
        blocks = timed_blocks(lambda: next(stream), calls, device, seconds)
        by_clock, by_cpu = ([calls * batch / s for s in each] for each in zip(*blocks, strict=True))
        return by_clock, by_cpu, source.skipped

    alone, cpu, skipped = samples(0)
    parallel = alone
    if workers:
        parallel, _, more = samples(workers)
        skipped = skipped | more
    return DataLoading(
        workers=workers,
        images_per_s=statistics.median(parallel),
        images_per_s_alone=statistics.median(alone),
        images_per_cpu_s=statistics.median(cpu),
        long_side=long_side(images),
        samples=tuple(parallel),
        samples_alone=tuple(alone),
        samples_cpu=tuple(cpu),
        skipped=skipped,
    )


def long_side(images: Images) -> float:
    """The median long side in pixels of a few images."""
    few = images.spaced(SIZES).readable()
    return statistics.median([max(picture.size) for _, picture in few] or [0])


MEASURE_S = 1.5  # for timing steps, and scores
# For timing the steps of a run with a time limit: a share of that time, at most so long. Our own.
MEASURE_SHARE, MOST_MEASURE_S = 1 / 100, 10.0
WARM_UP_S = 3.0  # limit for starting workers and choosing kernels
# On a CPU, a step of more than PART images is timed by PART of them if these take SLOW_S: then the
# layers take nearly all of the time, and it is in proportion to the images.
PART, SLOW_S = 16, 1.0
# In training: steps that start workers and choose kernels, then bounds of the timed steps.
UNTIMED_STEPS, TIMED_STEPS, TIMED_S, MOST_TIMED_S = 3, 20, 10.0, 30.0


# Called once with the mean seconds of the first steps, the epoch and the step.
Report = Callable[[float, int, int], object]

# The pace of training is compared with the time left after each WINDOW of the time, and the course
# is changed if the rest would take LATE times the time left, by the faster of the last two windows:
# a short disturbance changes nothing, nor less than WINDOW of the steps. Our own numbers.
WINDOW, LATE = 1 / 20, 1.2


class Pace:
    """Keeps the time given to a run, a `Pause` of `loop.run_epochs`.

    If the last steps were so slow that training would end late, the rest of the schedule is passed
    through in fewer steps; and in more again, up to the recipe's, if they were fast.
    """

    def __init__(self, run: PreparedRun, pause: Pause, report: Report | None = None):
        self.run, self.pause, self.report = run, pause, report
        self.first, self.first_s = 0, 0.0  # steps to report, and their seconds
        deadline = None if run.context.is_distributed else run.deadline
        self.end_s = math.inf if deadline is None else deadline
        self.window_s = max(MEASURE_S, WINDOW * (self.end_s - time.perf_counter()))
        self.untimed, self.work, self.seconds, self.before = UNTIMED_STEPS, 0.0, 0.0, 0.0
        self.last: float | None = None  # time of the last call
        self.scores, self.scores_s = 0, 0.0

    def __call__(self, course: Course, done: int, step_s: float) -> Course | None:
        chosen, self.untimed, now = course, self.untimed - 1, time.perf_counter()
        epochs, index = divmod(done - 1, self.run.steps_per_epoch)
        if self.last is not None and index == 0:
            self.scores += epochs % self.run.resolved.score_every_epochs == 0
            self.scores_s += now - self.last - step_s
        self.last = now
        if self.untimed < 0:
            epoch = course.at(done - 1) // self.run.steps_per_epoch
            self.work += self.run.work[int(epoch)]
            self.seconds += step_s
            self.first, self.first_s = self.first + 1, self.first_s + step_s
            enough = self.first >= TIMED_STEPS and self.first_s >= TIMED_S
            if self.report and (enough or self.first_s >= MOST_TIMED_S):
                self.report(self.first_s / self.first, int(epoch), index + 1)
                self.report = None
        if self.seconds >= self.window_s and done < course.end:
            pace = self.seconds / self.work
            if self.before:
                chosen = self.follow(course, done, min(self.before, pace))
            self.work, self.seconds, self.before = 0.0, 0.0, pace
        return self.pause(course, done, step_s) if chosen is course else chosen

    def follow(self, course: Course, done: int, step_s: float) -> Course:
        """The course that ends in time, if a step at the whole resolution takes `step_s`."""
        epoch, step = divmod(course.at(done), self.run.steps_per_epoch)
        now_s = step_s * self.run.work[int(epoch)]
        images = self.scores * len(self.run.data.val)  # scored so far
        image_s = self.scores_s / images if images else None
        whole_s, end_s = self.run.seconds_left(now_s, int(epoch), step, image_s)
        data = self.run.data
        end_s *= 1 + end_images(self.run.recipe, data) / max(1, len(data.val) + len(data.test))
        left_s = self.end_s - time.perf_counter() - end_s
        slower = whole_s / course.stride / max(left_s, 1e-9)
        most = course.whole - course.at(done)
        steps = max(1, int(min(most, (course.end - done) / slower)))
        if 1 / LATE <= slower <= LATE or abs(done + steps - course.end) < WINDOW * course.end:
            return course
        before, now = (end / self.run.steps_per_epoch for end in (course.end, done + steps))
        print_note(
            f"{self.run.folder}: a step takes {now_s:.3g} s now: to keep the time given, training "
            f"ends after {epochs_text(now)} epochs, not {epochs_text(before)}"
        )
        return course.turned(done, done + steps)


def end_images(recipe: Recipe, data: DataSet) -> int:
    """The images that a run computes at its end for precise statistics and a soup."""
    images, measures = len(data.val), recipe.measures_statistics
    if measures:
        images += min(len(data.train), final_weights.MOST_IMAGES)
    return images * (recipe.soup + measures)


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """The seconds that the parts of a training take on one device."""

    steps: int = 0  # per epoch
    step_s: float = 0.0  # a step with its wait for images, the mean over the schedule
    score_every: int = 1  # epochs between scores and checkpoints
    image_s: float = 0.0  # scoring an image
    val_s: float = 0.0  # scoring the validation split
    precise_s: float = 0.0  # measuring precise batch statistics, and scoring with them
    save_s: float = 0.0  # a checkpoint and a bundle
    start_s: float = 0.0  # building the network, starting workers and choosing kernels

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch, with its share of scoring and checkpoints."""
        return self.steps * self.step_s + (self.val_s + self.save_s) / self.score_every

    def seconds(self, epochs: float) -> float:
        """Seconds of a run with this many epochs; for 0, of a linear probe."""
        if not epochs:
            return self.start_s + self.precise_s  # the same images, once each
        return self.start_s + epochs * self.epoch_s + self.precise_s + 2 * self.val_s


def recipe_within(
    choice: RecipeChoice,
    deadline: float | None,
    folder: Path,
    model: str,
    data: DataSet,
    options: RunOptions = DEFAULTS,
    context: compute.DistributedContext = compute.SINGLE_PROCESS,
) -> NamedRecipe:
    """Resolve `choice` with at most as many epochs as end by `deadline`.

    Steps, scores and a checkpoint are measured for about 4 s beside `folder`, and the steps for a
    hundredth of the time, up to 10 s. Numbers that depend on the epochs, such as the batch and the
    rate of `finetune`, are chosen accordingly. A resumable run in `folder` keeps its recipe.
    `deadline` applies to the whole run, by `time.perf_counter`, and None is no limit; in training,
    `Pace` keeps it. The other arguments are as in `run.train`.

    Raises ValueError, in one line, for a length beside the time limit, for several processes, if
    not even a tenth of an epoch fits, and for a folder among the images.
    """
    run_folder.check_folder(folder)
    data.check_apart(folder)
    config = run_folder.resumable_config(folder)
    if config and deadline is not None:  # the length may be what fitted the time
        lengths = {name: config.recipe[name] for name in LENGTHS}
        choice = replace(choice, changes={**lengths, **choice.changes})
    named = replace(run_folder.resolve(choice, folder, data, options), deadline=deadline)
    is_name = isinstance(choice.source, str) and choice.source in RECIPES
    if config and is_name and not named.name and context.is_rank_zero:
        print_note(f"{folder} keeps its own recipe, which has no name, not {choice.source}")
    if config or deadline is None:
        return named
    if context.is_distributed:
        raise ValueError("a time limit is measured in one process: give --epochs with torchrun")
    if length := next((name for name in LENGTHS if choice.changes.get(name)), None):
        raise ValueError(
            f"{length} {choice.changes[length]:g} and a time both set the length of training: "
            "leave one of them out"
        )
    allowed_s = MEASURE_SHARE * (deadline - time.perf_counter())
    steps_s = min(max(MEASURE_S, allowed_s), MOST_MEASURE_S)
    times = time_training(folder, model, data, named, options, steps_s)
    scored_s = 2 * times.val_s + len(data.test) * times.image_s
    if named.recipe.linear_probe:
        scored_s += times.precise_s + times.val_s  # the same images
    scored_s += end_images(named.recipe, data) * times.image_s
    left_s = deadline - time.perf_counter() - times.start_s - scored_s - 3 * times.save_s
    whole, epochs = recipe_in_epochs(data, named.recipe).epochs, left_s / times.epoch_s
    if epochs >= whole:
        return named
    if epochs < 0.1:
        more_s = 0.1 * times.epoch_s - left_s
        raise ValueError(
            "the time is too short: a tenth of an epoch, with its scores, needs "
            f"{math.ceil(more_s / 6) / 10:g} minutes more"
        )
    shorter = replace(choice, changes={**choice.changes, "epochs": math.floor(10 * epochs) / 10})
    return replace(run_folder.resolve(shorter, folder, data, options), deadline=deadline)


def time_training(
    folder: Path,
    model: str,
    data: DataSet,
    named: NamedRecipe,
    options: RunOptions,
    steps_s: float | None = None,
) -> RunTimes:
    """Time the steps of a run for `steps_s`, by default `MEASURE_S`, and the rest for about 3 s.

    The run is in a scratch folder beside `folder`.
    """
    begin = time.perf_counter()
    with scratch_folder(folder) as scratch:
        run = prepare(scratch / folder.name, model, data, named, options)
        return time_run(run, begin, MEASURE_S if steps_s is None else steps_s)


def time_run(run: PreparedRun, begin: float, steps_s: float) -> RunTimes:
    """Time a run whose preparation began at `begin`, and close it."""
    try:
        run.net.to(run.device).train()
        recipe = replace(run.resolved, freeze_epochs=0.0)  # so that all parameters train
        learner = build_trainer(run.net, run.task, recipe, len(run.batches), run.teacher)
        build_s = time.perf_counter() - begin
        step_s, first_s = time_steps(learner, run, steps_s)
        begin = time.perf_counter()
        run_folder.save_checkpoint(run.folder, learner.state(1, 0, []))
        run.bundle(run.net, {}).save(run.folder / run_folder.BEST)
        save_s = time.perf_counter() - begin
        image_s = time_scoring(run)
    finally:
        run.close()
    train, val = len(run.data.train), len(run.data.val)
    return RunTimes(
        steps=len(run.batches),
        step_s=step_s,
        score_every=run.resolved.score_every_epochs,
        image_s=image_s,
        val_s=image_s * val,
        precise_s=image_s * (min(train, final_weights.MOST_IMAGES) + val),
        save_s=save_s,
        start_s=build_s + max(0.0, first_s - step_s),
    )


def time_steps(learner: Trainer, run: PreparedRun, steps_s: float) -> tuple[float, float]:
    """Measure the seconds of a step for `steps_s`, with its wait for images, and of the first step.

    Slow steps on a CPU are timed by `PART` of their images, which takes less memory, too. If images
    grow, steps are timed at the whole resolution, and the mean over the schedule follows by pixels.
    """
    grows = run.resolved.grow_from is not None
    epoch, mean_work = (len(run.work), statistics.mean(run.work)) if grows else (0, 1.0)
    # timing starts once the batches that workers prepared during their start are used up
    in_parts = learner.device.type == "cpu" and not run.resolved.unlabelled_batch
    untimed, total = 1 + 2 * run.workers, max(1, learner.divergence.total)
    part, seconds, first = slice(PART if in_parts else None), list[float](), 1
    keeping = compute.keep_freed_memory(learner.device)  # as training does
    with keeping, learner.numerics(), closing(endless(run.batches, epoch)) as batches:
        start = begin = timed = time.perf_counter()
        for number, (x, targets, indices) in enumerate(batches):
            loaded, some = time.perf_counter(), indices[part]
            # the loss waits for the device
            learner.step(x[part], targets[part], number % total, some).item()
            end = time.perf_counter()
            if number == 0 and in_parts and end - loaded < SLOW_S:
                part, untimed = slice(None), untimed + 1  # of another size, chooses kernels again
            share = len(x) / len(x[part])  # 1 for a first step that was quick
            seconds.append(loaded - begin + share * (end - loaded))
            begin = end
            if number < untimed and begin - start <= WARM_UP_S:
                first, timed = number + 1, begin
            elif number >= first and begin - timed >= steps_s:
                break
    return mean_work * statistics.mean(seconds[first:]), seconds[0]


@torch.inference_mode()
def time_scoring(run: PreparedRun) -> float:
    """Measure the seconds to score an image, after the first batch if there are more.

    It is a validation image, or without any a test or training image. On a CPU, `PART` of the
    images of each batch are scored.
    """
    run.net.eval()
    part, seconds = slice(PART if run.device.type == "cpu" else None), list[float]()
    others = run.data.test or run.data.train
    source = run.val or scoring_batches(run.task, others, run.scoring)
    with closing(source), closing(source.epoch(0)) as batches:
        start = begin = time.perf_counter()
        for number, (x, targets, _) in enumerate(batches):
            loaded = time.perf_counter()
            run.task.score().update(run.net(x[part]), targets[part])
            end = time.perf_counter()
            seconds.append((loaded - begin) / len(x) + (end - loaded) / len(x[part]))
            begin = end
            if number == 0:
                start = end  # workers have started
            elif end - start > MEASURE_S / 2:
                break
    return statistics.mean(seconds[len(seconds) > 1 :] or [0.0])
