"""Sums over all annotators in blocks, so that nothing of size B x R x C is ever there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def logsumexp_in_blocks(term: Callable[..., Tensor], tables: tuple[Tensor, ...], rows: int) -> Tensor:
    """``logsumexp`` over blocks of what ``term`` gives for ``rows`` rows of the tables at a time.

    The inside of ``term`` lives for one block only: the backward pass computes it again.
    """
    blocks = list(zip(*(table.split(rows) for table in tables), strict=True))
    if len(blocks) == 1:
        return term(*blocks[0])
    parts = [checkpoint(term, *block, use_reentrant=False, preserve_rng_state=False) for block in blocks]
    return torch.stack(parts).logsumexp(0)
