"""`flywheel quantize`: write a checkpoint with quantised matrices in the format of compressed-tensors."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path

import click

from flywheel.cli.decoding import check_installed, open_model
from flywheel.cli.files import announce_notes
from flywheel.cli.options import STDOUT, SharedOption, command, json_option
from flywheel.cli.text import show, show_json, size
from flywheel.errors import UsageError
from flywheel.models.decoder import DTYPES
from flywheel.models.formats import parse_formats


@command
@click.option("--model", cls=SharedOption, metavar="DIR", required=True, help="Directory of a checkpoint.")
@click.option("--weights", cls=SharedOption, metavar="FORMAT", required=True,
              help="fp8, int8 or int4, such as int4-g64-zeros and fp8-block; add ,lm_head=FORMAT for the head.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", required=True,
              help="Directory to make; it must not exist.")
@click.option("--least-error", "best", is_flag=True,
              help="Search for scales with the least squared error; much slower.")
@json_option
def quantize(model: str, weights: str, output: Path, best: bool, as_json: bool) -> None:
    """Write a checkpoint whose matrices are quantised, rounded to nearest.

    The format is compressed-tensors', which transformers and vLLM load. The embedding, norms and biases keep their
    type, and so does the head unless --weights names it. Tokenizer files are copied.
    """
    if output == STDOUT:
        raise UsageError("quantize: --output - is stdout, and a checkpoint is a directory; name one")
    check_installed("quantize", ["torch", "safetensors"])
    source = open_model("quantize", model)
    if source.stored is None or source.folder is None or source.dtype is None:
        raise UsageError(f"quantize: {model} holds no safetensors")
    if source.scheme is not None:
        raise UsageError(f"quantize: {model} is already quantised, by {source.scheme.method}")
    if output.exists():
        raise UsageError(f"quantize: {output} already exists; name a new directory")
    from flywheel.decode.notes import notes_of_source
    from flywheel.ir.files import read_json
    from flywheel.models.hf import text_part
    from flywheel.models.packing import the_format, write_checkpoint
    from flywheel.models.tokenizer_files import MODEL, OTHERS, beside_weights

    formats = parse_formats(weights, source.dtype)
    own = the_format(formats, source.spec)
    config = text_part(read_json(source.folder / "config.json"), source.name)  # alone is what is written
    notes = notes_of_source(source, DTYPES[source.dtype], 0)
    announce_notes(notes)
    draft = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"quantize: {output} cannot be written: {error.strerror or error}") from None
    try:
        write_checkpoint(draft, config, source.spec, source.stored, formats, DTYPES[source.dtype], best=best)
        for name in (*beside_weights(source.folder), *(name for name in OTHERS if (source.folder / name).is_file())):
            if name != MODEL:
                (draft / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source.folder / name, draft / name)
        draft.rename(output)
    except OSError as error:
        raise UsageError(f"quantize: {output} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    nbytes = (output / "model.safetensors").stat().st_size
    before = sum(tensor.nbytes for tensor in source.stored.values())
    if as_json:
        show_json({"path": str(output), "weights": own.name, "bytes": nbytes, "bytes_before": before,
                   "notes": [asdict(each) for each in notes]})  # fmt: skip
    else:
        show(f"{output}: {own.name}, {size(nbytes)} of {size(before)}")
