"""The kernel's sources as C++ for a CPU: every PTX statement becomes a call into ptx.hpp."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

RUNTIME: Final = Path(__file__).with_name("ptx.hpp")

_FRAGMENTS: Final = "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"

CALLS: Final[Mapping[str, str]] = {
    "": "nothing",
    "mov.u32 %0, %%tid.x;": "tid",
    "mov.u64 %0, %clock64;": "time",
    "mov.u64 %0, %globaltimer;": "time",
    "fence.acq_rel.gpu;": "nothing",
    "fence.mbarrier_init.release.cluster;": "nothing",
    "prefetch.global.L2 [%0];": "nothing",
    "createpolicy.fractional.L2::evict_first.b64 %0, 1.0;": "nothing",
    "ld.acquire.gpu.global.u32 %0, [%1];": "load32",
    "ld.relaxed.sys.global.u32 %0, [%1];": "load32",
    "ld.relaxed.sys.global.u16 %0, [%1];": "load16",
    "ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];": "load128",
    "ld.acquire.sys.global.u32 %0, [%1];": "load32",
    "ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];": "load128",
    "ld.relaxed.sys.global.u64 %0, [%1];": "load64_sys",
    "st.relaxed.sys.global.u64 [%0], %1;": "store64_sys",
    "st.release.sys.global.u32 [%0], %1;": "store32_sys",
    "st.relaxed.sys.global.u32 [%0], %1;": "store32_sys",
    "st.relaxed.sys.global.u16 [%0], %1;": "store16_sys",
    "st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};": "store128_sys",
    "ld.relaxed.gpu.u32 %0, [%1];": "load32",
    "ld.relaxed.gpu.u16 %0, [%1];": "load16",
    "ld.relaxed.gpu.v4.u32 {%0, %1, %2, %3}, [%4];": "load128",
    "ld.relaxed.gpu.v2.f32 {%0, %1}, [%2];": "load64",
    "{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.relaxed.gpu.v2.f32 {%0, %1}, [%3]; }": "load64_if",
    "{ .reg .pred p; setp.ne.u32 p, %4, 0; @p ld.relaxed.gpu.v4.u32 {%0, %1, %2, %3}, [%5]; }": "load128_if",
    "st.relaxed.gpu.u32 [%0], %1;": "store32",
    "st.relaxed.gpu.u16 [%0], %1;": "store16",
    "st.relaxed.gpu.v2.f32 [%0], {%1, %2};": "store64",
    "st.relaxed.gpu.v4.u32 [%0], {%1, %2, %3, %4};": "store128",
    "red.relaxed.gpu.global.add.u32 [%0], 1;": "add32",
    "ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];": "shared_load128",
    "st.shared.v4.u32 [%0], {%1, %2, %3, %4};": "shared_store128",
    "ld.shared.v2.u32 {%0, %1}, [%2];": "shared_load64",
    "ld.shared.u8 %0, [%1];": "shared_load_byte",
    "st.shared.v2.u32 [%0], {%1, %2};": "shared_store64",
    "mbarrier.init.shared.b64 [%0], %1;": "barrier_init",
    "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }": "barrier_arrive",
    "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }": "barrier_expect",
    "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }": "barrier_test",
    "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }": "barrier_test",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;":
        "bulk_copy",
    "cp.async.cg.shared.global [%0], [%1], 16;": "async_copy16",
    "cp.async.mbarrier.arrive.noinc.shared.b64 [%0];": "barrier_arrive",
    "bar.sync %0, %1;": "named_barrier",
    "{ .reg .pred mine, all; setp.ne.u32 mine, %1, 0; barrier.cta.red.and.pred all, %2, %3, mine; "
    "selp.u32 %0, 1, 0, all; }": "named_barrier_all",
    "max.NaN.f32 %0, %1, %2;": "max_nan",
    "ex2.approx.ftz.f32 %0, %1;": "power_of_two",
    "rcp.approx.ftz.f32 %0, %1;": "reciprocal",
    "max.NaN.bf16x2 %0, %1, %2;": "max_nan_bf16x2",
    "max.NaN.xorsign.abs.bf16x2 %0, %1, %2;": "max_size_bf16x2",
    "max.NaN.f16x2 %0, %1, %2;": "max_nan_f16x2",
    "max.NaN.xorsign.abs.f16x2 %0, %1, %2;": "max_size_f16x2",
    "cvt.rn.bf16x2.f32 %0, %1, %2;": "to_bf16x2",
    "cvt.rn.f16x2.f32 %0, %1, %2;": "to_f16x2",
    "fma.rn.bf16x2 %0, %1, %2, %3;": "fma_bf16x2",
    "fma.rn.f16x2 %0, %1, %2, %3;": "fma_f16x2",
    "cvt.f32.f16 %0, %1;": "from_f16",
    "{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }":
        "from_e4m3",
    "prmt.b32 %0, %1, 0, %2;": "pick_bytes",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 " + _FRAGMENTS: "mma_bf16",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 " + _FRAGMENTS: "mma_f16",
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 " + _FRAGMENTS: "mma_s8",
}  # fmt: skip
"""Template, its white space folded -> what ptx_ function it is."""

_STATEMENT: Final = re.compile(r"\basm(?:\s+volatile)?\s*\(")
_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')

_LAUNCHERS: Final = """
static int launched(int blocks, int threads, size_t shared_bytes, unsigned seed, double limit_s, char* why,
                    size_t room) {
    try {
        return emulator::run(blocks, threads, shared_bytes, seed, limit_s) ? 0 : 1;
    } catch (const emulator::Failure& failure) {
        snprintf(why, room, "%s", failure.what.c_str());
        return 2;
    }
}
extern "C" int emulate_megakernel(const amk_program_t* program, int position, const int32_t* positions, int blocks,
                                  int threads, size_t shared_bytes, unsigned seed, double limit_s, char* why,
                                  size_t room) {
    emulator::entry = [=] { megakernel(program, position, positions); };
    return launched(blocks, threads, shared_bytes, seed, limit_s, why, room);
}
struct HostCopy { char* to; const char* from; size_t bytes; };
struct Memory { const char* first; size_t bytes; };
// Of each launch and rank: `copies` before it and as many behind it. `arenas` are what pushes go to, on each rank.
// `rows` is null, or has the positions of each rank's sequences.
extern "C" int emulate_ranks(const amk_program_t* const* programs, const int* positions, const int32_t* const* rows,
                             const HostCopy* before, const HostCopy* after, int copies, const Memory* arenas,
                             int ranks, int count, int blocks, int threads, size_t shared_bytes, unsigned seed,
                             double limit_s, char* why, size_t room) {
    emulator::Launches launches{ranks, count};
    std::vector<int> at(ranks);
    const auto copy = [=](const HostCopy* first, int rank, int launch) {
        for (int i = 0; i < copies; i++) {
            const HostCopy& each = first[(launch * ranks + rank) * copies + i];
            memcpy(each.to, each.from, each.bytes);
        }
    };
    launches.before = [&](int rank, int launch) { at[rank] = positions[launch]; copy(before, rank, launch); };
    launches.after = [&](int rank, int launch) {
        copy(after, rank, launch);
        const Memory& own = arenas[rank];
        for (const emulator::Far& store : emulator::far_stores) {
            if (store.to >= own.first && store.to < own.first + own.bytes) return false;
        }
        return true;
    };
    emulator::entry = [&] {
        const int rank = emulator::current->warp->block->rank;
        megakernel(programs[rank], at[rank], rows ? rows[rank] : nullptr);
    };
    try {
        return emulator::run(blocks, threads, shared_bytes, seed, limit_s, launches) ? 0 : 1;
    } catch (const emulator::Failure& failure) {
        snprintf(why, room, "%s", failure.what.c_str());
        return 2;
    }
}
extern "C" int emulate_pack_matrix(const element_t* src, element_t* dst, int rows, int width, int blocks, int threads,
                                   size_t shared_bytes, unsigned seed, double limit_s, char* why, size_t room) {
    emulator::entry = [=] { pack_matrix(src, dst, rows, width); };
    return launched(blocks, threads, shared_bytes, seed, limit_s, why, room);
}
extern "C" int emulate_pack_codes(const unsigned char* codes, const unsigned char* scales, const signed char* zeros,
                                  uint32_t* dst, int rows, int width, int group, int rows_per_scale, int scale_dtype,
                                  int format, int blocks, int threads, size_t shared_bytes, unsigned seed,
                                  double limit_s, char* why, size_t room) {
    emulator::entry = [=] {
        pack_codes(codes, scales, zeros, dst, rows, width, group, rows_per_scale, scale_dtype, format);
    };
    return launched(blocks, threads, shared_bytes, seed, limit_s, why, room);
}
extern "C" int emulate_expand_scales(const char* src, float* dst, int rows, int rows_per_scale, int dtype, int blocks,
                                     int threads, size_t shared_bytes, unsigned seed, double limit_s, char* why,
                                     size_t room) {
    emulator::entry = [=] { expand_scales(src, dst, rows, rows_per_scale, dtype); };
    return launched(blocks, threads, shared_bytes, seed, limit_s, why, room);
}
extern "C" int emulate_advance_rows(const int* chosen, int* tokens, int* told, int* place, int* places,
                                    unsigned live, int batch, int blocks, int threads, size_t shared_bytes,
                                    unsigned seed, double limit_s, char* why, size_t room) {
    emulator::entry = [=] { advance_rows(chosen, tokens, told, place, places, live, batch); };
    return launched(blocks, threads, shared_bytes, seed, limit_s, why, room);
}
"""


def translate(sources: Path, unit: str, defines: Mapping[str, str], launchers: str = _LAUNCHERS) -> str:
    """Preprocessed C++ of a unit, with an entry point a kernel. Raises KeyError for PTX that CALLS does not know."""
    if shutil.which("g++") is None:
        pytest.fail("g++ is missing, which builds kernels for the CPU: apt install g++", pytrace=False)
    words = [f"-D{name}={value}" for name, value in defines.items()]
    text = subprocess.run(
        ["g++", "-E", "-P", "-x", "c++", "-std=c++17", "-include", RUNTIME, f"-I{sources}", *words, sources / unit],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return "".join(_calls(text)) + launchers


def _calls(text: str) -> Iterator[str]:
    done = 0
    for found in _STATEMENT.finditer(text):
        if found.start() < done:
            continue
        end = _closing(text, found.end())
        template, *operands = _sections(text[found.end() : end])
        literals = "".join(literal.encode().decode("unicode_escape") for literal in _STRING.findall(template))
        named = CALLS[" ".join(literals.split())]
        given = [each for section in operands[:2] for each in _operands(section)]
        yield text[done : found.start()]
        yield f"ptx_{named}({', '.join(given)})"
        done = end + 1
    yield text[done:]


def _outside_strings(text: str, start: int) -> Iterator[tuple[int, int]]:
    """(place, parentheses open behind it) of every character from `start` on that is in no string."""
    depth, at = 0, start
    while at < len(text):
        if found := _STRING.match(text, at):
            at = found.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        yield at, depth
        at += 1


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that was opened before `start` closes."""
    return next(at for at, depth in _outside_strings(text, start) if depth < 0)


def _sections(text: str) -> list[str]:
    """What the colons outside of parentheses and strings part."""
    cuts = [at for at, depth in _outside_strings(text, 0) if depth == 0 and text[at] == ":"]
    return [text[first + 1 : end] for first, end in pairwise((-1, *cuts, len(text)))]


def _operands(section: str) -> Iterator[str]:
    """The expressions of `"constraint"(expression), ...`."""
    at = section.find("(")
    while at >= 0:
        end = _closing(section, at + 1)
        yield section[at + 1 : end]
        at = section.find("(", end)
