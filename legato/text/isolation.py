"""Token ids of a chat's prompt in which only the chat template can write markup.

A tokenizer finds markup (control tokens, and tokens that the template uses like them) by its text, wherever
it stands. Here each piece of markup that the template wrote is replaced by an alias: a text that nobody can
guess. The encoder knows the aliases and not the markup, so the same text from a client is ordinary text. All
is encoded in one go: the ordinary text between two pieces gets the ids that it always got.

Markup that is no token of the vocabulary (`### Instruction:`, the `[INST]` of Llama 2) cannot be isolated:
the model reads it as ordinary text, and the same text of a client has the same ids.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

_STRETCH = re.compile(bytes((Origin.ASSISTANT,)) + b"+|" + bytes((Origin.TEMPLATE,)) + b"+")
"""Characters of one origin."""


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
        self._any_markup = _longest_of(self._markup)
        self._tags = _longest_of(text for text, markup in self._markup.items() if not markup.control)
        self._longest_tag = max((len(text) for text in self._markup if self._tags.fullmatch(text)), default=1)

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
        """(start, text) of the markup in a prompt: of what begins first, the longest.

        Control tokens are looked for in the template's own text alone. Tags may also be the assistant's, and
        begin in the one's text and end in the other's.
        """
        origins = origins_of(prompt)
        text = str.__getitem__(prompt, slice(None))  # expressions search an ordinary text faster
        for first, last in runs(prompt, Origin.ASSISTANT, Origin.TEMPLATE):
            position = first
            for stretch in _STRETCH.finditer(origins, first, last):
                is_own = origins[stretch.start()] == Origin.TEMPLATE
                position = max(position, stretch.start())
                while found := self._next(text, position, stretch.end(), last, is_own):
                    yield found.start(), found[0]
                    position = found.end()

    def _next(self, text: str, start: int, end: int, last: int, is_own: bool) -> re.Match[str] | None:
        """The first markup that begins between `start` and `end`. What ends behind `end`, up to `last`, is a
        tag, and so is all markup if the text is not the template's own."""
        within = self._any_markup.search(text, start, end) if is_own else None
        tags_from = max(start, end - self._longest_tag + 1) if is_own else start
        tag = self._tags.search(text, tags_from, min(last, end + self._longest_tag - 1))
        if tag is not None and tag.start() >= end:
            tag = None
        found = [match for match in (within, tag) if match is not None]
        return min(found, key=lambda match: (match.start(), -match.end()), default=None)


def _longest_of(texts: Iterable[str]) -> re.Pattern[str]:
    """An expression for the longest of some texts that stands at a place. It is a tree of their beginnings:
    thousands of texts are found as fast as a few."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_expression(tree) if tree else r"(?!)")


def _expression(node: Mapping[str, Any]) -> str:
    if len(node) == 1:  # a chain without branches may be longer than calls may be nested
        chain = ""
        while len(node) == 1 and "" not in node:
            ((char, node),) = node.items()
            chain += re.escape(char)
        return chain + ("" if [*node] == [""] else _expression(node))
    branches = "|".join(re.escape(char) + _expression(child) for char, child in node.items() if char)
    return f"(?:{branches})" + ("?" if "" in node else "")


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
