# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's paged attention in plain PyTorch, following the documentation of `plan` and `run`.

Argument names and order follow flashinfer-python 0.7.2. The stand-in checks the same requirements:
int32 indices, lengths on the host, and equal shapes of K and V.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch


class BatchPrefillWithPagedKVCacheWrapper:
    """Prefill attention over pages. The queries of each request are its last tokens."""

    num_runs = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
        self._plan = None

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type=torch.float16,
        kv_data_type=None,
    ):
        self._check_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        assert qo_indptr.device.type == "cpu" and qo_indptr.dtype == torch.int32
        assert len(qo_indptr) == len(paged_kv_indptr)
        assert causal
        assert (qo_indptr.diff() > 1).any()  # otherwise, tiles of 128 queries would be mostly empty
        self._plan = dict(locals())

    def _check_pages(self, indptr, indices, last_page_len, page_size):
        for lengths in (indptr, last_page_len):
            assert lengths.device.type == "cpu" and lengths.dtype == torch.int32
        assert indices.dtype == torch.int32
        assert len(indptr) == len(last_page_len) + 1
        assert len(indices) >= indptr[-1]
        assert (last_page_len >= 1).all() and (last_page_len <= page_size).all()

    def run(self, q, paged_kv_cache):
        type(self).num_runs += 1
        plan, (keys, values) = self._plan, paged_kv_cache
        assert q.shape == (plan["qo_indptr"][-1], plan["num_qo_heads"], plan["head_dim_qk"])
        assert (q.dtype, keys.dtype) == (plan["q_data_type"], plan["kv_data_type"])
        page = (plan["page_size"], plan["num_kv_heads"], plan["head_dim_qk"])
        assert keys.shape[1:] == values.shape[1:] == page and q.is_contiguous()
        out = torch.empty_like(q)
        for i, last in enumerate(plan["paged_kv_last_page_len"].tolist()):
            first, stop = plan["qo_indptr"][i : i + 2].tolist()
            begin, end = plan["paged_kv_indptr"][i : i + 2].tolist()
            pages = plan["paged_kv_indices"][begin:end].long()
            length = (end - begin - 1) * plan["page_size"] + last
            k, v = (
                x[pages].reshape(-1, *x.shape[2:])[:length].transpose(0, 1).to(q.dtype)
                for x in (keys, values)
            )
            out[first:stop] = self._attention(q[first:stop].transpose(0, 1), k, v).transpose(0, 1)
        return out

    def _attention(self, q, k, v):
        """Return the output, [heads, queries, size]. The last query is at the position of the last
        key.
        """
        plan = self._plan
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
        scale = q.shape[-1] ** -0.5 if plan["sm_scale"] is None else plan["sm_scale"]
        scores = q @ k.transpose(1, 2) * scale
        if cap := plan["logits_soft_cap"]:
            scores = cap * torch.tanh(scores / cap)
        queries = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device)[:, None]
        seen = torch.arange(k.shape[1], device=q.device)
        mask = seen <= queries
        if plan["window_left"] >= 0:
            mask &= seen >= queries - plan["window_left"]
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Decode attention over pages, with one query per request."""

    num_runs = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, use_tensor_cores=False):
        super().__init__(float_workspace_buffer, kv_layout)
        # Without tensor cores, a warp serves one query head, so queries are not grouped.
        assert use_tensor_cores
        assert not float_workspace_buffer.any()

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type=torch.float16,
        kv_data_type=None,
        sm_scale=None,
    ):
        self._check_pages(indptr, indices, last_page_len, page_size)
        self._plan = {
            **locals(),
            "qo_indptr": torch.arange(len(indptr), dtype=torch.int32),
            "paged_kv_indptr": indptr,
            "paged_kv_indices": indices,
            "paged_kv_last_page_len": last_page_len,
            "head_dim_qk": head_dim,
        }


def install(monkeypatch):
    """Install the stand-in for `import flashinfer`, with its prefill and decode wrappers, until the
    test ends.
    """
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    wrappers = BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper
    for wrapper in wrappers:
        setattr(module, wrapper.__name__, wrapper)
        monkeypatch.setattr(wrapper, "num_runs", 0)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return wrappers
