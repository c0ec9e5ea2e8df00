"""What a person meant is named: files, families, flavours, a size in the place of a resolution."""

from pathlib import Path

import pytest

from schemas.catalog import FAMILIES, get_flavour
from schemas.config.loading import ConfigError, load_config, parse_config
from schemas.text_format import suggest

CONFIG = "root: work\nmodel: {family: %s}\ndatasets: [{id: a, instance_data_dir: a, resolution: %s}]\n"


@pytest.mark.parametrize(
    ("given", "meant"),
    [("zimage", "z-image"), ("Z_Image", "z-image"), ("wan21", "wan2.1"), ("flux2", "flux2-klein"), ("SANA ", "sana")],
)
def test_spelling_does_not_matter(given: str, meant: str) -> None:
    assert f"{meant!r}" in suggest(given, FAMILIES)
    with pytest.raises(ConfigError) as caught:
        parse_config(CONFIG % (f"'{given}'", 512), Path("photos.yaml"))
    assert "model.family" in caught.value.errors[0] and f"{meant!r}" in caught.value.errors[0]


def test_a_flavour_is_named_and_what_is_like_nothing_is_not() -> None:
    with pytest.raises(ValueError, match="'z-image-turbo'"):
        get_flavour("z-image", "z_image_turbo")
    assert suggest("xyz", FAMILIES) == suggest("", []) == ""


@pytest.mark.parametrize(("given", "edge"), [("1024x1024", 1024), ("[1024X768, 512]", 887)])
def test_a_size_in_the_place_of_a_resolution_gives_the_edge(given: str, edge: int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(CONFIG % ("sana", given), Path("photos.yaml"))
    (error,) = caught.value.errors
    assert "datasets.0.resolution" in error and f" {edge} " in error


def test_the_nearest_file_is_named(tmp_path: Path) -> None:
    def advice(name: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / name)
        return caught.value.next_step

    assert "latentpress new" in advice("pipeline.yaml")
    for name in ("photos.yaml", "clips.yml"):
        (tmp_path / name).write_text("datasets: []\n")
    assert str(tmp_path / "photos.yaml") in advice("fotos.yaml") and str(tmp_path / "clips.yml") in advice("clip.yaml")
    assert ".yaml" in advice("pipeline.yaml") or ".yml" in advice("pipeline.yaml")
