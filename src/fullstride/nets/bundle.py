"""What is a trained network on disk? A folder: `weights.safetensors` and `bundle.json`, and nothing that runs."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from fullstride.nets.checkpoints import check, read
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import TimmNetwork, TimmSpec, timm_spec
from fullstride.storage import atomic_write

FORMAT = 1
MOST_JSON_BYTES = 64 * 2**20  # 20,000 class names take less than 1 MiB


@dataclass(frozen=True)
class Bundle:
    """A trained network with all that is needed to use it and to know where it came from."""

    net: Network | TimmNetwork
    name: str  # what it is called in tables: a network's name, or what the user made of it
    classes: tuple[str, ...]  # in the order of the logits
    preprocessing: Preprocessing
    recipe: Mapping[str, Any] = field(default_factory=dict)  # how it was trained
    scores: Mapping[str, Any] = field(default_factory=dict)  # split -> score -> value
    environment: Mapping[str, Any] = field(default_factory=dict)  # where it was trained
    source: str = ""  # where the weights come from
    licence: str = ""  # of the weights, as their authors call it; "" where nobody said

    def save(self, folder: str | Path) -> None:
        """Write the folder beside its place and rename it; an earlier bundle there is replaced."""
        about = {
            "format": FORMAT,
            "name": self.name,
            "source": self.source,
            "licence": self.licence,
            "spec": json.loads(self.net.spec.to_json()),
            "classes": list(self.classes),
            "preprocessing": asdict(self.preprocessing),
            "recipe": dict(self.recipe),
            "scores": dict(self.scores),
            "environment": dict(self.environment),
        }
        with atomic_write(Path(folder)) as beside:
            beside.mkdir()
            state = {
                name: value.detach().cpu().contiguous()
                for name, value in self.net.state_dict().items()
            }
            save_file(state, beside / "weights.safetensors")
            (beside / "bundle.json").write_text(json.dumps(about, indent=1))

    @staticmethod
    def load(folder: str | Path) -> "Bundle":
        """Raises ValueError, in one line, for a folder that is not a whole bundle."""
        folder = Path(folder)
        about = read_json(folder / "bundle.json")
        try:
            if about["format"] != FORMAT:
                raise ValueError(f"format {about['format']!r}, this version reads format {FORMAT}")
            preprocessing = about["preprocessing"]
            preprocessing |= {key: tuple(preprocessing[key]) for key in ("mean", "std")}
            bundle = Bundle(
                net=load_network(about["spec"], folder / "weights.safetensors"),
                preprocessing=Preprocessing(**preprocessing),
                classes=tuple(map(str, about["classes"])),
                licence=about.get("licence", ""),
                **{
                    key: about[key] for key in ("name", "source", "recipe", "scores", "environment")
                },
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder}/bundle.json is not whole: {type(error).__name__} {error}"
            ) from None
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        if len(bundle.classes) != bundle.net.spec.classes:
            raise ValueError(
                f"{folder}: {len(bundle.classes)} class names for {bundle.net.spec.classes} logits"
            )
        return bundle


def build(spec: NetSpec | TimmSpec) -> Network | TimmNetwork:
    return Network(spec) if isinstance(spec, NetSpec) else TimmNetwork(spec)


def load_network(spec_data: dict, weights: Path) -> Network | TimmNetwork:
    """The network of a bundle. Shapes are compared before any memory is taken for it."""
    if "timm" in spec_data:
        known = dict(spec_data["timm"])
        spec = timm_spec(str(known.pop("name")), **{k: int(v) for k, v in known.items()})
    else:
        spec = NetSpec.from_json(json.dumps(spec_data))
    state = read(weights)
    with torch.device("meta"):
        check({name: tuple(value.shape) for name, value in build(spec).state_dict().items()}, state)
    net = build(spec)
    net.load_state_dict(state)
    return net.eval()


def read_json(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise ValueError(
                f"{path} is larger than {MOST_JSON_BYTES >> 20} MiB: it is not one of ours"
            )
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"no {path.name} in {path.parent}: give the folder of a bundle or of a run"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not whole JSON: {error}") from None


def copy_weights(source: nn.Module, target: nn.Module) -> list[str]:
    """Take over every weight whose name and shape agree; returns the names of those left as they were."""
    theirs, ours = source.state_dict(), target.state_dict()
    left = [
        name
        for name, value in ours.items()
        if name not in theirs or theirs[name].shape != value.shape
    ]
    target.load_state_dict({name: theirs[name] for name in ours if name not in left}, strict=False)
    return left
