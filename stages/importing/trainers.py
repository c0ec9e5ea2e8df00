"""The trainers whose configurations can be imported."""

from stages.importing import ai_toolkit, musubi, simpletuner

#: Name for --from -> trainer, in the order in which their `find_role` is tried.
TRAINERS = {"simpletuner": simpletuner.TRAINER, "musubi-tuner": musubi.TRAINER, "ai-toolkit": ai_toolkit.TRAINER}
