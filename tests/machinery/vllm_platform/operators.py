# SPDX-License-Identifier: Apache-2.0
"""PyTorch implementations of the operators of `torch.ops._C` that vLLM calls on a CPU.

The operators have no schema: they are plain attributes of the namespace, so they also accept
arguments that later versions of vLLM append.
"""

import torch
import torch.nn.functional as F

_OPERATORS = {}


def operator(function):
    """Define a function as the operator of the same name."""
    _OPERATORS[function.__name__] = function
    return function


def define():
    """Define all operators, replacing those of a compiled extension if there is one."""
    for name, function in _OPERATORS.items():
        setattr(torch.ops._C, name, function)


@operator
def init_cpu_memory_env(nodes):
    """Do nothing, so that the system decides where memory is placed."""
    return ""


# --- slots and attention ---


@operator
def compute_slot_mapping_kernel_impl(
    query_start_loc, positions, block_table, slot_mapping, block_size
):
    """Write the slot of each token: block id * block size + offset in the block."""
    starts = query_start_loc.long()
    num_tokens = int(starts[-1])
    rows = torch.repeat_interleave(torch.arange(len(starts) - 1), starts[1:] - starts[:-1])
    at = positions[:num_tokens].long()
    block_ids = block_table[rows, at // block_size].long()
    slot_mapping[:num_tokens] = block_ids * block_size + at % block_size
    slot_mapping[num_tokens:] = -1


def slot_mapping_of_any_version(
    num_tokens, max_num_tokens, query_start_loc, positions, block_table, stride, *more
):
    """Compute the slot mapping. The argument for the mapping precedes or follows the block size,
    depending on vLLM's version.
    """
    slots, size = (more[1], more[0]) if isinstance(more[0], int) else (more[0], more[1])
    compute_slot_mapping_kernel_impl(query_start_loc, positions, block_table, slots, size)


@operator
def get_scheduler_metadata(*_args):
    """Return an empty plan, because attention is computed request by request."""
    return torch.zeros(0)


@operator
def cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa, *scales):
    """Write keys and values. A block holds keys as [head size, slots], like vLLM's "vec" kernel."""
    if key.dtype.is_floating_point and (dtype := fp8_of(scales)):
        key, value = (each.to(dtype).view(torch.uint8) for each in (key, value))
    is_written = slot_mapping >= 0
    slots, size = slot_mapping[is_written].long(), key_cache.shape[2]
    blocks, offsets = slots // size, slots % size
    by_column(key_cache)[blocks, :, :, offsets] = key[is_written]
    value_cache[blocks, :, offsets] = value[is_written]


def fp8_of(scales):
    """Return the dtype of an fp8 cache, or None, given the arguments k_scale, v_scale and
    kv_cache_dtype.
    """
    names = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
    dtype = (names | {"fp8_e5m2": torch.float8_e5m2}).get(scales[-1] if scales else None)
    assert dtype is None or scales[:2] == (1.0, 1.0)
    return dtype


def by_column(key_cache):
    """Return a view of the keys, [blocks, heads, head size, slots]."""
    num_blocks, num_heads, size, width = key_cache.shape
    strides = (key_cache.stride(0), key_cache.stride(1), size, 1)
    shape = (num_blocks, num_heads, width, size)
    return torch.as_strided(key_cache, shape, strides, key_cache.storage_offset())


@operator
def cpu_attention_with_kv_cache(
    query,
    key_cache,
    value_cache,
    output,
    query_start_loc,
    seq_lens,
    scale,
    causal,
    alibi_slopes,
    sliding_window,
    block_table,
    softcap,
    scheduler_metadata,
    s_aux,
    dynamic_causal=None,
    *scales,
):
    """Compute attention request by request. `s_aux` contains an attention sink, i.e. a logit
    without a value, for each head.
    """
    assert alibi_slopes is None and dynamic_causal is None
    num_heads, size = key_cache.shape[1:3]
    repeats = query.shape[1] // num_heads
    columns, dtype = by_column(key_cache), fp8_of(scales) or key_cache.dtype
    starts = query_start_loc.tolist()
    # vLLM passes a window of w tokens as w or as the pair (w - 1, 0).
    window = sliding_window[0] + 1 if isinstance(sliding_window, (tuple, list)) else sliding_window
    for row, length in enumerate(seq_lens.tolist()[: len(starts) - 1]):
        first, last = starts[row], starts[row + 1]
        if first == last:
            continue
        begin = 0
        if window > 0:  # blocks before the window may be null or belong to other requests
            begin = max(length - (last - first) - window + 1, 0) // size
        ids = block_table[row, begin : -(-length // size)].long()
        kept = length - begin * size
        keys = columns[ids].permute(1, 0, 3, 2).flatten(1, 2)[:, :kept].view(dtype).float()
        values = value_cache[ids].permute(1, 0, 2, 3).flatten(1, 2)[:, :kept].view(dtype).float()
        q = query[first:last].transpose(0, 1).float()
        scores = q @ keys.repeat_interleave(repeats, 0).transpose(1, 2) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        at = torch.arange(length - (last - first), length)[:, None]
        to = torch.arange(begin * size, length)[None]
        seen = torch.ones_like(to <= at) if not causal else to <= at
        if window > 0:
            seen = seen & (to > at - window)
        scores = scores.masked_fill(~seen, float("-inf"))
        if s_aux is not None:
            sink = s_aux.float()[:, None, None].expand(-1, last - first, 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        found = weights @ values.repeat_interleave(repeats, 0)
        output[first:last] = found.transpose(0, 1).to(output.dtype)


# --- MLA ---


@operator
def mla_decode_kvcache(output, query, kv_cache, scale, block_table, seq_lens):
    """Compute attention for one token per request. The values are the first elements of the keys."""
    size, width = kv_cache.shape[1], output.shape[-1]
    for row, length in enumerate(seq_lens.tolist()[: len(query)]):
        ids = block_table[row, : -(-length // size)].long()
        keys = kv_cache[ids].flatten(0, 1)[:length].float()
        weights = (query[row].float() @ keys.T * scale).softmax(-1)
        output[row] = (weights @ keys[:, :width]).to(output.dtype)


# --- layers that vLLM calls as operators on CPUs ---


@operator
def silu_and_mul(out, x):
    half = x.shape[-1] // 2
    out.copy_(F.silu(x[..., :half]) * x[..., half:])


@operator
def gelu_and_mul(out, x):
    half = x.shape[-1] // 2
    out.copy_(F.gelu(x[..., :half]) * x[..., half:])


@operator
def gelu_tanh_and_mul(out, x):
    half = x.shape[-1] // 2
    out.copy_(F.gelu(x[..., :half], approximate="tanh") * x[..., half:])


@operator
def rms_norm(out, x, weight, epsilon):
    found = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    out.copy_(found.to(x.dtype) * weight if weight is not None else found)


@operator
def fused_add_rms_norm(x, residual, weight, epsilon):
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


# --- experts ---


@operator
def prepack_moe_weight(weight, output, _isa):
    """Copy the weights to `output` without changing their layout."""
    output.copy_(weight)


@operator
def cpu_fused_moe(
    out, x, w13, w2, w13_bias, w2_bias, weights, ids, skip_weighted, activation, *_more
):
    """Compute the chosen experts token by token, so that no result depends on other tokens."""
    for token, (row, chosen) in enumerate(zip(x, ids.tolist())):
        found = torch.zeros_like(row, dtype=torch.float32)
        for place, expert in enumerate(chosen):
            hidden = F.linear(row, w13[expert], None if w13_bias is None else w13_bias[expert])
            hidden = _gated(hidden, activation)
            each = F.linear(hidden, w2[expert], None if w2_bias is None else w2_bias[expert])
            found += each.float() * (1.0 if skip_weighted else weights[token, place].float())
        out[token] = found.to(out.dtype)


def _gated(x, activation):
    if activation == "swigluoai":
        gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)
    half = x.shape[-1] // 2
    assert activation == "silu", f"activation {activation!r} is not supported"
    return F.silu(x[..., :half]) * x[..., half:]


# --- sampling ---


@operator
def greedy_argmax(logits):
    return logits.argmax(-1)


@operator
def fused_gumbel_argmax(logits, seeds):
    """Draw one token per row with the row's seed."""
    noise = torch.empty_like(logits)
    for row, seed in zip(noise, seeds.tolist()):
        row.exponential_(generator=torch.Generator().manual_seed(seed))
    return (logits - noise.log()).argmax(-1)


@operator
def expand_kernel_impl(output, values, ends, replace_from, replace_to):
    start = 0
    for value, end in zip(values.tolist(), ends.tolist()):
        output[start:end] = replace_to if value == replace_from else value
        start = end


@operator
def rejection_greedy_sample_kernel_impl(output, ends, drafts, argmax, bonus, is_greedy, _most):
    start = 0
    for row, end in enumerate(ends.tolist()):
        if is_greedy is None or bool(is_greedy[row]):
            for place, token in enumerate(range(start, end)):
                output[row, place] = argmax[token]
                if drafts[token] != argmax[token]:
                    break
            else:
                output[row, end - start] = bonus.view(-1)[row]
        start = end


# --- Mamba 2 ---


@operator
def causal_conv1d_update_cpu_vec(
    x, states, weight, bias, activation, indices, query_start_loc=None, pad=0, *_more
):
    """Apply the convolution and update the states. Without `query_start_loc`, each row is one token."""
    if x.dim() == 3:  # [rows, dim, tokens], only without `query_start_loc`
        flat = x.transpose(1, 2).flatten(0, 1)
        ends = torch.arange(0, len(flat) + 1, x.shape[2])
        found = causal_conv1d_update_cpu_vec(
            flat, states, weight, bias, activation, indices, ends, pad
        )
        return found.view(x.shape[0], x.shape[2], -1).transpose(1, 2)
    out = torch.empty_like(x)
    width = weight.shape[1]
    starts = None if query_start_loc is None else query_start_loc.tolist()
    for row, index in enumerate(indices.view(-1).tolist()):
        if index == pad:
            continue
        tokens = range(row, row + 1) if starts is None else range(starts[row], starts[row + 1])
        for token in tokens:
            line = torch.cat([states[index][:, : width - 1], x[token][:, None]], 1)
            found = (line * weight).sum(-1) + (0 if bias is None else bias)
            out[token] = F.silu(found) if activation in ("silu", "swish", True) else found
            states[index][:, : width - 1] = line[:, 1:]
    return out


@operator
def selective_state_update_cpu(
    state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, indices, to, null, out,
    accepted=None, ends=None, *_more,
):  # fmt: skip
    """Update the states, [.., heads, head size, state size], with one token per row or, with `ends`,
    with the row's tokens. The state of the last accepted draft is read, and each token's state is
    written to its own place.
    """
    to = indices if to is None else to
    num_rows = len(indices) if ends is None else len(ends) - 1
    sources, targets = (each.reshape(len(each), -1).tolist() for each in (indices, to))
    starts = range(num_rows + 1) if ends is None else ends.tolist()
    for row in range(num_rows):
        index = sources[row][0 if accepted is None else int(accepted[row]) - 1]
        if index == null:
            continue
        new = state[index].float()
        for place, token in enumerate(range(starts[row], starts[row + 1])):
            step = dt[token].float() + (0 if dt_bias is None else dt_bias.float())
            step = F.softplus(step) if dt_softplus else step
            heads, groups = x.shape[1], B.shape[1]
            b = B[token].float().repeat_interleave(heads // groups, 0)
            c = C[token].float().repeat_interleave(heads // groups, 0)
            decay = torch.exp(A.float() * step[..., None])
            new = new * decay + (step * x[token].float())[..., None] * b[:, None]
            state[targets[row][place]] = new.to(state.dtype)
            found = (new * c[:, None]).sum(-1)
            found = found if D is None else found + D.float() * x[token].float()
            out[token] = (found if z is None else found * F.silu(z[token].float())).to(out.dtype)


@operator
def mamba_chunk_scan_fwd_cpu(out, final_states, x, dt, A, B, C, D, z, ends, *_more):
    """Compute prompts token by token. On entry, `final_states` contains the initial states."""
    starts = ends.tolist()
    heads, groups = x.shape[1], B.shape[1]
    for row in range(len(starts) - 1):
        state = final_states[row].float()
        for token in range(starts[row], starts[row + 1]):
            b = B[token].float().repeat_interleave(heads // groups, 0)
            c = C[token].float().repeat_interleave(heads // groups, 0)
            step = dt[token].float()[:, None]
            state = state * torch.exp(A.float()[:, None, None] * step[..., None])
            state = state + (step * x[token].float())[..., None] * b[:, None]
            found = (state * c[:, None]).sum(-1)
            if D is not None:
                found = (
                    found + (D.float()[:, None] if D.dim() == 1 else D.float()) * x[token].float()
                )
            if z is not None:
                found = found * F.silu(z[token].float())
            out[token] = found.to(out.dtype)
        final_states[row] = state.to(final_states.dtype)


# --- rotation ---


@operator
def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox, *_more):
    """Rotate the leading elements of each head in place. `cos_sin_cache` determines their
    number.
    """
    width = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache[positions.flatten()].float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    for each in (query, key):
        if each is None:
            continue
        heads = each.view(cos.shape[0], -1, head_size)
        turned = heads[..., :width].float()
        if is_neox:
            a, b = turned.chunk(2, -1)
            new = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        else:
            a, b = turned[..., ::2], turned[..., 1::2]
            new = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        heads[..., :width] = new.to(each.dtype)
