"""Idioms of scripts: model, optimizer, numbers and lists are globals, as they are in a `__main__`.

Each is the source of a script that defines `step`. What the script counts is in what it returns.
"""

from __future__ import annotations

from typing import Any

from bench.idioms.registry import Idiom, Training, add, regression

CALLS, COMPILES = 6, 3

HEAD = """
import copy, dataclasses, enum, math
from collections import Counter, defaultdict
import torch
import torch.nn.functional as F
from torch import nn

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)

def update(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

COUNTING = """
n = 0
def step(x, y):
    global n
    n += 1
"""

SCRIPTS = {
    "a global counts the steps": COUNTING
    + """\
    loss = F.mse_loss(model(x), y)
    update(loss)
    return loss, n
""",
    "a global count divides the loss": COUNTING
    + """\
    loss = F.mse_loss(model(x), y) / n
    update(loss)
    return loss
""",
    "a global float that decays": """
temperature = 1.0
def step(x, y):
    global temperature
    loss = F.mse_loss(model(x) / temperature, y)
    update(loss)
    temperature *= 0.9
    return loss, temperature
""",
    "a global tensor that is bound anew": """
average = torch.zeros((), dtype=torch.float64)
def step(x, y):
    global average
    loss = F.mse_loss(model(x), y) / (1 + average)
    update(loss)
    average = 0.9 * average + 0.1 * loss.detach()
    return loss, average
""",
    "a warmup by hand with a global count": COUNTING
    + """\
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * min(1.0, n / 4)
    loss = F.mse_loss(model(x), y)
    update(loss)
    return loss, n
""",
    "a cosine by hand with a global count": COUNTING
    + """\
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (1 + math.cos(math.pi * n / 8))
    loss = F.mse_loss(model(x), y)
    update(loss)
    return loss
""",
    "a dictionary of counts": """
counts = defaultdict(int, steps=0, rows=0)
def step(x, y):
    counts["steps"] += 1
    counts["rows"] += len(x)
    loss = F.mse_loss(model(x), y) * counts["rows"] / counts["steps"]
    update(loss)
    return loss, counts["steps"], counts["rows"]
""",
    "a dataclass of settings that change": """
@dataclasses.dataclass
class Config:
    weight: float = 1.0
    power: int = 1
config = Config()
def step(x, y):
    loss = config.weight * F.mse_loss(model(x), y) + config.power * model(x).square().mean()
    update(loss)
    config.weight *= 0.9
    config.power += 1
    return loss
""",
    "a class attribute that counts": """
class Statistics:
    steps = 0
    total = torch.zeros((), dtype=torch.float64)
def step(x, y):
    Statistics.steps += 1
    loss = F.mse_loss(model(x), y)
    update(loss)
    Statistics.total = Statistics.total + loss.detach() / Statistics.steps
    return loss, Statistics.steps, Statistics.total
""",
    "a trainer with a count and an average": """
class Trainer:
    def __init__(self):
        self.model, self.optimizer, self.count, self.average = model, optimizer, 0, None
    def train(self, x, y):
        loss = F.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.count += 1
        new, old = loss.detach(), self.average
        self.average = new if old is None else old + (new - old) / self.count
        return loss, self.count, self.average
trainer = Trainer()
def step(x, y):
    return trainer.train(x, y)
""",
    "a mode from an enumeration": """
class Mode(enum.Enum):
    SQUARES = 1
    SUMS = 2
mode = Mode.SQUARES
def step(x, y):
    global mode
    loss = F.mse_loss(model(x), y) if mode is Mode.SQUARES else F.l1_loss(model(x), y)
    update(loss)
    mode = Mode.SUMS if mode is Mode.SQUARES else Mode.SQUARES
    return loss
""",
    "an average of weights whose decay hangs on a count": """
average, n = copy.deepcopy(model), 0
watched = [average]
def step(x, y):
    global n
    loss = F.mse_loss(model(x), y)
    update(loss)
    n += 1
    decay = min(0.99, (1 + n) / (10 + n))
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters()):
            old.mul_(decay).add_(new, alpha=1 - decay)
    return loss
""",
    "a nonlocal count": """
def make():
    n = 0
    def step(x, y):
        nonlocal n
        n += 1
        loss = F.mse_loss(model(x), y) / n
        update(loss)
        return loss, n
    return step
step = make()
""",
}


def _make(name: str, source: str) -> Idiom:
    def make() -> Training:
        script: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(HEAD + source, f"{name}.py", "exec"), script)
        watched = [script["model"], script["optimizer"], *script.get("watched", [])]
        return Training(script["step"], regression(calls=CALLS), watched, COMPILES)

    return Idiom(name, "scripts", make)


for _name, _source in SCRIPTS.items():
    add(_make(_name, _source))
