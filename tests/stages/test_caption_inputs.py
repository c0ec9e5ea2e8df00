"""Inputs of each kind of item and of model, compared with transformers' own `generate` for one item."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from cache.models.weights import WeightsError
from cache.sets import plans
from cache.sets.item_rows import iter_item_rows
from cache.sets.plans import Plan
from cache.store.store import Store
from schemas.clips import clip_times
from schemas.config.encoding import PRESETS
from schemas.geometry import Bucket
from stages import bucket, caption, discover
from stages.encoding.captions.describer import QWEN_CHAT
from stages.encoding.stage_registry import CAPTION
from stages.media.video import read_frames
from tests.forms import long
from tests.project import Project
from tests.qwen_processor import Processor
from tests.stages.captioners import CAPTIONERS
from tests.stages.describing import describing, written

pytestmark = pytest.mark.slow
PLACES = {name: f"<|vision_start|><|{name}_pad|><|vision_end|>" for name in ("image", "video")}


def model_picture(path: Path, geometry: dict[str, Any]) -> Image.Image:
    size = Bucket.parse(geometry["bucket"])
    return Image.open(path).resize((size.width, size.height), Image.Resampling.LANCZOS).convert("RGB")


def answer(model: Any, tokenizer: Any, inputs: Any) -> str:
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    ends = model.generation_config.eos_token_id
    end = next((place for place, token in enumerate(ids) if token in ends), None)
    return " ".join(tokenizer.decode(ids[:end], skip_special_tokens=True).split())


def compare(home: Project, report: Any, expected: dict[str, str]) -> None:
    """expected: path -> caption of the model, accepted or rejected."""
    captions = {path: texts[0] for path, texts in written(home).items()}
    messages = {row["path"]: row["message"] for row in report.rejects}
    assert captions.keys() | messages.keys() == expected.keys() and captions
    for path, text in expected.items():
        assert captions[path] == text if path in captions else text.replace("; ", ", ") in messages[path]


def run_and_plan(home: Project) -> tuple[Any, Plan]:
    home.run(discover.run)
    report = home.run(caption.run)
    return report, CAPTION.find_plan(Store(home.root), home.config())


@pytest.mark.long
def test_an_instruction_is_of_the_source_image_and_then_the_target(project: Any, tiny: Any) -> None:
    home = describing(project, tiny, "kandinsky5-image-i2i")
    home.settings["datasets"][0]["conditioning_data"] = "source"
    for number in range(3):
        home.image(f"{number}.png", (64, 48), None, number)  # type: ignore[arg-type]
        home.image(f"../source/{number}.png", (48, 64) if number else (64, 48), None, number + 7)  # type: ignore[arg-type]
    report, plan = run_and_plan(home)
    folder = Path(home.settings["model"]["path"])
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder").eval()
    processor, expected = Processor(folder / "tokenizer"), {}
    for row in plan.sample_table.to_pylist():
        pictures = [model_picture(home.folder / "source" / row["source_path"], row["source_geometry"])]
        pictures.append(model_picture(home.media / row["path"], row["geometry"]))
        text = QWEN_CHAT.replace("{}", PLACES["image"] * 2 + PRESETS["instruction"])
        inputs = processor(text=[text], images=pictures, return_tensors="pt", return_mm_token_type_ids=True)
        expected[row["path"]] = answer(model, processor.tokenizer, inputs)
    compare(home, report, expected)


def video_patches(frames: np.ndarray, processor: Processor) -> tuple[torch.Tensor, list[int]]:
    """Returns (patches, numbers) of a clip in the order of transformers' video processor, by its definition."""
    frames = np.concatenate([frames, frames[-1:]]) if len(frames) % 2 else frames
    images, m, p = processor.image_processor, 2, 14
    mean, deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in (images.image_mean, images.image_std))
    pixels = (torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255 - mean) / deviation
    t, (rows, columns) = len(frames) // 2, (side // p for side in pixels.shape[2:])
    split = pixels.view(t, 2, 3, rows // m, m, p, columns // m, m, p)
    return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * rows * columns, -1), [t, rows, columns]


def test_a_clip_is_a_video_of_frames_spread_over_it(project: Any, tiny: Any) -> None:
    home = describing(project, tiny, "kandinsky5-video-t2v", frames=5, prompts=["motion"])
    home.settings["datasets"][0]["video"]["clip_selection"] = "chunks"
    for name in "abc":
        home.video(f"{name}.mp4", 20, (64, 48), caption="")
        (home.media / f"{name}.txt").unlink()
    home.image("still.png", (64, 48), None, 3)  # type: ignore[arg-type]
    report, plan = run_and_plan(home)
    folder = Path(home.settings["model"]["path"])
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder").eval()
    processor, clips = Processor(folder / "tokenizer"), dict[tuple[str, float], str]()
    for row in plan.sample_table.to_pylist():
        if row["kind"] == "image":
            continue
        size = Bucket.parse(row["geometry"]["bucket"])
        assert size.frames == 5 and row["start"] + 4 / row["rate"] == pytest.approx(row["start"] + 8 / 12)
        frames = np.stack(
            [
                np.asarray(Image.fromarray(frame).resize((size.width, size.height), Image.Resampling.LANCZOS))
                for frame in read_frames(home.media / row["path"], clip_times(row["start"], row["rate"], 5))
            ]
        )
        patches, grid = video_patches(frames, processor)
        text = QWEN_CHAT.replace("{}", PLACES["video"] + PRESETS["motion"])
        text = text.replace("<|video_pad|>", "<|video_pad|>" * (np.prod(grid) // 4))
        ids = torch.tensor([processor.tokenizer(text)["input_ids"]])
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": 2 * (ids == processor.video_token_id).int(),
            "pixel_values_videos": patches,
            "video_grid_thw": torch.tensor([grid]),
            "second_per_grid_ts": torch.tensor([2 / row["rate"]]),
        }
        clips[row["sample_id"]] = answer(model, processor.tokenizer, inputs)
    assert len(clips) == 6
    messages = {row["item"]: row["message"] for row in report.rejects}
    cache = f"captions/{CAPTION.fingerprint(home.config())}"
    infos = {row.id: row.info for _, _, row in iter_item_rows(Store(home.root), cache)}
    for name, text in clips.items():
        assert infos[name]["captions"] == [text] if name in infos else text.replace("; ", ", ") in messages[name]
    assert len([name for name in clips if name in infos]) >= 2
    spans = [infos[name]["span"] for name in clips if name in infos]
    assert all(span[1] - span[0] == pytest.approx(8 / 12, abs=0.002) for span in spans)
    # Each clip is trained on with its own caption; a clip whose caption was rejected is excluded.
    home.run(bucket.run)
    store = Store(home.root)
    plan = plans.load_plan(store, plans.list_plans(store)[-1])
    paths = [path for path in plan.active["path"].to_pylist() if path and path.endswith(".mp4")]
    assert len(paths) == len([name for name in clips if name in infos])


@pytest.mark.parametrize("name", ["llava", long("idefics3"), long("gemma3")])
def test_another_architecture_is_asked_by_its_own_processor(project: Any, tiny: Any, tmp_path: Path, name: str) -> None:
    folder = CAPTIONERS[name](tmp_path / name)
    home = describing(project, tiny, model=str(folder), prompts=["plain", "detailed"])
    for number in range(4):
        home.image(f"{number}.png", (64, 48), None, number)  # type: ignore[arg-type]
    report, plan = run_and_plan(home)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    captions, expected = written(home), {}
    for row in plan.sample_table.to_pylist():
        texts = []
        for prompt in ("plain", "detailed"):
            content = [{"type": "image"}, {"type": "text", "text": PRESETS[prompt]}]
            text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
            picture = model_picture(home.media / row["path"], row["geometry"])
            begins = text.startswith(processor.tokenizer.bos_token or "\0")
            inputs = processor(text=[text], images=[[picture]], return_tensors="pt", add_special_tokens=not begins)
            texts.append(answer(model, processor.tokenizer, inputs))
        expected[row["path"]] = texts
    assert captions and report.done == len(captions)
    assert all({*texts} <= {*expected[path]} for path, texts in captions.items())
    assert any(texts[-1] == expected[path][1] for path, texts in captions.items())


def test_a_model_whose_processor_needs_torchvision_is_refused_before_it_is_loaded(
    project: Any, tiny: Any, tmp_path: Path
) -> None:
    """SmolVLM is an Idefics3 with another processor, which also supports videos."""
    folder = CAPTIONERS["idefics3"](tmp_path / "smolvlm")
    for name, key in (("config.json", "model_type"), ("processor_config.json", "processor_class")):
        settings = json.loads((folder / name).read_text())
        settings[key] = {"model_type": "smolvlm", "processor_class": "SmolVLMProcessor"}[key]
        (folder / name).write_text(json.dumps(settings))
    (folder / "video_preprocessor_config.json").write_text('{"video_processor_type": "SmolVLMVideoProcessor"}')
    home = describing(project, tiny, model=str(folder))
    home.image("one.png", (64, 48), None)  # type: ignore[arg-type]
    home.run(discover.run)
    with pytest.raises(WeightsError, match=r"orchvision") as caught:
        home.run(caption.run)
    assert "install torchvision" in caught.value.next_step
