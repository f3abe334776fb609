# SPDX-License-Identifier: Apache-2.0
"""Compares the outputs and the states of two vLLM schedulers. Block ids may differ; only their
number is compared.
"""

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

# Fields whose values depend on the clock or on the manager.
_DIFFERENT = {"timestamp", "num_kv_fetch_reqs_by_stage", "kv_cache_usage"}
# Attributes that are compared elsewhere, or that only kvcache's schedulers set.
_UNCOMPARED = {"block_hashes", "mamba_has_prefill_checkpoint_blocks"}
_SIMPLE = (bool, int, str, type(None))


def compare_scheduled(theirs, ours):
    """Compare all fields of two `SchedulerOutput`s."""
    for field in dataclasses.fields(theirs):
        one, other = getattr(theirs, field.name), getattr(ours, field.name)
        if field.name == "scheduled_new_reqs":
            one, other = ([_fields(each, "block_ids") for each in both] for both in (one, other))
        elif field.name == "scheduled_cached_reqs":
            one, other = (_fields(each, "new_block_ids") for each in (one, other))
        elif field.name == "new_block_ids_to_zero":
            one, other = (len(each or ()) for each in (one, other))
        elif field.name == "kv_connector_metadata":
            one, other = (_without_ids(each) for each in (one, other))
        elif field.name == "kv_connector_block_state" and one is not None:
            one, other = (len(each.boundary_state_offloads) for each in (one, other))
        assert one == other, f"{field.name}: {one} and {other}"


def _without_ids(value):
    """Return a connector's metadata, with ids of device blocks replaced by their number."""
    if hasattr(value, "without_ids"):
        return value.without_ids()
    if isinstance(value, list):
        return [_without_ids(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_ids(each) for key, each in value.items()}
    if not dataclasses.is_dataclass(value) and not isinstance(value, KVConnectorMetadata):
        return value
    return {
        name: _lengths(each)
        if name in ("block_ids", "load_gpu_blocks", "store_gpu_blocks")
        else None
        if name == "block_id"
        else _without_ids(each)
        for name, each in vars(value).items()
    }


def _fields(record, blocks):
    """Return a record's fields, with block ids replaced by their number."""
    found = {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}
    found[blocks] = _lengths(found[blocks])
    return found


def _lengths(ids):
    return len(ids) if ids and isinstance(ids[0], int) else ids and [_lengths(each) for each in ids]


def compare_outputs(theirs, ours, *, are_dense=True):
    """Compare the `EngineCoreOutputs` of two schedulers, separately for each client.

    `are_dense` is set if all groups have full attention. Otherwise, the estimates of cached tokens
    differ.
    """
    skipped = _DIFFERENT if are_dense else {*_DIFFERENT, "num_cache_creation_tokens"}
    assert list(theirs) == list(ours), "outputs of different clients"
    for one, other in zip(theirs.values(), ours.values()):
        for name in one.__struct_fields__:
            if name not in skipped:
                values = [_plain(getattr(each, name), skipped) for each in (one, other)]
                assert values[0] == values[1], f"{name}: {values[0]} and {values[1]}"


def _plain(value, skipped):
    """Convert a value to containers that are compared by value, without times and the managers'
    counts.
    """
    if isinstance(value, (list, tuple)):
        return [_plain(each, skipped) for each in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        names = getattr(value, "__struct_fields__", None)
    if names is None:
        return value
    return {name: _plain(getattr(value, name), skipped) for name in names if name not in skipped}


def compare_states(theirs, ours):
    """Compare the simple attributes of two schedulers and of their requests."""
    _compare_attributes(theirs, ours, "the scheduler")
    assert list(theirs.requests) == list(ours.requests)
    for request_id, request in theirs.requests.items():
        _compare_attributes(request, ours.requests[request_id], request_id)
        hashes = [list(each.requests[request_id].block_hashes) for each in (theirs, ours)]
        assert hashes[0] == hashes[1], f"{request_id} has other hashes"


def _compare_attributes(one, other, owner):
    for name, value in vars(one).items():
        if name in _UNCOMPARED:
            continue
        value, mine = _simple(value), _simple(vars(other).get(name))
        assert value == mine, f"{name} of {owner}: {value} and {mine}"


def _simple(value):
    """Return an attribute in a comparable form. Numbers and texts are kept, and requests are
    replaced by their ids.
    """
    if hasattr(value, "request_id"):
        return value.request_id
    if isinstance(value, (list, tuple, set, frozenset)) or hasattr(value, "popleft"):
        found = [_simple(each) for each in value]
        return sorted(map(str, found)) if isinstance(value, (set, frozenset)) else found
    if isinstance(value, dict):
        return {key: _simple(each) for key, each in value.items() if isinstance(key, (str, int))}
    return value if isinstance(value, _SIMPLE) else None
