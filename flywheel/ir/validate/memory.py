"""Buffers that one SM owns, and pages that several buffers share."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from flywheel.ir.dtype import PER_SM_SPACES, BufferKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Page
from flywheel.ir.validate.findings import Findings
from flywheel.ir.validate.races import Accesses


def check_per_sm_buffers(program: MegakernelProgram, findings: Findings) -> None:
    """Check that all users of an SMEM or REGISTER buffer (or page) share one SM, where SMs are assigned."""
    private = {buffer.id for buffer in program.buffers if buffer.space in PER_SM_SPACES}
    if program.pages is not None:
        on_chip = {page.id for page in program.pages.pages if page.space in PER_SM_SPACES}
        private |= {buffer for buffer, page in program.pages.buffer_to_page.items() if page in on_chip}
    if not private:
        return
    owner: dict[int, tuple[int, int]] = {}
    for task in program.tasks:
        if task.sm is None:
            continue
        for buffer in private.intersection((*task.inputs, *task.outputs)):
            if owner.setdefault(buffer, (task.rank, task.sm)) != (task.rank, task.sm):
                what = f"on-chip buffer {buffer} of SM {owner[buffer][1]} from SM {task.sm}"
                findings.error("per-sm-buffer", f"task {task.id} ({task.label}): uses {what}", task.id)
        if findings.full:
            return


def check_pages(program: MegakernelProgram, accesses: Accesses, findings: Findings) -> None:
    """Check that pages exist, are large enough, and are reused only after every use of their former buffer."""
    if program.pages is None:
        return
    pages = {page.id: page for page in program.pages.pages}
    residents: dict[int, list[int]] = {}
    homes: dict[int, int] = {}
    for number, page_number in sorted(program.pages.buffer_to_page.items()):
        fault = _misfit(number, page_number, accesses.buffers, pages)
        if fault is None:
            rank = accesses.buffers[number].rank
            home = homes.setdefault(page_number, rank)
            fault = None if home == rank else f"buffer {number} of rank {rank} -> page {page_number} of rank {home}"
        if fault is not None:
            findings.error("bad-page", fault)
            if findings.full:
                return
        elif number in accesses.writes:
            residents.setdefault(page_number, []).append(number)
    shared = {number for members in residents.values() if len(members) > 1 for number in members}
    if shared:
        lives = Lives(accesses, shared)
        for page_number, members in residents.items():
            lives.check_page(page_number, members, findings)
            if findings.full or findings.enough("page-alias"):
                return


def _misfit(number: int, page_number: int, buffers: Mapping[int, Buffer], pages: Mapping[int, Page]) -> str | None:
    buffer, page = buffers.get(number), pages.get(page_number)
    if buffer is None or page is None:
        missing = f"buffer {number}" if buffer is None else f"page {page_number}"
        return f"buffer {number} -> page {page_number}: no {missing}"
    if buffer.kind is not BufferKind.ACTIVATION:
        return f"buffer {number} ({buffer.name}): a {buffer.kind.name} cannot be paged"
    if buffer.nbytes > page.nbytes:
        return f"buffer {number} ({buffer.name}): {buffer.nbytes} bytes do not fit page {page.id} of {page.nbytes}"
    return None


class Lives:
    """First write, last uses and writers of the buffers that share pages."""

    __slots__ = ("_accesses", "_first_write", "_used", "_writer_classes")

    def __init__(self, accesses: Accesses, shared: set[int]) -> None:
        self._accesses = accesses
        tasks, wait_class, ranks = accesses.tasks, accesses.order.wait_class, accesses.ranks
        signals: dict[int, set[int]] = {number: set() for number in shared}
        self._first_write: dict[int, int] = {}
        self._writer_classes: dict[int, set[int]] = {}
        for number in shared:
            writers = [index for _, _, index in accesses.writes[number]]
            self._first_write[number] = min([ranks[index] for index in writers])
            self._writer_classes[number] = {wait_class[index] for index in writers}
            signals[number].update([tasks[index].out_counter for index in writers])
        keys = zip([id(task.inputs) for task in tasks], [task.out_counter for task in tasks], strict=True)
        for task in dict(zip(keys, tasks, strict=True)).values():
            for number in shared.intersection(task.inputs):
                signals[number].add(task.out_counter)
        self._used = {number: tuple(sorted(counters)) for number, counters in signals.items()}

    def check_page(self, page: int, members: list[int], findings: Findings) -> None:
        """Check each member of a page, in order of first write: it is written only after every use of the one before.

        A member's writes are uses, too. So what holds for consecutive members holds for all.
        """
        written = sorted((self._first_write[number], number) for number in members) if len(members) > 1 else []
        for (_, earlier), (_, later) in pairwise(written):
            if not self.pass_on(earlier, later):
                findings.warn(
                    "page-alias", f"page {page}: buffer {later} may be written while buffer {earlier} is still in use"
                )
                if findings.full or findings.enough("page-alias"):
                    return

    def pass_on(self, earlier: int, later: int) -> bool:
        """Whether all uses of buffer `earlier` are done before buffer `later` is written."""
        order, done = self._accesses.done, self._used[earlier]
        return all(order.reached(done, group) for group in self._writer_classes[later])
