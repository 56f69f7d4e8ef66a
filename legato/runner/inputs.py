"""From a `ForwardBatch` to the tensors of one step. Knows the layout of the cache, nothing of the model.

Shape legend: T tokens of the step, S sequences, R sampled rows, W the widest block table, B block size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from legato.attention.base import AttentionBatch
from legato.core.step_plan import ForwardSeq, StepPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What `Decoder.forward` is called with."""

    token_ids: Tensor  # [T] int64, on the device
    positions: Tensor  # [T] int64, on the device
    batch: AttentionBatch
    rows: Tensor  # [R] int64, on the device: which of the T rows are sampled


def build_inputs(plan: StepPlan, *, block_size: int, device: torch.device) -> StepInputs:
    """Lay the plan's sequences end to end and find the cache slot of every token."""
    seqs = plan.batch.seqs
    lengths = np.array([len(seq.tokens) for seq in seqs], dtype=np.int64)
    starts = np.array([seq.start for seq in seqs], dtype=np.int64)
    assert len(seqs) > 0, "a step has sequences"
    assert lengths.all(), "a step computes at least one token of each of its sequences"
    query_start = np.concatenate(([0], lengths.cumsum()))
    token_ids = np.concatenate([np.array(seq.tokens, dtype=np.int64) for seq in seqs])
    owner = np.repeat(np.arange(len(seqs)), lengths)  # [T]: the sequence of each token
    positions = np.arange(len(owner)) + (starts - query_start[:-1])[owner]
    table = _block_table(seqs, block_size)
    slots = table[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    rows = query_start[np.array([row.seq for row in plan.sample], dtype=np.int64) + 1] - 1
    return StepInputs(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        batch=AttentionBatch(
            query_start=torch.from_numpy(query_start.astype(np.int32)),
            start=torch.from_numpy(starts.astype(np.int32)),
            block_table=torch.from_numpy(table).to(device),
            slots=torch.from_numpy(slots).to(device),
        ),
        rows=torch.from_numpy(rows).to(device),
    )


def _block_table(seqs: Sequence[ForwardSeq], block_size: int) -> npt.NDArray[np.int32]:
    """[S, W]: each sequence's blocks, padded with block 0."""
    table = np.zeros((len(seqs), max(len(seq.block_table) for seq in seqs)), dtype=np.int32)
    for line, seq in zip(table, seqs, strict=True):
        assert seq.end <= len(seq.block_table) * block_size, "the scheduler gave a sequence too few blocks"
        line[: len(seq.block_table)] = seq.block_table
    return table
