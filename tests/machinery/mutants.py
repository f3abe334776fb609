# SPDX-License-Identifier: Apache-2.0
"""Small code changes that the tests must detect (`make mutants`).

A mutant is a replacement in one file; `tests.machinery.planted_breaks` plants it. The listed test files
run first and, if they pass, all others. A mutant survives only if no test fails. `SURVIVORS` lists
equivalent mutants, which no test can detect, with the reason.
"""

from __future__ import annotations

POOL, MANAGER, OPS = "csrc/core/pool/", "csrc/core/manager/", "csrc/ops/"
GROUPS, EVICTION, HASHING = "csrc/core/groups/", "csrc/core/eviction/", "csrc/core/hashing/"
RULES = "csrc/core/groups/rules/"
WORKER = "csrc/worker/"
TRANSFER, PY_WORKER = "kvcache/transfer/", "kvcache/worker/"
SERVING, MODELS = (
    "packages/kvcache-serve/src/kvcache_serve/engine/",
    "packages/kvcache-serve/src/kvcache_serve/engine/transformers/",
)
SERVE = "packages/kvcache-serve/src/kvcache_serve/server/"

# Per file: its path, the test files to run first, and the (old, new) pair of each mutant. `old`
# occurs exactly once in the file.
_MUTANTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        POOL + "block_pool.cpp",
        "block_pool eviction simulator",
        [
            ("if (n > num_free_) return false;", "if (n >= num_free_) return false;"),
            ("num_free_ -= n;\n  note", "note"),
            ("++block.generation;", ""),
            ("if (num_cached_ > 0) index_.clear();", ""),
            ("if (num_free_ != num_total()) return false;", ""),
            ("  num_evicted_ += num_evicted;", "  num_evicted_ += 1;"),
            ("if (index_.erase(key, id)) flags |= Forgotten::kIsLast;", "index_.erase(key, id);"),
            ("if (candidates_) candidates_->set_idle(ids[i], false);", ""),
            ("if (blocks_[ids[n]].ref_count++ > 0) continue;", "continue;"),
            ("&& !is_cached(block)) {\n      throw", "&& false) {\n      throw"),
            (
                "return num_leading < 0 ? n : num_leading;",
                "return num_leading < 0 ? 0 : num_leading;",
            ),
            ("is_cached(block) && block.group != group) return", "false) return"),
            ("if (++epoch_ == 0) {", "if (++epoch_ == 1) {"),
        ],
    ),
    (
        POOL + "hash_index.h",
        "block_pool native",
        [
            (
                "is_last = bucket.num_displaced == 0;",
                "is_last = true;",
            ),
        ],
    ),
    (
        POOL + "hash_index.cpp",
        "block_pool native",
        [
            ("++bucket.num_displaced;", ""),
            ("--buckets_[passed].num_displaced;", ""),
            ("blocks_[youngest].younger = id;", ""),
            ("bucket.ids[place.slot] = next;", ""),
        ],
    ),
    (
        POOL + "block_pool.h",
        "eviction pinning",
        [("for (const BlockId other : changed_) update_candidate(other);", "")],
    ),
    (
        POOL + "block_pool_eviction.cpp",
        "eviction pinning",
        [
            ("has_pin(blocks_[id]); id = links_[id].next) last_passed_ = id;", "false;) {}"),
            ("for (int64_t j = 0; j < i; ++j) pins_->add(ids[j]);", ""),
            ("if (may_be_passed) last_passed_ = kNullBlock;", ""),
        ],
    ),
    (
        POOL + "block_pool_listeners.cpp",
        "block_pool eviction native",
        [
            ("if (!failure_) failure_ = std::current_exception();", "throw;"),
            ("  is_notifying_ = true;\n", ""),
            ("if (candidates_) update_candidates(idle.ids, idle.n);", ""),
            ("partial_.forget(id);", "(void)id;"),
            ("variants_.forget(id);", "(void)id;"),
            ('soundness_->blame("a listener failed");', ""),
            ("listeners_.end() - order_listens", "listeners_.end()"),
        ],
    ),
    (
        POOL + "candidates.cpp",
        "eviction tiers",
        [
            ("places_[block.younger].num_children += place.num_children;", ""),
            ("if (!waiting.empty()) place.num_children = waiting.mapped();", ""),
            ("orphans_[key_of(block)] = place.num_children;", ""),
        ],
    ),
    (
        EVICTION + "learned.h",
        "learned",
        [
            ("const bool moves = now() != first_now_;", "const bool moves = true;"),
        ],
    ),
    (
        EVICTION + "learned/duel.h",
        "learned",
        [
            ("least_ = lead_;", "least_ = 0;"),
        ],
    ),
    (
        EVICTION + "learned/simulated_pool.h",
        "learned",
        [
            (
                "if (segments_.is_candidate(i)) segments_.remove(i);\n    return true;",
                "return true;",
            ),
        ],
    ),
    (
        EVICTION + "learned/segments.h",
        "learned",
        [
            ("if (segment.first == id) segment.first = at.next;", ""),
            (
                "--all_[before].num_blocks == 0) close(before);",
                "--all_[before].num_blocks == 0) return;",
            ),
        ],
    ),
    (
        EVICTION + "priority.h",
        "learned eviction",
        [
            ("candidates.top_key().first < default_priority_", "candidates.top_key().first < 0"),
            ("given_->ends.top_key().first <= now()", "false"),
        ],
    ),
    (
        EVICTION + "learned_copies.h",
        "tiers",
        [
            ("if (of.number == 0) return 1;", "return 1;"),
        ],
    ),
    (
        EVICTION + "learned/hazards.h",
        "learned",
        [
            ("alive *= 1 - hazard_[reuse_class][b];", ""),
            ("best = std::max(best, gain);", "best = gain;"),
            ("num_counted_ = num_added_;", "return;"),
        ],
    ),
    (
        POOL + "block_pool_invalidation.cpp",
        "manager_life simulator",
        [
            ("if (invalid.count(tag_of(block.hash)) != 0) break;", ""),
            ("if (is_uniform) {", "if (true) {"),
            ("invalid.roots.count(lineage_[id].root) == 0", "false"),
        ],
    ),
    (
        POOL + "partial_index.h",
        "groups manager simulator",
        [
            ("entry.same->second.erase(entry.part);", ""),
            ("found->second.front();", "found->second.back();"),
        ],
    ),
    (
        GROUPS + "kinds.h",
        "groups specs",
        [
            (
                "window_ + 1, 0);\n  }\n  bool is_retained",
                "window_ + 2, 0);\n  }\n  bool is_retained",
            ),
            ("return num_computed_tokens / chunk_size_ * chunk_size_;", "return 0;"),
        ],
    ),
    (
        GROUPS + "cache_group.h",
        "groups manager tiers simulator",
        [("if (!drafts || !is_cached) return 0;", "return 0;")],
    ),
    (
        GROUPS + "hit_ends.h",
        "groups hit_ends simulator",
        [
            ("std::min(num_tokens - 1, num_hashed - redone);", "num_hashed - redone;"),
            ("std::min(num_tokens - 1, num_hashed - redone);", "num_tokens - 1;"),
            ("ends[n++] = of_prompt(chain, num_prompt, with_partial);", ""),
            ("ends[n++] = num_shared / of.unit * of.unit;", ""),
            ("if (end > next.start) first = std::min(first, end);", "first = end;"),
        ],
    ),
    (
        MANAGER + "prefix_finder.h",
        "groups manager tiers simulator",
        [
            ("if (stop == n) return n;", "return n;"),
            ("while (block >= first_token / bs &&", "while (block > first_token / bs &&"),
            ("if (only_shared && !ends_->limits_shared(group)) continue;", ""),
            ("on_host.back().column >= num_blocks", "on_host.back().column > num_blocks"),
            ("step_ = ends_->unit(with_partial);", "step_ = ends_->unit(true);"),
        ],
    ),
    (
        MANAGER + "demand.h",
        "manager groups admission simulator",
        [
            (
                "num_free - num_new >= supply.num_kept_free",
                "num_free - num_new > supply.num_kept_free",
            ),
            ("num_free -= num_taken(held, held.num_dropped, held.size());", ""),
            ("supply.num_free - num_upfront(chain)", "supply.num_free"),
            (
                "num_blocks <= num_total - watermark_blocks_",
                "num_blocks <= num_total",
            ),
        ],
    ),
    (
        MANAGER + "row_release.h",
        "manager manager_life simulator",
        [
            ("if (r.by_step()) c_.plan->clear_later(row);", ""),
            ("if (c_.host != nullptr) note_onboards(row);", ""),
            (
                "held.num_published = std::min(held.num_published, num_tokens / group.block_size);",
                "",
            ),
        ],
    ),
    (
        MANAGER + "row_server.cpp",
        "state_drafts draft_steps manager",
        [
            ("if (max_drafts_ == 0) {  // otherwise", "if (true) {  // otherwise"),
            ("r->num_undecided_before = static_cast<int32_t>(span.num_undecided);", ""),
        ],
    ),
    (
        MANAGER + "row_growth.h",
        "manager groups tiers simulator",
        [("held.source = kNullBlock;\n  }", "}")],
    ),
    (
        RULES + "tokens.h",
        "manager groups admission simulator",
        [("&& on.frees_at_once; ++b", "; ++b")],
    ),
    (
        RULES + "tokens.cpp",
        "manager groups tiers simulator",
        [
            ("num_tokens % group.block_size != 0 || first", "first"),
        ],
    ),
    (
        RULES + "effects.h",
        "manager groups tiers simulator",
        [("column >= held.size() || !growth->is_shared(held[column])", "column >= held.size()")],
    ),
    (
        RULES + "state.cpp",
        "manager groups tiers simulator",
        [
            ("hit it.\n  growth->evict(held[held.num_dropped]);", "hit it."),
            ("if (group.may_be_hit(num_passed - 1, publishing->info(row).retained)) {", "{"),
        ],
    ),
    (
        RULES + "state.h",
        "manager manager_life simulator",
        [("return false;  // it was updated in place", "return true;")],
    ),
    (
        RULES + "circular.cpp",
        "manager groups admission simulator",
        [("return holders.is_shared(id);", "return false && holders.is_shared(id);")],
    ),
    (
        MANAGER + "deferred_frees.h",
        "manager_life simulator",
        [
            ("fence.step_id = std::min(fence.step_id, steps_->last_issued);", "(void)fence;"),
            ("std::prev(at)->step_id > step_id) --at;", "false) --at;"),
            (
                "step_id, step_id >= steps_->num_completed)",
                "step_id, step_id > steps_->num_completed)",
            ),
        ],
    ),
    (
        MANAGER + "token_intake.h",
        "manager sequences hashing",
        [
            ("for (int64_t i = 0; i < num_appended; ++i) take_back(request, i);", ""),
            ("if (n > 0) c_.row(request.rows[i]).chain->take_back(n);", ""),
        ],
    ),
    (
        MANAGER + "session_pins.h",
        "pinning tiers",
        [
            ("unpin_all(of_session);", ""),
            ("break;  // lookups cannot find the blocks after it", "continue;"),
            ("pool_->generation(pinned.id) == pinned.generation &&", ""),
        ],
    ),
    (
        MANAGER + "publisher.h",
        "manager groups tiers simulator",
        [
            ("c_.journal->note_written(written);", ""),
            ("if (!c_.host->may_publish(each)) continue;", ""),
            ("content.parent = first_hash == 0 ?", "content.parent = true ?"),
        ],
    ),
    (
        MANAGER + "host_tier.h",
        "tiers simulator",
        [
            ("++counts_.unwritten_blocks;", ""),
            ("if (!each.is_row) pages_->release(&each.page, 1);", ""),
            ("if (is_queued_[id] != 0) return;", ""),
            ("std::reverse(over.begin(), over.end());", ""),
        ],
    ),
    (
        MANAGER + "row_table.h",
        "manager groups simulator",
        [
            (
                "rows_[row].admission = ++num_admissions_;",
                "rows_[row].admission = num_admissions_;",
            ),
            ("if (with_all) add_unordered", "add_unordered"),
            ("|| column * group.block_size != token) continue;", ") continue;"),
            ("if (column < held.num_dropped ||", "if (column < 0 ||"),
        ],
    ),
    (
        MANAGER + "request_checks.h",
        "manager manager_life external_tokens",
        [
            ("if (num_tokens >= 0 && num_tokens <= most) return;", "if (num_tokens >= 0) return;"),
            ("if (!completed) c_.journal->check_may_abort(step_id);", ""),
        ],
    ),
    (
        MANAGER + "request_checks.cpp",
        "manager manager_life external_tokens",
        [
            ("if (num_rejected <= num_uncached) return;", "return;"),
            (
                "check_driver(row, /*by_step=*/true);\n  if (num_tokens",
                "c_.rows->at(row);\n  if (num_tokens",
            ),
        ],
    ),
    (
        HASHING + "extra_keys.cpp",
        "hashing events",
        [
            ("const bool has_salt = block == 0 && !", "const bool has_salt = !"),
            (
                "items_[i].first + items_[i].length <= start",
                "items_[i].first + items_[i].length < start",
            ),
            (
                "append_int(&buffer_, items_[i].first - start);",
                "append_int(&buffer_, items_[i].first);",
            ),
        ],
    ),
    (
        HASHING + "token_chain.cpp",
        "hashing forks manager",
        [
            ("if (hashes_.size() > num_full) hashes_.resize(num_full);", "(void)num_full;"),
            ("!extra_keys_.begins_like(other.extra_keys_, num_begun) ||", ""),
            ("chain->forget_removed();", "(void)chain;"),
        ],
    ),
    (
        WORKER + "host_tables.cpp",
        "host_tables block_table worker",
        [
            ("empty_row(g, src);", ""),
            ("const int64_t limit = this->limit(g, -1);", "const int64_t limit = INT32_MAX;"),
            ("if (n < 0) fail(", "if (false) fail("),
            ("num_dirty_ids_ = 0;", ""),
            ("place[2] = static_cast<int32_t>(values);", "place[2] = 0;"),
        ],
    ),
    (
        WORKER + "host_slots.cpp",
        "block_table slot_mapping_op",
        [
            ("fill(i, std::min(num_tokens, num_slots_), num_slots_);", ""),
            ("on_device_[at] = one_memory_ ? num_tokens : 0;", "on_device_[at] = num_tokens;"),
        ],
    ),
    (
        WORKER + "slot_formula.h",
        "slot_mapping_op block_table attention_metadata_op table_update_op",
        [
            (
                "first_visible = int64_t{first} - window + 1;",
                "first_visible = int64_t{first} - window;",
            ),
            ("return block < 0 ? -1 : block", "return block"),
            ("if (turn > rank) of_round", "if (turn < rank) of_round"),
        ],
    ),
    (
        OPS + "copy_pages.h",
        "block_copy_op",
        [("destination < 0 ||\n", "false ||\n")],
    ),
    (
        OPS + "block_copy.h",
        "block_copy_op pages copy_engine",
        [
            ("if (writer < 0) continue;", "continue;"),
            ("if (before >= 0) {", "if (false) {"),
            ("if (up && !crosses(s - 1, d - 1)) {", "if (up) {"),
            ("run.source = s;", ""),
        ],
    ),
    (
        OPS + "overlap.h",
        "token_io_op block_permute_op",
        [("static_cast<int64_t>(a.element_size()) - 1, budget", "0, budget")],
    ),
    (
        OPS + "table_update.h",
        "table_update_op",
        [
            ("if (idx_mapping.size(0) > num_rows) {", "if (false) {"),
            (
                "int64_t{place[0]} + place[1] > num_ids",
                "int64_t{place[0]} + place[1] > num_ids + 1",
            ),
        ],
    ),
    (
        "kvcache/checks.py",
        "options specs swap worker transfer_blocks",
        [
            ("if number is None or isinstance(value, bool):", "if number is None:"),
            ("if not least <= number <= most:", "if not least <= number:"),
            ("(ids < least) | (ids >= size)", "ids < least"),
            ("if np.count_nonzero(is_repeated):", "if False:"),
        ],
    ),
    (
        "kvcache/memory_plan.py",
        "specs",
        [
            ("(self.num_pages - 1) / self", "self.num_pages / self"),
            ("_SLACK = 1.1", "_SLACK = 2.0"),
            ("<= budget]", "< budget]"),
            (
                "min(budget_bytes // (size * layer_page), MAX_INT32)",
                "budget_bytes // (size * layer_page)",
            ),
            ("return block_size // common * common or block_size", "return block_size"),
            ("drafts = any(by_name[name].drafts", "drafts = all(by_name[name].drafts"),
        ],
    ),
    (
        "kvcache/kinds/sliding_window.py",
        "specs groups",
        [("return self._window - 1 + step_tokens", "return self._window - 2 + step_tokens")],
    ),
    (
        "kvcache/kinds/recurrent.py",
        "specs groups",
        [("return num_states + -(-num_states // tokens_per_page)", "return num_states")],
    ),
    (
        "kvcache/allocator/hashing.py",
        "hashing",
        [
            ('b"\\xf5" if value else b"\\xf4"', 'b"\\xf4" if value else b"\\xf5"'),
            ("if value < 24:", "if value <= 24:"),
            ("_head(_NEGATIVE, -1 - number)", "_head(_NEGATIVE, -number)"),
        ],
    ),
    (
        "kvcache/allocator/request.py",
        "hashing manager groups tenants",
        [
            (
                'flag(read_cache, "read_cache") and not num_encoder_tokens',
                'flag(read_cache, "read_cache")',
            ),
            ("first + length > MAX_INT32", "first + length > MAX_INT32 + 1"),
            ("if key is last_key:", "if chain is not None:"),
        ],
    ),
    (
        "kvcache/allocator/event_stream.py",
        "events",
        [
            ("if first < stop and first + length > start:", "if first < stop:"),
            ("self.cache_salt is not None and start == 0", "self.cache_salt is not None"),
            ("return keys if any(keys) else None", "return keys"),
        ],
    ),
    (
        TRANSFER + "sharding.py",
        "sharding transfer_plan",
        [
            ("reader * len(ranks) // num_readers", "reader % len(ranks)"),
            (
                "reader += 0 if rest else cp_rank + (other < stage)",
                "reader += 0 if rest else cp_rank",
            ),
            ("< min(one.stop, other.stop)", "<= min(one.stop, other.stop)"),
            (
                "tp_rank * total_num_kv_heads // tp_size",
                "tp_rank * (total_num_kv_heads // tp_size)",
            ),
        ],
    ),
    (
        TRANSFER + "plan/transfer_plan.py",
        "transfer_plan transfer_fragments transfer_readers",
        [
            ("if _num_fragments(received) < _num", "if _num_fragments(received) <= _num"),
            ("and mine.heads_per_rank > 1", ""),
            ("if len(differing := np.argwhere(mine != theirs)):", "if differing := []:"),
            ("min(max(rest - cp_rank * chunk, 0), chunk)", "min(rest, chunk)"),
        ],
    ),
    (
        "kvcache/compat/kv_transfer/aggregate.py",
        "aggregate",
        [
            ("in (before | changed).items() if left}", "in (before | changed).items()}"),
            ("value = copy.deepcopy(value)  # the sum", "# the sum"),
            ("return total if added is None else added", "return added"),
        ],
    ),
    (
        PY_WORKER + "worker.py",
        "worker worker_order swap order_of_calls",
        [
            ("if plan.step_id <= last:", "if plan.step_id < last:"),
            ("if previous > last:", "if False:"),
            ("if each.pages is not self.pages:", "if False:"),
            ("        self._table_set.begin_step()\n", ""),
            ("[*appended, *replaced,", "[*replaced,"),
            ("[*appended, *replaced,", "[*appended,"),
            ("moves.copy[:, 1], moves.zero]", "moves.zero]"),
            ("moves.copy[:, 1], moves.zero]", "moves.copy[:, 1]]"),
            ("if type(plan.version) is not int or plan.version != PLAN_VERSION:", "if False:"),
        ],
    ),
    (
        PY_WORKER + "swap/engine.py",
        "swap swap_streams calibration",
        [
            ('self._swap_streams[OUT].last_reading(pages), "released"', 'None, "released"'),
            ("for key in (IN, _EXPEDITED)]", "for key in (IN,)]"),
            ('self._after(begin, other.last_writing(pairs[:, 1]), "done")', "pass"),
            ("& (steps[:, 0] == steps[:, 1])", ""),
        ],
    ),
    (
        PY_WORKER + "swap/calibration.py",
        "calibration",
        [
            ("if method not in METHODS:", "if False:"),
            ("if found.machine != machine:", "if False:"),
        ],
    ),
    (
        "packages/kvcache-lab/src/kvcache_lab/bandwidth.py",
        "bandwidth",
        [("(before + size) // 2", "size")],
    ),
    (
        SERVING + "scheduler.py",
        "scheduler progress engine",
        [
            ("self.manager.reject_tokens(sequence.request, num_rejected)", "pass"),
            ("parent.num_rows = max(1, parent.num_rows - child.num_rows)", "pass"),
            ("        if self._victim is sequence:\n            self._victim = None\n", ""),
            ("if not ((decoding or asked) and (swapped or self._is_short)):", "if True:"),
            ("sorted(pending, key=lambda each: each[1] > 1)", "pending"),
            (
                "sequence.state, self._has_changed = State.FINISHED, True",
                "sequence.state = State.FINISHED",
            ),
            ("each.state is State.RUNNING and each not in leaving", "each not in leaving"),
            (
                "np.concatenate((known.num_computed, num_computed))[order]",
                "np.concatenate((known.num_computed, num_computed))",
            ),
            ("if decoding is None or self._has_changed:", "if decoding is None:"),
            ("np.count_nonzero(plan.status[:k]) or has_moved", "has_moved"),
            ("most = min(most, sequence.max_tokens - 1)", "pass"),
            ("running[first + 1 :] or", "running[:first] + running[first + 1 :] or"),
            ("(running[:first] if nothing_done else [])", "[]"),
            ("queue[at - 1].rank > sequence.rank", "queue[at - 1].rank >= sequence.rank"),
            ("if sequence is self._first_stuck:", "if False:"),
            ("sequence.most_new = count // 2", "pass"),
            ("logits_of.append(1 + len(drafts) if stop >= known else 0)", "logits_of.append(1)"),
            ("key=lambda each: not each.has_begun", "key=lambda each: 0"),
            ("request.num_tokens - num_cached, budget", "request.num_tokens, budget"),
        ],
    ),
    (
        SERVING + "engine.py",
        "engine_failures engine serve",
        [
            ("        self.scheduler.fail(step)\n", ""),
            ("len(tokens) + params.max_tokens > most", "len(tokens) > most"),
            ("if step.rows is rows:", "if last and len(step.rows) == len(last):"),
        ],
    ),
    (
        SERVING + "output_processor.py",
        "engine_failures engine serve",
        [
            (
                "if reason or i == len(drafts) or drafts[i] != token or",
                "if reason or i == len(drafts) or",
            ),
            ("or not are_finite[i + 1]", ""),
            ("if not are_finite[rows.start]:", "if not all(are_finite[rows]):"),
            ("._replace(token_ids=picks, logprobs=logprobs)", ""),
            ("elif len(picks) == room:", "elif len(picks) > room:"),
            ("decoding.num_computed <= 1", "decoding.num_computed < 1"),
            ("if columns.are_individual or np", "if np"),
            ("if any(map(_FINISH_REASON, samples)):", "if False:"),
            ("if has_forks or generation.free is not None:", "if has_forks:"),
            ("logits[at + i], token, params.logprobs", "row, token, params.logprobs"),
            ("drawn = [i for i in range(num) if i not in errors]", "drawn = [*range(num)]"),
            ("if count == 0 or has_changed:", "if count == 0:"),
            ("cache_salt=generation.cache_salt", "cache_salt=None"),
            ("(*self.scheduler.admitted, *self.scheduler.waiting)", "(*self.scheduler.waiting,)"),
        ],
    ),
    (
        SERVING + "sampling.py",
        "sampling engine",
        [
            ('f"{seed} {nth}"', 'f"{seed}"'),
            ("order[1:][sums[:-1] >= top_p", "order[sums >= top_p"),
            ("is_in = logits > least", "is_in = logits >= least"),
            ("/ self._params.temperature", "* self._params.temperature"),
            ("logits.float() if logits.itemsize < 4 else logits", "logits.float()"),
        ],
    ),
    (
        SERVING + "drafters.py",
        "sampling",
        [("while at >= 0 and at % width:", "while False:")],
    ),
    (
        MODELS + "attention.py",
        "engine",
        [
            ("(seen >= firsts[:, None])", "True"),
            ("np.minimum(columns, lengths[:, None] - 1)", "columns"),
            ("if is_padded else None", "if False else None"),
        ],
    ),
    (
        MODELS + "mixers.py",
        "engine attach",
        [
            ("None if part.before is None else", "None if True else"),
            ("(batch.query_lens == 1) & (batch.starts > 0)", "batch.query_lens == 1"),
            ("pages[i, part.after : part.after + 1]", "pages[i, :1]"),
        ],
    ),
    (
        MODELS + "segments.py",
        "attach engine",
        [
            ("if resumes or start == 0 else 1", "if True else 1"),
            ("before = None if start == 0 else 0", "before = None"),
            ("start + at - first, draft, draft + 1)", "start + at - first, draft, 0)"),
        ],
    ),
    (
        MODELS + "request_cache.py",
        "attach",
        [
            ("self._first, self._first\n", "self._first, 0\n"),
            ("context.slots[at + self._first :", "context.slots[at :"),
            ("return self._start\n", "return 0\n"),
        ],
    ),
    (
        MODELS + "self_check.py",
        "attach",
        [
            ("wrong = ~(found <= tolerance)", "wrong = found > np.inf"),
            ("if self._is_half and wrong.mean()", "if wrong.mean()"),
            ("_TOKENS_PER_STEP = 11 ", "_TOKENS_PER_STEP = 999 "),
        ],
    ),
    (
        MODELS + "paged_cache.py",
        "attach",
        [
            ("        if self._unread:\n            raise", "        if False:\n            raise"),
        ],
    ),
    (
        SERVE + "engine_loop.py",
        "serve serving_refusals",
        [
            ("self.engine.abort(generation.request_id)", "pass"),
            ("Answer.put_all([(answer, error) for answer in answers])", "pass"),
            ("self._num_failures = 0\n        self._tell", "self._tell"),
            ("                self._is_stopped = True\n", ""),
            ("if self._num_failures == _MAX_FAILURES:", "if False:"),
        ],
    ),
    (
        SERVE + "texts.py",
        "serve openai_clients",
        [
            ("shown = len(held) - stops.num_held[self._state]", "shown = len(held)"),
            ("held[: len(self._held) + i + 1 - length]", "held[: len(self._held) + i + 1]"),
            ("self._decoder.decode(data, final)", "self._decoder.decode(data, True)"),
            ("self._text([*before, token_id])[len(known) :]", "self._text([token_id])"),
            ("            clean_up_tokenization_spaces=False,\n", ""),
            ('ends = set(_checked_tokens(end_token_ids, "end_token_ids"))', "ends = set()"),
        ],
    ),
    (
        SERVE + "answers.py",
        "serve openai_clients",
        [
            ("if await request.is_disconnected():", "if False:"),
            ("answer.stop(delta.index)", "pass"),
            ("number * self._num_samples + delta.index", "number"),
            ('"cache_salt": asked.cache_salt', '"cache_salt": None'),
            ("is_hidden = token in self._source.params.stop_token_ids", "is_hidden = False"),
            ("                return shown, i + 1\n", "                pass\n"),
            ("elif name in names:", "elif False:"),
            ("offset=min(each.offset, size)", "offset=each.offset"),
            ("for chunk in (*openings, form", "for chunk in (form"),
        ],
    ),
]

# Name of a mutant that no test can detect -> the reason.
SURVIVORS = {
    "block_pool.cpp:12": "Python cannot publish partial blocks in a bare pool; `make ctest` detects it.",
    "block_copy.h:3": "Runs are cut only for mapped host memory; `make gpu-less` detects it.",
    "host_tier.h:3": "A block that is queued twice is still written only once.",
    "host_tier.h:4": "Only the order of evictions after an abort differs; `make ctest` detects it.",
    "hash_index.cpp:2": "The mutant only costs time: a search visits all buckets instead.",
    "transfer_plan.py:2": "With one head per rank, the skipped search finds no fewer fragments.",
}


def _short(path: str) -> str:
    """Return the file's name, preceded by its folder if another file has the same name."""
    name = path.rpartition("/")[2]
    is_alone = sum(other.endswith(f"/{name}") for other, *_ in _MUTANTS) == 1
    return name if is_alone else "/".join(path.split("/")[-2:])


# Each entry: (name, path, old, new, test files).
MUTANTS = [
    (f"{_short(path)}:{number}", path, old, new, tests)
    for path, tests, changes in _MUTANTS
    for number, (old, new) in enumerate(changes, 1)
]
