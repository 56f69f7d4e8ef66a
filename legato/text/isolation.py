"""Token ids of a chat's prompt in which only the chat template can write markup.

A tokenizer finds markup (control tokens, and tokens that the template uses like them) by its text, wherever
it stands. Here each piece of markup that the template wrote is replaced by an alias: a text that nobody can
guess. The encoder knows the aliases and not the markup, so the same text from a client is ordinary text. All
is encoded in one go: the ordinary text between two pieces gets the ids that it always got.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken

from legato.errors import RequestError
from legato.text.origins import Origin, Written, origins_of, runs
from legato.text.vocabulary import Vocabulary

_CONTROL = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
"""The form of control tokens, which some files do not declare to be control tokens."""
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""The form of tokens that a template can use as markup. The file may call them ordinary tokens, as Qwen 3's
does with <tool_response>. A template's blanks and words are tokens too, but no markup."""

_OWN = bytes((Origin.TEMPLATE,))


@dataclass(frozen=True, slots=True)
class Markup:
    """A token that ordinary text must not become."""

    id: int
    control: bool
    """Whether only the template may write it. The assistant writes the others too: <think> in a reply that
    comes back is that token again."""
    alias: str


class Isolation:
    """The encoder for the prompts of one chat template. Stateless: threads may share it."""

    def __init__(self, vocabulary: Vocabulary, *, template: str = "", turns: str = "") -> None:
        """The tokens in the source of the chat template are markup. Those in `turns`, which it wrote around
        some messages, are only the template's."""
        added = vocabulary.parsing.get_added_tokens_decoder()
        plain = {token.content for token in vocabulary.plain.get_added_tokens_decoder().values()}
        # Unguessable, and of characters that no normalizer changes and no text for others may have.
        key = secrets.token_hex(16)
        self._markup: dict[str, Markup] = {}
        for id, token in added.items():
            text = token.content
            tag = _TAG.fullmatch(text) is not None
            declared = token.special or id in vocabulary.special or text not in plain
            control = declared or _CONTROL.fullmatch(text) is not None or (tag and text in turns)
            if control or (tag and text in template):
                self._markup[text] = Markup(id, control, f"\ufdd0{key}{id:x}\ufdd1")
        known = {
            id: _renamed(token, self._markup[token.content].alias) if token.content in self._markup else token
            for id, token in added.items()
        }
        base = vocabulary.parsing.get_vocab_size(with_added_tokens=False)
        has_gaps = any(text and id not in added for id, text in enumerate(vocabulary.texts) if id >= base)
        # New tokens get the ids from `base` on, which are then not all free.
        fillers = range(base, len(vocabulary.texts)) if has_gaps else ()
        self._encoder = _encoder(
            vocabulary.parsing, [*(AddedToken(f"\ufdd0{key}-{id}") for id in fillers), *known.values()]
        )
        self._ids = _differing_ids(self._encoder, known)
        unknown = getattr(vocabulary.parsing.model, "unk_token", None)
        controls = (text for text, markup in self._markup.items() if markup.control and text != unknown)
        self._made_by_model = frozenset(self._encoder.token_to_id(text) for text in controls) - {None}
        """Ids of control tokens that are entries of the model's vocabulary, too: merges might make them."""
        self._lengths = sorted({len(text) for text in self._markup}, reverse=True)
        starts = "".join(sorted({text[0] for text in self._markup}))
        self._starts = re.compile(f"[{re.escape(starts)}]" if starts else r"(?!)")

    def encode(self, prompt: Written) -> list[int]:
        """The ids of a prompt, without what a model wants before and after every text. RequestError if the
        model's rule makes a control token of ordinary text."""
        parts = []
        end = 0
        for start, text in self._found(prompt):
            parts += [str.__getitem__(prompt, slice(end, start)), self._markup[text].alias]
            end = start + len(text)
        parts.append(str.__getitem__(prompt, slice(end, None)))
        ids: list[int] = self._encoder.encode_batch_fast(["".join(parts)], add_special_tokens=False)[0].ids
        if not self._made_by_model.isdisjoint(ids):
            raise RequestError("a message has the text of a control token", param="messages")
        return [self._ids.get(id, id) for id in ids]

    def first_control(self, prompt: Written) -> int | None:
        """The first control token that the template wrote."""
        markups = (self._markup[text] for _, text in self._found(prompt))
        return next((markup.id for markup in markups if markup.control), None)

    def _found(self, prompt: Written) -> Iterator[tuple[int, str]]:
        """(start, text) of the markup in a prompt: of what begins first, the longest."""
        origins = origins_of(prompt)
        for first, last in runs(prompt, Origin.ASSISTANT, Origin.TEMPLATE):
            end = first
            for start in self._starts.finditer(prompt, first, last):
                if start.start() >= end and (text := self._at(prompt, origins, start.start(), last)):
                    yield start.start(), text
                    end = start.start() + len(text)

    def _at(self, prompt: str, origins: bytes, start: int, last: int) -> str | None:
        """The longest markup that begins at `start` and whose characters may make it."""
        for length in self._lengths:
            if start + length <= last:
                text = str.__getitem__(prompt, slice(start, start + length))
                markup = self._markup.get(text)
                if markup is not None and not (
                    markup.control and origins[start : start + length].strip(_OWN)
                ):
                    return text
        return None


def _renamed(token: AddedToken, text: str) -> AddedToken:
    """The same token under another text. Not special: those are not looked for in ordinary text."""
    return AddedToken(
        text,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _encoder(parsing: tokenizers.Tokenizer, added: Sequence[AddedToken]) -> tokenizers.Tokenizer:
    """An encoder that finds the `added` tokens before it merges. Both share one model."""
    encoder = tokenizers.Tokenizer(parsing.model)
    if parsing.normalizer is not None:
        encoder.normalizer = parsing.normalizer
    if parsing.pre_tokenizer is not None:
        encoder.pre_tokenizer = parsing.pre_tokenizer
    encoder.add_tokens([*added])
    return encoder


def _differing_ids(encoder: tokenizers.Tokenizer, added: Mapping[int, AddedToken]) -> dict[int, int]:
    """The encoder's own id of a token -> the model's."""
    own = {encoder.token_to_id(token.content): id for id, token in added.items()}
    return {own_id: id for own_id, id in own.items() if own_id is not None and own_id != id}
