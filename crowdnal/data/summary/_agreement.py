"""Agreement beyond chance, by the libraries that others use too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from crowdnal._utils.extras import require
from crowdnal.data._vocabulary import is_number
from crowdnal.data.summary._counts import Counts

_CELLS = 5e6  # items times classes squared, which the library holds at once


class Agreement(NamedTuple):
    """None where it is not defined, as with one label per item.

    Attributes:
        alpha: Krippendorff's, nominal: 1 where all agree, 0 where they agree as often as by chance.
        ordinal_alpha: the same for classes that are three numbers or more: neighbours disagree less.
        alpha_items: on how many items with two labels or more; all, or a random part of very many.
        kappa: Fleiss', on the items with the usual number of labels.
        kappa_items: how many items those are.
        kappa_labels: and how many labels each of them has.
    """

    alpha: float | None
    ordinal_alpha: float | None
    alpha_items: int
    kappa: float | None
    kappa_items: int
    kappa_labels: int


NONE = Agreement(None, None, 0, None, 0, 0)


def agreement(counts: Counts, classes: Sequence[Any]) -> Agreement:
    """Both measures.

    Raises:
        ImportError: a library is missing; the message names the extra.
    """
    used = np.flatnonzero(counts.per_class)
    shared = np.flatnonzero(counts.shared)
    if not len(shared) or len(used) < 2:
        return Agreement(None, None, len(shared), None, 0, 0)
    cost = counts.shared * float(len(used)) ** 2
    part = counts.of_items(cost, _CELLS)
    rows = np.flatnonzero(part.shared)
    votes = part.votes[rows][:, used].toarray()
    alpha, ordinal = _alpha(votes, None), None
    values = [classes[k] for k in used.tolist()]
    if len(values) > 2 and all(map(is_number, values)):
        ordinal = _alpha(votes, values)
    sizes = np.bincount(counts.per_item[shared])
    usual = int(sizes.argmax())
    rows = shared[counts.per_item[shared] == usual]
    table = counts.votes[rows].toarray()[:, used] if len(rows) * len(used) < 5e7 else None
    return Agreement(alpha, ordinal, len(votes), _kappa(table), len(rows), usual)


def _alpha(votes: Any, values: Any) -> float | None:
    krippendorff = require("krippendorff", extra="agreement")
    if (votes.sum(0) > 0).sum() < 2:
        return None
    kept = votes.sum(0) > 0
    votes = votes[:, kept]
    domain = np.arange(votes.shape[1]) if values is None else np.array(values, dtype=np.float64)[kept]
    level = "nominal" if values is None else "ordinal"
    return float(krippendorff.alpha(value_counts=votes, value_domain=domain, level_of_measurement=level))


def _kappa(table: Any) -> float | None:
    if table is None or (table.sum(0) > 0).sum() < 2:
        return None
    return float(require("statsmodels.stats.inter_rater", extra="agreement").fleiss_kappa(table))
