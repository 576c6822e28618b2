"""What the files beside the weights say about generating text: the ids that end it, and samplings that the model's
makers recommend.

Source: huggingface/transformers, `generation/configuration_utils.py`, release 5; vLLM, `v1/engine/processor.py`, which
also ends at the tokenizer's `eos_token`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flywheel.errors import TokenizerError
from flywheel.models.config_reading import key_shown, shown
from flywheel.models.tokenizer import Tokenizer
from flywheel.models.tokenizer_files import GENERATION, MODEL, object_of

_END: Final = "eos_token_id"

_IRRELEVANT: Final = frozenset((
    # about the file
    "_from_model_config", "transformers_version",
    # tokens that no text of a decoder gets, or that the tokenizer knows
    "bos_token_id", "pad_token_id", "decoder_start_token_id",
    # how long, how many, until when: whoever asks says so
    "max_length", "max_new_tokens", "max_time", "num_return_sequences",
    # how it is computed
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile",
    "continuous_batching_config", "low_memory", "prefill_chunk_size", "renormalize_logits", "remove_invalid_values",
    # drafts, which change no token
    "use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type",
    # what comes beside the text
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    # only of beams, which num_beams asks for
    "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty",
))  # fmt: skip
"""Fields that change no token of a text."""

_NEUTRAL: Final[Mapping[str, float]] = MappingProxyType({
    "temperature": 1, "top_p": 1, "typical_p": 1, "repetition_penalty": 1, "encoder_repetition_penalty": 1,
    "num_beams": 1, "guidance_scale": 1,
})  # fmt: skip
"""Field -> the value that asks for nothing, where that is not 0, false or empty."""


def end_ids(folder: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids that end a text: `eos_token_id` of generation_config.json, else of config.json, and the end-of-text token of
    the tokenizer.

    Raises TokenizerError where an `eos_token_id` is neither an id nor a list of ids.
    """
    own = frozenset[int]() if tokenizer is None or tokenizer.end_id is None else frozenset([tokenizer.end_id])
    for name in (GENERATION, MODEL):
        given = (object_of(folder, name) or {}).get(_END)
        if given is None:
            continue
        ids = given if isinstance(given, list) else [given]
        if any(isinstance(number, bool) or not isinstance(number, int) for number in ids):
            raise TokenizerError(folder / name, f"{_END} is neither an integer nor a list of integers")
        return own | frozenset(ids)
    return own


def recommended(folder: Path, taken: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of generation_config.json that change tokens, each with its value, but those of which `taken` has the
    same value. Raises TokenizerError for a file that cannot be read."""
    found = object_of(folder, GENERATION) or {}
    return tuple(
        f"{key_shown(name)} {shown(value)}"
        for name, value in found.items()
        if name != _END and name not in _IRRELEVANT and value and value not in (_NEUTRAL.get(name), taken.get(name))
    )
