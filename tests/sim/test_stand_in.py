"""What stands in for a model: real scheduling, made-up text that follows from the prompt."""

from pathlib import Path

import pytest
from sim_rig import known_costs

from legato.config import EngineSettings, ModelSettings
from legato.core.events import TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.cost.step_cost import StepCost
from legato.sampling_params import SamplingParams
from legato.sim.stand_in import StandIn, build_stand_in
from legato.text.fake import FakeTokenizer

QUICK = StepCost(step=1e-6, head=0, decode=0, prefill=0, context=0, pair=0)


@pytest.fixture
def stand_in() -> StandIn:
    return build_stand_in(ModelSettings(), EngineSettings(), known_costs(QUICK), Path("cost.json"))


def replies(stand_in: StandIn, prompts: list[str], **params: object) -> list[list[int]]:
    """Tokens of each, served together."""
    engine, eos = stand_in.engine, FakeTokenizer.EOS
    made: dict[RequestId, list[int]] = {}
    for i, prompt in enumerate(prompts):
        given = {"max_tokens": 2000, "stop_token_ids": frozenset({eos}), **params}
        request = Request(
            id=RequestId(str(i)),
            prompt=tuple(stand_in.tokenizer.encode(prompt)),
            params=SamplingParams(**given),  # type: ignore[arg-type]
            arrival=0.0,
        )
        engine.submit(request)
        made[request.id] = []
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            assert event.finish is not FinishReason.ERROR
            made[event.request_id].append(event.sampled.token)
    return list(made.values())


def test_replies_end_by_themselves_after_a_while(stand_in: StandIn) -> None:
    lengths = [len(tokens) for tokens in replies(stand_in, ["word " * i for i in range(100)])]
    assert 90 < sum(lengths) / len(lengths) < 230
    assert max(lengths) > 2 * min(lengths)


def test_the_text_is_letters_in_words_and_follows_from_the_prompt(stand_in: StandIn) -> None:
    one, same, other = replies(
        stand_in, ["hello", "hello", "hullo"], stop_token_ids=frozenset(), max_tokens=500
    )
    text = stand_in.tokenizer.decode(one)
    assert one == same != other
    assert set(text) <= {*"abcdefghijklmnopqrstuvwxyz "}
    assert 40 < text.count(" ") < 150
    assert len({text[i : i + 8] for i in range(len(text) - 8)}) > 450  # it does not go round in circles


def test_min_tokens_holds(stand_in: StandIn) -> None:
    made = replies(stand_in, [f"prompt {i}" for i in range(20)], min_tokens=150)
    assert min(map(len, made)) > 150
