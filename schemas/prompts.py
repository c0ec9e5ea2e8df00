"""From a cleaned caption to the exact text an encoder is given. No tokenizer, no model."""

import pyarrow as pa
import pyarrow.compute as pc

from schemas.family import Template


def render_prompts(cleaned: pa.Array, template: Template, *, negative: bool = False) -> pa.Array:
    """`render` of n texts at once."""
    if negative and not template.negative_uses_template:
        return cleaned
    before, after = template.text.split("{}", 1)
    return pc.binary_join_element_wise(before, cleaned, after, "")


def render_prompt(cleaned: str, template: Template, *, negative: bool = False) -> str:
    """The text that is tokenised. Some templates are not put around negative and null prompts."""
    if negative and not template.negative_uses_template:
        return cleaned
    return template.text.replace("{}", cleaned, 1)
