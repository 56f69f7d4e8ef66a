"""Token ids of two real models against those that llama.cpp gives for the same files."""

import json
from pathlib import Path

import pytest

from legato.models.gguf_file import GgufFile
from legato.text.chat import ChatTemplate, template_from_gguf
from legato.text.tokenizer import Tokenizer, tokenizer_from_gguf

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture(scope="module")
def gemma(gemma_path: Path) -> Tokenizer:
    return tokenizer_from_gguf(GgufFile(gemma_path).metadata)


@pytest.fixture(scope="module")
def qwen_metadata(qwen_path: Path) -> dict[str, object]:
    return dict(GgufFile(qwen_path).metadata)


@pytest.fixture(scope="module")
def qwen(qwen_metadata: dict[str, object]) -> Tokenizer:
    return tokenizer_from_gguf(qwen_metadata)


def check_ids(tokenizer: Tokenizer, golden: str) -> None:
    cases = json.loads((GOLDEN / golden).read_text())
    assert len(cases) > 50
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"], parse_special=True) == case["ids_parse_special"], case["text"]


def test_gemma_gives_the_ids_of_llama_cpp(gemma: Tokenizer) -> None:
    check_ids(gemma, "gemma3_270m_tokens.json")


def test_gemma_decodes_what_it_encodes(gemma: Tokenizer) -> None:
    for case in json.loads((GOLDEN / "gemma3_270m_tokens.json").read_text()):
        # U+2581 is how the vocabulary writes a space, so it cannot come back as itself.
        text = case["text"].replace("\u2581", " ")
        assert gemma.decode(case["ids"]) == text
        assert gemma.decode(case["ids_parse_special"], skip_special=False) == "<bos>" + text


def test_gemma_has_its_own_special_tokens(gemma: Tokenizer) -> None:
    assert (gemma.vocab_size, gemma.bos_id, gemma.eos_id) == (262_144, 2, 1)
    assert {gemma.special_text(id) for id in gemma.eos_ids} == {"<eos>", "<end_of_turn>"}
    assert gemma.add_bos
    assert not gemma.add_eos
    struck = gemma.encode("<s>x</s>", parse_special=True)
    assert gemma.decode(struck) == "<s>x</s>"


def test_gemma_encodes_a_long_text_in_time_that_grows_with_its_length(gemma: Tokenizer) -> None:
    """A quadratic merge would need hours for a megabyte; the suite's time limit is the check."""
    for text in ("a" * 1_000_000, " " * 1_000_000, "<|im_" * 200_000, "word 12\n\n  " * 90_000):
        assert gemma.decode(gemma.encode(text, parse_special=True)) == text


@pytest.mark.big
def test_qwen_gives_the_ids_of_llama_cpp(qwen: Tokenizer) -> None:
    check_ids(qwen, "qwen25_coder_tokens.json")


@pytest.mark.big
def test_qwen_decodes_what_it_encodes(qwen: Tokenizer) -> None:
    for case in json.loads((GOLDEN / "qwen25_coder_tokens.json").read_text()):
        assert qwen.decode(case["ids"]) == case["text"]
        assert qwen.decode(case["ids_parse_special"], skip_special=False) == case["text"]


@pytest.mark.big
def test_qwen_has_its_own_special_tokens(qwen: Tokenizer) -> None:
    """Case F-10 for a GGUF file: the ids that end a reply are all those that the vocabulary has for it."""
    assert {qwen.special_text(id) for id in qwen.eos_ids} == {"<|endoftext|>", "<|im_end|>"}
    assert qwen.special_text(qwen.eos_id) == "<|im_end|>"
    assert not qwen.add_bos


@pytest.mark.big
def test_qwen_renders_and_encodes_chats_as_llama_cpp_does(
    qwen: Tokenizer, qwen_metadata: dict[str, object]
) -> None:
    """Case F-09: and no BOS is put before the prompt of a template that has none."""
    source = template_from_gguf(qwen_metadata)
    assert source is not None
    template = ChatTemplate(source, bos_token="", eos_token=qwen.special_text(qwen.eos_id))
    trusting = qwen.for_chats(template, trust_special_tokens=True)
    isolating = qwen.for_chats(template)
    start, end = (qwen.special_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    for case in json.loads((GOLDEN / "qwen25_coder_chat.json").read_text()):
        prompt = template.render(case["messages"], tools=case.get("tools"))
        assert prompt == case["prompt"]
        assert trusting.encode_chat(prompt) == case["ids"]
        ids = isolating.encode_chat(prompt)
        hostile = [message for message in case["messages"] if "<|im_end|>" in message["content"]]
        assert (ids == case["ids"]) is not bool(hostile)
        assert ids.count(start) == case["ids"].count(start)
        assert ids.count(end) == case["ids"].count(end) - len(hostile)
        assert qwen.decode(ids, skip_special=False) == prompt
