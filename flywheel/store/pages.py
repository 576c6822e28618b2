"""An addition to MLflow's server for `flywheel dashboard`: its pages begin in the view of training runs.

MLflow 3's pages keep the view in their address. A click on a run's name drops it, and the pages then show the view for
language models, unless the browser's storage names another view. So a script writes the view of training runs to that
storage if it names none. This module is a configuration of gunicorn, which `mlflow server` takes as
`--config python:...`.
Source: MLflow 3.17, `mlflow.workflowType`; gunicorn's settings `post_worker_init`, `threads`.
"""

from __future__ import annotations

import json
from typing import Any, Final

_CHOICES: Final = {"mlflow.workflowType_v1": "machine_learning", "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True}
"""The view of training runs; and the assistant's panel does not open by itself."""

threads = 8
"""Threads of the only worker: a page asks for many files at once."""

control_socket_disable = True
"""Gunicorn leaves nothing in a home directory."""


def post_worker_init(_: object) -> None:
    """Called by gunicorn in the worker, before its first request."""
    from mlflow.server import app

    app.after_request(begin)


def begin(response: Any) -> Any:
    """The response, with our script in front of the scripts of an HTML page."""
    if response.mimetype != "text/html" or response.status_code != 200:
        return response
    response.direct_passthrough = False
    page = response.get_data(as_text=True)
    response.set_data(page.replace("<head>", f"<head><script>{script()}</script>", 1))
    return response


def script() -> str:
    """The script: it stores each of our choices in the browser unless one is stored."""
    pairs = json.dumps({name: json.dumps(value) for name, value in _CHOICES.items()}, sort_keys=True)
    return f"for(const[k,v]of Object.entries({pairs}))if(localStorage.getItem(k)===null)localStorage.setItem(k,v)"
