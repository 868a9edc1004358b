"""Losses whose gradients come with them: what is handed over, and that every other way is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from support.compare import assert_close
from support.problems import Problem, make_problem
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.autograd import gradcheck, gradgradcheck
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from crowdnal import functional as F
from crowdnal import reference
from crowdnal.functional._autograd._step import StepFunction
from crowdnal.functional._autograd.joint_link import JointStep
from crowdnal.functional._autograd.mixture_link import MixtureStep
from crowdnal.functional._autograd.softmax_link import SoftmaxStep, softmax_loss
from crowdnal.functional.reduction import reduction_weights

SIZES = [(40, 6, 5, 5, 3), (9, 30, 10, 10, 2), (64, 2, 7, 20, 40), (12, 3, 33, 34, 5), (0, 3, 2, 2, 1)]
KINDS = {"none": reference.NONE, "softmax": reference.SOFTMAX, "softplus": reference.SOFTPLUS}


@dataclass
class Loss:
    """A public loss of a problem, by its leaves; `step`: the Function of its one op."""

    step: type[StepFunction]
    names: tuple[str, ...]
    call: Callable[..., Tensor]
    options: dict[str, Any]
    prior: bool = False  # of the matrices' rows

    def leaves(self, p: Problem) -> dict[str, Tensor]:
        """Copies of what is differentiated."""
        stored = p.stored.log_softmax(1) if self.options.get("normalization") == "none" else p.stored
        rows = {"scores": p.scores, "shared": p.shared, "mixing": p.mixing, "weight": p.weight}
        rows |= dict.fromkeys(("log_probs", "log_prior"), p.scores.log_softmax(1))
        if self.prior and "shared" not in self.names:  # what is common is mapped by probabilities
            rows["scores"] = p.scores.softmax(1)
        rows["confusion"] = p.confusion if self.step is SoftmaxStep else stored
        return {name: rows[name].detach().clone().requires_grad_() for name in self.names}

    def __call__(self, p: Problem, leaves: dict[str, Tensor]) -> Tensor:
        rest = dict(leaves)
        first = rest.pop(self.names[0])
        given = {"prior": self.prior_of(p)} if self.prior else {}
        return self.call(first, rest.pop("confusion"), p.annotations, **rest, reduction="sum", **self.options, **given)

    def prior_of(self, p: Problem) -> F.DirichletPrior:
        counts, common, labels_given = p.prior()
        return F.DirichletPrior(counts, labels_given, None if "normalization" in self.options else common)

    def two_ops(self, p: Problem, leaves: dict[str, Tensor]) -> Tensor:
        """The same by the op of the loss, and that of its backward; the prior by its formula."""
        counts, common, labels_given = p.prior()
        if self.prior and self.step is SoftmaxStep and "shared" not in leaves:
            leaves = {**leaves, "shared": (leaves["scores"] @ common.exp()).log()}
        loss = _outputs(self, p, leaves, self.step.link, mean=False)[0]
        if not self.prior:
            return loss
        if self.step is SoftmaxStep:
            rows = (leaves["confusion"] + common).log_softmax(2)
        else:
            stored = leaves["confusion"].transpose(1, 2)
            stored = (
                stored if self.options["normalization"] == "softmax" else torch.nn.functional.softplus(stored).log()
            )
            rows = stored.log_softmax(2)
        terms = counts * ((counts / counts.sum(1, keepdim=True)).clamp(min=1e-99).log() - rows)
        each = (terms.sum((1, 2)) / labels_given.clamp(min=1))[p.annotations.annotator]
        return loss + (each * leaves.get("weight", torch.ones_like(each))).sum()


def _links(*normalizations: str) -> list[Any]:
    out = []
    for kind in normalizations:
        mixture = ("log_probs", "confusion", "weight")
        out.append(pytest.param(Loss(MixtureStep, mixture, F.crowd_mixture_nll, {"normalization": kind}), id=kind))
        joint = Loss(JointStep, ("log_prior", "confusion"), F.crowd_marginal_nll, {"normalization": kind})
        out.append(pytest.param(joint, id=f"joint-{kind}"))
    return out


SOFTMAX = Loss(SoftmaxStep, ("scores", "confusion", "shared", "mixing", "weight"), F.crowd_cross_entropy, {})
PRIOR = Loss(SoftmaxStep, SOFTMAX.names[:-1], F.crowd_cross_entropy, {}, prior=True)
COMMON = Loss(SoftmaxStep, SOFTMAX.names[:2], F.crowd_cross_entropy, {}, prior=True)
PRIORS = [pytest.param(PRIOR, id="softmax_link-prior"), pytest.param(COMMON, id="softmax_link-common")] + [
    pytest.param(
        Loss(MixtureStep, ("log_probs", "confusion"), F.crowd_mixture_nll, {"normalization": kind}, prior=True),
        id=f"{kind}-prior",
    )
    for kind in ("softmax", "softplus")
]
LOSSES = [pytest.param(SOFTMAX, id="softmax_link"), *PRIORS, *_links("none", "softmax", "softplus")]
EACH = [pytest.param(SOFTMAX, id="softmax_link"), *PRIORS, *_links("softmax")]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("factor", [1.0, -0.3])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_are_those_of_the_two_ops(loss: Loss, sizes: tuple[int, ...], factor: float) -> None:
    p = make_problem(*sizes, seed=2)
    ours, theirs = loss.leaves(p), loss.leaves(p)
    one, two = loss(p, ours), loss.two_ops(p, theirs)
    assert type(one.grad_fn).__name__ == f"{loss.step.__name__}Backward"
    assert_close(one, two)
    (factor * one).backward()
    (factor * two).backward()
    for name in ours:
        assert_close(ours[name].grad, theirs[name].grad)


@pytest.mark.parametrize("loss", EACH)
def test_a_gradient_is_handed_over_not_copied(loss: Loss) -> None:
    p = make_problem(40, 6, 5, 5, 3, seed=2)
    leaves = loss.leaves(p)
    out = loss(p, leaves)
    ready = [gradient.data_ptr() for gradient in out.grad_fn.gradients]  # type: ignore[union-attr]
    out.backward()
    wanted = [leaves[name].grad.data_ptr() if name in leaves else 0 for name in loss.step.inputs]  # type: ignore[union-attr]
    assert [place for place in ready if place] == [place for place in wanted if place]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("loss", EACH)
def test_a_second_pass_over_the_graph_has_the_same_bits(loss: Loss, sizes: tuple[int, ...]) -> None:
    p = make_problem(*sizes, seed=2)
    leaves = loss.leaves(p)
    out = loss(p, leaves)
    first = torch.autograd.grad(out, list(leaves.values()), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.mul_(0)  # the caller may do with it what he likes
    twice = torch.autograd.grad(2 * out, list(leaves.values()))
    for before, after in zip(kept, twice, strict=True):
        assert torch.equal(2 * before, after)


@pytest.mark.parametrize("loss", EACH)
def test_a_graph_that_was_let_go_is_refused_as_torch_does(loss: Loss) -> None:
    p = make_problem(40, 6, 5, 5, 3, seed=2)
    out = loss(p, loss.leaves(p))
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_pass_that_is_differentiated_is_that_of_the_two_ops(loss: Loss) -> None:
    p = make_problem(20, 4, 4, 3, 3, seed=2)
    second = []
    for way in (loss, loss.two_ops):
        leaves = loss.leaves(p)
        first = torch.autograd.grad(way(p, leaves), list(leaves.values()), create_graph=True)
        total = sum(gradient.sin().sum() for gradient in first)
        second.append(torch.autograd.grad(total, list(leaves.values())))
    for ours, theirs in zip(*second, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("loss", LOSSES)
def test_both_orders_are_those_of_differences(loss: Loss) -> None:
    p = make_problem(3, 2, 3, 3, 2, seed=6)
    leaves = loss.leaves(p)

    def of(*values: Tensor) -> Tensor:
        return loss(p, dict(zip(loss.names, values, strict=True)))

    assert gradcheck(of, tuple(leaves.values()), check_batched_grad=True)
    assert gradgradcheck(of, tuple(leaves.values()))


@pytest.mark.parametrize("loss", PRIORS)
def test_a_prior_has_a_gradient_for_the_weight_in_every_mode(loss: Loss) -> None:
    p = make_problem(3, 2, 3, 3, 2, seed=6)
    with_weight = replace(loss, names=(*loss.names, *({"weight"} - {*loss.names})))
    leaves = with_weight.leaves(p)

    def of(*values: Tensor) -> Tensor:
        return with_weight(p, dict(zip(with_weight.names, values, strict=True)))

    assert_close(of(*leaves.values()), with_weight.two_ops(p, leaves))
    assert gradcheck(of, tuple(leaves.values()), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(of, tuple(leaves.values()))
    hessian = torch.func.hessian(lambda w: of(*[w if n == "confusion" else v for n, v in leaves.items()]))
    wanted = torch.func.hessian(lambda w: with_weight.two_ops(p, {**leaves, "confusion": w}))
    assert_close(hessian(leaves["confusion"]), wanted(leaves["confusion"]))


@pytest.mark.parametrize("loss", PRIORS)
def test_a_prior_of_the_raw_op_has_one_too(loss: Loss) -> None:
    p = make_problem(9, 4, 3, 3, 4, seed=6)
    ours, theirs = (replace(loss, names=(*loss.names, *({"weight"} - {*loss.names}))).leaves(p) for _ in range(2))
    prior = dict(zip(("prior", "common", "labels_given"), p.prior(loss.step is not SoftmaxStep), strict=True))
    _outputs(loss, p, {**ours, **prior}, loss.step, mean=False)[0].backward()
    loss.two_ops(p, theirs).backward()
    for name in ours:
        assert_close(ours[name].grad, theirs[name].grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "per_item", "item_mean"])
@pytest.mark.parametrize("loss", PRIORS)
def test_a_prior_is_reduced_as_the_loss_is(loss: Loss, reduction: Any) -> None:
    """And is the same of the annotators in the batch alone."""
    p = make_problem(40, 60, 4, 4, 3, seed=2)
    rows, weight = p.scores.softmax(1) if loss.step is SoftmaxStep else p.scores.log_softmax(1), p.weight
    stored = p.confusion if loss.step is SoftmaxStep else p.stored
    found = []
    for sparse in (False, True):
        matrices = stored.clone().requires_grad_()
        how = {"weight": weight, "reduction": reduction, "sparse_grad": sparse, **loss.options}
        out = loss.call(rows, matrices, p.annotations, prior=loss.prior_of(p), **how)
        plain = loss.call(rows, matrices, p.annotations, **how)
        found.append((out, *torch.autograd.grad(out, matrices)))
        if sparse:
            continue
        inside, mean = reduction_weights(p.annotations, weight, reduction, torch.double)
        alone = loss.two_ops(p, {loss.names[0]: rows, "confusion": matrices, "weight": inside})
        assert_close(out, alone, where=reduction)
        assert not mean and abs(float((out - plain).detach())) > 1e-3
    assert_close(found[1][0], found[0][0])
    assert found[1][1].is_sparse
    assert_close(found[1][1].to_dense(), found[0][1])


@pytest.mark.parametrize("loss", PRIORS)
def test_a_prior_that_cannot_be_is_refused(loss: Loss) -> None:
    p = make_problem(6, 4, 3, 3, 2, seed=2)
    counts, _, labels_given = p.prior()
    stored = p.confusion if loss.step is SoftmaxStep else p.stored
    call = partial(loss.call, p.scores.log_softmax(1), stored, p.annotations)
    with pytest.raises(ValueError, match=r"prior.counts has shape \(2, 3\)"):
        call(prior=F.DirichletPrior(counts[:2], labels_given))
    with pytest.raises(ValueError, match=r"prior.labels_given has shape \(3,\)"):
        call(prior=F.DirichletPrior(counts, labels_given[:3]))
    with pytest.raises(ValueError, match='reduction="none"'):
        call(prior=F.DirichletPrior(counts, labels_given), reduction="none")


@pytest.mark.parametrize("loss", EACH)
def test_batched_and_traced_passes_are_those_of_single_ones(loss: Loss) -> None:
    p = make_problem(40, 6, 5, 5, 3, seed=2)
    leaves = loss.leaves(p)
    one = torch.autograd.grad(loss(p, leaves), list(leaves.values()))
    factors = torch.tensor([1.0, -2.0], dtype=p.scores.dtype)
    both = torch.autograd.grad(loss(p, leaves), list(leaves.values()), factors, is_grads_batched=True)

    def traced(*values: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(3 * loss(p, dict(zip(leaves, values, strict=True))), values)

    thrice = make_fx(traced)(*leaves.values())(*leaves.values())
    for single, batch, again in zip(one, both, thrice, strict=True):
        assert_close(batch, torch.stack([single, -2 * single]))
        assert_close(again, 3 * single)


@pytest.mark.parametrize("loss", EACH)
def test_only_what_is_needed_is_computed(loss: Loss) -> None:
    p = make_problem(40, 6, 5, 5, 3, seed=2)
    leaves = loss.leaves(p)
    alone = {name: leaf.detach().requires_grad_(name == "confusion") for name, leaf in leaves.items()}
    out = loss(p, alone)
    made = [gradient.numel() > 0 for gradient in out.grad_fn.gradients]  # type: ignore[union-attr]
    assert made == [name == "confusion" for name in loss.step.inputs]
    assert_close(
        torch.autograd.grad(out, alone["confusion"]), torch.autograd.grad(loss(p, leaves), leaves["confusion"])
    )


@pytest.mark.parametrize("loss", EACH)
def test_gradients_of_the_losses_of_the_annotations_are_those_of_the_two_ops(loss: Loss) -> None:
    p = make_problem(20, 4, 4, 3, 3, seed=2)
    results = []
    for step in (True, False):
        leaves = loss.leaves(p)
        out = _outputs(loss, p, leaves, loss.step if step else loss.step.link)
        results.append(torch.autograd.grad(out[0].sin() + out[1].cos().sum(), list(leaves.values())))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs)


def test_weights_of_the_joint_link_have_gradients() -> None:
    p = make_problem(20, 4, 4, 3, 3, seed=2)
    loss = Loss(JointStep, ("log_prior", "confusion", "weight"), F.crowd_marginal_nll, {"normalization": "softmax"})
    ours, theirs = loss.leaves(p), loss.leaves(p)
    loss(p, ours).backward()
    _outputs(loss, p, theirs, JointStep, mean=False)[0].backward()
    for name in ours:
        assert_close(ours[name].grad, theirs[name].grad)


@pytest.mark.parametrize("loss", EACH)
def test_a_compiled_step_is_one_op_and_equals_eager(loss: Loss) -> None:
    p = make_problem(20, 4, 4, 3, 3, seed=2)
    graphs: list[list[str]] = []

    def compiler(graph: GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if "crowdnal" in str(node.target)])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    compiled = torch.compile(lambda *values: 3 * call(*values), fullgraph=True, backend=backend)
    ours, theirs = loss.leaves(p), loss.leaves(p)

    def call(*values: Tensor) -> Tensor:
        return loss(p, dict(zip(loss.names, values, strict=True)))

    one, two = compiled(*ours.values()), 3 * call(*theirs.values())
    assert_close(one, two)
    for times in (1, 2):  # over one graph
        one.backward(retain_graph=True)
        two.backward(retain_graph=True)
        for name in ours:
            assert_close(ours[name].grad, theirs[name].grad, where=f"{name}, {times}")
    assert graphs == [[f"crowdnal.{loss.step.op.name}.default"], []]


@pytest.mark.parametrize("loss", EACH)
def test_no_gradients_are_made_where_none_can_be_asked_for(loss: Loss) -> None:
    p = make_problem(40, 6, 5, 5, 3, seed=2)
    leaves = loss.leaves(p)
    with torch.no_grad():
        assert not loss(p, leaves).requires_grad
    plain = {name: leaf.detach() for name, leaf in leaves.items()}
    first = loss.names[0]
    tangent = torch.func.jvp(lambda z: loss(p, {**plain, first: z}), (plain[first],), (plain[first],))
    assert tangent[1].isfinite()


def test_a_pass_on_cuda_must_be_worth_scaling() -> None:
    class There(Tensor):
        is_cuda = True

    p = make_problem(6, 4, 3, 3, 2, seed=2)
    scores, nothing = torch.zeros(5, 8).as_subclass(There), (None,) * 3
    for nnz, sizes, worth in ((64, (8, 8, 8), True), (63, (8, 8, 8), False), (999, (1, 33, 8), False)):
        index = (*p.index[:2], torch.zeros(nnz), *p.index[3:])
        assert softmax_loss._is_of_use((scores, torch.zeros(sizes), *nothing, *index)) == worth
        assert softmax_loss._is_of_use((torch.zeros(5, 8), torch.zeros(sizes), *nothing, *index))


@pytest.mark.parametrize("loss", EACH)
def test_the_op_refuses_what_it_cannot_do(loss: Loss) -> None:
    p = make_problem(6, 4, 3, 3, 2, seed=2)
    leaves = {name: leaf.detach() for name, leaf in loss.leaves(p).items()}
    first = loss.names[0]

    def step(rows: Tensor) -> Tensor:
        return _outputs(loss, p, {**leaves, first: rows}, loss.step)[0]

    with pytest.raises(RuntimeError, match=f"take {loss.step.link.op.name}"):
        torch.func.jvp(step, (leaves[first],), (leaves[first],))
    with pytest.raises(RuntimeError, match=f"take {loss.step.link.op.name}"):
        torch.func.vmap(step)(leaves[first].expand(2, *leaves[first].shape))


def _outputs(loss: Loss, p: Problem, leaves: dict[str, Tensor], function: Any, mean: bool = True) -> Any:
    """What the op of `function` returns, everything of which it has gradients needed."""
    given = {"mean": mean, "normalization": KINDS.get(loss.options.get("normalization", "")), **leaves}
    given |= dict(zip(("indptr", "item", "annotator", "order", "plan"), p.index, strict=True))
    given["label"] = p.annotations.label
    fields = function.op.arguments._fields
    needed = {name: name.removeprefix("need_") in leaves for name in fields if name.startswith("need_")}
    return function.op(*({**given, **needed}.get(name) for name in fields))
