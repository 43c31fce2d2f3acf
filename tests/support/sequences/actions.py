"""What a program does between and around the calls of a step: each action changes one training.

An action takes a `Training` and a random source; twins get sources that draw the same. What it
returns is compared, and so is what it raises.
"""

from __future__ import annotations

import copy
import io
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.errors import CotrainError
from tests.support.sequences.twin import CLASSES, HIDDEN, ROWS, WIDTH, Training

Action = Callable[[Training, random.Random], Any]
ACTIONS: dict[str, Action] = {}
# How often an action is drawn, beside one that has no entry.
WEIGHTS: dict[str, int] = {"call": 12, "call_other_rows": 2, "eager_step": 2}


def action(function: Action) -> Action:
    ACTIONS[function.__name__] = function
    return function


# Calls.


@action
def call(training: Training, rng: random.Random) -> Any:
    """Some calls with the usual batch."""
    return [training.call("train", *training.batch()) for _ in range(rng.randint(1, 2))]


@action
def call_other_rows(training: Training, rng: random.Random) -> Any:
    return training.call("train", *training.batch(rng.choice([2, 3, 6, 9])))


@action
def call_one_row(training: Training, rng: random.Random) -> Any:
    return training.call("train", *training.batch(1))


@action
def call_other_dtype(training: Training, rng: random.Random) -> Any:
    x, y = training.batch()
    return training.call("train", x.to(rng.choice([torch.float32, torch.float64])), y)


@action
def call_wrong_width(training: Training, rng: random.Random) -> Any:
    x, y = training.batch()
    return training.call("train", x[:, 1:], y)


@action
def call_with_gaps(training: Training, rng: random.Random) -> Any:
    x, y = training.batch()
    return training.call("train", x.T.contiguous().T if rng.random() < 0.5 else x[:, :].flip(0), y)


@action
def call_that_needs_a_gradient(training: Training, rng: random.Random) -> Any:
    x, y = training.batch()
    x.requires_grad_()
    return [training.call("train", x, y), x.grad]


@action
def call_that_fails(training: Training, rng: random.Random) -> Any:
    training.model.fails = True
    try:
        return training.call("train", *training.batch())
    finally:
        training.model.fails = False


@action
def call_in_a_thread(training: Training, rng: random.Random) -> Any:
    """As `call`, in another thread: random numbers come from the one generator of the CPU."""
    returned: list[Any] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            returned.append(training.call("train", *training.batch()))
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return returned


@action
def call_other_loss(training: Training, rng: random.Random) -> Any:
    return training.call("other", *training.batch())


@action
def accumulate(training: Training, rng: random.Random) -> Any:
    losses = [training.call("collect", *training.batch()) for _ in range(rng.randint(1, 2))]
    training.call("update")
    return losses


@action
def call_without_grad(training: Training, rng: random.Random) -> Any:
    with torch.no_grad():
        return training.call("train", *training.batch())


@action
def call_with_tensors_of_the_model(training: Training, rng: random.Random) -> Any:
    """The batch is a parameter, or a view of one, which the step writes."""
    weight = training.model.first.weight.detach()
    x = weight if rng.random() < 0.5 else weight[:ROWS]
    return training.call("train", x, torch.zeros(len(x), dtype=torch.long))


@action
def call_with_a_batch_that_is_kept(training: Training, rng: random.Random) -> Any:
    """One batch in two calls, changed in place between them."""
    x, y = training.batch()
    first = training.call("train", x, y)
    x.mul_(0.5)
    return [first, training.call("train", x, y)]


@action
def call_under_a_mode(training: Training, rng: random.Random) -> Any:
    """Within what other programs have around a call, and what changes no number."""
    around: AbstractContextManager[Any] = rng.choice(
        [
            torch.enable_grad(),
            torch.random.fork_rng(),
            torch.autograd.set_multithreading_enabled(False),
            torch.autograd.profiler.record_function("step"),
        ]
    )
    with around:
        return training.call("train", *training.batch())


@action
def call_under_saved_tensor_hooks(training: Training, rng: random.Random) -> Any:
    """What is saved for the backward is changed on its way, or may be written in between."""
    graph = torch.autograd.graph
    around: AbstractContextManager[Any] = rng.choice(
        [
            graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved * 1.5),
            graph.allow_mutation_on_saved_tensors(),
        ]
    )
    with around:
        return training.call("train", *training.batch())


# Work in eager.


@action
def eager_step(training: Training, rng: random.Random) -> Any:
    return training.plain["train"](*training.batch())


@action
def eager_gradients(training: Training, rng: random.Random) -> Any:
    return training.plain["collect"](*training.batch())


@action
def evaluate(training: Training, rng: random.Random) -> Any:
    training.model.eval()
    x, y = training.batch(5)
    with torch.no_grad():
        loss = F.cross_entropy(training.model(x), y)
    training.model.train()
    return loss


@action
def look(training: Training, rng: random.Random) -> Any:
    """What tells of a step changes nothing."""
    kind = rng.choice(["inspect", "report", "synchronize"])
    if kind == "synchronize":
        cotrain_compile.synchronize()
    elif training.steps["train"] is not training.plain["train"]:
        tell: Callable[[Any], Any] = getattr(cotrain_compile, kind)
        with suppress(CotrainError):  # not called since it was written anew
            tell(training.steps["train"])


# The optimizer.


@action
def set_rate(training: Training, rng: random.Random) -> None:
    _some_group(training, rng)["lr"] = rng.choice([1e-3, 5e-3, 2e-2, 0.0])


@action
def set_rate_tensor(training: Training, rng: random.Random) -> None:
    _some_group(training, rng)["lr"] = torch.tensor(rng.choice([1e-3, 5e-3]), dtype=torch.float64)


@action
def set_setting(training: Training, rng: random.Random) -> None:
    group = _some_group(training, rng)
    settings: dict[str, list[Any]] = {
        "weight_decay": [0.0, 0.1, 0.2],
        "betas": [(0.5, 0.75), (0.25, 0.75), (0.5, 0.5)],
        "momentum": [0.9, 0.5],
        "eps": [1e-2, 2e-2],
        "maximize": [True, False],
        "alpha": [0.99, 0.9],
        "foreach": [True, False, None],
        "nesterov": [True, False],
    }
    known = [name for name in settings if name in group]
    if not group.get("momentum", 0.0):
        known = [name for name in known if name != "nesterov"]
    name = rng.choice(known)
    group[name] = rng.choice(settings[name])


@action
def add_group(training: Training, rng: random.Random) -> None:
    """A new layer behind the head, in a group of its own."""
    head = training.model.head
    new = nn.Linear(head.weight.shape[0] if isinstance(head, nn.Linear) else 3, 3)
    new.to(training.dtype)
    training.model.head = nn.Sequential(head, new)
    training.optimizer.add_param_group({"params": list(new.parameters()), "lr": 2e-2})


@action
def schedule(training: Training, rng: random.Random) -> None:
    if training.scheduler is None:
        training.scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    if len(training.scheduler.base_lrs) == len(training.optimizer.param_groups):
        training.optimizer._opt_called = True  # torch warns where a compiled step has been called
        training.scheduler.step()


@action
def clear_gradients(training: Training, rng: random.Random) -> None:
    kind = rng.choice(["model", "optimizer", "zeros", "one"])
    if kind == "model":
        training.model.zero_grad()
    elif kind == "one":
        _some_parameter(training, rng).grad = None
    else:
        training.optimizer.zero_grad(set_to_none=kind == "optimizer")


@action
def set_gradient(training: Training, rng: random.Random) -> None:
    param = _some_parameter(training, rng)
    param.grad = torch.ones_like(param) if param.grad is None else param.grad * 2


@action
def clear_states(training: Training, rng: random.Random) -> None:
    if rng.random() < 0.5:
        training.optimizer.state.clear()
    else:
        training.optimizer.state.pop(_some_parameter(training, rng), None)


@action
def edit_gradients(training: Training, rng: random.Random) -> None:
    """Scaled in place, as a loop does that clips by itself."""
    for param in training.model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


@action
def edit_states(training: Training, rng: random.Random) -> None:
    """In place, or by other tensors."""
    is_new = rng.random() < 0.5
    for state in training.optimizer.state.values():
        for key, value in list(state.items()):
            if isinstance(value, Tensor) and value.dim():
                if is_new:
                    state[key] = value * 0.5
                else:
                    value.mul_(0.5)


@action
def new_optimizer(training: Training, rng: random.Random) -> None:
    """Of the same kind, over the parameters as they are; the steps are written anew."""
    kind, groups = type(training.optimizer), training.optimizer.param_groups
    settings = {key: value for key, value in groups[0].items() if key in ("eps", "betas")}
    training.optimizer = kind(training.model.parameters(), lr=1e-2, **settings)
    training.scheduler = None
    training.rebuilt()


@action
def set_count(training: Training, rng: random.Random) -> None:
    """The number of steps, in place, or by another tensor."""
    is_new = rng.random() < 0.5
    for state in training.optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"] + 3 if is_new else state["step"].add_(3)


@action
def share_gradients(training: Training, rng: random.Random) -> None:
    """All gradients are parts of one vector, as what exchanges them at once makes them."""
    params = [p for p in training.model.parameters() if p.requires_grad]
    flat = torch.ones(sum(p.numel() for p in params), dtype=training.dtype)
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = part.view_as(param)


@action
def drop_a_parameter(training: Training, rng: random.Random) -> None:
    """The optimizer forgets one parameter, or gets it back in a group of its own."""
    param = training.model.norm.weight
    groups = training.optimizer.param_groups
    if any(param is known for group in groups for known in group["params"]):
        for group in groups:
            group["params"] = [known for known in group["params"] if known is not param]
    else:
        training.optimizer.add_param_group({"params": [param], "lr": 1e-3})


@action
def copy_optimizer(training: Training, rng: random.Random) -> None:
    """As trainers do that keep one aside: a copy is made and nobody uses it."""
    copy.deepcopy(training.optimizer)


@action
def plateau(training: Training, rng: random.Random) -> None:
    torch.optim.lr_scheduler.ReduceLROnPlateau(training.optimizer, patience=0).step(1.0)


@action
def cycle(training: Training, rng: random.Random) -> None:
    """A schedule that moves momentum, or betas, with the rate."""
    group = training.optimizer.param_groups[0]
    if group.get("momentum", 0) or "betas" in group:
        training.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            training.optimizer, 2e-2, total_steps=200, base_momentum=0.5, max_momentum=0.75
        )


# Parameters and modules.


@action
def freeze(training: Training, rng: random.Random) -> None:
    _some_module(training, rng).requires_grad_(False)
    training.model.head.requires_grad_(True)  # something is left to train


@action
def unfreeze(training: Training, rng: random.Random) -> None:
    training.model.requires_grad_(True)


@action
def freeze_one(training: Training, rng: random.Random) -> None:
    training.model.first.weight.requires_grad_(rng.random() < 0.5)


@action
def switch_mode(training: Training, rng: random.Random) -> None:
    module = rng.choice([training.model, training.model.dropout, training.model.norm])
    module.train(not module.training)


@action
def edit_parameter(training: Training, rng: random.Random) -> None:
    param, kind = _some_parameter(training, rng), rng.choice(["mul", "copy", "data"])
    with torch.no_grad():
        if kind == "mul":
            param.mul_(0.9)
        elif kind == "copy":
            param.copy_(torch.randn_like(param) * 0.3)
        else:
            param.data.add_(0.01)


@action
def set_data(training: Training, rng: random.Random) -> None:
    param = _some_parameter(training, rng)
    new = param.detach() * 0.9
    param.data = new.T.contiguous().T if rng.random() < 0.3 and new.dim() == 2 else new


@action
def set_data_in_one_storage(training: Training, rng: random.Random) -> None:
    """As what makes all parameters parts of one vector does."""
    params = list(training.model.parameters())
    flat = torch.cat([param.detach().flatten() for param in params])
    nn.utils.vector_to_parameters(flat, params)


@action
def replace_parameter(training: Training, rng: random.Random) -> None:
    """The optimizer keeps the old one, or learns of the new one."""
    old = training.model.first.weight
    new = nn.Parameter(torch.randn(HIDDEN, WIDTH).to(old.dtype) * 0.4)
    training.model.first.weight = new
    if rng.random() < 0.6:
        for group in training.optimizer.param_groups:
            group["params"] = [new if param is old else param for param in group["params"]]
        training.optimizer.state.pop(old, None)


@action
def swap_tensors(training: Training, rng: random.Random) -> None:
    """Another tensor under the same name and identity, as `module.to` does where it is told to."""
    old = training.model.first.weight
    if not old.requires_grad:
        return  # torch swaps no leaf that was trained and is frozen, whoever trained it
    old.grad = None
    other = nn.Parameter(old.detach() * 0.7, requires_grad=old.requires_grad)
    torch.utils.swap_tensors(old, other)


@action
def exchange_data(training: Training, rng: random.Random) -> None:
    norm = training.model.norm
    norm.weight.data, norm.bias.data = norm.bias.data, norm.weight.data


@action
def prune(training: Training, rng: random.Random) -> None:
    """A mask over the first weight, or none again."""
    first = training.model.first
    if nn.utils.prune.is_pruned(first):
        nn.utils.prune.remove(first, "weight")
    else:
        nn.utils.prune.random_unstructured(first, "weight", 0.3)


@action
def initialise(training: Training, rng: random.Random) -> None:
    training.model.first.reset_parameters()


@action
def share_memory(training: Training, rng: random.Random) -> None:
    training.model.share_memory()


@action
def wrap(training: Training, rng: random.Random) -> None:
    """A module around the activation, as adapters put one."""
    training.model.act = nn.Sequential(training.model.act, nn.Dropout(0.0))


@action
def replace_module(training: Training, rng: random.Random) -> None:
    training.model.act = rng.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.Identity])()


@action
def set_attribute(training: Training, rng: random.Random) -> None:
    kind = rng.choice(["p", "eps", "momentum"])
    if kind == "p":
        training.model.dropout.p = rng.choice([0.0, 0.2, 0.5])
    elif kind == "eps":
        training.model.norm.eps = rng.choice([1e-5, 1e-3])
    elif isinstance(training.model.norm, nn.BatchNorm1d):
        training.model.norm.momentum = rng.choice([0.1, 0.3])


@action
def replace_buffer(training: Training, rng: random.Random) -> None:
    norm = training.model.norm
    if isinstance(norm, nn.BatchNorm1d):
        assert norm.running_mean is not None
        norm.running_mean = torch.ones_like(norm.running_mean)


@action
def tie(training: Training, rng: random.Random) -> None:
    """Norm weight and bias become one parameter, or two again."""
    norm = training.model.norm
    if norm.bias is norm.weight:
        norm.bias = nn.Parameter(norm.weight.detach().clone())
    else:
        norm.bias = norm.weight


@action
def parametrize(training: Training, rng: random.Random) -> None:
    """Weight norm of the head, which makes new parameters that the optimizer does not know."""
    head = training.model.head
    if isinstance(head, nn.Linear) and not hasattr(head, "parametrizations"):
        nn.utils.parametrizations.weight_norm(head)


@action
def change_dtype(training: Training, rng: random.Random) -> None:
    """Of the model, its states and the batches that follow."""
    training.dtype = torch.float32 if training.dtype == torch.float64 else torch.float64
    training.model.to(training.dtype)
    for state in training.optimizer.state.values():
        wide = [key for key, value in state.items() if isinstance(value, Tensor) and value.dim()]
        state.update({key: state[key].to(training.dtype) for key in wide})


# Checkpoints and copies.


@action
def load_what_does_not_fit(training: Training, rng: random.Random) -> None:
    """Raises in eager, too, when part of it is loaded."""
    saved = training.model.state_dict()
    if rng.random() < 0.5:
        saved["head.bias"] = torch.zeros(CLASSES + 1)
        training.model.load_state_dict(saved)
    else:
        groups = training.optimizer.state_dict()
        training.optimizer.load_state_dict({**groups, "param_groups": []})


@action
def load_a_part(training: Training, rng: random.Random) -> None:
    saved = {name: v * 0.9 for name, v in training.model.state_dict().items() if "first" in name}
    training.model.load_state_dict(saved, strict=False)


@action
def load_model(training: Training, rng: random.Random) -> None:
    saved = {name: value * 0.5 for name, value in training.model.state_dict().items()}
    training.model.load_state_dict(_through_a_file(saved))


@action
def load_model_by_assigning(training: Training, rng: random.Random) -> None:
    saved = copy.deepcopy(training.model.state_dict())
    training.model.load_state_dict(saved, assign=True)
    if rng.random() < 0.5:
        new_optimizer(training, rng)


@action
def load_optimizer(training: Training, rng: random.Random) -> None:
    training.optimizer.load_state_dict(_through_a_file(training.optimizer.state_dict()))


@action
def load_emptied_optimizer(training: Training, rng: random.Random) -> None:
    saved = copy.deepcopy(training.optimizer.state_dict())
    training.optimizer.load_state_dict({**saved, "state": {}})


@action
def go_back(training: Training, rng: random.Random) -> Any:
    """A checkpoint, some steps, and the checkpoint again."""
    saved = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    losses = [training.call("train", *training.batch()) for _ in range(2)]
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    return losses


@action
def go_on_with_a_copy(training: Training, rng: random.Random) -> None:
    if nn.utils.prune.is_pruned(training.model.first):
        return  # its weight is no leaf behind a forward in eager, and torch copies leaves alone
    for handle in training.hooks:
        handle.remove()
    training.hooks.clear()
    training.scheduler = None
    training.model, training.optimizer = copy.deepcopy((training.model, training.optimizer))
    training.rebuilt()


@action
def copy_and_leave(training: Training, rng: random.Random) -> None:
    copy.deepcopy(training.model)(training.batch()[0])


@action
def compile_anew(training: Training, rng: random.Random) -> None:
    training.rebuilt()


@action
def average(training: Training, rng: random.Random) -> None:
    if training.average is None:
        training.average = torch.optim.swa_utils.AveragedModel(training.model)
    mine = [p.shape for p in training.average.module.parameters()]
    if mine == [p.shape for p in training.model.parameters()]:
        training.average.update_parameters(training.model)


# Hooks.


@action
def hook_forward(training: Training, rng: random.Random) -> None:
    module = rng.choice([training.model.first, training.model.act, training.model])
    training.hooks.append(module.register_forward_hook(lambda m, inputs, out: out * 1.5))


@action
def hook_forward_pre(training: Training, rng: random.Random) -> None:
    module = rng.choice([training.model.first, training.model.act, training.model])
    training.hooks.append(module.register_forward_pre_hook(lambda m, inputs: inputs[0] * 1.25))


@action
def hook_backward(training: Training, rng: random.Random) -> None:
    module = training.model.act
    hook = module.register_full_backward_hook(lambda m, into, out: (into[0] * 2,))
    training.hooks.append(hook)


@action
def hook_every_module(training: Training, rng: random.Random) -> None:
    mine = training.model.act

    def halve(module: nn.Module, inputs: Any, out: Tensor) -> Any:
        return out * 0.5 if module is mine else None

    training.hooks.append(nn.modules.module.register_module_forward_hook(halve))


@action
def hook_gradient(training: Training, rng: random.Random) -> None:
    param = training.model.first.weight
    if param.requires_grad:
        training.hooks.append(param.register_hook(lambda grad: grad * 2))


@action
def hook_accumulated(training: Training, rng: random.Random) -> None:
    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    param = training.model.first.weight
    if param.requires_grad:
        training.hooks.append(param.register_post_accumulate_grad_hook(halve))


@action
def hook_optimizer(training: Training, rng: random.Random) -> None:
    def shrink(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.mul_(0.99)

    optimizer = training.optimizer
    kind = rng.choice([optimizer.register_step_post_hook, optimizer.register_step_pre_hook])
    training.hooks.append(kind(shrink))


@action
def unhook(training: Training, rng: random.Random) -> None:
    if training.hooks:
        training.hooks.pop(rng.randrange(len(training.hooks))).remove()


# Settings of the process.


@action
def reseed(training: Training, rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(100))


@action
def draw(training: Training, rng: random.Random) -> Any:
    return torch.rand(3)


@action
def switch_autocast(training: Training, rng: random.Random) -> None:
    training.autocast = not training.autocast


@action
def switch_default_dtype(training: Training, rng: random.Random) -> None:
    is_double = torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(torch.float32 if is_double else torch.float64)


@action
def set_deterministic(training: Training, rng: random.Random) -> None:
    torch.use_deterministic_algorithms(rng.random() < 0.5)


def _some_group(training: Training, rng: random.Random) -> dict[str, Any]:
    group: dict[str, Any] = rng.choice(training.optimizer.param_groups)
    return group


def _some_parameter(training: Training, rng: random.Random) -> Any:
    return rng.choice(list(training.model.parameters()))


def _some_module(training: Training, rng: random.Random) -> Any:
    return rng.choice([training.model.first, training.model.norm, training.model.head])


def _through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file)
