"""Code that another process compiled is found before its graph is prepared, and is that code."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cotrain_compile.backends.inductor import compile_graph as compiling
from cotrain_compile.backends.inductor.compile_graph import compile_graph


def scaled(factor: float) -> fx.GraphModule:
    """Takes x, returns gelu(x) times `factor`."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    gelu = graph.call_function(torch.ops.aten.gelu.default, (x,))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (gelu, factor)),))
    return fx.GraphModule({}, graph)


def fake(rows: int) -> Tensor:
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True):
        return torch.empty(rows, 3)


class Prepared(Exception):
    """A graph was prepared for Inductor."""


def test_code_kept_by_an_earlier_process_is_that_which_it_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTRAIN_CACHE_DIR", str(tmp_path))
    x = torch.randn(4, 3)
    (made,) = compile_graph(scaled(2.0), [fake(4)], {})([x.clone()])
    with mock.patch.object(compiling, "make_fx", side_effect=Prepared):
        (found,) = compile_graph(scaled(2.0), [fake(4)], {})([x.clone()])
        assert torch.equal(found, made)
        # What differs in a constant, a size or a setting is other code.
        for factor, rows, settings in (
            (3.0, 4, {}),
            (2.0, 5, {}),
            (2.0, 4, {"max_fusion_size": 1}),
        ):
            with pytest.raises(Prepared):
                compile_graph(scaled(factor), [fake(rows)], settings)
        # Nor is code that others may have chosen run.
        (tmp_path / "segments").chmod(0o770)
        with pytest.raises(Prepared):
            compile_graph(scaled(2.0), [fake(4)], {})
        (tmp_path / "segments").chmod(0o700)
        compile_graph(scaled(2.0), [fake(4)], {})
        monkeypatch.setenv("COTRAIN_CACHE_DIR", "")
        with pytest.raises(Prepared):
            compile_graph(scaled(2.0), [fake(4)], {})


@pytest.mark.parametrize("content", [b"", b"../../elsewhere", b"\xff\xfe", b"nosuchkey"])
def test_what_is_kept_and_leads_nowhere_counts_as_absent(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTRAIN_CACHE_DIR", str(tmp_path))
    compile_graph(scaled(2.0), [fake(4)], {})
    (kept,) = (tmp_path / "segments").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(content)
    with mock.patch.object(compiling, "make_fx", side_effect=Prepared), pytest.raises(Prepared):
        compile_graph(scaled(2.0), [fake(4)], {})
    compile_graph(scaled(2.0), [fake(4)], {})
    assert kept.read_bytes() == whole
