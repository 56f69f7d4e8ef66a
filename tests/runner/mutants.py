"""The faults that the tests of runner must find: (name, file, text, replacement, test). See scripts/mutants.py."""

MUTANTS = (
    (
        "positions that begin at 0 in every chunk, in the runner",
        "legato/runner/inputs.py",
        "+ (starts - query_start[:-1])[owner]",
        "- query_start[:-1][owner]",
        "tests/runner/test_chunk_invariance.py::test_chunked_prefill_matches_whole_within_tolerance",
    ),
    (
        "a query offset of 0 in the mask",
        "legato/attention/reference.py",
        "rows = torch.arange(start, end, device=device)",
        "rows = torch.arange(end - start, device=device)",
        "tests/runner/test_chunk_invariance.py::test_chunked_prefill_matches_whole_within_tolerance",
    ),
    (
        "every slice scored against the first one's tokens",
        "legato/runner/score.py",
        "rows.targets[low - first :]",
        "rows.targets",
        "tests/runner/test_prompt_logprobs_exact.py::test_slices_do_not_change_a_bit_of_them",
    ),
    (
        "a sequence's slots from the wrong table",
        "legato/runner/inputs.py",
        "table[owner, positions // block_size]",
        "table[0, positions // block_size]",
        "tests/runner/test_inputs.py::test_every_token_gets_the_position_slot_and_row_that_the_definition_says",
    ),
    (
        "the sampled row is the sequence's first",
        "legato/runner/inputs.py",
        "dtype=np.int64) + 1] - 1",
        "dtype=np.int64)]",
        "tests/runner/test_inputs.py::test_every_token_gets_the_position_slot_and_row_that_the_definition_says",
    ),
    (
        "a cached prefix is computed over",
        "legato/core/plan.py",
        "tokens = tuple(sequence.tokens[start:end])",
        "tokens = tuple(sequence.tokens[:length])",
        "tests/runner/test_exact_schedules.py::test_cold_warm_half_evicted_and_with_another_tail",
    ),
    (
        "a mask shorter than the logits that allows all beyond it",
        "legato/runner/adjust.py",
        "logits[len(added) :] = -torch.inf",
        "pass",
        "tests/runner/test_masked_rows.py::test_a_mask_may_be_shorter_or_longer_than_the_logits",
    ),
    (
        "a row whose logits are no numbers has a token",
        "legato/runner/sampler.py",
        "if not math.isfinite(peak)",
        "if peak == 7.0",
        "tests/runner/test_runner.py::test_a_request_whose_numbers_break_breaks_alone",
    ),
    (
        "the draws of the others move up in place of a broken row's",
        "legato/runner/sampler.py",
        "logits, peaks = logits[sound], peaks[sound]",
        "logits, peaks = logits[: len(sound)], peaks[: len(sound)]",
        "tests/runner/test_sampler.py::test_logits_that_allow_no_choice_are_a_fault_of_their_row_alone",
    ),
)
