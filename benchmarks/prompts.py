"""Random prompts of ordinary text tokens, for any server that answers POST /tokenize.

The ids are those of English words as the server itself tokenizes them. So every id exists in its model, none
is a control token, and a prompt begins with the token that the model expects at the start of a text.
"""

import pydoc_data.topics
import random
import re
from dataclasses import dataclass

import httpx

from benchmarks.streams import BenchmarkError, Server

WORDS_AT_ONCE = 100
"""Words of one call: few enough for every context."""

FORMS = (("prompt", "add_special_tokens"), ("content", "add_special"))
"""What POST /tokenize calls its text and its flag: vLLM and Legato, llama.cpp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Draws prompts for one server. No two are alike, so no cache of prefixes helps."""

    begin: tuple[int, ...]
    """What the model expects before every text: its BOS token, or nothing."""
    ids: tuple[int, ...]
    """Ordinary text tokens of the model's vocabulary."""
    random: random.Random

    def draw(self, length: int) -> list[int]:
        """Exactly `length` ids."""
        return [*self.begin, *self.random.choices(self.ids, k=length - len(self.begin))]


def words() -> tuple[str, ...]:
    """About 3,700 different words: those of the help texts that come with Python."""
    text = " ".join(pydoc_data.topics.topics.values())
    return tuple(sorted(set(re.findall("[A-Za-z]+", text))))


async def prompts_of(client: httpx.AsyncClient, server: Server, rng: random.Random) -> Prompts:
    """Ask the server for the ids of words. Raises BenchmarkError if it does not tell them."""
    form, plain = await _form_of(client, server)
    special = await _tokenize(client, server, form, "word", add_special=True)
    before = [at for at in range(len(special)) if special[at : at + len(plain)] == plain]
    if not before:
        raise BenchmarkError(f"{server.name}: 'word' is {plain} alone and {special} with special tokens")
    ids: set[int] = set()
    every = words()
    for start in range(0, len(every), WORDS_AT_ONCE):
        text = " ".join(every[start : start + WORDS_AT_ONCE])
        ids.update(await _tokenize(client, server, form, text, add_special=False))
    begin = special[: before[0]]
    return Prompts(begin=tuple(begin), ids=tuple(sorted(ids.difference(begin))), random=rng)


async def _form_of(client: httpx.AsyncClient, server: Server) -> tuple[tuple[str, str], list[int]]:
    """The form that the server understands, and what it makes of 'word'."""
    problem = ""
    for form in FORMS:
        try:
            if plain := await _tokenize(client, server, form, "word", add_special=False):
                return form, plain
            problem = f"{server.name}: POST /tokenize gives no ids for 'word'"
        except BenchmarkError as error:
            problem = str(error)
    raise BenchmarkError(f"{problem}; prompts are made of the ids that the server gives for words")


async def _tokenize(
    client: httpx.AsyncClient, server: Server, form: tuple[str, str], text: str, *, add_special: bool
) -> list[int]:
    body: dict[str, object] = {form[0]: text, form[1]: add_special}
    if server.model is not None:
        body["model"] = server.model
    response = await client.post(f"{server.url}/tokenize", json=body)
    if response.status_code != 200:
        raise BenchmarkError(
            f"{server.name}: POST /tokenize: HTTP {response.status_code}: {response.text:.300}"
        )
    try:
        ids = response.json()["tokens"]
    except (ValueError, KeyError, TypeError):
        ids = None
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise BenchmarkError(f"{server.name}: POST /tokenize: no list of ids: {response.text:.300}")
    return ids
