"""Ids out of range, which `Annotations` refuses, are assertions in the CUDA kernels that read by them."""

from __future__ import annotations

import pytest
from support.emulated import Emulated
from support.op_arguments import arguments
from support.problems import make_problem

from crowdnal import reference
from crowdnal.ops import OPS

pytestmark = pytest.mark.slow  # the kernels of CUDA are compiled for it

READ = {
    "mix": ("item", "annotator"),
    "mix_items": ("annotator",),
    "mix_annotators": ("item", "annotator"),
    "softmax_link": ("item", "annotator", "label"),
    "softmax_link_step": ("item", "annotator", "label"),
    "mixture_link": ("item", "annotator", "label"),
    "joint_link": ("annotator", "label"),
    "label_log_likelihood": ("annotator", "label"),
    "label_counts": ("annotator",),
    "em_step": ("annotator", "label"),
    "pair_confusion": ("item", "annotator", "label"),
}
CASES = [(name, tensor) for name, tensors in READ.items() for tensor in tensors]


@pytest.mark.parametrize("sizes", [(6, 3, 3, 3, 4), (6, 2, 20, 20, 4), (3, 2, 130, 5, 4)], ids=str)
@pytest.mark.parametrize(("name", "tensor"), CASES)
def test_an_id_out_of_range_is_an_assertion(emulated: Emulated, name: str, tensor: str, sizes: tuple[int, ...]) -> None:
    problem = make_problem(*sizes, seed=5)
    for bad, place in ((-1, 0), (10**6, -1)):  # where `order` still sorts the annotators
        for args in arguments(problem, name, reference.NONE):
            named = OPS[name].arguments(*args)
            ids = getattr(named, tensor).clone()
            ids[problem.annotations.order[place]] = bad
            without = {} if name == "em_step" else {"plan": None}
            with pytest.raises(RuntimeError, match="assertion failed"):
                emulated.op(name)(*named._replace(**{tensor: ids}, **without))


@pytest.mark.parametrize("sizes", [(6, 3, 3, 3, 4), (6, 2, 20, 20, 4)], ids=str)
@pytest.mark.parametrize(("name", "columns"), [("mix_annotators", (0, 1, 2)), ("softmax_link_step", (0, 1, 2, 3))])
def test_so_is_one_in_a_plan(emulated: Emulated, name: str, columns: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    problem = make_problem(*sizes, seed=5)
    plan = problem.annotations.plan
    assert plan is not None
    for column in columns:
        for bad, place in ((-1, 0), (10**6, -1)):
            for args in arguments(problem, name, reference.NONE):
                wrong = plan.clone()
                wrong[place, column] = bad
                with pytest.raises(RuntimeError, match="assertion failed"):
                    emulated.op(name)(*OPS[name].arguments(*args)._replace(plan=wrong))
