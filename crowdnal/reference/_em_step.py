"""One pass of EM over the annotations: an E-step, and the counts that the next M-step needs."""

from __future__ import annotations

import torch
from torch import Tensor

from crowdnal.reference._joint_link import log_marginal
from crowdnal.reference._label_log_likelihood import label_counts, label_log_likelihood
from crowdnal.reference._terms import compute_dtype


def em_step(
    log_prior: Tensor | None,
    log_confusion: Tensor,
    weight: Tensor | None,
    indptr: Tensor,
    annotator: Tensor,
    order: Tensor | None,
    label: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss [] (sum of nll) and posterior [N, C] of `joint_link`, and the sums that an M-step needs.

    These are the `counts` [R, K, C] of the posterior, and its totals [C] over the items with a positive weight.

    No derivatives. order is for the kernels of CUDA, which need it: one that is kept is cheaper than to sort in each
    call. log_prior is [N, C], or [1, C] for all items. Without it EM starts: the posterior is the items'
    vote proportions (uniform without votes), the loss 0; of log_confusion only the shape is used, with C = K.
    """
    rows = torch.arange(indptr.shape[0] - 1, device=indptr.device)
    item = torch.repeat_interleave(rows, indptr.diff())
    index = (indptr, item, annotator, annotator, None)  # the order does not matter here
    if log_prior is None:
        dtype = compute_dtype(log_confusion.dtype)
        one_hot = torch.eye(log_confusion.shape[1], device=indptr.device, dtype=dtype).unsqueeze(1)
        votes = label_log_likelihood(one_hot, weight, indptr, item, label, label, None, torch.zeros_like(label))
        total = votes.sum(1, keepdim=True)
        posterior = torch.where(total > 0, votes / torch.where(total > 0, total, 1.0), 1.0 / votes.shape[1])
        loss = votes.new_zeros(())
    else:
        t = log_prior + label_log_likelihood(log_confusion, weight, *index, label)
        loss, _, posterior = log_marginal(t, indptr, False)
    each = torch.ones_like(label, dtype=posterior.dtype) if weight is None else weight
    informed = each.new_zeros(len(posterior)).index_add(0, item, each) > 0
    totals = (posterior * informed.unsqueeze(1)).sum(0)
    return loss, posterior, label_counts(posterior, weight, *index, label, *log_confusion.shape[:2]), totals
