"""Where do pictures of predictions go? Into a folder, each named after its picture."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fullstride.data.readers.decode import decode
from fullstride.deploy.exported import ExportedModel
from fullstride.deploy.predict import Prediction
from fullstride.nets.bundle import Bundle
from fullstride.outputs import GENERATOR, Output, begins_with
from fullstride.tasks import task_of
from fullstride.tasks.task import Task
from fullstride.writing import atomic_write, check_output

PICTURE = Output(
    "a picture of predictions by fullstride",
    ".png",
    begins_with(b"PNG\r\n", f"Software\0{GENERATOR}".encode()),
)


@dataclass
class PictureFolder:
    """Writes an image for each prediction: NAME.png, or NAME-2.png for the second of a name."""

    folder: Path
    make: Callable[[Prediction], Image.Image | None]
    names: set[str] = field(default_factory=set)  # of the files that it has written
    repeats: Counter[str] = field(default_factory=Counter)  # of the name of a picture

    def write(self, prediction: Prediction) -> Path:
        """Raises ValueError where there is another program's file, or nothing to write."""
        name = stem = Path(prediction.path).stem
        while name in self.names:
            self.repeats[stem] += 1
            name = f"{stem}-{self.repeats[stem] + 1}"
        self.names.add(name)
        path, image = self.folder / f"{name}.png", self.make(prediction)
        if image is None:
            raise ValueError(f"{path}: there is nothing to write of {prediction}")
        about = PngInfo()
        about.add_text("Software", GENERATOR)
        with atomic_write(path, PICTURE) as beside:
            image.save(beside, "PNG", pnginfo=about)
        return path


def drawings(model: Bundle | ExportedModel, folder: Path) -> PictureFolder:
    """For pictures with their predictions drawn; ValueError for a task that draws none."""
    task = task_of(model)
    check_folder("draw", task, type(task).draw is not Task.draw, folder)

    def make(prediction: Prediction) -> Image.Image | None:
        picture = decode(Path(prediction.path), 3)
        return task.draw(picture, prediction.guesses, model.classes)

    return PictureFolder(folder, make)


def map_files(model: Bundle | ExportedModel, folder: Path) -> PictureFolder:
    """For predictions as images without losses; ValueError for a task without."""
    task = task_of(model)
    check_folder("maps", task, type(task).maps is not Task.maps, folder)
    return PictureFolder(folder, lambda prediction: task.maps(prediction.guesses))


def check_folder(flag: str, task: Any, has_any: bool, folder: Path) -> None:
    if not has_any:
        raise ValueError(f"--{flag} {folder}: the task {task.name} has no places in pictures")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--{flag} {folder} is a file: give a folder")
    check_output(folder / "picture.png", PICTURE)
