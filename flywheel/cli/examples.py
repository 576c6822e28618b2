"""Command lines that end the help of each command. Each works as it is where its files, campaign and GPU are."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "flywheel": (
            "flywheel doctor  # what is here, what is missing",
            "flywheel search --model mistral-7b --gpu h200  # predicts where no H200 is",
            "flywheel generate --model ./Llama-3.2-1B --prompt 'The flywheel' --device cuda",
        ),
        "search": (
            "flywheel search --model ./Llama-3.2-1B --name first  # on this machine's GPU",
            "flywheel search --model llama3-8b --gpu h200 --weights int4 --measure predict",
            "flywheel search --model ./Llama-3.2-1B --time 10m --fix depth=4 --output best.json",
        ),
        "campaigns": (
            "flywheel campaigns  # the newest last",
            "flywheel campaigns first",
            "flywheel campaigns first --archive first.tsv",
        ),
        "schedules": (
            "flywheel schedules --gpu h100",
            "flywheel schedules llama3-8b-h100-bf16-c512-b1 --output best.json",
        ),
        "export": (
            "flywheel export --format schedule --campaign first --output best.json",
            "flywheel export --format bundle --campaign first --output llama-h200",
            "flywheel export --format csv --model llama3-8b --gpu h200 --output trials.csv",
        ),
        "compare": (
            "flywheel compare h100 h200 --model llama3-8b --picture gpus.svg",
            "flywheel compare best.json first --fail-if-slower 2%",
        ),
        "import": (
            "flywheel import first.tsv --name again",
            "flywheel import trials.csv --name theirs  # from pandas or a spreadsheet",
            "flywheel import best.json --name next  # whose search tries it first",
        ),
        "evaluate": (
            "flywheel evaluate best.json",
            "flywheel evaluate best.json --measure cuda --json",
        ),
        "report": (
            "flywheel report first",
            "flywheel report first --output first.html --store trials.db",
        ),
        "mlflow": (
            "flywheel mlflow sync first",
            "flywheel mlflow sync --follow --tracking-uri http://127.0.0.1:5000",
        ),
        "dashboard": (
            "flywheel dashboard",
            "flywheel dashboard --store trials.db --port 5000",
        ),
        "knobs": (
            "flywheel knobs --model llama3-8b --gpu h200",
            "flywheel knobs --model llama3-8b --gpu h200 --weights int4 --json",
        ),
        "generate": (
            "flywheel generate --model ./Llama-3.2-1B --prompt 'The flywheel' --device cuda --stream",
            "flywheel generate --model ./Llama-3.2-1B-Instruct --prompt 'What is this?' --chat --device cuda",
            "flywheel generate --model smollm2-135m --prompt-ids 1,2,3 --max-tokens 4  # on the CPU",
        ),
        "serve": (
            "flywheel serve --model ./Llama-3.2-1B-Instruct",
            "flywheel serve --model ./Llama-3.2-1B-Instruct --config best.json --max-sequences 4 --port 8080",
        ),
        "verify": (
            "flywheel verify --config best.json --device cuda",
            "flywheel verify program.json --model ./Llama-3.2-1B --positions 0,7,511",
        ),
        "bench": (
            "flywheel bench --model ./Llama-3.2-1B --config best.json --against cublas,compile",
            "flywheel bench --campaign first --picture bench.svg",
            "flywheel bench --serve --model ./Llama-3.2-1B --clients 1,8",
        ),
        "trace": (
            "flywheel trace --campaign first --picture trace.svg",
            "flywheel trace --model llama3-8b --config best.json --output trace.json  # for ui.perfetto.dev",
        ),
        "quantize": (
            "flywheel quantize --model ./Llama-3.2-1B --weights int4 --output Llama-3.2-1B-int4",
            "flywheel quantize --model ./Llama-3.2-1B --weights int8 --least-error --output Llama-3.2-1B-int8",
        ),
        "models": (
            "flywheel models",
            "flywheel models --gpu h200 --weights int4  # bytes and floor of a token",
        ),
        "lower": (
            "flywheel lower --model llama3-8b --gpu h100 --output program.json",
            "flywheel lower --config best.json --set depth=4 --output program.json",
        ),
        "validate": (
            "flywheel validate program.json",
            "flywheel lower --model llama3-8b --gpu h100 | flywheel validate -",
        ),
        "simulate": (
            "flywheel simulate program.json",
            "flywheel simulate program.json --orders 32 --trace predicted.json",
        ),
        "inspect": (
            "flywheel inspect program.json",
            "flywheel lower --config best.json | flywheel inspect - --json",
        ),
        "diff": (
            "flywheel diff program.json other.json",
            "flywheel diff program.json other.json --json",
        ),
        "mpk": (
            "flywheel mpk check task_graph_rank0.json task_graph_rank1.json",
            "flywheel mpk predict task_graph_rank0.json --picture layer.svg",
            "flywheel mpk repair task_graph_rank0.json --output mended",
        ),
        "targets": (
            "flywheel targets",
            "flywheel targets --json",
        ),
        "calibrate": (
            "flywheel calibrate --gpu h200 --output h200.json",
            "flywheel calibrate --gpu h200 --campaign first --campaign second",
        ),
        "doctor": (
            "flywheel doctor",
            "flywheel doctor --probe  # measures the GPU for some seconds",
        ),
    }
)  # fmt: skip
"""Command -> two or three command lines; `flywheel` itself is one of them."""
