# SPDX-License-Identifier: Apache-2.0
"""The kernel of kvcache in 200 lines: which blocks of KV a request holds, and until when. Seven
concepts for one group with full attention or a sliding window: Block, Chain, Row, Rules, Plan and
Report, Tier, Listener. Random operations compare this page with the real kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

SERVED, WAIT, NEVER = range(3)  # WAIT and NEVER change nothing; NEVER: not even in an empty pool
Plan = SimpleNamespace  # answers; then a worker's work, in order: swap_out, copy, swap_in, tables
Report = int  # the last step that the worker has carried out
Listener = Callable  # hears afterwards what happened to a block; decides nothing


@dataclass(eq=False)
class Block:  # a page's state: free, or held by rows, plans and loads; cached, if it has a key
    id: int
    tier: "Tier" = field(repr=False)
    refs: int = 0
    key: tuple = ()

    def hold(self, n=1):
        self.refs += n
        self.tier.free.pop(self, None)
        if self.refs == 0:  # content and key stay until the block is taken
            self.tier.free[self] = None
        return self


class Chain(list):  # the tokens of a request
    def keys(self, size):  # per block, all tokens up to its end; the real key is a chained hash
        return [tuple(self[:end]) for end in range(size, len(self) + 1, size)]


@dataclass
class Row:  # a running request
    chain: Chain
    blocks: list[Block | None]  # None: the block has left the window
    num_computed: int  # tokens with slots
    num_published: int  # leading blocks that are cached, or will not be


@dataclass
class Rules:  # what is read, and therefore which blocks a hit needs, and which a row drops
    block_size: int
    window: int | None = None  # None: full attention

    def first_needed(self, n):  # first block that token n or a later token reads
        return 0 if self.window is None else max(n - self.window + 1, 0) // self.block_size


class Tier:  # the blocks of the device, or those of the host below it
    def __init__(self, num_blocks, listeners: list[Listener], chain_size=0):
        self.free = {Block(i, self): None for i in range(1, num_blocks)}  # first released first
        self.cached: dict[tuple, list[Block]] = {}  # oldest block first
        self.num_total, self.listeners, self.chain_size = len(self.free), listeners, chain_size

    def find(self, key):
        return self.cached.get(key, [None])[0]

    def publish(self, block, key):
        block.key = key
        self.cached.setdefault(key, []).append(block)
        for listener in self.listeners:
            listener("published", block)

    def take(self):
        # Least recently released first, blocks without a key before all others. Rows release leaves
        # first. The host is filled in any order, so it spares blocks that others depend on.
        parents = {key[: -self.chain_size] for key in self.cached}
        spared = {key for key in parents if len(self.cached.get(key, ())) == 1}
        block = min(self.free, key=lambda each: bool(each.key) + (each.key in spared))
        if block.key:
            self.cached[block.key].remove(block)
            self.cached = {key: blocks for key, blocks in self.cached.items() if blocks}
            for listener in self.listeners:
                listener("evicted", block)
            block.key = ()
        return block


class Manager:  # answers steps with plans; listens to the device, to write evicted blocks to the host
    def __init__(self, rules, num_blocks, num_host_blocks=1, listeners=()):
        self.rules, self.size, self.rows = rules, rules.block_size, {}
        self.device = Tier(num_blocks, [*listeners, self.on_change])
        self.host = Tier(num_host_blocks, listeners, 0 if rules.window else self.size)
        self.loads, self.num_steps = [], 0

    def step(self, running=(), new=(), leaving=()):
        """Swap rows out, serve (row, num_tokens, token_ids), and admit (row, tokens, num_tokens)."""
        self.plan = plan = Plan(answers=[], swap_out=[], copy=[], swap_in=[], tables={})
        self.busy, self.written, answers = [], {}, plan.answers
        answers += [(i, self.rows[i].num_computed, self.swap_out(self.rows[i])) for i in leaving]
        for i, num_tokens, token_ids in running:
            answers.append((i, self.rows[i].num_computed, self.serve(self.rows[i], num_tokens)))
            self.rows[i].chain += token_ids if answers[-1][2] == SERVED else []
        answers += [self.admit(*each) for each in new]
        for row in [self.rows[i] for i, _, status in answers if status == SERVED]:
            for key in row.chain.keys(self.size)[row.num_published : row.num_computed // self.size]:
                block, row.num_published = row.blocks[row.num_published], row.num_published + 1
                if block and self.rules.first_needed(len(key)) < row.num_published:
                    self.device.publish(block, key)  # later plans may hit it
        for page, key in self.written.items():
            self.host.publish(page, key)
        for block in self.busy:
            block.hold(-1)
        for i, row in self.rows.items():  # the real plan lists only changes
            plan.tables[i] = [b.id if b and b.tier is self.device else 0 for b in row.blocks]
        self.num_steps += 1
        return plan

    def hit(self, chain):  # the blocks of the longest cached prefix that leaves a token to compute
        found = [self.device.find(key) or self.host.find(key) for key in chain.keys(self.size)]
        for n in range((len(chain) - 1) // self.size, 0, -1):
            if all(found[(first := self.rules.first_needed(n * self.size)) : n]):
                return [None] * first + found[first:n]
        return []

    def admit(self, i, tokens, num_tokens):
        hit = self.hit(Chain(tokens))
        row = Row(Chain(tokens), hit, len(hit) * self.size, len(hit))
        start = row.num_computed
        status = self.serve(row, min(num_tokens, len(tokens) - start), is_new=True)
        self.rows.update({i: row} if status == SERVED else {})
        return i, start, status

    def serve(self, row, num_tokens, is_new=False):  # load, drop, copy what is shared, and append
        first, stop = self.rules.first_needed(row.num_computed), row.num_computed + num_tokens
        gone, kept = row.blocks[:first], row.blocks[first:]
        num_new = -(-stop // self.size) - len(row.blocks)
        held = [b for r in self.rows.values() for b in r.blocks if b and b.tier is self.device]
        shared = [b for b in row.blocks[row.num_computed // self.size :] if held.count(b) > 1]
        num_taken = num_new + len(shared) + sum(b.tier is self.host or b.refs == 0 for b in kept)
        num_freed = sum(b.refs == 1 and b.tier is self.device for b in gone if b)
        if num_taken > len(self.device.free) + num_freed:
            return NEVER if len(kept) + num_new > self.device.num_total else WAIT
        for block in kept if is_new else ():
            block.hold()
        for i, page in enumerate(kept):
            if page.tier is self.host:
                kept[i] = self.device.take().hold(2)  # by the row and by the load
                self.loads.append((self.num_steps, page, kept[i], is_new))
                self.plan.swap_in.append((page.id, kept[i].id))
        for block in filter(None, reversed(gone)):
            block.hold(-1)
        taken = [self.device.take().hold() for _ in range(len(shared) + num_new)]
        for block in shared:
            self.busy.append(block)  # until the end of the step: the plan reads it
            self.plan.copy.append((block.id, taken[0].id))
            kept[kept.index(block)] = taken.pop(0)
        row.blocks, row.num_computed = [None] * first + kept + taken, stop
        return SERVED

    def report(self, report: Report):  # ends loads; blocks of hits are cached from now on
        ended = [self.loads.pop(0) for step, *_ in self.loads[:] if step <= report]
        for _, page, block, is_hit in ended:
            if is_hit and not block.key:
                self.device.publish(block, page.key)
        for held in [held for _, *pair, _ in reversed(ended) for held in pair]:
            held.hold(-1)

    def swap_out(self, row):
        held = [block for block in row.blocks if block]
        if len(held) > len(self.host.free):
            return WAIT
        pages = {block: self.write(block) for block in held}
        for block in reversed(held):
            block.hold(-1)
        row.blocks = [pages.get(block) for block in row.blocks]
        return SERVED

    def write(self, block):  # to a page of the host, unless a page has this content
        page = self.host.find(block.key) or self.host.take()
        if not page.key:
            self.plan.swap_out.append((block.id, page.id))
            self.written.update({page: block.key} if block.key else {})
        return page.hold()

    def on_change(self, what, block):  # writes the last block with a key when it is evicted
        can_take = self.host.free and block.key not in self.written.values()
        if not self.device.find(block.key) and (can_take or self.host.find(block.key)):
            self.busy.append(self.write(block))

    def fork(self, row, i, tokens):  # `tokens` begin with those that the row has computed
        of, blocks = self.rows[row], [block and block.hold() for block in self.rows[row].blocks]
        self.rows[i] = Row(Chain(tokens), blocks, of.num_computed, of.num_published)

    def free(self, row):
        for block in filter(None, reversed(self.rows.pop(row).blocks)):
            block.hold(-1)


if __name__ == "__main__":
    manager = Manager(Rules(block_size=4), num_blocks=7, num_host_blocks=9, listeners=[print])
    a, b = ("a", range(10), 10), ("b", [*range(8), 20], 9)
    for call in {"new": [a]}, {"new": [b]}, {"leaving": ["a"]}, {"running": [("a", 1, [10])]}:
        print(manager.step(**call))
