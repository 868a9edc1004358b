"""What raw ops refuse, by name: shapes, numbers, devices and dtypes that would crash or give garbage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_close, assert_same
from support.op_arguments import ALL, of_every_kind
from support.op_checks import as_tuple, changed
from support.problems import make_problem

from crowdnal import reference
from crowdnal.data import Annotations
from crowdnal.ops import OPS

ops = torch.ops.crowdnal
PROBLEM = make_problem(6, 3, 4, 4, 4, seed=6)
Refused = (RuntimeError, ValueError)


def first(name: str) -> tuple[Any, ...]:
    return tuple(of_every_kind(PROBLEM, name)[-1])


@pytest.mark.parametrize("name", ALL)
def test_empty_indptr(name: str) -> None:
    """B would be -1: it was a segmentation fault."""
    for wrong in (lambda t: t[:0], lambda t: torch.tensor(0), lambda t: t.unsqueeze(0)):
        with pytest.raises(Refused, match="indptr"):
            getattr(ops, name)(*changed(name, first(name), indptr=wrong))
        with pytest.raises(ValueError, match="indptr"):
            OPS[name].refuse(changed(name, first(name), indptr=wrong))


@pytest.mark.parametrize(("name", "size"), [("label_counts", "num_labels"), ("mix_annotators", "num_annotators")])
def test_sizes_whose_product_overflows(name: str, size: str) -> None:
    """They divided by zero, which ended the process."""
    for number in (2**61, 2**62, 2**63 - 1, -5):
        with pytest.raises(Refused, match="num_annotators"):
            getattr(ops, name)(*changed(name, first(name), **{size: lambda _, n=number: n}))
        with pytest.raises(ValueError, match="num_(annotators|labels) = .* (must not be negative|is too large)"):
            OPS[name].refuse(changed(name, first(name), **{size: lambda _, n=number: n}))


@pytest.mark.parametrize("name", [name for name in ALL if "mixture" in name or "joint" in name])
def test_unknown_normalization(name: str) -> None:
    """7 was as softmax forward and as neither backward."""
    for kind in (-1, 3, 7):
        with pytest.raises(Refused, match="normalization must be 0"):
            getattr(ops, name)(*changed(name, first(name), normalization=lambda _, kind=kind: kind))
        with pytest.raises(ValueError, match="normalization must be 0"):
            OPS[name].refuse(changed(name, first(name), normalization=lambda _, kind=kind: kind))


@pytest.mark.parametrize("name", ALL)
def test_an_argument_on_another_device(name: str) -> None:
    """On meta it gave memory that nobody had written."""
    fields = OPS[name].arguments._fields[: OPS[name].num_tensors]
    given = [field for field, value in zip(fields, first(name), strict=False) if value is not None]
    for field in given:
        with pytest.raises(ValueError, match="all belong on one device"):
            getattr(ops, name)(*changed(name, first(name), **{field: lambda t: t.to("meta")}))


@pytest.mark.parametrize("name", ALL)
def test_none_for_a_tensor(name: str) -> None:
    for field in ("indptr", "annotator") if name == "em_step" else ("indptr", "item", "annotator"):
        with pytest.raises(Refused, match=f"{field} must be a tensor, got None"):
            getattr(ops, name)(*changed(name, first(name), **{field: lambda _: None}))


def test_the_order_of_em_step() -> None:
    """The CPU does without it, but takes none that is wrong."""
    args = first("em_step")
    order = PROBLEM.annotations.order
    assert_same(ops.em_step(*changed("em_step", args, order=lambda _: order)), ops.em_step(*args), "output")
    for wrong in (order.int(), order[:-1], order + 1, order.flip(0)):
        with pytest.raises(RuntimeError, match="order"):
            ops.em_step(*changed("em_step", args, order=lambda _, wrong=wrong: wrong))


@pytest.mark.parametrize("name", [name for name in ALL if name != "em_step"])
def test_the_plan_changes_no_bit_and_must_be_that_of_the_annotations(name: str) -> None:
    args, plan = first(name), PROBLEM.annotations.plan
    assert plan is not None

    def given(other: Any) -> tuple[Any, ...]:
        return changed(name, args, plan=lambda _: other)

    assert_same(as_tuple(getattr(ops, name)(*given(None))), as_tuple(getattr(ops, name)(*given(plan))), "output")
    strided = torch.cat([plan, plan], 1)[:, :4]
    assert_same(as_tuple(getattr(ops, name)(*given(strided))), as_tuple(getattr(ops, name)(*given(plan))), "output")
    other = make_problem(6, 3, 4, 4, 4, seed=7).annotations.plan
    wrong = [other, plan[:-1], plan.flip(0), plan.long(), plan[:, :3], plan.flatten()]
    for column in range(4 if "label" in OPS[name].arguments._fields else 3):
        wrong.append(plan.clone())
        wrong[-1][2, column] += 1
        wrong.append(plan.clone())
        wrong[-1][2, column] = -1
    for each in wrong:
        with pytest.raises(Refused, match="crowdnal: .*plan"):
            getattr(ops, name)(*given(each))
        with pytest.raises(ValueError, match="plan"):
            OPS[name].refuse(given(each))


def test_an_expanded_confusion_of_terabytes() -> None:
    huge = torch.zeros(1, 4, 4, dtype=torch.double).expand(2**40, 4, 4)
    with pytest.raises(RuntimeError, match="confusion cannot be made contiguous"):
        ops.mix(PROBLEM.scores, huge, *PROBLEM.index)


def test_other_layouts_and_dtypes() -> None:
    for wrong, match in (
        (PROBLEM.confusion.long(), "confusion must be float"),
        (PROBLEM.confusion.to_sparse(), "sparse"),
    ):
        with pytest.raises(Refused, match=match):
            ops.mix(PROBLEM.scores, wrong, *PROBLEM.index)


@pytest.mark.parametrize("name", ALL)
def test_floats_of_eight_bits(name: str) -> None:
    """In the fallback they were torch's own "Promotion for Float8 Types is not supported"."""
    fields = OPS[name].arguments._fields[: OPS[name].num_tensors]
    for field, value in zip(fields, first(name), strict=False):
        if value is not None and value.is_floating_point():
            wrong = changed(name, first(name), **{field: lambda t: t.to(torch.float8_e5m2)})
            with pytest.raises(ValueError, match=f"{field} must be a floating-point tensor of 16, 32 or 64 bits"):
                OPS[name].refuse(wrong)
            with pytest.raises(Refused):
                getattr(ops, name)(*wrong)


@pytest.mark.parametrize("name", ALL)
def test_another_precision(name: str) -> None:
    """In the fallback it was torch's own "expected scalar type Double but found Float"."""
    fields = OPS[name].arguments._fields[: OPS[name].num_tensors]
    floats = [f for f, t in zip(fields, first(name), strict=False) if t is not None and t.is_floating_point()]
    for field in floats if len(floats) > 1 else ():
        wrong = changed(name, first(name), **{field: lambda t: t.float()})
        with pytest.raises(ValueError, match=r"must be torch\.float(32|64), as"):
            OPS[name].refuse(wrong)
        with pytest.raises(Refused):
            getattr(ops, name)(*wrong)


def test_the_fallback_refuses_what_kernels_refuse() -> None:
    """Negative annotators are not the last ones, out of range nothing is read, with no native library either."""
    for name in ALL:
        for field, value in (("annotator", -1), ("label", 99), ("item", -1)):
            args = first(name)
            if field not in OPS[name].arguments._fields:
                continue
            wrong = changed(name, args, **{field: lambda t, value=value: t.clone().fill_(value)})
            with pytest.raises(ValueError, match=rf"{field}\[0\] = {value} is out of range"):
                OPS[name].refuse(wrong)


@pytest.mark.parametrize("name", ["mixture_link", "joint_link"])
def test_nan_scores_stay_nan(name: str) -> None:
    """In the reference they were a posterior of 0, and gradients of 0: a diverged network looked frozen."""
    a = Annotations([0, 1, 2], [0, 0], [0, 1], num_annotators=1, num_classes=2)
    index, table = (a.indptr, a.item, a.annotator, a.order, None), torch.zeros(1, 2, 2)
    for bad, posterior in ((torch.nan, [torch.nan, torch.nan]), (-torch.inf, [0.0, 0.0])):
        scores = torch.tensor([[bad, bad], [0.0, 0.0]])
        out = [getattr(where, name)(scores, table, None, *index, a.label, 1, True) for where in (ops, reference)]
        for _, _, found, _ in out:
            assert_same([found[0].nan_to_num(7)], [torch.tensor(posterior).nan_to_num(7)], "posterior")
        back = [
            getattr(where, f"{name}_backward")(
                torch.ones(()), None, scores, table, None, *index, a.label, each[2], each[3], 1, True, True, True
            )
            for where, each in zip((ops, reference), out, strict=True)
        ]
        for ours, plain in zip(*back, strict=True):
            assert_close([ours.nan_to_num(7)], [plain.nan_to_num(7)], rtol=1e-6, atol=1e-6, where="gradient")


def test_a_weight_of_zero_beside_nan_adds_nothing() -> None:
    problem = make_problem(6, 3, 4, 5, 4, seed=6)
    table = problem.stored.log_softmax(1)
    for bad in (torch.nan, -torch.inf, torch.inf):
        table[0] = bad
        weight = (problem.annotations.annotator != 0).double()
        args = (table, weight, *problem.index, problem.annotations.label)
        assert_close(ops.label_log_likelihood(*args), reference.label_log_likelihood(*args), rtol=1e-9, atol=1e-9)
        assert ops.label_log_likelihood(*args).isfinite().all()


@pytest.mark.parametrize("offset", [30.0, 100.0, 1e4, -1e4, 1e6, 1e30])
@pytest.mark.parametrize("sizes", [(20, 5, 4, 4, 6), (20, 5, 40, 5, 6), (6, 2, 3, 4, 60)])
def test_an_offset_of_stored_values_changes_nothing(sizes: tuple[int, ...], offset: float) -> None:
    """log A = x - log_norm lost the labels' differences where both are large: 6e-4 of a posterior at 1e4."""
    problem = make_problem(*sizes, seed=1)
    stored = (problem.stored.float() + offset).float()
    exact = stored.double() - offset if abs(offset) < 1e20 else torch.zeros_like(stored, dtype=torch.double)
    scores, label = problem.scores.log_softmax(1), problem.annotations.label
    for name in ("mixture_link", "joint_link"):
        forward, backward = getattr(ops, name), getattr(ops, f"{name}_backward")
        wanted = getattr(reference, name)(scores, exact, None, *problem.index, label, reference.SOFTMAX, True)
        found = forward(scores.float(), stored, None, *problem.index, label, reference.SOFTMAX, True)
        for ours, truth in zip(found[:3], wanted[:3], strict=True):
            assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5, where=name)

        def gradient(op: Any, dtype: torch.dtype, matrices: torch.Tensor, out: tuple[torch.Tensor, ...]) -> Any:
            one = torch.ones((), dtype=dtype)
            rest = (None, *problem.index, label, out[2], out[3], reference.SOFTMAX, False, True, True)
            return op(one, None, scores.to(dtype), matrices, *rest)[1].double()

        truth = gradient(getattr(reference, f"{name}_backward"), torch.double, exact, wanted)
        ours = gradient(backward, torch.float, stored, found)
        assert_close(ours, truth, rtol=1e-5, atol=2e-5 * float(1 + truth.abs().max()), where=f"{name} gradient")


def test_softplus_of_huge_values() -> None:
    problem = make_problem(20, 5, 4, 4, 6, seed=2)
    for scale in (1e3, 1e6):
        args = [problem.scores.log_softmax(1), problem.stored * scale, None, *problem.index, problem.annotations.label]
        for name in ("mixture_link", "joint_link"):
            ours, plain = (getattr(where, name)(*args, reference.SOFTPLUS, True) for where in (ops, reference))
            assert_close(as_tuple(ours)[:3], as_tuple(plain)[:3], rtol=1e-9, atol=1e-9, where=name)
