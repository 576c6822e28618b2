"""Memory that runs out at any one allocation leaves nothing taken, and a retry takes no more than the first try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from emulator.bundles import loaded, make_files, program_of, write_checkpoint
from emulator.scarce import ScarceGpu, Scarcity, empty_variant, scarce_torch, walk
from emulator.sessions import emulated_ranks
from emulator.test_judged_formats import CONFIG, CONTEXT, SPEC
from emulator.test_ranks import DTYPE
from emulator.test_ranks import SPEC as RANKED
from emulator.test_ranks import lowered as ranked

from flywheel.errors import GpuMemoryError
from flywheel.ir import TARGETS, Buffer, MegakernelProgram
from flywheel.judge.bench import CudaBench
from flywheel.lowering.lower import lower
from flywheel.models.decoder import DTYPES, decode_step
from flywheel.models.drawn import random_quantised
from flywheel.models.formats import parse_formats
from flywheel.models.weights import bind, random_weights
from flywheel.runtime.writing import write_folder
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu import link_probes, probes
from flywheel.vm.gpu.flush import Flush
from flywheel.vm.gpu.weights import ResidentWeights, put_weights
from flywheel.vm.pack import pack

FORMATS = parse_formats("int4-zeros,lm_head=int8", "bf16")


@pytest.fixture(autouse=True)
def no_compiler() -> Iterator[None]:
    with (
        patch("flywheel.vm.gpu.weights.compile_variant", empty_variant),
        patch("emulator.sessions.build_variant", empty_variant),
        patch("emulator.bundles.build_variant", empty_variant),
        patch("flywheel.decode.bundling.nvrtc_version", lambda: "13.0"),
        patch("flywheel.vm.gpu.probes.compile_unit", lambda *_: empty_variant("sm_90a", 64, DTYPE)),
        patch("flywheel.vm.gpu.link_probes.compile_unit", lambda *_: empty_variant("sm_90a", 64, DTYPE)),
        patch("flywheel.vm.gpu.flush.compile_unit", lambda *_: empty_variant("sm_90a", 64, DTYPE)),
    ):
        yield


def quantised_program() -> MegakernelProgram:
    gpu = ScarceGpu()
    target = replace(
        TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes
    )
    return lower(decode_step(replace(SPEC, n_layers=1), CONTEXT, DTYPES["bf16"], 1, FORMATS), CONFIG, target)


def test_weights_that_find_no_memory_are_not_there_and_a_retry_takes_what_one_try_takes() -> None:
    """Quantised matrices, their scales, dense matrices and row-major vectors, all from the host's memory."""
    packed = pack(quantised_program())
    kind = DTYPES["bf16"]
    bound = bind(packed.program, random_quantised(replace(SPEC, n_layers=1), 1, FORMATS, kind))

    def find(buffer: Buffer) -> Any:
        tensor = bound[buffer.name]
        return tensor.float().numpy() if tensor.dtype is TORCH_DTYPES[kind] else tensor.numpy()

    taken: set[tuple[str, ...]] = set()

    def run(scarcity: Scarcity) -> None:
        with ResidentWeights(ScarceGpu(scarcity=scarcity), kind) as weights:  # type: ignore[arg-type]
            try:
                put_weights(packed, weights, find)
            except GpuMemoryError:
                put_weights(packed, weights, find)
                taken.add(tuple(sorted(scarcity.held.values())))
                raise
            taken.add(tuple(sorted(scarcity.held.values())))

    assert walk(run) > 20
    assert len(taken) == 1


@pytest.mark.parametrize("grows", [False, True])
def test_a_model_of_two_gpus_its_caches_and_its_queue_give_all_memory_back(grows: bool) -> None:
    program, weights = ranked(RANKED, 2, 1, by_data=True), random_weights(RANKED, 0, TORCH_DTYPES[DTYPE])

    def run(scarcity: Scarcity) -> None:
        gpus = [ScarceGpu(num_sms=2, scarcity=scarcity, index=index) for index in range(2)]
        granules = gpus[0].granules() if grows else None
        with (
            scarce_torch(scarcity),
            emulated_ranks(gpus, program, RANKED, weights, granules) as session,
        ):
            session.sequences().close()

    assert walk(run) > 20


def test_a_bundle_gives_all_memory_back(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "small")
    write_folder(tmp_path / "bundle", make_files(checkpoint, program_of(checkpoint)))

    def run(scarcity: Scarcity) -> None:
        with loaded(tmp_path / "bundle", checkpoint, ScarceGpu(scarcity=scarcity)) as decoder:  # type: ignore[arg-type]
            assert decoder is not None

    assert walk(run) > 10


def test_what_empties_the_caches_of_several_gpus_gives_all_memory_back() -> None:
    def run(scarcity: Scarcity) -> None:
        gpu, *peers = [ScarceGpu(scarcity=scarcity, index=index, l2_bytes=1024) for index in range(3)]
        with patch("flywheel.vm.gpu.flush._kernel", lambda gpu: None), Flush(gpu, peers):  # type: ignore[arg-type]
            pass

    assert walk(run) == 3


def test_probes_give_all_memory_back() -> None:
    def run(scarcity: Scarcity) -> None:
        one, other = [ScarceGpu(scarcity=scarcity, index=index, total_bytes=1 << 20) for index in range(2)]
        probes.probe(one)  # type: ignore[arg-type]
        with patch("flywheel.vm.gpu.link_probes._rally"), patch("numpy.median", lambda _: 1.0):
            link_probes.probe_link(one, other, rounds=1)  # type: ignore[arg-type]

    assert walk(run) == 14


def test_a_rival_that_cannot_be_judged_for_want_of_memory_is_closed() -> None:
    closed: list[str] = []

    class Session:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> Session:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            closed.append(self.name)

    def examine(session: Session) -> None:
        raise GpuMemoryError("GPU memory: none")

    bench = CudaBench.__new__(CudaBench)
    bench._name = "small"  # type: ignore[misc]
    bench._model = SimpleNamespace(load_packed=lambda packed: Session(packed.program))  # type: ignore[assignment]
    bench._judge = SimpleNamespace(examine=examine)  # type: ignore[misc,assignment]
    bench._rivals, bench._rival_programs, bench._kept = (), [], []
    rival: Any = SimpleNamespace(program="the rival")
    with pytest.raises(GpuMemoryError):
        bench.compare(rival, (rival,), 1)
    assert closed == ["the rival"]
