"""The E-step against brute force, and what it does with zeros, weights and items nobody labelled."""

from __future__ import annotations

import math

import pytest
import torch
from support.compare import assert_close

from crowdnal.aggregation import posterior
from crowdnal.data import Annotations

INDPTR, ANNOTATOR, LABEL = [0, 2, 2, 5, 6], [0, 2, 1, 1, 0, 2], [1, 0, 2, 2, 1, 0]


def batch(**kwargs) -> Annotations:
    return Annotations(INDPTR, ANNOTATOR, LABEL, num_annotators=3, num_classes=3, **kwargs)


def inputs(num_classes: int = 3, num_labels: int = 3, dtype=torch.float64):
    torch.manual_seed(0)
    log_probs = torch.randn(4, num_classes, dtype=dtype).log_softmax(-1)
    return log_probs, torch.rand(3, num_classes, num_labels, dtype=dtype).softmax(-1)


@pytest.mark.parametrize("num_classes", [3, 5])
def test_equals_brute_force(num_classes):
    log_probs, confusion = inputs(num_classes)
    expected = log_probs.exp()
    for i in range(4):
        for n in range(INDPTR[i], INDPTR[i + 1]):
            for k in range(num_classes):
                expected[i, k] *= confusion[ANNOTATOR[n], k, LABEL[n]]
    expected /= expected.sum(-1, keepdim=True)
    assert_close(posterior(log_probs, confusion, batch()), expected)


def test_item_without_annotations_keeps_its_classifier():
    log_probs, confusion = inputs()
    assert_close(posterior(log_probs, confusion, batch())[1], log_probs[1].exp())


def test_weight_two_is_the_label_twice_and_weight_zero_none():
    log_probs, confusion = inputs()
    got = posterior(log_probs, confusion, batch(weight=[2.0, 0.0, 1.0, 1.0, 1.0, 1.0]))
    twice = Annotations([0, 2, 2, 5, 6], [0, 0, 1, 1, 0, 2], [1, 1, 2, 2, 1, 0], num_annotators=3, num_classes=3)
    assert_close(got, posterior(log_probs, confusion, twice))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zero_cells_never_give_nan(dtype):
    log_probs = torch.zeros(1, 2, dtype=dtype).log_softmax(-1)
    certain = torch.eye(2, dtype=dtype).expand(3, 2, 2)
    one = Annotations([0, 2], [0, 1], [0, 1], num_annotators=3, num_classes=2)
    assert posterior(log_probs, certain, one).tolist() == [[0.5, 0.5]]
    two = Annotations([0, 3], [0, 1, 2], [0, 1, 1], num_annotators=3, num_classes=2)
    assert posterior(log_probs, certain, two)[0, 1] == 1


def test_minus_infinity_rules_a_class_out():
    log_probs = torch.tensor([[0.0, -math.inf]])
    confident = torch.tensor([[[0.01, 0.99], [0.01, 0.99]]]).expand(1, 2, 2)
    labels = Annotations([0, 1], [0], [1], num_annotators=1, num_classes=2)
    assert posterior(log_probs, confident, labels).tolist() == [[1.0, 0.0]]


def test_thousands_of_labels_do_not_underflow():
    votes = 5000
    labels = Annotations([0, votes], [0] * votes, [0, 1] * (votes // 2), num_annotators=1, num_classes=2)
    confusion = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    log_probs = torch.tensor([[0.3, 0.7]]).log()
    assert_close(posterior(log_probs, confusion, labels), torch.tensor([[0.3, 0.7]]), atol=1e-3, rtol=0)


def test_bitwise_repeatable_over_threads():
    torch.manual_seed(1)
    items, annotators = 200, 30
    labels = Annotations.from_dense(torch.randint(-1, 4, (items, annotators)), num_classes=4)
    log_probs = torch.randn(items, 4).log_softmax(-1)
    confusion = torch.rand(annotators, 4, 4).softmax(-1)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            results.append(posterior(log_probs, confusion, labels))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_low_precision_input_gives_float32():
    log_probs, confusion = inputs(dtype=torch.bfloat16)
    result = posterior(log_probs, confusion, batch())
    assert result.dtype == torch.float32
    assert_close(result.sum(-1), torch.ones(4))


def test_no_items():
    empty = Annotations([0], [], [], num_annotators=3, num_classes=3)
    assert posterior(torch.empty(0, 3), torch.full((3, 3, 3), 1 / 3), empty).shape == (0, 3)


def test_differentiable():
    log_probs, confusion = inputs()
    log_probs.requires_grad_()
    confusion.requires_grad_()
    assert torch.autograd.gradcheck(lambda p, a: posterior(p, a, batch()), (log_probs, confusion))


def test_shape_errors_name_both_sizes():
    log_probs, confusion = inputs()
    with pytest.raises(ValueError, match="3 rows but annotations has 4 items"):
        posterior(log_probs[:3], confusion, batch())
    with pytest.raises(ValueError, match=r"\(2, 3, 3\).*\(3, 3, 3\)"):
        posterior(log_probs, confusion[:2], batch())
