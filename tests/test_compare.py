"""The comparisons of the tests: what they accept, and what they say of what they do not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import TOLERANCES, assert_close, assert_same, assert_within

INF, NAN = torch.inf, torch.nan


def message(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as error:
        function(*args, **kwargs)
    return str(error.value)


def test_the_worst_element_is_shown_with_its_place_both_values_and_what_was_allowed() -> None:
    wanted = torch.tensor([[1.0, 2.0, 3.0], [100.0, 0.5, 6.0]], dtype=torch.float64)
    ours = wanted.clone()
    ours[1, 0] += 3.0  # the largest difference, 3 times what is allowed there
    ours[1, 1] += 0.25  # 50 times
    said = message(assert_close, ours, wanted, rtol=0.01, where="grad of weight")
    assert said == (
        "grad of weight: 2 of 6 elements of [2, 3] differ by more than 0.01 · |wanted|\n"
        "worst at [1, 1]: ours 0.75, wanted 0.5, difference 0.25, allowed 0.005"
    )


def test_a_structure_names_its_part() -> None:
    ours = {"a": [torch.zeros(2), (torch.tensor(1.5), 2.0)]}
    assert_close(ours, {"a": [torch.zeros(2), (torch.tensor(1.5), 2.0)]})
    said = message(assert_close, ours, {"a": [torch.zeros(2), (torch.tensor(1.25), 2.0)]})
    assert said.startswith("['a'][1][0]: 1 of 1 elements of [] differ") and "ours 1.5, wanted 1.25" in said
    assert "['a'][1][1]" in message(assert_close, ours, {"a": [torch.zeros(2), (torch.tensor(1.5), 2.5)]})
    assert "wanted are ['b']" in message(assert_close, ours, {"b": []})
    assert "has 1 elements, wanted are 2" in message(assert_close, [1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (torch.zeros(3, 2), "shape"),
        (torch.zeros(2, 3, dtype=torch.float64), "dtype"),
        (torch.zeros(2, 3, device="meta"), "device"),
        (torch.zeros(2, 3).to_sparse(), "layout"),
    ],
)
def test_what_is_no_value_must_agree(other: torch.Tensor, what: str) -> None:
    assert what in message(assert_close, other, torch.zeros(2, 3), where="loss")
    with pytest.raises(TypeError, match="Tensor is compared with float"):
        assert_close(torch.zeros(()), 0.0)


@pytest.mark.parametrize(
    ("ours", "wanted"), [(INF, 1e300), (1e300, INF), (INF, -INF), (NAN, 1.0), (1.0, NAN), (NAN, NAN)]
)
def test_what_is_not_finite_is_close_to_itself_alone(ours: float, wanted: float) -> None:
    pair = [torch.tensor([0.0, v], dtype=torch.float64) for v in (ours, wanted)]
    assert "worst at [1]" in message(assert_close, *pair, rtol=0.5, atol=1e300)
    assert "worst at [1]" in message(assert_within, *pair, 1e308)
    assert_close(torch.tensor([INF, -INF]), torch.tensor([INF, -INF]))


def test_nan_is_allowed_on_request() -> None:
    wanted = torch.tensor([NAN, 1.0])
    assert_close(wanted.clone(), wanted, equal_nan=True)
    assert "worst at [0]" in message(assert_close, torch.tensor([0.0, 1.0]), wanted, equal_nan=True)


def test_sparse_half_integer_and_empty_tensors() -> None:
    sparse = torch.tensor([[0.0, 1.0], [0.0, 0.0]]).to_sparse()
    assert_close(sparse, sparse.clone())
    assert "worst at [0, 1]: ours 1.0, wanted 2.0" in message(assert_close, sparse, 2 * sparse)
    assert_close(torch.ones(3).bfloat16() * 1.01, torch.ones(3).bfloat16())
    assert "worst at [2]: ours 2.0, wanted 3.0" in message(assert_close, torch.arange(3), torch.tensor([0, 1, 3]))
    assert_close(torch.zeros(0, 3), torch.zeros(0, 3))
    assert_within(torch.zeros(0), torch.zeros(0), 0.0)


def test_arrays_are_values() -> None:
    assert_close(torch.tensor([1.0, 2.0]), np.array([1.0, 2.0]))
    assert_close([1 / 3], np.array([1 / 3]), rtol=1e-15)
    assert "worst at [1]: ours 2.0, wanted 3.0" in message(assert_close, torch.tensor([1.0, 2.0]), np.array([1.0, 3.0]))
    assert "shape" in message(assert_close, torch.zeros(2), np.zeros((2, 1)))


def test_within_takes_a_bound_for_each_element_and_another_precision() -> None:
    wanted, allowed = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([0.1, 1e-9])
    assert_within(torch.tensor([1.05, 2.0]), wanted, allowed)
    said = message(assert_within, torch.tensor([1.05, 2.25]), wanted, allowed)
    assert re.search(r"1 of 2 .*\nworst at \[1\]: ours 2.25, wanted 2.0, difference 0.25, allowed 1e-09", said)
    assert "shape [1], not [2]" in message(assert_within, torch.zeros(1), wanted, 1.0)


def test_same_is_exact() -> None:
    one = torch.tensor([1.0, 2.0])
    assert_same((one, one), (one.clone(), one.clone()))
    said = message(assert_same, (one, one.nextafter(torch.tensor(3.0))), (one, one))
    assert "[1]: 2 of 2 elements of [2] differ by more than nothing" in said


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(list(TOLERANCES)), st.booleans())
def test_accepts_what_torch_accepts(data: st.DataObject, dtype: torch.dtype, default: bool) -> None:
    some = st.floats(-4, 4, width=32) | st.sampled_from([INF, -INF, NAN, 0.0])
    wanted = torch.tensor(data.draw(st.lists(some, min_size=1, max_size=4)), dtype=dtype)
    shift = data.draw(st.sampled_from([0.0, 1e-8, 1e-7, 1e-5, 1e-3, 2e-2, 1.0]))
    options = {} if default else {"rtol": data.draw(st.sampled_from([0.0, 1e-3])), "atol": 1e-4}
    ours = wanted * (1 + shift)
    try:
        torch.testing.assert_close(ours, wanted, **options)
    except AssertionError:
        message(assert_close, ours, wanted, **options)
    else:
        assert_close(ours, wanted, **options)
