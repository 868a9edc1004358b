"""LIA on the medical relations (Platanios et al. 2020, Table 2): MC and MT, by redundancy.

Accuracy and area under the ROC curve of the returned truth against the expert, where the expert is known (975 sentences
for CAUSES, 621 for TREATS). The paper's accuracies (26.8 to 46.1 %) have a random baseline of 7 %, one of 14 relations,
so they measure something else than these binary truths: the rows' ``paper`` is empty. What can be compared is the
order: LIA above majority vote, MMCE and LIA-E, LIA-ML above LIA.

As in the paper: MLPs of 4 x 32, embeddings of 16, AMSGrad 1e-3, batches of 1,024 sentences, 10 rounds; but STEPS of the
1,000 steps a round, and sentence embeddings (MiniLM, 384) in place of BERT's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from torch import Tensor, nn

import crowdnal
from crowdnal import Annotations
from crowdnal._layers import MLP
from crowdnal.multilabel import from_label_sets

TASKS = {"cause": "CAUSES", "treat": "TREATS"}
BATCH = 1024
REDUNDANCIES = (2, 5, 10)
ROUNDS, EPOCHS_PER_ROUND, FINETUNE_EPOCHS = 10, 10, 20


class Medical:
    """The data: features [N, 384], judgements of all tags as items, the experts' labels [N] by task, -1 unknown."""

    def __init__(self, root: Path) -> None:
        folder = root / "medical_relations"
        sentences = pandas.read_csv(folder / "sentences.csv")["sentence_id"]
        x = torch.from_numpy(np.load(folder / "features_minilm.npy")).float()
        self.x = x / x.std()  # of norm 1, which a ReLU network learns slowly from
        judgements = pandas.read_csv(folder / "judgments.csv")
        self.all = from_label_sets(judgements, task="sentence_id", label="relations", items=sentences.tolist())
        assert self.all.vocabulary is not None
        self.tags = [tag for _, tag in self.all.vocabulary.items[: len(self.all) // len(x)]]  # type: ignore[misc]
        self.expert = {}
        for task in TASKS:
            expert = pandas.read_csv(folder / f"truth_{task}.csv").set_index("sentence_id")["expert"][sentences]
            self.expert[task] = torch.tensor(expert.map({1.0: 1, -1.0: 0}).fillna(-1).to_numpy()).long()

    def sample(self, redundancy: int, seed: int) -> Annotations:
        """At most so many judgements a sentence, drawn at random; of all tags."""
        counts = self.all.counts[:: len(self.tags)]
        start = counts.cumsum(0) - counts
        order = torch.randperm(int(counts.sum()), generator=torch.Generator().manual_seed(seed))
        sentence = torch.arange(len(counts)).repeat_interleave(counts)
        by_sentence = order[torch.argsort(sentence[order], stable=True)]  # a random order within each sentence
        kept = torch.zeros(len(order), dtype=torch.bool)
        kept[by_sentence] = torch.arange(len(order)) - start.repeat_interleave(counts) < redundancy
        item = self.all.item
        position = torch.arange(len(item)) - self.all.indptr[item]
        return self.all.select(kept[start[item // len(self.tags)] + position])

    def of_tag(self, annotations: Annotations, task: str) -> Annotations:
        """The items of one tag."""
        found = annotations[torch.arange(self.tags.index(TASKS[task]), len(annotations), len(self.tags))]
        found.item_id = torch.arange(len(found))
        return found


class Classifier(nn.Module):
    """The paper's h, which gives its input as features."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.net = MLP(inputs, [32] * 4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), x


class Embedded(nn.Module):
    """h of an embedding for each sentence: LIA-E."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.embedding, self.net = nn.Embedding(items, 16), MLP(16, [32] * 4, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.net(self.embedding(rows))


def fit(
    net: nn.Module, objective: Any, x: Tensor, annotations: Annotations, epochs: int, seed: int, tags: int = 1
) -> tuple[Tensor, Any]:
    """Posterior [N] of label 1 after EM and fine-tuning, and the trained objective."""
    model = crowdnal.attach(net, objective)
    whole = [(x, annotations)]
    callback = crowdnal.EMCallback(model, whole, annotations)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
    generator = torch.Generator().manual_seed(seed)
    step = torch.arange(tags)
    for epoch in range(epochs):
        callback.on_epoch_start(epoch)
        model.train()
        for rows in torch.randperm(len(x), generator=generator).split(max(1, BATCH // tags)):
            items = (rows.unsqueeze(1) * tags + step).flatten()
            optimizer.zero_grad()
            model(x[rows], annotations[items]).loss.backward()
            optimizer.step()
        callback.on_epoch_end(epoch)
    model.eval()
    with torch.no_grad():
        logits, features = model.logits_and_features(x)
    return objective.posterior(logits, annotations, features)[:, 1], objective


def options(quick: bool) -> dict[str, Any]:
    return {"rounds": 2 if quick else ROUNDS, "epochs_per_round": 1 if quick else EPOCHS_PER_ROUND, "hidden_dim": 32}


def epochs_of(quick: bool) -> int:
    return 3 if quick else ROUNDS * EPOCHS_PER_ROUND + FINETUNE_EPOCHS


def auc(score: Tensor, truth: Tensor) -> float:
    """Probability that a true sentence scores above a false one, ties counting a half."""
    _, place, size = torch.unique(score, return_inverse=True, return_counts=True)
    rank = (size.cumsum(0) - (size - 1) / 2).double()[place]
    true = int(truth.sum())
    return float((rank[truth == 1].sum() - true * (true + 1) / 2) / (true * (len(truth) - true)))
