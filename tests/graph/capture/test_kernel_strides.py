"""Results lie in memory as the trace says: ops of training over inputs in many layouts.

Every op that runs in the forward and backward of a case is made in fake tensors too, as while a
step is traced, and compared: dtype, shape and strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cotrain_compile.capture.nodes.kernel_strides import strides_of_kernels
from tests.support.steps import cotrain

Op = Callable[..., Tensor]


class MadeTwice(TorchDispatchMode):
    """Makes every result in fake tensors too, and notes those that differ."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.differences: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        fake_mode = FakeTensorMode()
        faked = tree_map_only(Tensor, lambda t: fake_mode.from_tensor(t.detach()), (args, kwargs))
        value = func(*args, **kwargs)
        if not func._schema.is_mutable:
            with fake_mode:
                fake = func(*faked[0], **faked[1])
            found, traced = ([*map(described, tree_leaves(v))] for v in (value, fake))
            if found != traced:
                self.differences.append(f"{func} makes {found}, {traced} in the trace")
        return value


def described(value: Any) -> Any:
    """Nothing steps over a stride of a size of one."""
    if not isinstance(value, Tensor):
        return None
    strides = [s for s, n in zip(value.stride(), value.shape, strict=True) if n > 1]
    return value.dtype, tuple(value.shape), strides if value.numel() else []


def permuted(order: Callable[[int], list[int]]) -> Callable[[Tensor], Tensor]:
    """Dimensions in another order in memory: innermost comes last in `order`."""

    def lay_out(x: Tensor) -> Tensor:
        dims = order(x.dim())
        back = [dims.index(d) for d in range(x.dim())]
        return x.permute(dims).contiguous().permute(back)

    return lay_out


def with_gaps(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2] if x.dim() else x


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape) if x.dim() else x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": torch.clone,
    "transposed": permuted(lambda n: [*range(n - 2), n - 1, n - 2] if n > 1 else [*range(n)]),
    "channels last": permuted(lambda n: [0, *range(2, n), 1] if n > 1 else [*range(n)]),
    "reversed": permuted(lambda n: [*reversed(range(n))]),
    "rows last": permuted(lambda n: [*range(1, n), 0] if n else []),
    "with gaps": with_gaps,
    "expanded": expanded,
}


def ones(x: Tensor, dim: int) -> Tensor:
    return torch.ones(x.shape[dim], dtype=x.dtype)


def batch_norm(x: Tensor, training: bool = True) -> Tensor:
    zeros, weight = torch.zeros(x.shape[1]), nn.Parameter(torch.ones(x.shape[1]))
    return F.batch_norm(x, zeros, zeros + 1, weight, weight, training)


def layer_norm(x: Tensor) -> Tensor:
    weight = nn.Parameter(torch.ones(x.shape[-1]))
    return F.layer_norm(x, x.shape[-1:], weight, weight)


def group_norm(x: Tensor) -> Tensor:
    weight = nn.Parameter(torch.ones(x.shape[1]))
    return F.group_norm(x, 2, weight, weight)


def attend(x: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, **options)


def convolve(x: Tensor) -> Tensor:
    weight = nn.Parameter(torch.ones(6, x.shape[1], *[2] * (x.dim() - 2)))
    return getattr(F, f"conv{x.dim() - 2}d")(x, weight)  # type: ignore[no-any-return]


def unpool(x: Tensor) -> Tensor:
    values, places = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values, places, [2, 2])


# Those that were found to differ, with the fewest dimensions at which they do.
NORMS: dict[str, tuple[Op, int]] = {
    "batch norm": (batch_norm, 3),
    "batch norm of images": (batch_norm, 4),
    "batch norm in evaluation": (lambda x: batch_norm(x, training=False), 3),
    "layer norm": (layer_norm, 3),
    "log softmax": (lambda x: x.log_softmax(-1), 2),
    "power of a number": (lambda x: 2.0**x, 2),
    "rounded quotient": (lambda x: x + torch.div(x, torch.tensor(2.0), rounding_mode="floor"), 2),
    "replicated edges": (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), 4),
    "reflected edges of images": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), 4),
    "reflected edges of volumes": (lambda x: F.pad(x, (1,) * 6, mode="reflect"), 5),
    "replicated edges of volumes": (lambda x: F.pad(x, (1,) * 6, mode="replicate"), 5),
    "random leaks": (lambda x: F.rrelu(x, training=True), 2),
    "leaks": (lambda x: F.rrelu(x, training=False), 2),
    "product with a logarithm": (lambda x: torch.xlogy(x, x.detach() ** 2), 2),
}
OTHERS: dict[str, tuple[Op, int]] = {
    "group norm": (group_norm, 4),
    "instance norm": (F.instance_norm, 4),
    "rms norm": (lambda x: F.rms_norm(x, x.shape[-1:]), 3),
    "softmax": (lambda x: x.softmax(1), 3),
    "linear": (lambda x: F.linear(x, nn.Parameter(torch.ones(3, x.shape[-1])), ones(x, -1)[:3]), 3),
    "matmul": (lambda x: x @ x.mT, 3),
    "bmm": (lambda x: torch.bmm(x, x.mT), 3),
    "einsum": (lambda x: torch.einsum("abc,abd->acd", x, x), 3),
    "attention": (attend, 4),
    "causal attention": (lambda x: attend(x, is_causal=True), 4),
    "convolution of rows": (convolve, 3),
    "convolution": (convolve, 4),
    "convolution of volumes": (convolve, 5),
    "maximum of squares": (lambda x: F.max_pool2d(x, 2), 4),
    "mean of squares": (lambda x: F.avg_pool2d(x, 2), 4),
    "adaptive mean": (lambda x: F.adaptive_avg_pool2d(x, 2), 4),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), 4),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 4),
    "shuffled pixels": (lambda x: F.pixel_shuffle(x, 2), 4),
    "reflected edges": (lambda x: F.pad(x, (1, 1), mode="reflect"), 3),
    "zeros around": (lambda x: F.pad(x, (1, 1)), 3),
    "unfold": (lambda x: F.unfold(x, 2), 4),
    "gelu": (F.gelu, 3),
    "silu": (F.silu, 3),
    "glu": (F.glu, 3),
    "prelu": (lambda x: F.prelu(x, nn.Parameter(ones(x, 1))), 3),
    "hardswish": (F.hardswish, 3),
    "mish": (F.mish, 3),
    "softplus": (F.softplus, 3),
    "log sigmoid": (F.logsigmoid, 3),
    "dropout": (F.dropout, 3),
    "native dropout": (lambda x: torch.native_dropout(x, 0.5, True)[0], 3),
    "shuffled channels": (lambda x: F.channel_shuffle(x, 2), 4),
    "unpooled": (unpool, 4),
    **{
        f.__name__: (f, 3)
        for f in (
            *(F.relu, F.leaky_relu, F.elu, F.celu, F.selu, F.hardtanh, F.hardsigmoid, F.hardshrink),
            *(F.softshrink, F.tanhshrink, F.softsign, torch.tanh, torch.sigmoid),
            *(torch.logit, torch.sin, torch.exp, torch.log1p, torch.sqrt, torch.rsqrt, torch.abs),
            *(torch.erf, torch.sgn, torch.floor, torch.reciprocal, torch.square, torch.nan_to_num),
        )
    },
    "power": (lambda x: x.abs() ** x.detach() + x**3, 3),
    "remainder": (lambda x: x % 2 + torch.fmod(x, 2.0) + torch.hypot(x, x.mT.mT), 3),
    "smallest": (
        lambda x: torch.minimum(x, x.detach().mT.contiguous().mT) + x.min(1).values[:, None],
        3,
    ),
    "squared loss": (lambda x: F.mse_loss(x, x.detach() * 2), 3),
    "absolute loss": (lambda x: F.l1_loss(x, x.detach() * 2), 3),
    "huber loss": (lambda x: F.huber_loss(x, x.detach() * 2), 3),
    "binary loss": (lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid()), 3),
    "margin loss": (lambda x: F.soft_margin_loss(x, x.detach().sign()), 3),
    "bfloat16 norm": (lambda x: layer_norm(x.bfloat16().float()) + x.bfloat16().softmax(-1), 3),
    "transposed convolution": (
        lambda x: F.conv_transpose2d(x, nn.Parameter(torch.ones(x.shape[1], 3, 2, 2))),
        4,
    ),
    "grouped convolution": (
        lambda x: F.conv2d(x, nn.Parameter(torch.ones(x.shape[1], 1, 2, 2)), groups=x.shape[1]),
        4,
    ),
    "largest of rows": (lambda x: F.max_pool1d(x, 2) + F.avg_pool1d(x, 2), 3),
    "largest of volumes": (lambda x: F.max_pool3d(x, 2) + F.avg_pool3d(x, 2), 5),
    "adaptive largest": (lambda x: F.adaptive_max_pool2d(x, 2), 4),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), 4),
    "sampled": (
        lambda x: F.grid_sample(x, x.detach()[:, :2].movedim(1, -1), align_corners=False),
        4,
    ),
    "where": (lambda x: torch.where(x > 0, x, x.mT.mT * 0.5), 3),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), 3),
    "lerp": (lambda x: torch.lerp(x, x.clone(), 0.3), 3),
    "addcmul": (lambda x: torch.addcmul(x, x, x), 3),
    "number of no dimensions": (lambda x: x * torch.tensor(2.0) + torch.maximum(x, x[0, 0, 0]), 3),
    "sum": (lambda x: x.sum(1), 3),
    "mean kept": (lambda x: x - x.mean(1, keepdim=True), 3),
    "norm": (lambda x: x.norm(dim=-1), 3),
    "variance": (lambda x: x.var(-1), 3),
    "log of sums": (lambda x: x.logsumexp(1), 3),
    "running sum": (lambda x: x.cumsum(1), 3),
    "running product": (lambda x: x.cumprod(1), 3),
    "largest": (lambda x: x.max(1).values, 3),
    "sorted": (lambda x: x.sort(1).values, 3),
    "top": (lambda x: x.topk(2, dim=1).values, 3),
    "gathered": (lambda x: x.gather(1, torch.zeros(x.shape, dtype=torch.long)), 3),
    "indexed": (lambda x: x[:, torch.tensor([1, 0, 1])], 3),
    "selected": (lambda x: x.index_select(1, torch.tensor([1, 0])), 3),
    "put": (lambda x: x.index_put((torch.tensor([0]),), x[1:2]), 3),
    "scattered": (lambda x: x.scatter_add(1, torch.zeros(x.shape, dtype=torch.long), x), 3),
    "masked": (lambda x: x.masked_fill(x > 0, 0.0), 3),
    "triangle": (lambda x: x.tril(), 3),
    "concatenated": (lambda x: torch.cat([x, x], 1), 3),
    "concatenated images": (lambda x: torch.cat([x, x.contiguous()], 1), 4),
    "stacked": (lambda x: torch.stack([x, x], 1), 3),
    "split": (lambda x: x.split(2, 1)[0] * 2, 3),
    "flipped": (lambda x: x.flip(1), 3),
    "rolled": (lambda x: x.roll(1, 1), 3),
    "repeated": (lambda x: x.repeat_interleave(2, dim=1), 3),
    "reshaped": (lambda x: x.reshape(-1) * 2, 3),
    "windows": (lambda x: x.unfold(1, 2, 1) * 2, 3),
    "diagonal": (lambda x: x.diagonal(dim1=1, dim2=2) * 2, 3),
    "copied": (lambda x: x.clone(memory_format=torch.contiguous_format), 3),
    "to bfloat16": (lambda x: x.bfloat16() * 2, 3),
    "cross entropy": (
        lambda x: F.cross_entropy(x, x[:, 0].argmax(1)[:, None] * 0 + x.argmax(1)),
        3,
    ),
    "soft cross entropy": (lambda x: F.cross_entropy(x, x.softmax(1).detach()), 3),
    "smooth loss": (lambda x: F.smooth_l1_loss(x, x.detach() * 2), 3),
    "logits": (lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid().detach()), 3),
    "divergence": (
        lambda x: F.kl_div(x.log_softmax(-1), x.softmax(-1).detach(), reduction="batchmean"),
        3,
    ),
    "cosine": (lambda x: F.cosine_similarity(x, x.roll(1, 0), dim=1), 3),
    "distances": (lambda x: torch.cdist(x, x.detach().roll(1, 1)), 3),
    "embedded": (lambda x: F.embedding(torch.tensor([[0, 1], [1, 0]]), x.flatten(0, -2)), 3),
    "summed rows": (lambda x: x.sum(0) + torch.tensordot(x, x, dims=([0, 1], [0, 1])).sum(), 3),
}
SHAPE = (2, 4, 6, 4, 4)
LONG = pytest.mark.long


def differences_in(op: Op, dims: int, layout: str) -> list[str]:
    """What differs in the forward and, for a gradient in either layout, in the backward."""
    torch.manual_seed(0)
    lay_out = LAYOUTS[layout]
    x = lay_out(torch.randn(SHAPE[:dims])).requires_grad_()
    made = MadeTwice()
    with strides_of_kernels(), made:
        y = op(x)
        gradient = torch.randn(y.shape, dtype=y.dtype)
        for of_y in (gradient, lay_out(gradient)):
            torch.autograd.grad(y, [x], of_y, retain_graph=True)
    return made.differences


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*NORMS, *(pytest.param(name, marks=LONG) for name in OTHERS)])
def test_results_lie_in_memory_as_the_trace_says(name: str, layout: str) -> None:
    op, dims = {**NORMS, **OTHERS}[name]
    assert differences_in(op, dims, layout) == []


class NormedChannels(nn.Module):
    """The usual way to norm the channels of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x).mT)
        return self.last(y.view(-1, 32).view(y.shape).mT)  # type: ignore[no-any-return]


def test_a_norm_over_transposed_rows_is_trained_and_viewed_as_in_eager() -> None:
    losses = []
    for compile_with in (lambda step: step, cotrain(policy="resident")):
        torch.manual_seed(0)
        model = NormedChannels().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, model: nn.Module = model, sgd: Any = optimizer) -> Tensor:
            sgd.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            sgd.step()
            return loss.detach()

        run = compile_with(step)
        x = torch.randn(4, 4, 8, dtype=torch.float64)
        losses.append([float(run(x)) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
