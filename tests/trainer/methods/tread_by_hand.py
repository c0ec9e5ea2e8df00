"""Blocks that are run on gathered tokens, one sample at a time, with drops by the definition."""

import numpy as np
import torch

from schemas.identity import derive_seed
from trainer import train as loop
from trainer.batch import Batch
from trainer.families.kandinsky5 import Kandinsky5

LAYERS = 5
ROUTES = [
    {"selection_ratio": 0.5, "start_layer_idx": 0, "end_layer_idx": 1},
    {"selection_ratio": 0.3, "start_layer_idx": -2, "end_layer_idx": -1},
]
ROUTED = {0: 0, 1: 0, 3: 1, 4: 1}  # block -> its route
OUTSIDE = 0.25  # factor of the loss outside of masks
NABLA = {"attention_type": "nabla", "attention_P": 0.2, "attention_wT": 3, "attention_wH": 1, "attention_wW": 1}
NABLA |= {"attention_method": "topcdf", "attention_add_sta": True}


def kept_by_hand(identity: str, route: int, groups: int, clean_groups: int, must: set[int], fewest: int) -> list[int]:
    """The kept groups: the groups with the lowest draws are dropped, except for groups that must stay."""
    ratio = ROUTES[route]["selection_ratio"]
    draws = (np.random.Philox(key=derive_seed(identity, f"tread {route}")).random_raw(groups) >> 40).tolist()
    free = sorted((draw, number) for number, draw in enumerate(draws) if number >= clean_groups and number not in must)
    dropped = {number for _, number in free[: min(int(ratio * (groups - clean_groups)), fewest)]}
    return [number for number in range(groups) if number not in dropped]


def put_back(all_ND: torch.Tensor, kept_tokens: list[int], new_KD: torch.Tensor) -> torch.Tensor:
    rows = list(all_ND)
    for place, row in zip(kept_tokens, new_KD, strict=True):
        rows[place] = row
    return torch.stack(rows)


def kandinsky_by_hand(model, arguments: dict, kept_tokens: list[list[int]]) -> torch.Tensor:
    """The stock forward pass of one sample; kept_tokens: route -> tokens."""
    visual = model.visual_embeddings(arguments["hidden_states"])
    shape, sparse = visual.shape[:-1], arguments["sparse_params"]
    time = model.time_embeddings(arguments["timestep"]) + model.pooled_text_embeddings(arguments["pooled_projections"])
    text, rope = model.text_embeddings(arguments["encoder_hidden_states"]), model.text_rope_embeddings
    rope = rope(arguments["text_rope_pos"])[None]
    places = [(t, y, x) for t in range(shape[1]) for y in range(shape[2]) for x in range(shape[3])]
    if sparse is not None:
        places = sorted(places, key=lambda p: (p[0], p[1] // 8, p[2] // 8, p[1] % 8, p[2] % 8))
    with model.text_mask.using(None):
        for block in model.text_transformer_blocks:
            text = block(text, time, rope)
        ropes = model.visual_rope_embeddings(shape, arguments["visual_rope_pos"], arguments["scale_factor"])
        x = torch.stack([visual[(0, *place)] for place in places])
        rope = torch.stack([ropes[(0, *place)] for place in places])
        all_tokens = [*range(len(x))]
        for number, block in enumerate(model.visual_transformer_blocks):
            tokens = kept_tokens[ROUTED[number]] if number in ROUTED else all_tokens
            near = None
            if sparse is not None:
                near = [(t, y // 8, x // 8) for t, y, x in (places[token] for token in tokens[::64])]
            hidden = block(x[tokens][None], text, time, rope[tokens][None], near)[0]
            x = put_back(x, tokens, hidden)
    grid = torch.stack([x[places.index(place)] for place in sorted(places)]).view(visual.shape)
    return model.out_layer(grid, text, time).movedim(-1, 1)


def nabla_by_hand(attn, hidden, sparse_params, rotary_emb) -> torch.Tensor:
    """sparse_params: (frame, row, column) of each block; neighbors in time always attend to each other."""
    query, key, value = (
        layer(hidden)[0].unflatten(-1, (attn.num_heads, -1)) for layer in (attn.to_query, attn.to_key, attn.to_value)
    )
    query, key = (
        (rotary_emb[0] * norm(x).reshape(*x.shape[:-1], -1, 1, 2)).sum(-1).reshape(x.shape)
        for norm, x in ((attn.query_norm, query), (attn.key_norm, key))
    )
    count, heads = len(sparse_params), []
    for q, k, v in zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True):
        means = (x.detach().unflatten(0, (count, 64)).mean(1) for x in (q, k))
        weights = torch.einsum("id,jd->ij", *means).div(q.shape[-1] ** 0.5).softmax(-1)
        selection = torch.zeros(count, count, dtype=torch.bool)
        for i, place in enumerate(sparse_params):
            left_out = 0.0
            for j in weights[i].argsort().tolist():
                left_out += weights[i, j].item()
                near = abs(place[0] - sparse_params[j][0]) <= 1 and place[1:] == sparse_params[j][1:]
                selection[i, j] = near or left_out >= 1 - NABLA["attention_P"]
        assert selection.float().mean() < 0.5, "sparse"
        scores = (q @ k.T / q.shape[-1] ** 0.5).masked_fill(
            ~torch.kron(selection, torch.ones(64, 64)).bool(), -torch.inf
        )
        heads.append(scores.softmax(-1) @ v)
    return attn.out_layer(torch.stack(heads, 1).flatten(1))[None]


def sana_by_hand(model, noisy_CHW, sigma, text_LD, kept_tokens: list[list[int]]) -> torch.Tensor:
    """One sample. In a route, the feed-forward gets the whole grid, with the waiting tokens unchanged."""
    height, width = noisy_CHW.shape[1:]
    x = model.patch_embed(noisy_CHW[None])[0]
    time, embedded = model.time_embed(1000 * sigma[None] * model.config.timestep_scale, batch_size=1)
    text = model.caption_norm(model.caption_projection(text_LD[None]))
    for number, block in enumerate(model.transformer_blocks):
        tokens = kept_tokens[ROUTED[number]] if number in ROUTED else [*range(len(x))]
        shift, scale, gate, shift_ff, scale_ff, gate_ff = block.scale_shift_table + time.view(6, -1)
        hidden = x[tokens]
        hidden = hidden + gate * block.attn1((block.norm1(hidden) * (1 + scale) + shift)[None])[0]
        hidden = hidden + block.attn2(hidden[None], encoder_hidden_states=text)[0]
        grid = block.norm2(put_back(x, tokens, hidden)) * (1 + scale_ff) + shift_ff
        forward = block.ff(grid.T.unflatten(1, (height, width))[None])[0].flatten(1).T
        x = put_back(x, tokens, hidden + gate_ff * forward[tokens])
    out = model.proj_out(model.norm_out(x[None], embedded, model.scale_shift_table))
    return out[0].T.unflatten(1, (height, width))[:, None]


class NablaByHand:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, rotary_emb=None, sparse_params=None):
        return nabla_by_hand(attn, hidden_states, sparse_params, rotary_emb)


def alone(batch: Batch, number: int) -> Batch:
    """One sample of a batch, its text without padding."""
    condition, length = batch.condition_BCTHW, int(batch.text_mask_BL[number].sum())
    return Batch(
        batch.latents_BCTHW[[number]],
        None if condition is None else condition[[number]],
        batch.text_BLD[[number], :length],
        batch.text_mask_BL[[number], :length],
        None if batch.pooled_BD is None else batch.pooled_BD[[number]],
        [batch.ids[number]],
        batch.bucket,
    )


def masked_places(mask_THW: torch.Tensor, places: list[tuple[int, int, int]], side: int) -> set[int]:
    """The positions, each of side x side latents, that the mask touches."""
    touched = [bool(mask_THW[t, y * side : (y + 1) * side, x * side : (x + 1) * side].max() > 0) for t, y, x in places]
    return set() if all(touched) else {place for place, result in enumerate(touched) if result}


def loss_by_hand(run: loop.TrainState, kind: str, noisy: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Mean of the losses of the first step's samples."""
    [part] = run.loader.step(0).micro_batches
    batch, losses = part.batch, []
    square, patch = 8 if kind == "nabla" else 1, 1 if kind == "sana" else 2
    frames, rows, columns = (
        size // divisor
        for size, divisor in zip(batch.latents_BCTHW.shape[2:], (1, patch * square, patch * square), strict=True)
    )
    places = [(t, y, x) for t in range(frames) for y in range(rows) for x in range(columns)]
    clean_groups = rows * columns * run.skip_frames
    masks = batch.extras.get("mask", torch.zeros(len(batch), *batch.latents_BCTHW.shape[2:]))
    must = [masked_places(mask, places, patch * square) for mask in masks]
    fewest = min(len({*range(clean_groups, len(places))} - forced) for forced in must)
    for number, identity in enumerate(part.identities):
        kept_tokens = []
        for route in range(len(ROUTES)):
            groups = kept_by_hand(identity, route, len(places), clean_groups, must[number], fewest)
            kept_tokens.append([group * square**2 + offset for group in groups for offset in range(square**2)])
        single = alone(batch, number)
        if kind == "sana":
            predicted = sana_by_hand(run.model, noisy[number, :, 0], sigma[number], single.text_BLD[0], kept_tokens)
        else:
            task = run.config.model.task
            arguments = Kandinsky5().model_inputs(run.model, noisy[[number]], sigma[[number]], single, task)
            predicted = kandinsky_by_hand(run.model, arguments, kept_tokens)
        target = part.noise_BCTHW[[number]] - single.latents_BCTHW
        weight = OUTSIDE + (1 - OUTSIDE) * masks[number] if "mask" in batch.extras else torch.ones(())
        losses.append((weight * (predicted.view_as(target) - target).square())[:, :, run.skip_frames :].mean())
    return torch.stack(losses).mean()
