"""Text to token ids and back, the same for every kind of vocabulary.

A token always adds the same bytes, wherever it stands; a text is those bytes read as UTF-8. Nothing is
stripped from or joined to a decoded text, so a reply decoded piece by piece continues its prompt exactly.
Does not know files, requests or chat messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from legato.errors import RequestError
from legato.text.chat import ChatTemplate
from legato.text.folder_vocab import vocabulary_from_folder
from legato.text.gguf_vocab import vocabulary_from_gguf
from legato.text.isolation import Isolation
from legato.text.origins import Written
from legato.text.vocabulary import Vocabulary, longest_token


class Tokenizer:
    """Encodes and decodes with one vocabulary. Stateless: threads may share it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        isolation: Isolation | None = None,
        trust_special_tokens: bool = False,
    ) -> None:
        """`isolation` is that of a chat template; see `for_chats`."""
        self._vocabulary = vocabulary
        self._isolation_given = isolation
        self._trust_special_tokens = trust_special_tokens
        self.longest_token = longest_token(vocabulary)
        """The most bytes of a text that one token can stand for; None if that has no bound known here."""

    @cached_property
    def _isolation(self) -> Isolation:
        return self._isolation_given or Isolation(self._vocabulary)

    @property
    def vocabulary(self) -> Vocabulary:
        """What it is made of."""
        return self._vocabulary

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1."""
        return self._vocabulary.size

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        """The end-of-text token that the model's files name first: the `eos_token` of chat templates."""
        return self._vocabulary.eos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a reply."""
        return self._vocabulary.eos_ids

    @property
    def add_bos(self) -> bool:
        """Whether the model wants BOS before every text."""
        return self.bos_id in self._vocabulary.prefix

    @property
    def add_eos(self) -> bool:
        """Whether the model wants EOS after every text."""
        return self.eos_id in self._vocabulary.suffix

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of `text`.

        `add_special_tokens` puts BOS and EOS where the model wants them, and never a second BOS before one
        that the text already begins with. `parse_special` reads the names of special tokens as those
        tokens; without it they are ordinary text, which is what text from a stranger should be.
        RequestError for text that is not Unicode (a lone surrogate).
        """
        _check_unicode(text, "prompt")
        encoder = self._vocabulary.parsing if parse_special else self._vocabulary.plain
        # `encode` holds the interpreter lock all through, a batch of one does not: a long prompt must not
        # stop the other threads.
        ids: list[int] = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self._framed(ids) if add_special_tokens else ids

    def encode_chat(self, prompt: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of a prompt that a chat template made.

        Only what the template wrote itself becomes control tokens, unless `trust_special_tokens` was asked
        for. Without it a plain `str` is a TypeError: it does not say who wrote what, and an operation that
        lost the origins must not turn the isolation off.

        A template writes every special token that it wants, BOS too, so as a rule none is added here: the
        prompt has one BOS if the template has one, otherwise none.
        """
        if self._trust_special_tokens:
            return self.encode(prompt, add_special_tokens=add_special_tokens, parse_special=True)
        if not isinstance(prompt, Written):
            raise TypeError("the prompt of a chat has to come from a chat template, with its origins")
        _check_unicode(prompt, "messages")
        ids = self._isolation.encode(prompt)
        return self._framed(ids) if add_special_tokens else ids

    def for_chats(self, template: ChatTemplate, *, trust_special_tokens: bool = False) -> "Tokenizer":
        """A tokenizer for the prompts of a chat template: what ends a turn there also ends a reply.

        With `trust_special_tokens` the names of special tokens in messages become those tokens.
        """
        before, after = template.turns
        isolation = Isolation(self._vocabulary, template=template.source, turns=before + after)
        vocabulary = self._vocabulary
        end = isolation.first_control(after)
        if end is not None and end != self.bos_id:
            eos_ids, special = vocabulary.eos_ids | {end}, vocabulary.special | {end}
            vocabulary = replace(vocabulary, eos_ids=eos_ids, special=special)
        return Tokenizer(vocabulary, isolation=isolation, trust_special_tokens=trust_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. RequestError for an id out of range."""
        data = b"".join([self.token_bytes(id, skip_special=skip_special) for id in ids])
        return data.decode(errors="replace")

    def token_bytes(self, id: int, *, skip_special: bool = True) -> bytes:
        """The bytes that the token adds to a text: none for a special token that is skipped."""
        self._check(id)
        pieces = self._vocabulary.pieces
        if id >= len(pieces) or (skip_special and id in self._vocabulary.special):
            return b""
        return pieces[id]

    def special_text(self, id: int | None) -> str:
        """The text that a chat template writes for a special token; "" for None."""
        if id is None:
            return ""
        self._check(id)
        return self._vocabulary.texts[id] if id < len(self._vocabulary.texts) else ""

    def special_id(self, text: str) -> int | None:
        """The special token of this name; None if there is none."""
        texts = self._vocabulary.texts
        return next((id for id in self._vocabulary.special if id < len(texts) and texts[id] == text), None)

    def _framed(self, ids: list[int]) -> list[int]:
        """The ids with what the model wants before and after every text."""
        prefix, suffix = list(self._vocabulary.prefix), list(self._vocabulary.suffix)
        if ids[: len(prefix)] == prefix:
            prefix = []
        return [*prefix, *ids, *suffix]

    def _check(self, id: int) -> None:
        if not 0 <= id < self.vocab_size:
            raise RequestError(f"token id {id} is not in 0..{self.vocab_size - 1}", param="prompt")


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text has a lone surrogate at character {error.start}", param=param) from None


def tokenizer_from_gguf(metadata: Mapping[str, object], num_ids: int = 0) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata (key -> value) of a model with `num_ids` ids, if those are
    more than the vocabulary has. ModelError names the key at fault."""
    return Tokenizer(vocabulary_from_gguf(metadata, num_ids))


def tokenizer_from_folder(folder: Path, num_ids: int | None = None) -> Tokenizer:
    """The tokenizer in a Hugging Face model folder, of a model with `num_ids` ids. ModelError names the file
    at fault."""
    return Tokenizer(vocabulary_from_folder(folder, num_ids))
