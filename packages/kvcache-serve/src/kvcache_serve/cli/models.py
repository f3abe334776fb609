# SPDX-License-Identifier: Apache-2.0
"""Loads models for commands: tiny models and SmolLM2 by name, and checkpoints from a folder."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kvcache.cli.errors import MissingError, OutputError, UsageError, quoted
from kvcache.cli.output import say
from kvcache_exchange.cli.modules import require_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvcache.specs import LayerSpec

SMOLLM2 = "smollm2"

_log = logging.getLogger("kvcache.serve")


def load_model(
    name: str, option: str, dtype: str = "float32", device: str = "cpu"
) -> PreTrainedModel:
    """Load a checkpoint or a tiny model. Tiny models use float64, so rounding does not affect their
    answers.

    Raises:
        UsageError: The model is unknown or cannot be loaded. The message names the option `option`.
        MissingError: A required package is not installed.
        OutputError: The converted weights of SmolLM2 cannot be written.
    """
    import torch

    _silence_transformers()
    from kvcache_serve.engine.transformers.tiny_models import tiny_model, tiny_model_names

    given = f"{option} is {quoted(name)}"
    if name in tiny_model_names():
        _log.info("building %s with random weights on %s", name, device)
        torch.set_num_threads(1)  # more threads would slow down such small matrix products
        return tiny_model(name, dtype=torch.float64).to(device)
    folder = _smollm2_folder() if name == SMOLLM2 else name
    if not os.path.isdir(folder):
        names = (*tiny_model_names(), SMOLLM2)
        fetch = (
            f"; `hf download {name} --local-dir DIR` fetches one" if name.count("/") == 1 else ""
        )
        raise UsageError(f"{given}: expected one of {', '.join(names)}, or a folder{fetch}")
    _log.info("loading %s in %s on %s", name, dtype, device)
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{given}: expected the folder of a checkpoint that transformers loads ({error})"
        ) from None
    return model.to(device).eval()


def load_layers(name: str, option: str, block_size: int) -> tuple[list[LayerSpec], int]:
    """Return a model's layers and its maximum request length. No weights are loaded.

    Args:
        name: The name of a tiny model or of SmolLM2, or the path of a `config.json` or its folder.
        option: Name of the command line option, for error messages.
        block_size: Tokens per block of the layers.

    Raises:
        UsageError: The model is unknown, or its layers cannot be determined.
        MissingError: A required package is not installed.
        OutputError: The converted weights of SmolLM2 cannot be written.
    """
    require_module("transformers", option, "pip install 'torch-kvcache[transformers]'")
    import torch

    _silence_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    from kvcache_serve.engine.transformers import layer_specs
    from kvcache_serve.engine.transformers.paged_model import longest_request
    from kvcache_serve.engine.transformers.tiny_models import tiny_model, tiny_model_names

    given = f"{option} is {quoted(name)}"
    is_tiny = name in tiny_model_names()
    path = _smollm2_folder() if name == SMOLLM2 else name
    if not is_tiny and not os.path.exists(path):
        names = ", ".join((*tiny_model_names(), SMOLLM2))
        raise UsageError(f"{given}: expected one of {names}, or a config.json or its folder")
    try:
        if is_tiny:
            model = tiny_model(name)
        else:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            given_dtype = getattr(config, "dtype", None)
            # Engines serve float32 checkpoints in bfloat16.
            dtype = torch.float16 if given_dtype == torch.float16 else torch.bfloat16
            with torch.device("meta"):  # tensors have shapes, but no memory
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return layer_specs(model, block_size=block_size), longest_request(model)[0]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{given}: expected a configuration that transformers loads ({error})"
        ) from None


def load_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer from a checkpoint folder. Return None if the folder contains no
    tokenizer.
    """
    if not os.path.isdir(model.name_or_path):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True)
    except (OSError, ValueError):
        return None


def end_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the end tokens from the model's generation config and model config.

    For chat models, these files often define more end tokens than the tokenizer does.
    """
    ends: set[int] = set()
    for config in (model.generation_config, model.config, model.config.get_text_config()):
        given = getattr(config, "eos_token_id", None)
        ends.update(given if isinstance(given, list | tuple) else [given])
    # Some configs use -1 for "no end token".
    return tuple(sorted(end for end in ends if end is not None and end >= 0))


def _silence_transformers() -> None:
    """Hide transformers' progress bars, and its warnings about its optional dependencies."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _smollm2_folder() -> str:
    from kvcache_serve.engine.transformers.smollm2 import smollm2_folder

    try:
        return str(
            smollm2_folder(
                lambda folder: say(f"converting the weights of smollm2 once, into {folder}")
            )
        )
    except ModuleNotFoundError as error:
        raise MissingError(str(error)) from None
    except OSError as error:
        raise OutputError(f"smollm2 cannot be converted: {error}") from None
