"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Metrics:
    """Counts of an `Engine` since it was made; `as_dict` gives them by name."""

    requests: int = 0  # added
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_sequences: int = 0  # ended with an error of their own
    steps: int = 0
    failed_steps: int = (
        0  # of which the model or a transfer failed; their tokens were computed again
    )
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # of these, found in the cache when first admitted
    generated_tokens: int = 0
    computed_tokens: int = 0  # by the model, drafts and what was computed again included
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    swapped_out_sequences: int = 0
    recomputed_sequences: int = 0  # preempted, their blocks released
    forked_sequences: int = 0
    swapped_out_pages: int = 0
    swapped_in_pages: int = 0  # those of hits on the host included
    copied_pages: int = 0
    schedule_seconds: float = 0.0  # asking the manager, applying plans, tables, slots
    model_seconds: float = 0.0
    sample_seconds: float = 0.0  # choosing tokens and telling the manager

    def as_dict(self) -> dict[str, float]:
        """Every count by its name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}
