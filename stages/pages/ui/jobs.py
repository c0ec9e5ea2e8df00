"""Jobs that the page can start: the programs of the command line, by the words that start them."""

from dataclasses import dataclass

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
    "score": "scores the decoded samples",
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


def list_conflicts(name: str) -> list[str]:
    """Jobs beside which this one is not started: `run` and the stages that it runs."""
    if name == "run":
        return list(STAGES)
    return ["run"] if name in STAGES else []
