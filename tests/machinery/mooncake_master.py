# SPDX-License-Identifier: Apache-2.0
"""Runs a Mooncake Store master in a separate process."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import time
from pathlib import Path

from tests.machinery.network import die_with_parent
from tests.machinery.ports import free_port


def is_installed() -> bool:
    """Whether Mooncake is usable: its package and its library's dependencies are installed."""
    if importlib.util.find_spec("mooncake") is None:
        return False
    try:
        import mooncake.store  # noqa: F401
    except ImportError:
        return False
    return True


class Master:
    """A master process. Leaving the `with` block kills the process."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        import mooncake

        self._program = Path(mooncake.__file__).parent / "mooncake_master"
        self.host, self.port, self._metrics_port = host, free_port(), free_port()
        self.process: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        command = [
            str(self._program), f"--rpc_address={self.host}", f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1", f"--metrics_port={self._metrics_port}",
        ]  # fmt: skip
        environment = {**os.environ, "GLOG_minloglevel": "3"}
        self.process = subprocess.Popen(
            command, env=environment, stdout=-3, stderr=-3, preexec_fn=die_with_parent
        )
        deadline = time.monotonic() + 20
        while True:
            assert self.process.poll() is None, "the master ended"
            try:
                socket.create_connection((self.host, self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "the master does not listen"
                time.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __enter__(self) -> Master:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
