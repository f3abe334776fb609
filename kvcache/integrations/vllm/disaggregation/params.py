"""Offers in the `kv_transfer_params` of vLLM's requests and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcache.disaggregation.offer import Offer

_KEY = "kvcache"


def params_of(offer: Offer) -> dict[str, Any]:
    """Values for JSON. The names of vLLM's own connectors beside them are for proxies."""
    return {"do_remote_prefill": True, "do_remote_decode": False, _KEY: offer.to_dict()}


def offer_in(params: Mapping[str, Any] | None) -> Offer | None:
    """The offer in a request's `kv_transfer_params`; None where there is none.

    ValueError as `Offer.from_dict`, and for the parameters of another connector.
    """
    if not isinstance(params, Mapping) or not params.get("do_remote_prefill"):
        return None
    if (own := params.get(_KEY)) is None:
        raise ValueError(
            f"kv_transfer_params have {sorted(params)}: expected {_KEY!r}, as a producer with this "
            "connector answers; use the same connector in both engines"
        )
    return Offer.from_dict(own)
