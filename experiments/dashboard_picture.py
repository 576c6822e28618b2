"""Takes the picture of docs/mlflow.md: a store's campaigns on MLflow's pages, as `flywheel dashboard` opens them.

The campaigns in docs/ come from tables of results/gpu and are imported one by one: `flywheel import
results/gpu/results.79eb0dd.tsv --name NAME --campaign NAME --store real.db` and so on with results.db8e932.tsv, then
`python experiments/dashboard_picture.py --store real.db --output docs/dashboard.png` (needs chromium and playwright).
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys

from playwright.sync_api import sync_playwright

_SIZE = {"width": 1400, "height": 660}
_PATIENCE_MS = 60_000


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "flywheel", "dashboard", "--store", arguments.store, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dashboard:
        assert dashboard.stdout is not None
        try:
            shoot(json.loads(dashboard.stdout.readline())["url"], arguments.chromium, arguments.output)
        finally:
            dashboard.send_signal(signal.SIGINT)


def shoot(address: str, chromium: str, output: str) -> None:
    """Take the picture once the list of campaigns is there."""
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=chromium, args=flags) as browser:
        page = browser.new_page(viewport=_SIZE)
        page.goto(address, timeout=_PATIENCE_MS)
        page.locator("[role=row] a").first.wait_for(timeout=_PATIENCE_MS)
        page.wait_for_timeout(2000)
        page.screenshot(path=output)


if __name__ == "__main__":
    main()
