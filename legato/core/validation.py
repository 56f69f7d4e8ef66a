"""Which requests can be served at all. The arithmetic is the scheduler's own, so what is accepted can
finish."""

from legato.core.block_pool import BlockPool
from legato.core.request import Request
from legato.core.state import SchedulerConfig
from legato.errors import ContextLengthError, RequestError


def validate_request(request: Request, config: SchedulerConfig, pool: BlockPool) -> None:
    """Raises as `Scheduler.validate` does."""
    if not request.prompt:
        raise RequestError("the prompt has no tokens", param="prompt")
    for name, ids in {"prompt": request.prompt, **request.params.named_ids()}.items():
        if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise RequestError(f"{name}: token ids must be from 0 to {config.vocab_size - 1}", param=name)
    num_prompt, max_tokens = len(request.prompt), request.params.max_tokens
    if num_prompt + max_tokens > config.max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens and asks for {max_tokens} more; "
            f"together at most {config.max_model_len} are possible",
            param="prompt",
        )
    need = pool.blocks_for(request.max_computed)
    if need > pool.num_blocks:
        raise ContextLengthError(
            f"the prompt of {num_prompt} tokens and {max_tokens} more need {need} blocks of "
            f"{pool.block_size} tokens; the KV cache has {pool.num_blocks}",
            param="prompt",
        )
