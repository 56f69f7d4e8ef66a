"""`legato doctor`: what this machine and this model give, why, and whether the answers are right."""

import itertools
import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from legato import __version__
from legato.cli.load import load_llm
from legato.config import Settings
from legato.core.step_plan import TokenLogprobs
from legato.engine.params import SamplingParams
from legato.machine import memory, processors

if TYPE_CHECKING:
    from legato.engine.llm import LLM

Report = dict[str, dict[str, str]]

LIBRARIES = ("torch", "numpy", "tokenizers", "gguf", "safetensors", "fastapi", "uvicorn", "pydantic")
KNOWN_ANSWERS: dict[str, tuple[list[int], list[int]]] = {
    "gemma3-270m": (
        [2, 818, 5279, 529, 7001, 563],
        [506, 5279, 529, 506, 2891, 529, 7001, 236761],
    ),
    "qwen2.5-coder-1.5b-instruct": (
        [750, 3974, 6860, 10939, 1648],
        [198, 262, 421, 2422, 10939, 8, 2651, 220],
    ),
}
"""Prompt and greedy reply by model, from Hugging Face transformers 5.5.4 in fp32 on the same weights; no
choice in them is closer than 0.25 in log-probability, so rounding does not change them."""


def examine(settings: Settings, as_json: bool) -> None:
    """Load the model, report, test. Exit status 1 if the self-test fails."""
    llm = load_llm(settings, as_server=True)
    report = {"versions": _versions(), "machine": _machine(), "model": _model(llm)}
    report["choices"] = dict(llm.model.choices)
    report["self-test"] = _self_test(llm)
    passed = "failed" not in " ".join(report["self-test"].values())
    if as_json:
        print(json.dumps(report | {"passed": passed}, indent=2))
    else:
        _print(report)
    if not passed:
        raise SystemExit(1)


def check_exactness(settings: Settings, seconds: float, seed: int) -> None:
    """Print what was compared as JSON. Exit status 1 if any logits differed."""
    llm = load_llm(settings)
    report = llm.model.check_exactness(seconds, seed)
    exact = report.mismatches == 0
    print(json.dumps({"exact": exact, **asdict(report), "choices": dict(llm.model.choices)}, indent=2))
    if not exact:
        raise SystemExit(1)


def _versions() -> dict[str, str]:
    own = {"legato": __version__, "python": platform.python_version()}
    return own | {library: version(library) for library in LIBRARIES}


def _machine() -> dict[str, str]:
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processors": str(processors()),
        "memory": f"{gib:.1f} GiB",
        "memory now": str(memory()),
    }


def _model(llm: "LLM") -> dict[str, str]:
    built, spec = llm.model, llm.model.spec
    windows = sorted({layer.window for layer in spec.layers if layer.window is not None})
    return {
        "name": built.name,
        "files": str(built.source),
        "family": spec.family,
        "layers": f"{spec.num_layers}, hidden {spec.hidden_size}, vocabulary {spec.vocab_size}",
        "attention heads": f"{spec.num_heads} on {spec.num_kv_heads} of size {spec.head_dim}",
        "sliding windows": ", ".join(map(str, windows)) or "none",
        "longest context": f"{spec.max_position} tokens; {built.max_model_len} served",
        "chat template": "yes" if built.chat_template is not None else "no (a base model)",
    }


def _self_test(llm: "LLM") -> dict[str, str]:
    """The known answer, if this model has one; and one prompt alone and again in a crowd.

    In a crowd sums run in another order, so a choice between two nearly equal tokens may fall otherwise:
    the comparison ends before the first such choice.
    """
    prompt, answer = KNOWN_ANSWERS.get(llm.model.name, (None, None))
    tests = {"known answer": "none is recorded for this model"}
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)
    if prompt is None:
        prompt = llm.model.tokenizer.encode("The capital of France is")
    alone = llm.generate(prompt, params, show_progress=False)[0]
    if answer is not None:
        right = list(alone.token_ids) == answer
        tests["known answer"] = "passed" if right else f"failed: {alone.token_ids}, expected {answer}"
    room = llm.model.max_model_len - len(prompt) - params.max_tokens
    crowd = [[*prompt, *prompt[-1:] * min(n, room)] for n in (3, 40, 300)]
    beside = llm.generate([*crowd, prompt], params, show_progress=False)[-1]
    clear = list(itertools.takewhile(_is_clear, alone.logprobs or ()))
    same = beside.token_ids[: len(clear)] == alone.token_ids[: len(clear)] and beside.finish_reason != "error"
    result = (
        f"passed ({len(clear)} tokens compared)"
        if same
        else f"failed: {alone.token_ids}, in a crowd {beside.token_ids}"
    )
    return tests | {"same answer in a crowd": result}


def _is_clear(token: TokenLogprobs) -> bool:
    """Whether the best choice was better than the second by more than rounding could change."""
    (_, best), (_, second) = token.top
    return best - second > 0.05


def _print(report: Report) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for section, rows in report.items():
        table.add_row(f"[bold]{section}[/bold]", "")
        for name, value in rows.items():
            table.add_row(f"  {name}", escape(value))
    Console().print(table)
