"""Models that commands run: tiny ones by name, checkpoints by folder."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kvcache.cli.errors import UsageError, quoted

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_model(
    name: str, option: str, dtype: str = "float32", device: str = "cpu"
) -> PreTrainedModel:
    """A tiny model in float64, so that no rounding tells answers apart; or a checkpoint's folder.

    UsageError, which names `option`, for what cannot be loaded.
    """
    import torch

    # What transformers says of optional parts of its own means nothing here.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from kvcache.integrations.transformers.tiny_models import tiny_model, tiny_model_names

    given = f"{option} is {quoted(name)}"
    if name in tiny_model_names():
        torch.set_num_threads(1)  # products so small are slower with more
        return tiny_model(name, dtype=torch.float64).to(device)
    if not os.path.isdir(name):
        raise UsageError(f"{given}: expected one of {', '.join(tiny_model_names())}, or a folder")
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{given}: expected the folder of a checkpoint that transformers loads ({error})"
        ) from None
    return model.to(device).eval()
