# SPDX-License-Identifier: Apache-2.0
"""A short run of `tests/machinery/fleet_faults.py`, in which links and processes fail. Servers run
in network namespaces, with real TCP, a real router and a real store.
"""

import pytest

pytest.importorskip("zmq")
pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from tests.machinery.dynamo_indexer import needs_dynamo
from tests.machinery.fleet_faults import Fleet, why_not

WHY_NOT = why_not()
SHORT = ("router_cut", "index_lies", "replica_killed", "router_restarts", "prefill_cut")


@needs_dynamo
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_a_fleet_recovers_from_each_fault_without_wrong_answers():
    with Fleet(num_replicas=2, seconds=1.0) as fleet:
        for name in SHORT:
            row = getattr(fleet, name)()
            assert row["requests"] > 10 and row["hit_rate_before"] > 0.7, row
            assert row["hit_rate_after"] >= 0.6 * row["hit_rate_before"], row
            assert (row["wrong"], row["lost"], row["leaks"]) == (0, 0, {}), row
            assert row["index_differs"] == {}, row
            if name == "index_lies":
                assert row["misled"] and row["hit_rate_during"] < 0.4, row
