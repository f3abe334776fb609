import subprocess
import sys

import pytest
import torch

from tests.shared import REPO


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine lacks nothing")
def test_make_gpu_names_what_the_machine_lacks(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--results", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=REPO,
    )
    assert done.returncode == 1
    assert "make gpu: this machine lacks" in done.stderr
    assert "CUDA" in done.stderr and not list(tmp_path.iterdir())
