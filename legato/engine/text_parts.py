"""What turns text into tokens and back, from a model's files: tokenizer, chat template, sampling defaults."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from legato.config import ModelSettings
from legato.errors import ConfigError, ModelError
from legato.models.load import OpenedModel
from legato.models.source import ModelFiles
from legato.text.chat import ChatTemplate, load_template, template_from_folder, template_from_gguf
from legato.text.sampling_defaults import (
    SamplingDefaults,
    sampling_defaults_from_folder,
    sampling_defaults_from_gguf,
)
from legato.text.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf


@dataclass(frozen=True, slots=True)
class TextParts:
    """All of a model that its weights are not needed for."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None for a base model: it has no chat format."""
    sampling_defaults: SamplingDefaults


def load_text(model: ModelSettings, opened: OpenedModel, files: ModelFiles, *, for_chat: bool) -> TextParts:
    """Raises `ModelError` for the model's files, and `ConfigError` for a template that was asked
    for or, `for_chat`, is missing."""
    path = files.path
    tokenizer = _tokenizer(opened, path)
    chat_template = _chat_template(model.chat_template, opened, path, tokenizer)
    if for_chat and chat_template is None:
        raise ConfigError(
            f"{opened.name} is a base model without a chat template; give one with --chat-template, use "
            "`legato generate`, or a model made for it: qwen2.5-coder-1.5b-instruct",
            param="chat_template",
        )
    if chat_template is not None:
        tokenizer = tokenizer.for_chats(chat_template, trust_special_tokens=model.trust_special_tokens)
    return TextParts(tokenizer, chat_template, _sampling_defaults(model.generation_config, opened, files))


def _tokenizer(opened: OpenedModel, path: Path) -> Tokenizer:
    if opened.gguf is None:
        return tokenizer_from_folder(path, opened.spec.vocab_size)
    with _in_file(path):
        return tokenizer_from_gguf(opened.gguf.metadata, opened.spec.vocab_size)


def _sampling_defaults(asked: str, opened: OpenedModel, files: ModelFiles) -> SamplingDefaults:
    if asked == "none":
        return SamplingDefaults()
    if files.sampling is not None:
        return files.sampling
    if opened.gguf is None:
        return sampling_defaults_from_folder(files.path)
    with _in_file(files.path):
        return sampling_defaults_from_gguf(opened.gguf.metadata)


def _chat_template(
    asked: str | None, opened: OpenedModel, path: Path, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """The template asked for, or the model's own; None if there is neither."""
    if asked is not None:
        return _parse(load_template(asked), tokenizer)
    default, tool_use = (_template_of(opened, path, name) for name in ("default", "tool_use"))
    with _in_file(path):
        if tool_use is None:
            return None if default is None else _parse(default, tokenizer)
        with_tools = _parse(tool_use, tokenizer)
        return with_tools if default is None else _parse(default, tokenizer, with_tools)


def _template_of(opened: OpenedModel, path: Path, name: str) -> str | None:
    if opened.gguf is None:
        return template_from_folder(path, name)
    with _in_file(path):
        return template_from_gguf(opened.gguf.metadata, name)


def _parse(source: str, tokenizer: Tokenizer, tool_use: ChatTemplate | None = None) -> ChatTemplate:
    return ChatTemplate(
        source,
        bos_token=tokenizer.special_text(tokenizer.bos_id),
        eos_token=tokenizer.special_text(tokenizer.eos_id),
        tool_use=tool_use,
    )


@contextmanager
def _in_file(path: Path) -> Iterator[None]:
    """Name the file in errors of parts that see only what was in it."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}") from error
