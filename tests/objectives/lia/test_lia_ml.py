"""LIA-ML: label sets as items, the formulas with a tag, batches of instances, what is shared between tags."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from support.compare import assert_close
from support.lia import plain_mlp
from support.lia_ml import D, R, T, crowd, features_of, make
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import crowdnal
from crowdnal import LIAML, Annotations, ObjectiveCallback, attach
from crowdnal.multilabel import MultiLabelDataset, TagClassifier, from_label_sets
from crowdnal.objectives import SoftMajorityVote

TABLE = {
    "task": ["s2", "s1", "s2", "s1", "s1", "s3"],
    "worker": ["ann", "bob", "bob", "bob", "cat", "ann"],
    "label": ["cause|treat", "treat", "", "cause | treat", "none", None],
}


# Reading


def test_label_sets_become_an_item_a_tag() -> None:
    a = from_label_sets(TABLE)
    assert a.vocabulary is not None
    assert a.vocabulary.items[:4] == (("s2", "cause"), ("s2", "none"), ("s2", "treat"), ("s1", "cause"))
    assert (a.num_items, a.num_classes, a.vocabulary.annotators) == (9, 2, ("ann", "bob", "cat"))
    assert a.counts.tolist() == [2, 2, 2, 3, 3, 3, 0, 0, 0]  # bob judged s1 twice, nobody s3
    assert a.annotator.tolist() == [0, 1] * 3 + [1, 1, 2] * 3
    assert a.label.tolist() == [1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0]
    assert a.item_id.tolist() == list(range(9))
    some = from_label_sets(TABLE, items=["s3", "s1", "s2"], tags=["treat", "cause", "none", "other"], annotators=[
        "cat", "bob", "ann", "dan"])  # fmt: skip
    assert some.num_items == 12 and some.num_annotators == 4 and some.counts.tolist() == [0] * 4 + [3] * 4 + [2] * 4
    assert some.votes()[4:, 1].tolist() == [2, 1, 1, 0, 1, 1, 0, 0]


def test_sets_lists_frames_files_and_weights(tmp_path: Any) -> None:
    pandas = pytest.importorskip("pandas")
    plain = from_label_sets(TABLE)
    sets = [{"cause", "treat"}, ["treat"], (), ["cause", "treat"], {"none"}, None]
    for table in ({**TABLE, "label": sets}, pandas.DataFrame({**TABLE, "label": sets}), pandas.DataFrame(TABLE)):
        other = from_label_sets(table)
        assert torch.equal(other.label, plain.label) and torch.equal(other.indptr, plain.indptr)
    file = tmp_path / "judgements.csv"
    pandas.DataFrame({**TABLE, "label": ["cause;treat", "treat", "none", "cause;treat", "none", ""]}).to_csv(file)
    read = from_label_sets(file, separator=";")
    assert read.counts.tolist() == plain.counts.tolist() and read.votes()[:3, 1].tolist() == [1, 1, 1]
    heavy = from_label_sets({**TABLE, "sure": [1.0, 2, 3, 4, 5, 6]}, weight="sure")
    assert heavy.weight.tolist() == [1, 3] * 3 + [2, 4, 5] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tags": ["cause", "none"]}, "'treat' of label .* is not in tags"),
        ({"separator": ""}, "separator"),
        ({"label": "labels"}, "no column 'labels'"),
        ({"items": ["s1", "s3"]}, "row 0.*'s2' is not in items"),
        ({"items": ["s1", "s2"]}, "'s3', of rows without a label, is not in items"),
        ({"tags": ["cause", "cause"]}, "ids must differ"),
    ],
)
def test_reading_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_label_sets(TABLE, **changes)
    with pytest.raises(ValueError, match="no tag"):
        from_label_sets({"task": [1], "worker": [1], "label": [()]})


# Formulas


@pytest.mark.parametrize("instance", ["features", "embedding"])
def test_equals_the_dense_formula(instance: Any) -> None:
    own = {"instance": instance} | ({"num_items": 4 * T, "feature_dim": None} if instance == "embedding" else {})
    objective, a, x = make(rounds=0, **own), crowd(), features_of()
    logits = torch.randn(4 * T, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    pairs, joint = objective.pairs, list(logits.log_softmax(1))
    for i, r, y in zip(a.item.tolist(), a.annotator.tolist(), a.label.tolist(), strict=True):
        tag, x_i = pairs.tags[i % T], x[i // T] if pairs.instances is None else pairs.instances[i // T]
        d = plain_mlp(pairs.difficulty, torch.cat([x_i, tag])).view(pairs.shape)
        c = plain_mlp(pairs.competence, torch.cat([pairs.annotators.values[r], tag])).view(pairs.shape)
        q = (d + c).exp().sum(2)
        joint[i] = joint[i] + torch.log(q[:, y] / q.sum(1))
    labelled = a.counts > 0
    expected = -torch.stack(joint).logsumexp(1)[labelled].mean()
    given = x.repeat_interleave(T, 0) if instance == "features" else None
    loss = objective(logits, a, given)
    assert_close(loss, expected)
    inputs = [logits, *objective.parameters()]
    assert_close(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs))
    posterior = torch.stack(joint).softmax(1).detach()
    assert_close(objective.posterior(logits, a, given), posterior)
    rows = torch.tensor([7, 2, 9, 10])  # any items, in any order: item_id says which tags and instances they are
    part = objective.posterior(logits[rows], a[rows], None if given is None else given[rows])
    assert_close(part, posterior[rows])


def test_confusions_of_tags_and_their_mean() -> None:
    objective, a, x = make(), crowd(), features_of().repeat_interleave(T, 0)
    objective.on_train_start(a, lambda: (torch.zeros(4 * T, 2, dtype=torch.float64), x))
    objective.on_epoch_start(1)
    confusion = objective.tag_confusion()
    assert confusion.shape == (R, T, 2, 2) and not confusion.requires_grad
    assert_close(objective.confusion(), confusion.mean(1))
    certain = 1e4 * torch.eye(2, dtype=torch.float64)
    for tag in range(T):
        rows = torch.arange(tag, 4 * T, T)
        says = Annotations(range(5), [3] * 4, [1] * 4, num_annotators=R, num_classes=2, item_id=rows)
        share = objective.targets[rows] / objective.targets[rows].sum(0)
        chance = [(share[:, k] * objective.log_likelihood(certain[[k] * 4], says, x[rows]).exp()).sum() for k in (0, 1)]
        assert_close(confusion[3, tag, :, 1], torch.stack(chance))
    stream = io.BytesIO()
    torch.save(objective.state_dict(), stream)
    stream.seek(0)
    fresh = make(feature_dim=None)
    fresh.load_state_dict(torch.load(stream, weights_only=True))
    assert_close(fresh.tag_confusion(), confusion)
    assert objective.with_annotators(1).tag_confusion().shape == (R + 1, T, 2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tags": 1}, "use LIA"),
        ({"num_tags": 0}, "num_tags=0"),
        ({"tag_dim": 0}, "tag_dim=0"),
        ({"instance": "embedding", "num_items": 10}, "multiple of num_tags=3"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


# A loop over instances


def test_tags_of_different_features_are_learnt_in_few_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 20, generator=generator)
    tags = (x[:, :8] > 0.8).long()  # each tag of a feature of its own
    torch.manual_seed(0)
    net = TagClassifier(nn.Identity(), 8, feature_dim=20, hidden_dim=32)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x)[0], tags.flatten()).backward()
        optimizer.step()
    logits = net(x)[0].view(400, 8, 2)
    with_tag = tags == 1
    assert (logits.argmax(2)[with_tag] == 1).float().mean() > 0.9


def test_classifier_and_data_set_give_the_items_of_an_instance_side_by_side() -> None:
    torch.manual_seed(0)
    net = TagClassifier(nn.Linear(D, 6), T, feature_dim=6, tag_dim=2, hidden_dim=5, num_layers=2)
    x = features_of().float()
    logits, features = net(x)
    assert logits.shape == (4 * T, 2) and torch.equal(features, net.backbone(x).repeat_interleave(T, 0))
    units = (net.units.weight @ features[5] + net.units.bias) * (net.scale.weight @ net.tags[2] + net.scale.bias)
    assert_close(logits[5], plain_mlp(net.head, units.clamp(min=0)))
    assert len(net.head.layers) == 2
    with pytest.raises(ValueError, match="num_layers=0"):
        TagClassifier(nn.Identity(), T, feature_dim=D, num_layers=0)
    dataset = MultiLabelDataset(TensorDataset(x), crowd(), T)
    sample, annotations = dataset[-2]
    assert torch.equal(sample, x[2]) and annotations.item_id.tolist() == [6, 7, 8] and len(dataset) == 4
    with pytest.raises(IndexError):
        dataset[4]
    with pytest.raises(ValueError, match="4 samples and annotations 12 items"):
        MultiLabelDataset(x, crowd(), 4)
    model = attach(net, SoftMajorityVote(2, R))  # any objective takes these items
    assert model(x, crowd()).loss > 0


@pytest.mark.slow
def test_finds_tags_and_who_knows_which() -> None:
    """Annotator 0 is bad at tag 0, 1 at tag 1, 2 at tag 2, and all are good else; x says which tags there are."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, D, generator=generator)
    truth = (x[:, :T] > 0).long()
    knows = torch.full((R, T), 0.85)
    knows[range(T), range(T)] = 0.4
    right = torch.rand(500, R, T, generator=generator) < knows
    rows = [(i, r) for i in range(500) for r in torch.randperm(R, generator=generator)[:3].tolist()]
    given = [{t for t in range(T) if bool(right[i, r, t]) == bool(truth[i, t])} for i, r in rows]
    table = {"task": [i for i, _ in rows], "worker": [r for _, r in rows], "label": given}
    annotations = from_label_sets(table, tags=T, items=500)
    torch.manual_seed(0)
    objective = LIAML(2, R, num_tags=T, feature_dim=D, rounds=4, epochs_per_round=4)
    model = attach(TagClassifier(nn.Identity(), T, feature_dim=D), objective)
    dataset = MultiLabelDataset(x, annotations, T)
    loader: DataLoader[Any] = DataLoader(dataset, 100, shuffle=True, collate_fn=crowdnal.collate)
    callback = ObjectiveCallback(model, loader)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(17):
        callback.on_epoch_start(epoch)
        for batch, labels in loader:
            optimizer.zero_grad()
            model(batch, labels).loss.backward()
            optimizer.step()
        callback.on_epoch_end(epoch)
    logits, features = callback.predict()
    found = (objective.posterior(logits, annotations, features).argmax(1) == truth.flatten()).float().mean()
    majority = (annotations.votes().argmax(1) == truth.flatten()).float().mean()
    assert found > majority + 0.05 and found > 0.93
    diagonal = objective.tag_confusion().diagonal(dim1=2, dim2=3).mean(-1)
    assert (diagonal[:T].argmin(1) == torch.arange(T)).all()
    bad = diagonal[range(T), range(T)]
    assert bad.max() < 0.5 and bad.mean() + 0.2 < diagonal[3:].mean()
