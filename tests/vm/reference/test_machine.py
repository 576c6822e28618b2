from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from shared_pages import PAGES, in_pages
from torch import Tensor

from flywheel.errors import InvalidProgramError, TensorError
from flywheel.ir import (
    Buffer,
    BufferKind,
    DType,
    MegakernelProgram,
    PageAllocation,
    ScheduleConfig,
    Wait,
    at_position,
    validate,
)
from flywheel.vm.reference import ReferenceVM

Build = Callable[..., MegakernelProgram]
Fill = Callable[..., dict[str, Tensor]]

FUSED = ScheduleConfig(
    tiling={"gemv": {"N_tile": 32}, "attention": {"kv_block": 16}},
    fusion_grouping=(
        ("attn_norm", "q_proj", "k_proj", "v_proj"),
        ("k_norm", "k_rope", "k_append", "v_append"),
        ("attn_combine", "o_proj", "attn_add"),
        ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
        ("down_proj", "mlp_add"),
    ),
)
BESIDE = ScheduleConfig(
    tiling={"attention": {"kv_block": 16}},
    fusion_grouping=(("q_norm", "k_norm", "q_rope", "k_rope", "k_append", "v_append", "attention"),),
)
"""The new row's attention beside that to the past."""

ORDERS = [("list", 0), *(("adversarial", seed) for seed in range(6)), *(("queues", seed) for seed in range(3))]


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("config", [ScheduleConfig(), FUSED, BESIDE], ids=["plain", "fused", "beside"])
def test_every_firing_order_gives_the_same_bits(
    config: ScheduleConfig, dtype: DType, lowered: Build, filled: Fill
) -> None:
    program = lowered(config, dtype)
    machine, tensors = ReferenceVM(program), filled(program)
    results = [machine.run(tensors, order, seed) for order, seed in ORDERS]
    assert bool(torch.isfinite(results[0]["logits"]).all())
    for result in results[1:]:
        assert result.keys() == results[0].keys()
        assert all(torch.equal(tensor, results[0][name]) for name, tensor in result.items())


def test_run_gives_outputs_and_caches_and_modifies_nothing(lowered: Build, filled: Fill) -> None:
    program = lowered()
    tensors = filled(program)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    result = ReferenceVM(program).run(tensors, pos=11)
    kinds = (BufferKind.IO_OUTPUT, BufferKind.KV_CACHE)
    assert list(result) == [buffer.name for buffer in program.buffers if buffer.kind in kinds]
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    changed = (result["L0.k_cache.h0"] != before["L0.k_cache.h0"]).any(-1).flatten()
    assert changed.nonzero().flatten().tolist() == [11]


@pytest.mark.parametrize("config", [FUSED, BESIDE], ids=["fused", "beside"])
def test_rows_behind_the_position_do_not_matter(config: ScheduleConfig, lowered: Build, filled: Fill) -> None:
    program = lowered(config)
    tensors = filled(program, 20)
    clean = ReferenceVM(program).run(tensors, pos=20)["logits"]
    for name in tensors:
        if "cache" in name:
            tensors[name][20:] = torch.nan
    assert torch.equal(ReferenceVM(program).run(tensors, pos=20)["logits"], clean)


@pytest.mark.parametrize("config", [FUSED, BESIDE], ids=["fused", "beside"])
def test_a_position_by_param_equals_a_program_moved_there(
    config: ScheduleConfig, lowered: Build, filled: Fill
) -> None:
    program = lowered(config)
    bound = ReferenceVM(program).bind({k: v for k, v in filled(program).items() if v.dtype is not torch.int32})
    for pos in (0, 30, 7):
        inputs = {k: v for k, v in filled(program, pos).items() if v.dtype is torch.int32}
        caches = {k: v.clone() for k, v in bound.step(inputs, pos).items() if "cache" in k}
        fresh = ReferenceVM(at_position(program, pos)).run({**filled(program), **caches, **inputs})
        assert torch.equal(bound.step(inputs)["logits"], fresh["logits"])


def test_launches_of_a_bound_program_share_their_caches_in_place(lowered: Build, filled: Fill) -> None:
    program = lowered()
    machine, tensors = ReferenceVM(program), filled(program)
    resident = {name: tensor for name, tensor in tensors.items() if tensor.dtype is not torch.int32}
    bound = machine.bind({name: tensor.clone() for name, tensor in resident.items()})
    caches = {name: tensor for name, tensor in resident.items() if "cache" in name}
    for pos in range(4):
        inputs = {name: tensor for name, tensor in filled(program, pos).items() if name not in resident}
        result = bound.step(inputs, pos=pos)
        again = machine.run({**resident, **caches, **inputs}, pos=pos)
        assert torch.equal(result["logits"], again["logits"])
        caches = {name: again[name] for name in caches}
    given = resident["L1.v_cache.h1"].clone()
    kept = machine.bind({**resident, "L1.v_cache.h1": given}).step(inputs, pos=3)["L1.v_cache.h1"]
    assert kept.data_ptr() == given.data_ptr()


def test_bound_weights_are_not_copied(lowered: Build, filled: Fill) -> None:
    program = lowered()
    tensors = {name: tensor for name, tensor in filled(program).items() if tensor.dtype is not torch.int32}
    inputs = {name: tensor for name, tensor in filled(program).items() if tensor.dtype is torch.int32}
    bound = ReferenceVM(program).bind(tensors)
    before = bound.step(inputs)["logits"]
    tensors["final_norm.w"] *= 2
    torch.testing.assert_close(bound.step(inputs)["logits"], 2 * before)


def test_a_strided_cache_cannot_be_bound(lowered: Build, filled: Fill) -> None:
    program = lowered()
    tensors = {name: tensor for name, tensor in filled(program).items() if tensor.dtype is not torch.int32}
    tensors["L0.k_cache.h0"] = torch.zeros(16, 1, 48).transpose(0, 2)
    with pytest.raises(TensorError, match=r"\(L0\.k_cache\.h0\): a cache must be contiguous"):
        ReferenceVM(program).bind(tensors)


def test_what_strict_validation_rejects_is_refused(
    lowered: Build, without_waits: Callable[..., MegakernelProgram]
) -> None:
    program = without_waits(lowered(), 5)
    finding = validate(program, strict=True).errors[0]
    with pytest.raises(InvalidProgramError) as refusal:
        ReferenceVM(program)
    assert str(finding) in str(refusal.value)


def test_two_buffers_of_one_name_are_refused(chain: Build) -> None:
    program = chain({"x": (BufferKind.IO_INPUT, DType.F32, (4,)), "y": (BufferKind.IO_OUTPUT, DType.F32, (4,))}, [
        ("COPY", ["x"], "y", {}),
    ])  # fmt: skip
    clash = replace(program, buffers=(*program.buffers, Buffer(2, "x", BufferKind.CONST, DType.F32, (1,))))
    with pytest.raises(InvalidProgramError, match=r"buffer 2 \(x\): another buffer has this name"):
        ReferenceVM(clash)


def test_an_early_read_shows_as_nan(
    lowered: Build, filled: Fill, without_waits: Callable[..., MegakernelProgram]
) -> None:
    program = lowered(ScheduleConfig(page_allocation="none"))
    first = next(index for index, task in enumerate(program.tasks) if task.label == "L1.gate_proj")
    racy = ReferenceVM.unchecked(without_waits(program, first))
    tensors = filled(program)
    assert not racy.run(tensors, "list")["logits"].isnan().any()
    assert bool(racy.run(tensors, "adversarial", 0)["logits"].isnan().any())


def test_a_launch_forgets_the_activations_of_the_last(
    lowered: Build, filled: Fill, without_waits: Callable[..., MegakernelProgram]
) -> None:
    program = lowered(ScheduleConfig(page_allocation="none"))
    tensors = filled(program)
    first = next(index for index, task in enumerate(program.tasks) if task.label == "L1.gate_proj")
    inputs = {name: tensor for name, tensor in tensors.items() if tensor.dtype is torch.int32}
    bound = ReferenceVM.unchecked(without_waits(program, first)).bind(
        {name: tensor for name, tensor in tensors.items() if name not in inputs}
    )
    assert not bound.step(inputs)["logits"].isnan().any()
    assert bool(bound.step(inputs, order="adversarial")["logits"].isnan().any())


def test_a_stuck_program_names_the_waits(lowered: Build, filled: Fill) -> None:
    program = lowered()
    tasks = list(program.tasks)
    tasks[3] = replace(tasks[3], waits=(Wait(tasks[3].out_counter, 99),))
    stuck = ReferenceVM.unchecked(replace(program, tasks=tuple(tasks)))
    wanted = rf"never fire: task 3 \({tasks[3].label}\) waits for counter {tasks[3].out_counter} >= 99"
    for order in ("list", "adversarial", "queues"):
        with pytest.raises(InvalidProgramError, match=wanted):
            stuck.run(filled(program), order)


def test_pages_that_are_reused_too_early_corrupt_the_result(lowered: Build, filled: Fill) -> None:
    program = in_pages(lowered(ScheduleConfig()), "own")
    assert program.pages is not None
    names = {buffer.name: buffer.id for buffer in program.buffers}
    homes = dict(program.pages.buffer_to_page)
    homes[names["L0.k"]] = homes[names["L0.q"]]  # both are written before either is read
    clash = replace(program, pages=PageAllocation(homes, program.pages.pages))
    assert {finding.code for finding in validate(clash, strict=True).errors} == {"page-alias"}
    tensors = filled(program)
    wanted = ReferenceVM(program).run(tensors)["logits"]
    got = ReferenceVM.unchecked(clash).run(tensors)["logits"]
    assert not torch.allclose(got, wanted, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_a_gpu_gives_the_numbers_of_the_cpu(dtype: DType, lowered: Build, filled: Fill) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    program = lowered(FUSED, dtype)
    tensors = filled(program, 20)
    wanted = ReferenceVM(program).run(tensors, pos=20)["logits"]
    got = ReferenceVM(program, "cuda").run(tensors, "adversarial", 1, pos=20)["logits"]
    assert got.device.type == "cuda"
    tolerance = 1e-4 if dtype is DType.F32 else 5e-2
    torch.testing.assert_close(got.cpu(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pages", PAGES)
def test_page_reuse_that_is_proved_changes_nothing(pages: str, lowered: Build, filled: Fill) -> None:
    plain = lowered(ScheduleConfig())
    program = in_pages(plain, pages)
    assert validate(program, strict=True).ok
    wanted = ReferenceVM(plain).run(filled(plain))["logits"]
    assert torch.equal(ReferenceVM(program).run(filled(program), "adversarial", 3)["logits"], wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("final_norm.w"), r"\(final_norm\.w\), WEIGHT F32 \[64\]: no tensor given"),
        (lambda tensors: tensors.update(x=torch.zeros(1)), "tensor 'x': the program takes no tensor of this name"),
        (lambda tensors: tensors.update(token_id=torch.zeros(2)), r"\(token_id\), IO_INPUT I32 \[1\]: .* \[2\], not"),
        (lambda tensors: tensors.update(token_id=torch.zeros(1)), r"dtype is torch\.float32, not torch\.int32"),
        (lambda tensors: tensors["token_id"].fill_(80), r"task 0 \(embed\): EMBED ids \[80\] are not all in 0\.\.79"),
    ],
)
def test_a_wrong_input_is_one_clear_error(
    change: Callable[[dict[str, Tensor]], object], message: str, lowered: Build, filled: Fill
) -> None:
    program = lowered()
    tensors = filled(program)
    change(tensors)
    with pytest.raises(TensorError, match=message) as error:
        ReferenceVM(program).run(tensors)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("token", [7, 80], ids=["done", "failed"])
def test_a_launch_leaves_the_number_of_threads_alone(token: int, lowered: Build, filled: Fill) -> None:
    program = lowered()
    tensors = filled(program)
    tensors["token_id"].fill_(token)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with nullcontext() if token == 7 else pytest.raises(TensorError):
            ReferenceVM(program).run(tensors)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
