"""Times what a user with several GPUs of one host would run without flywheel: tensor parallelism in PyTorch over NCCL.

    python experiments/ranks_speed.py --ranks 2 --output results/gpu/ranks_nccl.txt
    python experiments/ranks_speed.py --ranks 2 --device cpu --models folder-of-a-tiny-model

One process a GPU; batch 1, bf16, random weights, at the last position of the context. "cublas" is the step in plain
torch, "compile" what torch.compile makes of it; each is a CUDA graph with its all-reduces. The oracle judges a model of
the same shapes, cut to as many layers as one GPU holds beside its rank's part, on every rank. Then the steps of the
whole model are timed alternately, LAUNCHES launches back to back a round; a round's time is that of the slowest rank.
What flywheel is predicted to take is results/ranks_predicted.txt's: it is not measured here. On CPUs the ranks meet
over gloo: steps are judged, and nothing is timed.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Final

import torch
import torch.distributed
from torch import Tensor

from flywheel.decode.judge import Judge
from flywheel.decode.lineup import RANK_RIVALS
from flywheel.decode.rank_processes import run_ranks
from flywheel.decode.ranked_rivals import captured
from flywheel.decode.rivals import FusedWeights, fuse, steps_of
from flywheel.decode.tensor_parallel import Shard, ShardedDecoder, shard_of
from flywheel.decode.verify import default_positions, judge_free
from flywheel.errors import FlywheelError, MismatchError
from flywheel.ir import DType
from flywheel.measure.verdict import Verdict
from flywheel.models.catalog import resolve_model
from flywheel.models.eager import LayerCache, OracleWeights
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.process import one_torch_thread, sums_as_shipped
from flywheel.tensors import TORCH_DTYPES

ROUNDS, LAUNCHES, WARMUP = 10, 50, 5
JUDGED_LAYERS: Final = 32
"""At most, of models as large as 8 B; 70 B has layers four times as large."""

JUDGED_WEIGHTS: Final = 16e9
SEED: Final = 0
LIMIT_S: Final = 3600.0
DTYPE: Final = DType.BF16
KINDS: Final = {"cublas": "nccl", "compile": "nccl-compile"}
PREDICTED: Final = Path(__file__).parents[1] / "results" / "ranks_predicted.txt"


@dataclass(frozen=True, slots=True)
class Ask:
    """What ranks do for a model."""

    spec: DecoderSpec
    ranks: int
    context: int
    device: str
    rounds: int = ROUNDS
    launches: int = LAUNCHES


@dataclass(frozen=True, slots=True)
class Found:
    """A rank's, by kind: the verdict on the cut model's step, the digest of the logits of the whole one's and, in ms a
    step, the time of each round."""

    verdicts: dict[str, Verdict]
    digests: dict[str, str]
    times_ms: dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Ready:
    """A step at the last position, in a CUDA graph where there is CUDA; `launch` lets it run once more."""

    launch: Callable[[], object]
    given: Callable[[], tuple[Tensor, Tensor]]


def main(arguments: list[str] | None = None) -> int:
    """Print a row a model and kind; 1 where ranks fail or a step is not the oracle's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama3.2-1b", "llama3-8b", "llama3-70b"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    lines = [heading(given.device)]
    print(lines[0], flush=True)
    status = 0
    for name in given.models:
        try:
            spec = resolve_model(name)
            ask = Ask(spec, given.ranks, given.context, given.device)
            backend = "nccl" if given.device == "cuda" else "gloo"
            found = run_ranks(spec.name, measure, given.ranks, backend, LIMIT_S, ask)
            rows = rows_of(ask, found)
        except FlywheelError as error:
            print(error, file=sys.stderr)
            status = 1
            continue
        print(*rows, sep="\n", flush=True)
        lines += rows
    if given.output is not None:
        given.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return status


def measure(rank: int, ask: Ask) -> Found:
    """What one rank finds."""
    with torch.no_grad(), one_torch_thread(), sums_as_shipped():
        cut = replace(ask.spec, n_layers=judged_layers(ask.spec))
        ready, judge = prepare(rank, ask, cut)
        verdicts = {}
        for kind, step in ready.items():
            step.launch()
            verdicts[kind] = judge_free(steps_of(*step.given()), judge)
        if cut.n_layers < ask.spec.n_layers:
            caches = [judge.layer_caches(-1, 0)[layer % cut.n_layers] for layer in range(ask.spec.n_layers)]
            token, position = judge.tokens[-1].tolist(), judge.positions[-1]
            ready.clear()
            del judge, step
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
            shard, weights = weights_of(rank, ask, ask.spec)
            ready = make_steps(shard, weights, ask, caches, token, position)
        digests = {}
        for kind, step in ready.items():
            step.launch()
            digests[kind] = sha256(step.given()[0].float().cpu().numpy().tobytes()).hexdigest()
        return Found(verdicts, digests, time_in_turn(ready, ask) if ask.device == "cuda" else {})


def judged_layers(spec: DecoderSpec) -> int:
    """Layers of the cut model: all, where one GPU holds the weights with room for a rank's part of them."""
    a_layer = (spec.n_params - replace(spec, n_layers=1).n_params) / max(1, spec.n_layers - 1) * 2
    return spec.n_layers if not a_layer else max(1, min(spec.n_layers, JUDGED_LAYERS, int(JUDGED_WEIGHTS / a_layer)))


def prepare(rank: int, ask: Ask, spec: DecoderSpec) -> tuple[dict[str, Ready], Judge]:
    """Steps of a model behind the caches of its judge, and that."""
    dtype = TORCH_DTYPES[DTYPE]
    own = OracleWeights(spec, random_weights(spec, SEED, dtype, ask.device), dtype, ask.device)
    judge = Judge(own, DTYPE, ask.context, default_positions(ask.context), 1, SEED)
    shard, weights = weights_of(rank, ask, spec)
    caches = judge.layer_caches(-1, 0)
    return make_steps(shard, weights, ask, caches, judge.tokens[-1].tolist(), judge.positions[-1]), judge


def weights_of(rank: int, ask: Ask, spec: DecoderSpec) -> tuple[Shard, FusedWeights]:
    """A rank's, drawn one tensor of the whole model at a time."""
    shard = shard_of(spec, rank, ask.ranks)
    return shard, fuse(shard.spec, random_weights(spec, SEED, TORCH_DTYPES[DTYPE], ask.device, keep=shard.keep))


def make_steps(
    shard: Shard, weights: FusedWeights, ask: Ask, caches: list[LayerCache], tokens: list[int], position: int
) -> dict[str, Ready]:
    """Each kind of step, ready to launch."""
    made = {}
    for kind, name in KINDS.items():
        rival = RANK_RIVALS[name]
        decoder = ShardedDecoder(shard, weights, DTYPE, ask.context, rival.inline_attention)
        decoder.write_cache(caches)
        decoder.set_tokens(tokens)
        if rival.compiled:
            torch._dynamo.reset()
        on_gpu = ask.device == "cuda"
        made[kind] = Ready(*captured(decoder, rival, position)) if on_gpu else plain(decoder, position)
    return made


def plain(decoder: ShardedDecoder, position: int) -> Ready:
    """A step where there is no CUDA."""
    return Ready(lambda: None, lambda: decoder.forward(position))


def time_in_turn(ready: dict[str, Ready], ask: Ask) -> dict[str, list[float]]:
    """Ms a step of each round, in which each kind begins in its turn; ranks begin together."""
    times: dict[str, list[float]] = {kind: [] for kind in ready}
    kinds = list(ready)
    for turn in range(ask.rounds):
        first = turn % len(kinds)
        for kind in (*kinds[first:], *kinds[:first]):
            torch.distributed.barrier()
            for _ in range(WARMUP):
                ready[kind].launch()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(ask.launches):
                ready[kind].launch()
            end.record()
            end.synchronize()
            times[kind].append(begin.elapsed_time(end) / ask.launches)
    return times


def heading(device: str) -> str:
    """What stands above the rows, and where they were measured."""
    where = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device
    return (
        f"measured on {where}, torch {torch.__version__}, bf16, batch 1; ms a step, median (extremes) of rounds; "
        f"flywheel's column is predicted\n"
        f"{'model':12} {'ranks':>5} {'kind':8} {'judged layers':>13} {'error':>9} {'bound':>7} "
        f"{'measured':>24} {'flywheel, predicted':>19}"
    )


def rows_of(ask: Ask, found: list[Found]) -> list[str]:
    """A row a kind. Raises MismatchError for a step that is not the oracle's, or of which ranks have other logits."""
    spec, rows = ask.spec, []
    foretold = predicted_ms(PREDICTED.read_text(encoding="utf-8"), spec.name, ask.ranks)
    for kind in KINDS:
        wrong = next((each.verdicts[kind] for each in found if not each.verdicts[kind].passed), None)
        if wrong is not None:
            raise MismatchError(f"{spec.name}: {kind} on {ask.ranks} ranks: {wrong.reason}")
        if len({each.digests[kind] for each in found}) > 1:
            raise MismatchError(f"{spec.name}: {kind}: the logits of {ask.ranks} ranks are not the same")
        worst = max((each.verdicts[kind] for each in found), key=lambda verdict: verdict.error)
        slowest = [max(round) for round in zip(*(each.times_ms.get(kind, []) for each in found), strict=True)]
        measured = f"{median(slowest):.3f} ({min(slowest):.3f} to {max(slowest):.3f})" if slowest else "not timed"
        rows.append(
            f"{spec.name:12} {ask.ranks:5} {kind:8} {judged_layers(spec):>6} of {spec.n_layers:3} {worst.error:9.2e} "
            f"{worst.bound:7.0e} {measured:>24} {'' if foretold is None else f'{foretold:.3f}':>19}".rstrip()
        )
    return rows


def predicted_ms(text: str, model: str, ranks: int) -> float | None:
    """What results/ranks_predicted.txt says that flywheel takes, if anything."""
    rows = [line.split() for line in text.splitlines()]
    return next((float(row[4]) for row in rows if row[:2] == [model, str(ranks)]), None)


if __name__ == "__main__":
    sys.exit(main())
