# SPDX-License-Identifier: Apache-2.0
"""The C++ caller in docs/ops.md."""

import re

import pytest
import torch
from torch.utils import cpp_extension

import kvcache.ops  # noqa: F401  (registers the ops)
from tests.machinery.shared import REPO


@pytest.mark.exhaustive  # compiles torch's headers
def test_documented_cpp_caller_writes_tokens(tmp_path):
    code = re.search(r"```cpp\n(.*?)```", (REPO / "docs" / "ops.md").read_text(), re.DOTALL)[1]
    source = f"#include <torch/torch.h>\n{code}"
    options = {"functions": ["write_tokens"], "extra_cflags": ["-O0"]}
    module = cpp_extension.load_inline(
        "documented_caller", source, build_directory=str(tmp_path), **options
    )
    key, value = torch.randn(2, 2, 1, 4)
    caches = [torch.zeros(3, 4, 1, 4) for _ in range(2)]
    module.write_tokens(key, value, *caches, torch.tensor([5, 6]))
    for cache, tokens in zip(caches, (key, value)):
        assert torch.equal(cache.view(12, 1, 4)[5:7], tokens)
        assert cache.count_nonzero() == tokens.count_nonzero()
