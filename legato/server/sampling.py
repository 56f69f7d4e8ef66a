"""From a request's body to `SamplingParams`: what the model, the prompt and the server's limits decide."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from legato.config import in_seconds
from legato.engine.output import Terms, TextRules
from legato.errors import ContextLengthError, RequestError
from legato.sampling_params import SamplingParams
from legato.server.protocol import GenerationBody
from legato.server.service import Service
from legato.server.structured import constrained
from legato.text.grammar import Grammar
from legato.text.stop import StopStrings

NO_LIMIT = -1
"""As max_tokens: as many as there is room for."""
_SEEDS = 1 << 64
_BYTES_PER_TOKEN = 256
"""More than the longest token of any vocabulary (runs of 128 spaces are the longest in use)."""


def check_body(body: GenerationBody, service: Service) -> None:
    """Everything about a body that can be refused before its prompt is known."""
    limits = service.limits
    limits.check(body.n, limits.n, "n")
    limits.check(body.prompt_logprobs or 0, limits.logprobs, "prompt_logprobs")
    if body.best_of not in (None, body.n):
        raise RequestError("best_of: other than n is not supported", param="best_of")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: only with stream", param="stream_options")
    if None not in (body.max_tokens, body.max_completion_tokens) and asked_length(body) != body.max_tokens:
        raise RequestError("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
    if asked_length(body) == 0 and body.prompt_logprobs is None and not getattr(body, "echo", False):
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise RequestError(f"{name}: at least 1, unless the prompt is asked about", param=name)
    if body.truncate_prompt_tokens == 0:
        raise RequestError("truncate_prompt_tokens: -1 or at least 1", param="truncate_prompt_tokens")
    if body.priority and not service.takes_priority:
        raise RequestError("priority: only on a server started with --policy priority", param="priority")
    check_ids(body.stop_token_ids, service.vocab_size, "stop_token_ids")
    check_ids(body.allowed_token_ids or (), service.vocab_size, "allowed_token_ids")
    _logit_bias(body, service.vocab_size)
    StopStrings(body.stop)  # has its own limits


def check_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raises `RequestError` if one of `ids`, of the field `name`, is no token."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RequestError(f"{name}: token ids must be from 0 to {vocab_size - 1}", param=name)


def check_length(text: str, service: Service, *, in_part: bool = False) -> None:
    """Raises `ContextLengthError` for a prompt that has too many tokens however it is tokenized, before that
    is done. `in_part`: a part of its tokens may do, or their number."""
    longest = None if in_part else service.tokenizer.longest_token
    num_bytes = len(text.encode(errors="replace"))
    if num_bytes > service.max_model_len * (longest or _BYTES_PER_TOKEN):
        raise ContextLengthError(
            f"the prompt has {num_bytes} bytes; at most {service.max_model_len} tokens of at most "
            f"{longest or _BYTES_PER_TOKEN} bytes each are possible",
            param="prompt",
        )


def truncated(prompt: tuple[int, ...], body: GenerationBody, service: Service) -> tuple[int, ...]:
    """The end of a prompt, as long as the request wants it."""
    length = body.truncate_prompt_tokens
    if length == -1:
        asked = asked_length(body)
        # A limit above what the model takes is no demand for room: the prompt gets it.
        room = 1 if asked in (None, NO_LIMIT) or asked >= service.max_model_len else asked
        length = max(service.max_model_len - room, 1)
    return prompt if length is None else prompt[-length:]


def num_truncated(
    body: GenerationBody, whole: Sequence[tuple[int, ...]], prompts: Sequence[tuple[int, ...]]
) -> int | None:
    """How many tokens were cut off the prompts; None if the request does not want that."""
    return None if body.truncate_prompt_tokens is None else sum(map(len, whole)) - sum(map(len, prompts))


async def bad_words(body: GenerationBody, service: Service) -> tuple[tuple[int, ...], ...]:
    """Each of the body's bad words as it is tokenized at the start of a text and within one."""
    forms = [form for word in body.bad_words for form in (word, f" {word}")]
    encode = partial(service.tokenizer.encode, add_special_tokens=False)
    return await service.work.run(
        sum(map(len, forms)), lambda: tuple({tuple(encode(form)): None for form in forms})
    )


def reply_length(body: GenerationBody, max_model_len: int, num_prompt: int, default: int | None) -> int:
    """The most tokens of a reply to a prompt of `num_prompt` tokens.

    A body without max_tokens gets `default`, or less if there is less room; None is all the room left, and
    so is a max_tokens above it. Raises `ContextLengthError`, with the numbers, if the prompt leaves none.
    """
    if num_prompt == 0:
        raise RequestError("the prompt is empty", param="prompt")
    room = max_model_len - num_prompt
    asked = asked_length(body)
    if room < (asked != 0):
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens; at most {max_model_len} are possible, "
            "at least 1 of them for the reply",
            param="prompt",
        )
    wanted = default if asked is None else None if asked == NO_LIMIT else asked
    most = room if wanted is None else min(room, wanted)
    if body.min_tokens > most:
        raise RequestError(
            f"min_tokens: {body.min_tokens} is above the {most} tokens possible", param="min_tokens"
        )
    return most


def length_notices(body: GenerationBody, lengths: Sequence[int]) -> tuple[str, ...]:
    """What a client is told whose max_tokens is above what its prompts leave."""
    asked = asked_length(body)
    if asked is None or asked <= min(lengths):
        return ()
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return (f"{name}: {asked} asked for, {min(lengths)} possible after the prompt",)


def sampling_params(
    body: GenerationBody,
    service: Service,
    lengths: Sequence[int],
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...],
    form: Grammar | None,
) -> tuple[SamplingParams, ...]:
    """For each of some prompts the parameters of its first reply, which may have `lengths` tokens at most."""
    said, defaults = body.model_fields_set, service.sampling_defaults
    top_k = body.top_k if "top_k" in said else defaults.top_k
    eos_ids = service.tokenizer.eos_ids
    params = SamplingParams(
        max_tokens=lengths[0],
        min_tokens=body.min_tokens,
        temperature=body.temperature if "temperature" in said else defaults.temperature,
        top_k=top_k if 0 < top_k < service.vocab_size else 0,
        top_p=body.top_p if "top_p" in said else defaults.top_p,
        min_p=body.min_p if "min_p" in said else defaults.min_p,
        repetition_penalty=(
            body.repetition_penalty if "repetition_penalty" in said else defaults.repetition_penalty
        ),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=body.seed,
        logit_bias=_logit_bias(body, service.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        allowed_token_ids=None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids),
        bad_words=bad_words,
        stop_token_ids=frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else eos_ids),
    )
    _check_choice(params, service.vocab_size)
    # Prompts share what they can: there may be a thousand, and a thousand ids in the parameters.
    made = {
        length: constrained(
            replace(params, max_tokens=length), form, ignore_eos=body.ignore_eos, eos_ids=eos_ids
        )
        for length in {*lengths}
    }
    return tuple(made[length] for length in lengths)


def text_rules(body: GenerationBody) -> TextRules:
    """How the reply's text is made."""
    return TextRules(
        stop=tuple(body.stop),
        min_tokens=body.min_tokens,  # a given form with `ignore_eos` raises that of the parameters
        include_stop=body.include_stop_str_in_output,
        skip_special=body.skip_special_tokens,
    )


def terms(body: GenerationBody) -> Terms:
    """How the request is treated among others."""
    return Terms(
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        tpot_target=in_seconds(body.tpot_target_ms),
        ttft_target=in_seconds(body.ttft_target_ms),
        wants_progress=body.stream_options is not None and body.stream_options.include_progress,
        timeout=body.timeout,
    )


def seed_of(seed: int, sample: int) -> int:
    """The seed of a prompt's reply number `sample`: a seed gives n different replies, the first of which is
    the reply to the same request with n = 1. Wraps around within signed 64 bits."""
    return (seed + sample + _SEEDS // 2) % _SEEDS - _SEEDS // 2


def asked_length(body: GenerationBody) -> int | None:
    """The most tokens that a reply may have, if the request says so; or `NO_LIMIT`."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _check_choice(params: SamplingParams, vocab_size: int) -> None:
    """Raises `RequestError` if there may be no token left to choose."""
    banned = {word[-1] for word in params.bad_words}
    banned |= params.stop_token_ids if params.min_tokens else frozenset()
    allowed = params.allowed_token_ids
    if len(banned) >= vocab_size or (allowed is not None and allowed <= banned):
        name = "bad_words" if allowed is None else "allowed_token_ids"
        raise RequestError(f"{name}: with what else is asked for, no token may be left to choose", param=name)


def _logit_bias(body: GenerationBody, vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, amount in body.logit_bias.items():
        # Compared as text, so that no two keys mean one token.
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and str(int(key)) == key):
            raise RequestError("logit_bias: the keys must be token ids", param="logit_bias")
        pairs.append((int(key), amount))
    check_ids([id for id, _ in pairs], vocab_size, "logit_bias")
    return tuple(pairs)
