"""The module that multiprocessing's fork server preloads. Nothing else may import it.

Its import imports everything that a prediction needs, and runs one prediction, which loads the compiled code. Forks of
the server then start with both. This is the one exception to the rule that an import does nothing.
"""

from __future__ import annotations

from flywheel.lifetime import set_death_signal
from flywheel.process import importing, keep_objects, leave_stdout


def _warm_up() -> None:
    import flywheel.search.trials.processes  # noqa: F401  the code that forks run
    from flywheel.cost_model import STOCK
    from flywheel.search.space import make_space
    from flywheel.search.trials.evaluate import prepare
    from flywheel.search.trials.predicting import predict_outcome
    from flywheel.search.workload import make_workload

    workload = make_workload("smollm2-135m", "h100", "bf16", 512)
    space = make_space(workload)
    program = prepare(space.to_config(space.known_good()[0]), workload).program
    assert program is not None
    predict_outcome(program, STOCK)


set_death_signal()
leave_stdout()
with importing():
    _warm_up()
keep_objects()
