"""Problems in which one item or one annotator has nearly all annotations, for tests of what long sums lose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from crowdnal import reference
from crowdnal.data import Annotations
from support.compare import assert_within
from support.op_arguments import arguments
from support.op_checks import Op, as_tuple, to_float
from support.problems import Problem

OUTPUTS = {  # whose terms do not cancel
    "mix_items": (0,),
    "mix_annotators": (0,),
    "softmax_link_backward": (2,),
    "mixture_link_backward": (0,),
    "label_log_likelihood": (0,),
    "label_counts": (0,),
    "joint_link": (0, 1),
    "em_step": (2, 3),
    "pair_confusion_backward": (0, 1),
}
WHERE = ("one item", "one annotator")


class LongProblem(Problem):
    """Terms of one sign: what is lost of a sum is not hidden by cancellation."""

    def grad(self, cols: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return single(torch.rand(self.annotations.num_annotations, cols, generator=generator))


def single(values: Tensor) -> Tensor:
    """float64 that float32 holds exactly, so that errors are those of the sums."""
    return values.float().double()


def long_problem(where: str, classes: int, labels: int, length: int = 200_000) -> LongProblem:
    """`length` annotations of one item (by 50 annotators) or of one annotator (an item each).

    The weights of an item's add up to about 10: its posterior stays undecided, and shows what is lost.
    """
    generator = torch.Generator().manual_seed(5)
    every, none = torch.arange(length), torch.zeros(length, dtype=torch.long)
    one_item = torch.tensor([0, length]), every % 50
    indptr, annotator = one_item if where == "one item" else (torch.arange(length + 1), none)
    label = torch.randint(labels, (length,), generator=generator)
    num_annotators = 50 if where == "one item" else 1
    annotations = Annotations(indptr, annotator, label, num_annotators=num_annotators, num_classes=labels)

    def rand(*sizes: int) -> Tensor:
        return single(torch.rand(*sizes, generator=generator))

    return LongProblem(
        annotations,
        rand(annotations.num_items, classes),
        rand(num_annotators, classes, labels),
        rand(annotations.num_items, labels),
        single(rand(length) * (20 / length if where == "one item" else 1.0)),
        5,
    )


def check_long_segments(op: Op, name: str, where: str) -> None:
    """Of `op`, which computes in float32 what the op of that name does."""
    for sizes in ((3, 3), (2, 34)) if name.startswith("mix_") else ((3, 3),):
        problem = long_problem(where, *sizes)
        args = arguments(problem, name, reference.NONE)[1 if name == "em_step" else 0]
        check_share(op, getattr(reference, name), args, OUTPUTS[name])


def check_share(op: Op, reference: Op, args: tuple[Any, ...], outputs: Iterable[int]) -> None:
    """Errors of these outputs in float32 are at most 2e-6 of the output's largest value."""
    args = tuple(single(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    ours, truth = as_tuple(op(*to_float(args))), as_tuple(reference(*args))
    for n in outputs:
        assert_within(ours[n], truth[n], 2e-6 * truth[n].abs().max(), f"output {n}")
