"""How fast the simulator is: steps a second of the real scheduler in simulated time.

    python -m benchmarks.simulator --json

`streams`: 8 replies, and a prompt of 1,000 tokens every two seconds. `stall` and `documents` are the built-in
scenarios. Fixed means the budget of 256 tokens, target one of 100 ms. Rates are over processor time, the best
of three runs, records and timelines included, no journal file.
"""

import argparse
import json
import time

from legato.config import EngineSettings
from legato.sim.find_costs import DEFAULT, find_costs
from legato.sim.run import run_simulation
from legato.workload.scenario import SCENARIOS, Group, Scenario

STREAMS = Scenario(
    description="8 replies, and a prompt of 1,000 tokens every two seconds",
    groups=(
        Group(requests=8, prompt=64, output=4000),
        Group(rate=0.5, duration=120, burstiness=float("inf"), prompt=1000, output=8),
    ),
)
BUDGETS = {"fixed": EngineSettings(), "target": EngineSettings(tpot_target_ms=100.0)}
RUNS = 3


def measure(name: str, scenario: Scenario, budget: str) -> dict[str, object]:
    costs, arrivals = find_costs(DEFAULT), scenario.arrivals(0)
    rates = []
    for _ in range(RUNS):
        began = time.process_time()
        simulation = run_simulation(BUDGETS[budget], costs, arrivals)
        rates.append(len(simulation.steps) / (time.process_time() - began))
    steps = simulation.steps
    return {
        "scenario": name,
        "budget": budget,
        "steps": len(steps),
        "simulated_s": round(steps.start[-1] + steps.elapsed[-1], 1),
        "mean_running": round(sum(steps.num_running) / len(steps), 1),
        "steps_per_s": round(max(rates)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="a JSON list of rows, and nothing else")
    as_json = parser.parse_args().json
    scenarios = {"streams": STREAMS} | {name: SCENARIOS[name] for name in ("stall", "documents")}
    rows = [measure(name, scenario, budget) for name, scenario in scenarios.items() for budget in BUDGETS]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print(*rows[0], sep="\t")
    for row in rows:
        print(*row.values(), sep="\t")


if __name__ == "__main__":
    main()
