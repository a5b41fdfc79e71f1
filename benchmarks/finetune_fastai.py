"""fastai's `fine_tune` as a peer in benchmarks/finetune.py; prints one line of JSON.

It runs in an environment of its own, which has fastai and timm, and imports nothing of fullstride.
"""

import argparse
import json
import time
from pathlib import Path

import timm
import torch
from fastai.vision.all import (
    CrossEntropyLossFlat,
    DataLoaders,
    ImageDataLoaders,
    Learner,
    Normalize,
    Resize,
    accuracy,
    apply_init,
    aug_transforms,
    create_head,
    nn,
    params,
)
from fastai.vision.learner import TimmBody

MODEL = "tf_efficientnet_lite0"


def learner(folder: Path, weights: Path, side: int, seed: int) -> tuple[Learner, DataLoaders]:
    """As `vision_learner` makes it, with weights from a file in place of a download."""
    images = ImageDataLoaders.from_folder(
        folder,
        train="train",
        valid="val",
        seed=seed,
        bs=min(64, len(list((folder / "train").rglob("*.png"))) // 2),
        num_workers=0,
        item_tfms=Resize(side),
        batch_tfms=[*aug_transforms(), Normalize.from_stats((0.5,) * 3, (0.5,) * 3)],
    )
    net = timm.create_model(MODEL, num_classes=0)
    state = torch.load(weights, weights_only=True)
    kept = {name: value for name, value in state.items() if not name.startswith("classifier.")}
    net.load_state_dict(kept)
    net.reset_classifier(0, "")  # maps, which fastai's head pools
    body = TimmBody(net, pretrained=False, cut=None, n_in=3)
    model = nn.Sequential(body, create_head(net.num_features, images.c))
    apply_init(model[1], nn.init.kaiming_normal_)
    loss = CrossEntropyLossFlat()
    return Learner(images, model, loss, metrics=accuracy, splitter=split), images


def split(model: nn.Module) -> list[list[torch.nn.Parameter]]:
    """The two groups of fastai's `default_split`: body and head."""
    return [params(model[0]), params(model[1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--side", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    learn, images = learner(args.folder, args.weights, args.side, args.seed)
    with learn.no_bar(), learn.no_logging():
        learn.freeze()
        learn.fine_tune(args.epochs)
        scores = {}
        for part in ("val", "test"):
            paths = sorted((args.folder / part).rglob("*.png"))
            loader = images.test_dl(paths)
            outputs, _ = learn.get_preds(dl=loader)
            names = [images.vocab[index] for index in outputs.argmax(1)]
            correct = sum(name == path.parent.name for name, path in zip(names, paths, strict=True))
            scores[part] = round(100 * correct / len(paths), 3)
    print(json.dumps({**scores, "cpu_s": round(time.process_time(), 1)}))


if __name__ == "__main__":
    main()
