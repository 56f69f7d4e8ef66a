"""The whole tuning of a small load: its words, its JSON and its page."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from tune_rig import arrivals, bench, trial

from legato.errors import ConfigError
from legato.tune.page import page
from legato.tune.setup import Setup
from legato.tune.tuning import Tuning, tune
from legato.tune.verify import Comparison, Verification
from legato.tune.words import recommendation, verified
from legato.workload.arrival import Arrival, alone

STEADY = arrivals(25, 0.4, prompt=150, output=12)


@pytest.fixture(scope="module")
def tuning() -> Tuning:
    return tune(bench(STEADY), max_steps=60_000)


def as_xml(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html.removeprefix("<!doctype html>").replace('<meta charset="utf-8">', ""))


def test_words_say_what_to_do_and_what_it_gives(tuning: Tuning) -> None:
    text = "\n".join(recommendation(tuning))
    best = tuning.best
    assert text.startswith(f"Recommended: {best.setup.in_words()}.\n  {best.good:.1%} of requests")
    assert "Without chunking:" in text
    assert "Capacity: " in text
    assert tuning.capacity is not None
    assert f"At {tuning.capacity.beyond_rate:.3g} p99 of the" in text
    assert f"{len(tuning.found.trials)} trials with all 25 of 25 requests" in text
    assert best.good == max(one.good for one in tuning.found.trials)


def test_the_front_is_of_the_trials_and_holds_the_knee(tuning: Tuning) -> None:
    points = {(one.stall("p99"), one.ttft("p99")) for one in tuning.found.trials}
    for one in tuning.front:
        assert not any(x <= one.stall("p99") and y < one.ttft("p99") for x, y in points)
    assert tuning.knee is None or tuning.knee in tuning.front
    assert tuning.no_chunking.setup.prefill_chunk == 0


def test_json_has_every_trial(tuning: Tuning) -> None:
    document = json.loads(json.dumps(tuning.to_json()))
    assert len(document["trials"]) == len(tuning.found.trials)
    assert document["trials"][0]["setup"]["tpot_target_ms"] == 100.0
    assert document["best"]["result"]["latencies"]["ttft"]["p99"] == tuning.best.ttft("p99")
    assert document["capacity"]["rate"] > 0
    assert document["num_steps"] == sum(one["result"]["num_steps"] for one in document["trials"])


def test_the_page_shows_every_trial_and_needs_nothing_else(tuning: Tuning) -> None:
    html = page(tuning, "A <title>", "some & text")
    assert "<script" not in html
    assert "http" not in html
    assert "nan" not in html
    assert "prefers-color-scheme: dark" in html
    root = as_xml(html)
    drawings = list(root.iter("svg"))
    assert len(drawings) == 3
    for drawing in drawings:
        hints = [dot.findtext("title") for dot in drawing.iter("circle") if dot.find("title") is not None]
        assert len(hints) == len(tuning.found.trials)
        assert all(one.setup.in_words() in hint for one, hint in zip(tuning.found.trials, hints, strict=True))
        names = [text.text for text in drawing.iter("text")]
        joined = ", ".join(str(name) for name in names)
        assert "recommended" in joined
        assert {"no chunking", "time to first token, ms"} <= {*names}
        for mark in drawing.iter():
            for key, limit in (("cx", 960), ("cy", 420), ("x1", 960), ("y1", 420)):
                assert 0 <= float(mark.get(key, 0)) <= limit
    [table] = root.iter("table")
    assert len(list(table)) == len(tuning.found.trials) + 1


@pytest.mark.parametrize(
    "workload",
    [
        arrivals(3, 0.0, prompt=30, output=1),
        (Arrival(time=0.0, parts=alone("alone", 5), output_length=3),),
        arrivals(8, 0.01, prompt=900, output=30),
    ],
    ids=["no gaps", "one request", "far too much"],
)
def test_any_load_has_an_answer(workload: tuple[Arrival, ...]) -> None:
    result = tune(bench(workload, tpot_ms=15.0, ttft=None, noise=True), max_steps=5_000)
    text = "\n".join(recommendation(result))
    as_xml(page(result, "title", text))
    assert "inf " not in text
    json.dumps(result.to_json())


def test_a_load_of_which_nothing_fits_is_refused_with_the_numbers() -> None:
    too_long = (Arrival(time=0.0, parts=alone("too long", 50_000), output_length=3),)
    with pytest.raises(ConfigError, match="longest prompt has 50000 tokens, and at most 4096"):
        tune(bench(too_long), max_steps=5_000)


def test_a_target_that_cannot_be_kept_is_said() -> None:
    trials = bench(arrivals(20, 0.1, prompt=30, output=40), tpot_ms=5.0)
    text = "\n".join(recommendation(tune(trials, max_steps=20_000)))
    assert "Nothing that was tried does better, and p99 of the gap between tokens is" in text
    assert "% of the steps the decodes alone take longer than the target" in text


def test_a_load_without_any_capacity_is_told_so() -> None:
    text = "\n".join(recommendation(tune(bench(STEADY, ttft=0.05), max_steps=20_000)))
    assert "Capacity: none. Even at 0.039 requests/s p99 of the time to first token is" in text


def test_who_does_best_with_the_settings_as_they_are_is_told_so(tuning: Tuning) -> None:
    first = tuning.found.trials[0]
    same = replace(tuning, found=replace(tuning.found, best=first), capacity=None)
    text = "\n".join(recommendation(same))
    assert "These are the settings as they are." in text
    assert "the workload has no rate" in text


def test_a_verification_in_words() -> None:
    rows = (
        Comparison(name="time to first token, p50", predicted=0.2, measured=0.21),
        Comparison(name="gap between tokens, p99", predicted=0.05, measured=0.08),
    )
    result = Verification(rows=rows, pace=1.03, num_requests=12, seconds=34.0)
    text = "\n".join(verified(result, Setup(tpot_target_ms=100.0)))
    assert "12 requests in 34 s, in real time. Steps took 1.03 of what" in text
    assert "200 ms      210 ms    1.05" in text
    assert "50.0 ms     80.0 ms    1.60" in text
    assert text.endswith("More than 10% apart: gap between tokens, p99.")
    assert "\n".join(verified(replace(result, rows=rows[:1]), Setup())).endswith("All within 10%.")


def test_those_that_were_refused_did_not_meet_their_targets() -> None:
    one = trial(Setup(), good=1.0, ttft=1, gap=1)
    half = replace(one, report=replace(one.report, finished={"length": 5, "refused": 5}))
    assert (one.good, half.good) == (1.0, 0.5)
