"""What every objective keeps, whichever is registered, with the variants of `support.objectives`.

A check that does not hold for one of them is left out by name, in `EXEMPT`, with the reason.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import assert_close, assert_same
from support.objectives import CASES, Case, features_of, small
from support.small_crowd import ANNOTATOR, INDPTR, LABEL, C, R, logits_of
from torch import Tensor

from crowdnal.data import Annotations
from crowdnal.objectives import Objective

OTHER_LINK = "not a product of the confusions shown"
SHARED = "annotators share what is learnt"
VOLUME = "the volume pulls on everyone's matrix"
EXEMPT: dict[str, dict[str, str]] = {  # check -> registered name, or case -> why
    "test_a_step_reaches_who_labelled_and_nobody_else": {
        **dict.fromkeys(("single-confusion", "lia", "cmm"), SHARED),
        **{name: SHARED for name, case in CASES.items() if "groups" in case.options},
        **dict.fromkeys(("geocrowdnet W", "geocrowdnet rank W"), VOLUME),
    },
    "test_compiled_equals_eager": {
        name: "sparse gradients are made outside of graphs"
        for name, case in CASES.items()
        if "sparse_grad" in case.options
    },
    "test_every_parameter_has_a_gradient": {"weighted-doctor-net averaging": "the heads are kept as they are"},
    "test_confusion_starts_diagonal": {"conal-em": "starts from the votes alone"},
    "test_confusion_is_the_likelihood_of_a_certain_classifier": dict.fromkeys(("conal", "conal-em", "lia"), OTHER_LINK),
    "test_posterior_uses_the_confusion_shown": dict.fromkeys(("conal", "conal-em", "lia", "max-mig"), OTHER_LINK),
}
QUICKLY_COMPILED = ("majority-vote", "crowd-layer", "trace", "lia")
FRESH = {name: case.fresh() for name, case in CASES.items()}


def each_case(*, models_annotators: bool = False, parameters: bool = False) -> Any:
    """Decorates a check that every objective keeps, or every one that models annotators, or has parameters."""

    def decorate(check: Callable[..., None]) -> Any:
        exempt = EXEMPT.get(check.__name__, {})
        assert set(exempt) <= set(CASES), f"EXEMPT of {check.__name__} names what is no case"
        names = [
            name
            for name, objective in FRESH.items()
            if not {name, CASES[name].name} & set(exempt)
            and (objective.models_annotators or not models_annotators)
            and (list(objective.parameters()) or not parameters)
        ]
        slow: set[str] = set()
        if "compiled" in check.__name__:  # seconds each: an objective with its defaults, and a few more
            names = [name for name in names if name in QUICKLY_COMPILED or name == CASES[name].name]
            slow = set(names) - set(QUICKLY_COMPILED)
        given = [pytest.param(CASES[name], id=name, marks=[pytest.mark.slow] * (name in slow)) for name in names]
        return pytest.mark.parametrize("case", given)(check)

    return decorate


each = each_case()


def arguments(objective: Objective, a: Annotations, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Logits, annotations and, where it needs them, features."""
    features = features_of(a.num_items, dtype) if objective.needs_features else None
    return [logits_of(a.num_items, dtype), a, features]


def differentiable(objective: Objective, given: list[Any]) -> tuple[list[Tensor], list[str]]:
    """What a loss of these arguments may be differentiated for, and what it is called."""
    inputs = {"logits": given[0].requires_grad_()}
    if given[2] is not None:
        inputs["features"] = given[2].requires_grad_()
    inputs |= {name: p for name, p in objective.named_parameters() if p.requires_grad}
    return list(inputs.values()), list(inputs)


def gradients(objective: Objective, given: list[Any], upstream: float = 1.0) -> dict[str, Tensor]:
    inputs, names = differentiable(objective, given)
    loss = upstream * objective(*given).sum()
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return {name: g.to_dense() for name, g in zip(names, found, strict=True) if g is not None}


def everything() -> Annotations:
    """Each label by each annotator, of C items."""
    who, label = torch.arange(R).repeat_interleave(C).repeat(C), torch.arange(C).repeat(C * R)
    a = Annotations(torch.arange(C + 1) * R * C, who, label, num_annotators=R, num_classes=C)
    a.item_id = torch.arange(C)
    return a


# The loss


@each
def test_an_empty_batch_is_zero_with_zero_gradients(case: Case) -> None:
    for reduction in ("mean", "sum", "item_mean", "per_item"):
        objective = case.begun(reduction=reduction)
        trained = set(gradients(objective, arguments(objective, small())))
        for items in (0, 3):
            nothing = Annotations([0] * (items + 1), [], [], num_annotators=R, num_classes=C)
            nothing.item_id = torch.arange(items)
            given = arguments(objective, nothing)
            assert objective(*given).item() == 0
            found = gradients(objective, given)
            assert trained <= set(found), f"without labels there are no gradients of {trained - set(found)}"
            assert_same(found, {name: torch.zeros_like(g) for name, g in found.items()}, "gradient")
            assert objective.posterior(*given).shape == (items, C)


@each
def test_per_item_is_the_sum_over_labels_by_the_number_of_items(case: Case) -> None:
    """1/N sum_i sum_r of the papers, beside whatever penalty; where the unit is the item anyway it is the mean."""
    for weighted in (False, True):
        a = small(weighted)
        objective = case.begun()
        given, found, units = arguments(objective, a), {}, {}
        for reduction in ("sum", "mean", "per_item"):
            objective.reduction = reduction
            found[reduction], units[reduction] = objective(*given), float(objective.units(a))
        wanted = found["mean"]
        if units["mean"] != 3:  # item 1 has no label
            labels = (found["sum"] - wanted) / (1 - 1 / units["mean"])  # what they add to the sum, without a penalty
            wanted = wanted + labels * (1 / 3 - 1 / units["mean"])
            assert abs(float(wanted - found["mean"])) > 1e-3
        assert units["per_item"] == 3
        assert_close(found["per_item"], wanted)


@each
def test_gradients_scale_with_the_upstream_one(case: Case) -> None:
    objective = case.begun()
    given = arguments(objective, small(weighted=True))
    once, twice = gradients(objective, given), gradients(objective, given, 2.0)
    assert_close(twice, {name: 2 * g for name, g in once.items()}, where="gradient")
    assert any(g.abs().sum() > 0 for g in once.values())


@each_case(parameters=True)
def test_every_parameter_has_a_gradient(case: Case) -> None:
    """Or DistributedDataParallel waits for it."""
    objective = case.begun(shift=False)
    found = gradients(objective, arguments(objective, small()))
    assert {name for name, p in objective.named_parameters() if p.requires_grad} <= set(found)


@each
def test_inputs_and_state_are_not_changed(case: Case) -> None:
    objective, a = case.begun(), small(weighted=True)
    given, before, state = arguments(objective, a), arguments(objective, small(weighted=True)), saved(objective)
    for method in (objective, objective.log_likelihood, objective.posterior):
        method(*given)
    objective.predict(given[0], given[2])
    assert_same(given[0], before[0])
    assert given[2] is None or torch.equal(given[2], before[2])
    for field in ("indptr", "annotator", "label", "weight", "item_id"):
        assert_same(getattr(a, field), getattr(before[1], field), field)
    assert saved(objective) == state


def saved(objective: Objective) -> bytes:
    stream = io.BytesIO()
    torch.save(objective.state_dict(), stream)
    return stream.getvalue()


@each
def test_no_gradient_asked_none_given(case: Case) -> None:
    objective = case.begun().requires_grad_(False)
    assert not objective(*arguments(objective, small())).requires_grad


@each
def test_strided_logits(case: Case) -> None:
    objective = case.begun()
    _, *rest = arguments(objective, small())
    for logits in (logits_of(C + 1).t().contiguous().t(), logits_of(1).expand(4, C)):
        assert not logits.is_contiguous()
        assert_close(objective(logits, *rest), objective(logits.contiguous(), *rest))


@each
def test_logits_of_items_without_labels_do_not_matter(case: Case) -> None:
    objective = case.begun()
    given = arguments(objective, small())
    loss = objective(*given)
    moved = [given[0].clone(), *given[1:]]
    moved[0][1] += torch.tensor([7.0, 0.0, -3.0])
    assert_close(objective(*moved), loss)
    grad = gradients(objective, moved).get("logits")
    assert grad is None or not grad[1].any()


# Precision


@each
def test_confident_bfloat16_logits_are_computed_in_float32(case: Case) -> None:
    objective = case.begun(dtype=torch.float32)
    logits, a, x = arguments(objective, small(), torch.float32)
    given = [(100 * logits).bfloat16(), a, None if x is None else x.bfloat16()]
    loss = objective(*given)
    assert loss.dtype == torch.float32 and loss.isfinite()
    found = gradients(objective, given)
    assert all(g.isfinite().all() for g in found.values())
    assert {found[name].dtype for name in ("logits", "features") if name in found} <= {torch.bfloat16}
    wide = [t if t is None or t is a else t.detach().float() for t in given]
    assert_close(objective(*wide), loss)


@each
def test_bfloat16_parameters(case: Case) -> None:
    objective = case.begun(dtype=torch.float32).bfloat16()
    given = arguments(objective, small(), torch.bfloat16)
    assert objective(*given).dtype == torch.float32
    found = gradients(objective, given)
    assert all(g.dtype == torch.bfloat16 and g.isfinite().all() for g in found.values())
    if objective.models_annotators:
        assert_close(objective.confusion().float().sum(-1), torch.ones(R, C), atol=1e-2)


@each
def test_autocast_does_not_touch_it(case: Case) -> None:
    objective = case.begun(dtype=torch.float32)
    given = arguments(objective, small(), torch.float32)
    methods = (objective, objective.log_likelihood, objective.posterior, lambda z, _, x: objective.predict(z, x))
    plain = [method(*given) for method in methods]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same([method(*given) for method in methods], plain)
    assert plain[0].dtype == torch.float32


@each
def test_bitwise_repeatable_over_runs_and_threads(case: Case) -> None:
    a = Annotations.from_dense(
        torch.randint(-1, C, (300, 40), generator=torch.Generator().manual_seed(3)), num_classes=C
    )
    a.item_id = torch.arange(300)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            objective = case.begun(a, torch.float32, shift=False)
            given = arguments(objective, a, torch.float32)
            results.append((objective(*given).detach(), gradients(objective, given)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_same(other, results[0])


# What may be given


@each
def test_dense_targets(case: Case) -> None:
    dense = torch.tensor([[1, -1, 0, -1], [-1, -1, -1, -1], [-1, 2, 2, -1], [-1, 0, -1, -1]])
    a = Annotations.from_dense(dense, num_classes=C)
    objective = case.begun(a)
    logits, _, x = arguments(objective, a)
    for method in (objective.loss, objective.log_likelihood, objective.posterior):
        assert_close(method(logits, dense, x), method(logits, a, x))


@each
def test_one_item_one_annotator(case: Case) -> None:
    one = Annotations([0, 1], [0], [2], num_annotators=1, num_classes=C)
    one.item_id = torch.zeros(1, dtype=torch.long)
    objective = case.begun(one)
    given = arguments(objective, one)
    assert objective(*given).shape == () and objective(*given).isfinite()
    assert objective.log_likelihood(*given).shape == (1,)
    assert_close(objective.posterior(*given).sum(1), torch.ones(1, dtype=torch.float64))


@each
def test_errors_say_what_does_not_fit(case: Case) -> None:
    objective = case.begun(dtype=torch.float32)
    logits, a, x = arguments(objective, small(), torch.float32)
    sizes: list[tuple[Tensor, dict[str, int], str]] = [
        (logits[:3], {}, "3 rows but annotations has 4 items"),
        (logits[:, :2], {}, r"\[4, 2\].*num_classes=3"),
        (logits.long(), {}, "int64"),
        (logits[0], {}, r"\[3\]"),
        (logits, {"num_annotators": R + 1}, "annotators"),
        (logits, {"num_classes": C + 1}, "classes"),
        (logits.to("meta"), {}, "meta"),
    ]
    for wrong, size, message in sizes:
        given = Annotations(INDPTR, ANNOTATOR, LABEL, **{"num_annotators": R, "num_classes": C, **size})
        with pytest.raises(ValueError, match=message):
            objective(wrong, given if size else a, x)


@each
def test_hooks_and_repr(case: Case) -> None:
    objective = case.fresh()
    objective.on_train_start()
    objective.on_train_start(small(), lambda: (logits_of(), features_of()))
    for epoch in (0, 1):
        objective.on_epoch_start(epoch)
        objective.on_epoch_end(epoch)
    assert f"num_classes=3, num_annotators=4, reduction={objective.reduction!r}" in repr(objective)


# State


@each
def test_state_goes_through_a_checkpoint(case: Case) -> None:
    objective, a = case.begun(dtype=torch.float32), small()
    given = arguments(objective, a, torch.float32)
    fresh = case.fresh().float()
    fresh.load_state_dict(torch.load(io.BytesIO(saved(objective)), weights_only=True))
    fresh.on_train_resume(a, lambda: (given[0], given[2]))
    for one in (objective, fresh):
        one.on_epoch_start(case.epoch + 1)
    for method in ("posterior", "log_likelihood", "loss"):
        assert_same(getattr(fresh, method)(*given), getattr(objective, method)(*given), method)
    if objective.models_annotators:
        assert_same(fresh.confusion(), objective.confusion())


@each_case(models_annotators=True, parameters=True)
def test_a_step_reaches_who_labelled_and_nobody_else(case: Case) -> None:
    # one distribution for all, of which the votes of who gave no label are an even part
    options = {"init": "votes"} if case.name == "union-net" and "init" not in case.options else {}
    objective = case.begun(dtype=torch.float32, shift=False, **options)
    if hasattr(objective, "trace_weight"):
        objective.trace_weight = 0.0  # of everyone
    before = objective.confusion()
    optimizer = torch.optim.SGD(objective.parameters(), lr=1.0)
    objective(*arguments(objective, small(), torch.float32)).backward()
    optimizer.step()
    moved = (objective.confusion() - before).abs().amax((1, 2))
    assert (moved[:3] > 1e-6).all() and moved[3] == 0


# What is shown of annotators


@each_case(models_annotators=True)
def test_confusion_is_detached_stochastic_and_a_copy(case: Case) -> None:
    objective = case.fresh()
    confusion = objective.confusion()
    assert confusion.shape == (R, C, C) and not confusion.requires_grad
    assert_close(confusion.sum(-1), torch.ones(R, C))
    assert_close(objective.reliability(), confusion.diagonal(dim1=1, dim2=2).sum(-1) / confusion.shape[1])
    before = confusion.clone()
    confusion.zero_()  # a copy: users may write into it
    assert_same(objective.confusion(), before)


@each_case(models_annotators=True)
def test_confusion_starts_diagonal(case: Case) -> None:
    assert (case.fresh().confusion().argmax(-1) == torch.arange(C)).all()


@each_case(models_annotators=True)
def test_confusion_is_the_likelihood_of_a_certain_classifier(case: Case) -> None:
    """Row k, column y = probability of label y where the truth is k: not its transpose."""
    objective = case.begun()
    certain = 1e4 * torch.eye(C, dtype=torch.float64)
    features = features_of(C) if objective.needs_features else None
    probabilities = objective.log_likelihood(certain, everything(), features).exp().view(C, R, C)
    confusion = objective.confusion()
    assert_close(probabilities.transpose(0, 1), confusion, where="confusion")
    assert_close(confusion.sum(-1), torch.ones(R, C, dtype=torch.float64))
    assert not torch.allclose(confusion, confusion.transpose(1, 2), atol=1e-3)


@each_case(models_annotators=True)
def test_posterior_uses_the_confusion_shown(case: Case) -> None:
    objective = case.begun()
    given, confusion = arguments(objective, small()), objective.confusion()
    expected = given[0].softmax(-1)
    for i in range(4):
        for n in range(INDPTR[i], INDPTR[i + 1]):
            expected[i] = expected[i] * confusion[ANNOTATOR[n], :, LABEL[n]]
    expected /= expected.sum(-1, keepdim=True)
    assert_close(objective.posterior(*given), expected)


@each
def test_posterior_is_a_distribution_and_the_likelihood_one_of_labels(case: Case) -> None:
    objective = case.begun()
    given = arguments(objective, small(weighted=True))
    posterior, likelihood = objective.posterior(*given), objective.log_likelihood(*given)
    assert posterior.shape == (4, C) and likelihood.shape == (6,)
    assert not posterior.requires_grad and not likelihood.requires_grad
    assert_close(posterior.sum(1), torch.ones(4, dtype=torch.float64))
    assert (posterior >= 0).all() and (likelihood <= 0).all()


@each
def test_an_answer_that_is_no_class(case: Case) -> None:
    """A label behind the classes: [C, K] confusions, no vote; or an error that says how to do without it."""
    a = Annotations(INDPTR, ANNOTATOR, [1, 0, C, 2, C, 0], num_annotators=R, num_classes=C + 1)
    a.item_id = torch.arange(4)
    variant = case.options.get("variant", "MW")
    if "doctor-net" in case.name or (case.name == "crowd-layer" and variant != "MW"):
        with pytest.raises(ValueError, match="of_classes"):
            case.fresh(num_labels=C + 1)
        return
    objective = case.begun(a, num_labels=C + 1)
    given = arguments(objective, a)
    assert objective(*given).isfinite()
    assert all(g.isfinite().all() for g in gradients(objective, given).values())
    assert_close(objective.posterior(*given).sum(1), torch.ones(4, dtype=torch.float64))
    assert (objective.log_likelihood(*given) <= 0).all()
    if objective.models_annotators:
        assert_close(objective.confusion().sum(-1), torch.ones(R, C, dtype=torch.float64))
        assert objective.confusion().shape == (R, C, C + 1)
        assert objective.reliability().shape == (R,)


# torch.compile


@each
def test_compiled_equals_eager(case: Case) -> None:
    objective, a = case.begun(dtype=torch.float32), small().prepare()
    given = arguments(objective, a, torch.float32)
    expected = objective(*given).detach(), gradients(objective, given)
    torch.compiler.reset()
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    inputs, names = differentiable(objective, given)
    loss = compiled(*given)
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    assert_close(loss.detach(), expected[0])
    assert_close({n: g for n, g in zip(names, found, strict=True) if g is not None}, expected[1], where="gradient")
