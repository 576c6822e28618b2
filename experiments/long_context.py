"""Predicts schedules at long contexts, beside the time to read weights and caches.

    python experiments/long_context.py > results/long_context.txt

For each case it predicts the schedule that flywheel takes without a search, the same with each block size of attention,
and the best found by descending one knob at a time. It needs no GPU and measures nothing. The part `long` of
`experiments/record_gpu.sh` searches and measures on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flywheel.cost_model import MODEL_VERSION
from flywheel.cost_model.predict import predict_us
from flywheel.ir import ScheduleConfig, validate
from flywheel.lowering.lower import lower
from flywheel.measure.floor import floor_us, weight_bytes_read
from flywheel.search.knobs import Value
from flywheel.search.knowledge.chosen import choose_schedule
from flywheel.search.space import Space, make_space
from flywheel.search.workload import Workload, make_workload
from flywheel.vm.pack import pack

CASES: Final = (
    ("llama3-8b", 4096, 1), ("llama3-8b", 4096, 8), ("llama3.1-8b", 32768, 1), ("llama3.1-8b", 131072, 1),
)  # fmt: skip
ROUNDS: Final = 2


def cache_us(workload: Workload) -> float:
    """What reading the caches takes at the datasheet's bandwidth."""
    spec = workload.spec
    row = 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * workload.graph.dtype.nbytes(1)
    return workload.batch * workload.context * row / (workload.target.hbm_bandwidth_gbs * 1e3)


def descents(space: Space, choice: dict[str, Value]) -> Iterator[tuple[float, dict[str, Value]]]:
    """The best choice so far, round after round."""
    best = priced(space, choice)
    for _ in range(ROUNDS):
        for dimension in space.dimensions:
            for value in dimension.values:
                found = priced(space, {**choice, dimension.name: value})
                if found < best:
                    best, choice = found, {**choice, dimension.name: value}
        yield best, choice


def priced(space: Space, choice: dict[str, Value]) -> float:
    """Predicted us."""
    return predict_of(space.workload, space.to_config(choice))


def predict_of(workload: Workload, config: ScheduleConfig) -> float:
    """Predicted us."""
    return predict_us(lower(workload.graph, config, workload.target))


def main() -> None:
    """A paragraph for each case."""
    print(f"predicted by version {MODEL_VERSION} of the cost model: bf16 on one H200, one step")
    for model, context, batch in CASES:
        workload = make_workload(model, "h200", "bf16", context, batch)
        space = make_space(workload)
        chosen = choose_schedule(workload)
        program = lower(workload.graph, chosen.config, workload.target)
        proved, packed = validate(program, strict=True).ok, pack(program)
        weights = floor_us(weight_bytes_read(program), workload.target)
        read = cache_us(workload)
        print(f"{model}, context {context}, batch {batch}: weights {weights:,.0f} us + caches {read:,.0f} us")
        print(f"  without a search: {predict_of(workload, chosen.config):,.0f} us, {len(program.tasks)} tasks")
        print(f"    {chosen.words}; proved {proved}, {packed.variant.smem_bytes} bytes of shared memory")
        start = space.nearest(chosen.config)
        for block in next(each for each in space.dimensions if each.name == "kv_block").values:
            print(f"  kv_block {block}: {priced(space, {**start, 'kv_block': block}):,.0f} us")
        *_, (best, choice) = descents(space, start)
        changed = {name: value for name, value in choice.items() if value != start[name]}
        print(f"  one knob at a time: {best:,.0f} us with {changed}", flush=True)


if __name__ == "__main__":
    main()
