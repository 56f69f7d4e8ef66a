"""How byte-level vocabularies cut a text into words before merging, by the name that GGUF files give it.

The expressions are those of the models' own tokenizer.json files. Does not know merges or ids.
"""

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from legato.errors import ModelError

_WORDS_OF_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS_OF_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_OF_LLAMA3 = _WORDS_OF_QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_WORDS_OF_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_OF_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordRule:
    """How one family of models cuts text into words."""

    steps: tuple[str, ...]
    """Regular expressions applied one after the other: each cuts what the one before left whole."""
    single_digits: bool = False
    """Whether every digit is a word of its own before the steps."""
    whole_words: bool = False
    """Whether a word that is a token is taken at once, without merging its characters."""
    add_bos: bool = False
    """Whether the family wants BOS where the file does not say."""

    def build(self) -> PreTokenizer:
        digits = [Digits(individual_digits=True)] if self.single_digits else []
        cuts = [Split(Regex(step), "isolated") for step in self.steps]
        return Sequence([*digits, *cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = WordRule(steps=(_WORDS_OF_GPT2,))
_QWEN2 = WordRule(steps=(_WORDS_OF_QWEN2,))
_LLAMA3 = WordRule(steps=(_WORDS_OF_LLAMA3,), whole_words=True, add_bos=True)
_SMOLLM = WordRule(steps=(_WORDS_OF_GPT2,), single_digits=True)

WORD_RULES = {
    "default": WordRule(
        steps=(r"[\p{P}\$\+<=>\^~\|]+", _WORDS_OF_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": WordRule(steps=(_WORDS_OF_LLAMA3,)),
    "tekken": WordRule(steps=(_WORDS_OF_TEKKEN,), whole_words=True, add_bos=True),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "deepseek-coder": WordRule(
        steps=(
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}",
        ),
    ),
    "deepseek-v3": WordRule(
        steps=(r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _WORDS_OF_DEEPSEEK3),
    ),
}
"""GGUF's `tokenizer.ggml.pre` -> the rule."""


def word_rule(name: object) -> WordRule:
    """The rule called `name`; ModelError for a name that is not known."""
    if not isinstance(name, str) or name not in WORD_RULES:
        known = ", ".join(sorted(WORD_RULES))
        raise ModelError(f"tokenizer.ggml.pre is {name!r}; the supported pre-tokenizers are {known}")
    return WORD_RULES[name]
