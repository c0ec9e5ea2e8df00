import pickle

import pytest

from stages.media.errors import MediaError
from stages.media.files import media_size


def test_the_message_names_the_file_the_problem_and_the_next_step():
    error = MediaError("truncated", "a/b.mp4", "ends at 1.0 s", "replace it with a whole copy")
    assert str(error) == "a/b.mp4: ends at 1.0 s; replace it with a whole copy"
    assert error.reason == "truncated"


def test_an_error_survives_the_way_between_processes(tmp_path):
    error = MediaError("truncated", tmp_path / "b.mp4", "ends", "replace it")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.reason, copy.path, str(copy)) == (error.reason, str(tmp_path / "b.mp4"), str(error))


def test_unusable_files_have_different_reasons(tmp_path):
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.touch()
    full.write_bytes(b"abc")
    assert media_size(full) == 3
    for path, reason in ((empty, "empty-file"), (tmp_path / "none", "missing"), (tmp_path, "unreadable")):
        with pytest.raises(MediaError) as caught:
            media_size(path)
        assert caught.value.reason == reason
