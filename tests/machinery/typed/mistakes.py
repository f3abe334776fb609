# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: I001, B018, F401
"""Mistakes that callers make. Each of these lines ends with the error code that `mypy --strict`
reports for it.
"""

import torch

from kvcache import BlockPool, KVCacheManager, KVStorage, Pages, Request
from kvcache.compat import BlockSpaceManager
from kvcache import Manager  # error: [attr-defined]

manager = KVCacheManager("16", 9, 128)  # error: [arg-type]
KVCacheManager(16, 9, 128, evicton="lru")  # error: [call-arg]
KVCacheManager(16, 9)  # error: [call-arg]
request = Request(7, [1, 2])  # error: [arg-type]
manager.step(new=request)  # error: [arg-type]
manager.step(new=[request], read_cache=True)  # error: [call-arg]
manager.free("r1")  # error: [arg-type]
manager.block_id(request)  # error: [attr-defined]
manager.extend(request, 1.5)  # error: [arg-type]
length: str = manager.num_computed_tokens(request)  # error: [assignment]

storage = KVStorage(9, 16, 2, 8, layuot="HND")  # error: [call-arg]
storage.write(0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))  # error: [call-arg]
storage.write("l", torch.zeros(1, 2, 8), None, torch.zeros(1))  # error: [arg-type]
Pages.allocate(4, 64)  # error: [arg-type]

pool = BlockPool(num_block=5)  # error: [call-arg]
pool.release(pool.allocate(2))  # error: [arg-type]
pool.retain("1")  # error: [arg-type]

sequences = BlockSpaceManager(16, 9)  # error: [call-arg]
sequences.append_slots([1, 2], 0)  # error: [arg-type]
sequences.get_block_tables  # error: [attr-defined]
fits: str = sequences.can_append_slots(sequences, 0)  # error: [arg-type, assignment]
