"""A server's engine without a model: it takes the time that a model would take and says made-up text.

For testing clients, gateways and routers on a machine that could never run the model. Scheduler, budget and
everything above them are the real ones. The text is letters and spaces, a token for each byte, the same for
the same prompt; a reply ends by itself after 150 tokens or so, unless the request says otherwise.
"""

import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from legato.config import EngineSettings, ModelSettings
from legato.core.step_plan import SampleRow, StepPlan
from legato.engine.cost_file import CostFile
from legato.engine.engine import Engine
from legato.engine.fake import FakeRunner
from legato.engine.scheduling import resolve_target
from legato.sim.find_costs import in_words
from legato.sim.run import new_scheduler
from legato.sim.times import StepTimes
from legato.text.chat import ChatTemplate, load_template
from legato.text.fake import FakeTokenizer
from legato.text.sampling_defaults import SamplingDefaults
from legato.text.tokenizer import Tokenizer

LETTERS = (
    b"eeeeeeeeeeeetttttttttaaaaaaaaooooooooiiiiiiinnnnnnnsssssshhhhhhrrrrrrddddlllcccuuummmwwffggyyppbvk"
)
"""About as often as in English."""
WORD, REPLY = 6, 150
"""Tokens from one space to the next, and of a reply, in the mean."""
CHAT_FORMAT = "chatml"


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """An engine with what a server needs beside it."""

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    sampling_defaults: SamplingDefaults
    name: str
    """What the model is called in the API."""
    source: Path
    settings: EngineSettings
    """Those in force: an automatic target is a number."""
    choices: Mapping[str, str]


def build_stand_in(
    model: ModelSettings, engine: EngineSettings, costs: CostFile, source: Path, *, noise: bool = True
) -> StandIn:
    """`source` is where the costs came from. With `noise` steps differ as the measured ones did."""
    prices = costs.cost_model()
    times = StepTimes(prices.cost, costs.ratios(prices.cost) if noise else ())
    engine = resolve_target(engine, prices)
    scheduler = new_scheduler(engine, costs, prices, model.max_model_len)
    tokenizer = FakeTokenizer(costs.vocab_size)

    def seconds_left(plan: StepPlan) -> float:
        """What a step still has to last: scheduling it took some of its time."""
        assert scheduler.state.in_flight is not None
        return max(scheduler.state.in_flight.now + times(plan.shape) - time.monotonic(), 0.0)

    runner = FakeRunner(
        num_blocks=scheduler.state.pool.num_blocks,
        block_size=scheduler.state.pool.block_size,
        vocab_size=tokenizer.vocab_size,
        step_seconds=seconds_left,
        choose=_choose,
    )
    chat_template = ChatTemplate(
        load_template(model.chat_template or CHAT_FORMAT), bos_token="<bos>", eos_token="<eos>"
    )
    return StandIn(
        engine=Engine.on_runner(scheduler, runner, clock=time.monotonic),
        tokenizer=tokenizer.for_chats(chat_template, trust_special_tokens=model.trust_special_tokens),
        chat_template=chat_template,
        sampling_defaults=SamplingDefaults(),
        name=model.served_model_name or costs.model,
        source=source,
        settings=engine,
        choices={
            "model": f"{model.served_model_name or costs.model}, simulated",
            "simulated": f"no model is loaded; steps take as long as those of {in_words(costs)}",
            "target": "none" if engine.tpot_target is None else f"{1000 * engine.tpot_target:g} ms",
        },
    )


def _choose(number: int, row: SampleRow) -> int:
    """A letter, a space, or the end of the text. `number` only grows within a reply, so nothing repeats."""
    chance = zlib.crc32(b"%d %d" % (number, row.num_generated))
    if chance % REPLY == 0 and row.num_generated >= row.params.min_tokens:
        return FakeTokenizer.EOS
    chance //= REPLY
    return ord(" ") if chance % WORD == 0 else LETTERS[chance // WORD % len(LETTERS)]
