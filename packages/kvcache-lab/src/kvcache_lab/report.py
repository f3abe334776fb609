# SPDX-License-Identifier: Apache-2.0
"""The totals of a replay, as data, JSON or a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvcache.allocator import MISS_REASONS
from kvcache.checks import instance, plain_fields

if TYPE_CHECKING:
    from rich.table import Table

    from kvcache_lab.mismatch import Mismatch


@dataclass
class ReplayReport:
    """Totals of one replay. Fields that do not apply to the replay are None.

    Attributes:
        trace: Name of the trace.
        block_size: Tokens per block. With several groups: the block size of the first group.
        num_blocks: Pool size, including the null block.
        capacity_blocks: Pool size, without the null block.
        concurrency: Maximum number of running requests.
        requests: Requests of the workload, including rejected requests.
        prompt_tokens: Prompt tokens of the served requests.
        hit_blocks: Hit blocks of the served requests, over all groups.
        hit_tokens: Hit tokens of the served requests.
        token_hit_rate: `hit_tokens` per prompt token.
        rejected_requests: Requests that did not fit into the pool.
        us_per_request: Time in the manager per request in microseconds, by phase. `total` is the
            sum.
        verify_us_per_request: Verification time per request in microseconds.
        verified_tokens: Verified prompt tokens, each counted once.
        mismatches: Number of wrong tokens.
        mismatched_requests: The first wrong token of each request that has one.
        hash_block_size: Tokens per hash, if set.
        chunk_tokens: Tokens per prefill chunk, if set.
        groups: For each given group, its `kind`, `block_size` and `options`, and the manager's
            counts `hit_blocks`, `stored_blocks` and `evicted_blocks`.
        eviction: The eviction policy. None: the default.
        missed_tokens: With `explain_misses`: prompt tokens of the served requests that were not hits,
            by reason (`kvcache.allocator.MISS_REASONS` without `external`, because tokens from a
            store are hits). The values add up to `prompt_tokens - hit_tokens`.
        out_of_order_requests: Requests of an untimed replay whose timestamps are earlier than that
            of a previous request. The clock does not go back for them. None: there are none.
        host_blocks: Size of the host tier, including its null block.
        host_hit_tokens: The part of `hit_tokens` that starts, in each request, at the first block
            loaded from the host.
        written_blocks: Blocks written to the host.
        unwritten_blocks: Blocks not written because no host page was free.
        declined_blocks: Blocks not written because `min_gain_to_write` expected too few hits.
        loaded_blocks: Blocks loaded from the host for hits.
        store_blocks: Size of the simulated store.
        store_hit_tokens: The part of `hit_tokens` that follows the hit in the other tiers and was
            found in the store.
        store_stored_blocks: Blocks put into the store, counted per group.
        store_loaded_blocks: Blocks loaded from the store, counted per group.
        store_evicted_blocks: Blocks that the store evicted, counted per group.
        device_hit_tokens: The part of `hit_tokens` that was on the device when its request was
            admitted. None without a host tier and a store.
        service: Speeds of a timed replay.
        duration_s: Time from the start to the end of the last request, in seconds of workload time.
        peak_running: Maximum number of concurrently running requests.
        mean_ms_to_first_token: Mean time from the arrival of a served request to its first token.
        p99_ms_to_first_token: 99th percentile of these times.
        overload: Reason why the modeled engine cannot keep up with the arrivals. None: it can keep
            up.
    """

    trace: str
    block_size: int
    num_blocks: int
    capacity_blocks: int
    concurrency: int
    requests: int
    prompt_tokens: int
    hit_blocks: int
    hit_tokens: int
    token_hit_rate: float
    evicted_blocks: int
    rejected_requests: int
    peak_used_blocks: int
    cached_blocks: int
    us_per_request: dict[str, float]
    verify_us_per_request: float | None = None
    verified_tokens: int | None = None
    mismatches: int | None = None
    mismatched_requests: list[Mismatch] | None = None
    hash_block_size: int | None = None
    chunk_tokens: int | None = None
    groups: list[dict] | None = None
    eviction: str | None = None
    missed_tokens: dict[str, int] | None = None
    out_of_order_requests: int | None = None
    host_blocks: int | None = None
    host_write: str | None = None
    host_eviction: str | None = None
    host_hit_tokens: int | None = None
    host_evicted_blocks: int | None = None
    written_blocks: int | None = None
    unwritten_blocks: int | None = None
    declined_blocks: int | None = None
    loaded_blocks: int | None = None
    store_blocks: int | None = None
    store_hit_tokens: int | None = None
    store_stored_blocks: int | None = None
    store_loaded_blocks: int | None = None
    store_evicted_blocks: int | None = None
    device_hit_tokens: int | None = None
    service: str | None = None
    duration_s: float | None = None
    peak_running: int | None = None
    mean_ms_to_first_token: float | None = None
    p99_ms_to_first_token: float | None = None
    overload: str | None = None

    def __post_init__(self) -> None:
        plain_fields(self)

    def to_dict(self) -> dict:
        """Return the report as plain data for JSON, without the fields that are None."""
        return asdict(self, dict_factory=_without_none)


def _without_none(items: list[tuple[str, object]]) -> dict:
    return {name: value for name, value in items if value is not None}


def report_table(report: ReplayReport) -> Table:
    """Return the report as a rich table."""
    instance(report, ReplayReport, "report")
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"Replay of {escape(report.trace)}", show_header=False)
    table.add_column("what", style="cyan")
    table.add_column("value", justify="right", style="bold", no_wrap=True)
    table.add_column("note", style="dim")
    for section in _sections(report):
        for row in section:
            table.add_row(*row)
        table.add_section()
    return table


def _sections(report: ReplayReport) -> list[list[tuple[str, str, str]]]:
    is_hybrid = report.groups is not None and len(report.groups) > 1
    held = f", {report.capacity_blocks * report.block_size:,} tokens"
    workload = [
        (
            "requests",
            f"{report.requests:,}",
            f"{'at most ' if report.service else ''}{report.concurrency} concurrent",
        ),
        ("rejected", f"{report.rejected_requests:,}", "did not fit into the pool"),
        ("prompt tokens", f"{report.prompt_tokens:,}", "of the served requests"),
    ]
    if report.out_of_order_requests is not None:
        note = "requests with timestamps earlier than a previous one"
        workload.append(("out of order", f"{report.out_of_order_requests:,}", note))
    size = "over all groups" if is_hybrid else f"of {report.block_size} tokens"
    cache = [
        ("token hit rate", f"{report.token_hit_rate:.4f}", f"{report.hit_tokens:,} tokens"),
        *_device(report),
        ("hit blocks", f"{report.hit_blocks:,}", size),
        ("evicted blocks", f"{report.evicted_blocks:,}", "cached blocks replaced by others"),
    ]
    pool = [
        ("capacity", f"{report.capacity_blocks:,}", "blocks" if is_hybrid else f"blocks{held}"),
        ("peak in use", f"{report.peak_used_blocks:,}", "blocks held at once"),
        ("cached at the end", f"{report.cached_blocks:,}", "blocks"),
    ]
    phases = {
        "hash": "hash",
        "step": "lookup, allocation",
        "free": "free",
        "total": "manager, total",
    }
    times = [
        (name, f"{report.us_per_request[key]:,.1f}", "us per request")
        for key, name in phases.items()
    ]
    if report.eviction is not None:
        cache.append(("eviction", report.eviction, "eviction policy"))
    sections = [
        workload,
        cache,
        _misses(report),
        _groups(report),
        pool,
        _host(report),
        _store(report),
    ]
    sections += [_times(report), times]
    return [*sections, _verification(report)]


def _misses(report: ReplayReport) -> list[tuple[str, str, str]]:
    """Return one row per miss reason."""
    missed = report.missed_tokens
    if missed is None:
        return []
    total = max(sum(missed.values()), 1)
    rows = [("missed tokens", f"{sum(missed.values()):,}", "of the served requests")]
    for reason, count in missed.items():
        if count:
            rows.append(
                (f"  {reason}", f"{count:,}", f"{count / total:.1%} {MISS_REASONS[reason]}")
            )
    return rows


def _groups(report: ReplayReport) -> list[tuple[str, str, str]]:
    """Return one row per given group."""
    return [
        (
            " ".join([group["kind"], *(f"{k}={v}" for k, v in group["options"].items())]),
            f"{group['hit_blocks']:,}",
            f"hit blocks of {group['block_size']:,} tokens; "
            f"{group['stored_blocks']:,} stored, {group['evicted_blocks']:,} evicted",
        )
        for group in report.groups or []
    ]


def _times(report: ReplayReport) -> list[tuple[str, str, str]]:
    if report.service is None:
        return []
    speeds = "tokens per second: prompts, each answer"
    if report.service.count(",") > 1:
        speeds += ", host" + ", store" * (report.service.count(",") > 2)
    overloaded = []
    if report.overload is not None:
        overloaded = [("[red]overloaded[/]", "[red]yes[/]", report.overload)]
    return [
        ("timed", report.service, speeds),
        ("duration", f"{report.duration_s:,.1f}", "seconds of the workload"),
        ("peak running", f"{report.peak_running:,}", "concurrent requests"),
        ("first token", f"{report.mean_ms_to_first_token:,.1f}", "ms after arrival, mean"),
        ("", f"{report.p99_ms_to_first_token:,.1f}", "ms after arrival, 99th percentile"),
        *overloaded,
    ]


def _host(report: ReplayReport) -> list[tuple[str, str, str]]:
    if report.host_blocks is None:
        return []
    how = f"blocks, write {report.host_write}, {report.host_eviction}"
    return [
        ("host capacity", f"{report.host_blocks - 1:,}", how),
        ("host hits", f"{report.host_hit_tokens:,}", "of the hit tokens"),
        ("host writes", f"{report.written_blocks:,}", "blocks written by the device"),
        ("host loads", f"{report.loaded_blocks:,}", "blocks loaded to the device"),
        ("host evictions", f"{report.host_evicted_blocks:,}", "cached pages that were reused"),
    ]


def _store(report: ReplayReport) -> list[tuple[str, str, str]]:
    if report.store_blocks is None:
        return []
    return [
        ("store capacity", f"{report.store_blocks:,}", "simulated blocks"),
        ("store hits", f"{report.store_hit_tokens:,}", "of the hit tokens"),
        ("store writes", f"{report.store_stored_blocks:,}", "blocks"),
        ("store loads", f"{report.store_loaded_blocks:,}", "blocks loaded to the device"),
        ("store evictions", f"{report.store_evicted_blocks:,}", "blocks evicted by the store"),
    ]


def _device(report: ReplayReport) -> list[tuple[str, str, str]]:
    if report.device_hit_tokens is None:
        return []
    rate = report.device_hit_tokens / max(report.prompt_tokens, 1)
    return [("hit rate on the device", f"{rate:.4f}", f"{report.device_hit_tokens:,} tokens")]


def _verification(report: ReplayReport) -> list[tuple[str, str, str]]:
    if report.mismatches is None:
        return []
    style = "red" if report.mismatches else "green"
    return [
        ("verified tokens", f"{report.verified_tokens:,}", "written or hit, read, compared"),
        ("mismatches", f"[{style}]{report.mismatches:,}[/]", "tokens with wrong KV"),
        ("verification", f"{report.verify_us_per_request:,.1f}", "us per request"),
    ]
