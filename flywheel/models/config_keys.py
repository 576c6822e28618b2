"""What each key of a `config.json` is to a family: used, refused with other values than some, of other models, or
irrelevant. Source: transformers 5.23, the configuration classes of the families and their common base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from flywheel.models.config_fields import FOREIGN, NEUTRAL, OFF, Neutral
from flywheel.models.family import Family, in_later_layers

_USED: Final = frozenset({
    "model_type", "architectures", "auto_map", "quantization_config", "hidden_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "original_max_position_embeddings", "sliding_window", "layer_types", "eos_token_id",
    "dtype", "torch_dtype",
})  # fmt: skip
"""Keys that are read for every family."""

_IRRELEVANT: Final = frozenset({
    "transformers_version", "initializer_range", "init_method", "use_cache", "cache_implementation", "return_dict",
    "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "id2label", "label2id", "num_labels",
    "problem_type", "finetuning_task", "task_specific_params", "classifier_dropout", "pretraining_tp",
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "embedding_dropout", "residual_dropout",
    "hidden_dropout", "hidden_dropout_prob", "mlp_dropout", "gradient_checkpointing", "attn_implementation",
    "use_flash_attn", "torchscript", "tokenizer_class", "bos_token_id", "pad_token_id", "sep_token_id",
    "decoder_start_token_id", "prefix",
    "name_or_path", "bad_words_ids", "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "num_beams", "num_return_sequences",
    "remove_invalid_values", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty",
    "num_beam_groups", "early_stopping", "output_scores", "return_dict_in_generate",
    "exponential_decay_length_penalty", "use_bfloat16", "tf_legacy_loss", "cross_attention_hidden_size",
    "is_decoder", "unsloth_fixed", "unsloth_version",
})  # fmt: skip
"""Keys that change no logits: how it was trained, what it is called, how transformers samples."""

_OWN_NOTES: Final = ("_", "transformers.js", "unsloth")
"""Beginnings of keys that programs write for themselves."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a family's configs."""

    used: frozenset[str]
    refused: Neutral
    """Key -> the values with which a checkpoint is not refused; absent and null go, too."""
    foreign: Neutral
    """The same of keys that transformers' class of this family does not read. With other values, they are told."""
    irrelevant: frozenset[str]

    def unknown(self, config: Mapping[str, object]) -> tuple[str, ...]:
        """The keys of a config about which nothing is known."""
        known = {*self.used, *self.refused, *self.foreign, *self.irrelevant}
        return tuple([key for key in config if key not in known and not key.startswith(_OWN_NOTES)])


def keys_of(rules: Family) -> Keys:
    """What each key is to a family."""
    bias, norm = (rules.qkv_bias,), (rules.qk_norm,)
    fixed = {
        "attention_bias": bias, "mlp_bias": OFF, "qkv_bias": bias, "use_qk_norm": norm, "qk_norm": norm,
        "hidden_act": ("gelu_pytorch_tanh",),
    }  # fmt: skip
    own = {*rules.biases, *rules.reads, rules.norm_eps[0], rules.intermediate, rules.activation_field}
    own |= {rules.local_rope[0]} if rules.local_rope is not None and rules.local_rope[0] is not None else set()
    own |= {"use_sliding_window"} if rules.window_needs_flag else set()
    own |= {"max_window_layers"} if rules.windows is in_later_layers else set()
    used, irrelevant = _USED | own, _IRRELEVANT.union(rules.irrelevant)
    known = used | irrelevant
    refused = {key: value for key, value in NEUTRAL.items() if key not in known}
    foreign = {key: value for key, value in {**FOREIGN, **fixed}.items() if key not in known}
    return Keys(used, refused, foreign, irrelevant)
