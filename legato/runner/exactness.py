"""Are logits bit-identical whatever the schedule? Tried out on the machine and the model at hand.

A few texts are each computed alone and in one piece; then again and again in random schedules: chunks of any
size from one token to the whole, any batch-mates, any order, any blocks, and preemptions that start over in
other blocks. At some positions of each text the logits are compared bit by bit with the first ones.

This file knows decoder and cache, and no scheduler: it draws schedules wilder than a scheduler makes.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.request import RequestId
from legato.core.step_plan import ForwardBatch, ForwardSeq, StepPlan
from legato.models.decoder import Decoder
from legato.runner.inputs import build_inputs
from legato.runner.kv_cache import KVCache

LENGTHS = (1, 7, 40, 130, 600)
NUM_CHECKED = 8
"""Positions of a text at which logits are compared; a row of logits may take a megabyte."""


@dataclass(slots=True)
class Text:
    """A text, and what must come out of it."""

    ids: tuple[int, ...]
    checked: tuple[int, ...]
    """Positions, ascending, the last among them."""
    expected: Tensor  # [len(checked), V]


@dataclass(slots=True)
class Run:
    """A text on its way through a schedule."""

    text: Text
    blocks: tuple[int, ...]
    computed: int = 0


@dataclass(slots=True)
class ExactnessReport:
    """What was compared, and what differed."""

    schedules: int = 0
    steps: int = 0
    preemptions: int = 0
    comparisons: int = 0
    """Rows of logits."""
    mismatches: int = 0
    first_mismatch: str | None = None
    """Where, in words."""
    chunk_sizes: int = 0
    """How many different ones."""


class ExactnessCheck:
    """Draws schedules from a seed; the same seed draws the same ones."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, seed: int, lengths: Sequence[int] = LENGTHS
    ) -> None:
        """The cache's contents are lost. Texts that do not fit in it together are left out."""
        self._decoder = decoder
        self._cache = cache
        self._random = random.Random(seed)
        self.report = ExactnessReport()
        self._sizes: set[int] = set()
        need = 0
        self._texts: list[Text] = []
        for length in lengths:
            need += self._num_blocks(length)
            if need <= cache.num_blocks and length <= decoder.spec.max_position:
                self._texts.append(self._text(length))

    def run(self, keep_going: Callable[[ExactnessReport], bool]) -> ExactnessReport:
        """Schedule after schedule, at least one, while `keep_going` says so."""
        while not self.report.schedules or keep_going(self.report):
            self._schedule()
            self.report.schedules += 1
        return self.report

    def _num_blocks(self, length: int) -> int:
        return -(-length // self._cache.block_size)

    def _text(self, length: int) -> Text:
        ids = tuple(self._random.randrange(self._decoder.spec.vocab_size) for _ in range(length))
        some = self._random.sample(range(length), min(NUM_CHECKED - 1, length))
        checked = tuple(sorted({*some, length - 1}))
        run = Run(Text(ids, checked, torch.empty(0)), tuple(range(self._num_blocks(length))))
        (expected,) = self._forward([(run, length)])
        return Text(ids, checked, expected.clone())  # the decoder may use its memory again

    def _schedule(self) -> None:
        """All texts, each restarted now and then, until all are through."""
        free = list(range(self._cache.num_blocks))
        self._random.shuffle(free)
        chosen = self._random.sample(self._texts, self._random.randint(1, len(self._texts)))
        running = [
            Run(text, tuple(free.pop() for _ in range(self._num_blocks(len(text.ids))))) for text in chosen
        ]
        while running:
            self._random.shuffle(running)
            for run in running:
                if run.computed and self._random.random() < 0.04:
                    self._preempt(run, free)
            step = [(run, self._chunk(run)) for run in running if self._random.random() < 0.8] or [
                (running[0], self._chunk(running[0]))
            ]
            self._compare(step)
            running = [run for run in running if run.computed < len(run.text.ids)]

    def _preempt(self, run: Run, free: list[int]) -> None:
        free.extend(run.blocks)
        self._random.shuffle(free)
        run.blocks, run.computed = tuple(free.pop() for _ in run.blocks), 0
        self.report.preemptions += 1

    def _chunk(self, run: Run) -> int:
        """One token as a decode takes, a few, or anything up to all that is left."""
        left = len(run.text.ids) - run.computed
        return min(
            left, self._random.choice((1, 1, self._random.randint(2, 16), self._random.randint(1, left)))
        )

    def _compare(self, step: list[tuple[Run, int]]) -> None:
        outcomes = self._forward(step)
        self.report.steps += 1
        for (run, length), logits in zip(step, outcomes, strict=True):
            self._sizes.add(length)
            self.report.chunk_sizes = len(self._sizes)
            places = self._places(run, length)
            for place, row in zip(places, logits, strict=True):
                self.report.comparisons += 1
                if not torch.equal(row, run.text.expected[place]):
                    self.report.mismatches += 1
                    self.report.first_mismatch = self.report.first_mismatch or (
                        f"position {run.text.checked[place]} of a text of {len(run.text.ids)} tokens, "
                        f"in a chunk of {length} from {run.computed}, {len(step)} sequences in the step"
                    )
            run.computed += length

    @staticmethod
    def _places(run: Run, length: int) -> list[int]:
        """Which of the text's checked positions the chunk holds."""
        chunk = range(run.computed, run.computed + length)
        return [place for place, position in enumerate(run.text.checked) if position in chunk]

    def _forward(self, step: list[tuple[Run, int]]) -> list[Tensor]:
        """Compute one chunk of each run; the logits at its checked positions, [.., V] each."""
        seqs, rows, counts, first = [], [], [], 0
        for run, length in step:
            tokens = run.text.ids[run.computed : run.computed + length]
            seqs.append(ForwardSeq(RequestId("exactness"), tokens, run.computed, run.blocks))
            places = self._places(run, length)
            rows += [first + run.text.checked[place] - run.computed for place in places]
            counts.append(len(places))
            first += length
        device = self._decoder.device
        inputs = build_inputs(
            StepPlan(ForwardBatch(tuple(seqs)), ()), block_size=self._cache.block_size, device=device
        )
        logits = self._decoder.forward(
            inputs.token_ids,
            inputs.positions,
            inputs.batch,
            self._cache.layers,
            torch.tensor(rows, dtype=torch.int64, device=device),
        )
        return list(torch.split(logits, counts))
