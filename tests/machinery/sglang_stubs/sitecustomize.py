# SPDX-License-Identifier: Apache-2.0
"""Declares two torchvision operators.

The torchvision package on PyPI is built for CUDA. With a CPU build of torch, the package's library
cannot be loaded, so the package's Python files fail to register kernels for operators that were not
declared.
"""

import os

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    try:
        import torch
    except ImportError:
        pass
    else:
        _library = torch.library.Library("torchvision", "DEF")
        for _name in ("nms", "qnms"):
            _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
