"""CPU helpers: BytePS's equations, bytes on the network, the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.cluster.helpers import (
    Chunk,
    chunks_of,
    host_work,
    judge_helpers,
    sent_bytes,
    share,
)
from cotrain_compile.cluster.model.description import Cluster, Devices, Switch
from cotrain_compile.cluster.sources.cluster_presets import find_cluster, preset
from cotrain_compile.cluster.sources.profile_files import read_profile
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Network
from tests.support.examples import examples

DATA = Path(__file__).parents[2] / "data"
BERT = read_profile(DATA / "harmony_bert_large.json")
GRADIENTS = [(layer.name, layer.grad_bytes) for layer in BERT.layers]
WRN = read_profile(DATA / "deeppool_wrn101_2_a100.json")


def test_the_example_of_the_paper() -> None:
    """32 machines with a card and 16 without: 46.9 % faster than all-reduce."""
    sharing = share(32, 16, 1e9, 12.5e9)
    assert sharing.all_reduce_s / sharing.seconds == pytest.approx(1.469, abs=5e-4)


def test_the_equations_follow_from_both_being_done_at_once_and_not_from_the_printed_fourth() -> (
    None
):
    """Shares (equations 1 and 2) and time (6), solved for and compared as formulas."""
    n, k, nbytes, rate, mine, helper = sympy.symbols("n k M B M_gpu M_cpu", positive=True)
    all_summed = sympy.Eq(k * helper + n * mine, nbytes)
    machine_s = (nbytes + (n - 2) * mine) / rate

    def solved(helper_s: sympy.Expr) -> dict[sympy.Symbol, sympy.Expr]:
        return dict(sympy.solve([all_summed, sympy.Eq(machine_s, helper_s)], [mine, helper]))

    whole = n**2 + k * n - 2 * k
    found = solved(n * helper / rate)
    assert sympy.simplify(found[helper] - 2 * (n - 1) * nbytes / whole) == 0
    assert sympy.simplify(found[mine] - (n - k) * nbytes / whole) == 0
    seconds = (n * helper / rate).subs(found)
    assert sympy.simplify(seconds - 2 * n * (n - 1) * nbytes / (whole * rate)) == 0
    printed = solved(helper / rate)
    assert sympy.simplify(printed[helper] - found[helper]) != 0

    at = {n: 5, k: 3, nbytes: 840, rate: 7}
    sharing = share(5, 3, 840.0, 7.0)
    assert sharing.helper_bytes == pytest.approx(float(found[helper].subs(at)))
    assert sharing.machine_bytes == pytest.approx(float(found[mine].subs(at)))
    assert sharing.seconds == pytest.approx(float(seconds.subs(at)))
    gain = sharing.all_reduce_s / sharing.seconds
    assert gain == pytest.approx(float((whole / n**2).subs(at)))


def test_without_helpers_it_is_all_reduce_and_with_as_many_all_goes_once() -> None:
    none, equal = share(8, 0, 1e9, 1e9), share(8, 8, 1e9, 1e9)
    assert none.seconds == none.all_reduce_s
    assert equal.seconds == pytest.approx(1.0)
    assert equal.machine_bytes == pytest.approx(0.0, abs=1e-6)


@examples(40)
@given(
    st.integers(2, 40),
    st.integers(0, 60),
    st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    st.floats(0.0, 1.0),
)
def test_no_other_share_is_done_sooner(n: int, k: int, helper_rate: float, part: float) -> None:
    """Helpers could sum any part of all bytes, in equal shares; card rates may differ."""
    sharing = share(n, k, 1.0, 1.0, helper_rate)
    assert k * sharing.helper_bytes + n * sharing.machine_bytes == pytest.approx(1.0)
    assert sharing.seconds >= 1.0 - 1e-12  # each machine sends all it has and receives the sum
    of_helper = part / k if k else 0.0
    of_machine = (1.0 - k * of_helper) / n
    other_s = max(1.0 + (n - 2) * of_machine, n * of_helper / helper_rate)
    assert sharing.seconds <= other_s * (1 + 1e-12)
    assert sharing.seconds <= share(n, max(k - 1, 0), 1.0, 1.0, helper_rate).seconds * (1 + 1e-12)


def test_parts_follow_the_order_of_gradients_and_cover_every_gradient() -> None:
    chunks = chunks_of(GRADIENTS, share(4, 2, BERT.grad_bytes, 1e9))
    assert max(chunk.nbytes for chunk in chunks) == 4_000_000
    place = [BERT.index[chunk.layer] for chunk in chunks]
    assert place == sorted(place)
    for layer in BERT.layers:
        own = [chunk for chunk in chunks if chunk.layer == layer.name]
        assert [p.begin for p in own] == [sum(q.nbytes for q in own[:i]) for i in range(len(own))]
        assert sum(p.nbytes for p in own) == layer.grad_bytes


def test_the_owner_of_a_part_is_the_same_in_every_process() -> None:
    """Python's own hash of a text differs from one process to the next."""
    chunks = chunks_of(GRADIENTS, share(4, 2, BERT.grad_bytes, 1e9))
    assert [chunk.owner for chunk in chunks[:8]] == [1, 1, 5, 3, 3, 3, 0, 0]


def test_the_hash_gives_each_machine_about_its_share() -> None:
    sharing = share(4, 2, BERT.grad_bytes, 1e9)
    chunks = chunks_of(GRADIENTS, sharing, chunk_bytes=50_000)
    owned = [0] * 6
    for chunk in chunks:
        owned[chunk.owner] += chunk.nbytes
    for machine, nbytes in enumerate(owned):
        wanted = sharing.machine_bytes if machine < 4 else sharing.helper_bytes
        assert nbytes == pytest.approx(wanted, rel=0.1)
    everything = share(4, 4, BERT.grad_bytes, 1e9)
    assert min(chunk.owner for chunk in chunks_of(GRADIENTS, everything)) >= 4


def test_bytes_on_the_network_are_those_of_the_formulas() -> None:
    """n = 4, k = 2 and 60 bytes: helpers sum 18 each, machines 6, and all send 72."""
    sharing = share(4, 2, 60.0, 1.0)
    assert (sharing.helper_bytes, sharing.machine_bytes) == (18.0, 6.0)
    chunks = [Chunk("l", 0, 6, machine) for machine in range(4)]
    chunks += [Chunk("l", 0, 18, helper) for helper in (4, 5)]
    sent = sent_bytes(chunks, sharing)
    assert sent == (72, 72, 72, 72, 72, 72)
    assert sent[0] == sharing.machine_traffic_bytes == sharing.seconds
    assert sent[4] == sharing.helper_traffic_bytes


@pytest.mark.parametrize(
    ("machines", "helpers", "nbytes"), [(1, 1, 1.0), (2, -1, 1.0), (2, 0, 0.0)]
)
def test_no_exchange_is_refused(machines: int, helpers: int, nbytes: float) -> None:
    with pytest.raises(OptionError):
        share(machines, helpers, nbytes, 1.0)


def test_one_number_decides_between_sum_and_update_on_the_host() -> None:
    """192 GB/s of memory for gradients of 12.5: enough for a sum of many, and for Adam."""
    many = host_work(192e9, 12.5e9, 32, update_bytes_per_parameter=28)
    assert many.available == pytest.approx(15.36)
    assert (many.sums, many.updates) == (True, True)
    alone = host_work(192e9, 24e9, 1, update_bytes_per_parameter=28, bytes_per_gradient=2)
    assert (alone.sum_touches, alone.update_touches) == (0.0, 14.0)
    assert not alone.updates
    assert "reaches 8.0 bytes for each that arrives" in str(alone)
    assert "sum, but update on the devices" in str(alone)
    assert "neither" in str(host_work(2e9, 1e9, 32, update_bytes_per_parameter=28))


def test_helpers_pay_where_the_network_is_slow_and_are_idle() -> None:
    """WRN-101-2 as measured on an A100, 32 samples each, at 100 Gb/s with 16 CPU machines."""
    verdict = judge_helpers(WRN, preset("32xv100-16cpu"), 32)
    assert not verdict.keeps_nccl
    gain = verdict.sharing.all_reduce_s / verdict.sharing.seconds
    assert gain == pytest.approx(1.469, abs=5e-4)
    assert verdict.helpers_exposed_s < verdict.all_reduce_exposed_s
    assert str(verdict).startswith("use the CPU machines: NCCL's all-reduce takes 78.7 ms")


def test_where_links_hide_the_exchange_nccl_is_kept_and_the_figure_said() -> None:
    cluster = preset("32xv100-16cpu")
    fast = Network(400e9)
    groups = tuple(replace(group, nic=fast) for group in cluster.groups)
    verdict = judge_helpers(WRN, replace(cluster, groups=groups), 32)
    assert verdict.keeps_nccl
    assert verdict.gain <= 1.0
    assert str(verdict).startswith("keep NCCL: NCCL's all-reduce takes 2.5 ms, of which ")


def test_machines_of_several_devices_send_one_copy_of_their_sums() -> None:
    """Their network cards, their links in parts, or what joins them: the slowest of these."""
    (group,) = preset("2x8xa100").groups
    helpers = replace(preset("32xv100-16cpu").groups[1], nic=group.nic, count=2)
    cluster = Cluster("helped", (group, helpers))
    verdict = judge_helpers(WRN, cluster, 32)
    assert (verdict.sharing.machines, verdict.sharing.helpers) == (2, 2)
    slow = replace(group, peers=Network(1e9))
    joined = judge_helpers(WRN, Cluster("slow", (slow, helpers)), 32)
    assert joined.helpers_s == pytest.approx(2 * 7 / 8 * WRN.grad_bytes / 1e9)
    four = replace(group, name="four", devices=(Devices("a100-80", 4),), switches=())
    with pytest.raises(OptionError, match=r"have not as many devices each.*take `replicate`"):
        judge_helpers(WRN, Cluster("mixed", (group, four, helpers)), 32)


def test_a_switch_may_be_what_holds_gradients_up() -> None:
    cluster = preset("32xv100-16cpu")
    workers, helpers = cluster.groups
    slow = replace(workers, switches=(Switch((0,), 1e9),))
    verdict = judge_helpers(WRN, replace(cluster, groups=(slow, helpers)), 32)
    assert verdict.helpers_s == pytest.approx(WRN.grad_bytes / 1e9)


def test_a_slow_memory_of_a_helper_is_counted() -> None:
    cluster = preset("32xv100-16cpu")
    workers, helpers = cluster.groups
    slow = replace(helpers, host=replace(helpers.host, bytes_per_s=10e9))
    verdict = judge_helpers(WRN, replace(cluster, groups=(workers, slow)), 32)
    assert not verdict.host.sums
    assert verdict.keeps_nccl
    assert verdict.gain < 1


def test_faster_cards_of_helpers_take_larger_shares() -> None:
    cluster = preset("32xv100-16cpu")
    workers, helpers = cluster.groups
    fast = replace(helpers, nic=Network(25e9))
    verdict = judge_helpers(WRN, replace(cluster, groups=(workers, fast)), 32)
    plain = judge_helpers(WRN, cluster, 32)
    assert verdict.sharing.helper_bytes > plain.sharing.helper_bytes
    assert verdict.sharing.seconds < plain.sharing.seconds


def test_one_machine_has_no_network_to_relieve() -> None:
    with pytest.raises(OptionError, match="within one machine keep NCCL"):
        judge_helpers(WRN, find_cluster("8xh100"), 32)


def test_machines_of_several_kinds_count_as_the_slowest_of_them() -> None:
    cluster = find_cluster("32xv100-16cpu")
    workers, helpers = cluster.groups
    slow = Network(5e9)
    part = replace(workers, count=8)
    groups = (replace(workers, count=24), replace(part, name="slow", nic=slow), helpers)
    mixed = judge_helpers(WRN, replace(cluster, groups=groups), 32)
    all_slow = replace(cluster, groups=(replace(workers, nic=slow), helpers))
    assert mixed == judge_helpers(WRN, all_slow, 32)
    assert mixed.sharing.machines == 32
    some = (workers, replace(helpers, count=12), replace(helpers, count=4, name="slow", nic=slow))
    mixed = judge_helpers(WRN, replace(cluster, groups=some), 32)
    assert mixed.sharing.helpers == 16
    assert mixed == judge_helpers(
        WRN, replace(cluster, groups=(workers, replace(helpers, nic=slow))), 32
    )
