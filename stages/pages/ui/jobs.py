"""What can be started from the page: the programs of the command line, by the words that start them."""

from dataclasses import dataclass

from schemas.config.pipeline import Config

#: What each does, in the order in which they follow each other.
STAGES = {
    "discover": "finds media and captions",
    "bucket": "plans samples, texts and units",
    "encode-text": "captions to embeddings",
    "encode-latents": "pictures and clips to latents",
    "encode-vision": "pictures and clips to DINOv2 features",
    "index": "joins plan and shards",
    "train": "trains the adapter or model",
    "decode": "decodes the validation latents",
}


@dataclass(frozen=True)
class Job:
    """A program and its words. name: in addresses and files; of two jobs of one program each has another."""

    name: str
    program: str
    words: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return "trainer" if self.program == "train" else f"stages.{self.program.replace('-', '_')}"


JOBS = {name: Job(name, name) for name in (*STAGES, "run", "report", "preview")}
JOBS["preview-plan"] = Job("preview-plan", "preview", ("--plan",))


def stage_order(config: Config) -> list[str]:
    """The stages that `run` runs."""
    return [name for name in config.stages.order if name != "encode-vision" or config.vision.model]


def list_conflicts(name: str) -> list[str]:
    """Jobs beside which this one is not started: `run` and the stages that it runs."""
    if name == "run":
        return list(STAGES)
    return ["run"] if name in STAGES else []
