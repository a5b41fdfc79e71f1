"""Peers of `fullstride train` in benchmarks/finetune.py: probes, and fine-tuning in plain PyTorch.

Each call prints one line of JSON. It imports nothing of fullstride.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

MODEL = "tf_efficientnet_lite0"
HALF = (0.5, 0.5, 0.5)  # mean and deviation of its pixels
NORMALISED = (T.ToTensor(), T.Normalize(HALF, HALF))
PIXELS_SIDE = 16
Setting = tuple[float, bool, float]  # rate, whether statistics stay, share of the epochs


def network(weights: Path, classes: int) -> nn.Module:
    """timm's network with the released weights but for its classifier."""
    net = timm.create_model(MODEL, num_classes=classes)
    state = torch.load(weights, weights_only=True)
    kept = {name: value for name, value in state.items() if not name.startswith("classifier.")}
    net.load_state_dict(kept, strict=False)
    return net.to(memory_format=torch.channels_last)


def loader(folder: Path, *views: object, batch: int = 128, shuffle: bool = False) -> DataLoader:
    images = ImageFolder(str(folder), T.Compose([*views, *NORMALISED]))
    return DataLoader(images, batch, shuffle=shuffle, drop_last=shuffle and len(images) > batch)


@torch.inference_mode()
def outputs(net: nn.Module, batches: DataLoader) -> tuple[np.ndarray, np.ndarray]:
    net.eval()
    rows = [(net(x.contiguous(memory_format=torch.channels_last)), y) for x, y in batches]
    first, second = (torch.cat(each).numpy() for each in zip(*rows, strict=True))
    return first, second


class Scores:
    """Accuracy of a function of images on val/ and on test/, in percent."""

    def __init__(self, folder: Path, side: int):
        whole = (T.Resize(side, T.InterpolationMode.BICUBIC), T.CenterCrop(side))
        self.batches = {part: loader(folder / part, *whole) for part in ("train", "val", "test")}
        # val/ may lack a class that train/ has
        names = self.batches["train"].dataset.class_to_idx
        for part in ("val", "test"):
            images = self.batches[part].dataset
            own = {index: name for name, index in images.class_to_idx.items()}
            images.samples = [(path, names[own[index]]) for path, index in images.samples]

    def of(self, net: nn.Module) -> dict[str, float]:
        return {part: accuracy(*outputs(net, self.batches[part])) for part in ("val", "test")}


def accuracy(logits: np.ndarray, y: np.ndarray) -> float:
    return round(100 * float((logits.argmax(1) == y).mean()), 3)


def fit_probe(net: nn.Module, scores: Scores) -> None:
    """The classifier of `net` becomes scikit-learn's logistic regression on its features."""
    classifier = net.get_classifier()
    net.reset_classifier(0)
    x, y = outputs(net, scores.batches["train"])
    net.classifier = classifier
    scaler = StandardScaler().fit(x)
    regression = LogisticRegression(C=0.01, max_iter=1000).fit(scaler.transform(x), y)
    weight, bias = regression.coef_, regression.intercept_
    if len(weight) == 1:  # two classes
        weight, bias = np.vstack([-weight, weight]) / 2, np.array([-bias[0], bias[0]]) / 2
    weight = weight / scaler.scale_
    classifier.weight.data.copy_(torch.from_numpy(weight))
    classifier.bias.data.copy_(torch.from_numpy(bias - weight @ scaler.mean_))


def pixels(folder: Path) -> dict[str, float]:
    """Logistic regression on small pictures."""
    scores = Scores(folder, PIXELS_SIDE)
    flat = {part: outputs(nn.Flatten(), batches) for part, batches in scores.batches.items()}
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    model.fit(*flat["train"])
    return {part: round(100 * model.score(*flat[part]), 3) for part in ("val", "test")}


def probe(folder: Path, weights: Path, side: int) -> dict[str, float]:
    scores = Scores(folder, side)
    net = network(weights, len(scores.batches["train"].dataset.classes))
    fit_probe(net, scores)
    return scores.of(net)


def plain(
    folder: Path, weights: Path, side: int, epochs: float, settings: list[Setting], seed: int
) -> list[dict[str, float]]:
    """LP-FT by each setting, with its CPU-seconds in a process of its own."""
    scores = Scores(folder, side)
    start = network(weights, len(scores.batches["train"].dataset.classes))
    fit_probe(start, scores)
    begin_s, results = time.process_time(), []
    for rate, frozen, share in settings:
        before_s = time.process_time()
        torch.manual_seed(seed)
        net = tuned(copy.deepcopy(start), folder, side, share * epochs, rate, frozen)
        result = scores.of(net)
        cpu_s = begin_s + time.process_time() - before_s
        results.append({**result, "cpu_s": round(cpu_s, 1)})
    return results


def tuned(
    net: nn.Module, folder: Path, side: int, epochs: float, rate: float, frozen: bool
) -> nn.Module:
    """All layers by AdamW with one cosine; the average of the weights over a tenth of the steps.

    With `frozen`, batch norms keep the statistics of the weights.
    """
    count = len(ImageFolder(str(folder / "train")))
    crop = T.RandomResizedCrop(side, (0.5, 1.0), interpolation=T.InterpolationMode.BICUBIC)
    batch = 16 if count < 200 else 32
    batches = loader(folder / "train", crop, T.RandomHorizontalFlip(), batch=batch, shuffle=True)
    steps = max(1, round(epochs * len(batches)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    average = torch.optim.swa_utils.AveragedModel(
        net,
        multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(max(0.0, 1 - 10 / steps)),
        use_buffers=True,
    )
    for step, (x, y) in zip(range(steps), endless(batches), strict=False):
        share = (step + 0.5) / steps
        warmed = min(1.0, share / 0.1)
        for group in optimizer.param_groups:
            group["lr"] = rate * warmed * 0.5 * (1 + math.cos(math.pi * share))
        net.train()
        if frozen:
            for module in net.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        logits = net(x.contiguous(memory_format=torch.channels_last))
        F.cross_entropy(logits, y, label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
    return average


def endless(batches: DataLoader):
    while True:
        yield from batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["pixels", "probe", "plain"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--side", type=int)
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--settings", type=json.loads, help="[[rate, frozen, share of epochs]]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peer == "pixels":
        result = pixels(args.folder)
    elif args.peer == "probe":
        result = probe(args.folder, args.weights, args.side)
    else:
        how = (args.side, args.epochs, args.settings, args.seed)
        result = plain(args.folder, args.weights, *how)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
