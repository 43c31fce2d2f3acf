"""A step is captured the same wherever its tensors rest: traced on a device that is not there.

torch lets Python register a device without memory or kernels. Fake tensors on it go through
forward, backward and optimizer, which CUDA's do only beside a real card. It is registered for a
whole process, so the stories run in one of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

from cotrain_compile.backends.devices import tell_of_unused_card
from cotrain_compile.options import Options
from tests.support.captured_steps import captured

ROOT = Path(__file__).parents[3]
PREPARATION = """
import torch
from unittest import mock
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("card")
from cotrain_compile.capture.dynamo import hook
from cotrain_compile.capture.dynamo.compute_device import resting_on_host
from cotrain_compile.capture.offline.only_trace import only_traced

CARD = torch.device("card:0")

def training(optimizer):
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8, bias=False),
        torch.nn.BatchNorm1d(8),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(8, 2, bias=False),
    )
    updates = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)

    def step(x):
        updates.zero_grad()
        loss = model(x.to(CARD)).square().sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        updates.step()
        return loss

    return model, updates, step

def traced(step, device=None):
    torch._dynamo.reset()
    with mock.patch.object(hook, "chosen_device", lambda option: device):
        compiled = torch.compile(step, backend="cotrain")
        return only_traced(lambda: compiled(torch.randn(3, 4))).step

def devices(step):
    inputs = zip(step.module.graph.find_nodes(op="placeholder"), step.inputs)
    return {item.name: str(node.meta["val"].device) for node, item in inputs}

import json, sys, traceback
for line in sys.stdin:
    try:
        exec(json.loads(line), dict(globals()))
        failed = ""
    except BaseException:
        failed = traceback.format_exc()
    print(json.dumps(failed), flush=True)
"""

needs_python_device = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch registers no devices from Python",
)


@pytest.fixture(scope="module")
def tell() -> Iterator[Callable[[str], None]]:
    """Runs a story in the process that has the device; fails where it fails."""
    command = [sys.executable, "-c", PREPARATION]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        told, answers = process.stdin, process.stdout
        assert told is not None
        assert answers is not None

        def run(story: str) -> None:
            print(json.dumps(textwrap.dedent(story)), file=told, flush=True)
            failed = json.loads(answers.readline())
            assert not failed, failed

        yield run
        told.close()
        assert process.wait(60) == 0


@needs_python_device
@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("Adafactor", marks=pytest.mark.long)])
def test_a_model_on_the_cpu_is_traced_on_the_chosen_device_but_for_its_batch(
    optimizer: str, tell: Callable[[str], None]
) -> None:
    """Nor does it matter where they rest once a plan has moved them."""
    tell(f"""
        model, updates, step = training({optimizer!r})
        found = traced(step, CARD)
        on_cpu = {{name for name, device in devices(found).items() if device == "cpu"}}
        assert on_cpu == {{"x"}}, on_cpu
        assert "1.running_mean" in devices(found)
        assert all(p.device.type == "cpu" for p in model.parameters())
        assert len([n for n in found.nodes if n.target is torch.ops.aten.copy_.default]) > 6
        for tensor in (*model.parameters(), *model.buffers()):
            resting_on_host[tensor] = CARD
        again = traced(step)
        assert devices(again) == devices(found)
        assert again.fingerprint == found.fingerprint
    """)


@needs_python_device
def test_a_tensor_that_is_no_buffer_stays_where_it_is_as_with_module_to(
    tell: Callable[[str], None],
) -> None:
    tell("""
        model, updates, step = training("SGD")
        model.scale = torch.full((2,), 2.0)
        def scaled(x):
            updates.zero_grad()
            loss = (model(x.to(CARD)) * model.scale.to(CARD)).square().sum()
            loss.backward()
            updates.step()
            return loss
        on_cpu = {name for name, device in devices(traced(scaled, CARD)).items() if device == "cpu"}
        assert on_cpu == {"x", "model.scale"}, on_cpu
    """)


def test_states_are_made_on_the_host_for_parameters_elsewhere() -> None:
    """All states together may not fit on the device; the plan brings each one to its home."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cotrain_compile.capture.state.optimizer_state import create_state

    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.zeros(6, 4, device="cuda").t())]
        for optimizer in (torch.optim.AdamW(params), torch.optim.SGD(params, momentum=0.9)):
            assert create_state(optimizer)
            states = optimizer.state[params[0]]
            assert {value.device.type for value in states.values()} == {"cpu"}
            large = [value for value in states.values() if value.dim()]
            assert large
            assert all(value.stride() == params[0].stride() for value in large)


def test_a_model_on_the_cpu_beside_a_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the option says that it is meant, and not without a card."""
    step = captured("clipped").step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_of_unused_card(step, Options())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        tell_of_unused_card(step, Options(device="cpu"))
    with pytest.warns(UserWarning, match="runs on the emulated device though this computer has"):
        tell_of_unused_card(step, Options())
