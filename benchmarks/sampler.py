"""What choosing the tokens of a step costs, and what it would cost one row at a time.

    python -m benchmarks.sampler --json

One row for each kind of request and number of rows, at the demo model's vocabulary. `ratio` is
us_per_step_one_by_one / us_per_step: the same function called once for each row, in turn with one call for
all rows, with the same threads; times are medians. The logits are as spread as the demo model's: 0.9 of the
probability lies in some dozens of tokens.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from legato.core.request import RequestId
from legato.core.step_plan import SampleRow
from legato.runner.sampler import sample
from legato.sampling_params import SamplingParams

VOCAB = 262_144
SPREAD = 4.5
"""Standard deviation of the logits."""
PROMPT, REPLY = 512, 128
"""Tokens of history where penalties look at it."""
ROWS = (1, 16, 64)
KINDS = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "temperature": SamplingParams(max_tokens=1, temperature=0.8, seed=1),
    "top_p": SamplingParams(max_tokens=1, top_p=0.9, seed=1),
    "top_k+penalties": SamplingParams(
        max_tokens=1, top_k=40, repetition_penalty=1.1, frequency_penalty=0.2, seed=1
    ),
    "logprobs": SamplingParams(max_tokens=1, temperature=0.0, logprobs=5),
    "greedy, masked": SamplingParams(max_tokens=1, temperature=0.0),
    "temperature, masked": SamplingParams(max_tokens=1, temperature=0.8, seed=1),
}


class EveryOther:
    """A constraint at no cost of its own; for that see `benchmarks.grammar`."""

    def mask(self, generated: Sequence[int]) -> bytes:  # noqa: ARG002
        return b"\x55" * (VOCAB // 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured case."""

    rows: int
    kind: str
    us_per_step: float
    us_per_step_one_by_one: float
    ratio: float


def measure(kind: str, count: int, repeats: int) -> Result:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, VOCAB, generator=generator) * SPREAD
    params = KINDS[kind]
    history = (count, (PROMPT + REPLY) if params.needs_history else 0)
    matcher = EveryOther() if kind.endswith("masked") else None
    rows = [
        SampleRow(i, RequestId(str(i)), params, REPLY, tuple(ids[:PROMPT]), tuple(ids[PROMPT:]), matcher)
        for i, ids in enumerate(torch.randint(VOCAB, history, generator=generator).tolist())
    ]
    together, one_by_one = medians(
        [
            lambda: sample(logits, rows),
            lambda: [sample(logits[i : i + 1], rows[i : i + 1]) for i in range(count)],
        ],
        repeats,
    )
    return Result(
        rows=count,
        kind=kind,
        us_per_step=round(1e6 * together, 1),
        us_per_step_one_by_one=round(1e6 * one_by_one, 1),
        ratio=round(one_by_one / together, 2),
    )


def medians(runs: list[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of each; the runs alternate, so that a disturbance meets all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(repeats):
        for run, seconds in zip(runs, times, strict=True):
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds) for seconds in times]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for kind in KINDS:
        for count in ROWS:
            result = measure(kind, count, options.repeats)
            print(json.dumps(asdict(result)) if options.json else result)


if __name__ == "__main__":
    main()
