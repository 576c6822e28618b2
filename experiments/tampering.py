"""Measures both sides of the verdict: the errors of correct programs, and the errors of programs with a fault injected
into one operation.

    python experiments/tampering.py [--part wrong|formats|right] [--layers N] [--draws N] >> results/tampering.txt

wrong: each fault of tests/lies.py in the first, the middle and the last layer, on the reference VM, bf16, context 512.
Of the three layers, the one with the smallest error counts. formats: each fault of tests/lies_of_formats.py in codes,
scales and zero points, for each matrix of a small model. The matrix and layer with the smallest error count. right:
configs drawn from the search space of small models of every family, in every dtype and of several batches, on the
reference VM; and some configs on the CUDA VM's own kernels, compiled for the CPU. Fails if a margin does not hold.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import product
from math import isinf
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from emulator.gpu import EmulatedGpu
from emulator.sessions import emulated_session
from lies import LIES, MARGIN, Judges, examine, layers_of, smallest, tell
from lies_of_formats import lies_of

from flywheel.decode.reference import ReferenceSession
from flywheel.errors import ConfigError
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.judge.verdicts import Judge, default_positions
from flywheel.lowering.lower import lower
from flywheel.measure.verdict import BOUND
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import DTYPES, decode_step
from flywheel.models.drawn import random_quantised
from flywheel.models.families import layer_weight_shapes
from flywheel.models.formats import LAYER_MATRICES, parse_formats
from flywheel.models.oracle import OracleWeights
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.search.space import make_space
from flywheel.search.workload import Workload
from flywheel.tensors import TORCH_DTYPES

CONTEXT = 512
FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"), ("k_rope", "k_append", "v_append", "q_rope", "attention"),
    ("attn_combine", "o_proj", "attn_add"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
    ("down_proj", "mlp_add"), ("final_norm", "lm_head"),
)  # fmt: skip
SCHEDULES = {
    "unfused": ScheduleConfig(),
    "fused, split KV, by data": ScheduleConfig(
        {"attention": {"kv_block": 64}, "gemv": {"N_tile": 64}, "hand_off": {"data": 1}}, FUSED, page_allocation="none"
    ),
}
WHOLE = (("smollm2-135m", "unfused"), ("smollm2-135m", "fused, split KV, by data"),
         ("llama3.2-1b", "fused, split KV, by data"))  # fmt: skip
CODED = DecoderSpec("small", "llama", 512, 640, 3, 8, 2, 64, 520, 1e5, 1e-5, 4096)
CODED_CONTEXT = 32
FORMATS = ("fp8", "fp8-tensor", "fp8-block", "int8", "int8-tensor", "int8-zeros", "int8-g128", "int4", "int4-zeros",
           "int4-g64-zeros-f32", "int4-row")  # fmt: skip
BATCHES = (1, 3)
SEED = 7
FEW = replace(TARGETS["h100"], name="few", num_sms=16)
SMALL = "model, two layers of an eighth of its widths"
HEAD = "  {:46} {:6} {:>7} {:>9} {:>8}  where"
LINE = "  {:46} {:6} {:7} {:9.2g} {:8.2f}  {}"


def main() -> int:
    """Print the tables; 1 where a margin does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("wrong", "formats", "right"), help="by default all")
    parser.add_argument("--layers", type=int, help="of each model; by default all")
    parser.add_argument("--draws", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    held = True
    places = ", ".join(map(str, default_positions(CONTEXT)))
    print(f"positions {places} of context {CONTEXT}; a wrong program also at those that its lie names\n")
    if arguments.part in (None, "wrong"):
        for name, schedule in WHOLE:
            held = wrong(name, schedule, arguments.layers) and held
    if arguments.part in (None, "formats"):
        held = formats_wrong() and held
    if arguments.part in (None, "right"):
        held = right(arguments.draws) and held
        held = on_kernels() and held
    return 0 if held else 1


def wrong(name: str, schedule: str, layers: int | None) -> bool:
    """A table of all lies; whether each is caught by its margin."""
    spec = CATALOG[name] if layers is None else replace(CATALOG[name], n_layers=layers)
    weights = random_weights(spec, 1)
    judges = Judges(OracleWeights(spec, weights, torch.bfloat16), DType.BF16, CONTEXT)
    bound, held = BOUND["BF16"], True
    print(f"{name}, {spec.n_layers} layers, {schedule}, bf16, context {CONTEXT}: bound {bound:.3g}")
    print(f"  {'lie':56} {'error':>8} {'/ bound':>8}  where")
    for lie in LIES:
        program = lower(decode_step(spec, CONTEXT, DType.BF16, lie.batch), SCHEDULES[schedule], TARGETS["h100"])
        examined = examine(tell(lie, program, spec, weights), spec, judges.of(lie))
        error, where = smallest(examined, layers_of(spec))
        held = held and (isinf(error) or error >= lie.margin * bound)
        print(f"  {lie.name:56} {error:8.3g} {error / bound:8.1f}  {where}", flush=True)
    print()
    return held


def formats_wrong() -> bool:
    """A table of all lies about quantised matrices; whether each is caught by its margin, whatever the matrix."""
    bound, held = BOUND["BF16"], True
    shapes = layer_weight_shapes(CODED)
    print(f"{CODED.n_layers} layers of width {CODED.hidden}, fused, bf16, context {CODED_CONTEXT}: bound {bound:.3g}")
    print(f"  {'lie':56} {'error':>8} {'/ bound':>8}  where")
    for text in FORMATS:
        formats = parse_formats(text, "bf16")
        assert formats.usual is not None
        weights = random_quantised(CODED, 1, formats, DType.BF16)
        judges = Judges(OracleWeights(CODED, weights, torch.bfloat16), DType.BF16, CODED_CONTEXT)
        graph = decode_step(CODED, CODED_CONTEXT, DType.BF16, 1, formats)
        program = lower(graph, SCHEDULES["fused, split KV, by data"], TARGETS["h100"])
        least: dict[str, tuple[float, str]] = {}
        for role in LAYER_MATRICES:
            for lie in lies_of(formats.usual, (shapes[role][0], shapes[role][1]), role):
                examined = examine(tell(lie, program, CODED, weights), CODED, judges.of(lie))
                name = lie.name.removeprefix(f"{role}, ")
                found = smallest(examined, layers_of(CODED))
                least[name] = min(least.get(name, found), found)
        for name, (error, where) in least.items():
            held = held and (isinf(error) or error >= MARGIN * bound)
            print(f"  {name:56} {error:8.3g} {error / bound:8.1f}  {where}", flush=True)
    print()
    return held


def small(spec: DecoderSpec) -> DecoderSpec:
    """Two layers of an eighth of the heads and widths."""
    kv_heads = max(1, spec.n_kv_heads // 4)
    return replace(
        spec, n_layers=2, hidden=max(256, spec.hidden // 8), intermediate=max(512, spec.intermediate // 8), vocab=1000,
        n_heads=kv_heads * spec.group, n_kv_heads=kv_heads,
    )  # fmt: skip


def right(draws: int) -> bool:
    """A line a model and dtype: the worst of configs drawn from the search space."""
    cases = list(product(CATALOG, DTYPES))
    random, held = Random(SEED), True
    print(f"right programs on the reference VM: {draws} configs drawn, context {CONTEXT}, batches {BATCHES}")
    print(HEAD.format(SMALL, "dtype", "configs", "error", "/ bound"))
    for number, (name, dtype) in enumerate(cases):
        spec, kind = small(CATALOG[name]), DTYPES[dtype]
        count = draws // len(cases) + (number < draws % len(cases))
        weights = random_weights(spec, 1, TORCH_DTYPES[kind])
        own = OracleWeights(spec, weights, TORCH_DTYPES[kind])
        worst = (0.0, "")
        for batch in BATCHES:
            judge = Judge(own, kind, CONTEXT, default_positions(CONTEXT), batch)
            workload = Workload(spec.name, spec, FEW, dtype, CONTEXT, batch)
            space = make_space(workload)
            made = 0
            while made < -(-count // len(BATCHES)):
                choice = {each.name: random.choice(each.values) for each in space.dimensions}
                try:
                    program = lower(workload.graph, space.to_config(choice), workload.target)
                except ConfigError:
                    continue
                made += 1
                verdict = judge.examine(ReferenceSession(program, spec, weights)).verdict
                worst = max(worst, (verdict.error, verdict.where))
        held = held and MARGIN * worst[0] <= BOUND[kind.name]
        made = -(-count // len(BATCHES)) * len(BATCHES)
        print(LINE.format(name, dtype, made, worst[0], worst[0] / BOUND[kind.name], worst[1]), flush=True)
    print()
    return held


def on_kernels() -> bool:
    """A line a model and dtype: the worst of some schedules on the kernels that a GPU runs."""
    held = True
    print("right programs on the CUDA VM's kernels, compiled for the CPU")
    print(HEAD.format(SMALL, "dtype", "batch", "error", "/ bound"))
    gpu = EmulatedGpu()
    target = replace(
        TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes
    )
    for name, dtype, batch in product(("smollm2-135m", "llama3.2-1b", "qwen2.5-7b", "qwen3-0.6b"), DTYPES, (1, 3)):
        spec, kind = small(CATALOG[name]), DTYPES[dtype]
        weights = random_weights(spec, 1, TORCH_DTYPES[kind])
        own = OracleWeights(spec, weights, TORCH_DTYPES[kind])
        judge = Judge(own, kind, CONTEXT, default_positions(CONTEXT), batch)
        worst = (0.0, "")
        for config in SCHEDULES.values():
            groups = [(*["q_norm", "k_norm"][: 2 * spec.qk_norm], *each) if "k_rope" in each else each
                      for each in config.fusion_grouping]  # fmt: skip
            few = replace(config, fusion_grouping=tuple(groups), threads_per_block=192)
            program = lower(decode_step(spec, CONTEXT, kind, batch), few, target)
            with emulated_session(gpu, program, spec, weights) as session:
                verdict = judge.examine(session).verdict
            worst = max(worst, (verdict.error, verdict.where))
        held = held and MARGIN * worst[0] <= BOUND[kind.name]
        print(LINE.format(name, dtype, batch, worst[0], worst[0] / BOUND[kind.name], worst[1]), flush=True)
    print()
    return held


if __name__ == "__main__":
    sys.exit(main())
