# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers with kvcache's manager."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import async_scheduler
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine import core as engine_core
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput

from kvcache import __version__
from kvcache_vllm.comparison import DecisionsDiffer, compare_managers
from kvcache_vllm.compatibility import (
    TESTED,
    accept_new_parameters,
    check_version,
    is_tested,
    missing_attributes,
)
from kvcache_vllm.connectors import each_connector, what_it_lacks
from kvcache_vllm.hashing import get_request_block_hasher, hash_bytes_of
from kvcache_vllm.known_sources import has_known_sources
from kvcache_vllm.manager import VllmCacheManager
from kvcache_vllm.metrics import add_counts
from kvcache_vllm.refusals import refused
from kvcache_vllm.steady import SteadySteps

_OPTIONS = ("eviction", "eviction_options")
_log = logging.getLogger("vllm.kvcache")  # a child of vllm's logger, so that messages are shown


class _WithManager:
    """Replace the manager class that vLLM's scheduler looks up by name in its module."""

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        # The engine core looks up this function by name after it has created the scheduler.
        engine_core.get_request_block_hasher = get_request_block_hasher
        own = (vllm_config.additional_config or {}).get("kvcache", {})
        if not isinstance(own, dict):
            raise ValueError(
                f"additional_config has {own!r} for kvcache: expected options, for "
                'example {"kvcache": {"eviction": "learned"}}'
            )
        for name in own:
            if name not in _OPTIONS:
                raise ValueError(
                    f"additional_config has the option {name!r} for kvcache: expected "
                    f"{' or '.join(_OPTIONS)}; vLLM sets the other options"
                )
        aux_outputs = getattr(vllm_config, "aux_output_config", None)
        if aux_outputs is not None and aux_outputs.enabled:
            raise refused("auxiliary outputs", "aux_output_config is enabled")
        accept_new_parameters(VllmCacheManager, KVCacheManager)
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        arguments: dict[str, Any] = {}

        def make_manager(**given: Any) -> VllmCacheManager:
            arguments.update(given)
            return VllmCacheManager(**given, hash_bytes=hash_bytes_of(algorithm), options=own)

        theirs = vllm_scheduler.KVCacheManager
        vllm_scheduler.KVCacheManager = make_manager
        try:
            super().__init__(vllm_config, *args, **options)
        finally:
            vllm_scheduler.KVCacheManager = theirs
        self._check_start(make_manager, dict(arguments), algorithm)
        # Prefill chunks end at positions where a state is kept. States that the worker would keep
        # inside a chunk are written to the null block.
        self.mamba_has_prefill_checkpoint_blocks = False
        for connector in each_connector(self.connector):
            if what := what_it_lacks(connector, self.kv_cache_manager):
                name = "stored states" if what.startswith("stores") else "connector"
                raise refused(name, f"kv_connector is {type(connector).__name__}, which {what}")
        self.kv_cache_manager.ask_who_waits(lambda: bool(self.waiting))
        self.steady: SteadySteps | None = None
        if has_known_sources(type(self), _WithManager):
            is_async = isinstance(self, async_scheduler.AsyncScheduler)
            self.steady = SteadySteps(self, is_async=is_async)
        else:
            _log.debug(
                "This version of vLLM's scheduler is unknown, so vLLM's code schedules every step"
            )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step. Steady decode steps bypass vLLM's code."""
        if self.steady is not None:
            scheduled = self.steady.schedule(throttle_prefills)
            if scheduled is not None:
                return scheduled
        return super().schedule(throttle_prefills)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process a step's output.

        For plain tokens of steady decode steps, vLLM's code is bypassed.
        """
        if self.steady is not None:
            outputs = self.steady.update(scheduler_output, model_runner_output)
            if outputs is not None:
                return outputs
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args: Any, **options: Any) -> SchedulerStats | None:
        """Add the counts of kvcache's manager to vLLM's statistics."""
        stats = super().make_stats(*args, **options)
        if stats is not None:
            add_counts(stats, self.kv_cache_manager.counts())
        return stats

    def _check_start(
        self, make_manager: Callable[..., Any], arguments: dict[str, Any], algorithm: str
    ) -> None:
        """Check the interfaces that vLLM's schedulers use, compare both managers, and log the
        result.

        Raises:
            ValueError: An interface is missing, or the managers differ.
        """
        found, manager = check_version(), self.kv_cache_manager
        missing = missing_attributes(manager, (vllm_scheduler, async_scheduler))
        if missing:
            raise ValueError(
                f"vLLM {found} uses {', '.join(missing)} of its KV cache manager, which kvcache "
                f"{__version__} does not have: serve with vLLM's own scheduler, or update kvcache"
            )
        try:
            compared = compare_managers(KVCacheManager, make_manager, arguments, algorithm)
        except DecisionsDiffer as error:
            if not is_tested(found):
                raise ValueError(
                    f"kvcache's manager and vLLM's own differ at startup ({error}), and kvcache "
                    f"{__version__} is not tested with vLLM {found}: serve with vLLM's own scheduler, "
                    "or update kvcache"
                ) from None
            _log.warning(
                "kvcache %s manages the KV cache of vLLM %s: %s. Hits and evictions of this model can "
                "differ from those with vLLM's manager, but answers do not (%s)",
                *(__version__, found, manager.described(), error),
            )
            self.compared = str(error)
            return
        self.compared = compared
        _log.info(
            "kvcache %s manages the KV cache of vLLM %s: %s. Compared with vLLM's manager: %d requests "
            "in %d steps, %d hit tokens, no difference (%.2f s)",
            *(__version__, found, manager.described(), compared.num_requests),
            *(compared.num_steps, compared.num_hit_tokens, compared.seconds),
        )
        if not is_tested(found):
            _log.warning(
                "kvcache %s is tested with vLLM %s, but vLLM %s is installed. It has all required "
                "interfaces, and the comparison found no difference%s",
                *(__version__, " and ".join(TESTED), found),
                "" if compared.num_hit_tokens else ". It had no hits to compare",
            )


class VllmScheduler(_WithManager, vllm_scheduler.Scheduler):
    """vLLM's scheduler with kvcache's manager."""


class VllmAsyncScheduler(_WithManager, async_scheduler.AsyncScheduler):
    """vLLM's asynchronous scheduler with kvcache's manager."""
