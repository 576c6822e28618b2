"""Files of strangers: a good file, changed in a few bytes or in its structure. The same generator makes the same."""

from __future__ import annotations

import copy
import csv
import io
import json
from random import Random
from typing import Any, Final

NUMBERS: Final = (
    0, -1, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400, 0.0, -0.5,
    0.1, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"),
)  # fmt: skip
TEXTS: Final = (
    "", " ", "a", "\x1b[31m", "\x00", "\n", "\udcff", "\u202e", "x" * 5000, "../../../etc/passwd", "NaN", "٣", "1e9",
    "%00", "`", "<script>", "L0.q_proj", "bf16", "null",
)  # fmt: skip
ODD: Final[tuple[Any, ...]] = (None, True, False, [], {}, [[]], {"": None}, *NUMBERS, *TEXTS)
TOKENS: Final = (
    b"", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r\n", b"\t", b'"', b"'", b"{", b"}", b"[", b"]", b",", b":", b"[" * 3000,
    b"{" * 3000, b"9" * 5000, b"-1", b"1e400", b"NaN", b"\\u0000", b"\\ud800", b"#", b"=", b"\x1b[31m", "٣".encode(),
)  # fmt: skip


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """One to four changes of some bytes each."""
    for _ in range(random.randint(1, 4)):
        start = random.randrange(len(data) + 1)
        end = min(len(data), start + int(random.expovariate(1 / 8)))
        match random.randrange(6):
            case 0:
                data = data[:start] + random.choice(TOKENS) + data[end:]
            case 1:
                data = data[:start] + data[end:]
            case 2:
                data = data[:end] + data[start:]
            case 3:
                data = data[:start] + random.randbytes(end - start) + data[end:]
            case 4:
                data = data[:start] + bytes([random.randrange(256)]) + data[start + 1 :]
            case _:
                data = data[:start] if random.random() < 0.2 else data + data[start:end]
    return data


def mutate_document(document: Any, random: Random) -> Any:
    """A copy with one to three values changed, added, removed, doubled or exchanged."""
    changed = copy.deepcopy(document)
    for _ in range(random.randint(1, 3)):
        holder, key = _place(changed, random)
        if holder is None:
            return random.choice(ODD)
        _change(holder, key, random)
    return changed


def mutate_by_type(document: Any, random: Random, times: int) -> Any:
    """A copy with that many values changed, each for one of its own type: most readers look further than at that."""
    changed = copy.deepcopy(document)
    for _ in range(times):
        holder, key = _place(changed, random)
        if holder is None:
            return changed
        holder[key] = _alike(holder[key], random)
    return changed


def _alike(value: Any, random: Random) -> Any:
    """Another value of the same type; None becomes a number or a text."""
    match value:
        case bool():
            return not value
        case int():
            return random.choice((value + 1, value - 1, 2 * value, 0, 1, 2**16, 2**31, 2**32, 2**63 - 1, -1))
        case float():
            return random.choice((-value, 2 * value, value / 1e9, 0.0, 1e-300, 1e300, -1.0))
        case str():
            return random.choice((value + "x", value[:-1], value.upper(), value[::-1], *TEXTS))
        case list() if value:
            kept = [copy.deepcopy(random.choice(value)) for _ in value]
            return random.choice((value[::-1], value[:-1], [*value, copy.deepcopy(value[-1])], kept, []))
        case dict() if value:
            names = list(value)
            random.shuffle(names)
            return random.choice((dict(zip(names, value.values(), strict=True)), dict(list(value.items())[:-1]), {}))
        case None:
            return random.choice((0, 1, "a", False))
        case _:
            return value


def _place(document: Any, random: Random) -> tuple[Any, Any]:
    """(a list or object, a place in it), deep or not; (None, None) for a document that is neither."""
    holder: Any = None
    key: Any = None
    here = document
    while isinstance(here, dict | list) and here and (holder is None or random.random() < 0.8):
        holder, key = here, random.choice(list(here)) if isinstance(here, dict) else random.randrange(len(here))
        here = holder[key]
    return holder, key


def _change(holder: Any, key: Any, random: Random) -> None:
    match random.randrange(7):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case 1:
            holder[random.choice(TEXTS) or "x"] = holder.pop(key)
        case 2 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = random.choice((-holder[key], holder[key] + 1, holder[key] * 2, holder[key] - 1))
        case 3 if isinstance(holder, list):
            other = random.randrange(len(holder))
            holder[key], holder[other] = holder[other], holder[key]
        case 4:
            holder[key] = [holder[key]] if random.random() < 0.5 else {"x": holder[key]}
        case _:
            holder[key] = random.choice(ODD)


def mutated_json(document: Any, random: Random) -> bytes:
    """A document's text, changed in its structure, in values within their types, in its bytes, or with a name twice."""
    if random.random() < 0.3:
        return mutate_bytes(json.dumps(document).encode(), random)
    changed = mutate_by_type(document, random, 2) if random.random() < 0.4 else mutate_document(document, random)
    text = json.dumps(changed)
    if random.random() < 0.05 and text.startswith("{"):
        text = "{" + text[1 : text.find(",") + 1] + text[1:]
    return text.encode("utf-8", "surrogatepass")


def mutated_table(text: str, random: Random, separator: str = "\t") -> bytes:
    """A table changed in its bytes, or in some of its cells, rows and columns."""
    if random.random() < 0.2:
        return mutate_bytes(text.encode(), random)
    rows = _mutate_rows([line.split(separator) for line in text.splitlines()], random)
    return "\n".join(map(separator.join, rows)).encode("utf-8", "surrogatepass")


def mutated_csv(text: str, random: Random) -> bytes:
    """A table of CSV, written in the way of another program, and then as in `mutated_table`."""
    rows = list(csv.reader(io.StringIO(text, newline="")))
    if random.random() < 0.5:
        rows = [[name, *row, name] for name, row in zip(("", *map(str, range(len(rows)))), rows, strict=False)]
    if random.random() < 0.3:
        order = random.sample(range(len(rows[0])), len(rows[0]))
        rows = [[row[place] for place in order] for row in rows]
    whole = random.random() < 0.2
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=random.choice(",,;"), lineterminator=random.choice(("\n", "\r\n", "\r")),
                        quoting=random.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL)))  # fmt: skip
    writer.writerows(rows if whole else _mutate_rows(rows, random))
    data = random.choice((b"", b"\xef\xbb\xbf")) + out.getvalue().encode("utf-8", "surrogatepass")
    return mutate_bytes(data, random) if whole else data


def _mutate_rows(rows: list[list[str]], random: Random) -> list[list[str]]:
    for _ in range(random.randint(1, 3)):
        row = random.randrange(len(rows))
        cell = random.randrange(len(rows[row]))
        match random.randrange(6):
            case 0:
                del rows[row][cell]
            case 1:
                rows.insert(row, list(rows[row]))
            case 2:
                for each in rows:
                    del each[cell : cell + 1]
            case 3:
                rows[row][cell] = rows[row][random.randrange(len(rows[row]))]
            case _:
                odd = random.choice(ODD)
                rows[row][cell] = odd if isinstance(odd, str) else str(odd)[:400]
        rows = [each or [""] for each in rows] or [[""]]
    return rows
