"""What worker processes of a loader compute: a module of its own, so that a spawned one finds it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from crowdnal import functional as F
from support.problems import make_problem


class Losses(Dataset[Tensor]):
    """Item n: losses of problem n, and sums over its items and annotators; torch's autograd does not survive a fork."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, n: int) -> Tensor:
        p = make_problem(40, 7, 5, 5, 5, seed=n)
        scores, confusion, grad = p.scores.float(), p.confusion.float(), p.grad(5).float()
        with torch.no_grad():
            losses = F.crowd_cross_entropy(scores, confusion, p.annotations, reduction="none")
            sums = F.mix_items(grad, confusion, p.annotations), F.mix_annotators(scores, grad, p.annotations)
        return torch.cat([losses, *(each.flatten() for each in sums)])
