"""SimpleTuner's config.json: the model, its families and flavours."""

from typing import Any

from schemas.foreign.draft import Draft, Refused, Row, Several, dropped, refused
from schemas.foreign.models import CHOOSE, checkpoint, chosen, flavour_of_repo
from schemas.foreign.values import one_of, precision, shown, text, whole

#: Family there, flavour there -> family and flavour here. The first flavour is the default there.
FLAVOURS: dict[str, dict[str, tuple[str, str]]] = {
    "sana": {
        "sana1.5-4.8b-1024": ("sana", "sana1.5-4.8b-1024px"),
        "sana1.5-1.6b-1024": ("sana", "sana1.5-1.6b-1024px"),
        "sana1.0-1.6b-2048": ("sana", "sana-1600m-2kpx-bf16"),
        "sana1.0-1.6b-1024": ("sana", "sana-1600m-1024px-bf16"),
        "sana1.0-600m-1024": ("sana", "sana-600m-1024px"),
        "sana1.0-600m-512": ("sana", "sana-600m-512px"),
    },
    "z_image": {
        "turbo-ostris-v2": ("z-image", "z-image-turbo"),
        "turbo": ("z-image", "z-image-turbo"),
        "base": ("z-image", "z-image"),
    },
    "qwen_image": {
        "v2.0": ("qwen-image", "qwen-image-2512"),
        "v1.0": ("qwen-image", "qwen-image"),
        "edit-v1": ("qwen-image-edit", "qwen-image-edit"),
        "edit-v2": ("qwen-image-edit-plus", "qwen-image-edit-2509"),
        "edit-v2+": ("qwen-image-edit-plus", "qwen-image-edit-2509"),
        "edit-v3": ("qwen-image-edit-plus", "qwen-image-edit-2511"),
    },
    "wan": {
        "t2v-480p-1.3b-2.1": ("wan2.1", "t2v-1.3b"),
        "t2v-480p-14b-2.1": ("wan2.1", "t2v-14b"),
        "ti2v-5b-2.2": ("wan2.2-5b", "t2v-5b"),
        "i2v-14b-2.2-high": ("wan2.2-a14b", "i2v-a14b"),
        "i2v-14b-2.2-low": ("wan2.2-a14b", "i2v-a14b"),
    },
    "flux2": {"klein-9b": ("flux2-klein", "klein-base-9b"), "klein-4b": ("flux2-klein", "klein-base-4b")},
}


def _name(draft: Draft) -> str:
    name = str(draft.given.get("model_family"))
    return name if name.startswith("kandinsky5-") else name.replace("-", "_").replace("kandinsky5_", "kandinsky5-")


def family(value: Any, draft: Draft) -> Several:
    name, word = _name(draft), draft.given.get("model_flavour")
    if name.startswith("kandinsky5-"):
        return chosen(name)
    if name not in FLAVOURS:
        raise Refused(f"{shown(value)} is not trained here; {CHOOSE}")
    path = draft.given.get("pretrained_model_name_or_path")
    if word is None and path and (published := flavour_of_repo(str(path))):
        return chosen(*published)
    return flavour(word, draft) if word else chosen(*next(iter(FLAVOURS[name].values())))


def flavour(value: Any, draft: Draft) -> Several:
    name, word = _name(draft), str(value)
    if name not in FLAVOURS:
        return Several({"model.flavour": word})
    if word not in FLAVOURS[name]:
        raise Refused(f"{name}'s flavour {shown(word)} is not trained here; known: {', '.join(FLAVOURS[name])}")
    return chosen(*FLAVOURS[name][word], word.rpartition("-")[2] if word.endswith(("-high", "-low")) else None)


QUANTIZED = one_of(
    {"no_change": None, **{name: name for name in ("int8-quanto", "int8-torchao", "fp8-torchao", "nf4-bnb")}},
    "train.base_precision takes int8-quanto, int8-torchao, fp8-torchao, nf4-bnb",
)
QUANTIZED_TEXT = one_of(
    {"no_change": None, "int8-quanto": "int8-quanto", "nf4-bnb": "nf4-bnb"},
    "text.quantization takes int8-quanto, nf4-bnb",
)
MODEL = {
    "model_family": Row("model.family", family),
    "model_flavour": Row("model.flavour", flavour),
    "model_type": Row("train.adapter.type", one_of({"lora": "lora", "full": "full"}, "valid: lora, full"),
              "lora or full"),
    "pretrained_model_name_or_path": Row("model.path", checkpoint, "a published checkpoint is its model.flavour"),
    "revision": Row("model.revision", text),
    "mixed_precision": Row("model.precision", precision, "train.precision is of training alone"),
    "base_model_precision": Row(
        "train.base_precision", QUANTIZED, "of the transformer; text.quantization is of the text encoder"
    ),
    "text_encoder_1_precision": Row("text.quantization", QUANTIZED_TEXT, "of the language model"),
    "quantize_via": Row(
        "train.quantize_via", one_of({"cpu": "cpu", "accelerator": "device", "pipeline": None}, "valid: cpu, device")
    ),
    "tokenizer_max_length": Row("text.max_length", whole),
    **dropped("the second text encoder is small, and is never quantized", "text_encoder_2_precision"),
    **dropped("no family has so many text encoders", "text_encoder_3_precision", "text_encoder_4_precision"),
    **dropped("model.precision is of all frozen weights", "base_model_default_dtype"),
    **dropped("the family's template has the instruction, as its pipeline", "sana_complex_human_instruction"),
    **dropped("weights are safetensors; no code of a repository is run", "variant", "trust_remote_code"),
    **refused(
        "a checkpoint is one folder in diffusers' layout: put this part into a copy of it, and name that in model.path",
        "pretrained_transformer_model_name_or_path", "pretrained_transformer_subfolder",
        "pretrained_vae_model_name_or_path", "pretrained_unet_model_name_or_path", "pretrained_unet_subfolder",
        "pretrained_t5_model_name_or_path", "pretrained_gemma_model_name_or_path",
        "qwen_text_encoder_model_name_or_path", "quantization_config",
    ),
    **refused("no control network is trained; a model that edits takes conditioning_data of a dataset",
              "controlnet", "control", "controlnet_model_name_or_path", "controlnet_custom_config"),
    **refused("the published weights are trained", "prediction_type", "refiner_training"),
}  # fmt: skip
