"""Predicts the content of pictures or videos with a bundle or an exported file."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from fullstride import tasks
from fullstride.data.dataset import DataSet
from fullstride.data.loader import View
from fullstride.data.readers.decode import (
    MAX_MEGAPIXELS,
    Size,
    UnreadableImage,
    decode,
    image_size,
    plain_image,
)
from fullstride.data.readers.folder import (
    IMAGES,
    VIDEOS,
    FileKind,
    count_unused,
    find_files,
    first_reason,
)
from fullstride.data.readers.videos import frames_size
from fullstride.data.transforms.clips import ClipTestView, Starts
from fullstride.data.transforms.crop import in_mode, test_view, to_input
from fullstride.deploy.exported import ExportedModel, InputKind, Model, one_input
from fullstride.deploy.formats import is_exported_path, near, open_file
from fullstride.deploy.settings import Tta
from fullstride.io.records import refuse_flags
from fullstride.io.writing import (
    GENERATOR,
    Output,
    atomic_write,
    begins_with,
    check_output,
    refuse_foreign,
)
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import BY_DEFAULT, LoadOptions, Preprocessing
from fullstride.tables import check_name
from fullstride.tasks import find_task, task_of
from fullstride.tasks.task import Task, json_values
from fullstride.tasks.video import views_of

Picture = str | os.PathLike[str] | Image.Image | np.ndarray
MAX_BATCH_PIXELS = 2**24  # per batch of inputs: 334 images of 224 x 224
CLASSES = 5  # default number of classes per picture
WHOLE_PIXEL_BYTES = 8  # memory per pixel of a picture that is decoded whole and converted


@dataclass(frozen=True)
class Prediction:
    """A task's predictions for one picture, best first; or why it could not be read.

    Places, such as boxes and maps, refer to the upright picture.
    """

    path: str  # "" for a picture in memory
    guesses: tuple[Any, ...] = ()  # `Guess` for classification
    unreadable: str = ""  # the reason; "" for a picture that was read

    def __str__(self) -> str:
        what = self.unreadable or self.guesses_text
        return f"{self.path}: {what}" if self.path else what

    @property
    def guesses_text(self) -> str:
        return ", ".join(map(str, self.guesses)) or "nothing"

    def to_json(self) -> dict[str, Any]:
        guesses = [*map(json_values, self.guesses)]
        return {"path": self.path, "guesses": guesses, "unreadable": self.unreadable}


def predict(
    model: Model,
    pictures: Picture | Iterable[Picture],
    top: int | None = None,
    batch: int = 32,
    device: torch.device | str = "cpu",
    tta: Tta = "none",
    views: str = "",
    clip_starts: Starts = "inclusive",
) -> Iterator[Prediction]:
    """Yield one `Prediction` for each picture, in order.

    For a network of clips, the pictures are videos: paths of files or of folders of frames, or
    uint8 arrays (T, H, W, C) with 1 or 3 channels; an array (N, T, H, W, C) is N videos.

    Args:
        model: A bundle, or an exported file.
        pictures: One or more paths of files, Pillow images, or uint8 arrays (H, W) or (H, W, C)
            with 1, 3 or 4 channels; an array (N, H, W, C) is N pictures.
        top: The number of most probable predictions for each; by default 5 classes, and all boxes
            of a detector, see `with_min_score`.
        batch: Pictures at a time; fewer if their inputs need much memory.
        device: Where a bundle computes; an exported file has its own device.
        tta: With flip, the mean of the probabilities of a picture and its mirror image.
        views: For videos, "CLIPSxCROPS" such as "10x3": the mean of the probabilities of so many
            clips and crops; by default only the middle clip.
        clip_starts: Where the clips of `views` begin, see `data.transforms.clips.clip_starts`.

    An unreadable picture yields a `Prediction` with the reason. Raises ValueError for anything but
    pictures, and if `check_tta` refuses flip.

    Examples:
        >>> import fullstride
        >>> bundle = fullstride.train_network("digits", "genet_tiny", "runs/few", steps=2)
        >>> picture = fullstride.open_data("digits").test.picture(0)
        >>> [row] = fullstride.predict(bundle, picture, top=2)
        >>> len(row.guesses), row.guesses[0].label in bundle.classes
        (2, True)
    """
    task, pre = task_of(model), model.preprocessing
    top = max(CLASSES, task.most_objects) if top is None else top
    if top < 1 or batch < 1:
        raise ValueError(f"top {top} and batch {batch}: use 1 or more")
    is_one = isinstance(pictures, (str, os.PathLike, Image.Image))
    if isinstance(pictures, np.ndarray):
        is_one = pictures.ndim < (5 if pre.frames else 4)
    several: Any = [pictures] if is_one else pictures
    if not isinstance(several, (Iterable, np.ndarray)):
        raise ValueError(
            f"pictures of the type {type(pictures).__name__}: use paths, images of Pillow or arrays"
        )
    listed: list[Any] = [*several]
    many = views_of(views, pre, clip_starts)
    count = many.clips * many.crops if many else 1  # views per picture
    batch = min(batch, task.scoring_batch, most_in_batch(pre))
    step = max(1, batch // count)
    read = partial(_clips, many or ClipTestView(pre)) if pre.frames else partial(_view, model)
    for start in range(0, len(listed), step):
        group, reasons, sizes = listed[start : start + step], {}, {}
        shown = _readable(group, read, reasons, sizes)
        rows = torch.from_numpy(probabilities(model, shown, device, batch, tta))
        if many:
            rows = rows.view(len(sizes), count, rows.shape[1]).mean(1)
        guesses = iter(task.decode(rows, model.classes, top) if sizes else ())
        for index, picture in enumerate(group):
            path = os.fspath(picture) if isinstance(picture, (str, os.PathLike)) else ""
            if index in reasons:
                yield Prediction(path, unreadable=reasons[index])
            else:
                yield Prediction(path, task.place(next(guesses), sizes[index], pre))


def with_min_score(model: Model, min_score: float) -> Model:
    """A copy of a detector that predicts boxes from `min_score`. ValueError for another task."""
    if "min_score" not in find_task(model.task).state_fields:
        raise ValueError(
            f"--min-score {min_score:g} is for the boxes of detectors, and not for the task "
            f"{model.task}: leave it out"
        )
    if not 0 <= min_score <= 1:
        raise ValueError(f"--min-score {min_score:g}: use a number from 0 to 1")
    state = {**model.task_state, "min_score": min_score}
    if isinstance(model, ExportedModel):
        return replace(model, metadata=replace(model.metadata, task_state=state))
    return replace(model, task_state=state)


def most_in_batch(pre: Preprocessing) -> int:
    """The number of inputs with `MAX_BATCH_PIXELS` together."""
    return max(1, MAX_BATCH_PIXELS // (pre.resolution**2 * max(1, pre.frames)))


def _readable(
    pictures: Sequence[Picture],
    read: Callable[[Picture], tuple[Any, Size]],
    reasons: dict[int, str],
    sizes: dict[int, Size],
) -> Iterator[Image.Image | np.ndarray]:
    """Yield the views of readable pictures, with one picture in memory at a time.

    `read` returns views and the size of a picture, which goes into `sizes`. `reasons` receives the
    reasons for unreadable pictures.
    """
    for index, picture in enumerate(pictures):
        try:
            views, sizes[index] = read(picture)
        except UnreadableImage as error:
            reasons[index] = error.reason
        else:
            yield from views


def _view(model: Model, picture: Picture) -> tuple[list[Image.Image | np.ndarray], Size]:
    """The view and size of a picture; a file's size is only read if predictions have places."""
    if not isinstance(picture, (str, os.PathLike)):
        image = _plain(picture, model.preprocessing)
        return [image], image.size
    path = Path(picture)
    check_suffix(path, model.preprocessing)
    view = read_view(path, model)
    return [view], image_size(path) if task_of(model).has_places else (0, 0)


def _clips(view: View, video: Any) -> tuple[np.ndarray, Size]:
    """The clips (N, T, H, W, C) that `view` takes from a video; predictions for it have no places.

    Views of evaluation draw nothing.
    """
    if isinstance(video, (str, os.PathLike)):
        check_suffix(video := Path(video), view.pre)
    else:
        _check_clip(video)
    pixels, _ = view(video, None, np.random.default_rng(0))
    return pixels.reshape(-1, *one_input(view.pre, "pixels")), (0, 0)


def check_suffix(path: Path, pre: Preprocessing) -> None:
    """Raise UnreadableImage for a picture if clips are needed, and vice versa."""
    suffix = path.suffix.lower()
    if pre.frames and suffix in IMAGES.suffixes:
        raise UnreadableImage(
            str(path), f"it is a picture, and the network takes clips of {pre.frames} frames"
        )
    if not pre.frames and suffix in VIDEOS.suffixes:
        raise UnreadableImage(str(path), "it is a video, and the network takes pictures")


def _check_clip(video: Any) -> None:
    if not isinstance(video, np.ndarray):
        raise ValueError(
            f"a video of the type {type(video).__name__}: use a path, or an array (T, H, W, C)"
        )
    if video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] not in (1, 3):
        raise ValueError(
            f"a video of {video.dtype} {video.shape}: use uint8 (T, H, W, C) with 1 or 3 channels"
        )


def read_view(
    source: Path | bytes, model: Model, max_memory_mib: float | None = None
) -> Image.Image | np.ndarray:
    """Read an image file, by path or bytes, as an input for `probabilities`.

    It is the `test_view`, for which a large JPEG is decoded at a fraction of its size. Models that
    resize get the whole image, of up to `MAX_MEGAPIXELS`. Raises UnreadableImage for a file that
    cannot be decoded, or needs more than `max_memory_mib`, see `decode_crop`.
    """
    pre = model.preprocessing
    if input_kind(model) == "pictures":
        most = max_memory_mib and max_memory_mib / WHOLE_PIXEL_BYTES
        return decode(
            source, pre.channels, max_megapixels=most or MAX_MEGAPIXELS, background=pre.background
        )
    return test_view(source, replace(pre, draft=True), max_memory_mib)


def _plain(picture: Picture, pre: Preprocessing) -> Image.Image:
    if isinstance(picture, Image.Image):
        return plain_image(picture.copy(), pre.channels, pre.background)
    if not isinstance(picture, np.ndarray):
        raise ValueError(
            f"a picture of the type {type(picture).__name__}: use a path, an image of Pillow or an "
            "array"
        )
    depth = picture.shape[2:]
    is_shape = picture.ndim in (2, 3) and depth in ((), (1,), (3,), (4,))
    if picture.dtype != np.uint8 or not is_shape or not picture.size:
        raise ValueError(
            f"a picture of {picture.dtype} {picture.shape}: use uint8 (H, W) or (H, W, C) with 1, "
            "3 or 4 channels"
        )
    pixels = picture[:, :, 0] if depth == (1,) else picture
    return plain_image(Image.fromarray(pixels), pre.channels, pre.background)


def probabilities(
    model: Model,
    pictures: Iterable[Image.Image | np.ndarray],
    device: torch.device | str = "cpu",
    batch: int = 32,
    tta: Tta = "none",
) -> np.ndarray:
    """Compute the activated outputs for pictures of any sizes, float32; (N, K) for classification.

    Arrays are views by `read_view`. Pictures may come one by one, and only the inputs of a batch
    are in memory. Raises FloatingPointError if an output is not finite.
    """
    check_name("tta", tta, get_args(Tta))
    if tta == "flip":
        check_tta(model)
    rows = [
        activated(model, torch.from_numpy(x), device, tta)
        for x in inputs(input_kind(model), model.preprocessing, pictures, batch)
    ]
    return torch.cat(rows).numpy() if rows else np.empty((0, len(model.classes)), np.float32)


def input_kind(model: Model) -> InputKind:
    return model.metadata.input_kind if isinstance(model, ExportedModel) else "normalised"


def activated(
    model: Model, x: Tensor, device: torch.device | str = "cpu", tta: Tta = "none"
) -> Tensor:
    """Compute the activated outputs for a batch of `inputs`, on the CPU.

    Raises FloatingPointError if an output is not finite.
    """
    kind = input_kind(model)
    if isinstance(model, Bundle):
        net = model.net.eval().to(device)
        with torch.inference_mode():
            rows = net(x.to(device)).float().cpu()
        rows = rows.clone()  # out of inference mode
    else:
        rows = torch.from_numpy(model.run(x.numpy()))
    if kind == "normalised":
        rows = task_of(model).activate(rows)
    if tta == "flip":
        mirrored = x.flip(-1 if kind == "normalised" else -2)
        rows = (rows + activated(model, mirrored, device)) / 2
    if not rows.isfinite().all():
        raise FloatingPointError("the network's outputs for a picture are not finite")
    return rows


def check_tta(model: Model, data: DataSet | None = None) -> None:
    """Raise ValueError if mirroring a picture may change its class."""
    if not find_task(model.task).single_label:
        raise ValueError(f"--tta flip is for classes, and not for the task {model.task}")
    if not model.may_mirror or (data and not data.mirror):
        raise ValueError(
            "--tta flip: the images were not mirrored in training, as this may change their class: "
            "leave it out"
        )


def logits(bundle: Bundle, batches: Iterable[np.ndarray]) -> np.ndarray:
    """The outputs of a bundle's network on the CPU, float32, for normalised `inputs`."""
    net = bundle.net.eval().to("cpu")
    with torch.inference_mode():
        return torch.cat([net(torch.from_numpy(x)) for x in batches]).float().numpy()


def outputs(model: ExportedModel, batches: Iterable[np.ndarray]) -> np.ndarray:
    """The outputs of a file, float32; not activated if its inputs are normalised."""
    return np.concatenate([model.run(x) for x in batches])


def inputs(
    kind: InputKind,
    pre: Preprocessing,
    pictures: Iterable[Image.Image | np.ndarray],
    batch: int = 32,
) -> Iterator[np.ndarray]:
    """Yield pictures as inputs for a file of the given `InputKind`, in batches of up to `batch`.

    Each picture is resized before the next is read; arrays are already views. Batches are smaller
    if they need much memory. Inputs of the kind "pictures" keep their size and come one by one.
    """
    batch = min(batch, most_in_batch(pre))
    if kind == "pictures":
        for picture in pictures:
            assert isinstance(picture, Image.Image)
            pixels = np.array(in_mode(picture, pre.channels))  # writable, as PyTorch requires
            yield pixels.reshape(1, *pixels.shape[:2], pre.channels)
        return
    views = (
        picture if isinstance(picture, np.ndarray) else test_view(picture, pre)
        for picture in pictures
    )
    while group := list(islice(views, batch)):
        pixels = np.stack(group)
        if kind == "pixels":
            yield pixels
        else:
            yield to_input(torch.from_numpy(pixels), pre).contiguous().numpy()


@dataclass(frozen=True)
class LazyInputs(Sequence[np.ndarray]):
    """`inputs`, one by one, computed at each access: few photographs or clips fit in memory."""

    kind: InputKind
    pre: Preprocessing
    pictures: Sequence[Image.Image | np.ndarray]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: Any) -> Any:
        return next(inputs(self.kind, self.pre, [self.pictures[index]]))


PICTURE = Output(
    "a picture of predictions by fullstride",
    ".png",
    begins_with(b"PNG\r\n", f"Software\0{GENERATOR}".encode()),
)


@dataclass
class PictureFolder:
    """Writes an image for each prediction: NAME.png, and NAME-2.png for the second NAME."""

    folder: Path
    make: Callable[[Prediction], Image.Image | None]
    names: set[str] = field(default_factory=set)  # names of written files
    repeats: Counter[str] = field(default_factory=Counter)  # by name of a picture

    def write(self, prediction: Prediction) -> Path:
        """Write an image. Raises ValueError if another program's file is there, or for no image."""
        name = stem = Path(prediction.path).stem
        while name in self.names:
            self.repeats[stem] += 1
            name = f"{stem}-{self.repeats[stem] + 1}"
        self.names.add(name)
        path, image = self.folder / f"{name}.png", self.make(prediction)
        if image is None:
            raise ValueError(f"{path}: there is nothing to write for {prediction}")
        about = PngInfo()
        about.add_text("Software", GENERATOR)
        with atomic_write(path, PICTURE) as beside:
            image.save(beside, "PNG", pnginfo=about)
        return path


def drawings(model: Model, folder: Path) -> PictureFolder:
    """Write pictures with drawn predictions. Raises ValueError for a task that draws none."""
    task = task_of(model)
    check_folder("draw", task, type(task).draw is not Task.draw, folder)

    def make(prediction: Prediction) -> Image.Image | None:
        picture = decode(Path(prediction.path), 3)
        return task.draw(picture, prediction.guesses, model.classes)

    return PictureFolder(folder, make)


def map_files(model: Model, folder: Path) -> PictureFolder:
    """Write predictions as lossless images. Raises ValueError for a task without maps."""
    task = task_of(model)
    check_folder("maps", task, type(task).maps is not Task.maps, folder)
    return PictureFolder(folder, lambda prediction: task.maps(prediction.guesses))


def check_folder(flag: str, task: Any, has_any: bool, folder: Path) -> None:
    if not has_any:
        raise ValueError(f"--{flag} {folder}: the task {task.name} has no places in pictures")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--{flag} {folder} is a file: give a folder")
    check_output(folder / "picture.png", PICTURE)


def check_pictures(flag: str, folder: Path, paths: Sequence[Path]) -> None:
    """Raise ValueError if a prediction for one of `paths` would be beside it or replace a file."""
    place = folder.resolve()
    for path in paths:
        if path.parent.resolve() == place:
            raise ValueError(f"--{flag} {folder} is the folder of {path}: give another folder")
        refuse_foreign(folder / f"{path.stem}.png", PICTURE)


def open_model(word: str, *, trust: bool = False, options: LoadOptions = BY_DEFAULT) -> Model:
    """Open an exported file, or a bundle: a run, a file of weights or a name with released weights.

    Programs (formats pt2 and aoti) are only opened with `trust`. Raises ValueError.
    """
    if not is_exported_path(word):
        if (Path(word) / "fit.json").is_file() and (beside := near(Path(word) / "model")):
            raise ValueError(
                f"{word} is a fit: give a run in {Path(word) / 'trials'}, or the file that it "
                f"ended with, {beside}"
            )
        return tasks.load(word, options=options)
    changed = {name: value != getattr(BY_DEFAULT, name) for name, value in vars(options).items()}
    refuse_flags(changed, f"beside {word}, an exported file, which has its own: leave it out")
    return open_file(word, trust=trust)


def find_images(words: Sequence[str], kind: FileKind = IMAGES) -> tuple[list[Path], dict[str, int]]:
    """Find files; a folder stands for its files in sorted order, and - for lines of standard input.

    For videos, a folder of frames is one video. Also returns the numbers of other files in folders
    by reason. Raises ValueError if nothing is found.
    """
    paths, ignored = [], Counter()
    for word in words:
        path = Path(word)
        if word == "-":
            paths += [Path(line.rstrip("\n")) for line in sys.stdin if line.strip()]
        elif path.is_dir() and not (kind.frames and frames_size(path)):
            inside = [name for name, _ in find_files(path, kind)]
            ignored.update(count_unused(path, {*inside}, kind))
            paths += [path / name for name in inside]
        else:
            paths.append(path)
    if not paths:
        where = f" in {', '.join(words)}" if words else ""
        raise ValueError(
            f"no {kind.name}{where}{first_reason(ignored)}: name files or folders of "
            f"{' '.join(kind.suffixes)} after the run"
        )
    return paths, dict(ignored)
