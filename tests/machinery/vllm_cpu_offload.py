# SPDX-License-Identifier: Apache-2.0
"""Lets the worker of vLLM's SimpleCPUOffloadConnector run without CUDA.

vLLM's worker fails on CPUs: `torch.cuda.Stream` has no `priority_range` there, and blocks are copied by
`cuMemcpyBatchAsync`. Streams and events are replaced by objects that do nothing, and copies by
assignments. All other code of the connector is vLLM's.
"""

import types

import torch
from vllm.v1.simple_kv_offload import worker


class Stream:
    def __init__(self, priority=0):
        self.priority = priority

    @staticmethod
    def priority_range():
        return 0, 0


class Event:
    """An event of work that is already done."""

    def record(self, _=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass


class Copies:
    """Copies blocks immediately."""

    def init(self, on_device, on_cpu, *_):
        self.on_device, self.on_cpu = on_device, on_cpu

    def launch_copy(self, sources, targets, is_store, event_idx, events_list, **_):
        pair = (self.on_device, self.on_cpu) if is_store else (self.on_cpu, self.on_device)
        for name, tensor in pair[1].items():
            tensor[targets] = pair[0][name][sources]
        events_list.append((event_idx, Event()))


class _Torch(types.ModuleType):
    cuda = types.SimpleNamespace(Stream=Stream, current_stream=lambda: None)
    Event = Event

    def __getattr__(self, name):
        return getattr(torch, name)


def run_on_cpu():
    """Replace the parts of the worker that need CUDA."""
    worker.torch, worker.DmaCopyBackend = _Torch("torch"), Copies
