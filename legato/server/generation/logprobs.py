"""Log-probabilities in the formats of the two endpoints.

There is one entry for each sampled token, including the last one, even if a stop string was cut off the
text, and for each token of a prompt that is returned.
"""

from collections.abc import Sequence

from legato.core.step_plan import TokenLogprobs
from legato.text.detokenizer import Detokenizer
from legato.text.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token. As in OpenAI's API, `bytes:\\xe2\\x96` if it is not valid UTF-8 by itself."""
    data = tokenizer.token_bytes(token, skip_special=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """The four parallel arrays of /v1/completions. Each reply needs its own object, which counts
    characters."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._num_chars = 0

    def arrays(self, prompt: Sequence[TokenLogprobs], sampled: Sequence[TokenLogprobs]) -> dict[str, object]:
        """The arrays of an echoed prompt followed by the reply's next tokens.

        `text_offset` is the position of a token in the text of both, before stop strings are cut off.
        """
        tokens = (*prompt, *sampled)
        offsets = [self._offset(s.token) for s in prompt]
        if prompt:  # The text of the reply is detokenized separately.
            self._num_chars += len(self._detokenizer.flush())
        return {
            "tokens": [token_text(self._tokenizer, s.token) for s in tokens],
            "token_logprobs": [s.logprob for s in tokens],
            "top_logprobs": [self._top(s) for s in tokens],
            "text_offset": offsets + [self._offset(s.token) for s in sampled],
        }

    def _top(self, sampled: TokenLogprobs) -> dict[str, float | None] | None:
        """The most likely tokens, and the token itself even if it is not among them. None for a prompt's
        first token."""
        if sampled.logprob is None:
            return None
        best = sampled.top[: self._num_top]
        top: dict[str, float | None] = {token_text(self._tokenizer, id): value for id, value in best}
        top.setdefault(token_text(self._tokenizer, sampled.token), sampled.logprob)
        return top

    def _offset(self, token: int) -> int:
        offset = self._num_chars
        self._num_chars += len(self._detokenizer.push(token))
        return offset


def chat_logprobs(tokenizer: Tokenizer, sampled: Sequence[TokenLogprobs]) -> dict[str, object]:
    """The `logprobs` of a chat choice."""
    content = [
        {
            **_entry(tokenizer, s.token, s.logprob),
            "top_logprobs": [_entry(tokenizer, id, value) for id, value in s.top],
        }
        for s in sampled
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, object] | None]:
    """vLLM's format: for each prompt token a dict by id, of the token itself and of the most likely tokens
    in its place. None for the first token."""
    return [None if token.logprob is None else _prompt_entry(tokenizer, token, num_top) for token in prompt]


def _prompt_entry(tokenizer: Tokenizer, token: TokenLogprobs, num_top: int) -> dict[str, object]:
    ranked = [(id, value, rank) for rank, (id, value) in enumerate(token.top[:num_top], 1)]
    return {
        str(id): {"logprob": value, "rank": rank, "decoded_token": token_text(tokenizer, id)}
        for id, value, rank in (*ranked, (token.token, token.logprob, token.rank))
    }


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, object]:
    data = tokenizer.token_bytes(token, skip_special=False)
    return {"token": token_text(tokenizer, token), "logprob": logprob, "bytes": list(data)}
