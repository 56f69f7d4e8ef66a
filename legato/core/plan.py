"""Turns a committed `Schedule` into a `StepPlan`: the integers that a runner needs, and nothing else."""

from legato.core.schedule import Schedule
from legato.core.sequence import Sequence
from legato.core.state import SchedulerState
from legato.core.step_plan import ForwardBatch, ForwardSeq, SampleRow, ScoreRows, StepPlan


def plan(state: SchedulerState, schedule: Schedule) -> StepPlan:
    """The mixed batch of a schedule that was just committed.

    A decode is the newest token of its sequence, at position n - 1. A chunk is the tokens from its start on.
    A token is sampled for every decode and for each chunk with `is_last`. The logits of other chunks would
    predict tokens that the prompt already contains, so they are only computed if log-probabilities were
    asked for.
    """
    seqs: list[ForwardSeq] = []
    sample: list[SampleRow] = []
    score: list[ScoreRows] = []
    for index, (request_id, start, length, is_last, num_scored) in enumerate(schedule.runs):
        sequence, end = state.running[request_id], start + length
        if is_last:
            sample.append(_sample_row(index, sequence))
        if num_scored:
            score.append(_score_rows(index, sequence, start, end))
        tokens = tuple(sequence.tokens[start:end])
        seqs.append(ForwardSeq(request_id, tokens, start, tuple(sequence.block_table)))
    return StepPlan(ForwardBatch(tuple(seqs)), tuple(sample), tuple(score))


def _sample_row(seq: int, sequence: Sequence) -> SampleRow:
    request = sequence.request
    num_generated = len(sequence.tokens) - len(request.prompt)
    if not sequence.needs_tokens:
        return SampleRow(seq, request.id, request.params, num_generated)
    prompt = request.prompt if request.params.needs_history else ()
    generated = tuple(sequence.tokens[len(request.prompt) :])
    return SampleRow(seq, request.id, request.params, num_generated, prompt, generated, sequence.matcher)


def _score_rows(seq: int, sequence: Sequence, start: int, end: int) -> ScoreRows:
    positions = sequence.scored_positions(start, end)
    num_top = sequence.request.params.prompt_logprobs
    assert num_top is not None
    targets = sequence.request.prompt[positions.start + 1 : positions.stop + 1]
    return ScoreRows(seq, sequence.id, positions.start - start, targets, num_top)
