"""Fixtures of the models' tests: published models in miniature, and a decoder run over paged blocks."""

import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import SMALL, write_folder
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from legato.attention.base import AttentionBatch, LayerCache
from legato.attention.reference import ReferenceAttention
from legato.models.decoder import Decoder
from legato.models.load import open_model
from legato.models.source import resolve


class PagedModel:
    """A decoder over a cache whose blocks are handed out in a scattered order.

    Nothing is at block 0, with which block tables are padded, and what was never written is NaN: a row that
    looks where it must not shows it in its logits.
    """

    def __init__(
        self, decoder: Decoder, *, num_tokens: int = 512, block_size: int = 4, seed: int = 0
    ) -> None:
        spec = decoder.spec
        num_blocks = 1 + num_tokens // block_size
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self._decoder = decoder
        self._block_size = block_size
        self._cache = [
            LayerCache(*(torch.full(shape, torch.nan, dtype=decoder.dtype) for _ in range(2)))
            for _ in spec.layers
        ]
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)
        self._tables: dict[str, list[int]] = defaultdict(list)
        self._computed: dict[str, int] = defaultdict(int)

    def step(self, runs: dict[str, list[int]]) -> dict[str, Tensor]:
        """Append the tokens of each sequence in one mixed step; the logits of every row, by sequence."""
        positions, slots, starts, query_start = [], [], [], [0]
        for name, tokens in runs.items():
            start, table = self._computed[name], self._tables[name]
            end = start + len(tokens)
            while len(table) * self._block_size < end:
                table.append(self._free.pop())
            positions += range(start, end)
            slots += [
                table[p // self._block_size] * self._block_size + p % self._block_size
                for p in range(start, end)
            ]
            starts.append(start)
            query_start.append(query_start[-1] + len(tokens))
            self._computed[name] = end
        width = max(len(self._tables[name]) for name in runs)
        padded = [self._tables[name] + [0] * (width - len(self._tables[name])) for name in runs]
        batch = AttentionBatch(
            query_start=torch.tensor(query_start, dtype=torch.int32),
            start=torch.tensor(starts, dtype=torch.int32),
            block_table=torch.tensor(padded, dtype=torch.int32),
            slots=torch.tensor(slots),
        )
        token_ids = torch.tensor([token for tokens in runs.values() for token in tokens])
        rows = torch.arange(len(token_ids))
        logits = self._decoder.forward(token_ids, torch.tensor(positions), batch, self._cache, rows)
        return dict(zip(runs, logits.split([len(tokens) for tokens in runs.values()]), strict=True))

    def prefill(self, name: str, tokens: list[int], chunk: int) -> Tensor:
        """The logits of all `tokens`, computed `chunk` at a time."""
        parts = [self.step({name: tokens[i : i + chunk]})[name] for i in range(0, len(tokens), chunk)]
        return torch.cat(parts)


@pytest.fixture(scope="session")
def paged_model() -> type[PagedModel]:
    return PagedModel


@pytest.fixture(scope="session")
def load_decoder() -> Callable[..., Decoder]:
    def load(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
        """The model in a folder or in a GGUF file."""
        opened = open_model(resolve(str(path), cache_dir=path))
        weights = opened.weights(dtype=dtype, device=torch.device("cpu"))
        return Decoder(opened.spec, weights, attention=ReferenceAttention())

    return load


@pytest.fixture(scope="session")
def published_model() -> Callable[[str, dict[str, object]], PreTrainedModel]:
    """(config class, its arguments) -> that architecture with random weights, in which every part tells."""

    def build(config_class: str, arguments: dict[str, object]) -> PreTrainedModel:
        config = getattr(transformers, config_class)(**arguments)
        torch.manual_seed(7)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            # Initialised biases are 0 and gains 1, so that a forgotten one would change nothing.
            for weight in model.parameters():
                if weight.dim() == 1:
                    weight += 0.2 * torch.randn_like(weight)
                else:
                    weight.normal_(std=1.3 * weight.shape[-1] ** -0.5)
        return model

    return build


@pytest.fixture(scope="session")
def model_folder(
    published_model: Callable[[str, dict[str, object]], PreTrainedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A Llama as it lies on the hub. Not to be changed: copy it."""
    return write_folder(tmp_path_factory.mktemp("folder") / "model", published_model("LlamaConfig", SMALL))
