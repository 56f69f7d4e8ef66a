"""Grammars with the real demo model: valid JSON, and the same tokens in every schedule."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rigs import Watcher

from legato import SamplingParams
from legato.config import EngineSettings, ModelSettings
from legato.core.block_pool import BlockPool
from legato.core.output_lengths import OutputLengthEstimator
from legato.core.prefill_policy import Chunked
from legato.core.scheduler import Scheduler
from legato.core.state import SchedulerConfig
from legato.engine.engine import Engine
from legato.engine.llm import LLM, Completion
from legato.text.grammar import Grammar, Grammars, json_source, regex_source
from legato.text.tool_call_grammar import Function, calls_source
from legato.text.tool_call_parser import Arguments, Call, ToolCallParser
from legato.text.tool_format import HERMES

PROMPT = "A person as JSON, Ann who is seven years old and likes red and blue:\n"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "grün", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(gemma_path: Path) -> LLM:
    return LLM.load(ModelSettings(model=str(gemma_path)), EngineSettings(num_blocks=64))


class NoForesight(OutputLengthEstimator):
    """Expects every reply to end at once, so that blocks run out."""

    def remaining(self, num_generated: int) -> float:  # noqa: ARG002
        return 1.0


def tight(llm: LLM, watcher: Watcher) -> LLM:
    """The same model with tiny chunks, and blocks for less than it has to do."""
    engine = llm.model.engine
    config = SchedulerConfig(
        max_batch_tokens=16, max_running=4, max_model_len=160, vocab_size=llm.model.spec.vocab_size
    )
    pool = BlockPool(5, engine.scheduler.state.pool.block_size)
    scheduler = Scheduler(config, pool, prefill_policy=Chunked(5), output_lengths=NoForesight())
    small = Engine.on_runner(scheduler, engine._executor._runner, clock=engine.clock)
    small.observe(watcher)
    return LLM(replace(llm.model, engine=small))


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Grammars:
    return Grammars(llm.model.tokenizer, llm.model.spec.vocab_size)


@pytest.fixture(scope="module")
def person(grammars: Grammars) -> Grammar:
    return grammars.compile(json_source(grammars.schema(SCHEMA, strict=True))).result()


def replies(llm: LLM, prompts: list[str], form: Grammar, **params: Any) -> list[Completion]:
    wanted = SamplingParams(**{"max_tokens": 60, "temperature": 0.0, **params}, constraint=form)
    return llm.generate(prompts, wanted, show_progress=False)


def test_replies_fit_the_schema_greedy_and_drawn(llm: LLM, person: Grammar) -> None:
    completions = [
        *replies(llm, [PROMPT], person),
        *replies(llm, [PROMPT] * 2, person, temperature=1.5, seed=3),
    ]
    for completion in completions:
        assert completion.finish_reason == "stop"
        jsonschema.validate(json.loads(completion.text), SCHEMA)


def test_the_tokens_are_the_same_bits_whatever_the_schedule(llm: LLM, person: Grammar) -> None:
    """One by one in large chunks; all together in tiny ones, with preemptions."""
    prompts = [PROMPT, "Bob, 12, blue. " + PROMPT, "Eve, 40. " + PROMPT]
    expected = [replies(llm, [prompt], person, logprobs=2)[0] for prompt in prompts]
    watcher = Watcher()
    together = replies(tight(llm, watcher), prompts, person, logprobs=2)
    assert [(c.token_ids, c.logprobs) for c in together] == [(c.token_ids, c.logprobs) for c in expected]
    assert any(record.schedule.preempted for record in watcher.records)


def test_a_call_that_is_demanded_of_a_base_model_is_valid(llm: LLM, grammars: Grammars) -> None:
    function = Function(name="remember", schema=grammars.schema(SCHEMA, strict=True))
    source = calls_source(HERMES, [function], content=None, parallel=False)
    (completion,) = replies(llm, [PROMPT], grammars.compile(source).result(), max_tokens=100)
    assert completion.finish_reason == "stop"
    call, *arguments = ToolCallParser(HERMES, {"remember"}).push(completion.text)
    assert call == Call("remember")
    text = "".join(piece.text for piece in arguments if isinstance(piece, Arguments))
    jsonschema.validate(json.loads(text), SCHEMA)


def test_no_special_token_comes_even_if_the_model_wants_nothing_else(llm: LLM, grammars: Grammars) -> None:
    form = grammars.compile(regex_source("(?s:.{40})")).result()
    special = sorted(llm.model.tokenizer.vocabulary.special - llm.model.tokenizer.eos_ids)[:50]
    (completion,) = replies(llm, [PROMPT], form, logit_bias=tuple((id, 100.0) for id in special))
    assert not {*completion.token_ids[:-1]} & llm.model.tokenizer.vocabulary.special
    assert len(completion.text) == 40
