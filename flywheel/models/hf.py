"""Reads a Hugging Face `config.json` into a DecoderSpec, or refuses it by field.

The file may come from a stranger. Whatever it holds, the answer is an exact spec or one UnsupportedModelError. An
absent field has the default of the model's configuration class. Source: huggingface/transformers,
`models/{llama,mistral,qwen2,qwen3}/configuration_*.py`, releases 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from flywheel.errors import IrFormatError, UnsupportedModelError
from flywheel.ir.files import parse_json
from flywheel.models.config_keys import keys_of
from flywheel.models.config_reading import Fields, key_shown, shown
from flywheel.models.families import FAMILIES
from flywheel.models.family import Family, in_all_layers
from flywheel.models.rope import MAX_CONTEXT
from flywheel.models.rope_reading import read_rope
from flywheel.models.schemes import Scheme, read_scheme
from flywheel.models.spec import MAX_HEADS, MAX_LAYERS, MAX_VOCAB, DecoderSpec
from flywheel.models.unsupported import UNSUPPORTED

_MAX_FILE_BYTES: Final = 4 * 1024**2

_ACTIVATIONS: Final = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
)
"""transformers' name of an activation -> the spec's."""

_FLOATS: Final = ("bfloat16", "float16", "float32", "float64")
_DTYPES: Final = (*_FLOATS, *[f"torch.{name}" for name in _FLOATS], "auto")
"""Names of a checkpoint's type, which is read from its tensors."""

_END: Final = "eos_token_id"
_CODE: Final = "auto_map"
_OWN_CODE: Final = ("AutoModel", "AutoConfig")
"""Beginnings of entries of `auto_map` that put code of the repository in place of the family's."""

_FAMILIES: Final = "what flywheel models --family lists"


def load_spec(path: Path) -> DecoderSpec:
    """The decoder that a `config.json`, or its directory, describes.

    It is named after the directory; in the Hub's cache, after the repository; if the file has another name, after the
    file. Raises UnsupportedModelError, in one line, for a file that cannot be read or represented exactly.
    """
    return spec_from_config(*_read(path))


def load_scheme(path: Path) -> Scheme | None:
    """The quantisation scheme of the checkpoint that a `config.json`, or its directory, describes; None where it has
    none. Raises as `load_spec`."""
    config, name = _read(path)
    return read_scheme(config, name) if isinstance(config, Mapping) else None


class UnreadFields(NamedTuple):
    """Fields of a config that flywheel does not read, each with its value."""

    foreign: tuple[str, ...] = ()
    """Fields of other models that ask for other arithmetic than the family's, which transformers does not read for this
    family; and ends of texts that are not in the vocabulary."""
    unknown: tuple[str, ...] = ()
    """Fields of which nothing is known."""


def unread_fields(path: Path) -> UnreadFields:
    """The fields of a `config.json`, or of its directory, that may ask for what flywheel does not do. Raises as
    `load_spec`."""
    config, name = _read(path)
    if not isinstance(config, Mapping) or (rules := FAMILIES.get(str(config.get("model_type")))) is None:
        return UnreadFields()
    fields = Fields(name, "", config)
    keys = keys_of(rules)
    foreign = [field for field, neutral in keys.foreign.items() if not fields.asks_nothing(field, neutral)]
    vocab = fields.positive_int("vocab_size", MAX_VOCAB) if "vocab_size" in config else MAX_VOCAB
    foreign += [_END] if any(not 0 <= token < vocab for token in fields.integers(_END)) else []
    unknown = [field for field in keys.unknown(config) if config[field] is not None]
    asking = ([f"{key_shown(field)} {shown(config[field])}" for field in each] for each in (foreign, unknown))
    return UnreadFields(*map(tuple, asking))


def _read(path: Path) -> tuple[object, str]:
    """(the parsed file, the name of the model that it describes)."""
    try:
        file = path / "config.json" if path.is_dir() else path
        name = _directory_name(file.parent.resolve()) if file.name == "config.json" else file.stem
        if not file.is_file():
            raise UnsupportedModelError(f"{str(file)!r} is not a file; supported: a Hugging Face config.json")
        with file.open("rb") as stream:
            raw = stream.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{str(path)!r} cannot be read: {type(error).__name__}") from error
    if len(raw) > _MAX_FILE_BYTES:
        raise UnsupportedModelError(f"{str(file)!r} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        config: object = parse_json(raw)
    except IrFormatError as error:
        raise UnsupportedModelError(f"{str(file)!r} is not JSON: {_one_line(error)}") from error
    return config, name if name.isprintable() and name else repr(name)


def _directory_name(directory: Path) -> str:
    """`models--owner--name/snapshots/<commit>` is the layout of the Hub's cache."""
    parts = directory.parts
    in_cache = len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--")
    return parts[-3].rpartition("--")[2] if in_cache else directory.name


def spec_from_config(config: object, name: str) -> DecoderSpec:
    """The decoder that the parsed `config.json` describes. Raises UnsupportedModelError."""
    if not isinstance(config, Mapping):
        raise UnsupportedModelError(f"{name}: the config is a JSON {type(config).__name__}; supported: an object")
    config = text_part(config, name)
    fields = Fields(name, "", config)
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in UNSUPPORTED:
        raise fields.refusal("model_type", f"{_FAMILIES}; {UNSUPPORTED[kind]}")
    rules = FAMILIES[fields.choice("model_type", FAMILIES)]
    _check_architecture(fields, rules)
    fields = Fields(name, "", {**rules.defaults, **config})
    fields.check_neutral(keys_of(rules).refused)
    _check_code(fields, rules)
    read_scheme(config, name)  # raises for a scheme without a format
    _check_unused(fields)
    if rules.activation_field in config:
        named = [name for name, own in _ACTIVATIONS.items() if own == rules.activation]
        fields.choice(rules.activation_field, [*named, *rules.activation_also])
    n_heads, n_kv_heads, head_dim = _heads(fields, rules)
    max_position = fields.positive_int("max_position_embeddings", MAX_CONTEXT)
    rope, rotary_dim = read_rope(_rope_of(fields, rules, _FULL), rules, head_dim, max_position)
    window, windowed = _windows(fields, rules)
    further = rules.read(fields)
    local = None
    if window is not None and rules.windows is None:
        max_position = min(window, max_position)
    if window is not None and rules.local_rope is not None:
        own = replace(rules, rope_theta=rules.local_rope[1])
        local, _ = read_rope(_rope_of(fields, rules, _SLIDING), own, head_dim, max_position)
    elif window is not None and window >= max_position and not further.get("nope_full"):
        window, windowed = None, ()
    attention_bias, mlp_bias = (_has_bias(fields, rules, field) for field in ("attention_bias", "mlp_bias"))
    usual: dict[str, Any] = {
        "qkv_bias": rules.qkv_bias or attention_bias, "o_bias": attention_bias, "mlp_bias": mlp_bias,
        "activation": rules.activation, "window": window, "windowed": windowed, "max_position": max_position,
    }  # fmt: skip
    return DecoderSpec(
        name=name,
        family=rules.name,
        hidden=fields.positive_int("hidden_size"),
        intermediate=fields.positive_int(rules.intermediate),
        n_layers=fields.positive_int("num_hidden_layers", MAX_LAYERS),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        vocab=fields.positive_int("vocab_size", MAX_VOCAB),
        rope_theta=rope.theta,
        norm_eps=fields.positive_float(*rules.norm_eps),
        tied_head=fields.flag("tie_word_embeddings", absent=rules.tied_head),
        qk_norm=rules.qk_norm,
        rope_scaling=rope.scaling,
        rotary_dim=rotary_dim,
        local_rope=local if local != rope else None,
        **(usual | further),
    )


def text_part(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    """The config of the text model in a multimodal one of a known kind; any other config as it is.

    Raises UnsupportedModelError where it has none.
    """
    kind, text = config.get("model_type"), config.get("text_config")
    rules = next((each for each in FAMILIES.values() if each.text_of is not None and each.text_of == kind), None)
    if rules is None:
        return config
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(f"{name}: text_config is not an object; supported: the config of a {rules.name}")
    rules = FAMILIES.get(str(text.get("model_type")), rules)
    shared = {field: config[field] for field in _SHARED if field in config}
    own = {"model_type": rules.name, "architectures": [rules.architecture]}
    return {**own, **shared, **{field: text[field] for field in text if field != "architectures"}}


_SHARED: Final = (
    "quantization_config", "torch_dtype", "dtype", "auto_map", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
"""Fields of a multimodal model's config that hold of its text model."""

_FULL, _SLIDING = "full_attention", "sliding_attention"
_OLD_FULL: Final = "attention"
"""Another name of _FULL, for transformers."""


def _rope_of(fields: Fields, rules: Family, kind: str) -> Fields:
    """The fields as layers of a kind have them, where kinds have a RoPE of their own."""
    if rules.local_rope is None:
        return fields
    values, found = dict(fields.values), fields.values.get("rope_parameters")
    renamed = {"rope_parameters": f"rope_parameters.{kind}"}
    if found is not None:
        if not isinstance(found, Mapping) or not found.keys() <= {_FULL, _SLIDING}:
            raise fields.refusal("rope_parameters", f"an object with {_FULL} and {_SLIDING}")
        values["rope_parameters"] = found.get(kind)
    if kind == _SLIDING:
        named, _ = rules.local_rope
        for field in ("rope_theta", "rope_scaling"):
            values.pop(field, None)
        if named is not None and named in values:
            values["rope_theta"] = values[named]
            renamed["rope_theta"] = named
    return Fields(fields.source, fields.prefix, values, renamed)


def _has_bias(fields: Fields, rules: Family, field: str) -> bool:
    return field in rules.biases and fields.values.get(field) is not None and fields.flag(field, absent=False)


def _check_unused(fields: Fields) -> None:
    """Raises UnsupportedModelError for fields of no sense that other code reads, or nothing."""
    fields.integers(_END)
    for field in ("dtype", "torch_dtype"):
        if fields.values.get(field) is not None:
            fields.choice(field, _DTYPES)


def _check_architecture(fields: Fields, rules: Family) -> None:
    architectures = fields.values.get("architectures")
    if architectures is not None and architectures != [rules.architecture]:
        raise fields.refusal("architectures", f'["{rules.architecture}"]')


def _check_code(fields: Fields, rules: Family) -> None:
    """Raises UnsupportedModelError where the repository has model code of its own, other than the family's."""
    code = fields.values.get(_CODE)
    if code is None:
        return
    if isinstance(code, Mapping):
        own = [value for key, value in code.items() if str(key).startswith(_OWN_CODE)]
        if all(str(value).rpartition("--")[2] in rules.own_code for value in own):
            return
    raise fields.refusal(_CODE, f"absent, or without {' and '.join(_OWN_CODE)}")


def _windows(fields: Fields, rules: Family) -> tuple[int | None, tuple[bool, ...]]:
    """(the sliding window, which layers have it); (None, ()) if no layer has one, and () for all of them."""
    window = rules.sliding_window
    if "sliding_window" in fields.values:
        given = fields.values["sliding_window"]
        window = None if given is None else fields.positive_int("sliding_window", MAX_CONTEXT)
    if rules.window_needs_flag and not fields.flag("use_sliding_window", absent=False):
        window = None
    n_layers, kinds = fields.positive_int("num_hidden_layers", MAX_LAYERS), fields.values.get("layer_types")
    if isinstance(kinds, list):
        kinds = [_FULL if kind == _OLD_FULL else kind for kind in kinds]
    slides = window is not None or rules.windows is not None
    known = (_FULL, _SLIDING) if slides else (_FULL,)
    if kinds is not None and (not isinstance(kinds, list) or any(kind not in known for kind in kinds)):
        raise fields.refusal("layer_types", " or ".join(map(shown, known)))
    if kinds is not None and len(kinds) != n_layers:
        raise fields.refusal("layer_types", f"one for each of {n_layers} layers")
    usual = list((rules.windows or in_all_layers)(fields, n_layers))  # which also checks what it reads
    if window is None:
        if kinds is not None and _SLIDING in kinds:
            off = rules.window_needs_flag and fields.values.get("sliding_window", 1) is not None
            field, wanted = ("use_sliding_window", "true") if off else ("sliding_window", "an integer from 2")
            raise fields.refusal(field, f"{wanted}, where layer_types has {shown(_SLIDING)}")
        return None, ()
    if window == 1:  # transformers' mask has one row then, and its cache two
        raise fields.refusal("sliding_window", f"an integer from 2 to {MAX_CONTEXT}")
    marks = usual if kinds is None else [kind == _SLIDING for kind in kinds]
    return (window if any(marks) else None), (() if all(marks) or not any(marks) else tuple(marks))


def _heads(fields: Fields, rules: Family) -> tuple[int, int, int]:
    """(n_heads, n_kv_heads, head_dim); a null num_key_value_heads means as many as query heads in every family."""
    n_heads = fields.positive_int("num_attention_heads", MAX_HEADS)
    n_kv_heads = rules.n_kv_heads or n_heads
    if "num_key_value_heads" in fields.values:
        given = fields.values["num_key_value_heads"]
        n_kv_heads = n_heads if given is None else fields.positive_int("num_key_value_heads", MAX_HEADS)
    if n_heads % n_kv_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of num_attention_heads={n_heads}, not {n_kv_heads}")
    if rules.head_dim is not None and "head_dim" not in fields.values:
        return n_heads, n_kv_heads, rules.head_dim
    if rules.head_dim is not None or fields.values.get("head_dim") is not None:
        head_dim = fields.positive_int("head_dim")
    else:
        head_dim, rest = divmod(fields.positive_int("hidden_size"), n_heads)
        if rest:
            raise fields.refusal("hidden_size", f"a multiple of num_attention_heads={n_heads} where head_dim is absent")
    if head_dim % 2:
        raise UnsupportedModelError(f"{fields.source}: head_dim is {head_dim}; supported: an even number")
    return n_heads, n_kv_heads, head_dim


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
