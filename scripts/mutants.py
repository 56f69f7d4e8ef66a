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
INVARIANCE = "tests/runner/test_chunk_invariance.py::test_"
PRODUCTS = "tests/kernels/test_integer_products.py::test_"
ALONE = "tests/kernels/test_rows_stand_alone.py::test_"

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
        "else min(remaining, budget))",
        "else remaining)",
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
        "if chunk.last:",
        "if chunk:",
        CONTRACT + "plan_samples_only_sequence_ends",
    ),
    Mutant(
        "a decode placed at position n",
        "legato/core/plan.py",
        "tokens, chunk.start, tuple",
        "tokens, chunk.start + (len(tokens) == 1), tuple",
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
        "tokens, chunk.start, tuple",
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
        "admission by the first chunk only",
        "legato/core/draft.py",
        "if self._scheduler.blocks_to_admit(sequence) > self._free:",
        "if self._free < 1:",
        SCHEDULER + "admission_needs_the_whole_prompt_and_a_block_more",
    ),
    Mutant(
        "the oldest is preempted",
        "legato/core/draft.py",
        "self._preempt(self._running.pop())",
        "self._preempt(self._running.pop(0))",
        SCHEDULER + "the_youngest_is_preempted_and_goes_on_where_it_was",
    ),
    Mutant(
        "a preempted sequence goes to the end of the queue",
        "legato/core/scheduler.py",
        "self.waiting.move_to_end(sequence.id, last=False)",
        "self.waiting.move_to_end(sequence.id)",
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
        "if in_step:",
        "if not self:",
        SCHEDULER + "blocks_of_an_aborted_sequence_stay_held_while_a_step_writes_them",
    ),
    Mutant(
        "a stop token counts before min_tokens",
        "legato/core/stopping.py",
        "sequence.num_generated > params.min_tokens and",
        "",
        SCHEDULER + "no_stop_token_counts_before_min_tokens",
    ),
    Mutant(
        "one token too few",
        "legato/core/stopping.py",
        "sequence.num_generated >= params.max_tokens",
        "sequence.num_generated >= params.max_tokens - 1",
        SCHEDULER + "exactly_max_tokens_are_made",
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
)


@contextmanager
def planted(mutant: Mutant) -> Iterator[Path]:
    """A copy of the tree with the fault in it."""
    with tempfile.TemporaryDirectory(prefix="legato-mutant-") as folder:
        copy = Path(folder)
        for name in ("legato", "tests"):
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
