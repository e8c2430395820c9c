"""Tiny models of transformers' families, with weights large enough to show an error, and inputs for them."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

WORDS, LENGTH, BATCH = 99, 17, 3
MOST_WEIGHTS = 40_000_000

SIZES = {
    32: "hidden_size d_model n_embd embed_dim hidden_dim dim width encoder_hidden_size decoder_hidden_size "
    "text_hidden_size projection_dim embedding_size out_hidden_size output_dim projector_hidden_size "
    "text_embed_dim vision_embed_dim word_embed_proj_dim embedding_dim fusion_hidden_size decoder_dim "
    "encoder_dim visual_hidden_size backbone_dim hidden_size_per_layer_input text_dim emb_dim "
    "vision_hidden_size speech_hidden_size prediction_dim",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff mlp_dim moe_intermediate_size d_inner "
    "shared_expert_intermediate_size ffn_hidden_size decoder_intermediate_size inner_dim n_inner "
    "moe_shared_expert_intermediate_size dense_intermediate_size encoder_intermediate_size "
    "feedforward_dim dim_feedforward intermediate_size_mlp ffn_intermediate_size",
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "attention_heads encoder_num_attention_heads decoder_num_attention_heads vision_heads n_query "
    "num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads "
    "mamba_num_heads num_encoder_heads num_decoder_heads",
    2: "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts num_selected_experts "
    "index_n_heads linear_num_key_heads encoder_layers decoder_layers num_layers n_layer n_layers depth "
    "num_decoder_layers num_encoder_layers num_hidden_layers encoder_num_hidden_layers "
    "decoder_num_hidden_layers decoder_num_layers encoder_num_layers vision_num_hidden_layers "
    "num_layers_encoder num_layers_decoder num_hidden_groups",
    1: "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers",
    8: "head_dim d_kv attention_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim "
    "linear_value_head_dim kv_channels swa_head_dim global_head_dim encoder_head_dim decoder_head_dim "
    "attention_chunk_size local_attention num_mel_bins mamba_head_dim rotary_dim mamba_n_heads "
    "mamba_d_head query_pre_attn_scalar",
    16: "q_lora_rank kv_lora_rank qk_head_dim index_head_dim max_source_positions feature_size o_lora_rank",
    7: "sliding_window attention_window_size sliding_window_size",
    5: "index_topk",
    128: "max_position_embeddings n_positions max_target_positions max_seq_len n_ctx",
    WORDS: "vocab_size vocab_size_per_layer_input audio_vocab_size text_vocab_size entity_vocab_size",
    64: "image_size",
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}
# Sizes that can be changed without changing others.
FREE = f"{SIZES[2]} {SIZES[48]} vocab_size num_experts n_routed_experts num_local_experts sliding_window image_size"
FREE_SIZE_OF = {name: SIZE_OF[name] for name in FREE.split()}
GROUPED = (
    "num_key_value_heads",
    "decoder_num_key_value_heads",
    "encoder_num_key_value_heads",
    "n_head_kv",
    "num_kv_heads",
)
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "attention_types", "block_types", "attn_layer_types")
# Settings that do not follow from the names above, by model type.
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
ROPES = {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}
PARTS = ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
BY_TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}
TORSO = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": RESNET}
SERIES = {"prediction_length": 4, "num_time_features": 1}
POOLED = {"index_kpool": 1, "linear_num_heads": 4, "linear_head_dim": 8}
CHOOSING = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
WANTED: dict[str, dict[str, Any]] = {
    "autoformer": SERIES,
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "cohere_compass": {"text_config": ROPES},
    "cohere_compass_text": ROPES,
    "conditional_detr": TORSO,
    "dab-detr": TORSO,
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8}},
    "deepseek_ocr2_text": EXPERTS | {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": EXPERTS,
    "deformable_detr": TORSO,
    "detr": TORSO,
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dots1": EXPERTS | {"n_shared_experts": 1},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}}},
    "ernie4_5_vl_moe_text": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
    "esm": {"vocab_size": WORDS, "pad_token_id": 1, "mask_token_id": 90},
    "esmc": {"vocab_size": WORDS},
    "gemma3n_text": BY_TURNS | {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0]},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "glm4v_moe_text": {"rope_parameters": PARTS},
    "glm4v_moe": {"text_config": {"rope_parameters": PARTS}},
    "glm5_next": {"text_config": POOLED},
    "glm5_next_text": POOLED,
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 7},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl": {"text_config": {"head_dim": 8}},
    "hunyuan_vl_text": {"head_dim": 8},
    "informer": SERIES,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "longcat_flash": {"n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 32, "moe_topk": 2},
    "ministral": {"head_dim": 8},
    "mistral4": {"qk_rope_head_dim": 4, "qk_head_dim": 12},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "nemotron_h": {"n_groups": 2},
    "patchtsmixer": {"self_attn": True},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "qwen4_exp": {"text_config": CHOOSING},
    "qwen4_exp_text": CHOOSING,
    "sam3_lite_text_text_model": {"num_hidden_layers": 3},
    "step3p5": {"sliding_window": 7},
    "step3p7": {"text_config": {"sliding_window": 7}},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "table-transformer": TORSO,
    "time_series_transformer": SERIES,
    "vits": {"vocab_size": WORDS},
    "wav2vec2-bert": {"vocab_size": WORDS},
    "wav2vec2-conformer": {"vocab_size": WORDS},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 3, "num_hidden_layers": 6},
}

# The suffixes of a type's models: the first that exists is used.
TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "TEXT_TO_WAVEFORM",
    "MASKED_LM",
    "CAUSAL_LM",
    "TEXT_TO_SPECTROGRAM",
    "CTC",
    "",
)


def before(*release: int) -> bool:
    """Whether the installed transformers is older than this release."""
    return tuple(int(n) for n in transformers.__version__.split(".")[: len(release)]) < release


def types() -> dict[str, list[str]]:
    """The families, which are folders of transformers' models, and their model types."""
    found: dict[str, list[str]] = {}
    for kind in configuration_auto.CONFIG_MAPPING_NAMES:
        found.setdefault(configuration_auto.model_type_to_module_name(kind), []).append(kind)
    return dict(sorted(found.items()))


def config_of(kind: str, sizes: Mapping[str, int] | None = None) -> Any:
    """The smallest configuration of a model type, or one with only some sizes made small."""
    return _small(configuration_auto.CONFIG_MAPPING[kind](), WANTED.get(kind, {}), sizes or SIZE_OF)


def class_of(kind: str, config: Any) -> Any:
    for task in TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES", {})
        name = mapping.get(kind)
        if name is not None:
            return getattr(transformers, name if isinstance(name, str) else name[0])
    folder = configuration_auto.model_type_to_module_name(kind)
    for file in (f"transformers.models.{folder}.modeling_{kind}", f"transformers.models.{folder}.modeling_{folder}"):
        try:
            found = vars(importlib.import_module(file)).values()
        except ImportError:
            continue
        for x in found:
            if (
                inspect.isclass(x)
                and getattr(x, "config_class", None) is type(config)
                and "PreTrained" not in x.__name__
            ):
                return x
    raise LookupError("no model of this configuration")


def build(made: Any, config: Any, implementation: str) -> Any:
    """Build a model whose weights make attention far from uniform; the same for each implementation."""
    torch.manual_seed(0)
    config = deepcopy(config)
    with torch.device("meta"):
        size = sum(x.numel() for x in made(deepcopy(config)).parameters())
    if size > MOST_WEIGHTS:
        raise MemoryError(f"{size / 1e6:.0f} million weights are too many")
    model = made._from_config(config, attn_implementation=implementation).eval()
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, x in sorted(model.named_parameters()):
            if not x.is_floating_point():
                continue
            noise = torch.randn(x.shape, generator=drawn).to(x.dtype)
            if x.ndim > 1:
                x.copy_(noise * 1.5 / math.sqrt(max(1, math.prod(x.shape[1:]))))
            else:
                x.copy_(torch.where(x.isfinite() & (x.abs() < 10), x, 0) + 0.2 * noise)
    return model


def inputs(model: Any, padding: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield candidate inputs of forward(), fewest first: words; words and its other arguments; its other arguments."""
    asked = inspect.signature(model.forward).parameters
    drawn = torch.Generator().manual_seed(1)
    words: dict[str, Any] = {}
    if "input_ids" in asked:
        words["input_ids"] = torch.randint(5, 80, (BATCH, LENGTH), generator=drawn)
        if "attention_mask" in asked:
            words["attention_mask"] = seen = torch.ones(BATCH, LENGTH, dtype=torch.long)
            for row, gone in ((0, 6), (1, 2)) if padding is not None else ():
                seen[row, slice(0, gone) if padding == "left" else slice(LENGTH - gone, None)] = 0
            pad = getattr(model.config, "pad_token_id", None)
            end = getattr(getattr(model.config, "text_config", model.config), "eos_token_id", None)
            if isinstance(end, int) and end < WORDS:  # some models read that position
                last = (seen * torch.arange(LENGTH)).argmax(dim=1, keepdim=True)
                words["input_ids"].scatter_(1, last, end)
            words["input_ids"].masked_fill_(seen == 0, pad if isinstance(pad, int) and 0 <= pad < WORDS else 0)
    if "bbox" in asked and words:
        box = torch.rand(BATCH, LENGTH, 4, generator=drawn).sort(-1).values
        words["bbox"] = (100 * box).long() if hasattr(model.config, "max_2d_position_embeddings") else box
    more = {name: torch.randn(shape, generator=drawn) for name, shape in _features(model.config, asked)}
    if "flattened_patches" in more:  # they begin with their row and column
        more["flattened_patches"][..., :2] = torch.arange(16)[:, None]
    if "past_time_features" in more:
        more["past_observed_mask"] = torch.ones_like(more["past_values"])
    if "grid_thw" in asked and "input_ids" not in asked:
        more["grid_thw"] = torch.tensor([[1, 4, 4]])
    answer: dict[str, Any] = {}
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in asked:
        answer["decoder_input_ids"] = torch.randint(5, 80, (BATCH, 9), generator=drawn)
    for given in (words, words | more, more, *({name: x} for name, x in more.items() if len(more) > 1)):
        if given:
            yield given | answer


def _features(config: Any, asked: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Image and audio inputs."""
    vision = getattr(config, "vision_config", config)
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", config)
    if "flattened_patches" in asked:
        yield "flattened_patches", (BATCH, 16, 2 + getattr(vision, "patch_embed_hidden_size", 768))
    if "past_values" in asked and hasattr(config, "lags_sequence"):  # a time series and its time features
        before, after = config.context_length + max(config.lags_sequence), config.prediction_length
        yield from (("past_values", (BATCH, before)), ("future_values", (BATCH, after)))
        yield from (("past_time_features", (BATCH, before, 1)), ("future_time_features", (BATCH, after, 1)))
    elif "past_values" in asked and hasattr(config, "num_input_channels"):
        yield "past_values", (BATCH, config.context_length, config.num_input_channels)
    if "grid_thw" in asked and "input_ids" not in asked:  # patches of an image of 4 x 4 patches
        patch, deep = getattr(vision, "patch_size", 14), getattr(vision, "temporal_patch_size", 1)
        channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
        yield next(iter(asked)), (16, channels * deep * patch**2)
        return
    if "pixel_values_videos" in asked and "input_ids" not in asked:
        frames = getattr(vision, "frames_per_clip", None) or getattr(vision, "num_frames", 4)
        yield "pixel_values_videos", (1, frames, 3, vision.image_size, vision.image_size)
    elif "pixel_values" in asked and config.model_type in FILMS:
        yield "pixel_values", (1, vision.num_frames, 3, vision.image_size, vision.image_size)
    elif "pixel_values" in asked:
        size = getattr(vision, "image_size", None) or getattr(vision, "img_size", None) or 64
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        yield "pixel_values", (BATCH, channels if isinstance(channels, int) else 3, height, width)
    if "input_values" in asked and hasattr(audio, "num_mel_bins") and hasattr(audio, "max_length"):
        yield "input_values", (BATCH, audio.max_length, audio.num_mel_bins)
    elif "input_values" in asked:
        mono = hasattr(audio, "audio_channels") or hasattr(audio, "dac_config")
        shape = (BATCH, 1, 2000) if mono else (BATCH, 2000)
        yield "input_values", shape
    if "input_features" in asked:
        bins = next((x for name in BINS if (x := getattr(audio, name, None))), 80)
        frames = 2 * getattr(audio, "max_source_positions", 32)
        by_time = audio.model_type in FRAMES_FIRST
        yield "input_features", (BATCH, frames, bins) if by_time else (BATCH, bins, frames)


FILMS = ("timesformer", "videomae", "vivit", "xclip", "xclip_vision_model")
BINS = ("input_feat_per_channel", "num_mel_bins", "feature_projection_input_dim", "feature_size")
FRAMES_FIRST = (
    "speech_to_text",
    "seamless_m4t",
    "seamless_m4t_v2",
    "granite_speech5_encoder",
    "wav2vec2-bert",
    "parakeet_encoder",
    "parakeet_ctc",
    "lasr_encoder",
    "lasr_ctc",
)


def _small(config: Any, wanted: dict[str, Any], sizes: Mapping[str, int]) -> Any:
    given: dict[str, Any] = {}
    taken = iter(range(WORDS - 1, 80, -1))
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if isinstance(value, transformers.PretrainedConfig):
            given[name] = _small(value, wanted.get(name, {}), sizes)
        elif (small := _smaller(name, value, config, taken, sizes)) is not value:
            given[name] = small
    given |= {
        name: x
        for name, x in wanted.items()
        if not isinstance(getattr(config, name, None), transformers.PretrainedConfig)
    }
    if "layer_types" in given:
        for name in ("num_hidden_layers", "n_layer", "num_layers"):
            if name in given and name not in wanted:
                given[name] = len(given["layer_types"])
    made = type(config)(**given)
    return made


def _smaller(name: str, value: Any, config: Any, taken: Iterator[int], sizes: Mapping[str, int]) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if name in GROUPED and isinstance(value, int) and "num_attention_heads" in sizes:
        heads = getattr(config, "num_attention_heads", getattr(config, "decoder_attention_heads", value))
        return 1 if value == 1 else 4 if value == heads else 2
    if name in KINDS and isinstance(value, (list, tuple)) and all(isinstance(x, str) for x in value):
        kinds = list(dict.fromkeys(value))
        return (kinds * 2)[: max(2, len(kinds))]
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict) and "head_dim" in sizes:
        return _rope(value)
    if name == "patch_size" and isinstance(value, int):
        return min(value, 16)
    if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value > 80:
        return next(taken)
    if name.endswith("_token_id") and isinstance(value, (list, tuple)):
        return next(taken)
    if name == "attn_logit_softcapping":
        return 3.0  # a cap that is reached by the scores of a tiny model
    if name == "attention_multiplier":
        return 8**-0.5  # for heads of 8
    if name in sizes and isinstance(value, int) and value > sizes[name]:
        return sizes[name]
    if name in ("depths", "num_blocks") and isinstance(value, (list, tuple)):
        return type(value)(min(1, x) for x in value)
    return value


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Sections and factors count pairs of a head of 8."""
    small = {} if value.get("rope_type") != "default" else {"mrope_section": [2, 1, 1]}
    for name, x in value.items():
        if isinstance(x, dict):
            x = _rope(x)
        elif name == "mrope_section":
            x = [2, 1, 1][: len(x)]
        elif name in ("short_factor", "long_factor"):
            x = list(x)[:4]
        small[name] = x
    return small
