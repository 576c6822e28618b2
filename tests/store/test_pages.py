from __future__ import annotations

from flask import Flask, Response

from flywheel.store.pages import begin, control_socket_disable, script


def served(body: str, kind: str, status: int = 200) -> str:
    with Flask("pages").test_request_context("/"):
        return str(begin(Response(body, status, mimetype=kind)).get_data(as_text=True))


def test_a_page_chooses_the_view_of_training_runs_before_its_own_scripts() -> None:
    page = served("<html><head><script src=main.js></script></head></html>", "text/html")
    assert page == f"<html><head><script>{script()}</script><script src=main.js></script></head></html>"
    assert '"mlflow.workflowType_v1": "\\"machine_learning\\""' in script()
    assert "getItem(k)===null" in script()  # somebody's own choice stays


def test_what_is_no_page_stays_as_it_is() -> None:
    assert served("<head>", "application/json") == "<head>"
    assert served("<head>", "text/html", 404) == "<head>"


def test_the_server_leaves_nothing_in_a_home_directory() -> None:
    assert control_socket_disable
