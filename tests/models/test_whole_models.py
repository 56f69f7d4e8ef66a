"""A model folder, built as a server builds it: what its files say of ends, sampling, sizes and types."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tiny_models import BOS, EOS, SMALL, TURN, write_folder

from legato import SamplingParams
from legato.config import EngineSettings, ModelSettings
from legato.engine.build import LoadedModel, build
from legato.engine.llm import LLM
from legato.errors import ConfigError, ModelError, RequestError

PROMPT = "how are you"


def load(folder: Path, *, for_chat: bool = False, **changes: Any) -> LoadedModel:
    return build(
        ModelSettings(**{"model": str(folder), "weights": "dense"} | changes),
        EngineSettings(num_blocks=8, attention="reference"),
        cache_dir=folder.parent / "cache",
        for_chat=for_chat,
    )


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# -- ends of replies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [EOS, TURN])
@pytest.mark.parametrize("ignored", [False, True])
def test_every_id_of_the_list_in_generation_config_ends_a_reply(
    model_folder: Path, end: int, ignored: bool
) -> None:
    """F-10: whichever it is, its text is not shown; to ignore the end means the whole list."""
    built = load(model_folder)
    assert (built.tokenizer.eos_id, built.tokenizer.eos_ids) == (EOS, {EOS, TURN})
    params = SamplingParams(max_tokens=5, temperature=0.0, logit_bias={end: 100.0}, ignore_eos=ignored)
    (reply,) = LLM(built).generate([PROMPT], params, show_progress=False)
    expected = ((end,) * 5, "length") if ignored else ((end,), "stop")
    assert (reply.token_ids, reply.finish_reason, reply.text) == (*expected, "")


# -- BOS --------------------------------------------------------------------------------------------------


def test_a_chat_has_the_bos_of_its_template_alone_and_a_completion_that_of_the_tokenizer(
    model_folder: Path,
) -> None:
    """F-09"""
    built = load(model_folder)
    assert built.chat_template is not None
    chat = built.tokenizer.encode_chat(built.chat_template.render([{"role": "user", "content": "hi"}]))
    assert chat == [BOS, *b"hi", TURN]
    for prompt, parse in (("hi", False), ("hi", True), ("<s>hi", True)):
        ids = built.tokenizer.encode(prompt, parse_special=parse)
        assert (ids[0], ids.count(BOS), len(ids)) == (BOS, 1, 3)


# -- sizes of tokenizer and embedding ---------------------------------------------------------------------


def add_tokens(folder: Path, *texts: str) -> int:
    """The id of the last one."""
    path = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.add_special_tokens(list(texts))
    tokenizer.save(path)
    last = tokenizer.token_to_id(texts[-1])
    assert last is not None
    return last


def test_ids_that_pad_the_embedding_are_ids_without_text(model_folder: Path) -> None:
    built = load(model_folder)
    assert built.tokenizer.vocab_size == built.spec.vocab_size == SMALL["vocab_size"]
    assert built.tokenizer.decode([263], skip_special=False) == ""


def test_tokens_without_a_row_of_the_embedding_are_told_and_cannot_be_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 3 1B has a token for images that its embedding lacks."""
    names = [f"<image {i}>" for i in range(8)]
    last = add_tokens(folder, *names)
    assert last >= 264
    with caplog.at_level(logging.WARNING):
        built = load(folder)
    assert "no embedding for its tokens from id 264 on" in caplog.text
    assert built.tokenizer.vocab_size == 264
    ids = built.tokenizer.encode(names[-1], parse_special=True)
    assert last in ids
    with pytest.raises(RequestError, match=r"prompt: token ids must be from 0 to 263"):
        LLM(built).generate([ids], show_progress=False)
    (reply,) = LLM(built).generate([PROMPT], SamplingParams(max_tokens=2), show_progress=False)
    assert reply.finish_reason in ("length", "stop")


@pytest.mark.parametrize("key", ["eos_token", "bos_token"])
def test_an_end_without_a_row_of_the_embedding_is_refused(folder: Path, key: str) -> None:
    last = add_tokens(folder, *(f"<more {i}>" for i in range(8)))
    edit(folder / "tokenizer_config.json", **{key: "<more 7>"})
    with pytest.raises(ModelError, match=rf"^{folder}: BOS and EOS ids .*{last}.* are not all in 0\.\.263"):
        load(folder)


# -- sizes of cache and context ---------------------------------------------------------------------------


def test_a_cache_smaller_than_the_models_context_lowers_it_or_refuses_more(model_folder: Path) -> None:
    """D-02: what is served is what fits, and it is told; to ask for more ends the start."""
    built = load(model_folder)
    blocks = built.engine.scheduler.state.pool
    capacity = blocks.num_blocks * blocks.block_size
    assert built.max_model_len == built.engine.scheduler.state.config.max_model_len == capacity
    assert capacity < built.spec.max_position
    assert f"at most {capacity} tokens" in built.choices["context"]
    with pytest.raises(ConfigError, match=f"max_model_len is {capacity + 1}; .* holds {capacity} tokens"):
        load(model_folder, max_model_len=capacity + 1)
    with pytest.raises(RequestError, match=f"at most {capacity}"):
        LLM(built).generate([[5] * capacity], SamplingParams(max_tokens=1), show_progress=False)


# -- types ------------------------------------------------------------------------------------------------


def test_files_may_mix_float_types(folder: Path) -> None:
    """Norms in float32 beside matrices in bfloat16 and float16 are in use."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    for path in sorted(folder.glob("*.safetensors")):
        tensors = {name: tensor.to(types[i % 3]) for i, (name, tensor) in enumerate(load_file(path).items())}
        save_file(tensors, path)
    (reply,) = LLM(load(folder)).generate(
        [PROMPT], SamplingParams(max_tokens=3, ignore_eos=True), show_progress=False
    )
    assert len(reply.token_ids) == 3


def test_gemma_3_in_float16_is_refused_before_its_weights_are_read(
    published_model: Callable[..., Any], tmp_path: Path
) -> None:
    """F-18"""
    gemma = published_model("Gemma3TextConfig", SMALL | {"sliding_window": 8})
    folder = write_folder(tmp_path / "gemma", gemma)
    assert "float32 (auto)" in load(folder).choices["dtype"]
    assert "bfloat16" in load(folder, dtype="bfloat16").choices["dtype"]
    with pytest.raises(ConfigError, match=r"^dtype: float16 does not work for Gemma 3"):
        load(folder, dtype="float16")


# -- what is said and when --------------------------------------------------------------------------------


def test_the_models_sampling_is_read_told_and_can_be_turned_off(model_folder: Path) -> None:
    """F-22"""
    built = load(model_folder)
    assert built.sampling_defaults.changed == {"temperature": 0.5, "top_k": 3}
    assert built.choices["sampling"] == "temperature 0.5, top_k 3 where a request does not say (auto)"
    plain = load(model_folder, generation_config="none")
    assert plain.sampling_defaults.changed == {}
    assert plain.choices["sampling"] == "OpenAI's where a request does not say (none)"


def test_a_missing_template_is_found_before_the_weights_are_looked_at(folder: Path) -> None:
    (folder / "chat_template.json").unlink()
    for shard in folder.glob("*.safetensors"):
        shard.write_bytes(b"")
    with pytest.raises(ConfigError, match="without a chat template"):
        load(folder, for_chat=True)
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load(folder)
