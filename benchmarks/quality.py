"""How far each way to keep weights and K, V is from fp32: KL divergence and perplexity over a long text.

    python -m benchmarks.quality --json

Reference: the dense fp32 decoder with the reference attention, in this process, on the same tokens. KL is
KL(reference || variant) in nats, the mean over positions.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from legato.attention.reference import ReferenceAttention
from legato.config import ModelSettings
from legato.core.request import RequestId
from legato.core.step_plan import ForwardBatch, ForwardSeq, StepPlan
from legato.models.decoder import Decoder
from legato.models.load import OpenedModel, open_model
from legato.models.source import resolve
from legato.runner.backends import layer_ops
from legato.runner.inputs import build_inputs
from legato.runner.kv_cache import KVCache

CPU = torch.device("cpu")
BLOCK, CHUNK = 32, 64


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to keep weights and K, V."""

    weights: str
    kv: str


VARIANTS = (
    *(Variant(weights, "float32") for weights in ("fp16", "w16", "w8")),
    *(Variant("dense", kv) for kv in ("float16", "bfloat16")),
    *(Variant(weights, "float16") for weights in ("w16", "w8")),
)


class Reader:
    """Reads one text chunk by chunk and gives the log-probabilities after every position."""

    def __init__(self, opened: OpenedModel, variant: Variant, num_tokens: int) -> None:
        self._decoder = Decoder(
            opened.spec,
            opened.weights(dtype=torch.float32, device=CPU),
            attention=ReferenceAttention(),
            ops=layer_ops(variant.weights),
        )
        self._blocks = tuple(range(-(-num_tokens // BLOCK)))
        self._cache = KVCache(
            opened.spec,
            num_blocks=len(self._blocks),
            block_size=BLOCK,
            dtype=getattr(torch, variant.kv),
            device=CPU,
        )

    def read(self, ids: list[int], start: int) -> Tensor:  # [len(ids), V]
        seq = ForwardSeq(RequestId("text"), tuple(ids), start, self._blocks)
        inputs = build_inputs(StepPlan(ForwardBatch((seq,)), ()), block_size=BLOCK, device=CPU)
        rows = torch.arange(len(ids))
        logits = self._decoder.forward(
            inputs.token_ids, inputs.positions, inputs.batch, self._cache.layers, rows
        )
        return logits.log_softmax(dim=-1)


def compare(opened: OpenedModel, variant: Variant, ids: list[int]) -> dict[str, object]:
    """KL, equal top choices and perplexities of a variant beside the reference."""
    exact = Reader(opened, Variant("dense", "float32"), len(ids))
    other = Reader(opened, variant, len(ids))
    kl = same = 0.0
    nll = [0.0, 0.0]
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        p, q = exact.read(part, start), other.read(part, start)
        kl += float((p.exp() * (p - q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        following = torch.tensor(ids[start + 1 : start + CHUNK + 1])
        for i, logprobs in enumerate((p, q)):
            nll[i] -= float(logprobs[torch.arange(len(following)), following].sum())
    perplexities = torch.tensor(nll).div(len(ids) - 1).exp().tolist()
    return {
        "weights": variant.weights,
        "kv": variant.kv,
        "tokens": len(ids),
        "kl": kl / len(ids),
        "same_top": same / len(ids),
        "perplexity": perplexities[1],
        "perplexity_fp32": perplexities[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=ModelSettings().model)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "legato")
    parser.add_argument("--golden", type=Path, default=Path("tests/golden/gemma3_270m_greedy.json"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    prompts = json.loads(arguments.golden.read_text())
    ids = max((prompt["prompt_ids"] for prompt in prompts), key=len)
    opened = open_model(resolve(arguments.model, cache_dir=arguments.cache_dir))
    rows = [compare(opened, variant, ids) for variant in VARIANTS]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            "  ".join(
                f"{name} {value:.3g}" if isinstance(value, float) else f"{value}"
                for name, value in row.items()
            )
        )


if __name__ == "__main__":
    main()
