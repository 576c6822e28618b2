"""Replay: works, and digests of everything that the code makes of each, from its document to its packed tables.

A file keeps what a commit made of some hundred works, a line for each. A later commit makes the same, or says which
difference it means (`experiments/replay.py`). Everything in the file is the same on every machine: the reference VM's
numbers are not, since their last bits depend on the CPU, so of those it has the verdict and the tokens that no rounding
can change.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from flywheel.cost_model import predict, timeline
from flywheel.decode.reference import ReferenceSession
from flywheel.errors import FlywheelError, UnknownNameError
from flywheel.ir import TARGETS, MegakernelProgram, ScheduleConfig, program_from_dict, validate
from flywheel.ir.writing import program_pieces, program_to_dict
from flywheel.judge.verdicts import verify
from flywheel.lowering.lower import lower
from flywheel.measure.verdict import FREE_RUNNING
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import DTYPES
from flywheel.models.drawn import random_quantised
from flywheel.models.rope import LinearRope, ProportionalRope, Rope, RopeScaling, YarnRope
from flywheel.models.spec import DecoderSpec
from flywheel.plan import program_id
from flywheel.plan.kernels import arch_name
from flywheel.process import one_torch_thread
from flywheel.search.knobs import KNOBS
from flywheel.search.space import Space, make_space
from flywheel.search.workload import Workload, gpus_of
from flywheel.store.schedule import shipped_schedules
from flywheel.vm.gpu.nvrtc import defines_of
from flywheel.vm.gpu.sources import SOURCES
from flywheel.vm.pack import PackedProgram, RankMemory, images_table, pack_any, ranks_table

FILE: Final = Path(__file__).parent / "golden" / "replay.tsv"
KERNELS: Final = FILE.with_name("kernels.tsv")
DRAWN: Final = 300
"""Works with a drawn schedule. The shipped schedules are works, too."""
UNLIKE: Final = 12
"""Works of models with several kinds of layers."""
LATER: Final = 1000
"""Number of the first work of a further family."""

_TINY: Final = (
    DecoderSpec("llama-tiny", "llama", 64, 96, 2, 4, 2, 16, 160, 1e4, 1e-5, 512,
                tied_head=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)),
    DecoderSpec("llama-deep", "llama", 128, 256, 5, 8, 4, 32, 300, 5e5, 1e-5, 512),
    DecoderSpec("mistral-tiny", "mistral", 128, 384, 4, 4, 4, 32, 256, 1e6, 1e-5, 512),
    DecoderSpec("mistral-three", "mistral", 192, 384, 1, 6, 3, 64, 500, 1e4, 1e-5, 512),
    DecoderSpec("qwen2-tiny", "qwen2", 128, 256, 3, 4, 2, 32, 320, 1e6, 1e-6, 512, qkv_bias=True),
    DecoderSpec("qwen2-tied", "qwen2", 256, 512, 1, 8, 2, 32, 400, 1e6, 1e-6, 512, tied_head=True, qkv_bias=True),
    DecoderSpec("qwen3-odd", "qwen3", 80, 112, 2, 4, 1, 16, 170, 1e4, 1e-6, 512, qk_norm=True),
    DecoderSpec("qwen3-deep", "qwen3", 128, 384, 6, 4, 2, 64, 640, 1e6, 1e-6, 512, tied_head=True, qk_norm=True),
    DecoderSpec("qwen3-biased", "qwen3", 128, 256, 4, 4, 4, 32, 200, 1e6, 1e-6, 512, qkv_bias=True, qk_norm=True),
)  # fmt: skip
_MIDDLE: Final = (
    DecoderSpec("llama-middle", "llama", 1024, 2816, 6, 16, 4, 64, 8000, 5e5, 1e-5, 4096),
    DecoderSpec("qwen2-middle", "qwen2", 896, 2432, 5, 14, 2, 64, 6000, 1e6, 1e-6, 4096, qkv_bias=True),
    DecoderSpec("qwen3-middle", "qwen3", 768, 2304, 9, 12, 6, 64, 5000, 1e6, 1e-6, 4096, qk_norm=True),
)  # fmt: skip
_UNLIKE: Final = (
    DecoderSpec("smollm3-tiny", "smollm3", 64, 96, 3, 12, 12, 16, 160, 1e6, 1e-6, 512, tied_head=True,
                turned=(True, False)),
    DecoderSpec("smollm3-deep", "smollm3", 64, 192, 9, 12, 1, 16, 200, 1e6, 1e-6, 512, turned=(True, False)),
)
"""Models of several kinds of layers. They have works of their own, behind all others."""
_FURTHER: Final = (
    DecoderSpec("granite-tiny", "granite", 64, 96, 3, 4, 2, 16, 160, 1e4, 1e-5, 512, tied_head=True, embed_scale=12.0,
                residual_scale=0.22, attention_scale=0.2, logits_scale=0.125),
    DecoderSpec("olmo2-tiny", "olmo2", 64, 96, 3, 4, 2, 16, 160, 5e5, 1e-6, 512, norms="behind", qk_norm=True,
                wide_qk_norm=True),
    DecoderSpec("phi3-tiny", "phi3", 64, 96, 3, 4, 2, 16, 160, 1e4, 1e-5, 512, rotary_dim=12),
    DecoderSpec("glm-tiny", "glm", 64, 96, 3, 4, 2, 16, 160, 1e4, 1e-5, 512, qkv_bias=True, rotary_dim=8),
    DecoderSpec("cohere2-tiny", "cohere2", 64, 96, 4, 4, 2, 16, 160, 1e4, 1e-5, 512, tied_head=True, norm="layer",
                norms="shared", logits_scale=0.25, window=512, windowed=(True, True, True, False), nope_full=True),
    DecoderSpec("starcoder2-tiny", "starcoder2", 64, 96, 3, 4, 2, 16, 160, 1e4, 1e-5, 512, qkv_bias=True, o_bias=True,
                mlp_bias=True, norm="layer", norm_bias=True, gated=False, activation="gelu_tanh"),
    DecoderSpec("mistral-window", "mistral", 64, 96, 4, 4, 2, 16, 160, 1e4, 1e-5, 512, window=21),
    DecoderSpec("ministral-tiny", "ministral", 64, 96, 5, 4, 2, 32, 160, 1e4, 1e-5, 512, window=7,
                windowed=(True, False, True, False, True)),
    DecoderSpec("gemma2-tiny", "gemma2", 64, 96, 4, 4, 2, 16, 160, 1e4, 1e-6, 512, tied_head=True, norms="around",
                norm_offset=1.0, activation="gelu_tanh", embed_scale=8.0, embed_scale_rounds=True, attention_scale=0.3,
                attention_cap=3.0, logits_cap=2.0, window=50, windowed=(True, False) * 2),
    DecoderSpec("gemma3-tiny", "gemma3_text", 96, 96, 6, 4, 2, 16, 160, 1e6, 1e-6, 512, norms="around", norm_offset=1.0,
                activation="gelu_tanh", embed_scale=96**0.5, embed_scale_rounds=True, attention_scale=0.3, qk_norm=True,
                window=40, windowed=(True, True, False) * 2, local_rope=Rope(100.0), rope_scaling=LinearRope(8.0)),
    DecoderSpec("olmo3-tiny", "olmo3", 64, 96, 4, 4, 2, 16, 160, 5e5, 1e-6, 512, norms="behind", qk_norm=True,
                wide_qk_norm=True, window=24, windowed=(True, False) * 2, local_rope=Rope(5e5),
                rope_scaling=LinearRope(4.0)),
    DecoderSpec("cohere-tiny", "cohere", 64, 96, 3, 4, 2, 16, 160, 1e4, 1e-5, 512, tied_head=True, norm="layer",
                norms="shared", logits_scale=0.25),
    DecoderSpec("glm4-tiny", "glm4", 64, 96, 3, 4, 2, 16, 160, 1e4, 1e-5, 512, norms="around", rotary_dim=8),
    DecoderSpec("granite4-tiny", "granitemoehybrid", 64, 96, 3, 4, 2, 16, 160, 1e4, 1e-5, 512, turned=(False,),
                embed_scale=12.0, residual_scale=0.22, attention_scale=0.2, logits_scale=0.125),
    DecoderSpec("gemma-tiny", "gemma", 64, 96, 3, 4, 2, 16, 160, 1e4, 1e-6, 512, tied_head=True, norm_offset=1.0,
                activation="gelu_tanh", embed_scale=8.0, embed_scale_rounds=True),
    DecoderSpec("gemma4-tiny", "gemma4_text", 96, 96, 6, 4, 2, 16, 160, 1e6, 1e-6, 512, tied_head=True, norms="around",
                activation="gelu_tanh", embed_scale=96**0.5, embed_scale_rounds=True, attention_scale=0.5, qk_norm=True,
                v_norm=True, layer_scalar=True, logits_cap=2.0, window=40, windowed=(True, True, False) * 2,
                local_rope=Rope(100.0), rope_scaling=ProportionalRope(0.25), full_head_dim=32, full_kv_heads=1,
                full_k_is_v=True),
    DecoderSpec("gemma4-unified", "gemma4_unified_text", 64, 96, 3, 4, 2, 16, 160, 1e6, 1e-6, 512, norms="around",
                activation="gelu_tanh", embed_scale=8.0, embed_scale_rounds=True, attention_scale=0.5, qk_norm=True,
                v_norm=True, layer_scalar=True, window=512, windowed=(True, True, False), full_head_dim=32),
    DecoderSpec("ministral3-tiny", "ministral3", 64, 96, 3, 4, 2, 16, 160, 1e4, 1e-5, 512,
                rope_scaling=YarnRope(16.0, 256, 1.0)),
    DecoderSpec("llama-past", "llama", 128, 96, 3, 4, 2, 64, 160, 1e4, 1e-5, 512),
    DecoderSpec("qwen3-past", "qwen3", 128, 96, 3, 4, 2, 128, 160, 1e4, 1e-5, 512, qk_norm=True),
    DecoderSpec("mistral-past", "mistral", 128, 96, 4, 4, 2, 64, 160, 1e4, 1e-5, 512, window=150),
)  # fmt: skip
"""Models of further families, and of heads whose past rows may be streamed. Each has works of its own, two for a new
one behind all others."""
MODELS: Final[Mapping[str, DecoderSpec]] = {spec.name: spec for spec in (*_TINY, *_MIDDLE, *_UNLIKE, *_FURTHER)}
_JUDGED: Final = tuple([spec.name for spec in (*_TINY, *_UNLIKE, *_FURTHER)])
_FORMATS: Final = (
    "-", "-", "-", "int4", "int4-g64", "int4-g32-zeros", "int4-g32-f32", "int8", "int8-tensor", "int8-g32-zeros",
    "fp8", "fp8-block", "fp8-tensor", "int4-g32,lm_head=int8", "int8,down_proj=fp8", "fp8,o_proj=int4-g32-zeros",
)  # fmt: skip
_ROWS: Final = ((1, 1), (1, 1), (1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (4, 4), (8, 8), (8, 4), (6, 3))
"""(rows of a step, lanes of a sequence)."""

_DIGITS: Final = 6
_COMMENT: Final = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_NONE: Final = "-"
_SHOWN: Final = 1500
"""Most tasks of a program of which damaged copies are proved, and whose step the reference VM runs."""

_PRECISION: Final = 1e-9
"""Relative difference of predicted times that another CPU's rounding may explain."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step to schedule, and how. `batch` counts rows, `sms` the SMs of a GPU, `schedule` is `drawn`, `default` or a
    shipped schedule's name, and `choice` a drawn schedule's value of each knob."""

    number: int
    model: str
    dtype: str
    weights: str
    gpu: str
    sms: int
    ranks: int
    batch: int
    lanes: int
    context: int
    schedule: str
    choice: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return " ".join([str(getattr(self, name)) for name in _WORDS])

    @property
    def spec(self) -> DecoderSpec:
        """The model's sizes."""
        return MODELS[self.model] if self.model in MODELS else CATALOG[self.model]

    def workload(self) -> Workload:
        """What the search calls it."""
        target = TARGETS[self.gpu]
        target = target if target.num_sms == self.sms else replace(target, num_sms=self.sms)
        weights = None if self.weights == _NONE else self.weights
        return Workload(self.model, self.spec, target, self.dtype, self.context, self.batch, weights, self.ranks)

    def config(self) -> ScheduleConfig:
        """Its schedule. Raises UnknownNameError for one that is shipped no more."""
        if self.schedule == "default":
            return ScheduleConfig()
        if self.schedule != "drawn":
            shipped = {each.stem: each.schedule.config for each in shipped_schedules()}
            if self.schedule not in shipped:
                raise UnknownNameError(f"schedule {self.schedule!r} is not shipped")
            return shipped[self.schedule]
        values = {name: int(value) if value.isdigit() else value for name, value in self.choice}
        return make_space(self.workload()).to_config(values)

    def lowered(self) -> MegakernelProgram:
        """Its program. Raises as `config` and `lower` do."""
        workload = self.workload()
        return lower(workload.graph_of(self.lanes), self.config(), workload.target)


_WORDS: Final = tuple(each.name for each in fields(Work) if each.name != "choice")
_KINDS: Final = tuple(int if each.type == "int" else str for each in fields(Work) if each.name != "choice")
Found = dict[str, str]
"""Column -> cell."""


def draw() -> list[Work]:
    """The works that a new file has. They depend on the search space as it is."""
    shipped = of_shipped(DRAWN)
    alike = [spec.name for spec in (*_TINY, *_MIDDLE)]
    drawn = [_drawn(number, alike) for number in range(DRAWN)]
    first = DRAWN + len(shipped)
    unlike = [_drawn(number, [spec.name for spec in _UNLIKE]) for number in range(first, first + UNLIKE)]
    return [*drawn, *shipped, *unlike, *further()]


def of_shipped(first: int, known: Collection[str] = ()) -> list[Work]:
    """The works of shipped schedules, but for those `known` by name, numbered from `first`."""
    works: list[Work] = []
    for each in shipped_schedules():
        found = each.schedule
        ranks, gpu = gpus_of(found.gpu)
        weights = _NONE if found.weights == found.dtype else found.weights
        if each.stem not in known:
            works.append(
                Work(first + len(works), found.model, found.dtype, weights, gpu, TARGETS[gpu].num_sms, ranks,
                     found.batch, 1, found.context, each.stem, ())
            )  # fmt: skip
    return works


def further() -> list[Work]:
    """The works of further families: one on one GPU, and one on two where these can share it."""
    works = []
    for place, spec in enumerate(_FURTHER):
        works.append(_drawn(LATER + 2 * place, [spec.name], 1))
        alone = spec.wide_qk_norm or len(spec.layer_kinds) > 1
        works.append(_drawn(LATER + 2 * place + 1, [spec.name], 1 if alone else 2))
    return works


def _drawn(number: int, models: Sequence[str], wanted: int | None = None) -> Work:
    """A work of one of the models that the kernels run; of every 25th the first that was drawn, which they mostly
    run. It is for so many GPUs as are `wanted`, if lanes allow it."""
    chance, gpus = random.Random(f"replay {number}"), ["h100", "h200", *TARGETS]
    gpu, (batch, lanes) = gpus[number % len(gpus)], _ROWS[number % len(_ROWS)]
    ranks = 1 if lanes > 1 else wanted or (1, 1, 2, 3, 4)[number // len(_ROWS) % 5]
    while True:
        model = chance.choice([*models, *[spec.name for spec in _MIDDLE if spec.name in models]])
        work = Work(
            number, model, chance.choice(("bf16", "bf16", "f16", "f32")), chance.choice(_FORMATS), gpu,
            chance.choice((6, 6, 16, TARGETS[gpu].num_sms)), ranks, batch, lanes,
            chance.choice((9, 48, 64, 100, 257) if model in _JUDGED else (64, 512, 2000)),
            "default" if number % 20 == 7 else "drawn", (),
        )  # fmt: skip
        try:
            space = make_space(work.workload())
            work = replace(work, choice=_choice(space, chance) if work.schedule == "drawn" else ())
            if number % 25:
                pack_any(work.lowered())
        except FlywheelError:
            continue
        return work


def _choice(space: Space, chance: random.Random) -> tuple[tuple[str, str], ...]:
    return tuple([(each.name, str(chance.choice(each.values))) for each in space.dimensions])


def results_of(work: Work) -> Found:
    """What the code makes of a work."""
    found = {"refused": _NONE}
    try:
        found["config"] = work.config().config_id
        program = work.lowered()
        found |= _of_program(program)
        found |= _of_tables(program)
        prediction = predict(program)
    except FlywheelError as error:
        return {**found, "refused": type(error).__name__}
    found |= {"latency_us": repr(prediction.latency_us), "floor_us": repr(prediction.floor_us)}
    spans = timeline(program)
    found["starts_us"] = repr(math.fsum([span.start_us for span in spans]))
    found["ends_us"] = repr(math.fsum([span.end_us for span in spans]))
    if work.model in _JUDGED and len(program.tasks) <= _SHOWN:
        found["mutants"] = " ".join([_codes(program_from_dict(each)) for each in _damaged(program, work.number)])
        found["verdict"], found["tokens"] = _judged(work, program)
    return found


def digest(pieces: Iterable[bytes]) -> str:
    """The first digits of a SHA-256."""
    made = sha256()
    for each in pieces:
        made.update(each)
    return made.hexdigest()[:_DIGITS]


def _of(value: object) -> str:
    return digest([repr(value).encode()])


def _of_program(program: MegakernelProgram) -> Found:
    return {
        "id": program_id(program),
        "document": digest(piece.encode() for piece in program_pieces(program)),
        "findings": _codes(program),
    }


def _codes(program: MegakernelProgram) -> str:
    """`ok`, or the codes of what the proof finds."""
    result = validate(program, strict=True)
    codes = sorted({each.code for each in (*result.errors, *result.warnings)})
    return ("" if result.ok else "not-") + "ok" + "".join([f",{code}" for code in codes])


def _of_tables(program: MegakernelProgram) -> Found:
    """What the kernel is given: its architecture and defines, its variant, and the tables, over all GPUs."""
    packed = pack_any(program)
    parts = (packed,) if isinstance(packed, PackedProgram) else packed.parts
    variant = parts[0].variant
    defines = defines_of(
        variant.threads, parts[0].dtype, variant.matrix_warps, variant.rows, variant.formats, ranked=variant.ranked,
        features=variant.features,
    )
    given = " ".join([arch_name(variant.sm_arch), *[f"{name}={value}" for name, value in defines.items()]])
    found = {"kernel": given.replace("FW_", ""), "variant": _of([each.variant for each in parts])}
    for name in ("buffers", "instructions", "steps", "segments"):
        tables = [getattr(each, name) for each in parts]
        found |= {f"{name}.{member}": digest(each) for member, each in _members(tables)}
    for name in ("queues", "segment_buffers", "streams", "floats"):
        found[name] = digest([getattr(each, name).tobytes() for each in parts])
    arenas = [(sorted(each.arena.offsets.items()), each.arena.nbytes, each.arena.awaited_bytes) for each in parts]
    found["arena"] = _of(arenas)
    found["coded"] = _of([sorted(map(_coded, each.coded.items())) for each in parts])
    sizes = ("n_counters", "workspace_stride", "pass_blocks", "last_position", "fixed_position", "arrivals", "lanes")
    found["sizes"] = _of([[*[getattr(each, name) for name in sizes], sorted(each.sums.items())] for each in parts])
    if len(parts) > 1:
        memories = [RankMemory(1 << 40 + rank, 1 << 30 + rank) for rank in range(len(parts))]
        images = [images_table(parts, rank, memories) for rank in range(len(parts))]
        found["ranks"] = digest(
            [*[each.tobytes() for each in images], *[ranks_table(each, memories, 0).tobytes() for each in parts]]
        )
    return found


def _members(tables: Sequence[npt.NDArray[np.void]]) -> Iterator[tuple[str, list[bytes]]]:
    """Each member of a struct, with its bytes in each table. Members of a union count as one."""
    dtype = tables[0].dtype
    assert dtype.fields is not None
    raw = [np.ascontiguousarray(each).view(np.uint8).reshape(-1, dtype.itemsize) for each in tables]
    for name, (member, start, *_) in dtype.fields.items():
        yield name, [each[:, start : start + member.itemsize].tobytes() for each in raw]


def _coded(entry: tuple[int, Any]) -> tuple[int, ...]:
    row, coded = entry
    return row, coded.coding.number, coded.scales, coded.zeros, coded.group, coded.rows_per_scale


def _damaged(program: MegakernelProgram, number: int) -> Iterator[dict[str, Any]]:
    """Four documents of the program, each with one thing wrong in a task."""
    document = program_to_dict(program)
    tasks = document["tasks"]
    for turn in range(4):
        chance = random.Random(f"mutant {number} {turn}")
        place = chance.randrange(len(tasks))
        changed = _changed(tasks[place], turn, chance, document)
        yield {**document, "tasks": [*tasks[:place], *changed, *tasks[place + 1 :]]}


def _changed(
    task: dict[str, Any], turn: int, chance: random.Random, document: dict[str, Any]
) -> list[dict[str, Any]]:
    """What stands in a task's place: one with fewer waits, another operand or other columns, or none."""
    if turn == 0:
        waits = task["waits"]
        return [{**task, "waits": waits[:-1] if waits else [{"counter": task["out_counter"], "threshold": 1}]}]
    if turn == 1:
        side = chance.choice([name for name in ("inputs", "outputs") if task[name]])
        other = chance.choice(document["buffers"])["id"]
        return [{**task, side: [other, *task[side][1:]]}]
    if turn == 2:
        names = [name for name, value in task["params"].items() if type(value) is int] or ["K"]
        name = chance.choice(names)
        return [{**task, "params": {**task["params"], name: task["params"].get(name, 0) + chance.choice((-1, 1, 16))}}]
    return []


def _judged(work: Work, program: MegakernelProgram) -> tuple[str, str]:
    """(whether the reference VM's tensors are the oracle's, for one lane; its tokens, but for those that another CPU's
    rounding may change)."""
    workload = work.workload()
    with torch.no_grad(), one_torch_thread():
        weights = random_quantised(work.spec, work.number, workload.formats, DTYPES[work.dtype])
        session = ReferenceSession(program, work.spec, weights)
        verdict = _NONE
        if work.lanes == 1:
            examined = verify(session, weights, (work.context // 2, work.context - 1), work.number)
            verdict = "passed" if examined.passed else f"failed: {examined.where}"
        chance = random.Random(f"tokens {work.number}")
        place = min(3, work.context - work.lanes)
        for row in range(session.batch):
            session.prefill([chance.randrange(work.spec.vocab) for _ in range(place)], row)
        rows = session.batch * session.lanes
        steps = session.step_rows([chance.randrange(work.spec.vocab) for _ in range(rows)], [place] * session.batch)
    bound = FREE_RUNNING[DTYPES[work.dtype].name]
    sure = []
    for step in steps:
        first, second = step.logits.float().topk(2).values.tolist()
        sure.append(first - second > bound * float(step.logits.float().abs().max()))
    return verdict, " ".join([str(step.token) if clear else "?" for step, clear in zip(steps, sure, strict=True)])


def kernel_sources(folder: Path = SOURCES) -> Found:
    """File -> digest of its text without comments and blanks."""
    return {
        path.relative_to(folder).as_posix(): _of(_bare(path.read_text(encoding="utf-8")))
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".cu", ".cuh", ".h")
    }


def _bare(source: str) -> list[str]:
    """The words of a source: comments go, and where blanks are does not count."""
    return _COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else " ", source).split()


def write(works: Sequence[Work], results: Sequence[Found], path: Path = FILE) -> None:
    """Write the file: a line for each work, its words, knobs and results in columns."""
    knobs = [knob.name for knob in KNOBS]
    columns = list(dict.fromkeys(chain.from_iterable(sorted(results, key=len, reverse=True))))
    lines = [[*_WORDS, *knobs, *columns]]
    for work, found in zip(works, results, strict=True):
        choice = dict(work.choice)
        lines.append(
            [*[str(getattr(work, name)) for name in _WORDS], *[choice.get(name, _NONE) for name in knobs],
             *[found.get(name, _NONE) for name in columns]]
        )  # fmt: skip
    path.write_text("".join(["\t".join(line) + "\n" for line in lines]), encoding="utf-8")


def read(path: Path = FILE) -> list[tuple[Work, Found]]:
    """The works of a file, each with its results."""
    head, *lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    knobs, first = slice(len(_WORDS), head.index("refused")), head.index("refused")
    found = []
    for line in lines:
        words = [kind(cell) for kind, cell in zip(_KINDS, line, strict=False)]
        choice = tuple([pair for pair in zip(head[knobs], line[knobs], strict=True) if pair[1] != _NONE])
        found.append((Work(*words, choice), dict(zip(head[first:], line[first:], strict=True))))
    return found


def differences(kept: Found, found: Found) -> list[str]:
    """The columns that differ, in order, with both cells."""
    names = dict.fromkeys([*kept, *found])
    pairs = [(name, kept.get(name, _NONE), found.get(name, _NONE)) for name in names]
    return [f"{name}: was {was}, is {now}" for name, was, now in pairs if not _alike(name, was, now)]


def renewed(kept: Found, found: Found) -> Found:
    """What was found, with the kept cell where only rounding differs: so a new file differs from the old one by what
    changed."""
    return {name: kept[name] if name in kept and _alike(name, kept[name], now) else now for name, now in found.items()}


def _alike(name: str, was: str, now: str) -> bool:
    if name.endswith("_us") and _NONE not in (was, now):
        return math.isclose(float(was), float(now), rel_tol=_PRECISION)
    if name == "tokens":
        words = was.split(), now.split()
        alike = len(words[0]) == len(words[1])
        return alike and all("?" in pair or pair[0] == pair[1] for pair in zip(*words, strict=True))
    return was == now


def write_kernels(path: Path = KERNELS) -> None:
    """Write the digests of the kernels' sources."""
    path.write_text("".join([f"{name}\t{made}\n" for name, made in kernel_sources().items()]), encoding="utf-8")


def read_kernels(path: Path = KERNELS) -> Found:
    """What `write_kernels` wrote."""
    return dict(line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
