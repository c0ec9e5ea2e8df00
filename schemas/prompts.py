"""Rendering prompts: the exact text that is tokenised."""

import pyarrow as pa
import pyarrow.compute as pc

from schemas.family import Template


def render_prompts(cleaned: pa.Array, template: Template, *, negative: bool = False) -> pa.Array:
    """`render_prompt` of n texts."""
    if negative and not template.negative_uses_template:
        return cleaned
    before, after = template.text.split("{}", 1)
    return pc.binary_join_element_wise(before, cleaned, after, "")


def render_prompt(cleaned: str, template: Template, *, negative: bool = False) -> str:
    """Put the template around a text; some templates leave negative and null prompts alone."""
    if negative and not template.negative_uses_template:
        return cleaned
    return template.text.replace("{}", cleaned, 1)
