"""Which methods suit some annotations, in the words of somebody who has to train a model on them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from crowdnal.data.summary._agreement import Agreement
from crowdnal.data.summary._counts import Counts

_FEW = 10  # labels, from which nobody can tell how an annotator errs


class Advice(NamedTuple):
    """A sentence, and the methods of ``crowdnal train --objective`` or aggregations that it is about."""

    text: str
    suits: tuple[str, ...] = ()
    does_not_suit: tuple[str, ...] = ()


def advise(counts: Counts, agreement: Agreement, groups: list[int]) -> list[Advice]:
    """What the numbers suggest; what to try is to be compared on held-out labels (``--holdout``)."""
    if not len(counts.item):
        return [Advice("There are no labels.")]
    return [*_methods(counts), *_warnings(counts, agreement, groups)]


def _methods(counts: Counts) -> list[Advice]:
    num_classes = int((counts.per_class > 0).sum())
    per_item = counts.per_item[counts.per_item > 0]
    per_annotator = counts.per_annotator[counts.per_annotator > 0]
    by_few = float(per_annotator[per_annotator < _FEW].sum() / per_annotator.sum())
    found = []
    if len(per_annotator) == 1:
        return [
            Advice(
                "One annotator gave every label: nobody contradicts anybody, so errors cannot be told from truth. "
                "Train as on any labels; single-confusion allows for errors that the classifier finds unlikely.",
                ("majority-vote", "single-confusion"),
            )
        ]
    if by_few > 0.5:
        found.append(
            Advice(
                f"Most labels come from annotators who gave fewer than {_FEW}: too few to learn how each of them errs. "
                "Let annotators share it: groups of them, or one confusion for all. The vote is hard to beat.",
                ("soft-majority-vote", "single-confusion", "cmm", "dl-wc"),
                ("crowd-layer", "dl-ds", "dl-em", "dawid_skene"),
            )
        )
    if per_item.mean() < 1.5:
        found.append(
            Advice(
                "Most items have one label: votes cannot outvote anybody, and aggregation before training has nothing "
                "to go by. Only a classifier, which sees what items have in common, tells good annotators from bad.",
                () if by_few > 0.5 else ("crowd-layer", "conal", "trace"),
                ("dawid_skene", "dl-ds", "majority-vote"),
            )
        )
    if by_few <= 0.5 and np.median(per_annotator) < 3 * num_classes**2 and num_classes > 2:
        found.append(
            Advice(
                f"The usual annotator gave {np.median(per_annotator):g} labels for a confusion matrix of "
                f"{num_classes} x {num_classes}: keep matrices small (rank=, groups=, variant=VW) or let annotators "
                "share one (conal, cmm).",
                ("conal", "cmm", "crowd-layer"),
            )
        )
    elif by_few <= 0.5 and per_item.mean() >= 1.5:
        found.append(
            Advice(
                "Annotators gave enough labels, and share enough items, to learn how each of them errs.",
                ("crowd-layer", "conal", "dl-em", "dl-ds"),
            )
        )
    return found


def _warnings(counts: Counts, agreement: Agreement, groups: list[int]) -> list[Advice]:
    found = []
    if len(groups) > 1 and groups[1] > 1:
        found.append(
            Advice(
                f"The annotators fall into {len(groups)} groups that share no item: labels alone cannot say which "
                "group is better; a classifier trained on all of them can.",
                ("crowd-layer", "conal", "dl-em"),
                ("dawid_skene", "dl-ds"),
            )
        )
    if agreement.alpha is not None and agreement.alpha < 0.2:
        found.append(
            Advice(
                f"Agreement is little better than chance (Krippendorff's alpha {agreement.alpha:.2f}): read some items "
                "and the instructions before training; every method needs most labels to be right."
            )
        )
    rare = counts.per_class[(counts.per_class > 0)].min() / len(counts.item)
    if rare < 0.01:
        found.append(
            Advice(
                "A class has fewer than one label in a hundred: methods that model errors can explain it away. "
                "Look at its recall, and give a prior or smoothing where a method takes one."
            )
        )
    unused = int((counts.per_class == 0).sum())
    if unused:
        found.append(Advice(f"{unused} of {len(counts.per_class)} classes have no label at all."))
    return found
