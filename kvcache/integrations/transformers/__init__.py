"""Models of Hugging Face transformers whose K, V and states lie in a `KVCache`.

Needs the package `transformers` (`pip install kvcache[transformers]`).
"""

try:
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "kvcache.integrations.transformers needs the package transformers: "
        "pip install 'kvcache[transformers]'",
        name="transformers",
    ) from None

from kvcache.integrations.transformers.layer_shapes import layer_specs
from kvcache.integrations.transformers.paged_model import PagedModel, attach
from kvcache.integrations.transformers.unsupported import UnsupportedModel

__all__ = ["PagedModel", "UnsupportedModel", "attach", "layer_specs"]
