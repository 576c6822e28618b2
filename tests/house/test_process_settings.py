from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

OWNERS = ("flywheel/process.py", "flywheel/__main__.py", "flywheel/lifetime.py")
"""The second one handles signals before anything is imported; the third one is also a program of its own."""
MODULES = ("gc", "resource", "threadpoolctl")
"""What nothing but the owners imports."""
SETTERS = re.compile(
    r"""torch\.(set_\w+|use_deterministic_algorithms|backends)\b
    | signal\.(signal|pthread_sigmask|siginterrupt|set_wakeup_fd|setitimer|alarm)$
    | os\.(putenv|unsetenv|umask|nice|sched_setaffinity|environ\.(update|setdefault|pop|popitem|clear))$
    | sys\.(setrecursionlimit|setswitchinterval)$
    | (np|numpy)\.(seterr|set_printoptions)$
    | faulthandler\.\w+ | locale\.setlocale$ | multiprocessing\.set_start_method$""",
    re.VERBOSE,
)


def settings(tree: ast.AST) -> Iterator[str]:
    """What a module does to its whole process."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names if SETTERS.match(f"{module}.{alias.name}"))
                yield from (module for name in MODULES if module == name)
            case ast.Attribute() if SETTERS.match(ast.unparse(node)):
                yield ast.unparse(node)
            case ast.Subscript(ctx=ast.Store() | ast.Del()) if ast.unparse(node.value) == "os.environ":
                yield ast.unparse(node)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import gc\ngc.disable()", True),
        ("torch.set_num_threads(1)", True),
        ("matmul = torch.backends.cuda.matmul", True),
        ("from threadpoolctl import threadpool_limits", True),
        ("from signal import signal", True),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})", True),
        ("os.environ['OMP_NUM_THREADS'] = '1'", True),
        ("del os.environ[name]", True),
        ("os.environ.setdefault(name, value)", True),
        ("os.environ.get(name)", False),
        ("env = {**os.environ, **quiet}", False),
        ("os.killpg(pid, signal.SIGTERM)", False),
        ("torch.zeros(3)", False),
    ],
)
def test_what_changes_a_process_is_told_from_what_does_not(source: str, found: bool) -> None:
    assert bool(list(settings(ast.parse(source)))) is found


def test_no_other_module_sets_what_holds_for_a_whole_process(root: Path, product: list[Path]) -> None:
    setters = {
        path.relative_to(root).as_posix(): sorted({*settings(ast.parse(path.read_text(encoding="utf-8")))})
        for path in product
    }
    assert all(setters.pop(owner) for owner in OWNERS)
    assert {name: found for name, found in setters.items() if found} == {}
