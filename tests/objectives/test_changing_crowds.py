"""Annotators who come, leave or are renumbered, on every objective: by id, the optimizer's state with them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.compare import assert_close
from support.objectives import CASES, features_of, small
from support.small_crowd import C, R, logits_of

import crowdnal
from crowdnal.confusion import FreeConfusion
from crowdnal.objectives import load_annotators, with_annotators

OLD = [f"w{r}" for r in range(R)]
NEW = ["late", "w2", "w0", "later", "w3"]  # w1 left
KEPT = [(1, 2), (2, 0), (4, 3)]
PEOPLE_GIVEN = {name for name, case in CASES.items() if {"groups", "annotator_features"} & set(case.options)}


@pytest.mark.parametrize("name", sorted(set(CASES) - PEOPLE_GIVEN))
def test_every_objective_takes_another_crowd(name: str) -> None:
    objective = CASES[name].begun()
    parameters = [p for p in objective.parameters() if p.requires_grad]
    if parameters and not CASES[name].options.get("sparse_grad"):
        optimizer = torch.optim.Adam(parameters, lr=0.01)
        objective(logits_of(4), small(), features_of()).backward()
        optimizer.step()
    before = copy.deepcopy(objective.state_dict())
    new = with_annotators(objective, NEW, OLD)
    assert new.num_annotators == len(NEW) and type(new) is type(objective) and new.training == objective.training
    if objective.models_annotators:
        found, known = new.confusion(), objective.confusion()
        assert found.shape == (len(NEW), C, objective.num_labels)
        for here, there in KEPT:
            assert_close(found[here], known[there], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(value, before[key]) for key, value in objective.state_dict().items())
    back = with_annotators(new, OLD, NEW)  # all but w1, who is as constructed
    for key, value in back.state_dict().items():
        if value.shape[:1] == (R,) and key.split(".")[-1] != "groups" and "targets" not in key:
            assert torch.equal(value[[0, 2, 3]], before[key][[0, 2, 3]]), key


def crowd_layer(ids: list[str]) -> crowdnal.CrowdLayer:
    objective = crowdnal.CrowdLayer(C, len(ids))
    with torch.no_grad():
        objective.annotators.weight.copy_(torch.randn(len(ids), C, C))
    return objective


def matrices(objective: crowdnal.CrowdLayer) -> torch.Tensor:
    assert isinstance(objective.annotators, FreeConfusion)
    return objective.annotators.weight


def test_the_optimizer_goes_on_where_it_was() -> None:
    torch.manual_seed(0)
    objective = crowd_layer(OLD)
    control = copy.deepcopy(objective)
    a, logits = small(), logits_of(4, torch.float32)

    def step(objective: crowdnal.Objective, optimizer: torch.optim.Optimizer, a: crowdnal.Annotations) -> None:
        optimizer.zero_grad()
        objective(logits, a).backward()
        optimizer.step()

    optimizer, unchanged = (torch.optim.Adam(o.parameters(), 0.1) for o in (objective, control))
    step(objective, optimizer, a)
    step(control, unchanged, a)
    ids = [OLD[r] for r in (3, 1, 0, 2)] + ["new"]
    new = with_annotators(objective, ids, OLD, optimizer=optimizer)
    assert optimizer.param_groups[0]["params"] == list(new.parameters())
    number = torch.tensor([2, 1, 3, 0])
    renamed = crowdnal.Annotations(a.indptr, number[a.annotator], a.label, num_annotators=5, num_classes=C)
    step(new, optimizer, renamed)
    step(control, unchanged, a)
    assert torch.equal(matrices(new)[number], matrices(control))
    assert torch.equal(matrices(new)[4], torch.eye(C))
    renumbered = with_annotators(new, ids[::-1], ids, optimizer=optimizer)  # as many, in another order
    state = optimizer.state[renumbered.annotators.weight]["exp_avg"]
    assert torch.equal(state.flip(0)[number], unchanged.state[control.annotators.weight]["exp_avg"])


def test_load_annotators_by_the_ids_of_annotations() -> None:
    def read(rows: list[tuple[str, str]]) -> crowdnal.Annotations:
        table = [{"task": task, "worker": worker, "label": 0} for task, worker in rows]
        return crowdnal.Annotations.from_long(table, classes=C)

    old, new = read([("a", "ann"), ("a", "cem")]), read([("b", "bob"), ("b", "cem")])
    objective = crowd_layer(["ann", "cem"])
    model, other = (crowdnal.attach(torch.nn.Linear(2, C), o) for o in (objective, crowdnal.CrowdLayer(C, 2)))
    found = load_annotators(other, model.state_dict(), annotators=new, known=old.vocabulary)
    assert found == (("cem",), ("bob",), ("ann",))
    assert torch.equal(matrices(other.objective)[1], matrices(objective)[1])
    assert torch.equal(matrices(other.objective)[0], torch.eye(C))
    assert torch.equal(other.backbone.weight, model.backbone.weight)


def test_groups_are_given_anew() -> None:
    objective = crowdnal.CrowdLayer(C, R, groups=[0, 1, 0, 1])
    with torch.no_grad():
        objective.annotators.weight.add_(torch.arange(2.0).view(2, 1, 1))
    new = with_annotators(objective, NEW, OLD, groups=[1, 0, 0, 1, 1])
    assert torch.equal(new.confusion()[[0, 1]], objective.confusion()[[1, 0]])
    with pytest.raises(ValueError, match=r"groups is .* must be integers \[num_annotators=5\]"):
        with_annotators(objective, NEW, OLD)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda o: with_annotators(o, NEW, OLD[:2]), "known has 2 ids, but the objective 4 annotators"),
        (lambda o: with_annotators(o, NEW, OLD, colour=1), "CrowdLayer has no option 'colour'"),
        (lambda o: with_annotators(o, ["x", "x"], OLD), r"annotators\[1\] is 'x', as is annotators\[0\]"),
        (
            lambda o: load_annotators(o, o.state_dict(), annotators=NEW, known=OLD),
            "annotators has 5 ids, but the objective 4 annotators",
        ),
        (
            lambda o: load_annotators(o, crowdnal.CrowdLayer(C + 1, 3).state_dict(), annotators=OLD, known=OLD[:3]),
            r"annotators.weight of the state is \[3, ., .\] but must be \[3, ",
        ),
    ],
)
def test_errors_change_nothing(act: Callable[[crowdnal.Objective], object], message: str) -> None:
    objective = crowd_layer(OLD)
    before = matrices(objective).detach().clone()
    with pytest.raises(ValueError, match=message):
        act(objective)
    assert torch.equal(matrices(objective), before)


@pytest.mark.parametrize("name", ["crowd-layer", "conal", "dl-em", "doctor-net", "union-net"])
def test_a_state_of_another_crowd_says_so(name: str) -> None:
    case = CASES[name]
    with pytest.raises(RuntimeError, match=r"the state is of 4 annotators and \w+ was made for 5: crowdnal.load_ann"):
        case.fresh(5).load_state_dict(case.fresh(4).state_dict())
