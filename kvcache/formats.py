# SPDX-License-Identifier: Apache-2.0
"""Quantized cache formats whose scales are in the page. Each format is one entry of a registry.

A format defines the dtype and the size of what a token stores, which scale each group of elements has,
and the tensors that `ops.write_kv` and `ops.gather_kv` are called with. Plans, storages, swaps, transfers
and stores only use these sizes, so they support a new format without changes.

The dtypes "float8_e4m3fn", "float8_e5m2" and "int8" with scales that are given (`KVStorage.set_scales`)
are not formats: they need no space in the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvcache.checks import (
    MAX_INT32,
    Count,
    Name,
    Size,
    check_name,
    flag,
    instance,
    integer,
    one_of,
    plain_fields,
    shown,
)

if TYPE_CHECKING:
    import torch

# Values of the argument `scale_rule` of `ops.write_kv`, which documents them.
TOKEN_HEAD, TILE, INDEXER, INDEXER_POWER_OF_TWO = range(4)

SCALE_BYTES = 4  # scales are float32, or e4m3 in nvfp4; they start at a multiple of 4 bytes


class StoredSizes(NamedTuple):
    """What a token stores, as arguments of `KVStorage`: elements are those of the cache's dtype."""

    dtype: str
    head_size: int
    v_head_size: int
    scale_bytes_per_token: int


class CacheParts(NamedTuple):
    """The tensors of a layer with which `ops.write_kv` and `ops.gather_kv` are called."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor | None


@dataclass(frozen=True)
class KVFormat:
    """A quantized format whose scales are in the page.

    Args:
        name: Name of the format.
        dtype: Dtype of the codes: "float8_e4m3fn", "float8_e5m2", "int8", or "uint8" for int4 and nvfp4,
            with two codes per byte.
        scale_rule: How a scale is derived. See `ops.write_kv`. Must be 0 for uint8.
        group_size: Elements per scale. None: all elements of a token's head.
        is_row: Whether a token is one row of bytes: the codes of K, their scales, and V in bfloat16, as
            in DeepSeek's MLA. If False, the scales follow the data of a block, for each token and head
            those of K and then those of V.
        scale_dtype: Dtype of the scales: "float32", or "float8_e4m3fn" for nvfp4.
        least_capability: Least CUDA compute capability times 10, such as 100 for 10.0. A storage on an
            older device is refused.

    Raises:
        ValueError: A value is invalid.

    Example:
        >>> format_named("int8_token_head").stored(num_kv_heads=8, head_size=128, v_head_size=128)
        StoredSizes(dtype='int8', head_size=128, v_head_size=128, scale_bytes_per_token=64)
        >>> format_named("fp8_ds_mla").stored(num_kv_heads=1, head_size=512, v_head_size=64)
        StoredSizes(dtype='uint8', head_size=656, v_head_size=0, scale_bytes_per_token=0)
    """

    name: Name
    dtype: Name
    scale_rule: int = TOKEN_HEAD
    group_size: Size | None = None
    is_row: bool = False
    scale_dtype: Name = "float32"
    least_capability: Count = 0

    def __post_init__(self) -> None:
        check_name(self.name, "name")
        one_of(self.dtype, "dtype", ("float8_e4m3fn", "float8_e5m2", "int8", "uint8"))
        last_rule = TOKEN_HEAD if self.dtype == "uint8" else INDEXER_POWER_OF_TWO
        integer(self.scale_rule, "scale_rule", TOKEN_HEAD, last_rule)
        flag(self.is_row, "is_row")
        scales = ("float32", "float8_e4m3fn") if self.dtype == "uint8" else ("float32",)
        one_of(self.scale_dtype, "scale_dtype", scales)
        plain_fields(self)
        if self.group_size is not None and self.group_size % self.codes_per_byte:
            raise ValueError(
                f"group_size is {self.group_size}: expected a multiple of {self.codes_per_byte}, the "
                "codes per byte"
            )

    @property
    def codes_per_byte(self) -> int:
        """Number of elements per byte: 2 for int4 and nvfp4."""
        return 2 if self.dtype == "uint8" else 1

    @property
    def _scale_bytes(self) -> int:
        return SCALE_BYTES if self.scale_dtype == "float32" else 1

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError if a CUDA device is older than the format requires.

        Args:
            device: The device of the pages. Devices other than CUDA devices are accepted.
        """
        import torch

        instance(device, torch.device, "device")
        if self.least_capability and device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            if 10 * major + minor < self.least_capability:
                raise ValueError(
                    f"device is {device}, with compute capability {major}.{minor}: expected "
                    f"{self.least_capability / 10} or higher for format {shown(self.name)}"
                )

    def _num_groups(self, head_size: int, name: str = "head_size") -> int:
        """Return the number of scales of a head with this many elements.

        Raises:
            ValueError: Groups do not divide the head, or do not fill whole bytes.
        """
        head_size = integer(head_size, name, 0, MAX_INT32)
        group = self.group_size or head_size
        if head_size and (head_size % group or group % self.codes_per_byte):
            expected = self.group_size or self.codes_per_byte
            raise ValueError(
                f"{name} is {head_size}: expected a multiple of {expected} for format "
                f"{shown(self.name)}"
            )
        return head_size // group if head_size else 0

    def stored(self, num_kv_heads: int, head_size: int, v_head_size: int) -> StoredSizes:
        """Return what a token stores.

        Args:
            num_kv_heads: KV heads on one rank.
            head_size: Elements of K per head.
            v_head_size: Elements of V per head.

        Raises:
            ValueError: The format cannot hold these sizes.
        """
        num_kv_heads = integer(num_kv_heads, "num_kv_heads", 1, MAX_INT32)
        head_size = integer(head_size, "head_size", 1, MAX_INT32)
        v_head_size = integer(v_head_size, "v_head_size", 0, MAX_INT32)
        num_k, codes = self._num_groups(head_size), self.codes_per_byte
        if self.is_row:
            if num_kv_heads != 1:
                raise ValueError(
                    f"num_kv_heads is {num_kv_heads}: expected 1 for format {shown(self.name)}, whose "
                    "rows hold one latent"
                )
            # The rotary part has two bytes per element.
            size = head_size // codes + num_k * self._scale_bytes + 2 * v_head_size
            if (head_size // codes) % SCALE_BYTES or size % SCALE_BYTES:
                raise ValueError(
                    f"head_size is {head_size} and v_head_size {v_head_size}: expected sizes with which "
                    f"the scales of format {shown(self.name)} are aligned to {SCALE_BYTES} bytes"
                )
            return StoredSizes("uint8", size, 0, 0)
        num_v = self._num_groups(v_head_size, "v_head_size")
        scales = num_kv_heads * (num_k + num_v) * self._scale_bytes
        return StoredSizes(self.dtype, head_size // codes, v_head_size // codes, scales)

    def parts(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale_cache: torch.Tensor | None,
        head_size: int,
        v_head_size: int,
        dtype: torch.dtype,
    ) -> CacheParts:
        """Return views of a layer's cache for the ops.

        Args:
            key_cache: As `KVStorage.key_cache`.
            value_cache: As `KVStorage.value_cache`.
            scale_cache: As `KVStorage.scale_cache`. None for rows.
            head_size: Elements of K per head, before quantization.
            v_head_size: Elements of V per head, before quantization.
            dtype: Dtype of the tokens. Must be bfloat16 for rows, which store V unchanged.
        """
        import torch

        instance(dtype, torch.dtype, "dtype")
        instance(key_cache, torch.Tensor, "key_cache")
        if key_cache.ndim != 4:
            raise ValueError(f"key_cache has {key_cache.ndim} dimensions: expected 4")
        sizes = self.stored(key_cache.shape[2], head_size, v_head_size)
        expected = [*key_cache.shape[:3]], getattr(torch, sizes.dtype)
        self._check(key_cache, "key_cache", [*expected[0], sizes.head_size], expected[1])
        self._check(value_cache, "value_cache", [*expected[0], sizes.v_head_size], expected[1])
        if sizes.scale_bytes_per_token:
            shape = [*expected[0][:2], sizes.scale_bytes_per_token]
            self._check(scale_cache, "scale_cache", shape, torch.uint8)
        codes, scale_dtype = getattr(torch, self.dtype), getattr(torch, self.scale_dtype)
        if self.is_row:
            end = head_size // self.codes_per_byte
            after = end + self._scale_bytes * self._num_groups(head_size)
            if dtype != torch.bfloat16:  # what the bytes of V mean
                raise ValueError(
                    f"dtype of tokens is {dtype}: expected bfloat16 for format {shown(self.name)}"
                )
            return CacheParts(
                key_cache[..., :end].view(codes),
                key_cache[..., after:].view(dtype),
                key_cache[..., end:after].view(scale_dtype),
                None,
            )
        num_k = self._num_groups(head_size)
        heads = scale_cache.unflatten(-1, (key_cache.shape[2], -1)).view(scale_dtype)
        has_v = v_head_size > 0
        return CacheParts(
            key_cache, value_cache, heads[..., :num_k], heads[..., num_k:] if has_v else None
        )

    def _check(self, cache: torch.Tensor, name: str, shape: list[int], dtype: torch.dtype) -> None:
        import torch

        instance(cache, torch.Tensor, name)
        if [*cache.shape] != shape or cache.dtype != dtype:
            raise ValueError(
                f"{name} is {cache.dtype}{[*cache.shape]}: expected {dtype}{shape} for format "
                f"{self.name!r}"
            )


_FORMATS: dict[str, KVFormat] = {}


def register_format(described: KVFormat) -> KVFormat:
    """Register a format under its name. Registering an identical format again has no effect.

    Args:
        described: The format.

    Returns:
        The same format.

    Raises:
        ValueError: The name already belongs to a different format.

    Example:
        >>> halves = register_format(KVFormat("int8_groups_of_64", "int8", group_size=64))
        >>> halves.stored(num_kv_heads=1, head_size=128, v_head_size=128).scale_bytes_per_token
        16
    """
    instance(described, KVFormat, "described")
    known = _FORMATS.setdefault(described.name, described)
    if known != described:
        raise ValueError(
            f"described has name {shown(described.name)}, which is already registered for {known}: "
            "expected an identical format, or a different name"
        )
    return described


def format_names() -> list[str]:
    """Return the names of all registered formats."""
    return sorted(_FORMATS)


def format_named(kv_format: str) -> KVFormat:
    """Return the format that is registered under a name.

    Raises:
        ValueError: The name is unknown. The message lists the known names.
    """
    if not isinstance(kv_format, str) or kv_format not in _FORMATS:
        names = ", ".join(format_names())
        raise ValueError(f"kv_format is {shown(kv_format)}: expected one of {names}")
    return _FORMATS[kv_format]


for _format in (
    # One scale per token and head, as in vLLM's *_per_token_head.
    KVFormat("fp8_e4m3_token_head", "float8_e4m3fn"),
    KVFormat("fp8_e5m2_token_head", "float8_e5m2"),
    KVFormat("int8_token_head", "int8"),
    KVFormat("int4_token_head", "uint8"),
    KVFormat("nvfp4", "uint8", group_size=16, scale_dtype="float8_e4m3fn", least_capability=100),
    # 656 bytes for DeepSeek-V3: a latent of 512 codes with four scales, and 64 elements of 2 bytes.
    KVFormat("fp8_ds_mla", "float8_e4m3fn", TILE, 128, is_row=True),
    # The keys of DeepSeek's indexer.
    KVFormat("fp8_indexer", "float8_e4m3fn", INDEXER, 128),
    KVFormat("fp8_indexer_power_of_two", "float8_e4m3fn", INDEXER_POWER_OF_TWO, 128),
):
    register_format(_format)
