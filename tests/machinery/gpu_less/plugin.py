# SPDX-License-Identifier: Apache-2.0
"""Runs torch's own operators on CUDA tensors on the CPU, over the same memory, in stream order.

kvcache's kernels, copies and events go through the runtime. Torch's kernels cannot, since no device
can run their code. A call of an operator first drains its stream and then reads the inputs. The
results are written when the stream reaches the operator, later than the call, as on a device. During
graph capture, an operator is recorded as a host node, which runs the operator when the graph runs. An
operator that makes the host wait for a value or a shape is rejected in a capture, and is otherwise
handled as torch's sync debug mode specifies.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

_runtime = ctypes.CDLL(os.environ["KVCACHE_GPULESS_RUNTIME"], mode=ctypes.RTLD_GLOBAL)
_runtime.kvcache_gpuless_alias.restype = ctypes.c_void_p
_runtime.kvcache_gpuless_alias.argtypes = [ctypes.c_void_p]
_runtime.kvcache_gpuless_drain.argtypes = [ctypes.c_void_p]
_runtime.kvcache_gpuless_capture.argtypes = [
    *(ctypes.c_void_p, ctypes.CFUNCTYPE(None, ctypes.c_int64), ctypes.c_int64)
]
_runtime.kvcache_gpuless_is_capturing.argtypes = [ctypes.c_void_p]
_INTEGERS = ctypes.POINTER(ctypes.c_int64)
_runtime.kvcache_gpuless_write.argtypes = [
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, _INTEGERS, _INTEGERS),
]

_runtime.kvcache_gpuless_unbound_kernel.restype = ctypes.c_char_p
_runtime.kvcache_gpuless_unbound_kernel.argtypes = [ctypes.c_size_t]
_runtime.kvcache_gpuless_num_bound_kernels.restype = ctypes.c_size_t


def num_bound_kernels() -> int:
    """Return the number of kernels in the emulator."""
    return _runtime.kvcache_gpuless_num_bound_kernels()


def unbound_kernels() -> list[str]:
    """Return the names of this project's kernels that are in a loaded CUDA library but not in the
    emulator.
    """
    names: list[str] = []
    while (name := _runtime.kvcache_gpuless_unbound_kernel(len(names))) is not None:
        names.append(name.decode())
    return names


# Operators that launch nothing, or that the runtime itself executes.
NATIVE = {
    f"aten::{name}"
    for name in (
        "empty.memory_format",
        "empty_strided",
        "is_pinned",
        "_pin_memory",
        "lift_fresh",
        "record_stream",
        "resize_",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
    )
}


class CudaOnCpu(TorchDispatchMode):
    """While active in a thread, runs torch operators that take or create CUDA tensors on the CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # outside inference mode, torch itself decomposes before this call
                return func.decompose(*args, **kwargs)
        if not _is_ours(func, args, kwargs) or _is_one_copy(func, args, kwargs):
            return func(*args, **kwargs)
        stream = torch.cuda.current_stream().cuda_stream
        capturing = _runtime.kvcache_gpuless_is_capturing(stream)
        if (capturing or torch.cuda.get_sync_debug_mode()) and _waits_for_values(
            func, args, kwargs
        ):
            # This call raises the errors of CUDA captures and of torch's sync debug mode.
            torch.cuda.current_stream().synchronize()
        if capturing:
            return _capture(func, args, kwargs, stream)
        _runtime.kvcache_gpuless_drain(stream)
        return _run_on_cpu(func, args, kwargs, stream)


def _is_ours(func, args, kwargs) -> bool:
    name = func._schema.name + ("." if func._schema.overload_name else "")
    name += func._schema.overload_name
    if not name.startswith("aten::") or name in NATIVE:
        return False
    if func.is_view or torch.Tag.inplace_view in func.tags:
        return False
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return False  # the tensor is fake or of another subclass
    return _makes_cuda(kwargs) or any(t.device.type == "cuda" for t in tensors)


def _makes_cuda(kwargs) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cuda"


def _is_one_copy(func, args, kwargs) -> bool:
    """Whether torch implements this call as a single memcpy, which the runtime executes."""
    if func is torch.ops.aten.copy_.default:
        to, source = args[0], args[1]
        same = to.dtype == source.dtype and to.shape == source.shape
        return same and to.is_contiguous() and source.is_contiguous()
    if func is torch.ops.aten._to_copy.default:
        source = args[0]
        plain = kwargs.get("memory_format") in (None, torch.preserve_format)
        same = kwargs.get("dtype") in (None, source.dtype)
        return plain and same and source.is_contiguous()
    return False


def _waits_for_values(func, args, kwargs) -> bool:
    """Whether the call makes the host wait for the device because a value or shape depends on
    device data.
    """
    name = func._schema.name.removeprefix("aten::")
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        if not masks or name == "index":
            return bool(masks)
        # torch implements this case as masked_fill, which does not wait.
        fill = args[2].numel() == 1 and args[2].device.type == "cpu"
        return not (fill and sum(x is not None for x in args[1]) == 1)
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    return name == "_unique" or any(tag in func.tags for tag in tags)


def _run_on_cpu(func, args, kwargs, stream):
    """Run the operator on copies of its inputs, and write the results later, in stream order."""
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def to_cpu(tensor):
        if tensor.device.type != "cuda":
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = (_read(tensor), tensor)
        return copies[id(tensor)][0]

    cpu_args, cpu_kwargs = tree_map_only(torch.Tensor, to_cpu, (args, kwargs))
    result_on_cuda = "device" not in kwargs or kwargs["device"] is None or _makes_cuda(kwargs)
    if _makes_cuda(kwargs):
        cpu_kwargs["device"] = torch.device("cpu")
        cpu_kwargs.pop("pin_memory", None)
    if "generator" in cpu_kwargs:
        cpu_kwargs["generator"] = None
    result = func(*cpu_args, **cpu_kwargs)
    given = {id(copy): tensor for copy, tensor in copies.values()}
    for changed in _mutated(func, args, kwargs):
        if id(changed) in copies:
            _write(stream, changed, copies[id(changed)][0])

    def to_cuda(tensor):
        if id(tensor) in given:
            return given[id(tensor)]
        if tensor.device.type != "cpu" or not result_on_cuda or _is_given(tensor, args, kwargs):
            return tensor
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
        _write(stream, made, tensor)
        return made

    return tree_map_only(torch.Tensor, to_cuda, result)


def _capture(func, args, kwargs, stream):
    """Add the operator to the graph being captured. Result shapes are fixed at capture."""
    # Aliases of the tensors' memory. The graph reads and writes this memory even after its owner
    # changes.
    memory: dict[int, torch.Tensor] = {}

    def copy(tensor):
        if tensor.device.type != "cuda":
            return tensor
        if id(tensor) not in memory:
            memory[id(tensor)] = _over(tensor)
        return memory[id(tensor)]

    over = tree_map_only(torch.Tensor, copy, (args, kwargs))
    if _makes_cuda(kwargs):
        over[1]["device"] = torch.device("cpu")
    mutated = {id(memory[id(t)]) for t in _mutated(func, args, kwargs) if id(t) in memory}

    def on_copies():
        # At capture, mutated tensors are copied as well, so that nothing changes before the graph
        # runs.
        return tree_map_only(torch.Tensor, lambda t: t.clone() if id(t) in mutated else t, over)

    now_args, now_kwargs = on_copies()
    now, form = tree_flatten(func(*now_args, **now_kwargs))
    made = [] if mutated else [_like(t) for t in now]
    results = [_over(t) for t in made]

    def run():
        with _disable_current_modes():
            values = tree_flatten(func(*over[0], **over[1]))[0]
            for to, value in zip(results, values):  # empty if the operator wrote in place
                to.copy_(value)

    _captured.append(run)
    error = _runtime.kvcache_gpuless_capture(stream, _run_captured, len(_captured) - 1)
    if error != 0:
        raise RuntimeError(f"gpu-less: CUDA error {error} on capturing {func}")
    if mutated:
        changed = list(_mutated(func, args, kwargs))
        return changed[0] if len(changed) == 1 else changed
    return tree_unflatten(made, form)


def _like(tensor) -> torch.Tensor:
    """Allocate uninitialized CUDA memory for a result."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


_captured: list = []  # never freed: a graph may run until the process ends


@ctypes.CFUNCTYPE(None, ctypes.c_int64)
def _run_captured(number):
    try:
        _captured[number]()
    except BaseException:  # no caller could catch an exception here
        traceback.print_exc()
        os.abort()


def _is_given(tensor, args, kwargs) -> bool:
    """Whether the tensor is an argument.

    For example, `cpu.copy_(cuda)` returns its CPU argument.
    """
    return any(tensor is x for x in tree_flatten((args, kwargs))[0])


def _mutated(func, args, kwargs):
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        yield from (x for x in tree_flatten(value)[0] if isinstance(x, torch.Tensor))


def _over(tensor) -> torch.Tensor:
    """Return a CPU tensor that aliases a CUDA tensor's storage."""
    storage = tensor.untyped_storage()
    over = torch.empty(0, dtype=tensor.dtype)
    if storage.nbytes() == 0:
        return over.as_strided(tensor.shape, tensor.stride())
    alias = _runtime.kvcache_gpuless_alias(storage.data_ptr())
    if alias is None:
        raise RuntimeError("gpu-less: a CUDA tensor's memory is not device memory")
    memory = (ctypes.c_char * storage.nbytes()).from_address(alias)
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return over.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def _read(tensor) -> torch.Tensor:
    """Return a copy with the same strides, which the operator may modify."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride())):
        steps = zip(tensor.shape, tensor.stride())
        extent = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
        memory = _over(tensor).as_strided((extent,), (1,)).clone()
        return memory.as_strided(tensor.shape, tensor.stride())
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(_over(tensor)) if tensor.numel() else copy


def _write(stream, tensor, values) -> None:
    """Write `values` into a CUDA tensor when the stream reaches this point."""
    if tensor.shape != values.shape:
        raise RuntimeError("gpu-less: an operator that resizes its result is not simulated")
    if tensor.numel() == 0:
        return
    dense = values.contiguous()
    item = tensor.element_size()
    dims = tensor.dim()
    sizes = (ctypes.c_int64 * dims)(*tensor.shape)
    strides = (ctypes.c_int64 * dims)(*tensor.stride())
    error = _runtime.kvcache_gpuless_write(
        stream, tensor.data_ptr(), dense.data_ptr(), item, dims, sizes, strides
    )
    if error != 0:
        raise RuntimeError(f"gpu-less: CUDA error {error} on writing the result of an operator")


def start() -> None:
    """Enter the mode in this thread and in every thread started later."""
    if _started:
        return
    if os.environ.get("KVCACHE_GPULESS_REPORT") == "1":
        atexit.register(_runtime.kvcache_gpuless_report)
    _started.append(CudaOnCpu())
    _started[0].__enter__()
    run = threading.Thread.run

    def run_with_mode(self):
        with CudaOnCpu():
            run(self)

    threading.Thread.run = run_with_mode


_started: list[CudaOnCpu] = []
