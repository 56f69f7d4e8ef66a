"""`legato`: the commands. Each does one thing and ends with one line if it cannot."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from legato.cli.flags import SettingsCommand
from legato.cli.interrupts import importing
from legato.cli.options import cache_dir, check_model, schema, takes_settings, unknown_variables
from legato.config import Settings
from legato.errors import LegatoError
from legato.workload.scenario import SCENARIOS

app = typer.Typer(
    name="legato",
    help="An LLM inference server with chunked prefill at its core.",
    epilog="legato COMMAND --help lists the flags of a command.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

NOT_SIMULATED = (
    *("model", "served_model_name", "chat_template", "dtype", "weights", "kv_memory", "device", "threads"),
    *("attention", "kv_dtype", "calibrate", "generation_config"),
)
"""Settings that a simulation has no use for."""
COST_HELP = "What steps cost: a .json file that a calibration wrote. Default: gemma3-270m on two cores."
SIMULATE_HELP = "Load no model: made-up text at the pace of these costs (a .json file, or gemma3-270m)."
SCENARIO_HELP = f"A built-in workload ({', '.join(SCENARIOS)}) or a JSON file."

TUNE_COST_HELP = "What steps cost: a .json file that a calibration wrote. Default: it is measured."

Trace = Annotated[Path | None, typer.Option(help="Recorded traffic: CSV, or JSON lines as Mooncake's.")]
ScenarioName = Annotated[str | None, typer.Option(help=SCENARIO_HELP, autocompletion=lambda: list(SCENARIOS))]
Rate = Annotated[
    float | None, typer.Option(min=0.0, help="Requests a second, in place of the trace's times.")
]
Burstiness = Annotated[
    float, typer.Option(min=0.0, help="Of a rate. 1: Poisson; less: in bursts; inf: a fixed beat.")
]
PromptLength = Annotated[int | None, typer.Option(min=1, help="Tokens of each prompt, with --rate.")]
OutputLength = Annotated[int | None, typer.Option(min=1, help="Tokens of each reply, with --prompt.")]
Start = Annotated[float, typer.Option(min=0.0, help="Begin so many seconds into the workload.")]
Duration = Annotated[float | None, typer.Option(min=0.0, help="Seconds of it in which requests come.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Most requests.")]
LengthScale = Annotated[float, typer.Option(min=0.0, help="Multiplies all lengths.")]
TimeScale = Annotated[float, typer.Option(min=0.0, help="Multiplies all times: 0.5 doubles the rate.")]


@app.command(cls=SettingsCommand)
@takes_settings("model", "engine", "server", model_argument=True)
def serve(
    settings: Settings,
    simulate: Annotated[str | None, typer.Option(help=SIMULATE_HELP)] = None,
    noise: Annotated[bool, typer.Option(help="With --simulate: steps differ as measured ones did.")] = True,
) -> None:
    """Serve MODEL over the OpenAI HTTP API."""
    if simulate is None:
        check_model(settings)
    with importing():
        from legato.cli.serve import serve_model

    serve_model(settings, simulate=simulate, noise=noise)


@app.command(cls=SettingsCommand)
@takes_settings(
    "model", "engine", model_argument=False, without=("served_model_name", "chat_template", "max_running")
)
def generate(
    settings: Settings,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens to make. Default: 128.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes the draws repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the reply; repeatable.")] = None,
) -> None:
    """Continue one prompt and print the text as it comes."""
    check_model(settings)
    with importing():
        from legato.cli.generate import print_reply

    text = sys.stdin.buffer.read().decode(errors="replace") if prompt == "-" else prompt
    print_reply(settings, text, max_tokens, temperature, top_p, seed, stop or [])


@app.command(cls=SettingsCommand)
@takes_settings("model", "engine", model_argument=True, without=("served_model_name", "max_running"))
def chat(
    settings: Settings,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=2.0, help="0 is greedy. Default: the model's own sampling.")
    ] = None,
) -> None:
    """Talk with MODEL in the terminal."""
    check_model(settings)
    with importing():
        from legato.cli.chat import talk

    talk(settings, system, max_tokens, temperature)


@app.command(cls=SettingsCommand)
@takes_settings("model", "engine", model_argument=True, without=("served_model_name",))
def doctor(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    exactness: Annotated[
        bool, typer.Option("--exactness", help="Only compare logits over random schedules; prints JSON.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long --exactness goes on.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Draws the schedules of --exactness.")] = 0,
) -> None:
    """Say what this machine and MODEL give: versions, back ends and why, memory, and a self-test."""
    check_model(settings)
    with importing():
        from legato.cli.doctor import check_exactness, examine

    if exactness:
        check_exactness(settings, seconds, seed)
    else:
        examine(settings, as_json)


@app.command(cls=SettingsCommand)
@takes_settings("model", "engine", model_argument=False, without=NOT_SIMULATED)
def simulate(
    settings: Settings,
    trace: Trace = None,
    scenario: ScenarioName = None,
    rate: Rate = None,
    burstiness: Burstiness = 1.0,
    prompt: PromptLength = None,
    output: OutputLength = None,
    start: Start = 0.0,
    duration: Duration = None,
    limit: Limit = None,
    length_scale: LengthScale = 1.0,
    time_scale: TimeScale = 1.0,
    cost: Annotated[str | None, typer.Option(help=COST_HELP)] = None,
    noise: Annotated[bool, typer.Option(help="Steps differ as the measured ones did.")] = True,
    seed: Annotated[int, typer.Option(help="Draws arrivals and noise.")] = 0,
    as_json: Annotated[Path | None, typer.Option("--json", help="File for all numbers.")] = None,
    plot: Annotated[Path | None, typer.Option(help="HTML file for charts.")] = None,
    journal: Annotated[Path | None, typer.Option(help="File for a line of JSON for each step.")] = None,
) -> None:
    """Serve a workload in simulated time: the real scheduler, no model, hours in seconds."""
    with importing():
        from legato.cli.simulate import WorkloadChoice, simulate_workload

    choice = WorkloadChoice(
        trace=trace,
        scenario=scenario,
        rate=rate,
        burstiness=burstiness,
        prompt=prompt,
        output=output,
        start=start,
        duration=duration,
        limit=limit,
        length_scale=length_scale,
        time_scale=time_scale,
    )
    simulate_workload(
        settings,
        choice,
        cost=cost,
        seed=seed,
        noise=noise,
        as_json=as_json,
        plot_file=plot,
        journal=journal,
    )


@app.command(cls=SettingsCommand)
@takes_settings(
    "model",
    "engine",
    model_argument=True,
    without=("served_model_name", "chat_template", "generation_config"),
)
def tune(
    settings: Settings,
    trace: Trace = None,
    scenario: ScenarioName = None,
    rate: Rate = None,
    burstiness: Burstiness = 1.0,
    prompt: PromptLength = None,
    output: OutputLength = None,
    start: Start = 0.0,
    duration: Duration = None,
    limit: Limit = None,
    length_scale: LengthScale = 1.0,
    time_scale: TimeScale = 1.0,
    cost: Annotated[str | None, typer.Option(help=TUNE_COST_HELP)] = None,
    cost_out: Annotated[Path | None, typer.Option(help="File for what steps cost.")] = None,
    noise: Annotated[bool, typer.Option(help="Simulated steps differ as the measured ones did.")] = True,
    seed: Annotated[int, typer.Option(help="Draws arrivals and noise.")] = 0,
    max_steps: Annotated[
        int, typer.Option(min=1000, help="Steps to simulate, about; 20,000 take a second.")
    ] = 1_000_000,
    verify: Annotated[
        bool, typer.Option("--verify", help="Serve with what is recommended, a minute in real time.")
    ] = False,
    as_json: Annotated[Path | None, typer.Option("--json", help="File for all numbers.")] = None,
    plot: Annotated[Path | None, typer.Option(help="HTML file for the frontier.")] = None,
) -> None:
    """Find the settings for MODEL, this machine and a load: by measured steps and simulated traffic.

    The engine's settings are those that it starts from; budget, chunks, order and max_running are searched.
    """
    if cost is None or verify:
        check_model(settings)
    with importing():
        from legato.cli.simulate import WorkloadChoice
        from legato.cli.tune import DEFAULT_SCENARIO, Outputs, tune_model

    silent = trace is None and scenario is None and prompt is None
    choice = WorkloadChoice(
        trace=trace,
        scenario=DEFAULT_SCENARIO if silent else scenario,
        rate=rate,
        burstiness=burstiness,
        prompt=prompt,
        output=output,
        start=start,
        duration=duration,
        limit=limit,
        length_scale=length_scale,
        time_scale=time_scale,
    )
    tune_model(
        settings,
        choice,
        Outputs(as_json=as_json, plot=plot, costs=cost_out),
        cost=cost,
        seed=seed,
        noise=noise,
        max_steps=max_steps,
        verify_too=verify,
    )


@app.command(cls=SettingsCommand)
@takes_settings("model", "engine", "server", model_argument=False)
def config(
    settings: Settings,
    show_schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of runtime.toml.")
    ] = False,
) -> None:
    """Print the settings in force, or the schema of the settings file."""
    print(json.dumps(schema() if show_schema else settings.model_dump(mode="json"), indent=2))


@app.command()
def version() -> None:
    """Print the version."""
    from legato import __version__

    print(__version__)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
) -> None:
    """An LLM inference server with chunked prefill at its core."""
    if show_version:
        version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run_command(words: Sequence[str]) -> int:
    """Run a command line, and return the exit status."""
    for line in unknown_variables():
        print(f"legato: warning: {line}", file=sys.stderr)
    try:
        if os.environ.get("LEGATO_CACHE_DIR"):  # compiled kernels go there too; read when numba is loaded
            os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_dir() / "kernels"))
        status = app(list(words), prog_name="legato", standalone_mode=False)
    except LegatoError as error:
        return _failed(error.message, 1)
    except typer.TyperException as error:
        return _failed(error.format_message(), error.exit_code)
    except typer.Abort as error:  # what typer makes of an EOFError, which is a fault of ours
        raise error.__cause__ or error from None
    except KeyboardInterrupt:
        return 130
    return status if isinstance(status, int) else 0


def _failed(message: str, status: int) -> int:
    line = " ".join(part.strip() for part in message.splitlines())
    print(f"legato: error: {line}", file=sys.stderr)
    return status
