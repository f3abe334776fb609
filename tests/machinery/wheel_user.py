# SPDX-License-Identifier: Apache-2.0
"""Uses an installed wheel as its users would, without a compiler, and prints the result as JSON.

    python -I tests/machinery/wheel_user.py

This script is run by `tests.machinery.wheel_check`, and by cibuildwheel in its containers. It does
not import the checkout. Without torch, the script only uses the control plane. Without the packages
of the extra `serve`, it does not serve a model.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from importlib.metadata import version
from pathlib import Path

# The expected hashes of two blocks of 16 tokens, computed with hashlib and cbor2.
HASHES = [
    "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749",
    "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c",
]
COMPILERS = ("g++", "clang++", "c++", "gcc", "cc", "nvcc", "ninja", "cmake")
BIN = Path(sys.executable).parent
SERVED = ("kvcache_serve", "torch", "transformers", "fastapi", "uvicorn", "prometheus_client")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["PATH"] = str(BIN)
        os.environ["KVCACHE_JIT_DIR"] = os.path.join(scratch, "jit")
        found = [name for name in COMPILERS if shutil.which(name)]
        assert not found, f"{BIN} has compilers: {found}"
        os.chdir(scratch)
        done = {"python": sys.version.split()[0], "version": cli_version()}
        done["control plane"] = control_plane()
        if has("torch"):
            done |= data_plane()
        if all(map(has, SERVED)):
            done["served"] = served()
        assert not os.path.exists("jit"), "a library was built at run time"
    print(json.dumps(done))


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def cli(*arguments: str) -> str:
    command = [str(BIN / "kvcache"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: exit code {done.returncode}: {done.stderr}"
    return done.stdout


def cli_version() -> str:
    printed = cli("--version")
    assert printed == f"kvcache {version('torch-kvcache')}\n", printed
    return printed.split()[1]


def control_plane() -> str:
    """Check hashes and a prefix hit, without torch."""
    import kvcache

    hashes = [bytes(each).hex() for each in kvcache.hash_blocks(range(32), 16)]
    assert hashes == HASHES, hashes
    manager = kvcache.KVCacheManager(16, 9, 100)
    for request_id, num_cached in (("first", 0), ("second", 32)):
        request = kvcache.Request(request_id, list(range(40)))
        step = manager.step(new=[request])
        assert int(step.num_computed_tokens[0]) == num_cached, step
        manager.free(request)
    if has("kvcache_lab"):
        replayed = json.loads(cli("replay", "--requests", "30", "--json"))
        assert replayed["hit_tokens"] > 0, replayed
    return "ok"


def data_plane() -> dict[str, str]:
    """Write and read back KV with the ops of the shipped libraries."""
    import torch

    import kvcache
    from kvcache.native import load

    layer = kvcache.LayerSpec("layer", "full_attention", 16, num_kv_heads=2, head_size=64)
    plan = kvcache.plan_cache([layer], budget_bytes=2**20, max_model_len=256)
    cache = kvcache.build(plan, max_num_reqs=4)
    step = cache.manager.step(new=[kvcache.Request("request", list(range(100)))])
    cache.worker.apply(step)
    cache.tables.compute_slot_mapping([step.rows[0]] * 100, list(range(100)))
    cache.tables.commit_slot_mapping(num_tokens=100)
    key, value = torch.randn(2, 100, 2, 64).bfloat16()
    cache.write("layer", key, value)
    keys, values = cache.gather("layer", cache.slots("layer", 100))
    assert torch.equal(keys, key) and torch.equal(values, value)

    replayed = json.loads(cli("replay", "--requests", "30", "--verify", "--json"))
    assert replayed["mismatches"] == 0 < replayed["verified_tokens"], replayed

    site = Path(kvcache.__file__).parent
    libraries = load.describe()
    expected = ["_core", "libkvcache_cpu"]
    if torch.version.cuda and (site / "libkvcache_cuda.so").exists():
        expected.append("libkvcache_cuda")
    for name in expected:
        assert libraries[name].startswith(f"ahead of time, {site}"), libraries
    return {"torch": torch.__version__, "ops": " and ".join(expected[1:])}


def served() -> str:
    """Serve a tiny model with random weights, and complete a prompt."""
    server = subprocess.Popen(
        [str(BIN / "kvcache"), "serve", "llama", "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        lines = iter(server.stderr.readline, "")
        url = next(filter(None, (re.search(r"http://\S+/v1", line) for line in lines)))[0]
        body = json.dumps({"model": "llama", "prompt": "a prompt", "max_tokens": 8}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/completions", body, headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            usage = json.load(response)["usage"]
        assert usage["completion_tokens"] == 8, usage
    finally:
        server.terminate()
        server.wait(30)
    return "8 tokens"


if __name__ == "__main__":
    main()
