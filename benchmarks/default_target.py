"""Whether the settings that nobody changed keep their promise, at the start of a text and deep in it.

    python -m benchmarks.default_target --model qwen2.5-coder-1.5b-instruct
    python -m benchmarks.default_target --streams 4 --prompt 30000 --target-ms 100
    python -m benchmarks.default_target --target-ms 0          # a fixed budget, to compare with

Some replies are under way when a long prompt comes. One row of figures:

`gap_ratio` is the longest gap between two tokens of a reply while the prompt is read, over the target.
`ttft_ratio` is the prompt's time to first token over its time on an idle engine.
`ttft_allowed_ratio` is the same over the time that the decodes leave: that on an idle engine, divided by the
share of a step of the target's length that is left beside the decodes.
`over_10` is the share of the gaps that exceed the target by more than a tenth.

The engine runs in this process, without HTTP.
"""

import argparse
import json
import random
import statistics
from pathlib import Path

from benchmarks.target import Load, middle_ids
from legato.config import EngineSettings, ModelSettings
from legato.cost.cost_model import quantile
from legato.engine.build import build

REPLY = 20_000
"""Tokens that a reply may have: more than it gets."""


def measure(load: Load, num_streams: int, num_prompt: int, target: float | None) -> dict[str, float]:
    engine = load.engine
    alone = _first_token(load, num_prompt)
    load.end()
    streams = [load.send(100, REPLY) for _ in range(num_streams)]
    while any(len(load.token_times[stream]) < 20 for stream in streams):
        engine.step()
    decode = statistics.median(record.elapsed for record in load.records[-10:])
    began, first = engine.clock(), len(load.records)
    ttft = _first_token(load, num_prompt)
    gaps = list(load.gaps(began, engine.clock()))
    limits = [record.schedule.limited_by.value for record in load.records[first:]]
    load.end()
    row = {
        "decode_step_ms": 1000 * decode,
        "gap_p50_ms": 1000 * statistics.median(gaps),
        "gap_p99_ms": 1000 * quantile(gaps, 0.99),
        "gap_max_ms": 1000 * max(gaps),
        "num_gaps": len(gaps),
        "ttft_alone_s": alone,
        "ttft_s": ttft,
        "ttft_ratio": ttft / alone,
    }
    if target is None:
        return row
    left = 1 - decode / target
    return row | {
        "target_ms": 1000 * target,
        "gap_ratio": max(gaps) / target,
        "over_10": sum(gap > 1.1 * target for gap in gaps) / len(gaps),
        "steps_at_floor": limits.count("floor") + limits.count("unreachable"),
        "ttft_allowed_ratio": ttft / (alone / left) if left > 0 else float("nan"),
    }


def _first_token(load: Load, num_prompt: int) -> float:
    request = load.send(num_prompt, 1)
    while (ttft := load.ttft(request)) is None:
        load.engine.step()
    return ttft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2_000)
    parser.add_argument("--target-ms", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "legato")
    options = parser.parse_args()
    built = build(
        ModelSettings.model_validate({"model": options.model, "weights": options.weights}),
        EngineSettings.model_validate({"tpot_target_ms": options.target_ms, "prefix_cache": False}),
        cache_dir=options.cache_dir,
    )
    load = Load(built.engine, random.Random(0), middle_ids(built.spec.vocab_size))
    built.engine.observe(load)
    target = built.settings.tpot_target
    for name in ("target", "weights", "kv cache"):
        print(f"{name}: {built.choices[name]}")
    for _ in range(options.repeats):
        print(json.dumps(measure(load, options.streams, options.prompt, target)), flush=True)


if __name__ == "__main__":
    main()
