"""The base of the stages that read nothing but pictures and clips."""

from cache.sets.plans import Unit
from schemas.geometry import Bucket
from stages.encoding.member_reader import ReadRequest
from stages.encoding.worker import UnitWorker


class FrameWorker(UnitWorker):
    """Reads of each member its own frames alone, not the source images that its latents are conditioned on. listed_as:
    the kind of members by which their files are found."""

    listed_as = "items"

    def member_bytes(self, unit: Unit) -> int:
        """Return the bytes of the frames as they are read, before they are resized."""
        bucket = Bucket.parse(unit.bucket)
        return 3 * bucket.width * bucket.height * bucket.frames

    def read_request(self, name: str) -> ReadRequest:
        files = tuple(self.locations.planned_files(self.listed_as, name))
        return ReadRequest(files, self.plan.samples[name], None, self.config.latents.decoder)
