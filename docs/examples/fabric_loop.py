"""Lightning Fabric: the step is one function, with Fabric's model and optimizer.

python docs/examples/fabric_loop.py
"""

import torch
from lightning_fabric import Fabric, seed_everything
from text import make_dataset, make_model
from torch import Tensor


def train(options: dict | None, precision: str = "32-true") -> list[float]:
    """Two epochs, in eager where `options` is None; the loss of every step."""
    seed_everything(0, verbose=False)
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = torch.utils.data.DataLoader(make_dataset(), batch_size=4, shuffle=True)
    loader = fabric.setup_dataloaders(loader)

    def step(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        fabric.backward(loss)
        # By default Fabric looks at the norm and raises if it is not finite: a graph cannot.
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        return loss

    if options is not None:
        step = torch.compile(step, backend="cotrain", options=options)
    return [step(batch).item() for _ in range(2) for batch in loader]


if __name__ == "__main__":
    for loss in train({"policy": "zero-offload"}):
        print(f"{loss:.4f}")
