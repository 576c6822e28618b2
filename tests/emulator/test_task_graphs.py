"""A converted task graph of Mirage MPK on the CUDA VM's own sources."""

from __future__ import annotations

from dataclasses import replace

from emulator.gpu import EmulatedGpu
from emulator.sessions import emulated_session
from mpk_llama import llama_graph

from flywheel.interop.mpk.converting import convert
from flywheel.ir import TARGETS, ScheduleConfig
from flywheel.judge.verdicts import verify
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.tensors import TORCH_DTYPES

SPEC = DecoderSpec("small", "llama", 64, 96, 2, 4, 2, 16, 80, 1e4, 1e-5, 64)


def test_a_converted_graph_gives_the_logits_of_the_model_on_the_emulated_gpu() -> None:
    gpu = EmulatedGpu()
    target = replace(TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes)
    made = convert(llama_graph(SPEC), SPEC, target, 32)
    program = replace(made, config=ScheduleConfig(page_allocation="none", threads_per_block=192))
    dtype = next(buffer.dtype for buffer in program.buffers if buffer.name == "x_out")
    weights = random_weights(SPEC, 1, TORCH_DTYPES[dtype])
    with emulated_session(gpu, program, SPEC, weights) as session:
        assert verify(session, weights, (7, 31)).passed
