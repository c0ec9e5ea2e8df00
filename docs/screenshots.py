"""Pictures of `latentpress ui` for the documents: `make screenshots`, about three minutes on two cores without a card.

A real browser (Chromium) makes a project of photographs, as a person would. This project needs published weights, which
are not downloaded here, so its run shows a failure. A second project trains a LoRA of the demo's tiny Sana, which knows
the demo's photographs, on other captions of these photographs.
"""

import argparse
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from examples import demo
from examples.demo_media import IMAGES, package_folder, write_caption, write_media

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTH, HEIGHT, QUALITY = 1280, 860, 82
MAX_BYTES = 150_000
MORE_PHOTOS = ("chelsea.png", "rocket.jpg", "motorcycle_left.png")  # without captions
WORDS = "ohwx"
STEPS, EVERY = 1000, 100  # training steps; steps between validations
WAIT_MS = 300_000


def write_photos(folder: Path, names: Iterable[str]) -> None:
    """Photographs, of which the demo's have short captions."""
    folder.mkdir(parents=True)
    photos = package_folder("skimage", "data")
    for name in names:
        with Image.open(photos / name) as opened:
            photo = opened.convert("RGB")
        path = (folder / name).with_suffix(".jpg")
        photo.resize((1024, 1024 * photo.height // photo.width)).save(path, quality=90)
        if name in IMAGES:
            write_caption(path, caption_of(path))


def caption_of(path: Path) -> str:
    return f"{WORDS} {path.stem}"


def write_model(out: Path, folder: Path) -> None:
    """The demo's checkpoint with the transformer that the demo trained."""
    shutil.copytree(out / "models/sana", folder, ignore=shutil.ignore_patterns("transformer"))
    shutil.copytree(out / "sana/output/demo/model/transformer", folder / "transformer")


def write_run(out: Path, photos: Path, model: Path, file: Path) -> None:
    """The configuration of the LoRA."""
    settings = demo.pipeline_settings("sana", out)
    settings["model"]["path"] = str(model)
    settings["datasets"][0] |= {"id": "my-photos", "instance_data_dir": str(photos), "trigger": WORDS}
    settings["stages"] = {stage: {"threads": 1} for stage in ("encode-text", "encode-latents", "decode")}
    settings["train"] |= {
        "run": "my-photos-lora",
        "steps": STEPS,
        "batch_size": 4,
        "adapter": {"type": "lora", "rank": 16},
        "optimizer": {"lr": 1e-3, "warmup": 10, "schedule": "cosine"},
        "checkpoint_every": EVERY,
        "log_every": 10,
    }
    prompts = [{"name": Path(name).stem, "prompt": caption_of(Path(name))} for name in IMAGES]
    settings["validation"] |= {"every": EVERY, "prompts": prompts}
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(settings, indent=2))


@contextmanager
def start_page(home: Path) -> Iterator[str]:
    """Run `latentpress ui` without the network. Yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--projects", str(home), "--browse", str(home.parent), "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([sys.executable, "-P", "-m", "stages.ui", *words], cwd=ROOT, env=environment)
    try:
        while True:
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None:
                sys.exit("the page did not start")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def shoot(page: Any, path: Path, is_loaded: bool = True) -> None:
    if is_loaded:
        page.reload()  # without the message about the last button
    page.wait_for_timeout(1000)  # until pictures are drawn
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    with Image.open(io.BytesIO(page.screenshot())) as opened:
        opened.convert("RGB").save(path, quality=QUALITY, optimize=True)
    size = path.stat().st_size
    demo.log(f"{demo.relative_path(path)}: {size // 1000} kB")
    if size > MAX_BYTES:
        sys.exit(f"{path} is larger than {MAX_BYTES // 1000} kB")


def is_drawn(page: Any, step: int) -> bool:
    """Whether the newest pictures are of a step or a later one."""
    texts = page.locator(".newest figcaption").all_inner_texts()
    return bool(texts) and min(int(text.removeprefix("step ")) for text in texts) >= step


def shoot_all(browser: Any, address: str, photos: Path, out: Path) -> None:
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{address}/new?media={photos}")
    page.locator("input[value=object]").check()
    page.locator("#trigger").fill(WORDS)
    page.locator("#card").fill("RTX 4080")
    shoot(page, out / "page-new-project.jpg", is_loaded=False)
    page.locator("#propose").click()
    page.locator("#write").wait_for()
    shoot(page, out / "page-proposal.jpg")
    page.locator("#write").click()
    page.locator("#start-run").click()
    page.locator("#failure").wait_for()
    shoot(page, out / "page-failed.jpg")
    page.goto(f"{address}/p/my-photos/")
    page.locator("#start-run").click()
    while not is_drawn(page, 4 * EVERY):
        if page.locator("#result, #failure").count():
            sys.exit("training ended before its picture was taken")
        page.wait_for_timeout(200)
    shoot(page, out / "page-training.jpg")
    page.locator("#result").wait_for()
    page.locator("#start-run").wait_for()  # `run` has ended
    page.locator("#download-1.filled").wait_for()
    shoot(page, out / "page-finished.jpg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, default=ROOT / "demo", help="folder of the demo, whose results are used")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    arguments = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("Chromium was not found: install it")
    from playwright.sync_api import sync_playwright

    out = arguments.work.resolve()
    write_media(out / "media")
    demo.discard_outdated(out)
    demo.make_flavours(["sana"], out)
    folder = out / "page"
    shutil.rmtree(folder, ignore_errors=True)
    write_photos(folder / "photos", [*IMAGES, *MORE_PHOTOS])
    (folder / "photos/broken.jpg").write_bytes((folder / "photos/rocket.jpg").read_bytes()[:20_000])
    write_photos(folder / "my-photos", IMAGES)
    write_model(out, folder / "model")
    write_run(out, folder / "my-photos", folder / "model", folder / "projects/my-photos/pipeline.yaml")
    with start_page(folder / "projects") as address, sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shoot_all(browser, address, folder / "photos", arguments.out)
        browser.close()


if __name__ == "__main__":
    main()
