"""``crowdnal inspect``: what a file of annotations holds, how far annotators agree, and which methods suit."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from crowdnal.data import Annotations, describe_file, read_answers, read_lines
from crowdnal.data.summary import Summary
from crowdnal.train import figures
from crowdnal.train.config import READING, check_option
from crowdnal.train.data import as_options, how_to_read, reading_progress
from crowdnal.train.files import write_text
from crowdnal.train.progress import Reporter

_SHOWN = 8  # ids or classes in a line


class Inspection(NamedTuple):
    """What was read, what there is to know of it, and what the reader warned of."""

    file: dict[str, Any]
    summary: Summary
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"file": self.file, **self.summary.to_dict(), "warnings": self.warnings}


def inspect_file(path: Path, options: Any, reporter: Reporter) -> Inspection:
    """Read a file and sum it up.

    Args:
        path: of the annotations.
        options: an attribute for each of ``READING``, as `TrainConfig` has them.
        reporter: shows how far the reading is.

    Raises:
        InputError: naming the file, the line and the fix.
    """
    for name in READING:
        check_option(name, getattr(options, name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # before what hands warnings on: whatever filters the user has
        with as_options():
            how, want = how_to_read(options)
            lines = None if options.items is None else read_lines(options.items)
            file = {"path": str(path), **describe_file(path, how, want.columns)}
            with reading_progress(reporter, path) as progress:
                answers = read_answers(path, how._replace(progress=progress), want, lines)
            annotations = Annotations.trusted(answers.fields(None, None, options.classes))
    file["no label"] = dict(answers.missing)
    told = list(dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning))
    return Inspection(file, annotations.summary(), told)


def write_json(path: Path | None, found: Inspection) -> None:
    """To a file, or to standard output."""
    text = json.dumps(found.to_dict(), indent=1)
    if path is None:
        print(text)
    else:
        write_text(path, text + "\n")


def show(found: Inspection, reporter: Reporter) -> None:
    """As tables and sentences in the terminal."""
    file, summary = found.file, found.summary
    rows = [[what, _value(value)] for what, value in file.items() if what not in ("path", "no label")]
    markers = [f"{word or 'empty'} ({number:,})" for word, number in file["no label"].items()]
    rows += [["no label", _some(markers)]]
    reporter.table(["what was read", ""], [row for row in rows if row[1]], title=file["path"])
    reporter.table(["", ""], [list(fact) for fact in facts(summary)])
    spreads = {"labels per item": summary.labels_per_item, "labels per annotator": summary.labels_per_annotator}
    shown = [[name, *(f"{value:,.4g}" for value in spread)] for name, spread in spreads.items()]
    reporter.table(["", "least", "median", "mean", "most"], shown)
    total = max(summary.annotations, 1)
    most = sorted(summary.classes.items(), key=lambda pair: -pair[1])[:24]
    reporter.table(["class", "labels", "share"], [[str(k), f"{n:,}", f"{n / total:.1%}"] for k, n in most])
    for warning in found.warnings:
        reporter.say(f"warning: {warning}")
    for advice in summary.advice:
        suits = f" Try {', '.join(advice.suits)}." if advice.suits else ""
        rather_not = f" Rather not {', '.join(advice.does_not_suit)}." if advice.does_not_suit else ""
        reporter.say(f"- {advice.text}{suits}{rather_not}")


def facts(summary: Summary) -> Iterator[tuple[str, str]]:
    """What there is to know, as pairs of what it is and how much."""
    yield "items", f"{summary.annotated:,} with labels of {summary.items:,}"
    yield "annotators", f"{summary.active:,} with labels of {summary.annotators:,}"
    again = f", {summary.repeated:,} of them again by one annotator for one item" if summary.repeated else ""
    yield "labels", f"{summary.annotations:,}{', weighted' if summary.weighted else ''}{again}"
    yield "classes in order", _some(list(summary.classes))
    yield "items with two labels or more", f"{summary.shared:,}"
    yield "all labels the same", _share(summary.unanimous, summary.shared)
    yield "tied votes", _share(summary.tied, summary.shared)
    yield "no label twice", _of(summary.num_disputed, summary.disputed)
    agreed = summary.agreement
    if agreed.alpha is not None:
        of = "" if agreed.alpha_items == summary.shared else f", on {agreed.alpha_items:,} items drawn at random"
        yield "Krippendorff's alpha", f"{agreed.alpha:.3f}{of}"
    if agreed.ordinal_alpha is not None:
        yield "the same, if the numbers are an order", f"{agreed.ordinal_alpha:.3f}"
    if agreed.kappa is not None:
        yield (
            "Fleiss' kappa",
            f"{agreed.kappa:.3f}, on the {agreed.kappa_items:,} items with {agreed.kappa_labels} labels",
        )
    if len(summary.groups) > 1:
        yield "groups of annotators that share no item", _some([f"{size:,}" for size in summary.groups])
    odd = summary.suspects
    yield "annotators who answer at random", _of(len(odd.random), odd.random)
    yield "always the same", _of(len(odd.constant), odd.constant)
    yield "as another does", _of(len(odd.copies), [f"{a} and {b}" for a, b in odd.copies])


def picture(summary: Summary) -> bytes:
    """PNG: labels per item, labels per annotator, labels per class."""
    return figures.crowd(summary.items_by_labels, summary.annotators_by_labels, summary.classes)


def _value(value: Any) -> str:
    return _some(value) if isinstance(value, list) else str(value)


def _some(names: list[Any]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(map(str, names[:_SHOWN])) + more


def _of(number: int, names: list[Any]) -> str:
    if not number:
        return "none"
    more = ", ..." if number > _SHOWN else ""
    return f"{number:,}: {', '.join(map(str, names[:_SHOWN]))}{more}"


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.1f} %)" if whole else f"{part:,}"
