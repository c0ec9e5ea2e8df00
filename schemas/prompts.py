"""From a caption to the exact text an encoder is given: cleaning and templates. No tokenizer, no model.

The cleaning is what the diffusers pipelines do (`prompt_clean` of pipelines/kandinsky5, `_text_preprocessing`
of pipelines/sana with `clean_caption=False`); tests compare both with the installed release.
"""

import html
import re

import ftfy

from schemas.catalogue import Template


def clean_kandinsky(text: str) -> str:
    """ftfy, html unescape twice, whitespace folded."""
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return re.sub(r"\s+", " ", text).strip()


def clean_sana(text: str) -> str:
    """Lower case, outer whitespace removed."""
    return text.lower().strip()


_CLEANERS = {"kandinsky": clean_kandinsky, "sana": clean_sana}


def clean(text: str, template: Template) -> str:
    """The caption as the pipeline of this template would clean it before encoding."""
    return _CLEANERS[template.cleaning](text)


def render(cleaned: str, template: Template, *, negative: bool = False) -> str:
    """The text that is tokenised. Sana's negative and null prompts go without the instruction."""
    if negative and not template.negative_uses_template:
        return cleaned
    return template.text.replace("{}", cleaned, 1)
