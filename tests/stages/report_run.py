"""A run as `latentpress report` finds it, made on the spot: metrics, validation latents, pictures and clips."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from cache.models.weights import hash_file
from cache.runs.validations import Mark, latent_path
from schemas.config.loading import dump_yaml
from stages.media.image import png_info
from tests.project import Project


def step_line(step: int, **values: Any) -> dict[str, Any]:
    line = {"step": step, "loss": 1 / step, "grad_norm": 0.1 * step, "lr": 1e-4, "samples_per_s": 4.0}
    return line | {"data_wait_share": 0.25, "step_s": 0.5, "host_memory_gib": 2.0} | values


def eval_line(step: int, loss: float | None) -> dict[str, Any]:
    return {
        "step": step,
        "eval_loss": loss,
        "eval_by_sigma": {"0.2": loss, "0.8": loss},
        "eval_by_bucket": {"64x48@1": loss},
    }


class FakeRun:
    """<output>/<name> of a project, written file by file."""

    def __init__(self, home: Project, name: str = "run", *overrides: str) -> None:
        self.config = home.config(f"train.run={name}", *overrides)
        self.folder = home.folder / "output" / self.config.run_name
        self.folder.mkdir(parents=True)
        (self.folder / "config.yaml").write_text(dump_yaml(self.config))

    def metrics(self, *lines: dict[str, Any]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def latent(self, step: int, name: str, **about: Any) -> None:
        path = self.folder / f"validation/step-{step:06d}/{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {
            "prompt": "a colour",
            "negative_prompt": "",
            "bucket": "64x48@1",
            "seed": 7,
            "steps": 2,
            "guidance": 3.5,
        }
        save_file({"latent": np.zeros((1, 1, 2, 2), np.float32)}, path, {"latentpress": json.dumps(metadata | about)})

    def picture(self, step: int, name: str, colour: tuple[int, int, int], size: tuple[int, int] = (64, 48)) -> Path:
        path = self.folder / f"samples/step-{step:06d}/{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, colour).save(path, pnginfo=png_info(self.mark(step, name)))
        return path

    def mark(self, step: int, name: str) -> Mark:
        latent = latent_path(self.folder, step, name)
        return Mark(hash_file(latent, None) if latent.exists() else "")

    def clip(self, step: int, name: str, frames: int = 12, size: tuple[int, int] = (64, 48), noise: int = 0) -> Path:
        import av

        path = self.folder / f"samples/step-{step:06d}/{name}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(0)
        with av.open(str(path), "w") as container:
            container.metadata["comment"] = str(self.mark(step, name))
            stream = container.add_stream("libx264", rate=12, options={"crf": "14"})
            stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
            for number in range(frames):
                pixels = np.full((size[1], size[0], 3), number * 255 // frames, np.int16)
                pixels += generator.integers(-noise, noise + 1, pixels.shape, np.int16)
                frame = av.VideoFrame.from_ndarray(pixels.clip(0, 255).astype(np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return path
