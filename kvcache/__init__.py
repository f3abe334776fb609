# SPDX-License-Identifier: Apache-2.0
"""kvcache: the KV-cache layer of an LLM inference engine as a library.

Public names are imported on first use. The control plane (`BlockPool`, `KVCacheManager`, `Request`,
`hash_blocks`, `StepPlan`) does not need torch. The data plane (`BlockTables`, `KVStorage`, `Worker`,
`ops`), and `build`, which creates both planes, import torch.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
