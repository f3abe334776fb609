# SPDX-License-Identifier: Apache-2.0
"""Creates and counts the receipts for hints."""

from __future__ import annotations

from collections.abc import Callable

from kvcache_exchange.hints.prefixes import HintedPrefix
from kvcache_exchange.hints.stats import HintStats
from kvcache_exchange.hints.vocabulary import Hint, Receipt


class PendingHint:
    """A submitted hint. `receipt` is None until the hint has been carried out or refused."""

    def __init__(self, hint: Hint, on_receipt: Callable[[Receipt], object] | None = None) -> None:
        self.hint = hint
        self.receipt: Receipt | None = None
        self._on_receipt = on_receipt

    def _answer(self, receipt: Receipt) -> None:
        self.receipt = receipt
        if self._on_receipt is not None:
            self._on_receipt(receipt)


class ReceiptWriter:
    """Creates an executor's receipts."""

    def __init__(self, stats: HintStats) -> None:
        self._stats = stats

    def carried_out(
        self,
        pending: PendingHint,
        prefix: HintedPrefix,
        num_tokens: int,
        reason: str | None = None,
        **more: object,
    ) -> None:
        """Create the receipt of a hint that was carried out for `num_tokens` tokens.

        `reason` is used only if tokens are missing, or if less time was granted than the hint
        requested.
        """
        hint = pending.hint
        has_all = num_tokens >= prefix.num_tokens
        is_shorter = hint.ttl_s is not None and more.get("ttl_s", hint.ttl_s) < hint.ttl_s
        is_done = has_all and not is_shorter
        receipt = Receipt(
            intent=hint.intent,
            status="done" if is_done else "partly",
            num_tokens=num_tokens,
            num_asked_tokens=prefix.num_asked_tokens,
            reason=None if is_done else reason or "the other blocks are not on the device",
            **more,
        )
        self._tell(pending, receipt)

    def refuse(self, pending: PendingHint, reason: str, num_asked: int = 0) -> PendingHint:
        """Create the receipt of a hint that was not carried out."""
        receipt = Receipt(
            intent=pending.hint.intent,
            status="refused",
            num_asked_tokens=num_asked,
            reason=reason,
        )
        self._tell(pending, receipt)
        return pending

    def _tell(self, pending: PendingHint, receipt: Receipt) -> None:
        self._stats.receipts[receipt.intent][receipt.status] += 1
        pending._answer(receipt)
