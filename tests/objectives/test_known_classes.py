"""Known classes beside crowd labels, on every objective: in the loss, the mean, the posterior and the rounds."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_close
from support.objectives import CASES, features_of, small
from support.small_crowd import C, R, logits_of
from torch import Tensor
from torch.nn import functional as F

import crowdnal
from crowdnal.data import Annotations
from crowdnal.objectives import ClosedFormObjective, CrowdLayer, MajorityVote, Objective
from crowdnal.training import batch_shares

GOLD = torch.tensor([-1, 2, 0, -1])
OF_LOSS = [name for name, case in CASES.items() if not isinstance(case.fresh(), ClosedFormObjective)]


def told(name: str, weight: float = 1.0) -> tuple[Objective, Objective]:
    """In the state of the case, without and with known classes."""
    plain, knowing = CASES[name].begun(), CASES[name].begun()
    knowing.load_state_dict(plain.state_dict())
    knowing.set_gold(GOLD, weight=weight)
    return plain.eval(), knowing.eval()


@pytest.mark.parametrize("name", OF_LOSS)
def test_a_known_class_counts_like_labels_of_somebody_who_is_right(name: str) -> None:
    plain, knowing = told(name, 2.0)
    a, logits, features = small(), logits_of(4), features_of()
    crowd, units = plain.loss(logits, a, features), float(plain.units(a))
    penalty = plain.penalty(a)
    data = crowd if penalty is None else crowd - penalty
    own = F.cross_entropy(logits, GOLD, ignore_index=-1, reduction="sum")
    expected = (data * units + 2.0 * own) / (units + 2.0 * 2) + (0 if penalty is None else penalty)
    assert_close(knowing.loss(logits, a, features), expected, rtol=1e-6, atol=1e-8)
    assert float(knowing.units(a)) == units + 4
    if plain.models_annotators:
        found, before = (o.posterior(logits, a, features) for o in (knowing, plain))
        assert torch.equal(found[1:3].argmax(1), GOLD[1:3]) and float(found[1:3].max(1).values.min()) == 1.0
        assert torch.equal(found[[0, 3]], before[[0, 3]])
    knowing.set_gold(None)
    assert torch.equal(knowing.loss(logits, a, features), crowd)


@pytest.mark.parametrize("name", ["dl-em", "dl-ds", "mbem"])
def test_em_holds_them(name: str) -> None:
    objective, option = CASES[name].fresh(), CASES[name].fresh(gold=GOLD)
    objective.set_gold(GOLD)
    for made in (objective, option):
        made.on_train_start(small(), lambda: (logits_of(4), None))
        made.on_epoch_start(1)
    assert torch.equal(objective.targets, option.targets) and objective.targets.argmax(1)[1:3].tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"weight=2.0 is for objectives trained by gradients"):
        objective.set_gold(GOLD, weight=2.0)


def test_items_with_a_known_class_alone_are_trained_on() -> None:
    nothing = Annotations([0] * 5, [], [], num_annotators=R, num_classes=C, item_id=range(4))
    logits = logits_of(4).requires_grad_()
    for objective in (CrowdLayer(C, R), MajorityVote(C, R)):
        objective.set_gold(GOLD)
        logits.grad = None
        loss = objective(logits, nothing)
        assert_close(loss, F.cross_entropy(logits, GOLD, ignore_index=-1))
        loss.backward()
        assert torch.equal(logits.grad.abs().sum(1) > 0, GOLD >= 0)


def test_parts_of_a_step_are_exact_and_ids_find_the_classes() -> None:
    table = [{"task": f"i{i}", "worker": r, "label": "abc"[(i + r) % C]} for i in range(4) for r in range(2)]
    a = Annotations.from_long(table, annotators=R, classes=["a", "b", "c"][:C] if C <= 3 else C)
    objective = CrowdLayer(C, R)
    objective.set_gold({"i1": "c", "i2": "a"}, a)
    logits = logits_of(4)
    parts: list[Tensor] = [torch.tensor([3, 1]), torch.tensor([0]), torch.tensor([2])]
    shares = batch_shares(objective, [a[rows] for rows in parts])
    total = sum(share * objective(logits[rows], a[rows]) for rows, share in zip(parts, shares, strict=True))
    assert_close(total, objective(logits, a), rtol=1e-6, atol=1e-8)
    alone = Annotations.from_long([row for row in table if row["task"] == "i2"], annotators=R, classes=["a", "b", "c"])
    assert objective.known is not None and objective.known.of(alone).tolist() == [0]
    with pytest.raises(ValueError, match=r"weight=0 must be above 0"):
        objective.set_gold(GOLD, weight=0)
    objective.set_gold(GOLD)
    with pytest.raises(ValueError, match="no item_id and 2 items, but gold has 4"):
        objective(logits[:2], torch.zeros(2, R, dtype=torch.long))
    assert crowdnal.CrowdLayer(C, R).known is None
