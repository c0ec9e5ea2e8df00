"""Kandinsky 5 Image and Video: the transformer, its inputs for each task, and what LoRA adapts.

The inputs are equal to the inputs in the diffusers pipelines (pipelines/kandinsky5), in which the trained weights are
used. ModelFamily documents the functions.

Attention: the stock forward pass takes no text mask, so padding is attended to and a sample's output depends on its
batch mates. Here the keys of padded text are masked in the text blocks' self-attention and the visual blocks'
cross-attention; without padding every number equals the stock one. NABLA is as at inference. The processors get the
mask from a TextMask, which has a value only inside a forward pass. Gradient checkpointing recomputes blocks during
backward, after that pass: `checkpoint_block` restores the block's mask, and a processor without one raises an error.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.transformers import transformer_kandinsky as stock
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from schemas.catalog import FAMILIES
from schemas.devices import to_device
from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import KeptTokens, ModelFamily, TokenGrid, change_arguments
from trainer.joint_attention import Processor

BLOCK_TOKENS = 64  # tokens of one NABLA block: 8x8 patches of one latent frame
BLOCK_PIXELS = 128  # its edge: 8 patches of 2x2 latents of 8x8 pixels

SparseParams = dict[str, Any]
Mask = torch.Tensor | None


class TextMask:
    """The (B, L) mask of real text tokens in the current forward pass; None without padding."""

    def __init__(self) -> None:
        # Two attributes instead of a stack: a stack's length differs in the backward pass, so torch.compile would
        # recompile.
        self._running = False
        self._mask_BL: Mask = None

    @contextmanager
    def using(self, mask_BL: Mask) -> Iterator[None]:
        before = self._running, self._mask_BL
        self._running, self._mask_BL = True, mask_BL
        try:
            yield
        finally:
            self._running, self._mask_BL = before

    @property
    def current(self) -> Mask:
        assert self._running, (
            "an attention layer ran outside of the model's forward pass; checkpoint blocks with the model's "
            "own enable_gradient_checkpointing(), which restores the text mask"
        )
        return self._mask_BL


class Kandinsky5Transformer3DModel(stock.Kandinsky5Transformer3DModel):
    """The diffusers model, with `text_mask_BL` in its forward pass; call `install_processors` first. It has the stock
    name, which save_pretrained writes into config.json.
    """

    text_mask: TextMask

    def forward(self, *args: Any, text_mask_BL: Mask = None, **kwargs: Any) -> Any:
        # diffusers has no buffer for the frequencies, so they would be copied from the host in each pass.
        self.time_embeddings.freqs = to_device(self.time_embeddings.freqs, kwargs["timestep"].device)
        # A copy, so that the caller can't change the mask before the backward pass computes blocks again.
        with self.text_mask.using(None if text_mask_BL is None else text_mask_BL.clone()):
            return super().forward(*args, **kwargs)

    def enable_gradient_checkpointing(self, gradient_checkpointing_func: Callable | None = None) -> None:
        super().enable_gradient_checkpointing(gradient_checkpointing_func or self.checkpoint_block)

    def checkpoint_block(self, block: torch.nn.Module, *args: Any) -> Any:
        """Compute the block, and compute it again in the backward pass with the same text mask."""
        mask = self.text_mask.current

        def run(*inputs: Any) -> Any:
            with self.text_mask.using(mask):
                return block(*inputs)

        return checkpoint(run, *args, use_reentrant=False)


def install_processors(model: Any, float32_rotary: bool = False) -> None:
    """Give every attention of the model its processor.

    float32_rotary: whether to keep the rotary embedding in float32, for tests. The stock model rounds it to bfloat16,
    which is its largest rounding error.
    """
    model.text_mask = TextMask()
    for block in model.text_transformer_blocks:
        block.self_attention.set_processor(MaskedAttnProcessor(model.text_mask, float32_rotary))
    for block in model.visual_transformer_blocks:
        block.self_attention.set_processor(MaskedAttnProcessor(None, float32_rotary))
        block.cross_attention.set_processor(MaskedAttnProcessor(model.text_mask, float32_rotary))


class MaskedAttnProcessor(Processor):
    """The stock Kandinsky5AttnProcessor, with text keys masked by `text_mask`."""

    def __init__(self, text_mask: TextMask | None, float32_rotary: bool) -> None:
        self.text_mask = text_mask
        self.rotary_dtype = torch.float32 if float32_rotary else torch.bfloat16

    def __call__(
        self,
        attn: stock.Kandinsky5Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        rotary_emb: torch.Tensor | None = None,
        sparse_params: SparseParams | None = None,
    ) -> torch.Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (
            projected.unflatten(-1, (attn.num_heads, -1))
            for projected in (attn.to_query(hidden_states), attn.to_key(source), attn.to_value(source))
        )
        query = attn.query_norm(query.float()).type_as(query)
        key = attn.key_norm(key.float()).type_as(key)
        if rotary_emb is not None:
            query, key = self._rotate(query, rotary_emb), self._rotate(key, rotary_emb)
        # query, key, value, attended: (B, L, heads, D)
        if sparse_params is not None:
            attended = nabla_attention(query, key, value, sparse_params)
        elif self.text_mask is None:
            attended = dispatch_attention_fn(query, key, value, backend=self._attention_backend)
        else:
            mask_BL = self.text_mask.current
            assert mask_BL is None or mask_BL.shape == key.shape[:2], (mask_BL.shape, key.shape)
            mask_B11L = None if mask_BL is None else mask_BL[:, None, None, :]
            native = AttentionBackendName.NATIVE
            attended = dispatch_attention_fn(query, key, value, attn_mask=mask_B11L, backend=native)
        return attn.out_layer(attended.flatten(-2, -1))

    def _rotate(self, x_BLHD: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        pairs = x_BLHD.unflatten(-1, (-1, 1, 2)).to(torch.float32)
        return (rope * pairs).sum(-1).reshape(x_BLHD.shape).to(self.rotary_dtype).type_as(x_BLHD)


# NABLA, for checkpoints with attention_type "nabla" in their config.


def sparse_params(model: Any, frames: int, height: int, width: int) -> SparseParams | None:
    """Returns the forward pass's `sparse_params`; None without NABLA. Raises ValueError if blocks do not fit the
    size."""
    config = model.config
    if config.attention_type != "nabla":
        return None
    _, patch_h, patch_w = config.patch_size
    rows, columns = height // patch_h, width // patch_w
    if rows % 8 or columns % 8 or height % patch_h or width % patch_w:
        raise ValueError(
            f"{width * 8}x{height * 8} pixels: this checkpoint's sparse attention (NABLA) needs sides that "
            f"are multiples of {BLOCK_PIXELS}; choose other bucket sizes"
        )
    window = (config.attention_wT, config.attention_wH, config.attention_wW)
    return {
        "sta_mask": window_mask((frames, rows // 8, columns // 8), window, model.device)[None, None],
        "attention_type": config.attention_type,
        "to_fractal": True,
        "P": config.attention_P,
        "wT": config.attention_wT,
        "wW": config.attention_wW,
        "wH": config.attention_wH,
        "add_sta": config.attention_add_sta,
        "visual_shape": (frames, rows, columns),
        "method": config.attention_method,
    }


def sparse_edge(model: Any) -> int:
    """Returns the side, in tokens, of the square that forms one block; 1 without NABLA."""
    return math.isqrt(BLOCK_TOKENS) if model.config.attention_type == "nabla" else 1


def take_blocks(sparse: SparseParams, positions_BK: torch.Tensor) -> SparseParams:
    """Returns the parameters for a selection of tokens. positions_BK: their positions, which form whole blocks."""
    blocks_Bk = positions_BK[:, ::BLOCK_TOKENS] // BLOCK_TOKENS
    near_NN = sparse["sta_mask"][0, 0]
    return sparse | {"sta_mask": near_NN[blocks_Bk[:, :, None], blocks_Bk[:, None, :]][:, None]}


def window_mask(
    blocks: tuple[int, int, int], window: tuple[int, int, int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """(N, N) bool, N = T * H * W blocks: whether they are within half a window on each axis, as in `fast_sta_nabla`."""
    positions_N3 = torch.cartesian_prod(*(torch.arange(size, device=device) for size in blocks)).view(-1, 3)
    distances_NN3 = (positions_N3[:, None] - positions_N3[None]).abs()
    return (distances_NN3 <= torch.tensor([size // 2 for size in window], device=device)).all(-1)


@torch.compiler.disable  # flex attention is compiled separately, with its own options, also in compiled blocks
def nabla_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sparse: SparseParams) -> torch.Tensor:
    """Attention (B, L, heads, D) over the blocks that `nablaT_v2` chooses; L in the order of blocks.

    On CUDA compiled flex attention skips blocks that are not chosen; on other devices, for tests, a dense mask gives
    the same result at the cost of full attention.
    """
    with torch.no_grad():  # the choice of blocks has no gradient
        blocks = stock.nablaT_v2(query, key, sparse["sta_mask"], thr=sparse["P"])
    query, key, value = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    if query.device.type == "cuda":
        out = compiled_flex(query.device, query.dtype, query.shape[-1])(query, key, value, block_mask=blocks)
    elif query.device.type == "meta":  # for memory prediction; the choice of blocks does not affect sizes
        out = F.scaled_dot_product_attention(query, key, value)
    else:
        out = dense_attention(query, key, value, blocks)
    return out.transpose(1, 2)


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Any) -> torch.Tensor:
    """Attention (B, heads, L, D) over the chosen blocks, a flex attention BlockMask, by a mask of every pair (L, L)."""
    dense = blocks.to_dense().bool().repeat_interleave(BLOCK_TOKENS, -2).repeat_interleave(BLOCK_TOKENS, -1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=dense)


@functools.cache
def compiled_flex(device: torch.device, dtype: torch.dtype, head_dim: int) -> Callable[..., torch.Tensor]:
    """Compiled flex attention, after a check that it really leaves blocks out on this device.

    max_autotune, because inductor's default kernels divide queries or keys by 128 and reject blocks of 64: on Ampere
    the kernel of the forward pass, on Hopper the kernels of both passes (torch 2.11 to 2.13, flex_attention.py).
    """
    from torch.nn.attention.flex_attention import flex_attention

    flex = torch.compile(flex_attention, options={"max_autotune": True})
    check_block_mask_used(flex, device, dtype, head_dim)
    return flex


def check_block_mask_used(
    flex: Callable[..., torch.Tensor], device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    """Raise RuntimeError unless `flex` obeys a block mask: without compilation it silently computes full attention."""
    from torch.nn.attention.flex_attention import BlockMask

    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 1, 2 * BLOCK_TOKENS, head_dim, generator=generator).to(device, dtype) for _ in range(3)]
    counts = torch.ones(1, 1, 2, dtype=torch.int32, device=device)
    order = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32, device=device)[None, None]
    diagonal = BlockMask.from_kv_blocks(torch.zeros_like(counts), order, counts, order, BLOCK_SIZE=BLOCK_TOKENS)
    with torch.no_grad():
        out = flex(*qkv, block_mask=diagonal)
        halves = zip(*(x.split(BLOCK_TOKENS, 2) for x in qkv), strict=True)
        expected = torch.cat([F.scaled_dot_product_attention(q, k, v) for q, k, v in halves], 2)
    error = (out - expected).abs().max().item()
    if not math.isfinite(error) or error > 0.05:
        raise RuntimeError(
            f"flex attention on {device} ignores its block mask (off by {error:.3g}): NABLA would silently "
            "be full attention. It must be compiled: unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE, "
            "and check that torch.compile works here"
        )


VIDEO = FAMILIES["kandinsky5-video"]
LATENT_STRIDE = VIDEO.spatial_stride  # pixels of one latent, the same for images
NORMALIZED_FRAMES, REFERENCE_FRAMES = 4, 5  # latent frames in i2v's normalize_first_frame


def visual_input(
    noisy_BCTHW: torch.Tensor, condition_BCTHW: torch.Tensor | None, task: Task, visual_cond: bool
) -> torch.Tensor:
    """The result of the pipelines' `prepare_latents`, (B, T, H, W, C): the 16 channels of the latent, and with
    `visual_cond` also the condition's channels and a mask.

    i2v: frame 0 of the latent is the clean first frame and has mask 1, the condition is zero. i2i: the source's latent
    and ones. t2v: zeros. Raises ValueError if checkpoint and task do not match.
    """
    if task in ("i2i", "i2v") and condition_BCTHW is None:
        raise ValueError(f"{task} needs the condition's latent, and this batch has none; run encode-latents")
    if (task == "t2i" and visual_cond) or (task == "i2i" and not visual_cond):
        fitting = "i2i or video" if visual_cond else "t2i"
        raise ValueError(f"the checkpoint does not support {task}: its visual_cond is for {fitting}")
    latent = noisy_BCTHW.movedim(1, -1)  # BCTHW -> BTHWC
    source, mask = torch.zeros_like(latent), torch.zeros_like(latent[..., :1])
    if condition_BCTHW is not None and task in ("i2i", "i2v"):
        condition = condition_BCTHW.movedim(1, -1).to(latent.dtype)
        if task == "i2i":
            source, mask = condition, torch.ones_like(mask)
        else:
            latent = torch.cat([condition, latent[:, 1:]], 1)
            mask[:, :1] = 1
    return torch.cat([latent, source, mask], -1) if visual_cond else latent


class Kandinsky5(ModelFamily):
    TRANSFORMER = Kandinsky5Transformer3DModel
    # Whole paths: the bare name `out_layer` would also match modules that LoRA cannot wrap.
    LORA_TARGETS = (
        r"(text|visual)_transformer_blocks\.\d+\."
        r"((self|cross)_attention\.(to_query|to_key|to_value|out_layer)|feed_forward\.(in_layer|out_layer))"
    )
    QUANTIZED = LORA_TARGETS
    FLOAT32_MODULES = frozenset({"time_embeddings", "modulation", "visual_modulation", "text_modulation"})

    def install(self, model: Any) -> None:
        install_processors(model)

    def load(
        self,
        source: str,
        revision: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        part: str = "transformer",
        float32_rotary: bool = False,
    ) -> Kandinsky5Transformer3DModel:
        """Time embeddings and modulations stay in float32 for any dtype: never call `.to(dtype)` on the result."""
        model = super().load(source, revision, dtype, device, part)
        install_processors(model, float32_rotary)
        return model

    def clean_frames(self, task: Task) -> int:
        return 1 if task == "i2v" else 0

    def blocks(self, model: Any, task: Task) -> list[torch.nn.Module]:
        return [*model.text_transformer_blocks, *model.visual_transformer_blocks]

    def visual_blocks(self, model: Any) -> list[torch.nn.Module]:
        return [*model.visual_transformer_blocks]

    def token_grid(self, model: Any, batch: Batch) -> TokenGrid:
        frames, rows, columns = (
            size // patch for size, patch in zip(batch.latents_BCTHW.shape[2:], model.config.patch_size, strict=True)
        )
        return TokenGrid(frames, rows, columns, batch.text_BLD.shape[1], sparse_edge(model))

    def hidden_size(self, model: Any) -> int:
        return model.config.model_dim

    def dense_attention(self, model: Any) -> tuple[list[Any], int]:
        if sparse_edge(model) > 1:
            raise ValueError("this checkpoint's self-attention is sparse (NABLA), which flex attention computes")
        return [block.self_attention for block in model.visual_transformer_blocks], sum(model.config.axes_dims)

    def route_blocks(self, blocks: Sequence[torch.nn.Module], kept_tokens: KeptTokens) -> list[RemovableHandle]:
        changes: dict[str, Any] = {}  # the same for all blocks

        def take(arguments: dict[str, Any]) -> dict[str, Any]:
            if not changes:
                sparse = arguments["sparse_params"]
                changes["rope"] = kept_tokens.take(arguments["rope"])
                changes["sparse_params"] = sparse and take_blocks(sparse, kept_tokens.positions_BK)
            return changes

        return [change_arguments(block, take) for block in blocks]

    def compute_dtype(self, model: Any) -> torch.dtype:
        """The dtype of frozen weights; adapters and modulations may be float32."""
        return model.visual_embeddings.in_layer.weight.dtype

    sampling_dtype = compute_dtype

    def model_inputs(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> dict[str, Any]:
        """Arguments of the transformer's forward pass. The timestep is rounded to the compute dtype, as at
        inference."""
        dtype, device = self.compute_dtype(model), noisy_BCTHW.device
        _, _, frames, height, width = noisy_BCTHW.shape
        if height % 2 or width % 2:
            size = f"{width * LATENT_STRIDE}x{height * LATENT_STRIDE}"
            raise ValueError(f"{size} pixels: sides must be multiples of {2 * LATENT_STRIDE}")
        assert batch.pooled_BD is not None, "Kandinsky 5 texts have a pooled CLIP embedding"
        video, window = task in VIDEO.pipelines, VIDEO.scale_window
        assert window is not None
        positions = [torch.arange(n, device=device) for n in (frames, height // 2, width // 2)]
        return {
            "hidden_states": visual_input(noisy_BCTHW, batch.condition_BCTHW, task, model.visual_cond).to(dtype),
            "encoder_hidden_states": batch.text_BLD.to(dtype),
            "pooled_projections": batch.pooled_BD.to(dtype),
            "timestep": (1000 * sigma_B).float().to(dtype),
            "visual_rope_pos": positions,
            "text_rope_pos": torch.arange(batch.text_BLD.shape[1], device=device),
            "scale_factor": window.factors(width * LATENT_STRIDE, height * LATENT_STRIDE) if video else (1.0, 1.0, 1.0),
            "sparse_params": sparse_params(model, frames, height, width) if video else None,
            "text_mask_BL": batch.text_mask_BL if batch.padded else None,
        }

    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        arguments = self.model_inputs(getattr(model, "module", model), noisy_BCTHW, sigma_B, batch, task)
        return model(**arguments, return_dict=False).movedim(-1, 1)  # BTHWC -> BCTHW

    def initial_latents(self, noise_BCTHW: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
        if task != "i2v":
            return noise_BCTHW
        assert batch.condition_BCTHW is not None
        return torch.cat([batch.condition_BCTHW.to(noise_BCTHW.dtype), noise_BCTHW[:, :, 1:]], 2)

    def postprocess_latents(self, latents_BCTHW: torch.Tensor, task: Task) -> torch.Tensor:
        """For i2v the pipeline's `normalize_first_frame`: mean and deviation of the first four latent frames move
        towards mean and deviation of the next five frames, within limits, against mesh artifacts. With fewer than five
        frames, the pipeline's result is not finite, and latents are unchanged."""
        if task != "i2v" or latents_BCTHW.shape[2] <= NORMALIZED_FRAMES:
            return latents_BCTHW
        first = latents_BCTHW[:, :, :NORMALIZED_FRAMES]
        next_frames = latents_BCTHW[:, :, NORMALIZED_FRAMES : NORMALIZED_FRAMES + REFERENCE_FRAMES]
        axes = (1, 2, 3, 4)
        mean, deviation = first.mean(axes, keepdim=True), first.std(axes, keepdim=True)
        new_mean = torch.clamp(next_frames.mean(), mean - 0.05, mean + 0.1)
        new_deviation = torch.clamp(next_frames.std(), deviation - 0.1, deviation + 0.25)
        normalized = (first - mean) / deviation * new_deviation + new_mean
        return torch.cat([normalized, latents_BCTHW[:, :, NORMALIZED_FRAMES:]], 2)
