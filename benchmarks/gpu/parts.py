"""The parts of `make gpu`: each is a module of this folder whose `run(options)` prints its tables."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PartOptions:
    """device: cuda, or cpu for a run without a card. tiny: shapes that say nothing of speed. seconds: after which the
    part is ended; what it can't do before it leaves out. peak_flops: operations per second of a bfloat16 product."""

    device: str = "cuda"
    tiny: bool = False
    seconds: float = 600.0
    peak_flops: float = 1e12


@dataclass(frozen=True)
class Part:
    """module: has `run`, or another function after a colon. limit: seconds after which it is ended. least: seconds
    without which it is not begun."""

    title: str
    module: str
    limit: float
    least: float = 25.0


#: In this order they run, until the time is over: what is needed most comes first.
PARTS = {
    "tests": Part("Tests marked gpu", "benchmarks.gpu.marked_tests", 130),
    "video-lite": Part("Video Lite, LoRA at 512x768, 61 frames", "benchmarks.gpu.video_lite", 130),
    "image-lite": Part("Image Lite, LoRA at 1024x1024", "benchmarks.gpu.image_lite", 80),
    "sana": Part("Sana 1.6B, full rank at 1024x1024", "benchmarks.gpu.sana", 60),
    "pro": Part("Video Pro, LoRA at 512x768", "benchmarks.gpu.pro", 100, least=45),
    "text": Part("Qwen2.5-VL-7B", "benchmarks.gpu.text_encoder", 100, least=45),
    "vae": Part("HunyuanVideo's autoencoder", "benchmarks.gpu.vae", 60),
    "nabla": Part("NABLA: compiled flex attention beside the dense mask", "benchmarks.gpu.nabla", 75),
    "latents": Part("encode-latents beside the bare autoencoder", "benchmarks.gpu.latents_stage", 60),
}
#: Comes before all others: what the card is, and what it reaches.
CARD = Part("The card", "benchmarks.gpu.card", 60)
