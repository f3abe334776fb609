# SPDX-License-Identifier: Apache-2.0
"""Offers in the `custom_params` of SGLang's requests and the `meta_info` of its responses.

`custom_params` holds JSON values without nesting, so an offer is passed as text:

    {"kvcache": "offer"}          asks for an offer, which is in meta_info["kvcache"] of the response
    {"kvcache": "{\\"version\\": ...}"}  the offer of another engine
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvcache_exchange.disaggregation.offer import Offer

KEY = "kvcache"
ASK = "offer"


def value_of(custom_params: Any) -> Any:
    """Return this plug-in's value in a request's `custom_params`, or None."""
    return custom_params.get(KEY) if isinstance(custom_params, Mapping) else None


def offer_in(text: Any) -> Offer:
    """Return the offer in a request. Raises ValueError if the value is not an offer."""
    try:
        values = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(
            f"custom_params[{KEY!r}] is not JSON: expected {ASK!r} or another engine's offer as JSON"
        ) from None
    return Offer.from_dict(values)


def text_of(offer: Offer) -> str:
    """Return an offer as text for `custom_params`."""
    return json.dumps(offer.to_dict())


def offer_of(meta_info: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the offer in the `meta_info` of a response, or None if there is none.

    Args:
        meta_info: `meta_info` of SGLang's response to a request that asked for an offer.

    Returns:
        Plain values. In a request to vLLM, pass them as `kv_transfer_params["kvcache"]`, together
        with `"do_remote_prefill": True`.

    Example:
        >>> offer_of({"kvcache": [None, '{"version": 4}']})
        {'version': 4}
    """
    found: Sequence[str | None] = meta_info.get(KEY) or ()
    texts = [each for each in found if each is not None]
    return json.loads(texts[-1]) if texts else None


def params_for(offer: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the `custom_params` of a request that loads an offer. If `offer` is None, the request
    asks for an offer instead.

    Args:
        offer: An offer as plain values: `offer_of(meta_info)` of SGLang, or
            `kv_transfer_params["kvcache"]` of vLLM.

    Example:
        >>> params_for(None)
        {'kvcache': 'offer'}
    """
    return {KEY: ASK if offer is None else json.dumps(offer)}
