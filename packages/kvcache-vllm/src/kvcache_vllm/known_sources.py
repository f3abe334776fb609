# SPDX-License-Identifier: Apache-2.0
"""Source digests of the vLLM scheduler methods that `steady.py` reimplements.

If a release changes one of these methods, or a subclass overrides one, every step is scheduled by
that release's or subclass's code. To support a new version, review its changes to these methods,
update `steady.py` where needed, run `test_vllm_steady.py`, and add the digests that
`sources_digest` returns.
"""

from __future__ import annotations

import hashlib
import inspect

from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

# Source digests of vLLM's scheduler and asynchronous scheduler.
KNOWN_SOURCES = {
    "0.32.0": (
        "3b6b7482096f33d126d1ed869752d24af91f5202231efe2195d53918b6bbfee4",
        "3278d7dd11533d8c7a223d3c057e28fe82a671e58e3a13f73daea22d3a304aef",
    ),
    "0.33.0": (
        "9530b0280fc27ff51ced88acad15dd061dab8f491fdb50f75c310793441d737a",
        "e1bcbf2d9540cceb871be8e07a51f30c83d4dc203d33a55b58f5d7f2ba36f598",
    ),
}
_METHODS = (
    "schedule",
    "update_from_output",
    "get_request_counts",
    "make_stats",
    "_drafts_unused",
    "_free_blocks",
    "_free_request",
    "_free_request_blocks",
    "_get_encoder_input_updates",
    "_get_new_block_ids_to_zero",
    "_handle_stopped_request",
    "_make_cached_request_data",
    "_make_scheduled_encoder_input_stats",
    "_mamba_block_aligned_split",
    "_reserve_prefill_lookahead",
    "_try_schedule_encoder_inputs",
    "_update_after_schedule",
    "_update_request_with_output",
)
_OTHERS = (
    *(
        vllm_scheduler.check_stop,
        vllm_scheduler.remove_all,
        vllm_scheduler.StructuredOutputManager.accept_tokens,
    ),
    *(Request, ModelRunnerOutput, SchedulerOutput, CachedRequestData),
    *(EngineCoreOutput, EngineCoreOutputs),
)


def sources_digest(scheduler: type, without: type) -> str:
    """Return the digest of the reimplemented methods, as resolved in the class `scheduler`.

    `without`: the class that calls the reimplementation. Methods defined in this class are ignored.
    """
    classes = [each for each in scheduler.__mro__ if each is not without]
    found = [vars(each)[name] for name in _METHODS for each in classes if name in vars(each)]
    sources = [inspect.getsource(each) for each in (*found, *_OTHERS)]
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()


def has_known_sources(scheduler: type, without: type) -> bool:
    """Return whether steady steps may replace vLLM's code in this scheduler class."""
    try:
        digest = sources_digest(scheduler, without)
    except (OSError, TypeError):  # no source code is available, or a method is not a function
        return False
    return any(digest in each for each in KNOWN_SOURCES.values())
