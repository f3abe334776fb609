# SPDX-License-Identifier: Apache-2.0
"""Offers in the `kv_transfer_params` of vLLM's requests and responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcache_exchange.disaggregation.offer import Offer

_KEY = "kvcache"


def params_of(offer: Offer) -> dict[str, Any]:
    """Return the offer as JSON values.

    Besides the offer, the values contain the keys that proxies read and that vLLM's own connectors
    also set.
    """
    return {"do_remote_prefill": True, "do_remote_decode": False, _KEY: offer.to_dict()}


def offer_in(params: Mapping[str, Any] | None) -> Offer | None:
    """Return the offer in a request's `kv_transfer_params`, or None if there are no parameters.

    Raises ValueError under the same conditions as `Offer.from_dict`, and if the parameters are from
    another connector.
    """
    if not isinstance(params, Mapping) or not params.get("do_remote_prefill"):
        return None
    if (own := params.get(_KEY)) is None:
        raise ValueError(
            f"kv_transfer_params have {sorted(params)}: expected {_KEY!r}, as returned by a producer "
            "with this connector; use the same connector in both engines"
        )
    return Offer.from_dict(own)
