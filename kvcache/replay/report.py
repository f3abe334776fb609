"""The totals of a replay: as data, as JSON and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvcache.checks import instance, plain_fields

if TYPE_CHECKING:
    from rich.table import Table

    from kvcache.replay.mismatch import Mismatch


@dataclass
class ReplayReport:
    """Totals of one replay.

    `requests`: all of the workload, of which `rejected_requests` did not fit into the pool;
    `prompt_tokens`, `hit_blocks`, `hit_tokens` and `token_hit_rate` are over the others.
    `num_blocks` counts the null block, `capacity_blocks` does not. `us_per_request`: microseconds
    in the manager per request of the workload, by phase; `total` is the sum of the three. The four
    fields from `verify_us_per_request` on are None without verification: `verified_tokens` counts
    each served prompt token once, `mismatches` every token found wrong, `mismatched_requests` has the
    first of each request.

    The next three are None unless asked for: tokens per hash, tokens per chunk of a prompt, and per
    group (where groups were given) `kind`, `block_size`, `options`, and the `hit_blocks`,
    `stored_blocks` and `evicted_blocks` that the manager counted. With several groups, `block_size`
    is the first one's, and `hit_blocks` the sum over all.

    `eviction`: None where it is the default. The fields from `host_blocks` (null block counted) on are
    None without a host tier: `host_hit_tokens` are those of `hit_tokens` from a request's first block
    on that was loaded from the host; `written_blocks` went there, `unwritten_blocks` were to and found
    no free page, `declined_blocks` were not worth it (None but for host_write="learned"),
    `loaded_blocks` came back for hits. The fields from `store_blocks` on are None without a store:
    `store_hit_tokens` are those of `hit_tokens` that it had behind the other tiers' hit;
    `store_stored_blocks` were put there, `store_loaded_blocks` came from there, and
    `store_evicted_blocks` gave way to others, all counted per group. The fields from `service` on are
    None but for timed replays: its speeds, the time from the start to the last end, how many requests
    ran at a time at most, and the milliseconds from the arrival of a served request to its first token.
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
    service: str | None = None
    duration_s: float | None = None
    peak_running: int | None = None
    mean_ms_to_first_token: float | None = None
    p99_ms_to_first_token: float | None = None

    def __post_init__(self) -> None:
        plain_fields(self)

    def to_dict(self) -> dict:
        """The report as plain data for JSON, without the fields that are None."""
        return asdict(self, dict_factory=_without_none)


def _without_none(items: list[tuple[str, object]]) -> dict:
    return {name: value for name, value in items if value is not None}


def report_table(report: ReplayReport) -> Table:
    """The report as a rich table; needs the extra `cli`."""
    instance(report, ReplayReport, "report")
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"Replay of {escape(report.trace)}", show_header=False, min_width=60)
    table.add_column("what", style="cyan", no_wrap=True)
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
            f"{'at most ' if report.service else ''}{report.concurrency} at a time",
        ),
        ("rejected", f"{report.rejected_requests:,}", "did not fit into the pool"),
        ("prompt tokens", f"{report.prompt_tokens:,}", "of the requests served"),
    ]
    size = "over all groups" if is_hybrid else f"of {report.block_size} tokens"
    cache = [
        ("token hit rate", f"{report.token_hit_rate:.4f}", f"{report.hit_tokens:,} tokens"),
        ("hit blocks", f"{report.hit_blocks:,}", size),
        ("evicted blocks", f"{report.evicted_blocks:,}", "cached, taken for other content"),
    ]
    pool = [
        ("capacity", f"{report.capacity_blocks:,}", "blocks" if is_hybrid else f"blocks{held}"),
        ("peak in use", f"{report.peak_used_blocks:,}", "blocks held at a time"),
        ("cached at the end", f"{report.cached_blocks:,}", "blocks"),
    ]
    phases = {
        "hash": "hash",
        "step": "look up, allocate",
        "free": "free",
        "total": "manager, in all",
    }
    times = [
        (name, f"{report.us_per_request[key]:,.1f}", "microseconds per request")
        for key, name in phases.items()
    ]
    if report.eviction is not None:
        cache.append(("eviction", report.eviction, "which cached block goes first"))
    sections = [workload, cache, _groups(report), pool, _host(report), _store(report)]
    sections += [_times(report), times]
    return [*sections, _verification(report)]


def _groups(report: ReplayReport) -> list[tuple[str, str, str]]:
    """One line per group that was given."""
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
    return [
        ("timed", report.service, speeds),
        ("duration", f"{report.duration_s:,.1f}", "seconds of the workload"),
        ("peak running", f"{report.peak_running:,}", "requests at a time"),
        ("first token", f"{report.mean_ms_to_first_token:,.1f}", "ms after arrival, mean"),
        ("", f"{report.p99_ms_to_first_token:,.1f}", "ms after arrival, of 99 % at most"),
    ]


def _host(report: ReplayReport) -> list[tuple[str, str, str]]:
    if report.host_blocks is None:
        return []
    how = f"blocks, write {report.host_write}, {report.host_eviction}"
    return [
        ("host capacity", f"{report.host_blocks - 1:,}", how),
        ("host hits", f"{report.host_hit_tokens:,}", "tokens of those hit"),
        ("host writes", f"{report.written_blocks:,}", "blocks, from the device"),
        ("host loads", f"{report.loaded_blocks:,}", "blocks, to the device"),
        ("host evictions", f"{report.host_evicted_blocks:,}", "cached there, taken for others"),
    ]


def _store(report: ReplayReport) -> list[tuple[str, str, str]]:
    if report.store_blocks is None:
        return []
    return [
        ("store capacity", f"{report.store_blocks:,}", "blocks, by count"),
        ("store hits", f"{report.store_hit_tokens:,}", "tokens of those hit"),
        ("store writes", f"{report.store_stored_blocks:,}", "blocks"),
        ("store loads", f"{report.store_loaded_blocks:,}", "blocks, to the device"),
        ("store evictions", f"{report.store_evicted_blocks:,}", "gave way to others"),
    ]


def _verification(report: ReplayReport) -> list[tuple[str, str, str]]:
    if report.mismatches is None:
        return []
    style = "red" if report.mismatches else "green"
    return [
        ("verified tokens", f"{report.verified_tokens:,}", "written or hit, read back, compared"),
        ("mismatches", f"[{style}]{report.mismatches:,}[/]", "tokens with KV not their own"),
        ("verification", f"{report.verify_us_per_request:,.1f}", "microseconds per request"),
    ]
