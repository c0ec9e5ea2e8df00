"""The parts of `make gpu`: each is a module of this folder whose `run(options)` prints its tables."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PartOptions:
    """device: "cuda", or "cpu" for a run without a card. tiny: whether shapes are tiny, for a test of the code.
    seconds: time limit, after which the part is ended; the part leaves out work that does not fit. peak_flops:
    operations per second of a bfloat16 matrix product."""

    device: str = "cuda"
    tiny: bool = False
    seconds: float = 600.0
    peak_flops: float = 1e12


@dataclass(frozen=True)
class Part:
    """module: module with a function `run`, or another function after a colon. share: time limit in relation to the
    shares of the parts that have not started. least: smallest number of seconds with which it is started."""

    title: str
    module: str
    share: float
    least: float = 25.0


#: The parts in the order in which they run, the most important first, each at most for its share of the remaining time.
#: The shares are seconds if all parts run within the default 9.5 minutes.
PARTS = {
    "tests": Part("Tests marked gpu", "benchmarks.gpu.marked_tests", 60),
    "equality": Part("Losses of the tiny models compared with the CPU", "benchmarks.gpu.equality", 25, least=20),
    "waits": Part("Waits for the card", "benchmarks.gpu.waits", 35),
    "video-lite": Part("Video Lite, LoRA at 512x768, 61 frames", "benchmarks.gpu.video_lite", 45),
    "image-lite": Part("Image Lite, LoRA at 1024x1024", "benchmarks.gpu.image_lite", 30),
    "sana": Part("Sana 1.6B, full rank at 1024x1024", "benchmarks.gpu.sana", 30),
    "kernels": Part("Profile of three steps of each flavour", "benchmarks.gpu.kernels", 40, least=20),
    "pro": Part("Video Pro, LoRA at 512x768", "benchmarks.gpu.pro", 40, least=35),
    "text": Part("Qwen2.5-VL-7B", "benchmarks.gpu.text_encoder", 40, least=35),
    "vae": Part("HunyuanVideo's autoencoder", "benchmarks.gpu.vae", 20, least=15),
    "nabla": Part("NABLA: compiled flex attention and the dense mask", "benchmarks.gpu.nabla", 25, least=20),
    "methods": Part("Methods, Video Lite at 512x768, 29 frames", "benchmarks.gpu.methods", 30),
    "attention": Part("Attention backends", "benchmarks.gpu.attention", 25, least=20),
    "optimizers": Part("Optimizers: the update alone", "benchmarks.gpu.optimizers", 12, least=10),
    "ranks": Part("Two processes: DDP and FSDP2", "benchmarks.gpu.ranks", 15, least=10),
    "noise": Part("Noise compared with torch.randn", "benchmarks.gpu.noise", 8, least=6),
    "data": Part("Rows from shards to the card", "benchmarks.gpu.data", 10, least=8),
    "latents": Part("encode-latents compared with the bare autoencoder", "benchmarks.gpu.latents_stage", 20, least=15),
}
#: The first part: name, versions and peak rates of the card.
CARD = Part("The card", "benchmarks.gpu.card", 0)
CARD_SECONDS = 60.0  # time limit of the first part
LOSS_BOUND = 1e-3  # largest relative difference of a loss from the CPU's loss
