"""Groups of annotators whose confusions are alike."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal._utils.extras import require


def cluster(weight: Tensor, num_groups: int, seed: int) -> Tensor:
    """K-means of the flattened matrices, with as many clusters as there are different matrices, at most ``num_groups``.

    Annotators without labels all keep the identity, so that there may be fewer different matrices than groups.

    Args:
        weight: ``[R, C, K]``.
        num_groups: G, 1 or more.
        seed: of the starts (k-means++).

    Returns:
        ``[R]`` group of each annotator, numbered from 0 by first appearance, on the device of ``weight``.

    Raises:
        ImportError: scikit-learn is missing; the message names the extra.
        ValueError: a matrix is not finite.
    """
    rows = weight.detach().flatten(1).double().cpu()
    bad = ~rows.isfinite().all(1)
    if bool(bad.any()):
        raise ValueError(
            f"the confusion of annotator {int(bad.nonzero()[0])} is not finite: training diverged, lower the learning "
            "rate"
        )
    different = len(rows.unique(dim=0))
    if different <= num_groups:
        found = rows.unique(dim=0, return_inverse=True)[1]
    else:
        means = require("sklearn.cluster", extra="train").KMeans(num_groups, n_init=1, random_state=seed)
        found = torch.from_numpy(means.fit_predict(rows.numpy())).long()
    return _by_appearance(found).to(weight.device)


def _by_appearance(found: Tensor) -> Tensor:
    names, dense = found.unique(return_inverse=True)
    rows = torch.arange(len(found))
    first = torch.full_like(names, len(found)).scatter_reduce(0, dense, rows, "amin")
    return first.argsort().argsort()[dense]
