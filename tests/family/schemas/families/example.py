"""Rows of a family made for the tests: clips that go on from two given frames."""

from schemas.family import Cleaner, Condition, Expert, Family, Flavour, Normalization, Template


def loud(text: str) -> str:
    return text.strip().upper()


EXPERTS = {
    "high": Expert("transformer", 0.8, 1.0, guidance=2.0),
    "low": Expert("transformer_2", 0.0, 0.8, guidance=1.5),
}
FAMILIES = {
    "example": Family(
        name="example",
        flavours={"tiny": Flavour("tiny", "example/tiny", "i2v", shift=2.0, experts=EXPERTS)},
        default_flavour="tiny",
        text_encoder="example",
        autoencoder="example",
        transformer="example",
        latent_channels=4,
        side_multiple=16,
        spatial_stride=8,
        temporal_stride=1,
        resolution=64,
        frames=5,
        text_width=128,
        text_components=("text_encoder", "tokenizer"),
        latent_components=("vae",),
        model_classes={
            "transformer": "ExampleTransformer",
            "transformer_2": "ExampleTransformer",
            "text_encoder": "gemma2",
            "vae": "AutoencoderKL",
        },
        transformer_config={"i2v": {"in_channels": 4}},
        autoencoder_config={"latent_channels": 4},
        text_widths={"embeds": ("text_layers", "text_dim")},
        video=True,
        guidance=2.0,
        steps=2,
        templates={"i2v": Template("example", "Clip: {}", crop=1, max_length=16, cleaner=Cleaner(loud), layers=(1, 2))},
        conditions={"i2v": Condition("first-frame", frames=2)},
        normalization=Normalization(scale=None, mean="latents_mean", deviation="latents_std"),
        text_attention="eager",
    ),
}
