"""Every implementation of `Session` and `Sequences`, of one small model, and what the oracle says of a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulator.bundles import make_files, write_checkpoint
from emulator.gpu import EmulatedGpu
from emulator.ranks import Peer
from emulator.sessions import emulated_ranks, emulated_session
from safetensors.torch import load_file, save_file
from torch import Tensor

from flywheel.decode.bundling import make_bundle
from flywheel.decode.choices import choose
from flywheel.decode.cuda import CudaModel
from flywheel.decode.reference import ReferenceSession
from flywheel.ir import TARGETS, DType, GpuTarget, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.hf import load_spec
from flywheel.models.oracle import EagerDecoder
from flywheel.models.sharding import shared_step
from flywheel.models.spec import DecoderSpec
from flywheel.runtime.reading import read_bundle
from flywheel.runtime.sequences import Sampling
from flywheel.runtime.session import BundleSession, draw
from flywheel.runtime.writing import write_folder
from flywheel.vm.gpu.driver import Gpu, open_gpu

CONTEXT, BATCH = 32, 3
BY_DATA = ScheduleConfig({"hand_off": {"data": 1}}, page_allocation="none", threads_per_block=192)
BY_COUNTERS = ScheduleConfig(threads_per_block=192)
SHARED = ScheduleConfig(
    {"gemv": {"N_tile": 16}, "hand_off": {"data": 1}, "stream": {"chunk_bytes": 4096, "inflight_bytes": 8192}},
    page_allocation="none", threads_per_block=128, smem_bytes_per_block=96 * 1024,
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A checkpoint, its weights and its spec. `made_in` is an empty directory."""

    checkpoint: Path
    made_in: Path
    spec: DecoderSpec
    weights: Mapping[str, Tensor]

    def logits(self, text: Sequence[int]) -> Tensor:
        """The oracle's, after a text."""
        return EagerDecoder(self.spec, self.weights, torch.float32, CONTEXT).prefill(text)

    def text(self, prompt: Sequence[int], count: int, sampling: Sampling, drawn: Draw) -> list[int]:
        """The oracle's next tokens after a prompt, each chosen by `drawn`."""
        oracle = EagerDecoder(self.spec, self.weights, torch.float32, CONTEXT)
        logits, tokens = oracle.prefill(prompt), list(prompt)
        for _ in range(count):
            seen = torch.zeros(self.spec.vocab, dtype=torch.bool)
            seen[tokens] = True
            tokens.append(drawn(logits, seen, sampling, len(tokens) - 1))
            if len(tokens) < len(prompt) + count:
                logits = oracle.step(tokens[-1], oracle.length)
        return tokens[len(prompt) :]


Draw = Callable[[Tensor, Tensor, Sampling, int], int]
"""The token that an implementation chooses of `logits` [vocab] after a text that has the tokens `seen`, at a
position."""


def make_model(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict) -> Model:
    """A model whose random weights are changed."""
    checkpoint = write_checkpoint(folder / "small")
    file = checkpoint / "model.safetensors"
    weights = change(load_file(file))
    save_file(weights, str(file))
    return Model(checkpoint, folder, load_spec(checkpoint), weights)


def torch_draws(logits: Tensor, seen: Tensor, sampling: Sampling, position: int) -> int:
    return int(choose(logits, seen, sampling, position))


def gpu_draws(logits: Tensor, seen: Tensor, sampling: Sampling, position: int) -> int:
    """torch's generator on a GPU draws other numbers than the one on the host."""
    return torch_draws(logits.cuda(), seen.cuda(), sampling, position)


def numpy_draws(logits: Tensor, seen: Tensor, sampling: Sampling, position: int) -> int:
    return draw(logits.numpy().astype(np.float32), seen.numpy(), sampling, position)


def here() -> GpuTarget:
    gpu = EmulatedGpu()
    return replace(
        TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes
    )


@cache
def program_of(
    spec: DecoderSpec, batch: int, lanes: int, ranks: int, by_counters: bool = False
) -> MegakernelProgram:
    if ranks > 1:
        graph = shared_step(spec, CONTEXT, DType.F32, batch, ranks=ranks)
        return lower(graph, SHARED, replace(TARGETS["h100"], name="here", num_sms=2))
    graph = decode_step(spec, CONTEXT, DType.F32, batch * lanes, lanes=lanes)
    return lower(graph, BY_COUNTERS if by_counters else BY_DATA, here())


@contextmanager
def reference(model: Model, batch: int, lanes: int, ranks: int) -> Iterator[ReferenceSession]:
    yield ReferenceSession(program_of(model.spec, batch, lanes, ranks), model.spec, model.weights)


@contextmanager
def emulator(model: Model, batch: int, lanes: int, ranks: int, by_counters: bool = False) -> Iterator[Any]:
    program = program_of(model.spec, batch, lanes, ranks, by_counters)
    if ranks == 1:
        gpu = EmulatedGpu(seed=0)
        with emulated_session(gpu, program, model.spec, model.weights) as session:
            yield session
    else:
        queues: list[list[tuple[object, ...]]] = []
        peers = [Peer(num_sms=2, seed=0, limit_s=60.0, queues=queues) for _ in range(ranks)]
        with emulated_ranks(peers, program, model.spec, model.weights) as session:
            yield session


@contextmanager
def bundle(model: Model, batch: int, lanes: int, ranks: int) -> Iterator[BundleSession]:
    folder = model.made_in / f"bundle{batch}"
    if not folder.exists():
        write_folder(folder, make_files(model.checkpoint, program_of(model.spec, batch, lanes, ranks)))
    gpu: Any = EmulatedGpu(seed=0)
    with closing(BundleSession(gpu, read_bundle(folder), model.checkpoint)) as session:
        yield session
    assert not gpu._held


def program_for(gpu: Gpu, spec: DecoderSpec, batch: int, lanes: int) -> MegakernelProgram:
    """For all SMs of a GPU: a bundle is of one."""
    alike = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    graph = decode_step(spec, CONTEXT, DType.F32, batch * lanes, lanes=lanes)
    return lower(graph, BY_DATA, replace(alike, name="here", num_sms=gpu.num_sms))


@contextmanager
def bundle_on_gpu(model: Model, batch: int, lanes: int, ranks: int) -> Iterator[BundleSession]:
    gpu, folder = open_gpu(), model.made_in / f"gpu{batch}"
    if not folder.exists():
        program = program_for(gpu, model.spec, batch, lanes)
        write_folder(folder, make_bundle(program, model.spec, model.checkpoint, {"words": "a schedule"}))
    with closing(BundleSession(gpu, read_bundle(folder), model.checkpoint)) as session:
        yield session


@contextmanager
def on_gpu(model: Model, batch: int, lanes: int, ranks: int) -> Iterator[Any]:
    gpu = open_gpu()
    program = program_for(gpu, model.spec, batch, lanes)
    with (
        CudaModel(gpu, model.spec, DType.F32, CONTEXT, model.weights, batch, lanes=lanes) as loaded,
        loaded.load(program) as session,
    ):
        yield session


@dataclass(frozen=True)
class Kind:
    """An implementation. `opened(model, batch, lanes, ranks)` is a session of it."""

    opened: Callable[[Model, int, int, int], AbstractContextManager[Any]]
    lanes: int = 1
    ranks: int = 1
    draws: Draw = torch_draws

    @property
    def needs_gpu(self) -> bool:
        return self.opened in (on_gpu, bundle_on_gpu)

    @property
    def reads_by_steps(self) -> bool:
        """Whether launches read prompts, token by token."""
        return self.opened in (bundle, bundle_on_gpu)

    def open(self, model: Model, batch: int = BATCH) -> AbstractContextManager[Any]:
        return self.opened(model, batch, self.lanes, self.ranks)


SESSIONS = {
    "reference": Kind(reference),
    "reference, lanes": Kind(reference, lanes=2),
    "reference, ranks": Kind(reference, ranks=2),
    "emulator": Kind(emulator),
    "emulator, lanes": Kind(emulator, lanes=2),
    "emulator, ranks": Kind(emulator, ranks=2),
    "gpu": Kind(on_gpu, draws=gpu_draws),
    "gpu, lanes": Kind(on_gpu, lanes=2),
}
"""Sessions of which everything can be asked."""

DECODING = {
    **SESSIONS,
    "emulator, by counters": Kind(partial(emulator, by_counters=True)),
    "bundle": Kind(bundle, draws=numpy_draws),
    "gpu, bundle": Kind(bundle_on_gpu, draws=numpy_draws),
}
"""All that decode sequences."""


def each(kinds: Mapping[str, Kind]) -> list[Any]:
    """A parameter for each kind."""
    return [
        pytest.param(kind, id=name, marks=pytest.mark.gpu if kind.needs_gpu else ())
        for name, kind in kinds.items()
    ]
