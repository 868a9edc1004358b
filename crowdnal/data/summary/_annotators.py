"""Annotators whose labels tell little: given at random, always the same, or as another one gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from crowdnal._utils.extras import require
from crowdnal.data._vocabulary import Array
from crowdnal.data.summary._counts import Counts

_ENOUGH = 20  # labels on shared items, below which nothing is said of an annotator
_WORK = 2e7  # cells that are looked at, before items are drawn
_CERTAIN = 5.0  # standard deviations by which the usual annotator must differ from chance on the same number of labels
_LITTLE = 0.25  # of the usual annotator's agreement beyond chance
_PAIRS = 1000


class Suspects(NamedTuple):
    """Ids of annotators, those with most labels first.

    Attributes:
        random: agree with the others hardly more than their own labels in another order would.
        constant: always give one label, where the others often give another.
        copies: pairs that give the same label also where the others give another one.
    """

    random: list[Any]
    constant: list[Any]
    copies: list[tuple[Any, Any]]


def suspects(counts: Counts, names: Sequence[Any]) -> Suspects:
    """Who they are."""
    shared = counts.shared[counts.item]
    counts = Counts(counts.item[shared], counts.annotator[shared], counts.label[shared], counts.size)
    cost = counts.per_item * np.minimum(counts.per_item, counts.size[2]).astype(np.float64)
    part = counts.of_items(cost, _WORK)
    random, constant = _against_the_others(part)
    copies = _copies(counts.of_items(counts.per_item.astype(np.float64) ** 2, _WORK))
    name = lambda found: [names[r] for r in found.tolist()]  # noqa: E731
    return Suspects(name(random), name(constant), [(names[a], names[b]) for a, b in copies])


def _against_the_others(counts: Counts) -> tuple[Array, Array]:
    """Annotators who answer at random, and those who always answer the same."""
    known = np.flatnonzero(counts.per_annotator >= _ENOUGH)
    if not len(known):
        return known, known
    place = np.full(counts.size[1], -1)
    place[known] = np.arange(len(known))
    chosen = place[counts.annotator] >= 0
    r, item, label = place[counts.annotator[chosen]], counts.item[chosen], counts.label[chosen]
    labels = counts.per_annotator[known]
    share = np.zeros((len(known), counts.size[2]))  # of each class among the labels of an annotator
    np.add.at(share, (r, label), 1.0)
    share /= labels[:, None]

    votes, others = counts.votes, (counts.per_item[item] - 1).astype(np.float64)
    sizes = np.diff(votes.indptr)[item]
    n = np.repeat(np.arange(len(item)), sizes)  # of each annotation, every class that its item got
    cell = votes.indptr[item][n] + np.arange(len(n)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    k = votes.indices[cell]
    own = k == label[n]
    part = (votes.data[cell] - own) / others[n]  # of the others who gave it
    agreed = np.bincount(n, part * own, len(item))
    weight = share[r[n], k]
    chance = np.bincount(n, part * weight, len(item))
    variance = np.bincount(n, part**2 * weight, len(item)) - chance**2
    gain, spread = (np.bincount(r, values, len(known)) for values in (agreed - chance, variance))
    usual = np.median(gain / labels)
    certain = labels * usual > _CERTAIN * np.sqrt(np.maximum(spread, 0))
    same = share.max(1) == 1
    random = certain & (gain < _LITTLE * usual * labels) & ~same
    constant = same & (np.bincount(r, agreed, len(known)) / labels < 0.75)
    order = np.argsort(-labels, kind="stable")
    return known[order][random[order]], known[order][constant[order]]


def _copies(counts: Counts) -> list[tuple[int, int]]:
    sparse = require("scipy.sparse", extra="train")
    known = np.flatnonzero(counts.per_annotator >= _ENOUGH)
    if len(known) < 2:
        return []
    place = np.full(counts.size[1], -1)
    place[known] = np.arange(len(known))
    chosen = place[counts.annotator] >= 0
    r, item, label = place[counts.annotator[chosen]], counts.item[chosen], counts.label[chosen]
    _, first = np.unique(item * len(known) + r, return_index=True)  # the first answer of each to each
    r, item, label = r[first], item[first], label[first]
    ones = np.ones(len(item), dtype=np.int32)
    cell = np.unique(item * counts.size[2] + label, return_inverse=True)[1]
    where, what = (
        sparse.csr_array((ones, (rows, r)), shape=(int(rows.max()) + 1, len(known))) for rows in (item, cell)
    )
    together, equal = sparse.triu(where.T @ where, 1).tocoo(), sparse.triu(what.T @ what, 1).tocsr()
    a, b = together.coords
    same = np.asarray(equal[a, b]).reshape(-1) if len(a) else np.zeros(0)
    likely = np.flatnonzero((together.data >= _ENOUGH) & (same >= 0.9 * together.data))
    likely = likely[np.argsort(-together.data[likely], kind="stable")][:_PAIRS]
    order = np.argsort(r, kind="stable")
    starts = np.searchsorted(r[order], np.arange(len(known) + 1))
    given = [order[starts[i] : starts[i + 1]] for i in range(len(known))]
    return [
        (int(known[i]), int(known[j]))
        for i, j in zip(a[likely].tolist(), b[likely].tolist(), strict=True)
        if _is_copy(counts, (item[given[i]], label[given[i]]), (item[given[j]], label[given[j]]))
    ]


def _is_copy(counts: Counts, one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    """Whether two agree where the plurality of all others says something else."""
    both, at, at_other = np.intersect1d(one[0], other[0], assume_unique=True, return_indices=True)
    mine, theirs = one[1][at], other[1][at_other]
    votes, rows = counts.votes[both].toarray(), np.arange(len(both))
    votes[rows, mine] -= 1
    votes[rows, theirs] -= 1
    top = votes.max(1)
    clear = (top > 0) & ((votes == top[:, None]).sum(1) == 1)
    plurality = votes.argmax(1)
    odd = clear & ((mine != plurality) | (theirs != plurality))
    return bool(odd.sum() >= 8 and ((mine == theirs) & odd).sum() >= 0.8 * odd.sum())
