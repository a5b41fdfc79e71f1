"""How accurate is each format and precision? Trained runs on their whole test set, in every file.

    python benchmarks/shipping_digits.py RUN... --out benchmarks/shipping_digits.json

Files are written with the defaults of `fullstride export`, without a limit on the drop of top-1.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fullstride.deploy.comparison import ComparisonImages, compare
from fullstride.deploy.export import export
from fullstride.deploy.export_runs import calibration_images, comparison_images
from fullstride.deploy.formats import FORMATS, open_file
from fullstride.deploy.predict import inputs, logits, outputs
from fullstride.deploy.settings import ExportOptions
from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.environment import Environment
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.train.scoring import matching_data

OUTPUT = json_output("results of a benchmark", "environment", "rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--formats", nargs="*", default=["onnx", "openvino", "aoti", "pt2"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'run':24}{'file':16}{'difference':>11}{'other class':>12}{'top-1 %':>9}{'PyTorch':>9}")
    for run in args.runs:
        bundle = zoo.load(run)
        test = matching_data(run, bundle).test
        indices, pictures = zip(*test.readable(), strict=True)
        images = list(inputs("normalised", bundle.preprocessing, pictures))
        expected, labels = logits(bundle, images), [test.targets[index] for index in indices]
        val, calibration = comparison_images(run, bundle), calibration_images(run, bundle)
        for format in args.formats:
            for precision in FORMATS[format].precisions:
                how = dict(format=format, precision=precision, calibration=calibration)
                result = compare(file_outputs(bundle, val, images, **how), expected, labels)
                row = {"run": Path(run).name, "format": format, "precision": precision}
                rows.append({**row, **asdict(result)})
                print(
                    f"{row['run']:24}{f'{format} {precision}':16}"
                    f"{result.relative_difference:>11.1e}{result.images - result.same_class:>12}"
                    f"{result.file_accuracy:>9.2f}{result.accuracy:>9.2f}",
                    flush=True,
                )
    if args.out:
        results = {"environment": asdict(Environment.here("cpu")), "rows": rows}
        with atomic_write(args.out, OUTPUT) as path:
            path.write_text(json.dumps(results, indent=1) + "\n")


def file_outputs(
    bundle: Bundle,
    val: ComparisonImages,
    images: list[np.ndarray],
    *,
    format: str,
    calibration: Any = (),
    **how: Any,
) -> np.ndarray:
    """(N, K) of an exported file for `images`."""
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / f"net{FORMATS[format].suffix}"
        export(
            bundle,
            path,
            val,
            ExportOptions(format=format, max_drop=100, **how),
            calibration=calibration,
        )
        return outputs(open_file(path, trust=True), images)


if __name__ == "__main__":
    main()
