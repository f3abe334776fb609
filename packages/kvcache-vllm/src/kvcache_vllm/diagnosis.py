# SPDX-License-Identifier: Apache-2.0
"""`kvcache doctor --vllm`: checks whether vLLM can serve a model with kvcache's scheduler.

Starts vLLM's engine core with an executor that has no workers. The model is created on PyTorch's `meta`
device, so no weights are read and no memory is needed for them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.parallel_state import (
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import get_open_port
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

from kvcache_vllm.comparison import StartupComparison
from kvcache_vllm.compatibility import check_version, is_tested
from kvcache_vllm.connectors import what_connector_lacks
from kvcache_vllm.disaggregation.connector import KVCacheConnector
from kvcache_vllm.offloading.options import HostTierOptions
from kvcache_vllm.offloading.spec import KVCacheOffloadingSpec

_SCHEDULERS = {
    False: "kvcache_vllm.VllmScheduler",
    True: "kvcache_vllm.VllmAsyncScheduler",
}
_MEMORY = 64 << 30  # KV cache size in bytes; affects only the number of blocks


def diagnose(arguments: Sequence[str]) -> list[tuple[str, str, bool]]:
    """Return rows of (component, finding, whether kvcache supports it).

    A model that vLLM cannot create on this machine is undecided.

    Args:
        arguments: The arguments of `vllm serve`: a model, or a folder with its `config.json`, and
            options. Only the groups of one worker are reported, because all parallel workers have
            the same kinds of groups.
    """
    found = check_version()
    version = found if is_tested(found) else f"{found}, which the tests of kvcache do not cover"
    rows = [("vLLM", version, True)]
    try:
        config, sizes = _config(arguments)
    except Exception as error:  # vLLM may raise any exception for its options
        return [*rows, ("options", f"vLLM rejects them: {_one_line(error)}", False)]
    rows.append(("model", f"{config.model_config.architecture}, {config.model_config.dtype}", True))
    connector = config.kv_transfer_config
    config.kv_transfer_config = None  # connectors may listen on ports
    scheduler = None
    try:
        scheduler = _scheduler(config)
        rows.append(("KV cache", scheduler.kv_cache_manager.described(), True))
        rows.append(("comparison", _described(scheduler.compared), True))
    except Exception as error:
        # vLLM's own errors are, for example, those of models that need a GPU or a tokenizer.
        is_refusal, text = _is_refusal(error), _one_line(error)
        if not (is_refusal and isinstance(error, ValueError)):
            text = f"vLLM cannot create the model here: {type(error).__name__}: {text}"
        rows.append(("KV cache", text, not is_refusal))
    finally:
        destroy_model_parallel()
    if connector is not None:
        rows.append(_connector_row(connector, scheduler, config, sizes))
    if config.speculative_config is not None:
        method = config.speculative_config.method
        rows.append(("drafts", f"{method}; layers of a drafter are not included here", True))
    rows.append(_conclusion(config, all(ok for _, _, ok in rows), is_known=scheduler is not None))
    return rows


def _is_refusal(error: Exception) -> bool:
    """Return whether kvcache refuses a model, or its configuration has values that no model has."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    is_ours = isinstance(error, ValueError) and module.partition(".")[0].startswith("kvcache")
    return is_ours or isinstance(error, ArithmeticError | LookupError)


def _described(compared: StartupComparison | str) -> str:
    if isinstance(compared, str):
        return f"hits and evictions can differ from those with vLLM's manager: {compared}"
    return (
        f"{compared.num_requests} requests in {compared.num_steps} steps, {compared.num_hit_tokens} "
        "hit tokens: no difference from vLLM's manager"
    )


def _conclusion(
    config: VllmConfig, is_served: bool, is_known: bool = True
) -> tuple[str, str, bool]:
    if not is_served:
        return "conclusion", "serve with vLLM's own scheduler, or change what is named above", False
    name = _SCHEDULERS[bool(config.scheduler_config.async_scheduling)]
    if not is_known:
        text = f"undecided: --scheduler-cls {name} checks the model's cache when vLLM starts"
        return "conclusion", text, True
    return "conclusion", f"serve with --scheduler-cls {name}", True


def _config(arguments: Sequence[str]) -> tuple[VllmConfig, dict[str, int]]:
    """Return vLLM's configuration reduced to one worker, and the worker counts that were given."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    except SystemExit as end:
        if not end.code:  # --help
            raise
        raise ValueError(said.getvalue().strip().rpartition("error: ")[2]) from None
    names_model = any(each.partition("=")[0] in ("--model", "--config") for each in arguments)
    if not options.model_tag and not names_model:
        raise ValueError("expected a model, or a folder with its config.json")
    options.model = options.model_tag or options.model
    kinds = ("tensor", "pipeline", "data", "decode_context", "prefill_context")
    sizes = {f"{kind}_parallel_size": getattr(options, f"{kind}_parallel_size") for kind in kinds}
    for name in sizes:
        setattr(options, name, 1)
    engine = EngineArgs.from_cli_args(options)
    engine.skip_tokenizer_init, engine.load_format = True, "dummy"
    return engine.create_engine_config(), sizes


def _scheduler(config: VllmConfig) -> Any:
    scheduler = config.scheduler_config
    scheduler.scheduler_cls = _SCHEDULERS[bool(scheduler.async_scheduling)]
    return EngineCore(config, _NoWorkers, log_stats=False).scheduler


class _NoWorkers(Executor):
    """Replaces the workers, which the engine core queries before it creates the scheduler."""

    def _init_executor(self) -> None:
        config = self.vllm_config
        self._worker = _Worker(config)
        current_platform.import_kernels()
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                address = f"tcp://127.0.0.1:{get_open_port()}"
                init_distributed_environment(1, 0, address, 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            before = torch.get_default_dtype()
            torch.set_default_dtype(config.model_config.dtype)
            try:
                with torch.device("meta"):
                    initialize_model(vllm_config=config)
            finally:
                torch.set_default_dtype(before)
            current_platform.update_block_size_for_backend(config)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        with set_current_vllm_config(self.vllm_config):
            return [getattr(self._worker, method)(*args, **(kwargs or {}))]

    def compile_or_warm_up_model(self) -> None:
        pass

    def check_health(self) -> None:
        pass


class _Worker(WorkerBase):
    def __init__(self, config: VllmConfig) -> None:
        self.vllm_config = config
        self.shared_kv_cache_layers: dict[str, str] = {}

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return GPUModelRunner.get_kv_cache_spec(self)

    def determine_available_memory(self) -> int:
        return _MEMORY

    def initialize_from_config(self, _: Any) -> None:
        pass

    def update_max_model_len(self, _: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_options: None


def _connector_row(
    transfer: Any, scheduler: Any, config: VllmConfig, sizes: dict[str, int]
) -> tuple[str, str, bool]:
    name, names, lacks = transfer.kv_connector, [], []
    try:
        for each in [*_combined(transfer)]:
            name = each.kv_connector
            names.append(name)
            if what := _lacks(each, config, sizes, scheduler):
                lacks.append(f"{name} {what}")
    except Exception as error:
        return "connector", f"{name}: {_one_line(error)}", False
    return "connector", "; ".join(lacks) or ", ".join(names), not lacks


def _combined(transfer: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """Return the configuration of each connector that a MultiConnector combines, or only `transfer`."""
    connector = KVConnectorFactory.get_connector_class(transfer)
    if not issubclass(connector, MultiConnector):
        yield transfer
        return
    given = transfer.kv_connector_extra_config.get("connectors")
    if not isinstance(given, list) or not given:
        raise ValueError(
            f"connectors is {given!r}: expected a list of configurations of connectors"
        )
    for i, each in enumerate(given):
        if not isinstance(each, dict) or "kv_connector" not in each:
            raise ValueError(
                f"connectors[{i}] is {each!r}: expected a dictionary with kv_connector"
            )
        yield from _combined(KVTransferConfig(**{"engine_id": transfer.engine_id, **each}))


def _lacks(
    transfer: KVTransferConfig, config: VllmConfig, sizes: dict[str, int], scheduler: Any
) -> str:
    """Return why a connector cannot be used, or "". Raises an exception if its options are invalid."""
    connector = KVConnectorFactory.get_connector_class(transfer)
    if issubclass(connector, KVCacheConnector):
        KVCacheConnector.checked_options(transfer, SimpleNamespace(**sizes), config.cache_config)
    if issubclass(connector, OffloadingConnector):
        spec = OffloadingSpecFactory.get_spec_cls(transfer.kv_connector_extra_config)
        if issubclass(spec, KVCacheOffloadingSpec):
            HostTierOptions.of(transfer.kv_connector_extra_config)
    if scheduler is None:
        return ""
    options = transfer.kv_connector_extra_config or {}
    return what_connector_lacks(connector, options, scheduler.kv_cache_manager)


def _one_line(error: BaseException) -> str:
    """Return the message without line breaks.

    Messages from pydantic are stripped of their headline and link.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not re.match(r"\d+ validation error|For further", line)]
    return " ".join(kept or lines)[:500] or type(error).__name__


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
