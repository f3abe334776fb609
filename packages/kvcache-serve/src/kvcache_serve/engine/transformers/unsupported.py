# SPDX-License-Identifier: Apache-2.0
"""The error for models that cannot be served correctly."""

from __future__ import annotations

from transformers import PreTrainedModel


class UnsupportedModel(ValueError):
    """Raised by `attach` for a model whose answers would change on a paged cache.

    The message contains the model's class and the `reason`.
    """

    def __init__(self, model: PreTrainedModel, reason: str) -> None:
        super().__init__(f"model is a {type(model).__name__}, which cannot be served: {reason}")
        self.reason = reason
