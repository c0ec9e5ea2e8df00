"""Names of what is done to pixels before an encoder sees them, as they stand in a cache's fingerprint.

Whoever changes what the code does changes the name. Apart from the code, so that naming a cache needs no Pillow.
"""

RESIZE = "pillow-lanczos"  # stages/media/pixels.py: fit
# stages/encoding/text/prompt_images.py: half of each side, as the pipeline does; qwenimages.py: as torchvision does
PROMPT_IMAGE = "pillow-bicubic-half;torch-uint8-bicubic-antialias;fused-normalise"
MASK = "grey-over-black;pillow-bilinear;area-mean"  # samples.py: read_mask; stages/encoding/vae/worker.py: reduced
# image.py, colour.py and orientation.py
COLOUR = (
    "srgb8-over-white;yuv-tagged-else-709-above-576-lines-601-below;wide-primaries-to-709;mirrored-as-shown;"
    "hdr-and-interlaced-refused"
)
#: Of vision features: what is done to the pixels that the model sees, and to its patch tokens.
VISION_PIXELS = "aspect-kept-to-multiples-of-14;pillow-bicubic;imagenet-mean-deviation"
VISION_POOLING = (
    "last-hidden-state-patches;space-area-mean-where-finer-than-tokens;time-mean-of-each-latent-frames-group"
)
