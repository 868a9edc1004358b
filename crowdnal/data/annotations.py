"""The one data structure: annotations of items by annotators, in CSR form by item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from crowdnal._utils.extras import require
from crowdnal.data import _readers, _select, _validate
from crowdnal.data._dynamic import mark_dynamic
from crowdnal.data._fields import Fields
from crowdnal.data._files import Reading
from crowdnal.data._labels import USUAL
from crowdnal.data._long import Long
from crowdnal.data._vocabulary import Ids, Vocabulary, decode

if TYPE_CHECKING:
    import pandas

    from crowdnal.data.summary import Summary

__all__ = ["Annotations"]


@cache
def _has_gpu() -> bool:
    """Asked of the driver, where it can be: a worker forked from a process that uses its GPU has to know too."""
    return torch.backends.cuda.is_built() and torch.cuda.device_count() > 0


class Annotations:
    """Labels that annotators gave to items: entries ``indptr[i]:indptr[i + 1]`` belong to item ``i``.

    Legal: items without annotations, annotators without annotations, classes nobody used, the same
    annotator twice on one item, no items at all.

    Args:
        indptr: ``[B + 1]`` offsets from 0 to nnz, non-decreasing.
        annotator: ``[nnz]`` integers in ``[0, num_annotators)``.
        label: ``[nnz]`` integers in ``[0, num_classes)``.
        num_annotators: R, all annotators of the data set, not only those present here.
        num_classes: K, the size of the set that labels come from.
        weight: ``[nnz]`` finite, not negative; None means 1 everywhere.
        item_id: ``[B]`` row of each item in the full data set; None means that nobody said: if this is the full data
            set, its rows, and indexing it gives them.
        vocabulary: the original ids, for reports.

    Raises:
        ValueError: naming the annotation, its item and the fix.
    """

    indptr: Tensor
    annotator: Tensor
    label: Tensor
    weight: Tensor | None
    item_id: Tensor | None
    num_annotators: int
    num_classes: int
    vocabulary: Vocabulary | None
    _item: Tensor | None
    _order: Tensor | None
    _plan: Tensor | None
    _active_annotators: Tensor | None
    _active_index: Tensor | None

    def __init__(
        self,
        indptr: Any,
        annotator: Any,
        label: Any,
        *,
        num_annotators: int,
        num_classes: int,
        weight: Any = None,
        item_id: Any = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._fill(
            _validate.check_fields(indptr, annotator, label, num_annotators, num_classes, weight, item_id, vocabulary)
        )

    def _fill(self, fields: Fields) -> None:
        self.num_annotators, self.num_classes = fields.num_annotators, fields.num_classes
        self.indptr, self.annotator, self.label = fields.indptr, fields.annotator, fields.label
        self.weight, self.item_id, self.vocabulary = fields.weight, fields.item_id, fields.vocabulary
        self._item, self._order, self._plan = fields.item, fields.order, fields.plan
        self._active_annotators, self._active_index = fields.active_annotators, fields.active_index
        if not torch.compiler.is_compiling():
            for value in fields:
                mark_dynamic(value)

    @classmethod
    def trusted(cls, fields: Fields) -> Self:
        """Annotations of fields that are known to be right: no value is read."""
        new = object.__new__(cls)
        new._fill(fields)
        return new

    @property
    def fields(self) -> Fields:
        """Everything it holds, as one named tuple."""
        return Fields(
            num_annotators=self.num_annotators,
            num_classes=self.num_classes,
            indptr=self.indptr,
            annotator=self.annotator,
            label=self.label,
            weight=self.weight,
            item_id=self.item_id,
            vocabulary=self.vocabulary,
            item=self._item,
            order=self._order,
            plan=self._plan,
            active_annotators=self._active_annotators,
            active_index=self._active_index,
        )

    # Reading

    @classmethod
    def from_long(
        cls,
        data: pandas.DataFrame | Mapping[Any, Any] | Sequence[Mapping[str, Any]] | str | PathLike[str],
        *,
        task: str = "task",
        worker: str = "worker",
        label: str | Mapping[str, float] = "label",
        weight: str | None = None,
        probabilities: Sequence[str] | None = None,
        last: str | bool = False,
        items: Ids = None,
        annotators: Ids = None,
        classes: Ids = None,
        unsure: Any = (),
        missing: Any = USUAL,
    ) -> Self:
        """Read one answer a row.

        Ids may be anything hashable and are kept in ``vocabulary``; those of a file are text, as written. A row whose
        label is missing gives no annotation; its task and worker still count. Labels of a file are numbers if all of
        them are, after missing ones are out.

        Args:
            data: DataFrame (pandas, polars, Arrow), mapping of columns, structured array, list of records,
                ``{item: {annotator: label}}``, or the path of a file (see :meth:`read`).
            task: column of the item.
            worker: column of the annotator.
            label: column of the label; or, where there is a second choice, what a label in each of several columns
                counts: ``{"first": 1.0, "second": 0.5}``.
            weight: column of the weight, such as a confidence: finite and not negative.
            probabilities: instead of ``label``, a column per class: each class with a probability above 0 becomes a
                label of that weight. ``classes`` names the columns otherwise.
            last: column of the time (numbers or dates): of several answers of a worker to a task, the last counts.
                True goes by the order of the rows; False keeps all.
            items: ids of the items in the order wanted, with or without annotations; an int n means
                ``range(n)``, here and below. Default: those found, in order of first appearance.
            annotators: ids of all annotators, so that R is the same over several splits. Default: those
                found, in natural order (w9 before w10), or in that of an ordered or rearranged categorical.
            classes: ids of all classes. Default: those found, in that order too. Where they are names, a file may also
                number them from 0.
            unsure: label or labels that are answers but no classes: they come last, so that K > C.
            missing: label or labels that mean "not annotated", as number or text. Default: None, NaN and pd.NA, and in
                a file empty cells and words such as NA, null and None, which those given here add to; ``()`` means
                that in a file only empty cells are missing.

        Raises:
            ValueError: for an unknown or missing id, naming the row (the first is 0), or the line of a file.
        """
        want = Long(task, worker, label, weight, probabilities, last, unsure, missing, classes)
        return cls.trusted(_readers.long_fields(data, want, items, annotators))

    @classmethod
    def from_dense(
        cls,
        matrix: Any,
        *,
        num_classes: int | None = None,
        missing: Any = USUAL,
        items: Ids = None,
        annotators: Ids = None,
        classes: Ids = None,
    ) -> Self:
        """Read a matrix ``[N, R]`` of labels, or soft labels ``[N, R, K]``.

        A soft label is a probability for each class: each above 0 becomes a label of that weight, so that a loss has
        the cross-entropy with the distribution. All -1 or NaN: no answer.

        Args:
            matrix: tensor, array (also masked), nested list, DataFrame (its index and columns are the ids), or the
                path of a file with a row per item.
            num_classes: K; labels are 0 to K-1 as they stand. Default: those found are sorted and numbered.
            missing: label or labels that mean "not annotated", beside NaN, None and pd.NA. Default: -1, unless the
                matrix has NaN or the like, so that -1 can be a class; None or ``()``: nothing more.
            items: ids of the rows; for a DataFrame the items wanted, found by id.
            annotators: ids of the columns; for a DataFrame all annotators, found by id.
            classes: ids of all classes, instead of ``num_classes``.

        Raises:
            ValueError: for a label outside the classes, naming row and column (the first is 0).
        """
        return cls.trusted(_readers.dense_fields(matrix, num_classes, missing, items, annotators, classes))

    @classmethod
    def read(
        cls,
        path: str | PathLike[str],
        *,
        format: str | None = None,
        columns: Sequence[str] | None = None,
        separator: str | None = None,
        encoding: str | None = None,
        progress: Callable[[int], None] | None = None,
        task: str = "task",
        worker: str = "worker",
        label: str | Mapping[str, float] = "label",
        weight: str | None = None,
        probabilities: Sequence[str] | None = None,
        last: str | bool = False,
        items: Ids = None,
        annotators: Ids = None,
        classes: Ids = None,
        unsure: Any = (),
        missing: Any = USUAL,
    ) -> Self:
        """Read a file: delimited text (also packed), Parquet, Arrow, JSON, JSON lines, ``.npy``, or a tool's export.

        What it is and how it is encoded is seen from its content, not its name. Rows of text may end early (the rest
        is empty) and repeat the header (left out).

        Args:
            path: of the file.
            format: ``"long"``, ``"dense"``, or a name of ``crowdnal.data.formats``. Default: long if the columns are
                there, dense if the cells look like labels; an export is proposed, never guessed.
            columns: names of all columns, for a file without a header.
            separator: between cells. Default: that under which the first line has the names, or the most regular.
            encoding: of text. Default: by its mark, else UTF-8.
            progress: called with the number of characters (of Parquet: bytes) read so far.
            task: this and all that follow as for :meth:`from_long`; for a matrix ``items``, ``annotators``,
                ``classes``, ``unsure`` and ``missing`` as for :meth:`from_dense`.
            worker: see there.
            label: see there.
            weight: see there.
            probabilities: see there.
            last: see there.
            items: see there.
            annotators: see there.
            classes: see there.
            unsure: see there.
            missing: see there.

        Raises:
            ValueError: naming the file, the line and the fix.
        """
        want = Long(task, worker, label, weight, probabilities, last, unsure, missing, classes)
        how = Reading(format, columns, separator, encoding, progress)
        return cls.trusted(_readers.file_fields(path, how, want, items, annotators))

    @classmethod
    def from_label_matrix(cls, matrix: Any, *, num_classes: int, abstain: Any = -1) -> Annotations:
        """Read a weak-supervision label matrix ``[N, R]``, one column a labelling function."""
        return cls.from_dense(matrix, num_classes=num_classes, missing=abstain)

    # Telling

    def summary(self) -> Summary:
        """What there is to know before a model is trained; ``crowdnal inspect`` shows it.

        Labels per item and annotator, agreement, votes and ties, groups of annotators that share no items, annotators
        who answer at random, always the same or as another does, items nobody agrees on, and which methods suit. Of
        very many items agreement and odd annotators are judged by a random part, always the same.

        Raises:
            ImportError: krippendorff, statsmodels or scipy is missing; the message names the extra.
        """
        from crowdnal.data.summary import summarize

        return summarize(self)

    # Writing

    def to_long(self) -> pandas.DataFrame:
        """DataFrame task, worker, label (and weight) with the original ids, items in order."""
        pd = require("pandas", extra="train")
        item = self.item if self.item_id is None else self.item_id[self.item]
        ids = self.vocabulary
        frame: dict[str, Any] = {
            "task": decode(item, None if ids is None else ids.items),
            "worker": decode(self.annotator, None if ids is None else ids.annotators),
            "label": decode(self.label, None if ids is None else ids.classes),
        }
        if self.weight is not None:
            frame["weight"] = self.weight.detach().cpu().double().numpy()
        return pd.DataFrame(frame)

    def to_dense(self, missing: int = -1) -> Tensor:
        """``[B, R]`` int64 matrix of labels, ``missing`` where there is none.

        Raises:
            ValueError: if an annotator labelled an item twice: a matrix holds one label.
        """
        if not isinstance(missing, (int, np.integer)):
            raise ValueError(f"missing must be an integer, as the labels of the matrix are; got {missing!r}")
        cell = self.item * self.num_annotators + self.annotator
        ordered, n = torch.sort(cell, stable=True)
        repeated = ordered.diff() == 0
        if bool(repeated.any()):
            raise ValueError(
                f"{self._describe(int(n[1:][repeated].min()))} has more than one label, and a matrix holds "
                "one; keep one of them with select(), or use to_long()"
            )
        dense = torch.full((self.num_items * self.num_annotators,), missing, device=self.device)
        dense[cell] = self.label
        return dense.view(self.num_items, self.num_annotators)

    def votes(self, weighted: bool = True) -> Tensor:
        """``[B, K]`` number of each label, or its total weight if there are weights and ``weighted``."""
        size = self.num_items * self.num_classes
        cell = self.item * self.num_classes + self.label
        votes = cell.new_zeros(size).scatter_add(0, cell, torch.ones_like(cell))
        if self.weight is not None and weighted and self.num_annotations > 0:
            # Unlike scatter_add of floats, a sum in a fixed order on every device.
            weight = self.weight[torch.argsort(cell, stable=True)]
            return torch.segment_reduce(weight, "sum", lengths=votes, unsafe=True).view(-1, self.num_classes)
        dtype = torch.get_default_dtype() if self.weight is None else self.weight.dtype
        return votes.to(dtype).view(self.num_items, self.num_classes)

    def _describe(self, n: int) -> str:
        """Item and annotator of annotation n, for messages."""
        row, annotator = int(self.item[n]), int(self.annotator[n])
        text = f"item {row}, annotator {annotator}"
        if self.vocabulary is not None:
            i = row if self.item_id is None else int(self.item_id[row])
            text += f" ({self.vocabulary.items[i]!r}, {self.vocabulary.annotators[annotator]!r})"
        return text

    # Structure

    def __len__(self) -> int:
        return self.num_items

    def __repr__(self) -> str:
        return (
            f"Annotations({self.num_annotations} of {self.num_items} items by {self.num_annotators} "
            f"annotators, {self.num_classes} classes, {self.device})"
        )

    @property
    def num_items(self) -> int:
        """Number of items, B."""
        return self.indptr.shape[0] - 1

    @property
    def num_annotations(self) -> int:
        """Number of annotations, nnz."""
        return self.annotator.shape[0]

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.indptr.device

    @property
    def counts(self) -> Tensor:
        """``[B]`` number of annotations of each item."""
        return self.indptr[1:] - self.indptr[:-1]

    @property
    def item(self) -> Tensor:
        """``[nnz]`` item of each annotation (cached)."""
        if self._item is not None:
            return self._item
        rows, nnz = torch.arange(self.num_items, device=self.device), self.num_annotations
        return self._cached("_item", lambda: torch.repeat_interleave(rows, self.counts, output_size=nnz))

    @property
    def order(self) -> Tensor:
        """``[nnz]`` annotations by annotator, stable (cached)."""
        if self._order is not None:
            return self._order
        return self._cached("_order", lambda: torch.argsort(self.annotator, stable=True))

    @property
    def plan(self) -> Tensor | None:
        """``[nnz, 4]`` int32: each annotation in ``order``, its item, annotator and label (cached).

        What kernels of CUDA that sum by annotator read side by side, rather than each by itself through ``order``; they
        take it if it is there. None where a number does not fit.
        """
        sizes = self.num_annotations, self.num_items, self.num_annotators, self.num_classes
        if self._plan is not None or max(sizes) > torch.iinfo(torch.int32).max:
            return self._plan
        order, rows = self.order, (self.item, self.annotator, self.label)
        return self._cached("_plan", lambda: torch.stack([order, *(row[order] for row in rows)], 1).int())

    @property
    def active_annotators(self) -> Tensor:
        """``[T]`` annotators who have annotations here, ascending (cached).

        On a GPU the first call waits for the device, which alone knows T: ``prepare(active=True)`` before.
        """
        if self._active_annotators is not None:
            return self._active_annotators
        return self._cached("_active_annotators", lambda: torch.unique_consecutive(self.annotator[self.order]))

    @property
    def active_index(self) -> Tensor:
        """``[nnz]`` position of each annotation's annotator in ``active_annotators`` (cached)."""
        if self._active_index is not None:
            return self._active_index
        return self._cached("_active_index", lambda: torch.searchsorted(self.active_annotators, self.annotator))

    def prepare(self, active: bool = False) -> Annotations:
        """Compute what is cached (in a data loader's worker, say); returns self.

        Where there is a GPU also the ``plan``, which nothing else reads.

        Args:
            active: also what losses with ``sparse_grad=True`` use.
        """
        _ = self.item, self.order
        if _has_gpu():
            _ = self.plan
        if active:
            _ = self.active_annotators, self.active_index
        return self

    # Moves: nothing here reads values in order to validate them

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Annotations:
        """The annotations, and what is cached, on another device."""
        return self.trusted(self.fields.map(lambda tensor: tensor.to(device, non_blocking=non_blocking)))

    def pin_memory(self) -> Annotations:
        """In page-locked memory, for copies beside a GPU's work; self where there is no GPU."""
        if not torch.cuda.is_available() or self.device.type != "cpu":
            return self
        return self.trusted(self.fields.map(Tensor.pin_memory))

    def __getitem__(self, index: Any) -> Annotations:
        """Copies of items, by int, slice, list, integer tensor or boolean mask; ``item_id`` follows.

        ``for one in annotations`` gives the items one by one; it is no ``Iterable``, as loops that look for tensors in
        a batch (Lightning's) would walk into one item's annotations for ever.

        On a GPU this waits for the device, which alone knows nnz: index on the CPU, then move.
        """
        return self.trusted(_select.pick(self.fields, index))

    def regroup(self, groups: Tensor, num_groups: int) -> Annotations:
        """The same labels as if given by ``groups [R]`` (values below ``num_groups``, trusted) of the annotators.

        Shares every tensor but ``annotator``; ids are dropped.
        """
        return self.given_by(groups[self.annotator], num_groups)

    def given_by(self, annotator: Tensor, num_annotators: int, order: Tensor | None = None) -> Annotations:
        """The same labels from ``annotator [nnz]`` (values below ``num_annotators``, and ``order``, trusted)."""
        return self.trusted(
            Fields(
                num_annotators=num_annotators,
                num_classes=self.num_classes,
                indptr=self.indptr,
                annotator=annotator,
                label=self.label,
                weight=self.weight,
                item_id=self.item_id,
                item=self._item,
                order=order,
            )
        )

    def each_alone(self) -> Annotations:
        """Every annotation on an item of its own, without weights and ids."""
        return self.trusted(
            Fields(
                num_annotators=self.num_annotators,
                num_classes=self.num_classes,
                indptr=torch.arange(self.num_annotations + 1, device=self.device),
                annotator=self.annotator,
                label=self.label,
                item=torch.arange(self.num_annotations, device=self.device),
                order=self.order,
            )
        )

    def each_label(self, num_labels: int) -> Annotations:
        """Every annotation as an item that its annotator gives every label of ``num_labels``, in order; no weights."""
        return self.each_alone().every_label(num_labels)

    def every_label(self, num_labels: int) -> Annotations:
        """Every annotation as one of each label of ``num_labels``, in order, of the same item; no weights."""
        step = torch.arange(num_labels, device=self.device)
        return self.trusted(
            Fields(
                num_annotators=self.num_annotators,
                num_classes=num_labels,
                indptr=self.indptr * num_labels,
                annotator=self.annotator.repeat_interleave(num_labels),
                label=step.repeat(self.num_annotations),
                item_id=self.item_id,
                item=self.item.repeat_interleave(num_labels),
                order=(self.order.unsqueeze(1) * num_labels + step).flatten(),
            )
        )

    def select(self, mask: Any) -> Annotations:
        """The annotations where ``mask [nnz]`` is true, with every item."""
        return self.trusted(_select.select(self.fields, mask))

    def __getstate__(self) -> dict[str, Any]:
        # Compile marks are attributes of the tensor object, and detach() leaves them behind.
        return {name: v.detach() if isinstance(v, Tensor) else v for name, v in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for value in state.values():
            mark_dynamic(value)

    def _cached(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Compute a tensor once and keep it, except in a graph or a transform, which must leave its inputs alone."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return compute()
        # A tensor made in inference mode could not be saved for a later backward pass.
        with torch.inference_mode(False):
            value = compute()
        mark_dynamic(value)
        setattr(self, name, value)
        return value


# The path that a pickle keeps, whatever the file is called.
Annotations.__module__ = "crowdnal.data"
torch.serialization.add_safe_globals([Annotations])
