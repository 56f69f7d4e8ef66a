"""Loads what turns text into tokens and back from a model's files: tokenizer, chat template, sampling
defaults."""

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
class TextComponents:
    """Everything of a model that does not need its weights."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None for a base model."""
    sampling_defaults: SamplingDefaults


def load_text_components(
    model: ModelSettings, opened: OpenedModel, files: ModelFiles, *, for_chat: bool
) -> TextComponents:
    """Raises `ModelError` for invalid files, and `ConfigError` for an invalid --chat-template or, with
    `for_chat`, a missing one."""
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
    defaults = _sampling_defaults(model.generation_config, opened, files)
    return TextComponents(tokenizer, chat_template, defaults)


def _tokenizer(opened: OpenedModel, path: Path) -> Tokenizer:
    if opened.gguf is None:
        return tokenizer_from_folder(path, opened.spec.vocab_size)
    with _naming(path):
        return tokenizer_from_gguf(opened.gguf.metadata, opened.spec.vocab_size)


def _sampling_defaults(setting: str, opened: OpenedModel, files: ModelFiles) -> SamplingDefaults:
    if setting == "none":
        return SamplingDefaults()
    if files.sampling is not None:
        return files.sampling
    if opened.gguf is None:
        return sampling_defaults_from_folder(files.path)
    with _naming(files.path):
        return sampling_defaults_from_gguf(opened.gguf.metadata)


def _chat_template(
    setting: str | None, opened: OpenedModel, path: Path, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """The template of the setting, or the model's own. None if there is neither."""
    if setting is not None:
        return _parse(load_template(setting), tokenizer)
    default, tool_use = (_template_of(opened, path, name) for name in ("default", "tool_use"))
    with _naming(path):
        if tool_use is None:
            return None if default is None else _parse(default, tokenizer)
        with_tools = _parse(tool_use, tokenizer)
        return with_tools if default is None else _parse(default, tokenizer, with_tools)


def _template_of(opened: OpenedModel, path: Path, name: str) -> str | None:
    if opened.gguf is None:
        return template_from_folder(path, name)
    with _naming(path):
        return template_from_gguf(opened.gguf.metadata, name)


def _parse(source: str, tokenizer: Tokenizer, tool_use: ChatTemplate | None = None) -> ChatTemplate:
    return ChatTemplate(
        source,
        bos_token=tokenizer.special_text(tokenizer.bos_id),
        eos_token=tokenizer.special_text(tokenizer.eos_id),
        tool_use=tool_use,
    )


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's path to errors of components that see only its content."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}") from error
