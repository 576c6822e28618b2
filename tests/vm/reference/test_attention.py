from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flywheel.vm.reference.attention import attention_combine, attention_tile, kv_append, rope

HEADS = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 8, "scale": 0.3}
MAX_SEQ = 24


def tensors(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (6, 8), (MAX_SEQ, 2, 8), (MAX_SEQ, 2, 8)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor, rows: range, mask: Tensor | None = None) -> Tensor:
    """Head by head and row by row in float64."""
    out = torch.zeros(6, 8, dtype=torch.float64)
    for head in range(6):
        kv_head = head // 3
        scores = {row: float(q[head].double() @ k[row, kv_head].double()) * 0.3 for row in rows}
        if mask is not None:
            scores = {row: score + float(mask[head, row]) for row, score in scores.items()}
        total = sum(math.exp(score) for score in scores.values())
        for row, score in scores.items():
            out[head] += math.exp(score) / total * v[row, kv_head].double()
    return out


def attend(operands: list[Tensor], start: int, length: int, partial: bool = False) -> Tensor:
    out = torch.full((6, 10) if partial else (6, 8), torch.nan)
    attention_tile(operands, out, {**HEADS, "kv_start": start, "kv_len": length})
    return out


@pytest.mark.parametrize(("start", "length"), [(0, 24), (0, 1), (5, 9)])
def test_attention_sees_its_window_only(start: int, length: int) -> None:
    q, k, v = tensors()
    wanted = exact(q, k, v, range(start, start + length))
    for cache in (k, v):
        cache[:start] = torch.nan
        cache[start + length :] = torch.nan
    torch.testing.assert_close(attend([q, k, v], start, length).double(), wanted, rtol=1e-5, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = tensors()
    got = attend([1000 * q, k, v], 0, MAX_SEQ)
    assert bool(torch.isfinite(got).all())


def test_a_partial_holds_outputs_maximum_and_sum() -> None:
    q, k, v = tensors()
    part = attend([q, k, v], 3, 7, partial=True)
    torch.testing.assert_close(part[:, :8].double(), exact(q, k, v, range(3, 10)), rtol=1e-5, atol=1e-5)
    for head in range(6):
        scores = [float(q[head] @ k[row, head // 3]) * 0.3 for row in range(3, 10)]
        assert part[head, 8].item() == pytest.approx(max(scores), rel=1e-5)
        total = sum(math.exp(score - max(scores)) for score in scores)
        assert part[head, 9].item() == pytest.approx(total, rel=1e-5)


def test_an_empty_window_gives_nothing() -> None:
    part = attend(list(tensors()), 5, 0, partial=True)
    assert bool((part[:, :8] == 0).all() and (part[:, 8] == -math.inf).all() and (part[:, 9] == 0).all())
    assert bool((attend(list(tensors()), 5, 0) == 0).all())


def test_a_mask_is_added_to_the_scores_of_its_rows() -> None:
    q, k, v = tensors()
    mask = torch.randn((6, MAX_SEQ), generator=torch.Generator().manual_seed(1))
    mask[0, 4:] = -math.inf
    wanted = exact(q, k, v, range(2, 12), mask)
    torch.testing.assert_close(attend([q, k, v, mask], 2, 10).double(), wanted, rtol=1e-5, atol=1e-5)
    shared = attend([q, k, v, mask[1]], 2, 10)
    wanted = exact(q, k, v, range(2, 12), mask[1].expand(6, -1))
    torch.testing.assert_close(shared.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_head_whose_rows_are_all_masked_gives_zero() -> None:
    mask = torch.zeros(6, MAX_SEQ)
    mask[2] = -math.inf
    got = attend([*tensors(), mask], 0, MAX_SEQ)
    assert bool((got[2] == 0).all() and torch.isfinite(got).all())


def test_unwritten_rows_show() -> None:
    q, k, v = tensors()
    k[3] = torch.nan
    assert bool(attend([q, k, v], 0, 8).isnan().all())
    assert bool(attend([q, k, v], 0, 8, partial=True).isnan().all())


@given(cuts=st.lists(st.integers(0, MAX_SEQ), min_size=1, max_size=7), seed=st.integers(0, 9), nested=st.booleans())
def test_merged_partials_equal_whole_attention(cuts: list[int], seed: int, nested: bool) -> None:
    operands = list(tensors(seed))
    edges = [0, *sorted(cuts), MAX_SEQ]
    parts = [attend(operands, start, end - start, True) for start, end in pairwise(edges)]
    if nested and len(parts) > 2:
        merged = torch.full((6, 10), torch.nan)
        attention_combine(parts[:2], merged, HEADS)
        parts = [merged, *parts[2:]]
    out = torch.full((6, 8), torch.nan)
    attention_combine(parts, out, {})
    torch.testing.assert_close(out, attend(operands, 0, MAX_SEQ), rtol=1e-5, atol=1e-6)


def test_merging_empty_partials_gives_nothing() -> None:
    empty = attend(list(tensors()), 0, 0, partial=True)
    out, part = torch.full((6, 8), torch.nan), torch.full((6, 10), torch.nan)
    attention_combine([empty, empty], out, {})
    attention_combine([empty, empty], part, HEADS)
    assert bool((out == 0).all()) and torch.equal(part, empty)


def test_append_writes_its_rows_and_no_others() -> None:
    cache = torch.zeros(6, 2, 4, dtype=torch.bfloat16)
    rows = torch.arange(16.0).view(2, 2, 4)
    kv_append([rows, cache], cache, {"pos": 3})
    assert torch.equal(cache[3:5].float(), rows)
    assert not cache[:3].any() and not cache[5:].any()
    kv_append([rows.view(1, 16)[:, :8], cache], cache, {"pos": 5})
    assert torch.equal(cache[5].float(), rows[0])


def rotated(x: Tensor, positions: list[int], frequencies: list[float]) -> Tensor:
    """Element by element in float64; x [S, heads, head_dim]."""
    half = x.shape[-1] // 2
    out = torch.empty(x.shape, dtype=torch.float64)
    for s, position in enumerate(positions):
        for i, frequency in enumerate(frequencies):
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            low, high = x[s, :, i].double(), x[s, :, i + half].double()
            out[s, :, i] = low * cos - high * sin
            out[s, :, i + half] = high * cos + low * sin
    return out


def test_rope_rotates_halves_at_each_position() -> None:
    x = torch.randn((3, 2, 16), generator=torch.Generator().manual_seed(0))
    frequencies = [10_000 ** (-2 * i / 16) for i in range(8)]
    out = torch.empty(3, 2, 16)
    rope([x, torch.tensor([0, 7, 41], dtype=torch.int32)], out, {"head_dim": 16, "theta": 1e4})
    torch.testing.assert_close(out.double(), rotated(x, [0, 7, 41], frequencies), rtol=1e-4, atol=1e-5)
    assert torch.equal(out[0], x[0])
    flat = torch.empty(1, 32)
    rope([x[1].reshape(1, 32), torch.tensor([7], dtype=torch.int32)], flat, {"head_dim": 16, "theta": 10_000})
    assert torch.equal(flat.view(2, 16), out[1])


def test_rope_scaling_follows_the_llama3_rule() -> None:
    factor, low, high, original = 8.0, 1.0, 4.0, 64
    frequencies = []
    for i in range(16):
        frequency = 500_000 ** (-2 * i / 32)
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low:
            frequency /= factor
        elif wavelength >= original / high:
            smooth = (original / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
    x = torch.randn((1, 3, 32), generator=torch.Generator().manual_seed(0))
    params = {
        "head_dim": 32, "theta": 5e5, "rope_factor": factor, "rope_low_freq_factor": low,
        "rope_high_freq_factor": high, "rope_original_max_position": original,
    }  # fmt: skip
    out = torch.empty(1, 3, 32)
    rope([x, torch.tensor([100], dtype=torch.int32)], out, params)
    torch.testing.assert_close(out.double(), rotated(x, [100], frequencies), rtol=1e-4, atol=2e-5)


def test_rope_turns_by_the_frequencies_that_it_is_given() -> None:
    x = torch.randn((2, 3, 8), generator=torch.Generator().manual_seed(0))
    table, positions = (1.5, 0.25, 0.0, 0.0), [3, 40]
    at, out = torch.tensor(positions, dtype=torch.int32), torch.empty(2, 3, 8)
    params = {"head_dim": 8, "frequencies": table}
    rope([x, at], out, params)
    wanted = rotated(x, positions, list(table))
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=2e-5)
    rope([x, at], out, {**params, "scale": 1.25})
    still = [2, 3, 6, 7]
    assert torch.equal(out[..., still], x[..., still])
    moved = [0, 1, 4, 5]
    torch.testing.assert_close(out[..., moved].double(), 1.25 * wanted[..., moved], rtol=1e-4, atol=2e-5)
    rope([x, at], out, {"head_dim": 8, "theta": 1e4, "scale": 2.0})
    plain = torch.empty(2, 3, 8)
    rope([x, at], plain, {"head_dim": 8, "theta": 1e4})
    assert torch.equal(out, 2 * plain)
