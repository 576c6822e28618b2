"""Buffers that one SM owns, and pages that several buffers share."""

from __future__ import annotations

from flywheel.ir.dtype import PER_SM_SPACES, BufferKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.validate.findings import Findings
from flywheel.ir.validate.races import Accesses


def check_per_sm_buffers(program: MegakernelProgram, findings: Findings) -> None:
    """Once SMs are assigned, all users of an SMEM or REGISTER buffer (or page) share one SM."""
    private = {buffer.id for buffer in program.buffers if buffer.space in PER_SM_SPACES}
    if program.pages is not None:
        on_chip = {page.id for page in program.pages.pages if page.space in PER_SM_SPACES}
        private |= {buffer for buffer, page in program.pages.buffer_to_page.items() if page in on_chip}
    if not private:
        return
    owner: dict[int, int] = {}
    for task in program.tasks:
        if task.sm is None:
            continue
        for buffer in private.intersection((*task.inputs, *task.outputs)):
            if owner.setdefault(buffer, task.sm) != task.sm:
                findings.error(
                    "per-sm-buffer",
                    f"task {task.id} ({task.label}): uses on-chip buffer {buffer} of SM {owner[buffer]} from SM {task.sm}",
                    task.id,
                )
        if findings.full:
            return


def check_pages(program: MegakernelProgram, accesses: Accesses, findings: Findings) -> None:
    """Pages exist, are large enough, and are reused only after every use of their former buffer."""
    if program.pages is None:
        return
    buffers = {buffer.id: buffer for buffer in program.buffers}
    pages = {page.id: page for page in program.pages.pages}
    residents: dict[int, list[int]] = {}
    for number, page_number in sorted(program.pages.buffer_to_page.items()):
        buffer, page = buffers.get(number), pages.get(page_number)
        if buffer is None or page is None:
            missing = f"buffer {number}" if buffer is None else f"page {page_number}"
            findings.error("bad-page", f"buffer {number} -> page {page_number}: no {missing}")
        elif buffer.kind is not BufferKind.ACTIVATION:
            findings.error("bad-page", f"buffer {number} ({buffer.name}): a {buffer.kind.name} cannot be paged")
        elif buffer.nbytes > page.nbytes:
            findings.error(
                "bad-page", f"buffer {number} ({buffer.name}): {buffer.nbytes} bytes do not fit page {page.id} of {page.nbytes}"
            )
        else:
            residents.setdefault(page_number, []).append(number)
    for page_number, members in residents.items():
        _check_page(page_number, members, accesses, findings)
        if findings.full:
            return


def _check_page(page: int, members: list[int], accesses: Accesses, findings: Findings) -> None:
    written = sorted((accesses.first_write[buffer], buffer) for buffer in members if buffer in accesses.first_write)
    for (_, earlier), (_, later) in zip(written, written[1:], strict=False):
        if not accesses.all_uses_before_writes(earlier, later):
            findings.warn(
                "page-alias", f"page {page}: buffer {later} may be written while buffer {earlier} is still in use"
            )
