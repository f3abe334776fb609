# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Dynamo's KV indexer as a separate process (`ai-dynamo-runtime` from PyPI)."""

import importlib.util
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.machinery.network import die_with_parent
from tests.machinery.ports import free_port

BLOCK, TIERS = 16, {"device": "GPU", "host_pinned": "CPU"}
START = "import sys; from dynamo._core import run_kv_indexer; run_kv_indexer(sys.argv[1:])"

needs_dynamo = pytest.mark.skipif(
    importlib.util.find_spec("dynamo") is None, reason="Dynamo is not installed"
)


class Indexer:
    """An indexer in a separate process."""

    def __init__(self, folder, host="127.0.0.1"):
        self.host, self.port, self.log = host, free_port(), folder / "indexer.log"
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, "--port", str(self.port)],
            **{"stdout": self.log.open("a"), "stderr": subprocess.STDOUT},
            preexec_fn=die_with_parent,
        )
        wait_for(lambda: self.call("/workers") == [])

    def call(self, path, **body):
        request = urllib.request.Request(
            f"http://{self.host}:{self.port}{path}",
            json.dumps(body).encode() if body else None,
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.loads(answer.read())
        except urllib.error.URLError as error:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            return error

    def register(self, number, endpoint, replay_endpoint):
        answer = self.call(
            "/register",
            **{"instance_id": number, "endpoint": endpoint, "replay_endpoint": replay_endpoint},
            **{"model_name": "m", "block_size": BLOCK},
        )
        assert answer == {"status": "ok"}

    def blocks(self, number):
        """Return the (medium, hash) pairs that the index lists for a worker."""
        found = set()
        for each in self.call("/dump")["m:default"]["events"]:
            if each["worker_id"] == number:
                blocks = each["event"]["data"]["stored"]["blocks"]
                medium = TIERS[each["storage_tier"]]
                found |= {(medium, block["block_hash"]) for block in blocks}
        return found

    def scores(self, token_ids):
        """Return the number of leading tokens that each worker has cached on its device."""
        answer = self.call("/query", token_ids=token_ids, model_name="m", block_size=BLOCK)
        return {int(number): each["gpu"] for number, each in answer["instances"].items()}

    def close(self):
        self.process.kill()
        self.process.wait()


def wait_for(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.05)
