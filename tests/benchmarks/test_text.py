"""The comparison of text encoders runs, counts the same tokens both ways, and finds the same embeddings."""

import re

import pytest
import torch

from benchmarks import text
from schemas.catalog import FAMILIES
from stages.encoding.text.kandinsky5 import Encoder


@pytest.mark.slow
def test_both_ways_are_timed(tiny, capsys) -> None:
    model = str(tiny("kandinsky5-video-t2v"))
    options = ["--captions", "10", "--longest", "30", "--repeat", "1", "--budget", "64", "--device-usage"]
    text.main(["--model", model, *options])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "10 captions of 10 to 30 tokens, kandinsky5-video-t2v, torch.float32, cpu"
    rows = [line for line in lines if re.search(r"\| [\d,]+ \| [\d,]+ to [\d,]+ \| [\d.]+ \|$", line)]
    assert [row.split(" | ")[0] for row in rows] == [
        "| pipeline, batches of 8",
        "| pipeline, sorted by length",
        "| encoder without the shared prefix",
        "| encoder",
    ]
    asked = [line for line in lines if re.search(r"\| [\d.e-]+ \| \d+% \|  \|  \|$", line)]
    assert [row.split(" | ")[0] for row in asked] == [row.split(" | ")[0] for row in rows]
    assert lines[-1] == "texts behind the shared prefix: 20, whole: 0"


@pytest.mark.slow
@pytest.mark.parametrize("budget", [40, 10_000])
def test_both_ways_encode_the_same_tokens(tiny, budget) -> None:
    folder, cpu = tiny("kandinsky5-video-t2v"), torch.device("cpu")
    template = FAMILIES["kandinsky5-video"].templates["t2v"]
    encoder = Encoder(str(folder), None, template, template.max_length, torch.float32, cpu)
    pipe = text.make_pipeline(folder, "kandinsky5-video-t2v", torch.float32, cpu)
    captions = text.make_captions(folder, 12, 40)
    assert len(set(captions)) == 12
    tokens = text.encode_with_pipeline(pipe, captions, cpu)
    assert tokens == text.encode_with_encoder(encoder, captions, budget) > 12 * 10
