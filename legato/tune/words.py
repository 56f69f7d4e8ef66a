"""A tuning in sentences, and a verification as a table."""

from collections.abc import Iterator

from legato.tune.capacity import Capacity, bottleneck, misses
from legato.tune.setup import Setup
from legato.tune.trial import Trial
from legato.tune.tuning import Tuning
from legato.tune.verify import MAX_DIFFERENCE, Verification


def recommendation(tuning: Tuning) -> Iterator[str]:
    """Line by line: what to do, what it gives, what it would be otherwise, and how this was found."""
    best, present, whole = tuning.best, tuning.found.trials[0], tuning.no_chunking
    bench = tuning.bench
    yield f"Recommended: {best.setup.in_words()}."
    yield f"  {numbers(best)}"
    if best.setup == present.setup:
        yield "  These are the settings as they are."
    else:
        yield f"The settings as they are ({present.setup.in_words()}):"
        yield f"  {numbers(present)}"
    if best is not whole:
        yield "Without chunking:"
        yield f"  {numbers(whole)}"
    for text in misses(best, bench.targets):
        yield f"Nothing that was tried does better, and {text}."
    # a fixed budget has no target to miss: then the settings as they are show it
    aimed = best if best.setup.tpot_target_ms else present
    unreachable = aimed.report.limits.get("unreachable", 0)
    if unreachable:
        share = unreachable / max(aimed.report.num_steps, 1)
        yield f"In {share:.1%} of the steps the decodes alone take longer than the target."
    yield _knee(tuning.knee)
    running_limit = tuning.engine.running_limit
    yield from _capacity(tuning.capacity, running_limit)
    part = "all" if len(bench.arrivals) == tuning.num_arrivals else "the first"
    end = "" if tuning.found.complete else "; the search ended there"
    yield (
        f"{len(tuning.found.trials)} trials with {part} {len(bench.arrivals):,} of {tuning.num_arrivals:,} "
        f"requests, {tuning.found.num_steps:,} simulated steps{end}."
    )


def _knee(knee: Trial | None) -> str:
    if knee is None:
        return "The frontier of stalls and first tokens has no knee: nothing is below the line of its ends."
    return (
        f"Knee of the frontier: {knee.setup.in_words()} (longest gap of a reply p99 {ms(knee.stall('p99'))}, "
        f"first token p99 {ms(knee.ttft('p99'))})."
    )


def numbers(trial: Trial) -> str:
    """What a trial gave."""
    ttft, gap = trial.ttft, trial.gap
    return (
        f"{trial.good:.1%} of requests within their targets; first token p50 {ms(ttft('p50'))}, "
        f"p99 {ms(ttft('p99'))}; gaps p50 {ms(gap('p50'))}, p99 {ms(gap('p99'))}, longest {ms(gap('max'))}"
    )


def ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:,.1f} ms"


def _capacity(capacity: Capacity | None, running_limit: int) -> Iterator[str]:
    if capacity is None:
        yield "Capacity: the workload has no rate, all of it comes at once."
        return
    targets = capacity.targets
    if not capacity.rate and capacity.beyond is not None:
        what = misses(capacity.beyond, targets)[0]
        yield f"Capacity: none. Even at {capacity.beyond_rate:.2g} requests/s {what}."
        return
    wanted = [
        f"{name} within {ms(target)}"
        for name, target in (("first token", targets.ttft), ("gaps", targets.tpot))
        if target is not None
    ]
    yield (
        f"Capacity: {capacity.rate:.3g} requests/s with p99 of {' and of '.join(wanted)} "
        f"(as it is: {capacity.present_rate:.3g})."
    )
    if capacity.beyond is None:
        yield "  More was not tried."
        return
    what = misses(capacity.beyond, targets)[0]
    yield f"  At {capacity.beyond_rate:.3g} {what}: {bottleneck(capacity.beyond, running_limit)}."


def verified(result: Verification, setup: Setup) -> Iterator[str]:
    """A table of predicted and measured, and a verdict."""
    yield (
        f"Verified: {setup.in_words()}; {result.num_requests:,} requests in {result.seconds:.0f} s, "
        f"in real time. Steps took {result.pace:.2f} of what was measured before."
    )
    yield f"  {'':26}{'predicted':>12}{'measured':>12}{'ratio':>8}"
    for row in result.rows:
        yield f"  {row.name:26}{ms(row.predicted):>12}{ms(row.measured):>12}{row.ratio:>8.2f}"
    far = [row.name for row in result.rows if not row.close]
    if far:
        yield f"  More than {MAX_DIFFERENCE:.0%} apart: {'; '.join(far)}."
    else:
        yield f"  All within {MAX_DIFFERENCE:.0%}."
