"""timm's own training loop on labels of many annotators: what differs from its train.py is marked.

python examples/timm_loop.py photos/ answers.csv --model resnet18 --objective crowd-layer
"""

from __future__ import annotations

import argparse
from pathlib import Path

import timm
import torch
from timm.data import ImageDataset, create_loader, resolve_model_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter

import crowdnal
from crowdnal.integrations.timm import CrowdTask


def main(arguments: list[str] | None = None) -> CrowdTask:
    """Trains, says the loss of every epoch, and writes the plain model and the task's state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("annotations", type=Path, help="columns task (path below the folder), worker, label")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--objective", default="crowd-layer")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--layer-decay", type=float)
    parser.add_argument("--out", type=Path, default=Path("checkpoint.pt"))
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    images = ImageDataset(str(args.images), class_map="")
    paths = [Path(path).relative_to(args.images).as_posix() for path in images.filenames(absolute=True)]
    annotations = crowdnal.Annotations.read(args.annotations, items=paths)  # crowdnal: instead of targets
    dataset = crowdnal.CrowdDataset(images, annotations)
    model = timm.create_model(args.model, num_classes=annotations.num_classes).to(device)
    config = resolve_model_data_config(model)
    shared = {
        "input_size": config["input_size"], "mean": config["mean"], "std": config["std"], "use_prefetcher": False,
        "num_workers": 0, "persistent_workers": False, "device": device, "collate_fn": crowdnal.collate,
    }  # fmt: skip
    loader = create_loader(dataset, batch_size=args.batch_size, is_training=True, **shared)
    plain = crowdnal.CrowdDataset(ImageDataset(str(args.images), class_map=""), annotations)
    in_order = create_loader(plain, batch_size=args.batch_size, is_training=False, **shared)  # crowdnal: for EM

    objective = crowdnal.objectives.create(
        args.objective, num_classes=annotations.num_classes, num_annotators=annotations.num_annotators
    )
    task = CrowdTask(model, objective, device=device)  # crowdnal: instead of ClassificationTask
    module = task.get_trainable_module()
    optimizer = create_optimizer_v2(
        module, opt="adamw", lr=args.lr, weight_decay=args.weight_decay, layer_decay=args.layer_decay
    )
    scheduler = CosineLRScheduler(optimizer, t_initial=args.epochs)
    callback = crowdnal.ObjectiveCallback(module, in_order)  # crowdnal: needed by EM-style objectives alone
    for epoch in range(args.epochs):
        callback.on_epoch_start(epoch)
        task.train()
        losses = AverageMeter()
        for input, target in loader:
            result = task(input.to(device), target.to(device))
            result["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.update(result["loss"].item(), len(input))
        callback.on_epoch_end(epoch)
        scheduler.step(epoch + 1)
        print(f"epoch {epoch + 1}: loss {losses.avg:.4f}")
    torch.save(task.get_checkpoint_state(), args.out)  # state_dict: of the plain model
    return task


if __name__ == "__main__":
    main()
