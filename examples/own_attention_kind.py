# SPDX-License-Identifier: Apache-2.0
"""A custom attention kind in one file, used for planning, allocation, block tables and verification.

A token attends to its own segment of the sequence and to the `lookback` preceding segments. The local
layers of long-context encoders, and decoders with block attention, use this form of attention. Run this
file, or use it in a replay:

    kvcache replay --verify --chunk-tokens 128 --import examples/own_attention_kind.py \
        --groups full_attention,segment_local:segment=64
"""

from kvcache.kinds import AttentionKind, register


@register("segment_local")
class SegmentLocal(AttentionKind):
    """`segment`: tokens per segment. `lookback`: preceding segments that a token attends to."""

    def __init__(self, *, segment: int, lookback: int = 1) -> None:
        super().__init__()
        for name, value, least in (("segment", segment, 1), ("lookback", lookback, 0)):
            if value < least:
                raise ValueError(f"{name} is {value}: expected {least} or more")
        self.segment, self.lookback = segment, lookback

    def first_needed_token(self, num_computed_tokens: int) -> int:
        """Return the start of the earliest segment that the next token or any later token attends to."""
        own = num_computed_tokens // self.segment
        return max(own - self.lookback, 0) * self.segment


def main() -> None:
    """Plan a model with two attention kinds, run a prompt, and verify a replay."""
    from kvcache import (
        Admit,
        BlockTables,
        KVCacheManager,
        LayerSpec,
        Request,
        plan_cache,
    )
    from kvcache_lab import Replayer, chat_workload
    from kvcache_lab.verifier import KVVerifier

    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 8}
    options = {"segment": 64}
    layers = [LayerSpec(f"local.{i}", "segment_local", options=options, **sizes) for i in range(3)]
    layers += [LayerSpec("full.0", "full_attention", **sizes)]
    plan = plan_cache(layers, 2**20, max_model_len=1024, max_num_batched_tokens=64)
    for group in plan.groups:
        print(f"{group.kind}: {len(group.layers)} layers, blocks of {group.block_size} tokens")
    # Each local group holds 63 + 64 tokens of the attended segments, and 64 tokens of the step.
    print(f"a request of 1,024 tokens holds at most {plan.pages_per_request(1024)} pages")

    manager = KVCacheManager.for_groups(plan.groups, plan.num_pages, plan.max_model_len)
    sizes = {"max_num_reqs": 4, "max_model_len": plan.max_model_len}
    tables = BlockTables.for_groups(
        plan.groups, **sizes, max_num_tokens=plan.max_num_batched_tokens
    )
    request = Request("a", range(400))
    step = manager.step(new=[Admit(request, num_tokens=64)])
    tables.apply(step)
    while manager.num_computed_tokens(request) < request.num_tokens:
        left = request.num_tokens - manager.num_computed_tokens(request)
        step = manager.step(step.rows, [min(64, left)])
        tables.apply(step)  # blocks before the attended segments become null
    print(f"row of a local group: {tables[0].block_table.np[0, :25].tolist()}")

    verifier = KVVerifier(groups=plan.groups, num_blocks=800, max_num_reqs=4)
    replayer = Replayer(
        groups=plan.groups, num_blocks=800, concurrency=4, chunk_tokens=64, verifier=verifier
    )
    report = replayer.run(chat_workload(60))
    assert report.mismatches == 0, report.mismatched_requests
    print(
        f"{report.requests} chats verified: {report.verified_tokens:,} tokens, "
        f"{report.token_hit_rate:.0%} of them were prefix hits"
    )


if __name__ == "__main__":
    main()
