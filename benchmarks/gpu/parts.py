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
    """module: has `run`, or another function after a colon. share: of the time, in relation to those of the parts that
    have not begun; after it the part is ended. least: seconds without which it is not begun."""

    title: str
    module: str
    share: float
    least: float = 25.0


#: In this order they run, each at most for its share of the time that is left: what is needed most comes first. The
#: shares are seconds where all run to their ends within the usual 9.5 minutes.
PARTS = {
    "tests": Part("Tests marked gpu", "benchmarks.gpu.marked_tests", 70),
    "video-lite": Part("Video Lite, LoRA at 512x768, 61 frames", "benchmarks.gpu.video_lite", 55),
    "image-lite": Part("Image Lite, LoRA at 1024x1024", "benchmarks.gpu.image_lite", 40),
    "sana": Part("Sana 1.6B, full rank at 1024x1024", "benchmarks.gpu.sana", 35),
    "pro": Part("Video Pro, LoRA at 512x768", "benchmarks.gpu.pro", 45, least=40),
    "text": Part("Qwen2.5-VL-7B", "benchmarks.gpu.text_encoder", 45, least=40),
    "vae": Part("HunyuanVideo's autoencoder", "benchmarks.gpu.vae", 25),
    "nabla": Part("NABLA: compiled flex attention beside the dense mask", "benchmarks.gpu.nabla", 30),
    "methods": Part("Methods, Video Lite at 512x768, 29 frames", "benchmarks.gpu.methods", 40),
    "attention": Part("Attention backends", "benchmarks.gpu.attention", 30),
    "optimizers": Part("Optimizers: the update alone", "benchmarks.gpu.optimizers", 15, least=12),
    "ranks": Part("Two processes: DDP and FSDP2", "benchmarks.gpu.ranks", 30, least=10),
    "noise": Part("Noise beside torch.randn", "benchmarks.gpu.noise", 10, least=8),
    "data": Part("Rows from shards to the card", "benchmarks.gpu.data", 15, least=12),
    "latents": Part("encode-latents beside the bare autoencoder", "benchmarks.gpu.latents_stage", 25),
}
#: Comes before all others: what the card is, and what it reaches.
CARD = Part("The card", "benchmarks.gpu.card", 0)
CARD_SECONDS = 60.0  # after which it is ended
