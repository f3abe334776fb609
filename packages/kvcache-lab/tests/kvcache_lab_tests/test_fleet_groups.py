# SPDX-License-Identifier: Apache-2.0
"""Tests of fleets for models with several cache groups, and of groups that are derived from a
model's configuration.
"""

import json

import numpy as np
import pytest

from kvcache.cli import main
from kvcache_lab import Replayer, WorkloadRequest, chat_workload
from kvcache_lab.content import prefix_keys
from kvcache_lab.fleet import Fleet, Hardware, simulate_fleet
from kvcache_lab.fleet.kv_bytes import KVBytes
from kvcache_lab.fleet.simulation import Simulation
from kvcache_lab.groups import groups_text, parse_groups

HYBRID = "sliding_window:window=64,full_attention"
LLAMA = {
    **{"model_type": "llama", "hidden_size": 8192, "intermediate_size": 1024},
    **{"num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8},
    **{"vocab_size": 1000, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"},
}


def request(index, tokens, arrival_ms, answer=1):
    tokens = np.array(tokens, np.int32)
    return WorkloadRequest(index, arrival_ms, tokens, answer, prefix_keys(tokens))


@pytest.mark.parametrize("groups", [HYBRID, "recurrent,full_attention:block_size=32"])
def test_one_replica_with_groups_behaves_as_in_a_timed_replay(groups):
    workload, hardware = [*chat_workload(100, 2)], Hardware(2000.0, 20.0)
    fleet = Fleet(1, 901, groups=groups, page_bytes=1000, concurrency=8)
    report = simulate_fleet(workload, fleet, hardware)
    replayer = Replayer(
        **{"num_blocks": 901, "groups": parse_groups(groups, 16), "concurrency": 8},
        service=hardware.service,
    )
    expected = replayer.run(workload)
    assert report.device_hit_tokens == expected.hit_tokens
    assert report.p99_ms_to_first_token == pytest.approx(expected.p99_ms_to_first_token, abs=1e-3)


def test_loads_move_only_the_blocks_that_the_next_token_attends_to():
    sizes = KVBytes(Fleet(1, 100, groups=HYBRID, page_bytes=10), Hardware())
    # Blocks 6 to 9, which the window of 64 tokens covers.
    assert sizes.between(0, 160) == 10 * (10 + 4)
    assert sizes.between(144, 160) == 10 * (1 + 1) and sizes.between(160, 160) == 0
    assert sizes.between(0, 161) == 10 * (11 + 5)
    states = Fleet(1, 100, groups="recurrent,full_attention:block_size=32", page_bytes=10)
    assert KVBytes(states, Hardware()).between(0, 320) == 10 * (1 + 10)
    plain = KVBytes(Fleet(1, 100), Hardware(bytes_per_token=2.5))
    assert plain.between(3, 7) == 10 and plain.per_block == 40.0
    groups = parse_groups("sliding_window:window=2000000:cached=0,full_attention:block_size=32", 16)
    assert parse_groups(groups_text(groups), 1) == groups


def test_loads_of_groups_take_the_time_of_their_blocks():
    hardware = Hardware(
        *(1000.0, 10.0), **{"store_gb_per_s": 1.0, "peer_gb_per_s": 1.0, "transfer_gb_per_s": 1.0}
    )
    pair = [request(0, range(160), 0), request(1, range(160), 1000)]
    for options in ({"store_blocks": 100}, {"peers": True}):
        fleet = Fleet(2, 401, router="round_robin", groups=HYBRID, page_bytes=1_000_000, **options)
        simulation = Simulation(fleet, hardware)
        report = simulation.run(pair)
        # 9 blocks in the full attention group, and 4 or 5 blocks in the sliding window group.
        assert report.loaded_bytes == (9 + 4) * 1_000_000
        assert simulation.outcomes.ms_to_first_token[1] == pytest.approx(13 + 16)
    fleet = Fleet(
        1, 401, router="round_robin", groups=HYBRID, page_bytes=1_000_000, decode_replicas=1
    )
    report = Simulation(fleet, hardware).run(pair)
    assert report.transferred_bytes == (10 + 4) * 1_000_000 + (0 + 0) * 1_000_000


@pytest.mark.parametrize(("options", "message"), [
    ({"groups": HYBRID}, "page_bytes is 0 with groups 'sliding_window:window=64,full_attention'"),
    ({"groups": "fast"}, "groups has 'fast': its kind is 'fast': expected one of"),
    ({"page_bytes": -1}, "page_bytes is -1: expected 0 to"),
])  # fmt: skip
def test_invalid_groups_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        Fleet(1, 100, **options)


def test_the_command_derives_groups_from_a_configuration(tmp_path, capsys):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = ["plan", "--requests", "20", "--replicas", "1", "--router", "session", "--json"]
    for path in (tmp_path, tmp_path / "config.json"):
        assert main([*arguments, "--model", str(path)]) == 0
        (report,) = json.loads(capsys.readouterr().out)["reports"]
        assert report["fleet"]["groups"] == "full_attention:block_size=16"
        assert report["fleet"]["page_bytes"] == 4 * 2 * 8 * 128 * 2 * 16
    assert main([*arguments, "--model", "gpt_oss"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert report["fleet"]["groups"].count("sliding_window:block_size=16:window=24") == 1
    (tmp_path / "config.json").write_text("{}")
    for name, message in (
        ("none", "--model is 'none': expected one of llama, "),
        (str(tmp_path), "expected a configuration that transformers loads"),
    ):
        assert main([*arguments, "--model", name]) == 2
        assert message in capsys.readouterr().err
