"""Names of the pixel operations before an encoder, which enter a cache's fingerprint. Change a name with its code.

They are not beside the code, so that computing a fingerprint needs no Pillow.
"""

RESIZE = "pillow-lanczos"  # stages/media/pixels.py: resize_and_crop
# stages/encoding/text: prompt_images.py (half of each side, as the pipeline does), qwen_image_processor.py (the rest)
PROMPT_IMAGE = "pillow-bicubic-half;torch-uint8-bicubic-antialias;fused-normalise"
# stages/media/sample_reader.py: read_sample_mask; stages/encoding/vae/worker.py: mask_to_latent_grid
MASK = "grey-over-black;pillow-bilinear;area-mean"
# stages/media: image.py, colour.py and orientation.py
COLOUR = (
    "srgb8-over-white;yuv-tagged-else-709-above-576-lines-601-below;wide-primaries-to-709;mirrored-as-shown;"
    "hdr-and-interlaced-refused"
)
#: Of vision features: the model's pixels, and its patch tokens.
VISION_PIXELS = "aspect-kept-to-multiples-of-14;pillow-bicubic;imagenet-mean-deviation"
VISION_POOLING = (
    "last-hidden-state-patches;space-area-mean-where-finer-than-tokens;time-mean-of-each-latent-frames-group"
)
