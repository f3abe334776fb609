# SPDX-License-Identifier: Apache-2.0
"""Executes transfer plans on fake memories and checks the location of every element.

The checker shares no code with the plans. It defines locations independently, by array shapes
instead of offsets. The value of every element encodes its token, layer, part (K, V or scales), head
and position in the row. Elements have four bytes, so a wrong byte results in a wrong number.
"""

import itertools

import numpy as np

from kvcache.transfer.description import CacheDescription
from kvcache.transfer.plan.transfer_plan import plan_transfer

ELEMENT = 4  # bytes per element; descriptions use float32
PARTS = 3  # K, V, scales
# SPARE is the number of pages that must not be touched, including the null block
GROUPS, SPARE = 2, 2


# The memory orders for NHD. For HND, head and token are exchanged.
ORDERS = {
    "apart": ("kv", "block", "token", "head", "element"),
    "blocks_first": ("block", "kv", "token", "head", "element"),
    "block_major": ("block", "layer", "kv", "token", "head", "element"),
    "side by side": ("block", "token", "head", "element"),  # the V of each head follows its K
    "tokens first": ("block", "token", "kv", "head", "element"),
    "heads first": ("block", "head", "layer", "kv", "token", "element"),
    "kv, heads, layers": ("block", "kv", "head", "layer", "token", "element"),
    "all K, all V": ("kv", "block", "layer", "token", "head", "element"),
    "layers within kv": ("kv", "layer", "block", "token", "head", "element"),
    "heads outside": ("layer", "head", "block", "token", "element"),  # LHBNC
    "heads outside, layers inside": ("kv", "head", "block", "layer", "token", "element"),
    "heads before layers": ("head", "layer", "kv", "block", "token", "element"),
}
PACKINGS = ("apart", "blocks_first", "block_major")


def order_of(layout="NHD", packing="apart"):
    """Return a memory order by its name in this module."""
    other = {"token": "head", "head": "token"} if layout == "HND" else {}
    if has_heads_outside(packing):
        other = {}
    return tuple(other.get(role, role) for role in ORDERS[packing])


def has_heads_outside(packing):
    """Return whether the heads dimension precedes the blocks dimension. In this case, NHD and HND
    are identical.
    """
    order = ORDERS[packing]
    return order.index("head") < order.index("block")


def of(**values):
    """Return the keyword arguments as a dictionary."""
    return values


def cache(**changes):
    """Return a small description: one rank, 2 layers, 4 heads, blocks of 4 tokens.

    `layout` and `packing` select a memory order by name.
    """
    named = {name: changes.pop(name) for name in ("layout", "packing") if name in changes}
    changes = {"memory_order": order_of(**named), **changes}
    values = of(
        engine_id="a",
        num_layers=2,
        total_num_kv_heads=4,
        head_size=2,
        block_size=4,
        dtype="float32",
    )
    return CacheDescription(**{**values, **changes})


# Changes to `cache()` for the local and the remote side, with at least one pair for each kind of
# group.
DIFFERENT = [
    (of(), of()),
    (of(block_size=8), of(block_size=2)),
    (of(block_size=8, layout="HND"), of(block_size=2, layout="HND", tp_size=2)),
    (of(block_size=2, layout="HND"), of(block_size=8, layout="HND", tp_size=2)),
    (of(block_size=2), of(block_size=8, layout="HND", packing="block_major")),
    (of(block_size=2, cp_world_size=2), of(block_size=4)),
    (of(block_size=4), of(block_size=2, cp_world_size=2, cp_interleave=2)),
    (of(cp_world_size=2, block_size=2), of(cp_world_size=2, block_size=4, layout="HND")),
    (of(cp_world_size=2, block_size=4), of(cp_world_size=2, block_size=2, layout="HND")),
    (of(block_size=4), of(block_size=6, packing="blocks_first")),
    (of(packing="side by side"), of(block_size=8, layout="HND", packing="heads first")),
    (of(packing="tokens first"), of(packing="tokens first")),
    (of(packing="kv, heads, layers", tp_size=2), of(packing="all K, all V", layout="HND")),
]


class Wrong(Exception):
    """Raised if a plan is wrong. The message describes the error."""


def tokens_of_pages(cache, num_pages):
    """Return the token in each slot, as [cp_world_size, num_pages, block_size]."""
    n, interleave = cache.cp_world_size, cache.cp_interleave
    virtual = cache.block_size * n
    position = np.arange(num_pages * virtual)
    o = position % virtual
    rank = o // interleave % n
    table = np.full((n, num_pages, cache.block_size), -1)
    table[rank, position // virtual, o // (n * interleave) * interleave + o % interleave] = position
    return table


def held(total, size, rank):
    """Return which of `total` heads or layers are held by rank number `rank` of `size` ranks."""
    if size > total:
        return [rank * total // size]
    return [i for i in range(total) if i * size // total == rank]


def stages_of(cache):
    """Return (layers, tp_size) for each pipeline stage."""
    if cache.stages is None:
        layers = [held(cache.num_layers, cache.pp_size, r) for r in range(cache.pp_size)]
        return [(each, cache.tp_size) for each in layers]
    numbers = iter(range(cache.num_layers))
    return [([next(numbers) for _ in range(count)], tp) for count, tp in cache.stages]


def ranks_of(cache):
    """Return cp_rank, pp_rank and tp_rank of all ranks, each as [world_size]."""
    table = [
        (cp, pp, tp)
        for cp in range(cache.cp_world_size)
        for pp, (_, tp_size) in enumerate(stages_of(cache))
        for tp in range(tp_size)
    ]
    return np.array(table).T


class Memory:
    """The memory of n ranks of a pipeline stage. `elements` is [n, positions], with -1 where there
    is no token.
    """

    def __init__(self, cache, ranks, ids, pool):
        """Lay out the request's pages. `ranks` is [n], ascending. `ids` is [n, pages], the ids of
        the request's pages in a pool of `pool` pages.
        """
        cp, pp, tp = (of_all[ranks] for of_all in ranks_of(cache))
        self.cache, self.pool, self.ranks = cache, pool, ranks
        tokens = np.full((len(ranks), pool, cache.block_size), -1)
        tokens[np.arange(len(ranks))[:, None], ids] = tokens_of_pages(cache, ids.shape[1])[cp]
        assert len(set(pp)) == 1
        layers, tp_size = stages_of(cache)[pp[0]]
        heads = np.array([held(cache.total_num_kv_heads, tp_size, r) for r in range(tp_size)])
        self.heads, self.layers = heads.shape[1], len(layers)
        scales = cache.scale_bytes_per_head // ELEMENT
        self.sizes = [cache.head_size] + [cache.v_head_size] * (cache.v_head_size > 0)
        self.has_scales = scales > 0
        self.sizes += [scales] * self.has_scales
        widest = max(self.sizes)
        # [rank, layer, page, token, head]; negative for slots without a token
        tokens = np.where(tokens < 0, -cache.num_layers * cache.total_num_kv_heads, tokens)
        row = tokens[:, None, :, :, None] * cache.num_layers
        row = row + np.array(layers)[:, None, None, None]
        row = row * cache.total_num_kv_heads + heads[tp][:, None, None, None, :]
        parts = [
            np.maximum((row[..., None] * PARTS + part) * widest + np.arange(size), -1)
            for part, size in enumerate(self.sizes)
        ]
        self.elements, lengths = self.laid_out(parts)
        self.region_length = np.array(lengths)
        self.region_start = np.cumsum(lengths) - lengths
        # The positions of the elements of each part: [layer, page, ...], in memory order.
        shapes = [part.shape[1:] for part in parts]
        numbers = np.split(
            np.arange(sum(map(np.prod, shapes))), np.cumsum([*map(np.prod, shapes)])[:-1]
        )
        named = [n.reshape(1, *shape) for n, shape in zip(numbers, shapes)]
        place = np.argsort(self.laid_out(named)[0][0])
        self.places = [
            np.sort(place[n.reshape(self.layers, pool, -1)], axis=2)
            for n, _ in zip(numbers, shapes)
        ]

    def laid_out(self, parts):
        """Lay out K, V (if present) and scales (if present), given as [rank, layer, block, token,
        head, element].

        Returns the memory of each rank and the lengths of the regions.
        """
        *parts, scales = parts if self.has_scales else [*parts, None]
        order = list(self.cache.memory_order)
        if "layer" not in order:
            order.insert(0, "layer")
        if "kv" not in order:
            order.insert(-1, "kv")
        axes = {"layer": 1, "block": 2, "token": 3, "head": 4, "element": 5}
        roles = [role for role in order if role != "kv"]
        ordered = [part.transpose(0, *(axes[role] for role in roles)) for part in parts]
        before = order.index("kv")
        rows = [part.reshape(*part.shape[: 1 + before], -1) for part in ordered]
        outer = order[: order.index("block")]
        lengths = [part[0].size for part in parts]
        counts = {"layer": self.layers, "head": self.heads, "kv": len(parts)}
        apart = [range(counts[role]) for role in outer]
        num_others = np.prod([counts[role] for role in outer if role != "kv"], dtype=int)
        lengths = [
            (lengths[at[outer.index("kv")]] if "kv" in outer else sum(lengths)) // num_others
            for at in itertools.product(*apart)
        ]
        memory = np.concatenate(rows, axis=-1).reshape(len(parts[0]), -1)
        if scales is None:
            return memory, lengths
        if "kv" in outer:  # scales have separate regions
            return (
                np.concatenate([memory, scales.reshape(len(scales), -1)], axis=1),
                [*lengths, *[scales[0].size // self.layers] * self.layers],
            )
        until = (
            max(order.index("block"), order.index("layer")) + 1
        )  # in each page of a layer, scales follow K and V
        prefix = [scales.shape[axes[role]] for role in order[:until]]
        behind = scales.transpose(0, *(axes[role] for role in order[:until]), 3, 4, 5)
        both = [memory.reshape(len(memory), *prefix, -1), behind.reshape(len(memory), *prefix, -1)]
        count = len(lengths)
        lengths = [length + scales[0].size // count for length in lengths]
        return np.concatenate(both, axis=-1).reshape(len(memory), -1), lengths

    def index(self, region, offset, length):
        """Return the positions of the fragments' elements.

        Raises Wrong if a fragment leaves its region or splits an element.
        """
        if ((offset % ELEMENT) | (length % ELEMENT)).any():
            raise Wrong("a fragment begins or ends within an element")
        if (region < 0).any() or (region >= len(self.region_start)).any():
            raise Wrong("a region that does not exist")
        end = (offset + length) // ELEMENT
        if (offset < 0).any() or (length <= 0).any() or (end > self.region_length[region]).any():
            raise Wrong("a fragment leaves its region")
        count = length // ELEMENT
        start = self.region_start[region] + offset // ELEMENT
        return np.repeat(start - (np.cumsum(count) - count), count) + np.arange(count.sum())

    def part(self, elements, layer, part):
        """Return one part (K, V or scales) of a layer as [pool, elements of a page]."""
        return elements[self.places[part][layer]]

    def permute(self, elements, ids, remote_block_size, remote_layout):
        """Permute elements from the remote order to the local order, like `permute_received_blocks`."""
        for layer in range(self.layers):
            for number, size in enumerate(self.sizes[: len(self.sizes) - self.has_scales]):
                places = self.places[number][layer][ids.ravel()]
                received = elements[places]
                if remote_layout == "HND":
                    blocks = received.reshape(-1, self.heads, remote_block_size, size).swapaxes(
                        1, 2
                    )
                else:
                    blocks = received.reshape(-1, remote_block_size, self.heads, size)
                mine = blocks.reshape(ids.size, self.cache.block_size, self.heads, size)
                if self.cache.layout == "HND":
                    mine = mine.swapaxes(1, 2)
                elements[places] = mine.reshape(ids.size, -1)


def check_listed(plan, got, mine, theirs):
    """Check that, for all these pages, `fragments` describes the same bytes as `apply`."""
    f = plan.fragments
    if len(f.length) == 0 or len(got.length) == 0:
        if len(f.length) or len(got.length):
            raise Wrong("fragments and apply give different bytes")
        return
    rows = []
    by_rank = [plan.remote.stage_of(rank).region_strides for rank in range(plan.remote.world_size)]
    strides = np.zeros((len(by_rank), max(map(len, by_rank))), np.int64)  # per rank and region
    for rank, of_rank in enumerate(by_rank):
        strides[rank, : len(of_rank)] = of_rank
    for group in range(len(mine)):
        local = (
            mine[group, f.local_page]
            * plan.local.stage_of(plan.local_rank).region_strides[f.local_region]
        )
        pages = np.array(theirs)[f.remote_rank, group, f.remote_page]
        remote = pages * strides[f.remote_rank, f.remote_region]
        rows.append(np.stack([f.remote_rank, f.remote_region, remote + f.remote_offset,
                              f.local_region, local + f.local_offset, f.length]))  # fmt: skip
    listed, applied = np.concatenate(rows, axis=1), np.stack(got)
    # Compare element by element, because a fragment may equal several runs of `apply`.
    for table in (listed, applied):
        table[:] = table[:, np.lexsort(table[::-1])]
    steps = [np.repeat(table[:5], table[5] // ELEMENT, axis=1) for table in (listed, applied)]
    for step, table in zip(steps, (listed, applied)):
        within = np.concatenate([np.arange(n) for n in table[5] // ELEMENT]) * ELEMENT
        step[2] += within
        step[4] += within
        step[:] = step[:, np.lexsort(step[::-1])]
    if not np.array_equal(*steps):
        raise Wrong("fragments and apply give different bytes")


def some_ids(rng, groups, per_group):
    """Return ids as int32[groups, per_group] from a pool with spare pages, in ascending, descending
    or random order.
    """
    count = groups * per_group
    ids = np.arange(1, count + SPARE)
    kind = rng.integers(3)
    if kind == 0:
        ids = ids[rng.integers(SPARE) :]
    elif kind == 1:
        ids = ids[::-1]
    else:
        rng.shuffle(ids)
    return ids[:count].reshape(groups, per_group).astype(np.int32)


def check(local, remote, local_rank, *, allow_permutation=True, seed=0, change=None):
    """Raise Wrong unless executing the plan moves every element to its correct location.

    `change` plants a defect in the plan.
    """
    plan = plan_transfer(local, remote, local_rank, allow_permutation=allow_permutation)
    if not allow_permutation and plan.permutation is not None:
        raise Wrong("a permutation, although none is allowed")
    plan = plan if change is None else change(plan)
    rng = np.random.default_rng(seed)
    mine = some_ids(rng, GROUPS, plan.local_pages_per_group)
    per_rank = rng.integers(2) == 1
    theirs = [some_ids(rng, GROUPS, plan.remote_pages_per_group)] * remote.world_size
    if per_rank:
        theirs = [
            some_ids(rng, GROUPS, plan.remote_pages_per_group) for _ in range(remote.world_size)
        ]
    given = dict(enumerate(theirs)) if per_rank else theirs[0]
    runs = plan.apply(mine, given)
    got = runs.expand()
    wanted = Memory(local, np.array([local_rank]), mine.reshape(1, -1), mine.size + SPARE)
    want = wanted.elements[0]
    if (got.remote_rank < 0).any() or (got.remote_rank >= remote.world_size).any():
        raise Wrong("a rank that does not exist")
    write = wanted.index(got.local_region, got.local_offset, got.length)
    fetched = np.full(len(write), -1)
    stage = ranks_of(remote)[1]
    for number in set(stage[got.remote_rank]):
        of_stage = stage[got.remote_rank] == number
        ranks = np.unique(got.remote_rank[of_stage])
        ids = np.stack([theirs[rank].ravel() for rank in ranks])
        source = Memory(remote, ranks, ids, theirs[0].size + SPARE)
        length = got.length[of_stage]
        read = source.index(got.remote_region[of_stage], got.remote_offset[of_stage], length)
        row = np.searchsorted(ranks, got.remote_rank[of_stage])
        read += np.repeat(row, length // ELEMENT) * source.elements.shape[1]
        if np.bincount(read).max(initial=0) > 1:
            raise Wrong("a remote byte is fetched twice")
        fetched[np.repeat(of_stage, got.length // ELEMENT)] = source.elements.reshape(-1)[read]
    times = np.bincount(write, minlength=len(want))
    if times.max() > 1:
        raise Wrong("a local byte is written twice")
    if not np.array_equal(times == 1, want >= 0):
        raise Wrong("not exactly the bytes of the local pages are written")
    if runs.num_fragments != len(got.length) or runs.num_bytes != got.length.sum():
        raise Wrong("the counts of the summary are wrong")
    local_memory = np.full(len(want), -1)
    local_memory[write] = fetched
    if plan.permutation is not None:
        wanted.permute(local_memory, mine, *plan.permutation)
    if not np.array_equal(local_memory, want):
        raise Wrong("an element is in the wrong place")
    check_listed(plan, got, mine, theirs)
