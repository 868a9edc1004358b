"""transformers' Trainer: sequences and tokens, features, evaluation, EM."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_close

import crowdnal
from crowdnal import Annotations

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from crowdnal.integrations.transformers import CrowdCollator, CrowdTrainer, attach_transformer  # noqa: E402

N, C, R = 12, 3, 4
CONFIG = {
    "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "num_labels": C, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def bert(kind: str = "Sequence") -> Any:
    torch.manual_seed(0)
    return getattr(transformers, f"BertFor{kind}Classification")(transformers.BertConfig(**CONFIG))


def samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    a = Annotations.from_dense(torch.randint(-1, C, (N, R), generator=generator), num_classes=C)
    ids = torch.randint(1, 50, (N, 6), generator=generator)
    return [{"input_ids": ids[i], "annotations": a[i], "labels": torch.tensor(i % C)} for i in range(N)]


def arguments(folder: Path, **options: Any) -> Any:
    return transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=2, report_to=[],
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, save_strategy="no", weight_decay=0.1,
        learning_rate=1e-3, lr_scheduler_type="constant", max_grad_norm=0, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["crowd-layer", "conal", "dl-em"])
def test_a_sequence_classifier_trains_and_is_evaluated(name: str, tmp_path: Path) -> None:
    data = samples()
    model = attach_transformer(bert(), crowdnal.objectives.create(name, num_classes=C, num_annotators=R))
    assert not any(torch.nn.parameter.is_lazy(parameter) for parameter in model.parameters())
    start = {key: value.clone() for key, value in model.state_dict().items()}

    def metrics(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    whole = [
        (
            {"input_ids": torch.stack([one["input_ids"] for one in data])},
            crowdnal.concat([o["annotations"] for o in data]),
        )
    ]
    trainer = CrowdTrainer(
        model, arguments(tmp_path), train_dataset=data, eval_dataset=data, compute_metrics=metrics, loader=whole
    )
    trainer.train()
    groups = {group["name"]: group for group in trainer.optimizer.param_groups}
    assert groups["backbone"]["weight_decay"] == 0.1 and groups["backbone"]["lr"] == 1e-3
    if "objective" in groups:
        assert (groups["objective"]["weight_decay"], groups["objective"]["lr"]) == (0.0, 1e-3)
    assert not all(torch.equal(value, start[key]) for key, value in model.state_dict().items() if key in start)
    found = trainer.evaluate()
    assert 0 <= found["eval_accuracy"] <= 1 and math.isfinite(found["eval_loss"])
    assert trainer.predict(data).predictions.shape == (N, C)
    if name == "dl-em":
        assert len(model.objective.targets) == N and len(model.objective.history) == 1


def test_a_step_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    data = samples()[:4]
    model, plain = (attach_transformer(bert(), crowdnal.CrowdLayer(C, R)) for _ in range(2))
    CrowdTrainer(model, arguments(tmp_path, max_steps=1), train_dataset=data).train()
    optimizer = torch.optim.AdamW(crowdnal.param_groups(plain, 1e-3, 0.1))
    batch = CrowdCollator()(data)
    plain({"input_ids": batch["input_ids"]}, batch["annotations"]).loss.backward()
    optimizer.step()
    assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["crowd-layer", "conal"])
def test_tokens_are_items(name: str, tmp_path: Path) -> None:
    """Of sequences of different length: padding has no labels."""
    lengths = [3, 5, 2, 5]
    data = []
    for i, length in enumerate(lengths):
        a = Annotations.from_dense(
            torch.randint(0, C, (length, R), generator=torch.Generator().manual_seed(i)), num_classes=C
        )
        data.append({"input_ids": torch.arange(1, length + 1), "annotations": a})

    def pad(rows: list[Any]) -> Any:
        ids = [row["input_ids"] for row in rows]
        return {"input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)}

    objective = crowdnal.objectives.create(name, num_classes=C, num_annotators=R)
    model = attach_transformer(bert("Token"), objective)
    batch = CrowdCollator(pad, tokens=True)(data)
    assert batch["annotations"].counts.view(4, 5).gt(0).sum(1).tolist() == lengths
    loss, logits = model({"input_ids": batch["input_ids"]}, batch["annotations"])
    assert logits.shape == (4, 5, C) == model({"input_ids": batch["input_ids"]}).shape
    if name == "crowd-layer":
        real = torch.cat([logits[i, :length] for i, length in enumerate(lengths)])
        alone = crowdnal.concat([one["annotations"] for one in data])
        assert_close(loss, objective(real, alone))
    CrowdTrainer(model, arguments(tmp_path), train_dataset=data, data_collator=CrowdCollator(pad, tokens=True)).train()
    with pytest.raises(ValueError, match="annotations of 5 tokens but 3 tokens"):
        CrowdCollator(lambda rows: {"input_ids": torch.zeros(4, 3)}, tokens=True)(data)


def test_columns_must_not_be_dropped(tmp_path: Path) -> None:
    options = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="remove_unused_columns=True drops the annotations"):
        CrowdTrainer(attach_transformer(bert(), crowdnal.CrowdLayer(C, R)), options, train_dataset=samples())
