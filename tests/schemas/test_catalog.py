"""The catalog against the installed pipelines: an upgrade of diffusers that changes them fails here."""

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import diffusers
import numpy as np
import pytest
from transformers import AutoTokenizer

from schemas.catalog import FAMILIES, get_flavour
from schemas.family import IS_DISTILLED
from tests.qwen_processor import absent_processor

PIPELINES = {(family.name, task): name for family in FAMILIES.values() for task, name in family.pipelines.items()}
KANDINSKY = [key for key in PIPELINES if key[0].startswith("kandinsky5")]
EDIT = [key for key in PIPELINES if key[0].startswith("qwen-image-edit")]
CALLED = [key for key in PIPELINES if FAMILIES[key[0]].modular is None]
QWEN_21 = [("qwen-image-2.1", "t2i"), ("qwen-image-2.1", "i2i")]
WAN = [key for key in PIPELINES if key[0].startswith("wan")]


def pipeline(key):
    kind = getattr(diffusers, PIPELINES[key])
    parameters = inspect.signature(kind).parameters.values()
    parts = {parameter.name: None for parameter in parameters if parameter.default is inspect.Parameter.empty}
    return kind(**parts | absent_processor(kind))


def default(function, name):
    return inspect.signature(function).parameters[name].default


def assigned(function, name) -> list[str]:
    """Strings that the function's body gives to the variable `name`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and [getattr(target, "id", None) for target in node.targets] == [name]
    ]


def test_every_task_of_every_family_is_compared():
    """For all tasks with a pipeline in diffusers."""
    compared = {name: family for name, family in FAMILIES.items() if family.pipelines}
    tasks = {(name, flavour.task) for name, family in compared.items() for flavour in family.flavours.values()}
    assert tasks == {(name, task) for name, family in compared.items() for task in family.templates} == set(PIPELINES)


def test_the_docs_contain_the_shift_of_every_flavour():
    text = (Path(__file__).resolve().parents[2] / "docs/methods.md").read_text().partition("## Noise levels")[2]
    defaults = text.partition("The default is the flavour's:")[2].partition(". A published")[0]
    shifts = {f"{flavour.shift:g}" for family in FAMILIES.values() for flavour in family.flavours.values()}
    assert shifts <= {*re.findall(r"[\d.]+", defaults)}


@pytest.mark.parametrize("key", KANDINSKY)
def test_kandinsky_templates(key):
    template, pipe = FAMILIES[key[0]].templates[key[1]], pipeline(key)
    assert template.text == pipe.prompt_template
    assert template.crop == pipe.prompt_template_encode_start_idx
    assert template.max_length == default(pipe.__call__, "max_sequence_length")
    assert template.max_length == default(pipe.encode_prompt, "max_sequence_length")
    assert template.with_image == ("image" in inspect.signature(pipe.encode_prompt).parameters)


def test_sanas_instruction():
    template, pipe = FAMILIES["sana"].templates["t2i"], pipeline(("sana", "t2i"))
    assert template.text == "\n".join(default(pipe.__call__, "complex_human_instruction")) + "{}"
    assert template.max_length == default(pipe.__call__, "max_sequence_length")
    assert template.crop is None and not template.negative_uses_template
    assert default(pipe.__call__, "clean_caption") is False


def test_z_images_template():
    """Its text is compared with the tokenizer's chat template by the encoder."""
    template, pipe = FAMILIES["z-image"].templates["t2i"], pipeline(("z-image", "t2i"))
    assert template.max_length == default(pipe.__call__, "max_sequence_length") and template.layers == (-2,)
    assert template.cleaner.text(" A \n b ") == " A \n b "


def test_qwen_images_template():
    """max_length: of the call, whose encode_prompt alone keeps twice as many tokens. Captions are not cleaned."""
    template, pipe = FAMILIES["qwen-image"].templates["t2i"], pipeline(("qwen-image", "t2i"))
    assert template.text == pipe.prompt_template_encode and template.crop == pipe.prompt_template_encode_start_idx
    assert template.max_length == default(pipe.__call__, "max_sequence_length") <= pipe.tokenizer_max_length
    assert template.cleaner.text(" A \n b ") == " A \n b "


def test_krea_2s_template():
    """Qwen-Image's, whose end the pipeline never cuts; layers and sizes of the pipeline."""
    template, pipe = FAMILIES["krea2"].templates["t2i"], pipeline(("krea2", "t2i"))
    ends = pipe.prompt_template_encode_prefix, pipe.prompt_template_encode_suffix
    assert template.text == "{}".join(ends) and template.crop == pipe.prompt_template_encode_start_idx
    assert template.layers == pipe.text_encoder_select_layers and template.keeps_end
    assert template.max_length == default(pipe.__call__, "max_sequence_length")
    assert template.cleaner.text(" A \n b ") == " A \n b "


@pytest.mark.parametrize("key", EDIT)
def test_the_edit_pipelines_templates(key):
    """Which cut nothing, and put a line for each reference before the caption, or have the only one in the template."""
    template, pipe = FAMILIES[key[0]].templates[key[1]], pipeline(key)
    assert template.text == pipe.prompt_template_encode and template.crop == pipe.prompt_template_encode_start_idx
    lines = assigned(type(pipe)._get_qwen_prompt_embeds, "img_prompt_template")
    assert lines == ([template.reference] if template.reference else []) and template.text.count("{}") == 1
    assert template.cleaner.text(" A \n b ") == " A \n b " and template.with_image


def test_qwen_image_21s_templates():
    """The caption, and a space for an empty one; references are numbered and joined by spaces."""
    family, pipe = FAMILIES["qwen-image-2.1"], pipeline(("qwen-image-2.1", "i2i"))
    template, edit = family.templates["t2i"], family.templates["i2i"]
    assert template.text == edit.text == pipe.prompt_template_t2i and not template.is_normed
    assert pipe.prompt_template_ti2i == edit.render(edit.reference.replace("{}", "1") + "{}")
    assert edit.separator == " " and template.cleaner.text("") == " " and template.cleaner.text(" A \n ") == " A \n "


@pytest.mark.parametrize("key", [*EDIT, QWEN_21[1]])
def test_sizes_of_references_are_the_edit_pipelines(key):
    """For pictures of the autoencoder and of the prompt."""
    module = importlib.import_module(type(pipeline(key)).__module__)
    family = FAMILIES[key[0]]
    rng = np.random.default_rng(0)
    width, height = np.concatenate([rng.integers(1, 5000, (2, 500)), [[1, 48, 16, 1024], [1, 16, 48, 1024]]], 1)
    condition = family.conditions["i2i"]
    areas = {condition.size: 1024 * 1024, family.templates["i2i"].image_size: 1024 * 1024}
    if hasattr(module, "VAE_IMAGE_SIZE"):
        areas = {condition.size: module.VAE_IMAGE_SIZE, family.templates["i2i"].image_size: module.CONDITION_IMAGE_SIZE}
    for size, area in areas.items():
        expected = [module.calculate_dimensions(area, int(w) / int(h))[:2] for w, h in zip(width, height, strict=True)]
        fitted = size.fit(width, height)
        assert np.array_equal(np.stack(fitted[:2], 1), expected)
        assert np.array_equal(fitted[2].resize_width, fitted[0]) and not fitted[2].x.any()
    assert condition.size.refused(np.array([1, 1, 5000]), np.array([1, 101, 49])).tolist() == [False, True, True]
    for flavour in family.flavours.values() if key in EDIT else ():  # no sizes are published for Qwen-Image-2.1
        assert {module.calculate_dimensions(1024 * 1024, w / h)[:2] for w, h in ((1, 1), (3, 2), (4, 3), (16, 9))} <= {
            *flavour.sizes
        }


@pytest.mark.parametrize("key", WAN)
def test_wans_captions_have_no_template(key):
    template, pipe = FAMILIES[key[0]].templates[key[1]], pipeline(key)
    assert template.text == "{}" and template.crop is None
    assert template.max_length == default(pipe.__call__, "max_sequence_length")


def test_what_wans_documentation_gives():
    """The negative prompt, frames and rate of its example; the shift by the size."""
    from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v

    example, family = pipeline_wan.EXAMPLE_DOC_STRING, FAMILIES["wan2.1"]
    assert f'negative_prompt = "{family.negative_prompt}"' in example
    assert f'negative_prompt = "{FAMILIES["wan2.2-5b"].negative_prompt}"' in pipeline_wan_i2v.EXAMPLE_DOC_STRING
    assert f"num_frames={family.frames}," in example and f"fps={family.frame_rate:g})" in example
    assert "5.0 for 720P, 3.0 for 480P" in example
    shifts = {
        flavour.name: flavour.shift for key in ("wan2.1", "wan2.2-5b") for flavour in FAMILIES[key].flavours.values()
    }
    assert shifts == {"t2v-1.3b": 3.0, "t2v-14b": 3.0, "t2v-5b": 5.0, "i2v-5b": 5.0}


def test_the_noise_levels_of_experts_are_all_of_them_once():
    for family in FAMILIES.values():
        for flavour in family.flavours.values():
            if flavour.experts:
                high, low = flavour.experts["high"], flavour.experts["low"]
                assert [*flavour.experts] == ["high", "low"] and family.components == (high.part, low.part)
                assert (low.lowest, high.highest) == (0, 1) and low.highest == high.lowest
                assert high.holds(high.lowest) and high.holds(1.0) and not low.holds(high.lowest)


def test_kleins_template():
    """Its text is compared with the tokenizer's chat template by the encoder."""
    template, pipe = FAMILIES["flux2-klein"].templates["t2i"], pipeline(("flux2-klein", "t2i"))
    assert FAMILIES["flux2-klein"].templates["i2i"] == template  # without the images
    assert template.max_length == default(pipe.__call__, "max_sequence_length") == pipe.tokenizer_max_length
    assert template.layers == default(pipe.__call__, "text_encoder_out_layers")
    assert template.padded and not template.thinking and template.cleaner.text(" A \n b ") == " A \n b "


def test_flux3s_template():
    """Its text is compared with the tokenizer's chat template by the encoder."""
    template, pipe = FAMILIES["flux3"].templates["t2i"], pipeline(("flux3", "t2i"))
    assert FAMILIES["flux3"].templates["i2i"] == template  # without the images
    defaults, step = pipe.default_call_parameters, pipe.blocks.sub_blocks["text_encoder"]
    assert template.max_length == defaults["max_sequence_length"] and template.window == step.pad_multiple
    assert template.layers == defaults["text_encoder_out_layers"] and template.cleaner.text(" A \n b ") == " A \n b "


def test_what_a_modular_pipeline_makes_itself():
    """Scheduler, guider and sizes; the blocks that are removed are there."""
    family, pipe = FAMILIES["flux3"], pipeline(("flux3", "t2i"))
    assert type(pipe.blocks).__name__ == family.modular.blocks and {*family.modular.skipped} <= {
        *pipe.blocks.sub_blocks
    }
    assert type(pipe.scheduler) is diffusers.FlowMatchEulerDiscreteScheduler
    assert dict(pipe.scheduler.config).items() >= family.modular.scheduler.items()
    assert {flavour.shift for flavour in family.flavours.values()} == {family.shift_by_tokens(4096)}
    assert family.guidance == pipe.guider.guidance_scale and family.negative_prompt == ""
    assert family.spatial_stride == 2 * pipe.vae_scale_factor == family.side_multiple
    step = pipe.blocks.sub_blocks["denoise"].sub_blocks["text2image"].sub_blocks["set_timesteps"]
    assert family.steps == step.num_inference_steps and family.latent_channels == pipe.num_channels_latents


@pytest.mark.parametrize("key", CALLED)
def test_inference_defaults(key):
    family, pipe = FAMILIES[key[0]], pipeline(key)
    assert family.guidance == default(pipe.__call__, family.guidance_argument)
    if key[0] == "wan2.2-a14b":  # the value of the original release
        assert family.steps == 40
    else:
        assert family.steps == default(pipe.__call__, "num_inference_steps")


@pytest.mark.parametrize("key", CALLED)
def test_settings_of_pipelines(key):
    """Negative prompts of pipelines, and their settings in model_index.json."""
    family, kind = FAMILIES[key[0]], getattr(diffusers, PIPELINES[key])
    assert (family.negative_prompt is not None) == ("negative_prompt" in inspect.signature(kind.__call__).parameters)
    parameters = inspect.signature(kind).parameters
    assert family.distilled_mark == (IS_DISTILLED if "is_distilled" in parameters else None)
    settings = {name for name, parameter in parameters.items() if isinstance(parameter.default, bool)}
    assert settings - {"is_distilled"} == set(family.pipeline_settings)
    assert all(parameters[name].default is False for name in settings), "a missing key means false"


@pytest.mark.parametrize("key", CALLED)
def test_negative_prompts(key):
    family, pipe = FAMILIES[key[0]], pipeline(key)
    if key in (
        ("qwen-image", "t2i"),
        *EDIT,
        *QWEN_21,
    ):  # guides only with a negative prompt; " " is from its documentation
        assert default(pipe.__call__, "negative_prompt") is None and family.negative_prompt == " "
        assert key in QWEN_21 or 'even an empty negative prompt like " "' in pipe.__call__.__doc__
    elif key in WAN:  # the user's; the example in the documentation is compared above
        assert default(pipe.__call__, "negative_prompt") is None
    elif family.negative_prompt is None:
        assert assigned(type(pipe).__call__, "negative_prompt") == [""]
    elif key not in KANDINSKY:
        assert family.negative_prompt == (default(pipe.__call__, "negative_prompt") or "")
    else:
        assert assigned(type(pipe).__call__, "negative_prompt") == [family.negative_prompt]


@pytest.mark.parametrize("key", CALLED)
def test_strides(key):
    family, pipe = FAMILIES[key[0]], pipeline(key)
    if key in (("z-image", "t2i"), ("qwen-image", "t2i"), ("krea2", "t2i"), *EDIT, *QWEN_21):
        assert family.spatial_stride == pipe.vae_scale_factor and family.side_multiple == 2 * family.spatial_stride
    elif key in WAN:  # of its autoencoder, which the pipeline does not have in this test
        vae = diffusers.AutoencoderKLWan.from_config(
            dict(family.shapes["vae"]) | {"base_dim": 8, "decoder_base_dim": 8}
        )
        assert family.spatial_stride == vae.config.scale_factor_spatial
        assert family.temporal_stride == vae.config.scale_factor_temporal
        assert family.latent_channels == vae.config.z_dim and family.side_multiple == 2 * family.spatial_stride
    elif key[0] == "flux2-klein":  # of squares of 2x2
        assert family.spatial_stride == 2 * pipe.vae_scale_factor == family.side_multiple
    elif key not in KANDINSKY:
        assert family.spatial_stride == pipe.vae_scale_factor == family.side_multiple
    else:
        assert family.spatial_stride == pipe.vae_scale_factor_spatial
        assert family.temporal_stride == getattr(pipe, "vae_scale_factor_temporal", 1)
        assert family.side_multiple == 2 * family.spatial_stride, "the transformer's patches are 2x2"


def test_prefixes_have_as_many_tokens_as_are_cropped(tiny):
    counts = {}
    for family, task in [*KANDINSKY, ("qwen-image", "t2i"), ("krea2", "t2i")]:
        kind = f"{family}-{task}" if family.startswith("kandinsky5") else family
        tokenizer = AutoTokenizer.from_pretrained(tiny(kind) / "tokenizer")
        prefix = FAMILIES[family].templates[task].text.split("{}")[0]
        counts[kind] = len(tokenizer(prefix)["input_ids"])
        assert counts[kind] == FAMILIES[family].templates[task].crop
    assert [*counts.values()] == [40, 54, 128, 128, 34, 34]


def test_components_are_named():
    for family in FAMILIES.values():
        assert family.default_flavour in family.flavours
        assert all(flavour.name == name for name, flavour in family.flavours.items())
        assert {"text_encoder", *family.tokenizers} <= set(family.text_components) and family.latent_components == (
            "vae",
        )


def test_the_parts_are_the_components_of_the_encoders():
    from stages.encoding.text import (
        flux3,
        gemma,
        kandinsky5,
        qwen3,
        qwen3_vl,
        qwen_image,
        qwen_image_21,
        qwen_image_edit,
        umt5,
    )

    assert {FAMILIES[name].text_components for name, _ in EDIT} == {qwen_image_edit.Encoder.components}
    assert FAMILIES["qwen-image"].text_components == qwen_image.Encoder.components
    assert FAMILIES["flux2-klein"].text_components == qwen3.Encoder.components
    assert FAMILIES["flux3"].text_components == flux3.Encoder.components
    assert FAMILIES["krea2"].text_components == qwen3_vl.Encoder.components
    assert FAMILIES["qwen-image-2.1"].text_components == qwen_image_21.Encoder.components
    assert FAMILIES["z-image"].text_components == qwen3.Encoder.components
    assert {FAMILIES[name].text_components for name in ("wan2.1", "wan2.2-5b")} == {umt5.Encoder.components}
    assert FAMILIES["sana"].text_components == gemma.Encoder.components
    assert {FAMILIES[name].text_components for name in ("kandinsky5-image", "kandinsky5-video")} == {
        kandinsky5.Encoder.components
    }


def test_an_unknown_family_or_flavour_is_an_error_with_the_valid_names():
    assert get_flavour("sana", "sana-600m-512px").shift == 4.0
    with pytest.raises(ValueError, match=f"valid: {re.escape(', '.join(FAMILIES))}"):
        get_flavour("kandinsky4", "x")
    with pytest.raises(ValueError, match=r"valid: .*i2v-pro-sft-5s"):
        get_flavour("kandinsky5-video", "i2v-lite-pretrain-5s")


@pytest.mark.parametrize(
    ("size", "small"),
    [((512, 768), True), ((480, 854), True), ((479, 512), False), ((512, 855), False), ((688, 384), False)],
)
def test_scale_class_follows_the_480p_window(size, small):
    window = FAMILIES["kandinsky5-video"].scale_window
    assert window.factors(*size) == ((1.0, 2.0, 2.0) if small else (1.0, 3.16, 3.16))
