from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flywheel.errors import TensorError
from flywheel.ir import NO_TOKEN, OPERATIONS, DType, InstructionKind
from flywheel.vm.reference import ops
from flywheel.vm.reference.ops import OPS, dequant

GENERATOR = torch.Generator()


@pytest.fixture(autouse=True)
def _seed() -> None:
    GENERATOR.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=GENERATOR).to(dtype)


def computed(
    op: str, inputs: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **params: object
) -> Tensor:
    out = torch.full(shape, -77, dtype=dtype)
    before = [tensor.clone() for tensor in inputs]
    OPS[InstructionKind[op]](inputs, out, params)
    assert all(torch.equal(tensor, old) for tensor, old in zip(inputs, before, strict=True))
    return out


def test_every_opcode_but_two_has_a_function() -> None:
    assert set(OPS) == set(OPERATIONS) - {InstructionKind.NOP, InstructionKind.FUSED}


def test_copy_moves_all_or_its_columns() -> None:
    x = random(1, 12)
    assert torch.equal(computed("COPY", [x], (12,)), x[0])
    assert torch.equal(computed("COPY", [x], (1, 4), n_off=5, N_tile=4), x[:, 5:9])


def test_copy_of_columns_counts_the_flattened_elements() -> None:
    x = random(3, 4)
    assert torch.equal(computed("COPY", [x], (5,), n_off=2, N_tile=5), x.flatten()[2:7])


def test_embed_gathers_rows() -> None:
    table = random(9, 4)
    ids = torch.tensor([3, 0, 8], dtype=torch.int32)
    assert torch.equal(computed("EMBED", [ids, table], (3, 4), hidden=4), torch.stack([table[3], table[0], table[8]]))


@pytest.mark.parametrize("bad", [-1, 9])
def test_embed_refuses_an_id_outside_its_table(bad: int) -> None:
    with pytest.raises(TensorError, match=r"ids \[-?\d\] are not all in 0\.\.8"):
        computed("EMBED", [torch.tensor([bad], dtype=torch.int32), random(9, 4)], (1, 4), hidden=4)


@pytest.mark.parametrize("rows", [1, 3])
def test_rmsnorm_normalises_each_row_of_hidden(rows: int) -> None:
    x, w = random(1, rows * 8), random(8)
    got = computed("RMSNORM", [x, w], (1, rows * 8), eps=1e-3, hidden=8)
    for row, normed in zip(x.double().view(rows, 8), got.double().view(rows, 8), strict=True):
        scale = 1 / math.sqrt(sum(value * value for value in row.tolist()) / 8 + 1e-3)
        torch.testing.assert_close(normed, row * scale * w.double(), rtol=1e-6, atol=1e-6)


def test_layernorm_centres_and_scales_with_and_without_a_bias() -> None:
    x, w, b = random(2, 8), random(8), random(8)
    wide = x.double()
    mean = wide.sum(-1, keepdim=True) / 8
    variance = ((wide - mean) ** 2).sum(-1, keepdim=True) / 8
    plain = (wide - mean) / (variance + 1e-2) ** 0.5 * w.double()
    got = computed("LAYERNORM", [x, w], (2, 8), eps=1e-2, hidden=8)
    torch.testing.assert_close(got.double(), plain, rtol=1e-5, atol=1e-5)
    got = computed("LAYERNORM", [x, w, b], (2, 8), eps=1e-2, hidden=8)
    torch.testing.assert_close(got.double(), plain + b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "rows"), [("GEMV_TILE", 1), ("GEMM_TILE", 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matrix_tiles_multiply_by_the_transpose_of_their_rows(op: str, rows: int, dtype: torch.dtype) -> None:
    x, w, bias = random(rows, 96, dtype=dtype), random(40, 96, dtype=dtype), random(40, dtype=dtype)
    exact = torch.einsum("mk,nk->mn", x.double(), w.double()[8:24])
    params = {"M_tile": rows, "K": 96, "n_off": 8, "N_tile": 16}
    got = computed(op, [x, w], (rows, 16), **params)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    got = computed(op, [x, w, bias], (rows, 16), **params)
    torch.testing.assert_close(got.double(), exact + bias.double()[8:24], rtol=1e-5, atol=1e-5)


def test_matrix_sums_are_taken_in_fp32_and_rounded_once() -> None:
    # In bf16, 256 + 1 is 256: a sum kept in bf16 would stop there.
    x, w = torch.ones(1, 512, dtype=torch.bfloat16), torch.ones(1, 512, dtype=torch.bfloat16)
    params = {"K": 512, "n_off": 0, "N_tile": 1}
    assert computed("GEMV_TILE", [x, w], (1, 1), torch.bfloat16, **params).item() == 512
    bias = torch.tensor([1.0], dtype=torch.bfloat16)
    w[0, 0] = 2
    assert computed("GEMV_TILE", [x, w, bias], (1, 1), **params).item() == 514


def test_a_tile_of_many_blocks_equals_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = random(1, 32), random(100, 32)
    params = {"K": 32, "n_off": 3, "N_tile": 90}
    whole = computed("GEMV_TILE", [x, w], (1, 90), **params)
    monkeypatch.setattr(ops, "BLOCK_WEIGHTS", 32 * 7)
    torch.testing.assert_close(computed("GEMV_TILE", [x, w], (1, 90), **params), whole, rtol=1e-5, atol=1e-5)


def test_silu_mul_gates() -> None:
    gate, up = random(1, 20), random(1, 20)
    wide = gate.double()
    exact = wide / (1 + torch.exp(-wide)) * up.double()
    torch.testing.assert_close(computed("SILU_MUL", [gate, up], (1, 20)).double(), exact, rtol=1e-6, atol=1e-6)


def test_gelu_uses_erf() -> None:
    x = torch.linspace(-4, 4, 33)
    exact = torch.tensor([value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.double().tolist()])
    torch.testing.assert_close(computed("GELU", [x], (33,)), exact, rtol=1e-5, atol=1e-6)


def test_add_rounds_the_fp32_sum() -> None:
    a, b = random(1, 64, dtype=torch.bfloat16), random(64, dtype=torch.bfloat16)
    exact = (a.double()[0] + b.double()).to(torch.bfloat16)
    assert torch.equal(computed("ADD", [a, b], (64,), torch.bfloat16), exact)


def test_mul_multiplies_or_scales() -> None:
    a, b = random(8), random(8)
    assert torch.equal(computed("MUL", [a, b], (8,)), a * b)
    assert torch.equal(computed("MUL", [a], (8,), scale=0.5), a / 2)


@pytest.mark.parametrize(("params", "dim"), [({}, 1), ({"dim": 0}, 0), ({"dim": -2}, 0)])
def test_softmax_sums_to_one_over_its_dim(params: dict[str, int], dim: int) -> None:
    x = 20 * random(3, 5)
    powers = torch.exp(x.double() - x.double().max())
    exact = powers / powers.sum(dim, keepdim=True)
    torch.testing.assert_close(computed("SOFTMAX", [x], (3, 5), **params).double(), exact, rtol=1e-5, atol=1e-7)


def test_allreduce_sums_its_shards_in_fp32() -> None:
    shards = [torch.full((4,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    assert computed("ALLREDUCE_SHARD", shards, (4,)).tolist() == [259.0] * 4
    assert torch.equal(computed("ALLREDUCE_SHARD", shards[:1], (4,)), shards[0].float())


def test_argmax_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 5.0, 5.0]])
    assert computed("SAMPLE_ARGMAX", [logits], (1,), torch.int32).tolist() == [1]
    assert computed("SAMPLE_ARGMAX", [torch.zeros(1, 100_000)], (1,), torch.int32).tolist() == [0]
    several = torch.tensor([[0.0, 3.0, 3.0], [9.0, 1.0, 9.0]])
    assert computed("SAMPLE_ARGMAX", [several], (2,), torch.int32).tolist() == [1, 0]


def test_argmax_is_no_token_if_the_largest_element_is_not_finite() -> None:
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor([[-inf, 2.0, -inf], [0.0, nan, inf], [0.0, inf, 1.0], [-inf, -inf, -inf]])
    out = torch.empty(4, dtype=torch.int32)
    OPS[InstructionKind.SAMPLE_ARGMAX]([rows], out, {})
    assert out.tolist() == [1, NO_TOKEN, NO_TOKEN, NO_TOKEN]


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
