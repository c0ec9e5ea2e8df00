"""The worker of `caption`: pictures and clips -> captions by a vision-language model."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from cache.sets.item_rows import item_info
from cache.sets.plans import Unit
from cache.shards.shard import ShardRow
from schemas.geometry import Bucket
from schemas.identity import derive_seed
from schemas.recipe import has_source_images
from schemas.text_format import shorten
from stages.encoding.captions.describer import ItemFrames, PreparedItem, WrittenCaption, load_describer
from stages.encoding.member_reader import MemberPixels, ReadRequest
from stages.encoding.text.base import UNQUANTIZED
from stages.encoding.worker import RejectedResult, UnitWorker
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
        self._questions = caption.questions(has_source_images(self.config.model))
        self.precision = caption.precision or self.config.model.precision
        pinned = caption.changed(revision=self.pinned_revision(caption.revision))
        self._describer = load_describer(pinned, self.config.model, self.device)

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
            frames = ItemFrames((*before, read.frames[0]))
        else:
            frames = ItemFrames(before, read.frames, 1 / sample["rate"])
        seed = derive_seed(name, f"caption {self._caption.seed}")
        try:
            return self._describer.inputs.prepare(frames, self._questions, seed)
        except ValueError as error:
            path = self.path(name)
            raise MediaError("image-shape", path, f"is not a valid input of the model ({error})", "crop it") from error

    def cost(self, batch: list[PreparedItem]) -> int:
        """Tokens of the batch at most: each prompt padded to the longest prompt, plus caption.max_tokens."""
        return len(batch) * (max(item.tokens for item in batch) + self._caption.max_tokens)

    def encode(self, names: list[str], batch: list[PreparedItem], limit: int) -> Iterator[ShardRow | RejectedResult]:
        answers = self._describer.describe(batch)
        return self._rows(names, list(zip(*answers, strict=True)))

    def _rows(self, names: list[str], answers: list[tuple[WrittenCaption, ...]]) -> Iterator[ShardRow | RejectedResult]:
        """If all captions of an item have faults, the item is rejected with the first fault; otherwise its good
        captions are kept."""
        for name, item_answers in zip(names, answers, strict=True):
            captions, faults = list[str](), list[tuple[str, Fault]]()
            for question, answer in zip(self._questions, item_answers, strict=True):
                fault = find_fault(
                    answer.text, answer.is_complete, self._caption.max_tokens, self._caption.forbidden_words
                )
                if fault is None:
                    captions.append(" ".join(f"{self._caption.prefix} {answer.text}".split()))  # one line
                    continue
                faults.append((question, fault))
            if not captions:
                first = faults[0][1]
                yield RejectedResult(name, MediaError(first.reason, self.path(name), first.problem, first.advice))
                continue
            info = {"captions": captions, **item_info(self.plan.samples[name])}
            if faults:
                info["faults"] = [{"prompt": question, **asdict(fault)} for question, fault in faults]
            yield ShardRow(name, {}, info)

    def remarks(self, row: ShardRow) -> Iterator[str]:
        if self._describer.unquantized:
            yield f"described {UNQUANTIZED}: {', '.join(self._describer.unquantized)}"
        for fault in row.info.get("faults", ()):
            yield f"no caption for one prompt ({shorten(fault['prompt'])}): {fault['reason']}"


MAX_REPEATS = 3  # limit for a phrase in a row, and for a sentence or tag in a whole caption
MAX_PHRASE = 24  # words


@dataclass(frozen=True)
class Fault:
    """reason: short code. problem: text that follows the item's path in a message. advice: next step for the user."""

    reason: str
    problem: str
    advice: str


def find_fault(text: str, is_complete: bool, max_tokens: int, forbidden: Sequence[str]) -> Fault | None:
    """The fault of a caption; None if the caption is good. is_complete: whether the model ended the caption."""
    words = re.findall(r"\w+", text.lower())
    quoted = f"the model wrote {quote(text)}"
    if not words:
        step = "change caption.prompts, or write a caption"
        return Fault("empty-caption", f"has a caption without words: {quoted}", step)
    if "\0" in text:
        step = "change caption.prompts, or write a caption"
        return Fault("caption-zero-bytes", f"has a caption with zero bytes: {quoted}", step)
    if has_repeats(words, text):
        step = "set caption.repetition_penalty: 1.05 or a caption.temperature, or write a caption"
        return Fault("repeating-caption", f"has a caption that repeats itself: {quoted}", step)
    if not is_complete:
        step = "raise caption.max_tokens, ask for less in caption.prompts, or write a caption"
        return Fault("cut-caption", f"has a caption that was cut off at {max_tokens} tokens: {quoted}", step)
    for word in forbidden:
        if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE):
            step = "change caption.prompts, or write a caption"
            return Fault("forbidden-word", f"has a caption with {quote(word)}: {quoted}", step)
    return None


def quote(text: str) -> str:
    """The text in quotation marks, without semicolons, which separate the problem from the advice in a message."""
    return '"' + " ".join(text.split()).replace("; ", ", ") + '"'


def has_repeats(words: Sequence[str], text: str) -> bool:
    """Whether a phrase occurs more than MOST_REPEATS times in a row, or a sentence or tag that often in the whole
    text."""
    for length in range(1, min(MAX_PHRASE, len(words) // (MAX_REPEATS + 1)) + 1):
        run = 0
        for index in range(length, len(words)):
            run = run + 1 if words[index] == words[index - length] else 0
            if run >= length * MAX_REPEATS:
                return True
    parts = Counter(part.strip().lower() for part in re.split(r"[.!?,;\n]+", text) if part.strip())
    return max(parts.values(), default=0) > MAX_REPEATS
