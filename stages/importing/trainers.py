"""The trainers whose configurations can be imported."""

from stages.importing import ai_toolkit, musubi, simpletuner

#: By the names of --from, in the order in which a file's content is looked at.
TRAINERS = {"simpletuner": simpletuner.TRAINER, "musubi-tuner": musubi.TRAINER, "ai-toolkit": ai_toolkit.TRAINER}
