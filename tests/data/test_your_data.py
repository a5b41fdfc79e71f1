"""docs/guides/your_data.md: each tree of the page is made as it stands, and opened."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from videos import write_video

from fullstride.data.dataset import open_data
from fullstride.data.targets import open_boxes, open_clips, open_depths, open_labels, open_masks

PAGE = (Path(__file__).parents[2] / "docs/guides/your_data.md").read_text()
OPENERS = {
    "One class for each image": open_data,
    "Several labels for an image": open_labels,
    "Boxes": open_boxes,
    "Masks": open_masks,
    "Depths": open_depths,
    "Clips": open_clips,
}
SECTIONS = {each.partition("\n")[0]: each for each in PAGE.split("\n## ")}
CONTENTS = dict(re.findall(r'```\w+ title="(.*?)"\n(.*?)```', PAGE, re.DOTALL))
TREES = [
    (section, tree)
    for section in OPENERS
    for tree in re.findall(r"```text\n(.*?)```", SECTIONS[section], re.DOTALL)
]


def paths_of(tree: str) -> list[str]:
    """The files of a tree, whose levels are four columns each."""
    above, paths = [], []
    for line in tree.splitlines():
        name = re.sub(r"^[│├└─\s\xa0]+", "", line)
        above = [*above[: (len(line) - len(name)) // 4], name]
        if "." in name:
            paths.append("/".join(above))
    return paths


def write(path: Path, seed: int, siblings: list[str]) -> None:
    """A file as its name and its folders say."""
    random = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name in CONTENTS and path.suffix != ".json":
        path.write_text(CONTENTS[path.name])
    elif path.suffix == ".xml":
        path.write_text(CONTENTS["0001.xml"].replace("0001", path.stem))
    elif path.suffix == ".json":
        split = re.search("train|val", str(path.relative_to(path.parents[1])))
        assert split is not None
        names = [Path(each).name for each in siblings if f"/{split[0]}" in each]
        path.write_text(json.dumps(coco([name for name in names if name.endswith("jpg")])))
    elif path.suffix == ".txt" and "ImageSets" in path.parts:
        path.write_text({"train": "0001\n", "val": "0002\n"}[path.stem])
    elif path.suffix == ".txt":
        path.write_text(CONTENTS["0001.txt"])
    elif path.suffix == ".mp4":
        write_video(path, 4, seed=seed)
    elif "depth" in path.parts:
        Image.fromarray(random.integers(1, 9000, (64, 64), dtype=np.uint16)).save(path)
    elif "masks" in path.parts:
        Image.fromarray(random.integers(0, 2, (64, 64), dtype=np.uint8)).save(path)
    else:
        Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)


def coco(names: list[str]) -> dict:
    """The example of the page, for other pictures."""
    example = json.loads(CONTENTS["_annotations.coco.json"])
    (image,), (box,) = example["images"], example["annotations"]
    return example | {
        "images": [image | {"id": i, "file_name": name} for i, name in enumerate(names)],
        "annotations": [box | {"id": i, "image_id": i} for i in range(len(names))],
    }


def test_every_format_with_a_tree_is_on_the_page():
    assert len(TREES) == 12


@pytest.mark.parametrize(
    ("section", "tree"), TREES, ids=[f"{s}-{i}" for i, (s, _) in enumerate(TREES)]
)
def test_a_tree_of_the_page_is_read_as_it_stands(section, tree, tmp_path):
    paths = paths_of(tree)
    for seed, name in enumerate(paths):
        write(tmp_path / name, seed, paths)
    tables = [name for name in paths if name.endswith(".csv")]
    data = OPENERS[section](str(tmp_path / (tables[0] if tables else paths[0].split("/")[0])))
    items = len(data.train) + len(data.val) + len(data.test)
    maps = re.compile(r"(masks|depth)/")
    seen = [
        name for name in paths if re.search(r"\.(jpg|png|mp4)$", name) and not maps.search(name)
    ]
    pictures = set(map(Path, seen))
    clips = {path if path.suffix == ".mp4" else path.parent for path in pictures}
    assert items == len(clips if section == "Clips" else pictures)
    held_out = [path for path in pictures if "val" in str(path)]
    assert not held_out or len(data.val) == len(held_out)
