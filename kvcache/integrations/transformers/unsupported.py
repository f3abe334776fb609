"""The refusal of a model that cannot be served as it answers by itself."""

from __future__ import annotations

from transformers import PreTrainedModel


class UnsupportedModel(ValueError):
    """A model that `attach` refuses: over a paged cache its answers would not be its own.

    The message names the model's class and the reason. `reason` is the latter alone.
    """

    def __init__(self, model: PreTrainedModel, reason: str) -> None:
        super().__init__(f"model is a {type(model).__name__}, which cannot be served: {reason}")
        self.reason = reason
