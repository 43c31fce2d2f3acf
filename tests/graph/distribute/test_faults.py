"""A rank that fails, dies or hangs is an error on every other rank, within the group's timeout."""

from __future__ import annotations

import re

import pytest

from tests.support.faults_of_ranks import Fault, inject

# Of the machine's other work: a rank that hangs is given up after the timeout of the group.
SPARE_S = 20.0
# A rank that is gone is seen at its neighbours' connections; one that hangs only by the timeout.
FEW = [
    Fault("exit", "before an exchange", "ddp", ranks=3, number=1),
    Fault("hang", "after an exchange began", "shard", number=1),
]
LINE = r"/faults_of_ranks\.py:\d+ in step: `.*`"


@pytest.mark.parametrize("fault", FEW, ids=str)
def test_a_rank_that_fails_ends_all_with_the_line_that_waits(fault: Fault) -> None:
    ends = inject(fault)
    assert len(ends) == fault.ranks - 1
    for end in ends:
        assert end.is_ours, end
        assert end.seconds < fault.timeout_s + SPARE_S
        assert re.search(LINE, end.told), end
        assert "parameters may differ between ranks" in end.told
