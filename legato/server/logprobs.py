"""Log-probabilities as the two endpoints show them. One entry for each sampled token, the one that ended
the reply included, whatever a stop string cut off the text."""

from collections.abc import Sequence

from legato.core.plan import Sampled
from legato.text.detokenizer import Detokenizer
from legato.text.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The token as text; as OpenAI, `bytes:\\xe2\\x96` for a token that is no whole characters."""
    data = tokenizer.token_bytes(token, skip_special=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """The four aligned arrays of /v1/completions. One for each reply, since it counts characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._num_chars = 0

    def of(self, sampled: Sequence[Sampled]) -> dict[str, object]:
        """The arrays of the reply's next tokens. `text_offset` is where in the reply's text, before stop
        strings are cut off, a token begins."""
        return {
            "tokens": [token_text(self._tokenizer, s.token) for s in sampled],
            "token_logprobs": [s.logprob for s in sampled],
            "top_logprobs": [self._top(s) for s in sampled],
            "text_offset": [self._offset(s.token) for s in sampled],
        }

    def _top(self, sampled: Sampled) -> dict[str, float | None]:
        """The sampled token is in it even if it is not among the most likely."""
        top: dict[str, float | None] = {token_text(self._tokenizer, id): value for id, value in sampled.top}
        top.setdefault(token_text(self._tokenizer, sampled.token), sampled.logprob)
        return top

    def _offset(self, token: int) -> int:
        offset = self._num_chars
        self._num_chars += len(self._detokenizer.push(token))
        return offset


def chat_logprobs(tokenizer: Tokenizer, sampled: Sequence[Sampled]) -> dict[str, object]:
    """The `logprobs` of a chat choice."""
    content = [
        {
            **_entry(tokenizer, s.token, s.logprob),
            "top_logprobs": [_entry(tokenizer, id, value) for id, value in s.top],
        }
        for s in sampled
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, object]:
    data = tokenizer.token_bytes(token, skip_special=False)
    return {"token": token_text(tokenizer, token), "logprob": logprob, "bytes": list(data)}
