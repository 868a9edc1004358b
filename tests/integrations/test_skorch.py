"""skorch: fit, predict and clone of a net whose labels are annotations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.attached import C, R, labels, mlp
from support.compare import assert_close

import crowdnal

pytest.importorskip("skorch")
from crowdnal.integrations.skorch import CrowdNet  # noqa: E402

N = 16
X = np.random.default_rng(0).normal(size=(N, 5)).astype(np.float32)


@pytest.mark.parametrize("make", [crowdnal.CrowdLayer, crowdnal.DLEM])
def test_a_net_is_the_loop_written_by_hand(make: Any) -> None:
    net = CrowdNet(
        crowdnal.attach(mlp(), make(C, R)), max_epochs=3, lr=1e-2, batch_size=N, verbose=0, device="cpu"
    ).fit(X, labels(N))
    model = crowdnal.attach(mlp(), make(C, R))
    optimizer = torch.optim.Adam(crowdnal.param_groups(model, 1e-2))
    x = torch.from_numpy(X)
    callback = crowdnal.ObjectiveCallback(model, [(x, labels(N))])
    for epoch in range(3):
        callback.on_epoch_start(epoch)
        optimizer.zero_grad()
        model(x, labels(N)).loss.backward()
        optimizer.step()
    assert_close(dict(net.module_.named_parameters()), dict(model.named_parameters()), rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        expected = model.eval()(x).softmax(-1)
    assert_close(torch.from_numpy(net.predict_proba(X)), expected, rtol=1e-3, atol=1e-5)
    assert net.predict(X).tolist() == expected.argmax(1).tolist()
    assert len(net.history) == 3 and net.history[-1]["train_loss"] > 0
