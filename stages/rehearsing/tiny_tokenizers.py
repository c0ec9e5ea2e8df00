"""Small tokenizers for the tiny checkpoints: the published classes, trained on a few sentences."""

import inspect
import json
import re
import string
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from schemas.catalog import FAMILIES
from schemas.family import Task

SENTENCES = (
    "A small grey cat looks at the camera with green eyes.",
    "A cup of black coffee stands on a saucer beside a silver spoon.",
    "A rocket rises from the launch pad in a cloud of bright smoke.",
    "An astronaut in an orange suit smiles before a flag and a model of the shuttle.",
    "A man with a camera on a tripod stands in a field, black and white photograph.",
    "People ride bicycles along a sunny street while cars pass by.",
    "A big white rabbit wakes up on a green meadow, animated film.",
    "A man talks inside a moving car, houses go past the window.",
    "Turn the picture into a black and white drawing, mirror it, make it brighter or darker.",
    "Static, 2D cartoon, worst quality, low quality, ugly, deformed, walking backwards.",
    "Red, blue, yellow and brown flowers grow near the old stone wall of the house.",
    "The moon over the sea at night; the sun over the mountains in the morning, 1234567890.",
)
QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# Words of the templates that are two tokens in Qwen's vocabulary; every other word and sign is one token. With these
# splits, the prefixes of the video and t2i templates have 128 and 40 tokens, which their pipelines crop.
SPLIT_WORDS = {" dynamism": (" dynam", "ism"), " scren": (" scr", "en"), " postprocessing": (" post", "processing")}
# The i2i prefix has 49 tokens in Qwen's vocabulary, but its pipeline crops 54 and so cuts off five tokens of the
# caption. With these splits, the prefix has 54 tokens; the kind named prefix49 does not use them.
EXTRA_SPLIT_WORDS = {
    " Based": (" Bas", "ed"),
    " target": (" tar", "get"),
    " together": (" to", "gether"),
    "second": ("sec", "ond"),
}
# The part of Qwen3's chat template for users' messages, with an empty thought if thinking is off.
QWEN3_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The part of Qwen3-VL's chat template for messages that consist of texts.
QWEN3_VL_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)
# With these words, the system turn of Qwen-Image-2.1 has 14 tokens, as in Qwen's vocabulary.
QWEN_IMAGE_21_WORDS = ("assistant", "Com", "pre", "hend", " analyze", " provided", " prompt")
TEMPLATE_TASKS: tuple[tuple[str, Task], ...] = (
    ("kandinsky5-video", "t2v"),
    ("kandinsky5-image", "t2i"),
    ("kandinsky5-image", "i2i"),
)


def template_prefixes() -> dict[str, tuple[str, int]]:
    """Pipeline class -> (the template up to the caption, number of tokens that its encode_prompt crops)."""
    import diffusers

    prefixes = {}
    for family, task in TEMPLATE_TASKS:
        name = FAMILIES[family].pipelines[task]
        pipe = getattr(diffusers, name)(*[None] * 7)
        prefixes[name] = pipe.prompt_template.split("{}")[0], pipe.prompt_template_encode_start_idx
    return prefixes


def sana_instruction() -> list[str]:
    """The lines that Sana's pipeline puts before a prompt."""
    import diffusers

    pipeline = getattr(diffusers, FAMILIES["sana"].pipelines["t2i"])
    return inspect.signature(pipeline.__call__).parameters["complex_human_instruction"].default


def _train_bpe(tokenizer: Any, trainer: Any, texts: Sequence[str]) -> tuple[list[str], list[Any]]:
    """Train a BPE tokenizer. Returns (tokens in the order of their ids, merges)."""
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [tuple(pair) for pair in model["merges"]]


@cache
def qwen_tokenizer(i2i_prefix: int = 54, chat_template: str | None = None, words: tuple[str, ...] = ()) -> Any:
    """A Qwen2Tokenizer whose template prefixes have exactly the number of tokens that the pipelines crop.

    i2i_prefix: 54, or 49 for the length of the i2i prefix in Qwen's vocabulary. words: further words of one token.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX, Qwen2Tokenizer

    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    splits = SPLIT_WORDS | (EXTRA_SPLIT_WORDS if i2i_prefix == 54 else {})
    prefixes = template_prefixes()
    plain = [text for prefix, _ in prefixes.values() for text in re.split(r"<\|\w+\|>", prefix)]
    found = [word for text in plain for word, _ in split.pre_tokenize_str(text)]
    pieces = [piece for word in found for piece in splits.get(word, (word,))] + [*words]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    # Repeated 50 times, so that whole words of the templates are learned before the sentences.
    vocab, merges = _train_bpe(tokenizer, trainer, pieces * 50 + list(SENTENCES))
    result = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocab)},
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=131072,
        extra_special_tokens=list(QWEN_SPECIAL),
        chat_template=chat_template,
    )
    for name, (prefix, crop) in prefixes.items():
        expected = i2i_prefix if "I2I" in name else crop
        count = len(result(prefix)["input_ids"])
        assert count == expected, f"{name}: its template's prefix has {count} tokens, not {expected}"
    return result


@cache
def clip_tokenizer() -> Any:
    """A CLIPTokenizer with at most 77 tokens. The end token has the highest id, like in the original."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # The trainer breaks ties between merges by the letters' numbers, and numbers letters at the end of a word in the
    # order of a hash table, which differs between processes. As special tokens they have fixed numbers.
    ends = [letter + "</w>" for letter in string.ascii_lowercase]
    trainer = trainers.BpeTrainer(vocab_size=900, end_of_word_suffix="</w>", special_tokens=ends, show_progress=False)
    texts = [re.sub(r"[^a-z]+", "\n", text.lower()).strip().split("\n") for text in SENTENCES]
    learned, merges = _train_bpe(tokenizer, trainer, [word for words in texts for word in words])
    # Every byte, inside and at the end of a word: an unknown byte would become the end token and truncate the text.
    vocab = dict.fromkeys(alphabet + [letter + "</w>" for letter in alphabet] + learned)
    tokens = [*vocab, "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, model_max_length=77)


@cache
def gemma_tokenizer() -> Any:
    """A GemmaTokenizer with a begin token, ▁ for spaces, and bytes for unknown letters."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import GemmaTokenizer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|▁?[^▁\n\p{P}]+|\p{P}|▁"), behavior="isolated")
    trainer = trainers.BpeTrainer(vocab_size=1200, show_progress=False)
    learned, merges = _train_bpe(tokenizer, trainer, [*sana_instruction(), *SENTENCES, "\n", " "] * 2)
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    tokens = dict.fromkeys(special + [f"<0x{byte:02X}>" for byte in range(256)] + learned)
    return GemmaTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        add_bos_token=True,
        model_max_length=8192,
    )


@cache
def t5_tokenizer() -> Any:
    """A T5Tokenizer with words of the sentences after a space, otherwise letters. It adds the end token."""
    from transformers import T5Tokenizer

    words = dict.fromkeys(word for text in SENTENCES for word in re.findall(r"[A-Za-z]+", text))
    letters = dict.fromkeys(string.printable.strip())
    # A piece's score is its logarithmic probability, so a word is more likely than its letters.
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    pieces += [(f"▁{word}", -6.0) for word in words if len(word) > 1] + [(letter, -5.0) for letter in letters]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


# Row of tiny_models.SHAPES -> its tokenizer.
TOKENIZERS: dict[str, Callable[[], Any]] = {
    "qwen": qwen_tokenizer,
    "qwen49": partial(qwen_tokenizer, 49),
    "qwen3_vl": partial(qwen_tokenizer, words=("assistant",)),  # the template's end has 5 tokens, as in the pipeline
    "qwen3_vl_chat": partial(qwen_tokenizer, words=("assistant",), chat_template=QWEN3_CHAT),
    "qwen3_vl_images": partial(qwen_tokenizer, words=QWEN_IMAGE_21_WORDS, chat_template=QWEN3_VL_CHAT),
    "qwen3": partial(qwen_tokenizer, chat_template=QWEN3_CHAT),
    "qwen3_deep": partial(qwen_tokenizer, chat_template=QWEN3_CHAT),
    "clip": clip_tokenizer,
    "clip_model": clip_tokenizer,
    "gemma": gemma_tokenizer,
    "umt5": t5_tokenizer,
}
