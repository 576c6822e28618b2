"""flywheel searches for the fastest schedule of a megakernel. From Python:

    found = flywheel.search(model="llama3-8b", gpu="h100", trials=200)
    found.save("best.json")
    table = found.to_dataframe()
    told = flywheel.evaluate(config="best.json", measure="predict")
    rows = flywheel.open_store("flywheel.db").trials(found.campaign)
    schedule = flywheel.load_schedule("best.json")

    with flywheel.Decoder.load("./Llama-3.2-1B", schedule=schedule) as decoder:
        print(decoder.complete("The flywheel").text)

Nothing is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flywheel.version import VERSION as __version__

if TYPE_CHECKING:
    from flywheel.api.evaluating import evaluate
    from flywheel.api.frame import to_dataframe
    from flywheel.api.searching import search
    from flywheel.runtime.sequences import Sampling
    from flywheel.serve.decoder import Decoder
    from flywheel.store.schedule import load_schedule
    from flywheel.store.sql import read_store as open_store

__all__ = ["Decoder", "Sampling", "__version__", "evaluate", "load_schedule", "open_store", "search", "to_dataframe"]


def __getattr__(name: str) -> Any:
    """The public functions, on first use; `search` is a package that can be called."""
    match name:
        case "search":
            return import_module("flywheel.search")
        case "Decoder":
            return import_module("flywheel.serve.decoder").Decoder
        case "Sampling":
            return import_module("flywheel.runtime.sequences").Sampling
        case "evaluate":
            return import_module("flywheel.api.evaluating").evaluate
        case "load_schedule":
            return import_module("flywheel.store.schedule").load_schedule
        case "open_store":
            return import_module("flywheel.store.sql").read_store
        case "to_dataframe":
            return import_module("flywheel.api.frame").to_dataframe
        case _:
            raise AttributeError(f"module 'flywheel' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is there already, and the public names that nobody has used yet."""
    return sorted({*globals(), *__all__})
