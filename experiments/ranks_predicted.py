"""Predicts a step on two, four and eight H200 by the cost model, beside a decode skeleton on two.

`python experiments/ranks_predicted.py`: batch 1, bf16, context 512; of the schedules that a search tries first, the one
predicted to be fastest. Nothing here is measured with flywheel: it has not run on more than one GPU. The skeleton is a
persistent kernel without attention. It streams weights of the model's shapes and hands over rows five times a layer;
the owner of a slice adds the pushes of both GPUs. It was timed on two H200 with NVLink.
"""

from __future__ import annotations

from flywheel.cost_model import MODEL_VERSION, predict
from flywheel.cost_model.links import exchanges_us
from flywheel.lowering.lower import lower
from flywheel.search.space import make_space
from flywheel.search.workload import make_workload

SKELETON_MS = {
    "llama3.2-1b": {1: 0.671, 2: 0.420},
    "llama3-8b": {1: 3.482, 2: 1.879},
    "llama3-70b": {1: 30.37, 2: 15.66},
}


def main() -> None:
    print(f"predicted, version {MODEL_VERSION}, H200, bf16, context 512, batch 1; ms a step")
    print(f"{'model':12} {'GPUs':>4} {'tasks':>9} {'floor':>7} {'predicted':>9} {'exchanges':>9} {'skeleton':>8}")
    for model, skeleton in SKELETON_MS.items():
        for ranks in (1, 2, 4, 8):
            workload = make_workload(model, "h200", "bf16", 512, any_size=True, ranks=ranks)
            space = make_space(workload)
            programs = [
                lower(workload.graph, space.to_config(choice), workload.target) for choice in space.known_good()
            ]
            found, program = min(
                [(predict(program), program) for program in programs], key=lambda pair: pair[0].latency_us
            )
            print(
                f"{model:12} {ranks:4} {len(program.tasks):9,} {found.floor_us / 1e3:7.3f} "
                f"{found.latency_us / 1e3:9.3f} {exchanges_us(program) / 1e3:9.3f} {skeleton.get(ranks, ''):>8}"
            )


if __name__ == "__main__":
    main()
