# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.machinery.transfer_plan_table` checks the transfer plans of all combinations.

Prints how many combinations are right, wrong and refused, grouped by the differences between the
two sides. A combination consists of two descriptions, a local rank, and whether a permutation is
allowed. Combinations are enumerated as two products:

- parallel: all TP, PP and context-parallel sizes of both sides and all numbers of heads, including
  MLA. For each of these, `--draws` random page layouts are checked. `--all-ranks` checks every
  local rank instead of a random one.
- pages: all layouts, packings, block sizes and interleaves of both sides, and several head sizes,
  with and without a permutation, for each of the parallel sizes in a list. Local ranks alternate.

The product of these two products has 6 * 10^8 combinations, times the number of local ranks.
`--random N` checks N of them, drawn with `--seed`. In one of eight combinations, the two sides may
have different numbers of heads. Such combinations must be refused.
"""

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvcache.transfer.description import CacheDescription
from kvcache.transfer.plan.transfer_plan import plan_transfer
from tests.machinery.transfer_plan_checker import ORDERS, PACKINGS, Wrong, carry_out, order_of

SIZES = (1, 2, 4, 8)
HEADS = (*SIZES, "mla")
LAYOUTS = ("NHD", "HND")
BLOCK_SIZES = (2, 4, 8)
V_HEAD_SIZES = (2, 1, 0)
# (tp, pp, cp) of the local and of the remote side, and the number of heads, with at least one entry
# per kind of difference.
PARALLEL = (
    ((1, 1, 1), (1, 1, 1), 2),
    ((2, 1, 1), (1, 1, 1), 4),
    ((1, 1, 1), (2, 1, 1), 4),
    ((4, 1, 1), (4, 1, 1), 2),
    ((1, 2, 1), (2, 1, 1), 2),
    ((2, 1, 1), (1, 2, 1), "mla"),
    ((1, 1, 2), (1, 1, 2), 2),
    ((1, 1, 2), (2, 1, 1), 2),
    ((1, 1, 1), (1, 1, 4), 2),
)


class Combination(NamedTuple):
    """A combination to check. Its block sizes and interleaves may be invalid, in which case it must
    be refused.
    """

    local: tuple[int, int, int]  # tp, pp, cp
    remote: tuple[int, int, int]
    heads: int | str
    remote_heads: int | str
    local_page: tuple[str, str, int, int]  # layout, packing, block_size, interleave
    remote_page: tuple[str, str, int, int]
    v_head_size: int
    allow_permutation: bool
    rank: int  # local rank, taken modulo the world size
    seed: int


def describe(parallel, heads, page, v_head_size, num_layers=8) -> CacheDescription:
    layout, packing, block_size, interleave = page
    return CacheDescription(
        engine_id="",
        num_layers=num_layers,
        total_num_kv_heads=1 if heads == "mla" else heads,
        head_size=2,
        v_head_size=0 if heads == "mla" else v_head_size,
        is_mla=heads == "mla",
        block_size=block_size,
        tp_size=parallel[0],
        pp_size=parallel[1],
        cp_world_size=parallel[2],
        cp_interleave=interleave,
        memory_order=order_of(layout, packing),
        dtype="float32",
    )


def must_refuse(one: Combination) -> bool:
    """Return whether the plan must be rejected because one side is invalid or the two sides hold
    different KV.
    """
    pages = one.local_page, one.remote_page
    tears = any(block_size % interleave for _, _, block_size, interleave in pages)
    return tears or one.heads != one.remote_heads


def verdict(one: Combination) -> str:
    """Return "right", "right, permuted", "wrong: ..." or "refused: ..."."""
    num_layers = max(one.local[1], one.remote[1]) * (1 + one.seed % 2)
    sides = (
        (one.local, one.heads, one.local_page),
        (one.remote, one.remote_heads, one.remote_page),
    )
    try:
        local, remote = (describe(*side, one.v_head_size, num_layers) for side in sides)
        rank = one.rank % local.world_size
        plan = plan_transfer(local, remote, rank, allow_permutation=one.allow_permutation)
    except ValueError as error:
        what = str(error).split(" is ")[0]
        return f"refused: {what}" if must_refuse(one) else f"wrong: refused, {error}"
    if must_refuse(one) or (plan.permutation and not one.allow_permutation):
        return "wrong: not refused, or permuted"
    try:
        carry_out(plan, one.seed)
    except Wrong as error:
        return f"wrong: {error}"
    return "right, permuted" if plan.permutation else "right"


def draw_page(rng, interleave_divides=True) -> tuple[str, str, int, int]:
    layout, packing, block_size = (
        options[rng.integers(len(options))] for options in (LAYOUTS, (*ORDERS,), BLOCK_SIZES)
    )
    interleaves = [i for i in SIZES if not interleave_divides or block_size % i == 0]
    return layout, packing, block_size, interleaves[rng.integers(len(interleaves))]


def parallel_product(draws=1, all_ranks=False, seed=0, start=0, step=1) -> Iterator[Combination]:
    """Yield all 20,480 combinations of parallel sizes and numbers of heads, or every `step`-th of
    them, beginning with number `start`.
    """
    product = enumerate(itertools.product(*[SIZES] * 6, HEADS))
    for number, (*sizes, heads) in itertools.islice(product, start, None, step):
        local, remote = tuple(sizes[:3]), tuple(sizes[3:])
        for draw in range(draws):
            rng = np.random.default_rng([seed, number, draw])
            pages = draw_page(rng), draw_page(rng)
            v_head_size = V_HEAD_SIZES[rng.integers(3)]
            # Three of four combinations allow a permutation, because plans without one rarely have
            # errors.
            permute = bool(rng.integers(4))
            ranks = range(np.prod(local)) if all_ranks else [int(rng.integers(np.prod(local)))]
            for rank in ranks:
                yield Combination(
                    local, remote, heads, heads, *pages, v_head_size, permute, rank, number + draw
                )


def page_product(parallel=PARALLEL, block_sizes=BLOCK_SIZES) -> Iterator[Combination]:
    """Yield all pairs of page layouts for each of the parallel sizes."""
    pages = list(itertools.product(LAYOUTS, PACKINGS, block_sizes, SIZES))
    for local, remote, heads in parallel:
        # With one context-parallel rank, the interleave has no effect.
        mine, theirs = (
            [page for page in pages if cp > 1 or page[3] == 1] for _, _, cp in (local, remote)
        )
        sizes = [0] if heads == "mla" else V_HEAD_SIZES[:2]
        product = itertools.product(mine, theirs, sizes, (True, False))
        for number, (mine, theirs, size, permute) in enumerate(product):
            yield Combination(
                local, remote, heads, heads, mine, theirs, size, permute, number, number
            )


def random_product(count: int, seed: int) -> Iterator[Combination]:
    """Draw combinations from the product of all parallel sizes and all page layouts."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        sizes = [SIZES[i] for i in rng.integers(4, size=6)]
        heads = HEADS[rng.integers(5)]
        yield Combination(
            tuple(sizes[:3]),
            tuple(sizes[3:]),
            heads,
            HEADS[rng.integers(5)] if rng.integers(8) == 0 else heads,
            draw_page(rng, interleave_divides=False),
            draw_page(rng, interleave_divides=False),
            V_HEAD_SIZES[rng.integers(3)],
            bool(rng.integers(2)),
            int(rng.integers(512)),
            int(rng.integers(1 << 30)),
        )


def tally(combinations: Iterator[Combination]) -> tuple[Counter, list[str]]:
    """Count the verdicts. Return the counts and the first ten wrong combinations."""
    counts, wrong = Counter(), []
    for one in combinations:
        found = verdict(one)
        counts[found] += 1
        if found.startswith("wrong") and len(wrong) < 10:
            wrong.append(f"{found}: {one}")
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machinery.transfer_plan_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=("parallel", "pages", "random"))
    parser.add_argument(
        "--draws",
        type=int,
        default=1,
        help="number of page layouts per combination of parallel sizes",
    )
    parser.add_argument(
        "--all-ranks", action="store_true", help="check every local rank instead of a random one"
    )
    parser.add_argument("--random", type=int, default=20_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    suites = {
        "parallel": parallel_product(args.draws, args.all_ranks, args.seed),
        "pages": page_product(),
        "random": random_product(args.random, args.seed),
    }
    all_wrong = []
    print(f"{'':10}{'combinations':>14}{'right':>10}{'permuted':>10}{'refused':>10}{'wrong':>8}")
    for name in [args.only] if args.only else suites:
        begin = time.perf_counter()
        counts, wrong = tally(suites[name])
        all_wrong += wrong
        refused = {key: n for key, n in counts.items() if key.startswith("refused")}
        num_wrong = sum(n for key, n in counts.items() if key.startswith("wrong"))
        permuted = counts["right, permuted"]
        print(
            f"{name:10}{counts.total():>14,}{counts['right'] + permuted:>10,}{permuted:>10,}"
            f"{sum(refused.values()):>10,}{num_wrong:>8,}   {time.perf_counter() - begin:.0f} s"
        )
        for reason, count in sorted(refused.items()):
            print(f"{'':12}{count:,} {reason}")
    print("\n".join(all_wrong))
    return bool(all_wrong)


if __name__ == "__main__":
    sys.exit(main())
