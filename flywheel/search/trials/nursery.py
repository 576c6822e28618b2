"""What processes that evaluate are forks of: to be imported by multiprocessing's fork server alone.

Importing it imports all that a prediction needs and runs one, so that compiled code is loaded, once for all forks. That
is the whole purpose, and the exception to the rule that nothing happens at import.
"""

from __future__ import annotations

from flywheel.process import importing, keep_objects, leave_stdout


def _warm_up() -> None:
    import flywheel.search.trials.processes  # noqa: F401  what its forks run
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


leave_stdout()
with importing():
    _warm_up()
keep_objects()
