# SPDX-License-Identifier: Apache-2.0
"""Loads models for commands: tiny models by name, checkpoints by folder."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kvcache.cli.errors import UsageError, quoted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


def load_model(
    name: str, option: str, dtype: str = "float32", device: str = "cpu"
) -> PreTrainedModel:
    """Load a tiny model in float64, so that answers do not differ by rounding, or a checkpoint folder.

    Raises UsageError, which names `option`, if the model cannot be loaded.
    """
    import torch

    # Warnings of transformers about its own optional dependencies are irrelevant here.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from kvcache.engine.transformers.tiny_models import tiny_model, tiny_model_names

    given = f"{option} is {quoted(name)}"
    if name in tiny_model_names():
        _log.info("building %s with random weights on %s", name, device)
        torch.set_num_threads(1)  # more threads slow down such small matrix products
        return tiny_model(name, dtype=torch.float64).to(device)
    if not os.path.isdir(name):
        raise UsageError(
            f"{given}: expected one of {', '.join(tiny_model_names())}, or the folder "
            "of a checkpoint (for example of `hf download ORG/MODEL --local-dir FOLDER`)"
        )
    _log.info("loading %s in %s on %s", name, dtype, device)
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{given}: expected the folder of a checkpoint that transformers loads ({error})"
        ) from None
    return model.to(device).eval()
