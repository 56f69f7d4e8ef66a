"""Whatever a client sends, it gets an answer that is no fault of ours, and the server goes on."""

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from server_rig import build_service, in_process, json_bytes

from legato.server.schema.bodies import ChatBody, CompletionBody

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2, 2**31, 2**63, 10**30, 1e400, -0.0, float("nan")]),
    st.floats(),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def bodies(
    kind: type[CompletionBody] | type[ChatBody], start: dict[str, Any]
) -> st.SearchStrategy[dict[str, Any]]:
    """A good body with some known fields replaced, and perhaps an unknown one."""
    names = st.sampled_from([*kind.model_fields, *kind.neutral, *sorted(kind.labels), "unknown"])
    return st.dictionaries(names, VALUES, max_size=3).map(lambda changes: {**start, **changes})


REQUESTS = st.one_of(
    st.tuples(st.just("/v1/completions"), bodies(CompletionBody, {"prompt": "hi", "max_tokens": 2})),
    st.tuples(
        st.just("/v1/chat/completions"),
        bodies(ChatBody, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=8))
def test_any_body_gets_an_answer_and_the_next_request_is_served(
    requests: list[tuple[str, dict[str, Any]]],
) -> None:
    async def run() -> None:
        service = build_service()
        async with in_process(service) as client:
            for path, body in requests:
                answer = await client.post(path, content=json_bytes(body))
                assert answer.status_code in (200, 400, 404), answer.text
                if answer.status_code != 200:
                    assert answer.json()["error"]["message"]
            good = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
            assert good.json()["choices"][0]["text"] == "ab"
            await service.engine.drain()
        assert service.engine.engine.scheduler.state.pool.num_used == 0

    asyncio.run(run())
