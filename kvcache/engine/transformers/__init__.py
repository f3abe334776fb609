# SPDX-License-Identifier: Apache-2.0
"""Runs Hugging Face transformers models whose K, V and recurrent states are stored in a `KVCache`.

Requires the package `transformers` (`pip install 'torch-kvcache[transformers]'`).
"""

try:
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "kvcache.engine.transformers needs the package transformers: "
        "pip install 'torch-kvcache[transformers]'",
        name="transformers",
    ) from None

from kvcache.engine.transformers.layer_shapes import layer_specs
from kvcache.engine.transformers.paged_model import PagedModel, attach
from kvcache.engine.transformers.unsupported import UnsupportedModel

__all__ = ["PagedModel", "UnsupportedModel", "attach", "layer_specs"]
