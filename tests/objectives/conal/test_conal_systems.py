"""CoNAL in models, loops and runs: sizes told late, errors, compilation, several processes, threads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.attached import check_compiled, labels, mlp
from support.compare import assert_close
from support.conal import FEATURES, PEOPLE, D, make
from support.small_crowd import C, R, batch, logits_of, perturbed
from support.small_run import frozen, go, write
from torch import nn

from crowdnal import attach
from crowdnal.data import Annotations
from crowdnal.objectives import CoNAL
from crowdnal.train import InputError
from crowdnal.train.options import parse_options


def test_features_of_a_size_told_by_attach_or_by_the_first_batch():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(7, D), nn.Linear(D, C)

        def forward(self, x):
            features = self.body(x).relu()
            return self.head(features), features

    model = attach(Net(), make(feature_dim=None))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # before the size is known
    x = torch.randn(4, 7)
    model(x, batch()).loss.backward()
    before = model.objective.noise_source.hidden.weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, model.objective.noise_source.hidden.weight)  # all matrices were equal
    optimizer.zero_grad()
    model(x, batch()).loss.backward()
    optimizer.step()
    assert model.objective.noise_source.hidden.weight.shape == (6, D)
    assert not torch.equal(before, model.objective.noise_source.hidden.weight)

    fresh = attach(Net(), make(feature_dim=None))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x, batch()).loss, model(x, batch()).loss)
    with pytest.raises(ValueError, match="length 4 but feature_dim=5"):
        model.objective(torch.randn(4, C), batch(), torch.randn(4, 4))

    flat = attach(mlp(12, C), make(), features=lambda images: images)
    with pytest.raises(ValueError, match="length 12 but feature_dim=5"):
        flat(torch.randn(4, 12), batch())
    images = make(feature_dim=None)
    images(torch.randn(4, C), batch(), torch.randn(4, 3, 2, 2))
    assert images.noise_source.hidden.in_features == 12


def test_a_timm_model_tells_its_size():
    timm = pytest.importorskip("timm")
    model = attach(timm.create_model("test_resnet", num_classes=10), make(feature_dim=None))
    size = model.backbone.get_classifier().in_features
    assert model.objective.noise_source.hidden.weight.shape == (6, size)
    perturbed(model.objective, torch.float32)
    output = model(torch.randn(4, 3, 32, 32), batch())
    output.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.objective.parameters())
    with pytest.raises(ValueError, match=f"length {size} but feature_dim=5"):
        attach(timm.create_model("test_resnet", num_classes=C), make())


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [True, False])
def test_the_command_line_trains_it(tmp_path, freeze):
    root = write(tmp_path / "data")
    options = ("mixing=probabilities", "embedding-dim=4", "normalize_items=no")
    settings = frozen(root, tmp_path / "run", objective="conal", options=options, epochs=2, freeze_backbone=freeze)
    result = go(settings)
    assert isinstance(result.objective, CoNAL) and result.objective.mixing == "probabilities"
    assert result.objective.common_confusion().shape == (3, 3)
    for option in ("feature_dim=3", "annotator_features=x"):
        with pytest.raises(InputError, match="is unknown to conal"):
            parse_options(CoNAL, (option,))


def test_known_annotators_share_what_is_learnt():
    twins = PEOPLE.clone()
    twins[3] = twins[1]
    objective = perturbed(make(annotator_features=twins))
    both = Annotations([0, 2], [1, 3], [0, 0], num_annotators=R, num_classes=C)
    omega = objective.per_annotation_source(both, FEATURES[:1])
    assert omega[0] == omega[1]
    assert "noise_source.features" in objective.state_dict()
    ids = perturbed(make())
    omega = ids.per_annotation_source(both, FEATURES[:1])
    assert (omega[0] - omega[1]).abs() > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixing": "both"}, "mixing='both'.*logits, probabilities"),
        ({"scope": "none"}, "scope='none'"),
        ({"separation_weight": -1.0}, "separation_weight=-1.0"),
        ({"embedding_dim": 0}, "embedding_dim=0"),
        ({"hidden_dim": 1.5}, "hidden_dim=1.5"),
        ({"feature_dim": -2}, "feature_dim=-2"),
        ({"sparse_grad": True}, "sparse_grad=True needs scope='batch'"),
        ({"annotator_features": PEOPLE[:2]}, r"annotator_features has shape \[2, 3\].*R=4"),
        ({"annotator_features": PEOPLE.long()}, "annotator_features .torch.int64."),
        ({"annotator_features": PEOPLE / 0}, "finite"),
    ],
)
def test_errors_name_the_argument(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_features_are_needed():
    for call in (make(), lambda _, *rest: make().per_annotation_source(*rest)):
        with pytest.raises(ValueError, match="features is .*CoNAL needs"):
            call(torch.zeros(4, C), batch(), torch.zeros(3, D))


# Systems


@pytest.mark.slow
@pytest.mark.parametrize("mixing", ["logits", "probabilities"])
def test_compiled_step_equals_eager_and_is_compiled_once(mixing):
    torch.manual_seed(0)
    objective = CoNAL(4, 6, mixing=mixing, feature_dim=5, scope="batch", separation_weight=0.1)
    check_compiled(attach(mlp(), objective, features=nn.Identity()))


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_no_parameter_is_unused_under_ddp(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        objective = CoNAL(4, 6, feature_dim=5)
        model = nn.parallel.DistributedDataParallel(attach(mlp(), objective, features=nn.Identity()))
        for items in (5, 2):  # the second raises if the first left a parameter without a gradient
            model(torch.randn(items, 5), labels(items)).loss.backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        dist.destroy_process_group()


def test_functional_call_and_func_grad():
    objective = perturbed(make(), torch.float32)
    logits, features = logits_of(dtype=torch.float32), FEATURES.float()
    parameters = {key: value.detach() for key, value in objective.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(objective, parameters, (logits, batch(), features))

    gradients = torch.func.grad(loss)(parameters)
    objective(logits, batch(), features).backward()
    for key, parameter in objective.named_parameters():
        assert_close(gradients[key], parameter.grad)


def test_bitwise_repeatable_over_runs_and_threads():
    generator = torch.Generator().manual_seed(3)
    annotations = Annotations.from_dense(torch.randint(-1, C, (300, 40), generator=generator), num_classes=C)
    logits, features = torch.randn(300, C, generator=generator), torch.randn(300, D, generator=generator)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            objective = make(annotators=40, mixing="probabilities")
            inputs = [logits.clone().requires_grad_(), *objective.parameters()]
            loss = objective(inputs[0], annotations, features)
            results.append([loss.detach(), *torch.autograd.grad(loss, inputs)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
