"""Which requests can be served at all: the same arithmetic as the scheduler's, asked before the queue."""

from typing import TYPE_CHECKING

from legato.core.block_pool import BlockPool
from legato.core.request import Request
from legato.errors import ContextLengthError, RequestError

if TYPE_CHECKING:
    from legato.core.scheduler import SchedulerConfig


def check_request(request: Request, config: "SchedulerConfig", pool: BlockPool) -> None:
    """Raises as `Scheduler.validate` does."""
    if not request.prompt:
        raise RequestError("the prompt holds no token", param="prompt")
    for name, ids in {"prompt": request.prompt, **request.params.named_ids()}.items():
        if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise RequestError(f"{name}: token ids run from 0 to {config.vocab_size - 1}", param=name)
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
