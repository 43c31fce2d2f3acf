"""Layout: ranks in a mesh, and which of them share samples."""

from __future__ import annotations

from itertools import product

import pytest

from cotrain_compile import files
from cotrain_compile.cluster.model.layout import DIMENSIONS, Layout
from cotrain_compile.errors import OptionError


def test_ranks_are_counted_with_the_tensor_dimension_fastest() -> None:
    layout = Layout(pipeline=2, replicate=2, shard=3, tensor=2)
    places = [tuple(layout.coordinates(rank).values()) for rank in range(layout.devices)]
    assert places == list(product(*map(range, layout.sizes.values())))
    assert list(layout.coordinates(0)) == list(DIMENSIONS)
    assert str(layout) == "pipeline 2 x replicate 2 x shard 3 x tensor 2"
    assert layout.mesh == {"pipeline": 2, "replicate": 2, "shard": 3, "tensor": 2}


def test_stages_and_tensor_ranks_of_a_replica_have_the_same_samples() -> None:
    layout = Layout(pipeline=2, shard=2, tensor=2, micro_batches=4, micro_batch=3)
    assert [layout.replica(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.step_samples == 24


def test_unequal_shares_add_up() -> None:
    layout = Layout(replicate=3, micro_batch=5, samples=(5, 2, 2))
    assert layout.step_samples == 9
    with pytest.raises(OptionError, match="3 ranks have samples of their own"):
        Layout(replicate=3, samples=(5, 2))


def test_what_no_mesh_has_is_refused() -> None:
    with pytest.raises(OptionError, match="shard=0"):
        Layout(shard=0)
    with pytest.raises(OptionError, match="sequence=True"):
        Layout(sequence=True)
    with pytest.raises(OptionError, match="no rank 4"):
        Layout(shard=4).coordinates(4)


def test_a_layout_is_a_file() -> None:
    layout = Layout(pipeline=2, shard=4, sequence=False, samples=(1, 2, 3, 4))
    assert files.from_json(files.to_json(layout), Layout, where="here") == layout
