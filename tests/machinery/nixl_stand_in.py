# SPDX-License-Identifier: Apache-2.0
"""A stand-in for NIXL's Python API, for machines without NIXL and for tests with a simulated
device, whose memory NIXL cannot access. Agents in the same process copy bytes immediately and, like
RDMA, ignore streams. Files are read and written by system calls.

    with stand_in() as moved:  # import nixl._api finds it
        ...
    assert moved == [("READ", "VRAM", "VRAM", 65536)]
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.machinery.gpu_less import counts

_agents: dict[str, nixl_agent] = {}
_moved: list[
    tuple[str, str, str, int]
] = []  # operation, memory kinds of both sides, bytes of the descriptor


class nixl_thread_sync_t(enum.Enum):
    NIXL_THREAD_SYNC_STRICT = 0


@dataclass
class nixl_agent_config:
    backends: list[str] = field(default_factory=list)
    num_threads: int = 0
    sync_mode: object = None


class nixl_agent:
    """An agent that, like those of NIXL, rejects descriptors outside the memory registered for
    their kind.
    """

    refuses: str | None = None  # kind of memory for which registration fails

    def __init__(self, name: str, config: nixl_agent_config) -> None:
        self.name = name
        self.registered: list[tuple[int, int, int, str]] = []
        _agents[name] = self

    def create_backend(self, name: str) -> None:
        return

    def register_memory(
        self, rows: list[tuple[int, int, int, str]], kind: str, backends: object = None
    ) -> object:
        if kind == self.refuses:
            raise RuntimeError("NIXL_ERR_BACKEND")
        added = [(address, size, device, kind) for address, size, device, _ in rows]
        self.registered += added
        return added

    def deregister_memory(self, registered: list, backends: object = None) -> None:
        for each in registered:
            self.registered.remove(each)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        return

    def prep_xfer_dlist(self, name: str, rows: np.ndarray, kind: str) -> tuple[str, list]:
        agent = self if name == "NIXL_INIT_AGENT" else _agents[name]
        for address, size, device in rows.tolist():
            if not any(
                begin <= address and address + size <= begin + length and (device, kind) == known
                for begin, length, *known in agent.registered
                for known in [tuple(known)]
            ):
                raise RuntimeError(f"NIXL_ERR_NOT_FOUND: {kind} {address:#x}")
        return kind, rows.tolist()

    def release_dlist_handle(self, handle: object) -> None:
        return

    def make_prepped_xfer(self, operation: str, local, here, remote, there) -> tuple:
        return operation, local, remote

    def get_xfer_descs(self, rows: np.ndarray, kind: str) -> tuple[str, list]:
        return kind, rows.tolist()

    def initialize_xfer(self, operation: str, local, remote, name: str) -> tuple:
        return operation, local, remote

    def transfer(self, handle: tuple) -> str:
        operation, (kind, local), (other_kind, remote) = handle
        for (here, size, _), (there, other_size, file) in zip(local, remote, strict=True):
            assert size == other_size
            if other_kind == "FILE":  # the address is the offset in the file
                memory = (ctypes.c_char * size).from_address(here)
                move = os.preadv if operation == "READ" else os.pwritev
                if move(file, [memory], there) != size:
                    raise RuntimeError("NIXL_ERR_BACKEND")
                continue
            ends = (here, kind), (there, other_kind)
            _copy(*(ends if operation == "READ" else ends[::-1]), size)
            _moved.append((operation, kind, other_kind, size))
        return "DONE"

    def check_xfer_state(self, handle: tuple) -> str:
        return "DONE"

    def release_xfer_handle(self, handle: tuple) -> None:
        return


def _copy(to: tuple[int, str], source: tuple[int, str], size: int) -> None:
    """Copy bytes between addresses, each with its kind of memory, in no stream's order."""
    if "VRAM" not in (to[1], source[1]) or counts.is_available():
        ctypes.memmove(_reached(*to), _reached(*source), size)
        return
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")  # torch has loaded it
    stream = torch.cuda.Stream()
    addresses = (ctypes.c_void_p(address) for address, _ in (to, source))
    any_direction = 4  # cudaMemcpyDefault
    error = runtime.cudaMemcpyAsync(
        *addresses, ctypes.c_size_t(size), any_direction, ctypes.c_void_p(stream.cuda_stream)
    )
    if error != 0:
        raise RuntimeError(f"NIXL_ERR_BACKEND: CUDA error {error}")
    stream.synchronize()


def _reached(address: int, kind: str) -> int:
    """Return the address at which this process can access the memory, even if it belongs to the
    simulated device.
    """
    if kind == "DRAM":
        return address
    runtime = ctypes.CDLL(os.environ["KVCACHE_GPULESS_RUNTIME"])
    runtime.kvcache_gpuless_alias.restype = ctypes.c_void_p
    runtime.kvcache_gpuless_alias.argtypes = [ctypes.c_void_p]
    return runtime.kvcache_gpuless_alias(address)


@contextlib.contextmanager
def stand_in() -> Iterator[list[tuple[str, str, str, int]]]:
    """Replace `nixl` with this module during the block.

    Yields a list that grows with the agents' transfers, with one entry per descriptor: operation,
    local memory kind, remote memory kind, and bytes.
    """
    package, api = types.ModuleType("nixl"), types.ModuleType("nixl._api")
    package._api = api
    for each in (nixl_agent, nixl_agent_config, nixl_thread_sync_t):
        setattr(api, each.__name__, each)
    api.nixlBind = types.SimpleNamespace(nixlAgent=None)
    known = {name: sys.modules.get(name) for name in ("nixl", "nixl._api")}
    module, nixl_agent.__module__ = nixl_agent.__module__, "nixl._api"
    sys.modules.update({"nixl": package, "nixl._api": api})
    _moved.clear()
    try:
        yield _moved
    finally:
        nixl_agent.__module__, nixl_agent.refuses = module, None
        _agents.clear()
        for name, value in known.items():
            sys.modules.pop(name, None)
            if value is not None:
                sys.modules[name] = value
