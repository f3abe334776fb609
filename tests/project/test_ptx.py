# SPDX-License-Identifier: Apache-2.0
"""The interpreter of PTX finds data races, unfinished copies and invalid addresses, and counts
memory transactions. The kernels of these tests are written by hand, so nvcc is not needed.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.machinery.ptx.machine import Machine, Trap
from tests.machinery.ptx.program import parse
from tests.machinery.ptx.translate import Code

_KERNEL = """
.entry k(.param .u64 k_param_0)
{{
.reg .pred %p<9>;
.reg .b32 %r<20>;
.reg .b64 %rd<20>;
.shared .align 16 .b8 buffer[4096];
ld.param.u64 %rd1, [k_param_0];
cvta.to.global.u64 %rd2, %rd1;
mov.u32 %r1, %tid.x;
mov.u32 %r2, buffer;
shl.b32 %r3, %r1, 2;
add.s32 %r4, %r2, %r3;
cvt.u64.u32 %rd3, %r3;
add.s64 %rd4, %rd2, %rd3;
{body}
ret;
}}
"""
# Thread t writes word t of the shared buffer, and word 63 - t of the output receives it.
_STORE = "st.shared.u32 [%r4], %r1;"
_READ_OTHER = """
xor.b32 %r5, %r1, 63;
shl.b32 %r6, %r5, 2;
add.s32 %r7, %r2, %r6;
ld.shared.u32 %r8, [%r7];
st.global.u32 [%rd4], %r8;
"""


def run(body: str, order: str = "serial", threads: int = 64, blocks: int = 1, cluster: int = 1):
    """Run a kernel that gets 1,024 words, which are 0, 1, 2, ... Return them and the accesses."""
    (kernel,) = parse(_KERNEL.format(body=body))
    words = np.arange(1024, dtype=np.uint32)
    launch = SimpleNamespace(
        grid=(blocks, 1, 1), block=(threads, 1, 1), cluster=cluster, dynamic_shared_bytes=0,
        is_dependent=False, parameters=words.ctypes.data.to_bytes(8, "little"),
    )  # fmt: skip
    ranges = {words.ctypes.data: words.view(np.uint8)}
    return words, Machine(Code(kernel), launch, ranges, order).run()


@pytest.mark.parametrize("order", ["serial", "1", "2"])
def test_a_barrier_orders_the_threads_of_a_block(order):
    words, accesses = run(_STORE + "bar.sync 0;" + _READ_OTHER, order)
    assert words[:64].tolist() == [*range(63, -1, -1)] and not accesses.races


@pytest.mark.parametrize("order", ["serial", "1", "2"])
@pytest.mark.parametrize("barrier", ["", "bar.warp.sync -1;"])
def test_a_race_is_found_in_every_order(barrier, order):
    _, accesses = run(_STORE + barrier + _READ_OTHER, order)
    (race,) = accesses.races
    assert "st.shared.u32" in race and "ld.shared.u32" in race


_CLUSTER = """
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
mov.u32 %r5, %ctaid.x;
xor.b32 %r6, %r5, 1;
mapa.shared::cluster.u32 %r7, %r4, %r6;
ld.shared::cluster.u32 %r8, [%r7];
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.aligned;
setp.ne.s32 %p1, %r5, 0;
@%p1 bra end;
st.global.u32 [%rd4], %r8;
end:
"""


@pytest.mark.parametrize("order", ["serial", "1", "2"])
def test_a_cluster_is_ordered_by_arrivals_that_release(order):
    words, accesses = run(_STORE + _CLUSTER, order, blocks=2, cluster=2)
    assert words[:64].tolist() == [*range(64)] and not accesses.races
    _, accesses = run(_STORE + _CLUSTER.replace(".release", ".relaxed"), order, blocks=2, cluster=2)
    assert len(accesses.races) == 1


def test_a_block_must_not_end_while_others_read_its_memory():
    ends = _CLUSTER.replace("barrier.cluster.arrive.relaxed.aligned;", "")
    with pytest.raises(Trap, match="thread block that has ended"):
        run(_STORE + ends.replace("barrier.cluster.wait.aligned;", ""), blocks=2, cluster=2)


_COPY = "cp.async.ca.shared.global [%r4], [%rd4], 4;"
_USE = "ld.shared.u32 %r8, [%r4]; add.s32 %r8, %r8, 1; st.global.u32 [%rd4], %r8;"


def test_a_copy_must_be_committed_and_waited_for():
    whole = _COPY + "cp.async.commit_group; cp.async.wait_group 0;" + _USE
    for order in ("serial", "1", "2"):
        words, accesses = run(whole, order)
        assert words[:64].tolist() == [*range(1, 65)] and not accesses.races
        for part in ("cp.async.commit_group;", "cp.async.wait_group 0;"):
            with pytest.raises(Trap, match="ends before the copy"):
                run(whole.replace(part, ""), order)
    # A wait that comes too late is a race.
    late = _COPY + "cp.async.commit_group;" + _USE + "cp.async.wait_group 0;"
    assert any("not waited for" in race for race in run(late)[1].races)


def test_invalid_and_misaligned_addresses_end_the_launch():
    with pytest.raises(Trap, match="outside of the operator's tensors"):
        run("ld.global.u32 %r5, [%rd4+4096];")
    with pytest.raises(Trap, match="misaligned"):
        run("ld.global.u32 %r5, [%rd4+2];")
    with pytest.raises(Trap, match="outside of shared memory"):
        run("st.shared.u32 [%r4+4104], %r1;")
