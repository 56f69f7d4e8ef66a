"""Turns a request body into `SamplingParams`, within the limits of the model, the prompt and the server."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from legato.config import in_seconds
from legato.engine.output_processor import DetokenizeOptions
from legato.engine.requests import RequestOptions
from legato.errors import ContextLengthError, RequestError
from legato.sampling_params import SamplingParams
from legato.server.generation.constraints import with_constraint
from legato.server.schema.bodies import GenerationBody
from legato.server.service import ServedModel, Service
from legato.server.transport.work_pool import WorkPool
from legato.text.grammar import Grammar
from legato.text.stop import StopStrings

NO_LIMIT = -1
"""The value of `max_tokens` for as many tokens as there is room for."""
_MAX_TOKEN_BYTES = 256
"""More than the longest token of any vocabulary. The longest ones in use are runs of 128 spaces."""


def check_body(body: GenerationBody, service: Service) -> None:
    """Check everything about a body that does not depend on its prompt. Raises `RequestError`."""
    limits, vocab_size = service.limits, service.model.vocab_size
    limits.check(body.n, limits.n, "n")
    limits.check(body.prompt_logprobs or 0, limits.logprobs, "prompt_logprobs")
    if body.best_of not in (None, body.n):
        raise RequestError("best_of: other than n is not supported", param="best_of")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: only with stream", param="stream_options")
    if (
        None not in (body.max_tokens, body.max_completion_tokens)
        and requested_length(body) != body.max_tokens
    ):
        raise RequestError("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
    if requested_length(body) == 0 and body.prompt_logprobs is None and not getattr(body, "echo", False):
        name = _length_field(body)
        raise RequestError(f"{name}: must be at least 1 unless prompt_logprobs or echo is set", param=name)
    if body.truncate_prompt_tokens == 0:
        raise RequestError("truncate_prompt_tokens: -1 or at least 1", param="truncate_prompt_tokens")
    if body.priority and not service.takes_priority:
        raise RequestError("priority: only on a server started with --policy priority", param="priority")
    check_ids(body.stop_token_ids, vocab_size, "stop_token_ids")
    check_ids(body.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    _logit_bias(body, vocab_size)
    StopStrings(body.stop)  # checks its own limits


def check_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raises `RequestError` if one of `ids`, of the field `name`, is not in the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RequestError(f"{name}: token ids must be from 0 to {vocab_size - 1}", param=name)


def check_length(text: str, model: ServedModel, *, may_be_cut: bool = False) -> None:
    """Raises `ContextLengthError` for a text that has too many tokens in any tokenization, before tokenizing
    it.

    With `may_be_cut`, a part of its tokens, or only their number, may be used. Then the limit is looser.
    """
    longest = _MAX_TOKEN_BYTES
    if not may_be_cut and model.tokenizer.longest_token is not None:
        longest = model.tokenizer.longest_token
    num_bytes = len(text.encode(errors="replace"))
    if num_bytes > model.max_model_len * longest:
        raise ContextLengthError(
            f"the prompt has {num_bytes} bytes; at most {model.max_model_len} tokens of at most "
            f"{longest} bytes each are possible",
            param="prompt",
        )


def truncate(prompt: tuple[int, ...], body: GenerationBody, max_model_len: int) -> tuple[int, ...]:
    """The last tokens of a prompt, as many as the request asks for."""
    length = body.truncate_prompt_tokens
    if length == -1:
        requested = requested_length(body)
        # A length that the model cannot reach does not reserve room: the prompt gets it.
        has_length = requested is not None and requested != NO_LIMIT and requested < max_model_len
        room = requested if has_length and requested is not None else 1
        length = max(max_model_len - room, 1)
    return prompt if length is None else prompt[-length:]


def num_truncated(
    body: GenerationBody, whole: Sequence[tuple[int, ...]], prompts: Sequence[tuple[int, ...]]
) -> int | None:
    """The number of tokens that were cut off the prompts. None if the request does not ask for truncation."""
    return None if body.truncate_prompt_tokens is None else sum(map(len, whole)) - sum(map(len, prompts))


async def bad_word_ids(
    body: GenerationBody, model: ServedModel, work: WorkPool
) -> tuple[tuple[int, ...], ...]:
    """The token ids of each bad word, at the start of a text and after a space."""
    texts = [text for word in body.bad_words for text in (word, f" {word}")]
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    return await work.run(sum(map(len, texts)), lambda: tuple({tuple(encode(text)): None for text in texts}))


def reply_length(body: GenerationBody, max_model_len: int, num_prompt: int, default: int | None) -> int:
    """The most tokens of a reply to a prompt of `num_prompt` tokens.

    Without max_tokens it is `default`, or less if there is less room. None means all the room that is left,
    and so does a max_tokens above it. Raises `ContextLengthError`, with the numbers, if the prompt leaves no
    room.
    """
    if num_prompt == 0:
        raise RequestError("the prompt is empty", param="prompt")
    room = max_model_len - num_prompt
    requested = requested_length(body)
    if room < 0 or (room == 0 and requested != 0):
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens; at most {max_model_len} are possible, "
            "at least 1 of them for the reply",
            param="prompt",
        )
    wanted = default if requested is None else None if requested == NO_LIMIT else requested
    length = room if wanted is None else min(room, wanted)
    if body.min_tokens > length:
        raise RequestError(
            f"min_tokens: {body.min_tokens} is above the {length} tokens possible", param="min_tokens"
        )
    return length


def length_notices(body: GenerationBody, lengths: Sequence[int]) -> tuple[str, ...]:
    """The notice that max_tokens is above the room that the prompts leave, if it is."""
    requested = requested_length(body)
    if requested is None or requested <= min(lengths):
        return ()
    return (f"{_length_field(body)}: {requested} asked for, {min(lengths)} possible after the prompt",)


def sampling_params(
    body: GenerationBody,
    model: ServedModel,
    lengths: Sequence[int],
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...],
    constraint: Grammar | None,
) -> tuple[SamplingParams, ...]:
    """For each prompt, the parameters of its first reply. `lengths` are the most tokens of each reply."""
    given, defaults = body.model_fields_set, model.sampling_defaults
    top_k = body.top_k if "top_k" in given else defaults.top_k
    eos_ids = model.tokenizer.eos_ids
    params = SamplingParams(
        max_tokens=lengths[0],
        min_tokens=body.min_tokens,
        temperature=body.temperature if "temperature" in given else defaults.temperature,
        top_k=top_k if 0 < top_k < model.vocab_size else 0,
        top_p=body.top_p if "top_p" in given else defaults.top_p,
        min_p=body.min_p if "min_p" in given else defaults.min_p,
        repetition_penalty=(
            body.repetition_penalty if "repetition_penalty" in given else defaults.repetition_penalty
        ),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=body.seed,
        logit_bias=_logit_bias(body, model.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        allowed_token_ids=None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids),
        bad_words=bad_words,
        stop_token_ids=frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else eos_ids),
    )
    _check_choice(params, model.vocab_size)
    # Prompts of the same length share their parameters: there may be a thousand prompts, and a thousand ids
    # in the parameters.
    by_length = {
        length: with_constraint(
            replace(params, max_tokens=length), constraint, ignore_eos=body.ignore_eos, eos_ids=eos_ids
        )
        for length in {*lengths}
    }
    return tuple(by_length[length] for length in lengths)


def detokenize_options(body: GenerationBody) -> DetokenizeOptions:
    """How the text of the reply is made."""
    return DetokenizeOptions(
        stop=tuple(body.stop),
        min_tokens=body.min_tokens,  # A constraint with `ignore_eos` raises that of the parameters.
        include_stop=body.include_stop_str_in_output,
        skip_special=body.skip_special_tokens,
    )


def request_options(body: GenerationBody) -> RequestOptions:
    """How the request is scheduled."""
    return RequestOptions(
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        tpot_target=in_seconds(body.tpot_target_ms),
        ttft_target=in_seconds(body.ttft_target_ms),
        wants_progress=body.stream_options is not None and body.stream_options.include_progress,
        timeout=body.timeout,
    )


def requested_length(body: GenerationBody) -> int | None:
    """The most tokens of a reply that the request sets, or `NO_LIMIT`. None if it sets no limit."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _length_field(body: GenerationBody) -> str:
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def _check_choice(params: SamplingParams, vocab_size: int) -> None:
    """Raises `RequestError` if the parameters may leave no token to sample."""
    banned = {word[-1] for word in params.bad_words}
    banned |= params.stop_token_ids if params.min_tokens else frozenset()
    allowed = params.allowed_token_ids
    if len(banned) >= vocab_size or (allowed is not None and allowed <= banned):
        name = "bad_words" if allowed is None else "allowed_token_ids"
        raise RequestError(
            f"{name}: together with the other parameters it may leave no token to sample", param=name
        )


def _logit_bias(body: GenerationBody, vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, amount in body.logit_bias.items():
        # Only the canonical form of a number is accepted, so that no two keys mean the same token.
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and str(int(key)) == key):
            raise RequestError("logit_bias: the keys must be token ids", param="logit_bias")
        pairs.append((int(key), amount))
    check_ids([id for id, _ in pairs], vocab_size, "logit_bias")
    return tuple(pairs)
