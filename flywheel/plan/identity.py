"""The identity of a program: what it computes and how. Names, provenance and the config are not part of it.

An id begins with the version of the ids: ids of different versions are never compared. So an id has its version
wherever it is stored, and stores, tables and schedules of before stay as they are. Ids of the first version begin with
none.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Final, TypeGuard

from flywheel.ir import MegakernelProgram
from flywheel.plan.variant import KernelVariant, variant_of

_VERSION: Final = "2-"

_FOLLOWING: Final = ("rows", "formats", "ranked")
"""Fields of the kernel variant that follow from the tasks."""

_AS_BEFORE: Final = {"0.4.0": "0.3.0", "0.5.0": "0.3.0", "0.6.0": "0.3.0"}
"""Format version -> the version that ids hold for it. Such a version adds to the format and leaves older programs' ids
as they are."""


def program_id(program: MegakernelProgram) -> str:
    """`2-` and the first 16 hex digits of a SHA-256 over target, kernel variant, buffers, pages and tasks, by value.

    Two configs have equal ids if they lower to the same program and kernel, and so have a program and its copy from a
    file. Raises ConfigError as `variant_of`.
    """
    # Imported here, so that only ids wait for numpy.
    from flywheel.plan.columns import columns_of, text_column

    target = program.target.name if program.target else None
    version = _AS_BEFORE.get(program.ir_version, program.ir_version)
    head = text_column(repr((version, target, _choices(variant_of(program)), program.ranks)))
    return _VERSION + hashlib.sha256(b"".join([head, *columns_of(program)])).hexdigest()[:16]


def is_current(stored: str | None) -> TypeGuard[str]:
    """Whether an id is of this version, so that `program_id` may give it again."""
    return stored is not None and stored.startswith(_VERSION)


def is_another(stored: str | None, found: str) -> bool:
    """Whether an id from a file or a store is of another program than the id that was found now. One of another version
    of ids does not say."""
    return is_current(stored) and stored != found


def _choices(variant: KernelVariant) -> list[tuple[str, int]]:
    """The fields of a variant that do not follow from the tasks. Those that have a default count where they differ from
    it, so that a field that is added leaves ids as they are."""
    named = [(each.name, getattr(variant, each.name), each.default) for each in fields(variant)]
    return [(name, value) for name, value, usual in named if name not in _FOLLOWING and value != usual]
