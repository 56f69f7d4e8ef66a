"""Logs prompts, only with --log-prompts. Nothing else ever logs a prompt."""

import logging
from collections.abc import Iterable, Sequence

from legato.text.tokenizer import Tokenizer

logger = logging.getLogger("legato.prompts")


def log_prompts(tokenizer: Tokenizer, response_id: str, prompts: Iterable[Sequence[int]]) -> None:
    """Log each prompt as the model sees it, with the names of special tokens."""
    for prompt in prompts:
        text = tokenizer.decode(prompt, skip_special=False)
        fields = {"id": response_id, "prompt": text}
        logger.info("prompt of %(id)s: %(prompt)s", fields, extra={"fields": fields})
