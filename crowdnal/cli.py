"""The command line: ``crowdnal train``, ``crowdnal demo``, ``crowdnal objectives``."""

from __future__ import annotations

import argparse
import inspect
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import crowdnal
from crowdnal.objectives import OBJECTIVES, table
from crowdnal.train import InputError, Interrupted, TrainConfig, run
from crowdnal.train.config import AUGMENTATIONS, FORMATS, OBJECTIVE_LR, SCHEDULES
from crowdnal.train.progress import Reporter

_EXAMPLES = """\
examples:
  A CSV file with columns task, worker, label; a frozen backbone finishes in minutes on a CPU:
    crowdnal train --images photos/ --annotations answers.csv --model resnet50 --pretrained \\
        --freeze-backbone --out run1
  A matrix with a row an image, -1 where there is no label, and a test set:
    crowdnal train --images photos/ --annotations answers.txt --items names.txt --model resnet50 \\
        --weights resnet50.safetensors --test-images test/ --test-labels test.csv --out run2
  Go on after an interruption: the same command with --resume.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: words after ``crowdnal``; default those of the process.

    Returns:
        Exit status: 0 done, 2 the user must mend something (one line on standard error says what), 130 interrupted.
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    try:
        return int(chosen.call(chosen))
    except (InputError, OSError, ImportError) as error:
        print(f"crowdnal: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print(f"\ncrowdnal: {stop}", file=sys.stderr)
        return 128 + signal.SIGINT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _one_line(error: BaseException) -> str:
    """The message; of an error that a data loader's worker handed over with its traceback, the last line."""
    text = str(error).strip()
    if "Original Traceback" in text:
        text = text.splitlines()[-1].partition(": ")[2]
    return " ".join(text.split())


def _train(chosen: argparse.Namespace) -> int:
    values = {f.name: getattr(chosen, f.name) for f in fields(TrainConfig)}
    values["options"] = tuple(values["options"] or ())
    if values["classes"] is not None:
        values["classes"] = tuple(name.strip() for name in values["classes"].split(","))
    run(TrainConfig(**values), resume=chosen.resume, reporter=Reporter(quiet=chosen.quiet))
    return 0


def _demo(chosen: argparse.Namespace) -> int:
    from crowdnal.train.demo import demo

    demo(chosen.out, chosen.seed, Reporter())
    return 0


def _objectives(chosen: argparse.Namespace) -> int:
    if chosen.markdown:
        print(table(plugins=True))
        return 0
    width = max(map(len, OBJECTIVES))
    for name in OBJECTIVES:
        try:
            cls = OBJECTIVES[name]
        except ImportError as error:
            print(f"crowdnal: warning: {_one_line(error)}", file=sys.stderr)
            continue
        summary = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
        print(f"{name:<{width}}  {summary} [{'; '.join(filter(None, (cls.link, cls.source)))}]")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crowdnal", description="Train classifiers on labels from many imperfect annotators."
    )
    parser.add_argument("--version", action="version", version=f"crowdnal {crowdnal.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_train(
        commands.add_parser(
            "train",
            help="train a timm model on a folder of images and a file of annotations",
            usage="crowdnal train --images DIR --annotations FILE --model NAME --out DIR [options]",
            description="Train a timm model on images whose labels come from many annotators. Writes the model, the\n"
            "estimated label of every image, the reliability of every annotator and a report.",
            allow_abbrev=False,
            epilog=_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    demo = commands.add_parser(
        "demo",
        help="see it work on scikit-learn's digits with simulated annotators (a minute, no download)",
        description="Write digits as images with labels of simulated annotators, train with majority votes and with "
        "CrowdLayer, and compare both on held-out truth.",
    )
    demo.add_argument("--out", type=Path, metavar="DIR", help="folder for images and runs (default: a temporary one)")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    demo.set_defaults(call=_demo)
    listing = commands.add_parser("objectives", help="list the objectives, those of other packages too")
    listing.add_argument("--markdown", action="store_true", help="as a table")
    listing.set_defaults(call=_objectives)
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(call=_train)
    group = parser.add_argument_group("data")
    add = group.add_argument
    add("--images", type=Path, required=True, metavar="DIR", help="folder of images, searched in depth")
    add(
        "--annotations",
        type=Path,
        required=True,
        metavar="FILE",
        help="labels: one a row (columns task, worker, label), or dense: a row an image, a column a worker",
    )
    add("--format", choices=FORMATS, default="auto", help="of the annotations (default: seen from the header)")
    add(
        "--items",
        type=Path,
        metavar="FILE",
        help="image of each row of a dense file without header (and of --truth with a label a line), one a line",
    )
    add("--task-column", default="task", metavar="NAME", help="default task")
    add("--worker-column", default="worker", metavar="NAME", help="default worker")
    add("--label-column", default="label", metavar="NAME", help="default label")
    add("--missing", metavar="MARKER", help="what stands for no label (default in dense files: -1; empty always does)")
    add("--classes", metavar="A,B,C", help="all classes in order, or names for labels 0, 1, 2 (default: those found)")
    add(
        "--truth",
        type=Path,
        metavar="FILE",
        help="true labels of annotated images (columns task, label, or a label a line with --items): only reported",
    )

    group = parser.add_argument_group("test set", "only reported, never used to choose anything")
    add = group.add_argument
    add("--test-images", type=Path, metavar="DIR", help="folder of images")
    add("--test-labels", type=Path, metavar="FILE", help="columns task, label, or a label a line with --test-items")
    add("--test-items", type=Path, metavar="FILE", help="image of each line of --test-labels, one a line")

    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", required=True, metavar="NAME", help="timm model, local-dir:PATH or hf-hub:NAME")
    add("--weights", metavar="WHAT", help="a checkpoint, or the name of an installed package that holds one")
    add("--pretrained", action="store_true", help="weights by timm's own download")
    add("--freeze-backbone", action="store_true", help="compute features once and train only the classifier on them")
    add("--feature-cache", type=Path, metavar="DIR", help="where features are kept (default: OUT/features)")
    add("--image-size", type=int, metavar="N", help="side of the input in pixels (default: the model's)")
    add(
        "--augment",
        choices=AUGMENTATIONS,
        default="standard",
        help="of training images: timm's standard (crops, flips, colours), light (small crops), none",
    )
    add("--drop-rate", type=float, metavar="P", help="dropout before the classifier (default: frozen 0.5, else 0)")

    group = parser.add_argument_group("objective")
    add = group.add_argument
    add("--objective", default="crowd-layer", metavar="NAME", help="see crowdnal objectives (default: crowd-layer)")
    add("--option", action="append", dest="options", metavar="KEY=VALUE", help="argument of the objective; repeatable")
    add(
        "--holdout",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="share of the labels kept out of training; the epoch that predicts them best is reported, and its "
        "weights kept in OUT/model_selected (default 0)",
    )

    group = parser.add_argument_group("training", "defaults depend: frozen backbone / given weights / random weights")
    add = group.add_argument
    add("--epochs", type=int, metavar="N", help="default 40 / 20 / 60")
    add("--batch-size", type=int, metavar="N", help="default 64")
    add("--optimizer", metavar="NAME", help="timm optimizer (default adam / adamw / adamw)")
    add("--lr", type=float, metavar="X", help="learning rate of the model (default 1e-3 / 1e-4 / 1e-3)")
    add("--objective-lr", type=float, metavar="X", help=f"of the annotators (default {OBJECTIVE_LR:g} times --lr)")
    add("--weight-decay", type=float, metavar="X", help="default 0 / 0.05 / 0.05; never on the objective")
    add("--schedule", choices=SCHEDULES, help="of both rates (default constant / cosine / cosine)")
    add("--seed", type=int, default=0, metavar="N", help="default 0")

    group = parser.add_argument_group("running")
    add = group.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for everything that is written")
    add("--resume", action="store_true", help="go on with the run in OUT; it ends as if it had not been interrupted")
    add("--workers", type=int, metavar="N", help="processes that read images (default: one a core, 8 at most)")
    add("--threads", type=int, metavar="N", help="of each operation on the CPU (default: torch's own choice)")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    add("--amp", action="store_true", help="bfloat16 autocast")
    add("--quiet", action="store_true", help="print nothing but errors")
