"""Plant known faults, one at a time, in a copy of the tree, and see that a named test kills each.

A mutant that survives means that a test has gone blind. A mutant whose text is no longer in the source fails
too: the fault must be planted anew where the code now is.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replace `old` by `new` in `file`; `test` must then fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


CONTRACT = "tests/core/test_chunked_prefill.py::test_"
SCHEDULER = "tests/core/test_scheduler.py::test_"
SHARING = "tests/core/test_prefix_sharing.py::test_"
ORDER = "tests/core/test_order.py::test_"
STARVATION = "tests/core/test_starvation.py::test_"
VICTIMS = "tests/core/test_victims.py::test_"
LOOKUPS = "tests/core/test_lookups.py::test_"
GUARDS = "tests/server/test_guards.py::test_"
CONNECTIONS = "tests/server/test_connections.py::test_"
TERMS = "tests/server/test_terms.py::test_"
ADMISSION = "tests/core/test_admission.py::test_"
SIM = "tests/sim/test_simulator.py::test_"
TUNE = "tests/tune/test_"
CALIBRATION = "tests/engine/test_calibration.py::test_"
FAKE = "tests/engine/test_fake_runner.py::test_"
COST = "tests/core/test_cost.py::test_"
BUDGET = "tests/core/test_budget.py::test_"
TARGETS = "tests/metrics/test_targets.py::test_"
INPUTS = "tests/runner/test_inputs.py::test_"
EXACT = "tests/runner/test_exact_schedules.py::test_"
INVARIANCE = "tests/runner/test_chunk_invariance.py::test_"
PRODUCTS = "tests/kernels/test_integer_products.py::test_"
SCORES = "tests/core/test_prompt_logprobs.py::"
ALONE = "tests/kernels/test_rows_stand_alone.py::test_"
CONSTRAINT = "tests/core/test_constraint.py::test_"
GRAMMAR = "tests/text/test_grammar.py::"
MASKED = "tests/runner/test_masked_rows.py::test_"

MUTANTS = (
    # The faults that the founding contract names.
    Mutant(
        "a chunk that ignores the budget left",
        "legato/core/prefill.py",
        "return min(remaining, self.chunk, budget)",
        "return min(remaining, self.chunk)",
        CONTRACT + "a_chunking_policy_by_itself_keeps_the_budget",
    ),
    Mutant(
        "a scheduler that trusts its policy with the budget",
        "legato/core/draft.py",
        "if policy.whole and alone else min(remaining, left)",
        "if policy.whole and alone else remaining",
        SCHEDULER + "no_policy_can_break_the_budget_or_stop_the_engine",
    ),
    Mutant(
        "a chunk that ignores prefill_chunk",
        "legato/core/prefill.py",
        "return min(remaining, self.chunk, budget)",
        "return min(remaining, budget)",
        CONTRACT + "hand_example_chunk_plan",
    ),
    Mutant(
        "sampling a middle chunk",
        "legato/core/plan.py",
        "        if last:\n            sample",
        "        if True:\n            sample",
        CONTRACT + "plan_samples_only_sequence_ends",
    ),
    Mutant(
        "a decode placed at position n",
        "legato/core/plan.py",
        "tokens, start, tuple",
        "tokens, start + (len(tokens) == 1), tuple",
        CONTRACT + "plan_samples_only_sequence_ends",
    ),
    Mutant(
        "a last chunk of full size past the prompt",
        "legato/core/prefill.py",
        "min(chunk, n - start)",
        "chunk",
        CONTRACT + "split_hand_example",
    ),
    Mutant(
        "chunk-relative positions",
        "legato/core/plan.py",
        "tokens, start, tuple",
        "tokens, 0, tuple",
        CONTRACT + "plan_samples_only_sequence_ends",
    ),
    Mutant(
        "positions that begin at 0 in every chunk, in the runner",
        "legato/runner/inputs.py",
        "+ (starts - query_start[:-1])[owner]",
        "- query_start[:-1][owner]",
        INVARIANCE + "chunked_prefill_matches_whole_within_tolerance",
    ),
    Mutant(
        "a query offset of 0 in the mask",
        "legato/attention/reference.py",
        "rows = torch.arange(start, end, device=device)",
        "rows = torch.arange(end - start, device=device)",
        INVARIANCE + "chunked_prefill_matches_whole_within_tolerance",
    ),
    # Others, of the scheduler and the pool.
    Mutant(
        "admission by the known tokens only",
        "legato/core/admission.py",
        "if self._empty else self._end_blocks(sequence)",
        "if self else self._end_blocks(sequence)",
        SCHEDULER + "admission_needs_the_whole_prompt_and_a_block_more",
    ),
    Mutant(
        "the most senior may be preempted",
        "legato/core/preemption.py",
        "senior = min(everyone, key=seniority)",
        "senior = max(everyone, key=seniority)",
        SCHEDULER + "the_youngest_is_preempted_and_goes_on_where_it_was",
    ),
    Mutant(
        "a preempted sequence has no precedence in the queue",
        "legato/core/order.py",
        "return sequence.num_preemptions == 0",
        "return sequence.num_preemptions > 0",
        SCHEDULER + "a_preempted_sequence_waits_at_the_head_of_the_queue",
    ),
    Mutant(
        "a preempted sequence believes its blocks still hold something",
        "legato/core/scheduler.py",
        "sequence.num_computed = 0",
        "sequence.num_computed = sequence.num_computed // 2",
        SCHEDULER + "the_youngest_is_preempted_and_goes_on_where_it_was",
    ),
    Mutant(
        "an abort during a step frees blocks that the step still writes",
        "legato/core/scheduler.py",
        "if any(run.request_id == sequence.id for run in runs):",
        "if not self:",
        SCHEDULER + "blocks_of_an_aborted_sequence_stay_held_while_a_step_writes_them",
    ),
    Mutant(
        "a stop token counts before min_tokens",
        "legato/core/stopping.py",
        "may_stop = num_generated > params.min_tokens or",
        "may_stop = True or",
        SCHEDULER + "no_stop_token_counts_before_min_tokens",
    ),
    Mutant(
        "one token too few",
        "legato/core/stopping.py",
        "num_generated >= params.max_tokens",
        "num_generated >= params.max_tokens - 1",
        SCHEDULER + "exactly_max_tokens_are_made",
    ),
    # Of what is shared.
    Mutant(
        "a digest without what is before it",
        "legato/core/prefix_index.py",
        "hashlib.sha256(chain[-1] + data)",
        "hashlib.sha256(data)",
        SHARING + "digests_are_equal_as_far_as_the_texts_are_and_no_further",
    ),
    Mutant(
        "all tenants share one root",
        "legato/core/prefix_index.py",
        'hashlib.sha256(b"salt " + salt.encode(errors="surrogatepass"))',
        'hashlib.sha256(b"salt " + salt[:0].encode())',
        SHARING + "only_requests_with_the_same_salt_share",
    ),
    Mutant(
        "no-prefix-cache shares all the same",
        "legato/core/scheduler.py",
        "if self.config.prefix_cache else private_root(self._num_added)",
        "if request.id else private_root(self._num_added)",
        SHARING + "without_prefix_cache_nobody_shares_and_nothing_changes",
    ),
    Mutant(
        "a fully cached prompt computes nothing",
        "legato/core/sequence.py",
        "return len(self.tokens) - 1\n",
        "return len(self.tokens)\n",
        SHARING + "a_fully_cached_prompt_of_whole_blocks_still_computes_its_last_block",
    ),
    Mutant(
        "a block that is filled in part is shareable",
        "legato/core/scheduler.py",
        "end = sequence.num_computed // size",
        "end = -(-sequence.num_computed // size)",
        SHARING + "a_block_is_found_only_after_the_step_that_filled_it",
    ),
    Mutant(
        "a block is published under its neighbour's digest",
        "legato/core/scheduler.py",
        "self.blocks.publish(sequence.blocks[i], sequence.chain[i + 1])",
        "self.blocks.publish(sequence.blocks[i], sequence.chain[i])",
        SHARING + "a_block_is_found_only_after_the_step_that_filled_it",
    ),
    Mutant(
        "a shared block is free when its first holder leaves",
        "legato/core/block_pool.py",
        "self._holders[block] -= 1",
        "self._holders[block] = 0",
        SHARING + "the_pool_does_what_the_slow_pool_does",
    ),
    Mutant(
        "heads are evicted before tails",
        "legato/core/block_pool.py",
        "for block in reversed(blocks):",
        "for block in blocks:",
        SHARING + "the_least_recently_used_is_evicted_and_tails_before_heads",
    ),
    Mutant(
        "the most recently used is evicted",
        "legato/core/block_pool.py",
        "self._cached.popitem(last=False)",
        "self._cached.popitem(last=True)",
        SHARING + "the_least_recently_used_is_evicted_and_tails_before_heads",
    ),
    Mutant(
        "cached blocks are taken before blank ones",
        "legato/core/block_pool.py",
        "            if self._blank:\n",
        "            if self._blank and not self._cached:\n",
        SHARING + "the_pool_does_what_the_slow_pool_does",
    ),
    Mutant(
        "an evicted block is still known",
        "legato/core/prefix_index.py",
        "del self._block_of[self._digest_of.pop(block)]",
        "self._digest_of.pop(block)",
        SHARING + "the_pool_does_what_the_slow_pool_does",
    ),
    Mutant(
        "a shared block stays evictable",
        "legato/core/block_pool.py",
        "self._cached.pop(block, None)",
        "self._cached.get(block)",
        SHARING + "the_pool_does_what_the_slow_pool_does",
    ),
    Mutant(
        "newcomers of one step may evict what another shares",
        "legato/core/scheduler.py",
        """            self._admit(request_id, starts[request_id])
""",
        """            self._admit(request_id, starts[request_id])
            self._grow(self.running[request_id])
""",
        SHARING + "what_one_shares_is_not_evicted_by_those_admitted_with_it",
    ),
    Mutant(
        "cached blocks that two newcomers share count twice",
        "legato/core/admission.py",
        "if self._pool.holders(block) or block in self._pinned",
        "if self._pool.holders(block)",
        SHARING + "cached_blocks_that_two_newcomers_share_are_counted_once",
    ),
    Mutant(
        "cached blocks that nobody holds cost nothing",
        "legato/core/admission.py",
        "return sum(1 for block in found if self._pool.holders(block) or block in self._pinned)",
        "return len(found)",
        SHARING + "a_cached_block_is_not_free_for_who_shares_it",
    ),
    Mutant(
        "nobody waits for a leader",
        "legato/core/draft.py",
        "if self._is_sooner_as_follower(prompt, len(found)):",
        "if self._is_sooner_as_follower(prompt, len(found)) and not found:",
        SHARING + "a_follower_waits_for_the_leader_and_computes_only_its_own_tail",
    ),
    Mutant(
        "everyone waits for a leader, however slow",
        "legato/core/draft.py",
        "(end - chunk.start) / chunk.length <= num_common / own_chunk",
        "(end - chunk.start) / chunk.length >= 0",
        SHARING + "nobody_follows_a_leader_that_is_slower_than_itself",
    ),
    Mutant(
        "hits are counted again after a preemption",
        "legato/core/scheduler.py",
        "        if not sequence.num_preemptions:\n            sequence.num_cached = start",
        "        if sequence.num_cached == 0:\n            sequence.num_cached = start",
        SHARING + "hits_count_once_whatever_becomes_of_the_request",
    ),
    # Of the order.
    Mutant(
        "fair forgets how long one has waited",
        "legato/core/order.py",
        "sequence.entry_time + sequence.size, sequence.number",
        "sequence.size, sequence.number",
        ORDER + "the_order_of_two",
    ),
    Mutant(
        "virtual time stands still",
        "legato/core/scheduler.py",
        "self.virtual_time += max(share, AGEING * schedule.budget)",
        "self.virtual_time += 0",
        ORDER + "a_giant_gets_on_under_a_stream_of_short_prompts",
    ),
    Mutant(
        "no share is kept for prompts that end",
        "legato/core/draft.py",
        "part = self._scheduler.order.ending_share if prompts else 0.0",
        "part = 0.0",
        ORDER + "a_share_of_each_step_is_kept_for_prompts_that_end_in_it",
    ),
    Mutant(
        "overdue prompts get no turn",
        "legato/core/draft.py",
        "(step - s.last_step <= OVERDUE_STEPS, order.key(s), s)",
        "(True, order.key(s), s)",
        ORDER + "a_started_prompt_is_never_forgotten",
    ),
    Mutant(
        "crumbs",
        "legato/core/draft.py",
        "if cut and not last and self._chunks:",
        "if not self:",
        ORDER + "what_is_left_of_a_step_makes_no_crumbs_but_may_end_a_prompt",
    ),
    Mutant(
        "the minimum chunk starves a prompt beside decodes",
        "legato/core/draft.py",
        "if cut and not last and self._chunks:",
        "if cut and not last:",
        ORDER + "the_first_chunk_of_a_step_takes_what_there_is",
    ),
    Mutant(
        "partial prompts may take the whole pool",
        "legato/core/draft.py",
        "blocks > PARTIAL_SHARE * self._pool.num_blocks",
        "blocks > 2 * self._pool.num_blocks",
        ORDER + "prompts_computed_in_part_hold_at_most_half_of_the_pool",
    ),
    Mutant(
        "one heavy prompt is overtaken for ever",
        "legato/core/scheduler.py",
        "first.num_overtaken += len(schedule.admitted)",
        "first.num_overtaken += 0",
        ORDER + "a_heavy_prompt_starts_though_light_ones_take_every_block_that_is_freed",
    ),
    *(
        Mutant(
            f"who is left out by {reason} is overtaken for ever",
            "legato/core/scheduler.py",
            "ITS_TURN = (Reason.BLOCKS, Reason.MAX_RUNNING, Reason.PARTIAL, Reason.POLICY)",
            f"ITS_TURN = {{Reason.BLOCKS, Reason.MAX_RUNNING, Reason.PARTIAL, Reason.POLICY}} - "
            f"{{Reason.{reason}}}",
            ORDER + test,
        )
        for reason, test in (
            ("BLOCKS", "a_heavy_prompt_starts_though_light_ones_take_every_block_that_is_freed"),
            (
                "MAX_RUNNING",
                "the_first_of_the_queue_starts_though_short_prompts_take_every_place_that_is_left",
            ),
            ("PARTIAL", "a_prompt_starts_that_others_never_leave_room_for"),
            ("POLICY", "a_prompt_starts_that_others_never_leave_room_for"),
        )
    ),
    Mutant(
        "nobody's turn comes",
        "legato/core/scheduler.py",
        "first.num_overtaken += len(schedule.admitted)",
        "first.num_overtaken += 0",
        STARVATION + "every_request_gets_tokens_within_a_bounded_number_of_steps",
    ),
    Mutant(
        "the share for prompts that end leaves the first one crumbs",
        "legato/core/draft.py",
        "kept = self._allowance.share(part, first, self._scheduler.config.min_chunk)",
        "kept = self._allowance.share(part, first, 0)",
        ORDER + "the_first_in_the_order_gets_on_though_short_prompts_leave_only_crumbs",
    ),
    Mutant(
        "the chunk that the share leaves is priced as one at the start of a text",
        "legato/core/budget.py",
        "seconds = self.seconds - self.cost.chunk_seconds(start, length) * (1 + ROUNDING)",
        "seconds = self.seconds - self.cost.chunk_seconds(0, length) * (1 + ROUNDING)",
        STARVATION + "short_prompts_leave_a_long_one_its_chunk_however_far_it_is",
    ),
    Mutant(
        "the share is taken in tokens alone",
        "legato/core/budget.py",
        "return replace(self, tokens=tokens, seconds=min(self.seconds * part, seconds), floor=0.0)",
        "return replace(self, tokens=tokens, floor=0.0)",
        BUDGET + "a_share_leaves_what_it_was_told_to_leave",
    ),
    Mutant(
        "no time left is time enough for what costs nothing",
        "legato/core/cost.py",
        "if seconds <= 0:\n            return 0.0",
        "seconds = max(seconds, 0.0)",
        COST + "no_chunk_fits_where_no_time_is_left",
    ),
    Mutant(
        "an id is free as soon as its client has left",
        "legato/engine/async_engine.py",
        "self._leaving.add(request_id)",
        "pass",
        "tests/engine/test_async_engine.py::test_an_id_is_in_use_until_the_engine_has_ended_what_had_it",
    ),
    Mutant(
        "the first step counts against the time to calibrate",
        "legato/engine/calibration.py",
        "end = clock() + max_seconds\n    for number in",
        "end = max_seconds\n    for number in",
        "tests/engine/test_target.py::test_a_first_step_that_sets_much_up_leaves_time_to_calibrate",
    ),
    Mutant(
        "a share is kept for prompts that end where all do",
        "legato/core/draft.py",
        "if self._scheduler.prefill_policy.whole:",
        "if not prompts:",
        ORDER + "whole_prompts_come_in_their_order_and_leave_no_step_half_empty",
    ),
    Mutant(
        "followers count as refused",
        "legato/core/draft.py",
        "self._num_refused += waits and reason is not Reason.PREFIX",
        "self._num_refused += waits",
        SHARING + "many_followers_do_not_keep_others_out_of_the_room_that_they_leave",
    ),
    Mutant(
        "whole chains are looked up of everyone that waits",
        "legato/core/draft.py",
        "if last > 0 and not self._pool.find(prompt.chain[last : last + 1]):",
        "if not self:",
        LOOKUPS + "a_queue_on_one_cached_document_looks_it_up_for_few",
    ),
    Mutant(
        "the one block looked up is one too far",
        "legato/core/draft.py",
        "self._pool.find(prompt.chain[last : last + 1])",
        "self._pool.find(prompt.chain[last + 1 : last + 2])",
        SHARING + "a_follower_ends_in_the_share_kept_for_those_once_its_prefix_is_there",
    ),
    Mutant(
        "one heavy prompt blocks all light ones",
        "legato/core/draft.py",
        "if candidate.num_preemptions or candidate.num_overtaken >= MAX_OVERTAKEN:",
        "if candidate:",
        ORDER + "light_prompts_pass_a_heavy_one_that_lacks_blocks_but_not_for_ever",
    ),
    Mutant(
        "a place more than there are",
        "legato/core/draft.py",
        "if len(self._running) + len(self._admitted) >= self._scheduler.config.max_running:",
        "if len(self._running) + len(self._admitted) > self._scheduler.config.max_running:",
        SCHEDULER + "at_most_max_running_sequences_run",
    ),
    Mutant(
        "a decode that lost its blocks is placed all the same",
        "legato/core/draft.py",
        "self._running = [s for s in self._running if s.id not in self._left_out]",
        "self._running = list(self._running)",
        SCHEDULER + "the_youngest_is_preempted_and_goes_on_where_it_was",
    ),
    # Of admission and preemption.
    Mutant(
        "what runs is not expected to grow",
        "legato/core/admission.py",
        "growth = sum([self._end_blocks(s) - len(s.blocks) for s in running])",
        "growth = 0",
        ADMISSION + "strict_admission_looks_at_the_most_that_may_be_asked_for",
    ),
    Mutant(
        "newcomers of one step do not see each other",
        "legato/core/admission.py",
        "self._room -= self._end_blocks(sequence) - self._num_held(found)",
        "self._room -= 0",
        ADMISSION + "as_many_start_as_are_expected_to_end",
    ),
    Mutant(
        "no caution after a preemption",
        "legato/core/scheduler.py",
        "self.caution = 1.0 if schedule.preempted else",
        "self.caution = 0.0 if schedule.preempted else",
        ADMISSION + "after_a_preemption_admission_is_careful_for_a_while",
    ),
    Mutant(
        "preempted without end",
        "legato/core/scheduler.py",
        "sequence.guaranteed = sequence.guaranteed or sequence.num_preemptions >= MAX_PREEMPTIONS",
        "sequence.guaranteed = sequence.guaranteed",
        ADMISSION + "a_pool_in_which_everyone_is_preempted_finishes_all_with_the_right_replies",
    ),
    Mutant(
        "who is guaranteed comes in by the expected need",
        "legato/core/admission.py",
        "        if sequence.guaranteed:\n",
        "        if not sequence.request:\n",
        ADMISSION + "strict_admission_looks_at_the_most_that_may_be_asked_for",
    ),
    Mutant(
        "the dearest is preempted",
        "legato/core/preemption.py",
        "victim = min(ranks, key=ranks.__getitem__)",
        "victim = max(ranks, key=ranks.__getitem__)",
        ADMISSION + "the_victim_has_the_least_to_compute_again_for_each_block",
    ),
    Mutant(
        "shared blocks count as gained",
        "legato/core/block_pool.py",
        "list(map(self._holders.__getitem__, blocks)).count(1)",
        "len(list(blocks))",
        ADMISSION + "only_blocks_that_nobody_else_holds_are_gained",
    ),
    Mutant(
        "a prompt that is scored takes what is cached",
        "legato/core/sequence.py",
        "        if self.num_unscored:",
        "        if False:",
        SCORES + "test_e_03_a_cached_prefix_is_not_taken_and_the_second_run_scores_the_same",
    ),
    Mutant(
        "a preempted prompt is scored twice",
        "legato/core/sequence.py",
        "first = max(start, len(prompt) - 1 - self.num_unscored)",
        "first = start",
        SCORES + "test_a_preemption_scores_nothing_twice",
    ),
    Mutant(
        "a prompt token scored by its own position",
        "legato/core/sequence.py",
        "prompt[first + 1 : end + 1]",
        "prompt[first:end]",
        SCORES + "test_every_token_but_the_first_is_scored_once_whatever_the_chunks",
    ),
    Mutant(
        "a request without a reply gets a token",
        "legato/core/scheduler.py",
        "if not sequence.request.params.max_tokens:",
        "if False:",
        SCORES + "TestNoReply",
    ),
    Mutant(
        "every slice scored against the first one's tokens",
        "legato/runner/score.py",
        "rows.targets[low - first :]",
        "rows.targets",
        "tests/runner/test_prompt_logprobs_exact.py::test_slices_do_not_change_a_bit_of_them",
    ),
    Mutant(
        "blocks that a victim shared with one other stay no gain",
        "legato/core/preemption.py",
        "if more or gain > missing:",
        "if gain > missing:",
        VICTIMS + "blocks_that_a_victim_leaves_to_one_other_make_that_one_cheaper",
    ),
    Mutant(
        "a rank is never computed again",
        "legato/core/preemption.py",
        "if more or gain > missing:",
        "if more:",
        VICTIMS + "the_victims_are_those_of_the_definition",
    ),
    Mutant(
        "every reply teaches its length, the aborted ones too",
        "legato/core/scheduler.py",
        "if reason in (FinishReason.STOP, FinishReason.LENGTH) and",
        "if reason and",
        ADMISSION + "only_replies_that_ended_by_their_own_rule_teach",
    ),
    Mutant(
        "an old deadline ends a new request",
        "legato/core/scheduler.py",
        "if sequence is not None and sequence.number == deadline[1] else",
        "if sequence is not None else",
        ADMISSION + "a_deadline_of_an_ended_request_does_not_end_another_with_its_id",
    ),
    Mutant(
        "a deadline is over a step too late",
        "legato/core/scheduler.py",
        "self._deadlines[0][0] <= now",
        "self._deadlines[0][0] < now",
        ADMISSION + "what_is_over_its_deadline_ends_before_any_work_is_done_for_it",
    ),
    # Of step costs, budgets and targets.
    Mutant(
        "pairs of query and key as if every chunk began at 0",
        "legato/core/cost.py",
        "pairs += (2 * start + length) * length",
        "pairs += length * length",
        COST + "pairs_do_not_depend_on_how_a_prompt_is_cut",
    ),
    Mutant(
        "the pace is dropped",
        "legato/core/cost.py",
        "        return self.pace[shape.mix] * (",
        "        return 1.0 * (",
        COST + "a_shape_by_hand",
    ),
    Mutant(
        "the pace of decodes alone for what is left beside them",
        "legato/core/cost.py",
        "        return seconds / mixed - ",
        "        return seconds / self.pace[0] - ",
        COST + "what_is_left_beside_decodes_is_what_chunks_add_to_them",
    ),
    Mutant(
        "a negative price is kept",
        "legato/core/least_squares.py",
        "if found[worst] >= 0:",
        "if found:",
        COST + "the_solution_is_as_good_as_the_best_of_all_subsets",
    ),
    Mutant(
        "samples never fade",
        "legato/core/cost.py",
        "KEEP = 0.9",
        "KEEP = 1.0",
        COST + "new_samples_take_the_place_of_old_ones_of_their_kind",
    ),
    Mutant(
        "a familiar kind of step never moves the prices again",
        "legato/core/cost.py",
        "if not settled or self._seen[kind] % EVERY == 0:",
        "if self._seen[kind] <= FAMILIAR:",
        COST + "new_samples_take_the_place_of_old_ones_of_their_kind",
    ),
    Mutant(
        "a front with points that are beaten",
        "legato/tune/frontier.py",
        "points[i][1] < points[front[-1]][1]",
        "points[i][1] <= points[front[-1]][1]",
        TUNE + "frontier.py::test_the_front_is_what_nothing_beats",
    ),
    Mutant(
        "a knee on plain axes",
        "legato/tune/frontier.py",
        "(math.log(x), math.log(y)) for x, y in points",
        "(x, y) for x, y in points",
        TUNE + "frontier.py::test_the_knee_is_the_farthest_below_the_chord_in_any_units",
    ),
    Mutant(
        "the fastest setup is the best, whatever it misses",
        "legato/tune/search.py",
        "if trial.good >= enough)",
        "if trial.good >= enough - 1)",
        TUNE + "search.py::test_the_best_is_the_fastest_of_those_that_are_as_good",
    ),
    Mutant(
        "another target than the one that was asked for may be chosen",
        "legato/tune/search.py",
        "if setup not in space.drawn]",
        "]",
        TUNE + "search.py::test_other_targets_are_drawn_and_never_chosen",
    ),
    Mutant(
        "a search without end",
        "legato/tune/search.py",
        "if trials and num_steps >= max_steps:",
        "if trials and num_steps < 0:",
        TUNE + "search.py::test_a_search_ends_when_its_steps_are_used_up",
    ),
    Mutant(
        "a capacity that was never met",
        "legato/tune/capacity.py",
        "(middle, high) if meets(middle) else (low, middle)",
        "(middle, high) if not meets(middle) else (low, middle)",
        TUNE + "capacity.py::test_the_limit_is_found_to_within_its_tolerance_and_grows_with_what_is_allowed",
    ),
    Mutant(
        "a calibration times the model alone",
        "legato/engine/calibration.py",
        "seconds = clock() - started + own",
        "seconds = clock() - started",
        CALIBRATION + "what_the_engine_takes_between_two_steps_is_part_of_a_step",
    ),
    Mutant(
        "a calibration believes a step that was held up",
        "legato/engine/calibration.py",
        "if s[1] <= DISTURBED * model.cost.seconds(s[0])",
        "if s[1] > 0",
        CALIBRATION + "steps_that_were_held_up_are_left_out",
    ),
    Mutant(
        "a simulation that delivers arrivals one step late",
        "legato/sim/simulator.py",
        "while coming and coming[0][1].time <= clock.now:",
        "while coming and coming[0][1].time < clock.now or coming and not engine.has_work:",
        SIM + "a_history_makes_the_schedules_that_an_engine_makes",
    ),
    Mutant(
        "a simulation in which nobody leaves",
        "legato/sim/simulator.py",
        "        _leave(engine, leaving, clock.now)\n",
        "",
        SIM + "a_history_makes_the_schedules_that_an_engine_makes",
    ),
    Mutant(
        "a fake runner that reads only the last block",
        "legato/engine/fake.py",
        "total = sum(map(self._totals.__getitem__, seq.blocks[:num_full]))",
        "total = 0",
        FAKE + "a_wrong_block_anywhere_in_the_table_changes_the_answer",
    ),
    Mutant(
        "all prompts of a workload share their beginning",
        "legato/workload/arrival.py",
        "shake_128(part.name.encode())",
        "shake_128(b'')",
        "tests/workload/test_arrivals.py::test_prompts_share_exactly_the_parts_that_they_have_in_common",
    ),
    Mutant(
        "all kinds of steps fade together",
        "legato/core/cost.py",
        "return shape.num_decodes.bit_length(), shape.num_prefill.bit_length(), (context >> 10).bit_length()",
        "return (context * 0,)",
        COST + "hours_of_steady_decodes_do_not_make_it_forget_long_contexts",
    ),
    Mutant(
        "outliers count in full",
        "legato/core/cost.py",
        "min(1.0, tolerated / residual) if residual else 1.0",
        "1.0",
        COST + "one_step_that_is_far_off_hardly_moves_a_prediction",
    ),
    Mutant(
        "the pace follows every outlier",
        "legato/core/cost.py",
        "min(max(ratio, 1 / (1 + tolerated)), 1 + tolerated) ** PACE_STEP",
        "ratio**PACE_STEP",
        COST + "one_step_that_is_far_off_hardly_moves_a_prediction",
    ),
    Mutant(
        "absolute errors",
        "legato/core/cost.py",
        "row = [x / seconds for x in",
        "row = [x / 0.1 for x in",
        COST + "prices_are_found_under_noise_and_outliers",
    ),
    Mutant(
        "the usual error is that of all steps",
        "legato/core/cost.py",
        "islice(reversed(self._errors), USUAL)",
        "self._errors",
        COST + "a_machine_that_becomes_slower_is_noticed_within_twenty_steps",
    ),
    Mutant(
        "a step may be predicted to take no time",
        "legato/core/cost.py",
        'max(self._prices["step"], LEAST_STEP)',
        'self._prices["step"]',
        COST + "no_history_makes_a_price_negative_or_a_prediction_nothing",
    ),
    Mutant(
        "the floor is ignored",
        "legato/core/budget.py",
        "seconds = max(self.seconds, self.floor)",
        "seconds = self.seconds",
        BUDGET + "the_floor_keeps_prompts_going_where_the_target_cannot_and_it_shows",
    ),
    Mutant(
        "every chunk of a step gets the floor",
        "legato/core/budget.py",
        "        self.floor = 0.0\n",
        "        self.floor += 0.0\n",
        BUDGET + "the_floor_keeps_prompts_going_where_the_target_cannot_and_it_shows",
    ),
    Mutant(
        "the least chunk of a step is one token, which counts as a decode",
        "legato/core/budget.py",
        "fits = 2 if self.floor",
        "fits = 1 if self.floor",
        BUDGET + "a_disturbance_does_not_keep_chunks_small_once_it_is_over",
    ),
    Mutant(
        "the automatic target leaves prompts no share",
        "legato/engine/scheduling.py",
        "min(max(COMFORTABLE, alone / (1 - LEAST_PREFILL)), alone / (1 - MOST_PREFILL))",
        "COMFORTABLE",
        "tests/engine/test_target.py::test_the_automatic_target_is_comfortable_or_leaves_prompts_their_share",
    ),
    Mutant(
        "a short chunk deep in a text is refused",
        "legato/core/budget.py",
        "return max(1, int(fits)) if fits < length else length",
        "return length",
        BUDGET + "the_shortest_chunk_deep_in_a_text_takes_as_long_as_one_at_its_start",
    ),
    Mutant(
        "the knee while replies decode",
        "legato/core/budget.py",
        "if not decodes and self.target is not None:",
        "if self.target is not None:",
        BUDGET + "the_strictest_of_those_that_decode_rules",
    ),
    Mutant(
        "the loosest target rules",
        "legato/core/budget.py",
        "target = min([seconds",
        "target = max([seconds",
        BUDGET + "the_strictest_of_those_that_decode_rules",
    ),
    Mutant(
        "the margin is ignored",
        "legato/core/budget.py",
        "target / self.model.margin)",
        "target)",
        BUDGET + "a_step_keeps_the_target_or_says_that_it_does_not",
    ),
    Mutant(
        "what a chunk took is not taken off",
        "legato/core/budget.py",
        "self.seconds -= self.cost.chunk_seconds(start, length)",
        "self.seconds -= 0.0",
        BUDGET + "a_step_keeps_the_target_or_says_that_it_does_not",
    ),
    Mutant(
        "a single token has the price of a prompt's",
        "legato/core/cost.py",
        "        if length == 1:\n            return self",
        "        if length == 0:\n            return self",
        BUDGET + "a_single_token_that_is_dear_is_not_taken_for_a_cheap_one",
    ),
    Mutant(
        "a mean gap is compared with the target",
        "legato/metrics/timeline.py",
        "sum(map(self.is_late, range(1, self.num_generated))) <= LATE_GAPS * num_gaps",
        "(self.tpot or 0) <= self.targets.tpot",
        TARGETS + "one_gap_in_a_hundred_may_be_late",
    ),
    Mutant(
        "the log tells of every change",
        "legato/metrics/target_log.py",
        "record.ended - self._told < QUIET_S",
        "record.ended < self._told",
        TARGETS + "a_target_that_comes_and_goes_is_logged_at_most_once_a_minute",
    ),
    # Of the queue in front of it.
    Mutant(
        "a quiet hour tells how fast the queue moves",
        "legato/engine/async_engine.py",
        "            self._departures.clear()\n",
        "            pass\n",
        TERMS + "a_quiet_hour_and_refused_requests_do_not_tell_how_fast_the_queue_moves",
    ),
    Mutant(
        "Retry-After is the time of one request",
        "legato/engine/async_engine.py",
        "num_waiting * elapsed / len(self._departures)",
        "elapsed / len(self._departures)",
        TERMS + "the_time_to_come_back_is_that_which_the_queue_takes",
    ),
    Mutant(
        "every reply of a request asks for a place of its own",
        "legato/server/replies.py",
        "places=0 if index else num_replies",
        "places=1",
        TERMS + "more_replies_than_may_ever_run_and_wait_are_refused_for_good",
    ),
    Mutant(
        "free places do not count",
        "legato/engine/async_engine.py",
        "free = 0 if is_held_up else max_running - num_running",
        "free = 0",
        TERMS + "an_idle_server_takes_all_replies_of_a_request_that_fit_into_places_and_queue",
    ),
    Mutant(
        "free places count though blocks hold everyone up",
        "legato/engine/async_engine.py",
        "free = 0 if is_held_up else max_running - num_running",
        "free = max_running - num_running",
        TERMS + "a_queue_that_waits_for_blocks_is_full_at_its_limit_whatever_places_are_free",
    ),
    Mutant(
        "what ended with a Ctrl-C in the last step is never told",
        "legato/engine/engine.py",
        "return bool(self._untold) or self.scheduler.has_work",
        "return self.scheduler.has_work",
        "tests/engine/test_engine_step.py::test_ctrl_c_in_the_last_step_leaves_its_events_for_one_more_call",
    ),
    # Of the runner's inputs.
    Mutant(
        "a sequence's slots from the wrong table",
        "legato/runner/inputs.py",
        "table[owner, positions // block_size]",
        "table[0, positions // block_size]",
        INPUTS + "every_token_gets_the_position_slot_and_row_that_the_definition_says",
    ),
    Mutant(
        "the sampled row is the sequence's first",
        "legato/runner/inputs.py",
        "dtype=np.int64) + 1] - 1",
        "dtype=np.int64)]",
        INPUTS + "every_token_gets_the_position_slot_and_row_that_the_definition_says",
    ),
    Mutant(
        "a cached prefix is computed over",
        "legato/core/plan.py",
        "tokens = tuple(sequence.tokens[start:end])",
        "tokens = tuple(sequence.tokens[:length])",
        EXACT + "cold_warm_half_evicted_and_with_another_tail",
    ),
    # Of the compiled products.
    Mutant(
        "a scale of weights rounded to nearest, which the largest weight may not fit under",
        "legato/kernels/product_vector.py",
        "scale = next_up.where(is_small, scale)",
        "scale = scale.where(is_small, scale)",
        PRODUCTS + "a_product_has_the_bits_of_the_oracle",
    ),
    Mutant(
        "a row takes the scale of another row of its tile",
        "legato/kernels/product_vector.py",
        "scale = (scales + 4 * row).load(FLOAT).splat()",
        "scale = (scales + 4 * (rows - 1 - row)).load(FLOAT).splat()",
        PRODUCTS + "a_product_has_the_bits_of_the_oracle",
    ),
    Mutant(
        "gated results are added as if there were one for each output",
        "legato/kernels/product.py",
        "width = c.matrix.num_outputs // (2 if job.gate else 1)",
        "width = c.matrix.num_outputs",
        ALONE + "nothing_is_written_beyond_the_matrix_its_rows_and_their_memory",
    ),
    # What stands around the API.
    Mutant(
        "a guard that compares only the beginning of a path",
        "legato/server/guards.py",
        'if scope["path"] in OPEN_PATHS and',
        'if scope["path"].startswith(OPEN_PATHS) and',
        GUARDS + "j_01_every_route_and_every_other_path_asks_for_a_key",
    ),
    Mutant(
        "a guard that lets every method through to open paths",
        "legato/server/guards.py",
        ' and scope["method"] in ("GET", "HEAD"):',
        ":",
        GUARDS + "j_01_every_route_and_every_other_path_asks_for_a_key",
    ),
    Mutant(
        "a body that is measured only by what it says of itself",
        "legato/server/guards.py",
        "num_bytes += len(",
        "num_bytes += 0 * len(",
        GUARDS + "j_05_a_chunked_body_without_an_end_is_refused_as_soon_as_it_is_too_large",
    ),
    Mutant(
        "a message of the log as it came",
        "legato/cli/logs.py",
        "return _escaped(super().formatMessage(record))",
        "return super().formatMessage(record)",
        "tests/cli/test_logs.py::test_j_13_a_line_of_text_holds_one_record_and_nothing_unprintable",
    ),
    Mutant(
        "prompt tokens that left still wait",
        "legato/engine/async_engine.py",
        "self._num_waiting_tokens -= stream.num_waiting_tokens",
        "self._num_waiting_tokens -= 0",
        CONNECTIONS + "j_04_tokens_that_wait_have_a_limit_and_health_answers_meanwhile",
    ),
    Mutant(
        "a client that takes nothing is waited for",
        "legato/server/connection.py",
        "if num_unsent < num_before:",
        "if num_unsent <= num_before:",
        CONNECTIONS + "a_client_that_takes_nothing_is_dropped_and_holds_nothing",
    ),
    Mutant(
        "an answer that a reset takes away",
        "legato/server/connection.py",
        "if cycle is not None and not cycle.more_body:",
        "if cycle is not None:",
        CONNECTIONS + "a_client_that_sends_all_before_it_reads_gets_its_answer",
    ),
    Mutant(
        "a step that hangs is no trouble",
        "legato/engine/loop.py",
        "self.busy_since = self._engine.clock()",
        "self.busy_since = None",
        "tests/server/test_server_life.py::test_g_12_a_step_that_hangs_makes_the_server_unhealthy_until_it_returns",
    ),
    # Of constraints.
    Mutant(
        "a constraint's fault taken for a token",
        "legato/core/scheduler.py",
        "if token.fault is not None:",
        "if False:",
        CONSTRAINT + "a_constraint_that_breaks_ends_its_request_alone",
    ),
    Mutant(
        "min_tokens stronger than a reply that can only end",
        "legato/core/plan.py",
        "return bytes(going_on) if any(going_on) else mask",
        "return bytes(going_on)",
        CONSTRAINT + "a_reply_that_can_only_end_ends_before_min_tokens",
    ),
    Mutant(
        "a matcher that believes its tokens are always continued",
        "legato/text/grammar.py",
        "if generated[: len(self._consumed)] != self._consumed:",
        "if len(generated) < len(self._consumed):",
        GRAMMAR + "TestMatcher::test_a_mask_is_a_function_of_the_tokens_alone",
    ),
    Mutant(
        "replies of a request that share one matcher",
        "legato/text/grammar.py",
        "self._matcher = beginning.deep_copy()",
        "self._matcher = beginning",
        GRAMMAR + "TestMatcher::test_replies_of_one_request_do_not_disturb_each_other",
    ),
    Mutant(
        "special tokens taken for the text of their names",
        "legato/text/grammar.py",
        "self.special_token_ids = sorted(id for id in vocabulary.special if id < vocab_size)",
        "self.special_token_ids = [eos_id]",
        GRAMMAR + "TestTokens::test_a_json_string_holds_no_special_token_and_every_way_to_spell_text",
    ),
    Mutant(
        "a mask shorter than the logits that allows all beyond it",
        "legato/runner/adjust.py",
        "logits[len(added) :] = -torch.inf",
        "pass",
        MASKED + "a_mask_may_be_shorter_or_longer_than_the_logits",
    ),
    # Of what must stay the trouble of one.
    Mutant(
        "a row whose logits are no numbers has a token",
        "legato/runner/sampler.py",
        "if not math.isfinite(peak)",
        "if peak == 7.0",
        "tests/runner/test_runner.py::test_a_request_whose_numbers_break_breaks_alone",
    ),
    Mutant(
        "the draws of the others move up in place of a broken row's",
        "legato/runner/sampler.py",
        "logits, peaks = logits[sound], peaks[sound]",
        "logits, peaks = logits[: len(sound)], peaks[: len(sound)]",
        "tests/runner/test_sampler.py::test_logits_that_allow_no_choice_are_a_fault_of_their_row_alone",
    ),
    Mutant(
        "an observer that fails is told on and on",
        "legato/engine/engine.py",
        "self._observers.remove(observer)",
        "pass",
        "tests/engine/test_engine_step.py::test_an_observer_that_fails_is_told_nothing_more_and_requests_are_served",
    ),
    Mutant(
        "a body of millions of values is parsed",
        "legato/server/body.py",
        '(b"[", b"{", b":")',
        '(b"[", b"{")',
        GUARDS + "j_05_a_body_of_very_many_values_is_refused_unparsed",
    ),
    Mutant(
        "an idle connection is closed as uvicorn pleases",
        "legato/server/run.py",
        "timeout_keep_alive=keep_alive,  # type: ignore[arg-type]",
        "",
        "tests/server/test_server_life.py::test_c_15_how_long_an_idle_connection_stays_open_is_a_setting",
    ),
    Mutant(
        "half a token may be asked for",
        "legato/core/request.py",
        "self._check_types()",
        "",
        SCHEDULER + "an_impossible_request_is_refused",
    ),
)


@contextmanager
def planted(mutant: Mutant) -> Iterator[Path]:
    """A copy of the tree with the fault in it."""
    with tempfile.TemporaryDirectory(prefix="legato-mutant-") as folder:
        copy = Path(folder)
        for name in ("legato", "tests", "scripts"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        file = copy / mutant.file
        source = file.read_text()
        if source.count(mutant.old) != 1:
            raise LookupError(
                f"{mutant.file} holds {mutant.old!r} {source.count(mutant.old)} times, not once"
            )
        file.write_text(source.replace(mutant.old, mutant.new))
        yield copy


def verdict(mutant: Mutant) -> str:
    """killed, survived, or why neither can be said."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.test]
    try:
        with planted(mutant) as tree:
            run = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    except LookupError as error:
        return f"not planted: {error}"
    if run.returncode == 1:
        return "killed"
    return "survived" if run.returncode == 0 else f"no verdict: {run.stdout.strip()[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="only mutants whose name holds this text")
    only = parser.parse_args().only
    chosen = [mutant for mutant in MUTANTS if only in mutant.name]
    alive = 0
    for mutant in chosen:
        began = time.monotonic()
        result = verdict(mutant)
        alive += result != "killed"
        print(f"{result:10} {time.monotonic() - began:5.1f} s  {mutant.name}  ({mutant.test})", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} mutants killed")
    return 1 if alive or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
