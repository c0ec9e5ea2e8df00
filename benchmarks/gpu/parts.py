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
    "tests": Part("Tests marked gpu", "benchmarks.gpu.marked_tests", 60),
    "equality": Part("Losses of the tiny models beside the CPU's", "benchmarks.gpu.equality", 25, least=20),
    "waits": Part("Waits for the card", "benchmarks.gpu.waits", 35),
    "video-lite": Part("Video Lite, LoRA at 512x768, 61 frames", "benchmarks.gpu.video_lite", 45),
    "image-lite": Part("Image Lite, LoRA at 1024x1024", "benchmarks.gpu.image_lite", 30),
    "sana": Part("Sana 1.6B, full rank at 1024x1024", "benchmarks.gpu.sana", 30),
    "kernels": Part("Profile of three steps of each flavour", "benchmarks.gpu.kernels", 40, least=20),
    "pro": Part("Video Pro, LoRA at 512x768", "benchmarks.gpu.pro", 40, least=35),
    "text": Part("Qwen2.5-VL-7B", "benchmarks.gpu.text_encoder", 40, least=35),
    "vae": Part("HunyuanVideo's autoencoder", "benchmarks.gpu.vae", 20, least=15),
    "nabla": Part("NABLA: compiled flex attention beside the dense mask", "benchmarks.gpu.nabla", 25, least=20),
    "methods": Part("Methods, Video Lite at 512x768, 29 frames", "benchmarks.gpu.methods", 30),
    "attention": Part("Attention backends", "benchmarks.gpu.attention", 25, least=20),
    "optimizers": Part("Optimizers: the update alone", "benchmarks.gpu.optimizers", 12, least=10),
    "ranks": Part("Two processes: DDP and FSDP2", "benchmarks.gpu.ranks", 15, least=10),
    "noise": Part("Noise beside torch.randn", "benchmarks.gpu.noise", 8, least=6),
    "data": Part("Rows from shards to the card", "benchmarks.gpu.data", 10, least=8),
    "latents": Part("encode-latents beside the bare autoencoder", "benchmarks.gpu.latents_stage", 20, least=15),
}
#: Comes before all others: what the card is, and what it reaches.
CARD = Part("The card", "benchmarks.gpu.card", 0)
CARD_SECONDS = 60.0  # after which it is ended
LOSS_BOUND = 1e-3  # of how far a loss may be from the CPU's, relative to it
