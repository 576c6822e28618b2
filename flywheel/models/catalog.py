"""Published decoders by name. Adding a model is adding a record.

Source: the `config.json` of Meta-Llama-3-8B, Meta-Llama-3-70B, Llama-3.1-8B, Llama-3.2-1B, Llama-3.2-3B,
Mistral-7B-v0.1, Mistral-7B-v0.3, Mistral-Small-24B-2501, Ministral-3-8B-Base-2512, Qwen2.5-7B, Qwen3-0.6B, Qwen3-1.7B,
Qwen3-4B, Qwen3-4B-Instruct-2507, Qwen3-8B, Qwen3-14B, Qwen3-32B, granite-3.3-2b-instruct, granite-3.3-8b-instruct,
granite-4.0-micro, OLMo-2-0425-1B, OLMo-2-1124-7B, OLMo-2-1124-13B, Olmo-3-1025-7B, gemma-2-2b, gemma-2-9b,
gemma-3-1b-pt, gemma-3-4b-pt, gemma-3-12b-pt, gemma-3-27b-pt, gemma-4-12B, gemma-4-31B, SmolLM2-135M, SmolLM3-3B,
c4ai-command-r7b-12-2024, starcoder2-3b, starcoder2-7b and starcoder2-15b.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from math import log, sqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flywheel.errors import BundleError, UnknownNameError
from flywheel.ir.files import is_bundle
from flywheel.models.hf import load_spec
from flywheel.models.hub import cached_folder, cached_repo, is_repo, obtain, repo_of
from flywheel.models.rope import LinearRope, LongRope, ProportionalRope, Rope, RopeScaling, YarnRope
from flywheel.models.spec import DecoderSpec
from flywheel.models.tokenizer import has_tokenizer

_LLAMA_3_1 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
_LLAMA_3_2 = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)

_PHI_3_5 = LongRope(
    short=(
        1.0, 1.0199999809265137, 1.0299999713897705, 1.0299999713897705, 1.0499999523162842, 1.0499999523162842,
        1.0499999523162842, 1.0499999523162842, 1.0499999523162842, 1.0699999332427979, 1.0999999046325684,
        1.1099998950958252, 1.1599998474121094, 1.1599998474121094, 1.1699998378753662, 1.2899998426437378,
        1.339999794960022, 1.679999828338623, 1.7899998426437378, 1.8199998140335083, 1.8499997854232788,
        1.8799997568130493, 1.9099997282028198, 1.9399996995925903, 1.9899996519088745, *(2.0199997425079346,) * 6,
        *(2.0299997329711914,) * 9, 2.0799996852874756, 2.0899996757507324, 2.189999580383301, 2.2199995517730713,
        2.5899994373321533, 2.729999542236328, 2.749999523162842, 2.8399994373321533,
    ),
    long=(
        1.0800000429153442, 1.1100000143051147, 1.1399999856948853, 1.340000033378601, 1.5899999141693115,
        1.600000023841858, 1.6200000047683716, 2.620000123977661, 3.2300000190734863, 3.2300000190734863,
        4.789999961853027, 7.400000095367432, 7.700000286102295, 9.09000015258789, 12.199999809265137,
        17.670000076293945, 24.46000099182129, 28.57000160217285, 30.420001983642578, 30.840002059936523,
        32.590003967285156, 32.93000411987305, 42.320003509521484, 44.96000289916992, 50.340003967285156,
        50.45000457763672, 57.55000305175781, 57.93000411987305, 58.21000289916992, 60.1400032043457,
        62.61000442504883, 62.62000274658203, 62.71000289916992, 63.1400032043457, 63.1400032043457,
        63.77000427246094, 63.93000411987305, 63.96000289916992, 63.970001220703125, 64.02999877929688,
        64.06999969482422, 64.08000183105469, 64.12000274658203, 64.41000366210938, 64.4800033569336,
        64.51000213623047, 64.52999877929688, 64.83999633789062,
    ),
    original_max_position=4096,
    attention_factor=sqrt(1 + log(32) / log(4096)),
)  # fmt: skip
_PHI_4_MINI = LongRope(
    short=(1.0,) * 48,
    long=(
        1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
        2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
        6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
        16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
        32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
    ),
    original_max_position=4096,
    attention_factor=sqrt(1 + log(32) / log(4096)),
)  # fmt: skip

_STARCODER2: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "qkv_bias": True, "o_bias": True, "mlp_bias": True, "norm": "layer", "norm_bias": True, "gated": False,
        "activation": "gelu_tanh", "window": 4096,
    }
)  # fmt: skip
def _all_but_every(every: int, n_layers: int) -> tuple[bool, ...]:
    return tuple([(layer + 1) % every != 0 for layer in range(n_layers)])


def _gemma(
    name: str, hidden: int, intermediate: int, n_layers: int, n_heads: int, n_kv_heads: int, head_dim: int, vocab: int,
    theta: float, max_position: int, window: int, query_scalar: int, full_every: int,
    scaling: LinearRope | None = None, caps: tuple[float | None, float | None] = (None, None),
) -> DecoderSpec:  # fmt: skip
    """A Gemma 2 or 3, of which one layer in `full_every` has no window."""
    third = name.startswith("gemma3")
    return DecoderSpec(
        name, "gemma3_text" if third else "gemma2", hidden, intermediate, n_layers, n_heads, n_kv_heads, head_dim,
        vocab, theta, 1e-6, max_position, tied_head=True, qk_norm=third, rope_scaling=scaling, window=window,
        windowed=_all_but_every(full_every, n_layers), local_rope=Rope(1e4) if third else None, norms="around",
        norm_offset=1.0, activation="gelu_tanh", embed_scale=sqrt(hidden), embed_scale_rounds=True,
        attention_scale=query_scalar**-0.5, attention_cap=caps[0], logits_cap=caps[1],
    )  # fmt: skip


def _gemma4(
    name: str, family: str, hidden: int, intermediate: int, n_layers: int, n_heads: int, n_kv_heads: int,
    full_kv_heads: int,
) -> DecoderSpec:  # fmt: skip
    """A Gemma 4 whose keys are values in layers without a window."""
    return DecoderSpec(
        name, family, hidden, intermediate, n_layers, n_heads, n_kv_heads, 256, 262144, 1e6, 1e-6, 262144,
        tied_head=True, qk_norm=True, rope_scaling=ProportionalRope(0.25), window=1024,
        windowed=_all_but_every(6, n_layers), local_rope=Rope(1e4), norms="around", activation="gelu_tanh",
        embed_scale=sqrt(hidden), embed_scale_rounds=True, attention_scale=1.0, logits_cap=30.0, full_head_dim=512,
        full_kv_heads=full_kv_heads, full_k_is_v=True, v_norm=True, layer_scalar=True,
    )  # fmt: skip


# name, family, hidden, intermediate, n_layers, n_heads, n_kv_heads, head_dim, vocab, rope_theta, norm_eps, max_position
_SPECS: Final = (
    DecoderSpec("llama3-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 5e5, 1e-5, 8192),
    DecoderSpec("llama3-70b", "llama", 8192, 28672, 80, 64, 8, 128, 128256, 5e5, 1e-5, 8192),
    DecoderSpec("llama3.1-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 5e5, 1e-5, 131072,
                rope_scaling=_LLAMA_3_1),
    DecoderSpec("llama3.2-1b", "llama", 2048, 8192, 16, 32, 8, 64, 128256, 5e5, 1e-5, 131072,
                tied_head=True, rope_scaling=_LLAMA_3_2),
    DecoderSpec("llama3.2-3b", "llama", 3072, 8192, 28, 24, 8, 128, 128256, 5e5, 1e-5, 131072,
                tied_head=True, rope_scaling=_LLAMA_3_2),
    DecoderSpec("mistral-7b", "mistral", 4096, 14336, 32, 32, 8, 128, 32768, 1e6, 1e-5, 32768),
    DecoderSpec("mistral-7b-v0.1", "mistral", 4096, 14336, 32, 32, 8, 128, 32000, 1e4, 1e-5, 32768, window=4096),
    DecoderSpec("mistral-small-24b", "mistral", 5120, 32768, 40, 32, 8, 128, 131072, 1e8, 1e-5, 32768),
    DecoderSpec("ministral3-8b", "ministral3", 4096, 14336, 34, 32, 8, 128, 131072, 1e6, 1e-5, 16384,
                rope_scaling=YarnRope(16.0, 16384, 1.0)),
    DecoderSpec("qwen2.5-7b", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 1e6, 1e-6, 131072, qkv_bias=True),
    DecoderSpec("qwen3-0.6b", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 1e6, 1e-6, 40960,
                tied_head=True, qk_norm=True),
    DecoderSpec("qwen3-1.7b", "qwen3", 2048, 6144, 28, 16, 8, 128, 151936, 1e6, 1e-6, 40960,
                tied_head=True, qk_norm=True),
    DecoderSpec("qwen3-4b", "qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 1e6, 1e-6, 40960,
                tied_head=True, qk_norm=True),
    DecoderSpec("qwen3-4b-2507", "qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 5e6, 1e-6, 262144,
                tied_head=True, qk_norm=True),
    DecoderSpec("qwen3-8b", "qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 1e6, 1e-6, 40960, qk_norm=True),
    DecoderSpec("qwen3-14b", "qwen3", 5120, 17408, 40, 40, 8, 128, 151936, 1e6, 1e-6, 40960, qk_norm=True),
    DecoderSpec("qwen3-32b", "qwen3", 5120, 25600, 64, 64, 8, 128, 151936, 1e6, 1e-6, 40960, qk_norm=True),
    DecoderSpec("granite-3.3-2b", "granite", 2048, 8192, 40, 32, 8, 64, 49159, 1e7, 1e-5, 131072, tied_head=True,
                embed_scale=12.0, residual_scale=0.22, attention_scale=0.015625, logits_scale=1 / 8),
    DecoderSpec("granite-3.3-8b", "granite", 4096, 12800, 40, 32, 8, 128, 49159, 1e7, 1e-5, 131072, tied_head=True,
                embed_scale=12.0, residual_scale=0.22, attention_scale=0.0078125, logits_scale=1 / 16),
    DecoderSpec("granite-4.0-micro", "granitemoehybrid", 2560, 8192, 40, 40, 8, 64, 100352, 1e7, 1e-5, 131072,
                tied_head=True, embed_scale=12.0, residual_scale=0.22, attention_scale=0.015625, logits_scale=1 / 10),
    DecoderSpec("olmo2-1b", "olmo2", 2048, 8192, 16, 16, 16, 128, 100352, 5e5, 1e-6, 4096, norms="behind",
                qk_norm=True, wide_qk_norm=True),
    DecoderSpec("olmo2-7b", "olmo2", 4096, 11008, 32, 32, 32, 128, 100352, 5e5, 1e-6, 4096, norms="behind",
                qk_norm=True, wide_qk_norm=True),
    DecoderSpec("olmo2-13b", "olmo2", 5120, 13824, 40, 40, 40, 128, 100352, 5e5, 1e-6, 4096, norms="behind",
                qk_norm=True, wide_qk_norm=True),
    DecoderSpec("olmo3-7b", "olmo3", 4096, 11008, 32, 32, 32, 128, 100278, 5e5, 1e-6, 65536, norms="behind",
                qk_norm=True, wide_qk_norm=True, window=4096, windowed=_all_but_every(4, 32), local_rope=Rope(5e5),
                rope_scaling=YarnRope(8.0, 8192, 1.2079441541679836)),
    _gemma("gemma2-2b", 2304, 9216, 26, 8, 4, 256, 256000, 1e4, 8192, 4096, 256, 2, caps=(50.0, 30.0)),
    _gemma("gemma2-9b", 3584, 14336, 42, 16, 8, 256, 256000, 1e4, 8192, 4096, 256, 2, caps=(50.0, 30.0)),
    _gemma("gemma3-1b", 1152, 6912, 26, 4, 1, 256, 262144, 1e6, 32768, 512, 256, 6),
    _gemma("gemma3-4b", 2560, 10240, 34, 8, 4, 256, 262208, 1e6, 131072, 1024, 256, 6, LinearRope(8.0)),
    _gemma("gemma3-12b", 3840, 15360, 48, 16, 8, 256, 262208, 1e6, 131072, 1024, 256, 6, LinearRope(8.0)),
    _gemma("gemma3-27b", 5376, 21504, 62, 32, 16, 128, 262208, 1e6, 131072, 1024, 168, 6, LinearRope(8.0)),
    _gemma4("gemma4-12b", "gemma4_unified_text", 3840, 15360, 48, 16, 8, 1),
    _gemma4("gemma4-31b", "gemma4_text", 5376, 21504, 60, 32, 16, 4),
    DecoderSpec("smollm2-135m", "llama", 576, 1536, 30, 9, 3, 64, 49152, 1e5, 1e-5, 8192, tied_head=True),
    DecoderSpec("smollm3-3b", "smollm3", 2048, 11008, 36, 16, 4, 128, 128256, 5e6, 1e-6, 65536, tied_head=True,
                turned=(True, True, True, False)),
    DecoderSpec("phi-4", "phi3", 5120, 17920, 40, 40, 10, 128, 100352, 2.5e5, 1e-5, 16384),
    DecoderSpec("phi-3.5-mini", "phi3", 3072, 8192, 32, 32, 32, 96, 32064, 1e4, 1e-5, 131072, rope_scaling=_PHI_3_5),
    DecoderSpec("phi-4-mini", "phi3", 3072, 8192, 32, 24, 8, 128, 200064, 1e4, 1e-5, 131072, tied_head=True,
                rope_scaling=_PHI_4_MINI, rotary_dim=96),
    DecoderSpec("glm-4-9b-0414", "glm4", 4096, 13696, 40, 32, 2, 128, 151552, 1e4, 1e-5, 32768, qkv_bias=True,
                rotary_dim=64, norms="around"),
    DecoderSpec("glm-4-32b-0414", "glm4", 6144, 23040, 61, 48, 2, 128, 151552, 1e4, 1e-5, 32768, rotary_dim=64,
                norms="around"),
    DecoderSpec("command-r7b", "cohere2", 4096, 14336, 32, 32, 8, 128, 256000, 5e4, 1e-5, 132096, tied_head=True,
                norm="layer", norms="shared", logits_scale=0.25, window=4096, windowed=(True, True, True, False) * 8,
                nope_full=True),
    DecoderSpec("starcoder2-3b", "starcoder2", 3072, 12288, 30, 24, 2, 128, 49152, 999999.4420358813, 1e-5, 16384,
                tied_head=True, **_STARCODER2),
    DecoderSpec("starcoder2-7b", "starcoder2", 4608, 18432, 32, 36, 4, 128, 49152, 1e6, 1e-5, 16384,
                tied_head=True, **_STARCODER2),
    DecoderSpec("starcoder2-15b", "starcoder2", 6144, 24576, 40, 48, 4, 128, 49152, 1e5, 1e-5, 16384, **_STARCODER2),
)  # fmt: skip

CATALOG: Final[Mapping[str, DecoderSpec]] = MappingProxyType({spec.name: spec for spec in _SPECS})
"""Built-in decoders by name."""


_UNREAD: Final = (
    "*.bin", "*.bin.index.json", "*.gguf", "*.ggml", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.npz", "*.onnx",
    "*.nemo", "*.tflite",
)  # fmt: skip
"""Patterns of files of weights in formats that are not read."""

_NO_WEIGHTS: Final = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "tokenizer", "preprocessor")
"""Beginnings of names of such files that hold no weights."""


def model_name(given: str) -> str:
    """The name that stores and files have for a model, however it is `given`; `given` itself where no model has that
    name.

    The name is that of the catalog, in any case; or the absolute path of a directory (or of its config.json); or
    OWNER/NAME of a Hugging Face Hub repository in the local cache. An exact name goes before a path, and a path before
    other names.
    """
    if given in CATALOG:
        return given
    if _exists(given):
        path = Path(given)
        folder = (path.parent if path.name == "config.json" else path).resolve()
        return repo_of(folder) or str(folder)
    if given.lower() in CATALOG:
        return given.lower()
    return cached_repo(given) or given


def model_path(name: str) -> Path | None:
    """The path of the model of a `model_name`; None for one of the catalog, and where no model has that name."""
    if name in CATALOG:
        return None
    return Path(name) if _exists(name) else cached_folder(name)


def fetch_model(given: str, weights: bool, announce: Callable[[str], None]) -> str:
    """The `model_name` of a model. A Hub repository that the cache lacks is downloaded first, with its weights if
    `weights`.

    `announce` is told about a download. Raises UnknownNameError as `obtain`.
    """
    name = model_name(given)
    if not is_repo(name):
        return name
    try:
        obtain(name, weights, announce)
    except UnknownNameError as error:
        close = _close_folders(given)
        if not close:
            raise
        raise UnknownNameError(f"{error}; did you mean {' or '.join(close)}?") from None
    return model_name(name)


def modules_of(given: str, *, texts: bool = False) -> list[str]:
    """The modules of flywheel's extras that loading a model imports: a name needs torch, and a checkpoint what reads
    its files, with `texts` its tokenizer's too."""
    name = model_name(given)
    path = model_path(name)
    if path is None:
        return ["torch", "safetensors", "huggingface_hub"] if is_repo(name) else ["torch"]
    folder = path if path.is_dir() else path.parent
    reads = ["safetensors"] if has_checkpoint(folder) else []
    reads += ["tokenizers"] if texts and has_tokenizer(folder) else []
    return ["torch", *reads]


def resolve_model(given: str) -> DecoderSpec:
    """The decoder of that name, or the one described by an existing `config.json`, its directory, or a repository in
    the Hub's cache.

    Raises UnknownNameError, with close names if there are any, if it is none of them, BundleError for a bundle, which
    has a config.json but no weights, and UnsupportedModelError as `load_spec`.
    """
    name = model_name(given)
    if name in CATALOG:
        return CATALOG[name]
    path = model_path(name)
    if path is not None:
        if is_bundle(str(path)):
            raise BundleError(f"{given}: is a bundle, not a checkpoint; Decoder.load and flywheel serve run it")
        return load_spec(path)
    close = _close_folders(given) or get_close_matches(given.lower().rpartition("/")[2], CATALOG, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "flywheel models lists all"
    what = "no model, no path and no repository in the Hub's cache" if is_repo(given) else "no model and no path"
    raise UnknownNameError(f"{what} is called {given!r}; {hint}")


def _close_folders(given: str) -> list[str]:
    """Directories of models beside the path `given`, whose names are close to its own."""
    parent, slash, name = given.rstrip("/").rpartition("/")
    try:
        there = [path.parent.name for path in Path(parent or slash or ".").glob("*/config.json")]
    except (OSError, ValueError):
        return []
    return [f"{parent}{slash}{close}" for close in get_close_matches(name, there, n=2, cutoff=0.6)]


def _exists(path: str) -> bool:
    try:
        return bool(path) and Path(path).exists()
    except (OSError, ValueError):
        return False

def has_checkpoint(folder: Path) -> bool:
    """Whether a directory has a safetensors file, or an index of several."""
    return any(folder.glob("*.safetensors*"))


def unread_weights(folder: Path) -> tuple[str, ...]:
    """Names of a directory's files of weights in formats that are not read."""
    found = {file.name for pattern in _UNREAD for file in folder.glob(pattern)}
    return tuple(sorted(name for name in found if not name.lower().startswith(_NO_WEIGHTS)))
