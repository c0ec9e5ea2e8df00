"""The worker of `caption`: pictures and clips -> what a vision-language model writes of them."""

from collections.abc import Iterator
from dataclasses import asdict

from cache.sets.item_rows import item_info
from cache.sets.plans import Unit
from cache.shards.shard import ShardRow
from schemas.geometry import Bucket
from schemas.identity import derive_seed
from schemas.recipe import has_source_images
from schemas.text_format import shorten
from stages.encoding.captions.describer import Written, load_describer
from stages.encoding.captions.faults import Fault, find_fault
from stages.encoding.captions.inputs import PreparedItem, Shown
from stages.encoding.member_reader import MemberPixels, ReadRequest
from stages.encoding.text.base import UNQUANTIZED
from stages.encoding.worker import RefusedMember, UnitWorker
from stages.engines.jobs import Job
from stages.media.files import MediaError


class CaptionWorker(UnitWorker):
    """Members are items whose pictures are prepared for the model."""

    stage, kind, section, tensors = "caption", "captions", "caption", ()
    batch_limit_option = "batch_tokens"
    advice = "lower caption.resolution, set caption.offload: blocks or caption.quantization, or use a larger card"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        caption = self.config.caption
        assert caption is not None
        self._caption = caption
        self._questions = caption.questions(has_source_images(self.config))
        self.precision = caption.precision or self.config.model.precision
        pinned = caption.model_copy(update={"revision": self.pinned_revision(caption.revision)})
        self._describer = load_describer(self.config.model_copy(update={"caption": pinned}), self.device)

    def member_bytes(self, unit: Unit) -> int:
        """Return the bytes of the pictures, and of the model's input in float32."""
        bucket = Bucket.parse(unit.bucket)
        return 15 * bucket.width * bucket.height * bucket.frames

    def read_request(self, name: str) -> ReadRequest:
        sample = self.plan.samples[name]
        files = tuple(self.locations.planned_files("items", name))
        return ReadRequest(files, sample, sample["source_geometry"], self.config.latents.decoder)

    def prepare(self, name: str, read: MemberPixels | None) -> PreparedItem:
        assert read is not None and read.frames is not None
        sample = self.plan.samples[name]
        before = () if read.image is None else (read.image,)
        if sample["kind"] == "image":
            shown = Shown((*before, read.frames[0]))
        else:
            shown = Shown(before, read.frames, 1 / sample["rate"])
        seed = derive_seed(name, f"caption {self._caption.seed}")
        try:
            return self._describer.inputs.prepare(shown, self._questions, seed)
        except ValueError as error:
            path = self._path(name)
            raise MediaError("image-shape", path, f"can't be shown to the model ({error})", "crop it") from error

    def cost(self, batch: list[PreparedItem]) -> int:
        """Tokens that the batch's captions have at the end of the longest."""
        return len(batch) * (max(item.tokens for item in batch) + self._caption.max_tokens)

    def encode(self, names: list[str], batch: list[PreparedItem], limit: int) -> Iterator[ShardRow | RefusedMember]:
        written = self._describer.describe(batch)
        return self._rows(names, list(zip(*written, strict=True)))

    def _rows(self, names: list[str], written: list[tuple[Written, ...]]) -> Iterator[ShardRow | RefusedMember]:
        """An item whose captions all have faults is refused, by the first one's; of others the good ones are kept."""
        for name, answers in zip(names, written, strict=True):
            captions, faults = list[str](), list[tuple[str, Fault]]()
            for question, answer in zip(self._questions, answers, strict=True):
                fault = find_fault(answer.text, answer.ended, self._caption.max_tokens, self._caption.forbidden)
                if fault is None:
                    captions.append(" ".join(f"{self._caption.prefix} {answer.text}".split()))  # one line
                    continue
                faults.append((question, fault))
            if not captions:
                first = faults[0][1]
                yield RefusedMember(name, MediaError(first.reason, self._path(name), first.problem, first.advice))
                continue
            info = {"captions": captions, **item_info(self.plan.samples[name])}
            if faults:
                info["faults"] = [{"prompt": question, **asdict(fault)} for question, fault in faults]
            yield ShardRow(name, {}, info)

    def remarks(self, row: ShardRow) -> Iterator[str]:
        if self._describer.unquantized:
            yield f"described {UNQUANTIZED}: {', '.join(self._describer.unquantized)}"
        for fault in row.info.get("faults", ()):
            yield f"without the caption of one prompt ({shorten(fault['prompt'])}): {fault['reason']}"

    def _path(self, name: str) -> str:
        return self.plan.active_rows.get(name, self.plan.samples[name])["path"]
