"""The faults that the tests of sim must find: (name, file, text, replacement, test). See scripts/mutants.py."""

MUTANTS = (
    (
        "a simulation that delivers arrivals one step late",
        "legato/sim/simulator.py",
        "while coming and coming[0][1].time <= clock.now:",
        "while coming and coming[0][1].time < clock.now or coming and not engine.has_work:",
        "tests/sim/test_simulator.py::test_a_history_makes_the_schedules_that_an_engine_makes",
    ),
    (
        "a simulation in which nobody leaves",
        "legato/sim/simulator.py",
        "        _leave(engine, leaving, clock.now)\n",
        "",
        "tests/sim/test_simulator.py::test_a_history_makes_the_schedules_that_an_engine_makes",
    ),
)
