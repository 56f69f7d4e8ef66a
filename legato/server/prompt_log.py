"""Prompts in the log, for those who ask for it with --log-prompts. Nothing else ever logs one."""

import logging

from legato.server.replies import Generation
from legato.server.service import Service

logger = logging.getLogger("legato.prompts")


def log_prompts(service: Service, name: str, generation: Generation) -> None:
    """One line for each prompt as the model reads it, special tokens by name. `name` is the answer's id."""
    if not service.log_prompts:
        return
    for prompt in generation.prompts:
        text = service.tokenizer.decode(prompt, skip_special=False)
        fields = {"id": name, "prompt": text}
        logger.info("prompt of %(id)s: %(prompt)s", fields, extra={"fields": fields})
