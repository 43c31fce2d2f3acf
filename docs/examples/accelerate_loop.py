"""Accelerate: the step is one function, called under `accelerator.accumulate`.

python docs/examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from text import make_dataset, make_model
from torch import Tensor


def train(options: dict | None, **settings: object) -> list[float]:
    """Two epochs, in eager where `options` is None; the loss of every step."""
    set_seed(0)
    accelerator = Accelerator(cpu=True, **settings)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    loader = torch.utils.data.DataLoader(make_dataset(), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if options is not None:
        step = torch.compile(step, backend="cotrain", options=options)
    losses = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                losses.append(step(batch).item())
                scheduler.step()
    return losses


if __name__ == "__main__":
    for loss in train({"policy": "zero-offload"}):
        print(f"{loss:.4f}")
