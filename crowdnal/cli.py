"""The command line: ``crowdnal train``, ``crowdnal inspect``, ``crowdnal demo``, ``crowdnal objectives``."""

from __future__ import annotations

import argparse
import csv
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import crowdnal
from crowdnal.objectives import table
from crowdnal.train import InputError, Interrupted, OtherProcessFailed, TrainConfig, plan, run
from crowdnal.train.config import AUTO, DEFAULTS, GROUPS, OPTIONS, READING, VALUE_TYPES, default_in_words, flag
from crowdnal.train.options import description, facts, methods, objective_class, option_help, summary
from crowdnal.train.progress import Reporter

_EXAMPLES = """\
examples:
  A CSV file with columns task, worker, label; a frozen backbone finishes in minutes on a CPU:
    crowdnal train --images photos/ --annotations answers.csv --model resnet50 --pretrained \\
        --freeze-backbone --out run1
  A matrix with a row per image, -1 where there is no label, and a test set:
    crowdnal train --images photos/ --annotations answers.txt --items names.txt --model resnet50 \\
        --weights resnet50.safetensors --test-images test/ --test-labels test.csv --out run2
  Go on after an interruption: the same command with --resume.
"""
_ADVICE = """
Begin with feature-em, the default, and compare it with soft-majority-vote, which does not model annotators;
--objective auto compares six of them. For very many annotators with few labels each: cmm, dl-wc, ccc.
An objective's options and details: crowdnal objectives NAME."""
_METAVARS = {int: "N", float: "X", str: "NAME", Path: "FILE"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: words after ``crowdnal``; default those of the process.

    Returns:
        Exit status: 0 done, 2 the user must fix something (one line on standard error says what), 130 interrupted
        (SIGINT), 143 terminated (SIGTERM).
    """
    stopped = [signal.SIGINT]

    def terminate(*_: Any) -> None:
        stopped[0] = signal.SIGTERM
        raise KeyboardInterrupt

    catches = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if catches else None
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _tell
            try:
                return _call(sys.argv[1:] if arguments is None else arguments)
            finally:
                sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has enough of it
        sys.stdout = open(os.devnull, "w")  # so that nothing fails at exit
        return 128 + signal.SIGPIPE
    except (InputError, OSError, ImportError) as error:
        print(f"crowdnal: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except OtherProcessFailed:
        return 2
    except Interrupted as stop:
        print(f"\ncrowdnal: {stop}", file=sys.stderr)
        return 128 + stopped[0]
    except KeyboardInterrupt:
        return 128 + stopped[0]
    finally:
        if catches:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _call(words: Sequence[str]) -> int:
    parser = _parser()
    chosen = parser.parse_args(
        sorted(words, key=lambda word: word in ("-h", "--help"))
    )  # so that help knows --objective
    if chosen.command is None:
        parser.print_help()
        return 0
    return int(chosen.call(chosen))


def _tell(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """A warning of the user's files in a line, of anything else as Python shows it; in the first process only."""
    if os.environ.get("RANK", "0") != "0":
        return
    if category is UserWarning:
        print(f"crowdnal: warning: {_one_line(message)}", file=sys.stderr)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


def _one_line(error: BaseException | str) -> str:
    """The message; of an error that a data loader's worker handed over with its traceback, the last line."""
    text = str(error).strip()
    if "Original Traceback" in text:
        text = text.splitlines()[-1].partition(": ")[2]
    return " ".join(text.split())


def _train(chosen: argparse.Namespace) -> int:
    values = {name: getattr(chosen, name) for name in OPTIONS}
    config = TrainConfig(**{**values, "options": tuple(values["options"])})
    reporter = Reporter(quiet=chosen.quiet)
    if chosen.dry_run:
        plan(config, resume=chosen.resume, reporter=reporter)
    else:
        run(config, resume=chosen.resume, reporter=reporter)
    return 0


def _inspect(chosen: argparse.Namespace) -> int:
    from crowdnal.train import inspection

    if not chosen.annotations.exists():
        raise InputError(f"{chosen.annotations} does not exist")
    reporter = Reporter(quiet=chosen.json is not None)
    found = inspection.inspect_file(chosen.annotations, chosen, reporter)
    if chosen.json is None:
        inspection.show(found, reporter)
    else:
        inspection.write_json(None if chosen.json == "-" else Path(chosen.json), found)
    if chosen.picture is not None:
        chosen.picture.write_bytes(inspection.picture(found.summary))
    return 0


def _demo(chosen: argparse.Namespace) -> int:
    from crowdnal.train.demo import demo

    demo(chosen.out, chosen.seed, Reporter())
    return 0


def _objectives(chosen: argparse.Namespace) -> int:
    if chosen.markdown:
        print(table(plugins=True))
        return 0
    if chosen.name is not None:
        cls = objective_class(chosen.name, "NAME")
        told = "".join(f"{word:<8}{text}\n" for word, text in facts(cls).items())
        print(f"{chosen.name}\n\n{told}\n{description(cls)}\n\noptions (--option KEY=VALUE):\n{option_help(cls)}")
        return 0
    width = max(map(len, methods()))
    for name in methods():
        try:
            cls = objective_class(name)
        except ImportError as error:
            print(f"crowdnal: warning: {_one_line(error)}", file=sys.stderr)
            continue
        _, *where = facts(cls).values()  # link and source
        print(f"{name:<{width}}  {summary(cls)}\n{'':<{width}}  {'; '.join(where)}")
    print(_ADVICE)
    return 0


class _TrainHelp(argparse.Action):
    """The help of ``crowdnal train`` with the options of the objective that was named before it."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        parser.print_help()
        name = namespace.objective
        told = "  none" if name == AUTO else option_help(objective_class(name))
        print(f"\noptions of {name} (of another objective: --objective NAME --help):\n{told}")
        parser.exit()


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
            add_help=False,
            epilog=_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    inspect = commands.add_parser(
        "inspect",
        help="say what a file of annotations holds, how far annotators agree and which methods suit",
        description="Read a file of annotations as train does and sum it up: labels per item and annotator, agreement, "
        "annotators who answer at random, always the same or as another does, and which methods suit.",
        allow_abbrev=False,
    )
    inspect.add_argument("annotations", type=Path, metavar="FILE", help=OPTIONS["annotations"].help)
    told = inspect.add_argument_group("output")
    told.add_argument("--json", nargs="?", const="-", metavar="FILE", help="as JSON, here or into a file")
    told.add_argument("--picture", type=Path, metavar="FILE", help="as a picture too, PNG")
    reading = inspect.add_argument_group("reading")
    for name in READING:
        _add_option(reading, name)
    inspect.set_defaults(call=_inspect)
    demo = commands.add_parser(
        "demo",
        help="see it work on scikit-learn's digits with simulated annotators (a minute, no download)",
        description="Write digits as images with labels of simulated annotators, train with majority votes and with "
        "the default objective, and compare both on held-out truth.",
    )
    demo.add_argument("--out", type=Path, metavar="DIR", help="folder for images and runs (default: a temporary one)")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    demo.set_defaults(call=_demo)
    listing = commands.add_parser("objectives", help="list the objectives, or tell all about one and its options")
    listing.add_argument("name", nargs="?", metavar="NAME", help="of an objective, of another package's too")
    listing.add_argument("--markdown", action="store_true", help="the list as a table")
    listing.set_defaults(call=_objectives)
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(call=_train)
    for title, note in GROUPS.items():
        group = parser.add_argument_group(title, note or None)
        for name, option in OPTIONS.items():
            if option.group == title:
                _add_option(group, name)
    add = group.add_argument  # the last group is about how the command runs
    add("--resume", action="store_true", help="go on with the run in OUT; it ends as if it had not been interrupted")
    add("--dry-run", action="store_true", help="read and check everything, say what would be done, write nothing")
    add("--quiet", action="store_true", help="print nothing but errors")
    add("-h", "--help", action=_TrainHelp, nargs=0, help="this, with the options of --objective")


def _add_option(group: argparse._ArgumentGroup, name: str) -> None:
    option, kind, default = OPTIONS[name], VALUE_TYPES[name], DEFAULTS[name]
    words = default_in_words(name)
    told: dict[str, Any] = {"help": f"{option.help} (default: {words})" if words else option.help, "dest": name}
    if default is MISSING:
        told["required"] = True
    else:
        told["default"] = default
    if kind is bool:
        group.add_argument(flag(name), action="store_true", **told)
    elif get_origin(kind) is Literal:
        group.add_argument(flag(name), choices=get_args(kind), **told)
    elif name == "options":
        group.add_argument(flag(name), action="append", metavar=option.metavar, **{**told, "default": []})
    else:
        parse = _comma_separated if get_origin(kind) is tuple else kind
        group.add_argument(flag(name), type=parse, metavar=option.metavar or _METAVARS[kind], **told)


def _comma_separated(text: str) -> tuple[str, ...]:
    """Names, in quotes where they have a comma themselves."""
    return tuple(name.strip() for name in next(csv.reader([text], skipinitialspace=True), [""]))
