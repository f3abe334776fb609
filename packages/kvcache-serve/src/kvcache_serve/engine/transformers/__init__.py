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
        "kvcache_serve.engine.transformers needs the package transformers: "
        "pip install 'torch-kvcache[transformers]'",
        name="transformers",
    ) from None

from kvcache_serve.engine.transformers.layer_shapes import layer_specs
from kvcache_serve.engine.transformers.paged_model import PagedModel, attach
from kvcache_serve.engine.transformers.unsupported import UnsupportedModel

__all__ = ["PagedModel", "UnsupportedModel", "attach", "layer_specs"]
