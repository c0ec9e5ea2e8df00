"""encode-latents compared with the bare autoencoder: benchmarks/latents.py with true shapes."""

from benchmarks import latents
from benchmarks.gpu.parts import PartOptions


def run(options: PartOptions) -> None:
    size = ["--images", "2", "--side", "64"] if options.tiny else ["--true-size", "--images", "64"]
    latents.main(["--device", options.device, "--repeat", "1", *size])
