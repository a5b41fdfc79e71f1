"""Formats results as lines for a terminal."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fullstride.io.console import count_of, first_names, verb_of
from fullstride.measure.budget import conditions
from fullstride.nets.efficiency import short_precision
from fullstride.report.console_tables import interval, three_digits

if TYPE_CHECKING:
    from pathlib import Path

    from fullstride.deploy.offline import Summary
    from fullstride.latency.calibrate import Calibration
    from fullstride.latency.devices import NamedEstimate
    from fullstride.latency.network_times import Estimate
    from fullstride.latency.profiles import Profile
    from fullstride.latency.select import Choice, Option, Selection
    from fullstride.measure.cost import NetworkCost
    from fullstride.measure.environment import Environment
    from fullstride.measure.max_batch import Probe, Trial
    from fullstride.tasks.task import Metric
    from fullstride.train.recipes.recipe import Recipe
    from fullstride.train.scoring import Evaluation
    from fullstride.train.timing import DataBench

NEAR = 5  # the most networks listed as possible fits
CONFUSIONS = 3  # the most pairs of classes listed
FEW_IMAGES = 30  # a score of fewer images gets a warning
FEW_TO_CHOOSE_BY = 50  # images of a split: one image is 2 points


def offline_lines(summary: "Summary", out: "Path") -> list[str]:
    """Say how many predictions a process wrote to `out`, and how many are missing."""
    lines = [f"{out}: {count_of(summary.images, 'image')} in {count_of(summary.parts, 'part')}"]
    if summary.present:
        lines.append(
            f"{count_of(summary.present, 'part')} of this process "
            f"{verb_of(summary.present, 'were')} there already"
        )
    if summary.missing:
        lines.append(
            f"{count_of(summary.missing, 'part')} of other processes "
            f"{verb_of(summary.missing, 'are')} not there yet"
        )
    return lines


def whole_lines(cost: "NetworkCost") -> list[str]:
    side, whole = cost.resolution, cost.whole
    frames = f"{cost.frames} frames of " if cost.frames else ""
    return [
        f"{cost.name} at {frames}{side} x {side} pixels, from {cost.source}",
        f"{whole.params:,} parameters, {whole.macs:,} MACs, {whole.activations:,} activations",
        f"MACs are multiply-adds; FLOPs are 2 x MACs: {2 * whole.macs:,}",
    ]


def layer_lines(cost: "NetworkCost") -> list[str]:
    """A line for each convolution and linear layer."""
    line = "{:48} {!s:>18} -> {!s:18} {:>12,} {:>16,}".format
    return [line(r.name, r.shape_in, r.shape_out, r.params, r.macs) for r in cost.layers]


def saved_lines(cost: "NetworkCost", by_layer: bool) -> list[str]:
    """The saved bytes of a training step, by layer if wanted, with plain and other modules."""
    assert cost.saved is not None
    layers = cost.saved.by_layer.items() if by_layer else ()
    total = cost.saved.bytes_per_image
    lines = [f"{name or 'loss':48} {size:>14,} bytes saved" for name, size in layers]
    lines.append(
        f"{total:,} bytes an image are saved for backward in "
        f"{short_precision(cost.precision)}: {total / 1e6:.1f} MB"
    )
    for label, size in cost.other_bytes.items():
        lines.append(f"{size:,} bytes where it trains {label}: {size / 1e6:.1f} MB")
    return lines


def stage_lines(cost: "NetworkCost") -> list[str]:
    """A line of plain text for each stage and for their sum."""
    saved: dict[str, int] = {}
    if cost.saved is not None:
        saved = {**cost.saved.by_stage, cost.sum.stage: cost.saved.bytes_per_image}
    line = ("{:20} {:>13} {:>16} {:>13} {:>9}" + " {:>9}" * bool(saved)).format
    lines = [line("stage", "parameters", "MACs", "activations", "MB moved", "MB saved")]
    for row in [*cost.stages, cost.sum]:
        counts = (f"{count:,}" for count in (row.params, row.macs, row.activations))
        sizes = f"{row.moved_bytes / 1e6:.2f}", f"{saved.get(row.stage, 0) / 1e6:.2f}"
        lines.append(line(row.stage, *counts, *sizes))
    return lines


def capacity_lines(model: str, trial: "Trial") -> list[str]:
    """The settings of a search for the largest batch, and its prediction."""
    how, prediction = trial.options, trial.prediction
    mode = f"{how.efficiency}, by torch.compile" if how.compiled else how.efficiency
    saved, fixed = prediction.bytes_per_image / 1e6, prediction.fixed_bytes / 1e6
    lines = [
        f"{model} at {trial.resolution} x {trial.resolution}, {short_precision(how.precision)}, "
        f"{how.layout}, {mode}, {trial.memory_bytes / 2**30:.1f} GiB",
        f"predicted: batch {prediction.batch}, from {saved:.1f} MB an image and {fixed:.0f} MB "
        "whatever the batch",
    ]
    if prediction.batch > prediction.map_batch:
        lines.append(
            f"from batch {prediction.map_batch + 1} on, an activation has 2^31 elements or more, "
            "which not every GPU kernel supports"
        )
    return lines


def probe_line(probe: "Probe") -> str:
    peak = f", {probe.peak_memory_mib:,.0f} MiB" if probe.peak_memory_mib else ""
    outcomes = {
        "fits": "trains",
        "memory": "out of memory",
        "elements": f"an activation has 2^31 elements or more: {probe.why}",
    }
    return f"batch {probe.batch}: {outcomes[probe.outcome]}{peak}"


def proven_line(probes: Sequence["Probe"], model: str, trial: "Trial") -> str:
    """The largest batch and its bound. Raises ValueError if not even one image fits."""
    from fullstride.measure.max_batch import largest

    side = trial.resolution
    batch = largest(probes, f"{model} at {side} x {side}")
    outcomes = {probe.outcome for probe in probes if probe.batch > batch}
    bound = "2^31 elements in an activation, not memory" if outcomes == {"elements"} else "memory"
    error = trial.prediction.batch / batch - 1
    return f"proven: batch {batch}, bounded by {bound}; the prediction is {error:+.1%} off"


def estimate_lines(rows: Sequence["NamedEstimate"], profile: "Profile") -> list[str]:
    """The whole estimate of one network, or the lines above a table of several networks."""
    time = rows[0].estimate
    where = conditions(time.batch, profile.device, short_precision(profile.precision))
    if len(rows) == 1:
        (row,) = rows
        lines = [
            f"{row.network} at {row.resolution} x {row.resolution}, {time.work}; {where}",
            f"{three_digits(time.ms_per_image)} ms/image, {time.images_per_s:,.0f} images/s; "
            f"90 % interval {interval(time)} ms",
            f"a batch takes {three_digits(time.device_ms)} ms on the device, "
            f"{three_digits(time.host_ms)} ms on the host; bounded by {time.bound}",
        ]
    else:
        lines = [
            f"{time.work}; {where}; device and host ms are of a batch",
            f"ties differ by less than a factor of {time.resolvable_ratio:g}, from which on the "
            "order of two networks is right in eight cases of ten",
        ]
    return lines + unfitted_lines({row.network: row.estimate for row in rows})


def unfitted_lines(estimates: "Mapping[str, Estimate]") -> list[str]:
    """Name the networks with operators or batches that a profile was not fitted on."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, estimate in estimates.items():
        if estimate.unfitted:
            names.setdefault(estimate.unfitted, []).append(name)
    return [
        f"{', '.join(same)}: this profile was not fitted on {' and '.join(reasons)}, so the "
        "interval is wide and may be wrong"
        for reasons, same in names.items()
    ]


def profile_line(profile: "Profile", training: bool = False) -> str:
    """The source of a profile and its error."""
    fit = profile.training if training and profile.training else profile.inference
    machine, precision = profile.machine, short_precision(profile.precision)
    device = (profile.device, machine.runtime, profile.layout, precision)
    source = f"{fit.networks} networks of {fit.source}; {fit.software}; fitted {fit.date}"
    note = "".join(f"; {each}" for each in (fit.note, profile.note) if each)
    error = f"{fit.error:g} % off where not fitted; " if profile.measured else ""
    return f"{profile.name} ({', '.join(filter(None, device))}): {error}{source}{note}"


def fitted_profile_lines(path: "Path", result: "Calibration") -> list[str]:
    """A new profile: peaks of the device, and errors of microbenchmarks and whole networks."""
    machine = result.profile.machine
    families = ", ".join(f"{family} {error:g}" for family, error in result.by_family.items())
    ratios = ", ".join(f"{network} {ratio:.2f}" for network, ratio in result.whole.items())
    lines = [
        f"{path}: {machine.peak_tflops:g} TFLOPS, {machine.bandwidth_gb_s:g} GB/s, "
        f"{result.profile.sheet}",
        f"  {result.times} times fitted; {result.left_out:g} % off for microbenchmarks of a "
        f"family left out:",
        f"  {families}",
    ]
    if ratios:
        lines += [
            "  estimated / measured of whole networks, which are never fitted:",
            f"  {ratios}",
        ]
    return [*lines, profile_line(result.profile)]


def left_out_line(selection: "Selection") -> str:
    name, why = next(iter(selection.left_out.items()))
    count = len(selection.left_out)
    total = count + len(selection.options)
    return f"left out {count} of {total} networks; the first, {name}: {why}"


def selection_lines(
    choice: "Choice", profile: "Profile", tied: "Callable[[Option, Option], bool]"
) -> list[str]:
    """The best network within the budget, its neighbours, networks to measure, and the profile."""
    best, budget = choice.best, choice.budget.ms_per_image

    def line(option: "Option", doubt: bool = True) -> str:
        by = option.by
        if by == "estimated" and doubt:
            probability = min(option.probability_within(budget), 0.99)
            by += f", inside the budget with a probability of {100 * probability:.0f} %"
        return f"{option.label}, {option.network.top1:g} %, {three_digits(option.ms)} ms ({by})"

    lines = [f"best within {choice.budget}: {line(best)}"]
    shown = {each.label for each in (best, choice.runner_up) if each}
    if choice.safe and choice.safe.label not in shown:
        lines.append(f"the most accurate that is safe: {line(choice.safe)}")
    if choice.runner_up:
        tie = "; the model cannot tell which is faster" if tied(best, choice.runner_up) else ""
        lines.append(f"runner-up: {line(choice.runner_up)}{tie}")
    near = choice.near[:NEAR]
    lines += [f"may fit as well, the model cannot tell: {line(option)}" for option in near]
    if more := len(choice.near) - len(near):
        lines.append(f"and {more} more, which --json lists")
    if larger := choice.next:
        gain, more = larger.network.top1 - best.network.top1, larger.ms - best.ms
        lines.append(
            f"a looser budget buys {line(larger, doubt=False)}: {gain:.1f} points more for "
            f"{three_digits(more)} ms more, {larger.ms / best.ms:.2f} times the time"
        )
    named = [o for o in (best, choice.runner_up, choice.safe, *near) if o and o.by == "estimated"]
    lines += unfitted_lines({option.label: option.estimate for option in named})
    return [*lines, *measure_lines(choice, profile), profile_line(profile)]


THERE = "by fullstride bench --target on {}"
EXPORTED = {"tensorrt": "exported to TensorRT", "onnx": THERE, "openvino": THERE}


def measure_lines(choice: "Choice", profile: "Profile") -> list[str]:
    """Commands to measure the networks in doubt on the device; one command per resolution."""
    machine, batch = profile.machine, choice.budget.batch
    names: dict[int, list[str]] = {}
    for option in choice.to_measure:
        names.setdefault(option.network.resolution, []).append(option.network.name)
    if machine.runtime in EXPORTED:
        each = (f"{' '.join(same)} at {side}" for side, same in names.items())
        what = EXPORTED[machine.runtime].format(profile.name)
        return [f"measure these, {what}: {'; '.join(each)}"] if names else []
    how = "--protocol online" if batch == 1 else f"--protocol throughput --call-batch {batch}"
    how += "".join(f" --precision {word}" for word in profile.precision.split()[:1])
    how += f" --layout {profile.layout}" if profile.layout else ""
    how += " --compiled" if machine.runtime == "compiled" else ""
    return [
        f"measure these: fullstride bench {' '.join(same)} --resolution {side} {how}"
        for side, same in names.items()
    ]


def test_line(
    split: str, scores: Mapping[str, Any], metric: "Metric", bundle: "Path", missing: Sequence[str]
) -> str:
    """The result of a run on the split to compare runs by, and the bundle's place."""
    return (
        f"{split} {metric.text(scores[metric.name])} on {count_of(scores['images'], 'image')}"
        f"{doubts(scores['images'], missing)}; bundle in {bundle}"
    )


def validation_lines(
    split: str,
    result: "Evaluation",
    metrics: "Sequence[Metric]",
    classes: Sequence[str],
    missing: Sequence[str] = (),
) -> list[str]:
    """All scores of a split, beginning with `metrics`, and the most common confusions."""
    lines = [score_line(split, result.scores, metrics, missing)]
    lines += filter(None, [result.task.baseline_note(result.scores)])
    matrix = result.score.confusion()
    confused = matrix.most_confused(CONFUSIONS) if matrix else ()
    if confused:
        pairs = (
            f"{classes[label]} as {classes[other]} ({images})" for label, other, images in confused
        )
        lines.append(f"most often confused: {', '.join(pairs)}")
    return lines


def score_line(
    split: str,
    scores: Mapping[str, float],
    metrics: "Sequence[Metric]",
    missing: Sequence[str] = (),
) -> str:
    """All scores of a split, beginning with `metrics`."""
    values, others = [], dict(scores)
    for metric in metrics:
        if metric.name in others:
            before = others.pop(f"{metric.name}_uncalibrated", None)
            low, high = (others.pop(f"{metric.name}_{end}", None) for end in ("low", "high"))
            values.append(metric.text(others.pop(metric.name), 2 if metric.unit else 4))
            values[-1] += f" ({before:.2f} {metric.unit} uncalibrated)" if before else ""
            values[-1] += "" if low is None else f" (95 % interval {low:.2f} to {high:.2f})"
    if absent := int(others.pop("absent_classes", 0)):
        values.append(f"absent classes {absent}")
    values += [f"{name} {value:.4f}" for name, value in others.items() if name != "images"]
    return (
        f"{split} {', '.join(values)}, on "
        f"{count_of(int(scores['images']), 'image')}{doubts(scores['images'], missing)}"
    )


def few_images_line(split: str, count: int, *, is_share: bool = True) -> str:
    """A warning about too few images of a split; "" for enough images, or none.

    `is_share`: whether scores are percentages of the images.
    """
    if not 0 < count < FEW_TO_CHOOSE_BY:
        return ""
    points = f", of which one is {100 / count:.0f} points" if is_share else ""
    what = "the choice" if split == "val" else "the final score"
    images = count_of(count, "image")
    return f"the {split} split has {images}{points}: {what} is little more than chance"


def doubts(images: float, missing: Sequence[str]) -> str:
    """Why a score says little: too few images, or classes without images."""
    few = f"fewer than {FEW_IMAGES}, so chance decides" if images < FEW_IMAGES else ""
    classes = f"{count_of(len(missing), 'class')}: {first_names(missing)}"
    absent = f"no image of {classes}" if missing else ""
    reasons = "; ".join(filter(None, (few, absent)))
    return f" ({reasons})" if reasons else ""


def data_bench_lines(
    bench: "DataBench", recipe: "Recipe", suggestions: Sequence[str], environment: "Environment"
) -> list[str]:
    """The device, whether the network will wait for images, and suggestions."""
    lines = [
        f"{recipe.decoder}, {recipe.precision}, {environment.device}, "
        f"{count_of(bench.cores, 'core')}, torch {environment.torch}"
    ]
    if recipe.teacher:
        lines.append(f"without the teacher {recipe.teacher}, which makes training steps slower")
    if bench.device == "cpu":
        lines.append("on a CPU decoding and training share the cores, and slow each other down")
    return [*lines, bench.verdict(), *(f"  {option}" for option in suggestions)]
