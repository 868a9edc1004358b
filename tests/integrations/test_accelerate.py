"""accelerate: what its main process cuts and sends is what was collated."""

from __future__ import annotations

import pytest
import torch
from support.attached import C, R, labels, mlp
from support.compare import assert_close

import crowdnal

accelerate = pytest.importorskip("accelerate")
from accelerate.utils import operations  # noqa: E402

from crowdnal.integrations.accelerate import Padded, PaddedCollate  # noqa: E402


def test_batches_are_joined_and_cut_like_images() -> None:
    a, x = labels(8), torch.randn(8, 5)
    a.weight = torch.rand(a.num_annotations)
    make = PaddedCollate(R)
    halves = [make([(x[i], a[i]) for i in rows]) for rows in (range(4), range(4, 8))]
    assert operations.find_batch_size(halves[0]) == 4
    images, both = operations.concatenate(halves)
    found = both.annotations(R, C)
    for name in ("indptr", "annotator", "label", "weight"):
        assert torch.equal(getattr(found, name), getattr(a, name)), name
    assert found.item_id.tolist() == list(range(8))
    images, cut = operations.slice_tensors((images, both), slice(2, 5))
    model = crowdnal.attach(mlp(), crowdnal.CrowdLayer(C, R))
    assert_close(model(images, cut.annotations(R, C)).loss, model(x[2:5], a[2:5]).loss)
    with pytest.raises(ValueError, match="has . labels, more than most=1"):
        Padded.of(a, 1)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, a: crowdnal.Annotations) -> None:
        self.a = a

    def __iter__(self):
        return ((torch.full((5,), float(i)), self.a[i]) for i in range(len(self.a)))


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_stream_is_prepared(dispatch: bool) -> None:
    a = labels(8)
    config = accelerate.DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    collate = PaddedCollate(R) if dispatch else crowdnal.collate
    model = crowdnal.attach(mlp(), crowdnal.CrowdLayer(C, R))
    optimizer = torch.optim.SGD(crowdnal.param_groups(model, 0.1), lr=0.1)
    loader = torch.utils.data.DataLoader(Stream(a), 4, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for x, y in loader:
        y = y.annotations(R, C) if dispatch else y
        accelerator.backward(model(x, y).loss)
        optimizer.step()
        optimizer.zero_grad()
        seen += y.item_id.tolist()
    assert seen == list(range(8))
    assert not torch.equal(accelerator.unwrap_model(model).objective.annotators.weight[0], torch.eye(C))
