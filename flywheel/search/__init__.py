"""Where to look. The package is callable: `flywheel.search(model=..., gpu=...)` is `flywheel.api.searching.search`."""

from __future__ import annotations

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package and a function share the name `flywheel.search`, and importing a package rebinds its parent's name to
    it: a function of that name in `flywheel` would be gone after its own first call. Python lets a module have a class
    of its own; type checkers see the function, which `flywheel` declares."""

    @property
    def __signature__(self) -> Signature:
        """The function's, for `inspect.signature` and what completes and documents by it."""
        from flywheel.api.searching import search

        return signature(search)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from flywheel.api.searching import search

        return search(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage
