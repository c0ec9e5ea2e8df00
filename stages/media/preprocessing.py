"""Names of what is done to pixels before an encoder sees them, as they stand in a cache's fingerprint.

Whoever changes what the code does changes the name. Apart from the code, so that naming a cache needs no Pillow.
"""

RESIZE = "pillow-lanczos"  # stages/media/pixels.py: fit
COLOUR = "srgb8-over-white;yuv-tagged-else-709-above-576-lines-601-below"  # image.py and video.py
