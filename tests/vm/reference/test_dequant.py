from __future__ import annotations

import torch

from flywheel.ir import DType
from flywheel.vm.reference.dequant import dequant


def values(inputs: list[torch.Tensor], shape: tuple[int, ...], qdtype: DType, group: int) -> list[list[float]]:
    out = torch.full(shape, torch.nan)
    dequant(inputs, out, {"qdtype": int(qdtype), "group": group})
    return [list(row) for row in out.tolist()]


def test_int8_takes_the_scale_of_its_group() -> None:
    q = torch.tensor([[1, -2, 3, -128], [5, 6, 127, 0]], dtype=torch.int8)
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.25]])
    assert values([q, scales], (2, 4), DType.I8, 2) == [[0.5, -1.0, 6.0, -256.0], [5.0, 6.0, 31.75, 0.0]]


def test_zero_points_are_taken_off_before_scaling() -> None:
    q = torch.tensor([[10, 20, 250, 0]], dtype=torch.uint8)
    scales, zeros = torch.tensor([[0.5, 2.0]]), torch.tensor([[8, 128]], dtype=torch.uint8)
    assert values([q, scales, zeros], (1, 4), DType.U8, 2) == [[1.0, 6.0, 244.0, -256.0]]


def test_int4_unpacks_the_low_nibble_first() -> None:
    packed = torch.tensor([[0x71, 0x8F]], dtype=torch.uint8)
    scales = torch.tensor([[1.0, 10.0]], dtype=torch.bfloat16)
    assert values([packed, scales], (1, 4), DType.I4, 2) == [[1.0, 7.0, -10.0, -80.0]]
    zeros = torch.tensor([[1.0, -8.0]])
    assert values([packed, scales, zeros], (1, 4), DType.I4, 2) == [[0.0, 6.0, 70.0, 0.0]]


def test_the_last_group_of_a_row_may_be_short() -> None:
    q = torch.ones(2, 5, dtype=torch.int8)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert values([q, scales], (2, 5), DType.I8, 3) == [[1.0, 1.0, 1.0, 2.0, 2.0], [3.0, 3.0, 3.0, 4.0, 4.0]]


def test_random_int4_weights_survive_packing() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-8, 8, (6, 32), generator=generator)
    packed = ((q[:, 0::2] & 15) | (q[:, 1::2] & 15) << 4).to(torch.uint8)
    scales = torch.rand((6, 4), generator=generator)
    wanted = q.double().view(6, 4, 8) * scales.double().unsqueeze(-1)
    assert values([packed, scales], (6, 32), DType.I4, 8) == wanted.view(6, 32).float().tolist()


def test_rows_of_a_tile_take_the_scales_that_they_share() -> None:
    q = torch.arange(-10, 10, dtype=torch.int8).reshape(5, 4)
    scales, zeros = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]]), torch.ones(3, 2, dtype=torch.int8)
    out = torch.full((3, 4), torch.nan)
    params = {"qdtype": int(DType.I8), "group": 2, "rows_per_scale": 2, "n_off": 1, "N_tile": 3}
    dequant([q, scales, zeros], out, params)
    whole = (q.float() - 1) * scales.repeat_interleave(2, 0)[:5].repeat_interleave(2, 1)
    assert torch.equal(out, whole[1:4])


def test_e4m3_bytes_are_floats_of_bias_7() -> None:
    q = torch.tensor([[0x00, 0x01, 0x38, 0x7E, 0xB8, 0x80, 0x08, 0xFE]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert values([q, torch.tensor([[2.0]])], (1, 8), DType.F8E4M3, 8) == [
        [0.0, 2.0**-8, 2.0, 896.0, -2.0, -0.0, 2.0**-5, -896.0]
    ]
