"""What worker processes of a loader compute: a module of its own, so that a spawned one finds it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from crowdnal import functional as F
from support.problems import make_problem


class Gradients(Dataset[Tensor]):
    """Item n: the loss and the gradients of a cross-entropy on problem n, in float32 and one after the other."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, n: int) -> Tensor:
        p = make_problem(40, 7, 5, 5, 5, seed=n)
        leaves = [t.float().requires_grad_() for t in (p.scores, p.confusion)]
        loss = F.crowd_cross_entropy(*leaves, p.annotations)
        return torch.cat([loss.detach().view(1), *(g.flatten() for g in torch.autograd.grad(loss, leaves))])
