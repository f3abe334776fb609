# SPDX-License-Identifier: Apache-2.0
"""A stand-in for SGLang's CPU kernels, which are not on PyPI. Llama models need only one of these
kernels.
"""

from collections.abc import Callable

import torch


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    slots: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the slots of each request to `req_to_token[row, start:stop]`."""
    counts = (stops - starts).tolist()
    for row, start, own in zip(rows.tolist(), starts.tolist(), slots.split(counts)):
        req_to_token[row, start : start + len(own)] = own.to(req_to_token.dtype)


def __getattr__(name: str) -> Callable:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: object, **options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on a CPU")

    return missing
