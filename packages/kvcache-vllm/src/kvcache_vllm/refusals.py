# SPDX-License-Identifier: Apache-2.0
"""What kvcache's scheduler for vLLM refuses at startup: the errors, and the table in docs/vllm.md."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """A configuration, in Markdown: what it is, why it is refused, and what to do instead."""

    what: str
    reason: str
    instead: str = ""


_OWN_POOL = "vLLM reads them from its own block pool"
REFUSALS = {
    "RSWASpec": Refusal(
        "KV cache groups of `RSWASpec`",
        "blocks between the prompt and the window of the answer are freed",
    ),
    "SinkFullAttentionSpec": Refusal(
        "KV cache groups of `SinkFullAttentionSpec`",
        "the pool's first blocks are kept for the sinks",
    ),
    "HiSparseHotSpec": Refusal(
        "KV cache groups of `HiSparseHotSpec`", "their blocks depend on pages in host memory"
    ),
    "HiSparseResidentSpec": Refusal(
        "KV cache groups of `HiSparseResidentSpec`", "their blocks depend on pages in host memory"
    ),
    "EncoderOnlyAttentionSpec": Refusal(
        "KV cache groups of `EncoderOnlyAttentionSpec`", "they have no KV cache"
    ),
    "another group": Refusal(
        "KV cache groups of a kind that kvcache does not know",
        "their rules for hits and freed blocks are unknown",
        "update kvcache",
    ),
    "replayed windows": Refusal(
        "windows that are recomputed after a hit (DeepSeek-V4.1)",
        "kvcache's windows are cached",
        "use `--no-swa-bounded-replay`",
    ),
    "drafts in mode all": Refusal(
        "drafts of models with Mamba in mode `all` (vLLM 0.32)",
        "states of rejected drafts are not kept",
        "use `--mamba-cache-mode align`, or leave out `--speculative-config`",
    ),
    "modules of MTP": Refusal(
        "MTP with several modules",
        "each further module reads one more token ahead, and kvcache supports only one",
        "use one module",
    ),
    "shared checkpoints": Refusal(
        "`--enable-mamba-shared-prefix-checkpoint`",
        "states are kept only at the ends of chunks",
        "leave it out",
    ),
    "fine hashes": Refusal(
        "hashes finer than the blocks of states",
        "states are kept only at block boundaries",
        "use `--prefix-match-unit` with the state's block size",
    ),
    "auxiliary outputs": Refusal(
        "auxiliary outputs (`--enable-return-routed-experts`)", _OWN_POOL, "leave them out"
    ),
    "metrics of blocks": Refusal(
        "metrics of single blocks (`--kv-cache-metrics`)", _OWN_POOL, "use the `kvcache:` metrics"
    ),
    "connector": Refusal(
        "connectors that read more of vLLM's KV cache manager than kvcache's has: HiSparse, "
        "`SimpleCPUOffloadConnector` with `lazy_offload`, and others, of which the error lists what "
        "they read",
        "answers could be wrong",
        "choose another connector",
    ),
    "stored states": Refusal(
        "connectors that store states of Mamba in `align` mode: `OffloadingConnector`, "
        "`SimpleCPUOffloadConnector`, the store of Mooncake, UMBP",
        "kvcache's manager does not hand over states at block boundaries (`boundary_state_offloads`)",
        "leave out the connector",
    ),
}


def refused(name: str, found: str) -> ValueError:
    """Return the error for a refused configuration.

    Args:
        name: Key of `REFUSALS`.
        found: What was found, as the start of the message.
    """
    what, reason, instead = REFUSALS[name]
    instead = f"{instead}, or " if instead else ""
    text = (
        f"{found}: kvcache's scheduler for vLLM does not support {what}, because {reason}; {instead}"
        "serve with vLLM's own scheduler"
    )
    return ValueError(text.replace("`", ""))


def table() -> str:
    """Return the rows of the table in docs/vllm.md."""
    return "".join(f"| {' | '.join(each)} |\n".replace("  ", " ") for each in REFUSALS.values())
