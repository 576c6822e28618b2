"""What MLflow's server does more for `flywheel dashboard`: its pages begin in the view of training runs.

MLflow 3's pages keep the view in the address, drop it there where a run's name is clicked, and then show what is meant
for language models. They look next into the browser's storage, where this puts the view unless somebody chose one. It
is gunicorn's configuration, the way to hook into a server that `mlflow server` starts: `--config python:...`.
Source: MLflow 3.17, `mlflow.workflowType`; gunicorn's settings `post_worker_init`, `threads`.
"""

from __future__ import annotations

import json
from typing import Any, Final

_CHOICES: Final = {"mlflow.workflowType_v1": "machine_learning", "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True}
"""The view, and that nobody is greeted by an assistant's panel."""

threads = 8
"""Of the one worker: a page asks for many files at once."""

control_socket_disable = True
"""Nothing is left in a home directory."""


def post_worker_init(_: object) -> None:
    """Called by gunicorn in the worker, before its first request."""
    from mlflow.server import app

    app.after_request(begin)


def begin(response: Any) -> Any:
    """The page with a script that runs before its own; anything else as it is."""
    if response.mimetype != "text/html" or response.status_code != 200:
        return response
    response.direct_passthrough = False
    page = response.get_data(as_text=True)
    response.set_data(page.replace("<head>", f"<head><script>{script()}</script>", 1))
    return response


def script() -> str:
    """Chooses in the browser what nobody chose there yet."""
    pairs = json.dumps({name: json.dumps(value) for name, value in _CHOICES.items()}, sort_keys=True)
    return f"for(const[k,v]of Object.entries({pairs}))if(localStorage.getItem(k)===null)localStorage.setItem(k,v)"
