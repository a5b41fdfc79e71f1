"""What does each format and precision cost in accuracy? Trained runs on their whole test set, by every file.

    python benchmarks/shipping_digits.py runs/demo/* --out benchmarks/shipping_digits.json

Files are written as `fullstride export` does by default, but for its limits: what a file loses is told, not refused.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from fullstride.deploy.export import ComparisonImages, compare, export
from fullstride.deploy.formats import FORMATS, open_file
from fullstride.deploy.predict import inputs, logits, outputs
from fullstride.deploy.run_images import calibration_images, comparison_images
from fullstride.measure.environment import Environment
from fullstride.nets import zoo
from fullstride.storage import atomic_write
from fullstride.train.scoring import matching_data


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--formats", nargs="*", default=["onnx", "openvino", "aoti", "pt2"])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = []
    print(f"{'run':24}{'file':16}{'difference':>11}{'other class':>12}{'top-1 %':>9}{'PyTorch':>9}")
    for run in asked.runs:
        bundle = zoo.load(run)
        test = matching_data(run, bundle).test
        found = list(test.readable())
        sample = ComparisonImages(
            [picture for _, picture in found], [test.targets[index] for index, _ in found]
        )
        shown = list(inputs("normalised", bundle.preprocessing, sample.pictures))
        expected, minival = logits(bundle, shown), comparison_images(run, bundle)
        calibration = calibration_images(run, bundle)
        for format in asked.formats:
            for precision in FORMATS[format].precisions:
                with TemporaryDirectory() as scratch:
                    path = Path(scratch) / f"net{FORMATS[format].suffix}"
                    how = dict(
                        format=format, precision=precision, calibration=calibration, max_drop=100
                    )
                    export(bundle, path, minival, **how)
                    found_answers = outputs(open_file(path, trust=True), shown)
                check = compare(found_answers, expected, sample.labels)
                rows.append(
                    {
                        "run": Path(run).name,
                        "format": format,
                        "precision": precision,
                        **asdict(check),
                    }
                )
                print(
                    f"{Path(run).name:24}{f'{format} {precision}':16}{check.relative_difference:>11.1e}"
                    f"{check.images - check.same_top1:>12}{check.file_top1:>9.2f}{check.top1:>9.2f}",
                    flush=True,
                )
    if asked.out:
        with atomic_write(asked.out) as beside:
            environment = asdict(Environment.here("cpu"))
            beside.write_text(
                json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
