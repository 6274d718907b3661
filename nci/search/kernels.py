"""The operations of `ops.py` as Triton kernels for GPUs. Imported only where there is one.

Each kernel does in one launch what takes PyTorch several, because a search at batch 1 is a few hundred tiny launches, and
at large batches it is bound by how often activations travel to memory. No kernel asks the host for anything.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, import-not-found"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nci.search.ops import Children, SearchTree, TorchOps

_MOST_CHILDREN = 1024  # of one node that a kernel holds at once
_MOST_KEYS = 128
_MOST_CANDIDATES = 16384


@triton.jit
def _rms_norm(x, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    scaled = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out + row * width + columns, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm(x, shift, weight, bias, out, width, eps, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if SHIFT:
        value += tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / width
    value = tl.where(inside, value - mean, 0.0)
    scaled = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    scaled *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    scaled += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attend(
    q, k, v, lengths, bias, out, rows, keys, scale,
    q_batch, q_row, kv_batch, kv_row, out_batch, out_row,
    HEAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BIAS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key, column = tl.arange(0, KEYS), tl.arange(0, HEAD)
    there, seen = line < rows, key < tl.load(lengths + batch)
    asked = tl.load(q + batch * q_batch + line[:, None] * q_row + head * HEAD + column, mask=there[:, None], other=0.0)
    place = batch * kv_batch + key[:, None] * kv_row + head * HEAD + column
    keys_ = tl.load(k + place, mask=seen[:, None], other=0.0)
    values = tl.load(v + place, mask=seen[:, None], other=0.0)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    logits = tl.dot(asked, tl.trans(keys_), input_precision=precision) * scale
    if BIAS:
        logits += tl.load(
            bias + head * rows * keys + line[:, None] * keys + key, mask=there[:, None] & seen[None, :], other=0.0
        )
    logits = tl.where(seen[None, :], logits, -1e30)
    share = tl.exp(logits - tl.max(logits, 1)[:, None])
    share = share / tl.sum(share, 1)[:, None]
    mixed = tl.dot(share.to(values.dtype), values, input_precision=precision)
    tl.store(
        out + batch * out_batch + line[:, None] * out_row + head * HEAD + column,
        mixed.to(out.dtype.element_ty),
        mask=there[:, None],
    )


@triton.jit
def _ancestors(
    cache, places, out, first, width, heads, scale, STEPS: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HEAD)[None, :]
    offset, inside = head * HEAD + column, (head < heads) & (column < HEAD)
    q = tl.load(cache + (first + row) * 3 * width + offset, mask=inside, other=0.0).to(tl.float32) * scale
    peak = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, HEAD], tl.float32)
    for step in tl.static_range(STEPS):
        line = cache + tl.load(places + row * STEPS + step) * 3 * width + offset
        key = tl.load(line + width, mask=inside, other=0.0).to(tl.float32)
        logit = tl.sum(q * key, 1)
        higher = tl.maximum(peak, logit)
        old, new = tl.exp(peak - higher), tl.exp(logit - higher)
        value = tl.load(line + 2 * width, mask=inside, other=0.0).to(tl.float32)
        mixed = mixed * old[:, None] + value * new[:, None]
        total, peak = total * old + new, higher
    tl.store(out + row * width + offset, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _child_scores(
    h, nodes, scores, vectors, bias, child_start, anchors, out, rows, anchor_query, anchor_node,
    WIDTH: tl.constexpr, FANOUT: tl.constexpr, BLOCK: tl.constexpr, ANCHORS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    score, node = tl.load(scores + row), tl.load(nodes + row)
    slots = tl.arange(0, FANOUT)
    first = tl.load(child_start + node).to(tl.int64)
    count = tl.load(child_start + node + 1).to(tl.int64) - first
    real = slots < tl.where(score > -1e30, count, 0)
    child = first + slots
    logits = tl.zeros([FANOUT], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < WIDTH
        state = tl.load(h + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        edge = tl.load(vectors + child[:, None] * WIDTH + column, mask=real[:, None] & inside[None, :], other=0.0).to(
            tl.float32
        )
        logits += tl.sum(edge * state[None, :], 1)
    logits += tl.load(bias + child, mask=real, other=0.0)
    if ANCHORS:
        query = row // rows
        logits += tl.load(anchors + query * anchor_query + child * anchor_node, mask=real, other=0.0)
    logits = tl.where(real, logits, -1e30)
    peak = tl.max(logits, 0)
    normaliser = peak + tl.log(tl.sum(tl.exp(logits - peak), 0))
    tl.store(out + row * FANOUT + slots, tl.where(real, score + logits - normaliser, -float("inf")))


@triton.jit
def _select(
    total, nodes, child_start, number, children, parents, scores, found, found_scores, size, keep, rows,
    FANOUT: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    score = tl.load(total + query * size + place, mask=place < size, other=-float("inf"))
    # Floats in the order of unsigned integers; the bits of the keep-th highest are found from the top one down.
    bits = score.to(tl.uint32, bitcast=True)
    bits = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    bits = tl.where(place < size, bits, 0)
    threshold = tl.full([1], 0, tl.uint32)
    for shift in tl.static_range(32):
        higher = threshold | tl.full([1], 1 << (31 - shift), tl.uint32)
        enough = tl.sum((bits >= higher).to(tl.int32), 0) >= keep
        threshold = tl.where(enough, higher, threshold)
    above, level = bits > threshold, bits == threshold
    room = keep - tl.sum(above.to(tl.int32), 0)
    chosen = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))
    out = query * keep + tl.cumsum(chosen.to(tl.int32), 0) - 1
    live = chosen & (score > -1e30)
    parent = (place // FANOUT).to(tl.int64)
    node = tl.load(nodes + query * rows + parent, mask=live, other=0)
    child = tl.load(child_start + node, mask=live, other=0).to(tl.int64) + place % FANOUT
    child = tl.where(live, child, 0)
    ends = live if LAST else live & (tl.load(number + child, mask=live, other=0) < 0)
    goes_on = live & (ends == 0)
    tl.store(children + out, tl.where(goes_on, child, 0), mask=chosen)
    tl.store(parents + out, parent, mask=chosen)
    tl.store(scores + out, tl.where(goes_on, score, -float("inf")), mask=chosen)
    tl.store(found + out, tl.where(ends, child, -1), mask=chosen)
    tl.store(found_scores + out, tl.where(ends, score, -float("inf")), mask=chosen)


@triton.jit
def _descend(
    nodes, parents, places, number, states, asks, new_places, x, q, first, rows, above, width,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = (row // rows) * above + tl.load(parents + row)
    for step in tl.static_range(STEPS):
        tl.store(new_places + row * (STEPS + 1) + step, tl.load(places + line * STEPS + step))
    tl.store(new_places + row * (STEPS + 1) + STEPS, first + row)
    source = tl.load(number + tl.load(nodes + row)) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    tl.store(x + row * width + column, tl.load(states + source + column, mask=inside), mask=inside)
    tl.store(q + row * width + column, tl.load(asks + source + column, mask=inside), mask=inside)


class TritonOps(TorchOps):
    """One launch per operation; what a kernel cannot hold is left to PyTorch."""

    def rms_norm(self, x: Tensor, eps: float) -> Tensor:
        out, width = torch.empty_like(x), x.shape[-1]
        _rms_norm[(x.numel() // width,)](x, out, width, eps, BLOCK=_power(width), num_warps=_warps(width))
        return out

    def layer_norm(self, x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out, width = torch.empty_like(x), x.shape[-1]
        _layer_norm[(x.numel() // width,)](
            x, x if shift is None else shift, weight, bias, out, width, eps,
            SHIFT=shift is not None, BLOCK=_power(width), num_warps=_warps(width),
        )  # fmt: skip
        return out

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        lengths: Tensor | None,
        bias: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        (batch, rows, d), keys = q.shape, k.shape[1]
        head = d // heads
        if keys > _MOST_KEYS or head not in (16, 32, 64, 128) or lengths is None:
            return super().attend(q, k, v, heads, lengths, bias, scale)
        out = torch.empty(batch, rows, d, dtype=q.dtype, device=q.device)
        block = min(64, max(16, _power(rows)))
        _attend[(-(-rows // block), heads, batch)](
            q, k, v, lengths, q if bias is None else bias, out, rows, keys, head**-0.5 if scale is None else scale,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), out.stride(0), out.stride(1),
            HEAD=head, ROWS=block, KEYS=max(16, _power(keys)), BIAS=bias is not None, EXACT=q.dtype == torch.float32,
            num_warps=4,
        )  # fmt: skip
        return out

    def ancestors(self, cache: Tensor, first: int, places: Tensor, heads: int) -> Tensor:
        rows, steps = places.shape
        d = cache.shape[1] // 3
        head = d // heads
        if head & (head - 1):
            return super().ancestors(cache, first, places, heads)
        out = torch.empty(rows, d, dtype=cache.dtype, device=cache.device)
        _ancestors[(rows,)](
            cache, places, out, first, d, heads, head**-0.5, STEPS=steps, HEADS=_power(heads), HEAD=head, num_warps=2
        )
        return out

    def child_scores(
        self, h: Tensor, nodes: Tensor, scores: Tensor, tree: SearchTree, anchors: Tensor | None, fanout: int
    ) -> tuple[Tensor, int]:
        if fanout > _MOST_CHILDREN:
            return super().child_scores(h, nodes, scores, tree, anchors, fanout)
        (batch, rows), padded = nodes.shape, _power(fanout)
        out = torch.empty(batch, rows * padded, device=h.device)
        _child_scores[(batch * rows,)](
            h, nodes, scores, tree.table.vectors, tree.table.bias, tree.child_start, h if anchors is None else anchors, out,
            rows, 0 if anchors is None else anchors.stride(0), 0 if anchors is None else anchors.stride(1),
            WIDTH=h.shape[1], FANOUT=padded, BLOCK=max(16, min(256, 8192 // padded)), ANCHORS=anchors is not None, num_warps=8,
        )  # fmt: skip
        return out, padded

    def select(self, total: Tensor, keep: int, nodes: Tensor, fanout: int, tree: SearchTree, last: bool) -> Children:
        batch, size = total.shape
        if size > _MOST_CANDIDATES:
            return super().select(total, keep, nodes, fanout, tree, last)
        device = total.device
        children, parents, found = (torch.empty(batch, keep, dtype=torch.long, device=device) for _ in range(3))
        scores, found_scores = (torch.empty(batch, keep, device=device) for _ in range(2))
        block = _power(size)
        _select[(batch,)](
            total, nodes, tree.child_start, tree.number, children, parents, scores, found, found_scores,
            size, keep, nodes.shape[1], FANOUT=fanout, LAST=last, BLOCK=block, num_warps=max(1, min(16, block // 256)),
        )  # fmt: skip
        return Children(children, parents, scores, found, found_scores)

    def descend(
        self, nodes: Tensor, parents: Tensor, places: Tensor, first: int, tree: SearchTree, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        (batch, rows), steps = nodes.shape, places.shape[1]
        table: Any = tree.table
        width = table.states.shape[1]
        new = torch.empty(batch * rows, steps + 1, dtype=torch.long, device=nodes.device)
        x, q = (torch.empty(batch * rows, width, dtype=dtype, device=nodes.device) for _ in range(2))
        _descend[(batch * rows,)](
            nodes, parents, places, tree.number, table.states, table.asks, new, x, q,
            first, rows, len(places) // batch, width, STEPS=steps, BLOCK=_power(width), num_warps=4,
        )  # fmt: skip
        return new, x, q


def _power(n: int) -> int:
    """The next power of 2."""
    return 1 << max(0, n - 1).bit_length()


def _warps(width: int) -> int:
    """So that every thread has eight numbers of a row."""
    return max(1, min(8, _power(width) // 256))
