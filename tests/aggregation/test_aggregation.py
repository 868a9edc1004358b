"""One posterior from any aggregation: ours, crowd-kit's, snorkel's (or a stand-in of it where it is not installed)."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_close
from support.crowds import coins, simulated

import crowdnal
from crowdnal import Annotations, aggregate, metrics
from crowdnal.aggregation import AGGREGATORS
from crowdnal.aggregation._external import _LIBRARY, _frame

OWN = [name for name in AGGREGATORS if name not in _LIBRARY]
CROWDKIT = ["glad", "mace", "mmsr", "wawa", "zero-based-skill", "kos"]
FAST: dict[str, dict[str, Any]] = {
    "glad": {"n_iter": 2},
    "mace": {"n_restarts": 1, "n_iter": 10},
    "zero-based-skill": {"n_iter": 5},
}


def gaps(a: Annotations) -> Annotations:
    """With an item without labels in front, an annotator without labels, and a class nobody used."""
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), a.indptr])
    return Annotations(indptr, a.annotator + 1, a.label, num_annotators=a.num_annotators + 2, num_classes=3)


@pytest.mark.parametrize("method", OWN)
def test_own_methods(method: str) -> None:
    a, _, _ = coins()
    few = {"max_iterations": 2} if method == "mmce" else {}
    posterior = aggregate(a, method, **few)
    if method == "majority-vote":
        expected = a.votes().double() / a.counts.unsqueeze(1)
    elif method == "auto":
        expected = crowdnal.aggregation.choose(a).posterior
    else:
        expected = getattr(crowdnal, method.replace("-", "_"))(a, **few).posterior
    assert torch.equal(posterior, expected) and posterior.dtype == torch.double
    option = {"mmce": {"max_iterations": 1}, "worker-clustering": {"num_clusters": 3}}.get(
        method, {"max_iterations": 2}
    )
    if method == "auto":
        assert torch.equal(aggregate(a, method, margin=1e9), aggregate(a, "majority-vote"))
    elif method == "majority-vote":
        with pytest.raises(ValueError, match="'majority-vote' has no options, got max_iterations"):
            aggregate(a, method, **option)
    else:
        assert not torch.equal(aggregate(a, method, **option), posterior)
    weight = torch.linspace(0, 1, a.num_annotations)
    heavy = Annotations(a.indptr, a.annotator, a.label, num_annotators=40, num_classes=4, weight=weight)
    assert not torch.allclose(aggregate(heavy, method, **few), posterior)


@pytest.mark.quick(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", CROWDKIT)
def test_crowdkit_methods_give_back_our_items_and_classes(method: str) -> None:
    crowdkit = pytest.importorskip("crowdkit.aggregation")
    dense, truth, _ = simulated(2, 8, 60)
    a = gaps(dense)
    options = FAST.get(method, {})
    posterior = aggregate(a, method, **options)
    assert posterior.shape == (61, 3) and posterior.dtype == torch.double
    assert_close(posterior.sum(1), torch.ones(61, dtype=torch.double))
    assert posterior.min() >= 0
    assert_close(posterior[0], torch.full((3,), 1 / 3, dtype=torch.double))
    frame = _frame(a)
    if method in ("glad", "mace"):
        cls = {"glad": crowdkit.GLAD, "mace": crowdkit.MACE}[method]
        wanted = cls(**options).fit_predict_proba(frame).loc[range(1, 61), [0, 1]].to_numpy()
        assert_close(posterior[1:, :2], wanted, atol=1e-12)
    elif method == "kos":
        wanted = crowdkit.KOS().fit_predict(frame).loc[range(1, 61)].to_numpy()
        assert (posterior[1:].argmax(1).numpy() == wanted).all() and posterior[1:].max(1).values.eq(1).all()
    else:
        cls = {"mmsr": crowdkit.MMSR, "wawa": crowdkit.Wawa, "zero-based-skill": crowdkit.ZeroBasedSkill}[method]
        skill = cls(**options).fit(frame).skills_
        scores = np.zeros((61, 3))
        np.add.at(scores, (a.item, a.label), skill.loc[a.annotator.tolist()].to_numpy())
        scores = scores[1:]
        expected = np.exp(scores) if method == "mmsr" else scores
        assert_close(posterior[1:], expected / expected.sum(1, keepdims=True), atol=1e-12)
    votes = metrics.accuracy(a.votes()[1:], truth)
    assert method == "kos" or metrics.accuracy(posterior[1:], truth) > votes - 0.1
    heavy = Annotations([0, 1], [0], [0], num_annotators=1, num_classes=2, weight=[2.0])
    with pytest.raises(ValueError, match=f"annotations have weights, which '{method}' cannot use"):
        aggregate(heavy, method)
    assert aggregate(Annotations([0, 0], [], [], num_annotators=1, num_classes=2), method).tolist() == [[0.5, 0.5]]


class LabelModel:
    """What the adaptor uses of snorkel's, with the votes for an answer."""

    def __init__(self, cardinality: int, verbose: bool) -> None:
        self.cardinality = cardinality

    def fit(self, L_train: np.ndarray, seed: int, progress_bar: bool, n_epochs: int = 100) -> None:  # noqa: N803
        assert L_train.min() >= -1 and (seed, progress_bar, n_epochs) == (0, False, 60)

    def predict_proba(self, L: np.ndarray) -> np.ndarray:  # noqa: N803
        votes = np.stack([(L == k).sum(1) for k in range(self.cardinality)], 1) + 1e-9
        return votes / votes.sum(1, keepdims=True)


@pytest.mark.filterwarnings("ignore")
def test_label_model(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("snorkel") is None:
        module = ModuleType("snorkel.labeling.model")
        module.LabelModel = LabelModel  # type: ignore[attr-defined]
        for name in ("snorkel", "snorkel.labeling"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "snorkel.labeling.model", module)
    dense, truth, _ = simulated(2, 20, 200)
    a = gaps(dense)
    posterior = aggregate(a, "label-model", n_epochs=60)
    assert posterior.shape == (201, 3) and torch.equal(posterior, aggregate(a, "label-model", n_epochs=60))
    assert_close(posterior.sum(1), torch.ones(201, dtype=torch.double))
    assert_close(posterior[0], torch.full((3,), 1 / 3, dtype=torch.double))
    assert metrics.accuracy(posterior[1:], truth) > 0.85
    twice = Annotations([0, 2], [0, 0], [0, 1], num_annotators=1, num_classes=2)
    with pytest.raises(ValueError, match="has more than one label"):
        aggregate(twice, "label-model")


def test_unknown_methods_and_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, _ = simulated(2, 20, 200)
    with pytest.raises(ValueError, match="method='vote' is unknown: use one of auto, majority-vote, dawid-skene"):
        aggregate(a, "vote")
    for module, extra, method in (("crowdkit", "crowd-kit", "glad"), ("snorkel", "snorkel", "label-model")):
        for name in [name for name in sys.modules if name.split(".")[0] == module]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=rf'pip install "crowdnal\[{extra}\]"'):
            aggregate(a, method)
        with pytest.raises(ImportError, match=extra):
            crowdnal.DLAggregate(2, 20, method=method)
