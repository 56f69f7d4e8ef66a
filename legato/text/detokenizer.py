"""Token ids to text, one token at a time.

Bytes of an unfinished character wait for its rest; bytes that can never become one turn into U+FFFD exactly
where decoding everything at once would put it. Does not know stop strings or requests.
"""

import codecs
from collections.abc import Collection

from legato.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one reply as it grows: the joined pieces are `tokenizer.decode` of all its ids."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, shown: Collection[int] = ()
    ) -> None:
        """`shown` are special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes. RequestError for an id out of range."""
        skip = self._skip_special and token_id not in self._shown
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, skip_special=skip))

    def flush(self) -> str:
        """The end of the text: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)
