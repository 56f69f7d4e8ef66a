"""Log-probabilities as the two endpoints show them. One entry for each sampled token, the one that ended
the reply included, whatever a stop string cut off the text; and for each token of a prompt that is shown."""

from collections.abc import Sequence

from legato.core.step_plan import TokenLogprobs
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

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._num_chars = 0

    def of(self, prompt: Sequence[TokenLogprobs], sampled: Sequence[TokenLogprobs]) -> dict[str, object]:
        """The arrays of a prompt that is echoed and of the reply's next tokens. `text_offset` is where a
        token begins in the text of both, before stop strings are cut off."""
        tokens = (*prompt, *sampled)
        offsets = [self._offset(s.token) for s in prompt]
        if prompt:  # what follows begins a text of its own
            self._num_chars += len(self._detokenizer.flush())
        return {
            "tokens": [token_text(self._tokenizer, s.token) for s in tokens],
            "token_logprobs": [s.logprob for s in tokens],
            "top_logprobs": [self._top(s) for s in tokens],
            "text_offset": offsets + [self._offset(s.token) for s in sampled],
        }

    def _top(self, sampled: TokenLogprobs) -> dict[str, float | None] | None:
        """The token itself is in it, even if not among the most likely. None for a text's first token."""
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
    """As vLLM: for each token of a prompt the entries of itself and of the most likely ones in its place, by
    id. None for the first token."""
    return [
        None
        if token.logprob is None
        else {
            str(id): {"logprob": value, "rank": rank, "decoded_token": token_text(tokenizer, id)}
            for id, value, rank in (
                *((id, value, rank) for rank, (id, value) in enumerate(token.top[:num_top], 1)),
                (token.token, token.logprob, token.rank),
            )
        }
        for token in prompt
    ]


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, object]:
    data = tokenizer.token_bytes(token, skip_special=False)
    return {"token": token_text(tokenizer, token), "logprob": logprob, "bytes": list(data)}
