"""Turns messages and tools into the token ids of a prompt, with the model's chat template."""

from collections.abc import Sequence
from functools import partial

from legato.errors import RequestError
from legato.server.generation.parameters import check_length
from legato.server.schema.bodies import ChatBody, Conversation
from legato.server.schema.tools import Tool
from legato.server.service import ServedModel
from legato.server.transport.work_pool import WorkPool
from legato.text.chat import ChatTemplate
from legato.text.tool_calls import in_plain_words

Json = dict[str, object]


async def chat_prompt_ids(
    conversation: Conversation, tools: Sequence[Tool], model: ServedModel, work: WorkPool, size: int
) -> tuple[int, ...]:
    """The token ids of a conversation. `size` is the number of bytes of the request.

    Raises `RequestError` if the model has no chat template, or if the template refuses the messages.
    """
    given = {"add_generation_prompt", "continue_final_message"} & conversation.model_fields_set
    if len(given) == 2 and conversation.add_generation_prompt and conversation.continue_final_message:
        raise RequestError(
            "continue_final_message: not with add_generation_prompt", param="continue_final_message"
        )
    template = model.chat_template
    if template is None:
        raise RequestError(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template"
        )
    # Always in a thread: a template may be slow, and it may wait for the lock of another rendering.
    return await work.run_in_thread(size, partial(_render, conversation, tools, model, template))


def _render(
    conversation: Conversation, tools: Sequence[Tool], model: ServedModel, template: ChatTemplate
) -> tuple[int, ...]:
    messages, template_tools = _template_input(conversation, tools, model, template)
    prompt = template.render(
        messages,
        tools=template_tools,
        add_generation_prompt=conversation.add_generation_prompt and not conversation.continue_final_message,
        continue_final_message=conversation.continue_final_message,
        extra=conversation.template_variables,
    )
    template.refuse_unread(messages)
    may_be_cut = not isinstance(conversation, ChatBody) or conversation.truncate_prompt_tokens is not None
    check_length(prompt, model, may_be_cut=may_be_cut)
    return tuple(model.tokenizer.encode_chat(prompt, add_special_tokens=conversation.add_special_tokens))


def _template_input(
    conversation: Conversation, tools: Sequence[Tool], model: ServedModel, template: ChatTemplate
) -> tuple[list[Json], list[Json] | None]:
    """The messages and the tools for the chat template.

    If the template does not know tools, they are described in the system message and calls are text.
    """
    use = model.tool_use
    assert use is not None
    messages = [message.model_dump(exclude_none=True) for message in conversation.messages]
    dumped = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
    if use.native:
        return messages, dumped or None
    if dumped or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        return in_plain_words(messages, dumped, use.format, system=template.takes_system), None
    return messages, None
