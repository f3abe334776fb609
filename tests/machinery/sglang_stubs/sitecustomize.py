# SPDX-License-Identifier: Apache-2.0
"""Declares two operators of torchvision.

torchvision on PyPI is built for CUDA. With a CPU build of torch, its library cannot be loaded, and its
Python files then fail to register kernels for operators that do not exist.
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
