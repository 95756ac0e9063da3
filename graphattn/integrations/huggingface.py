"""Hugging Face Transformers: any model that lets its attention be chosen runs on a graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from graphattn.attention import attention_weights, graph_attention
from graphattn.graph import CompleteGraph, Graph, SparseGraph

# What models pass along without changing what attention computes: the masks already say where a sequence
# ends and how wide a window is.
_HARMLESS = {
    "cache",
    "cache_position",
    "deterministic",
    "encoder_hidden_states",
    "is_causal",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}

# Transformers looks for these in a name, and for the punctuation of an address on its hub.
_RESERVED = ("eager", "flash", "flex", "paged", "sdpa")


def register(name: str = "graphattn", graph: Callable[[int, int, Any], Graph] | None = None) -> None:
    """Make graph attention an attention implementation of Transformers, under `name`.

    `model.set_attn_implementation(name)` then runs a model on it, as does `attn_implementation=name` when it is
    loaded. Without `graph` the results are those of "sdpa" and "eager". With it a query attends to the keys that
    both the graph and the model's own mask let it attend to: padding and causality are kept. A mask of its own for
    each sequence of a batch is listed edge by edge, once for all layers that share it and a graph object; without
    padding the graph is used as it is. Grouped heads, dropout, `softcap`, `position_bias`, attention sinks
    (`s_aux`, GPT-OSS) and `output_attentions` (weights before dropout) are honoured.

    A few models (Bloom, Falcon, MPNet, DeBERTa) have attention that cannot be replaced: `set_attn_implementation`
    warns and leaves them as they are.

    Args:
        name: what to call the implementation; an earlier one of that name is replaced.
        graph: `(num_queries, num_keys, module) -> Graph`, called in every attention layer. When a model generates
            from a cache its queries are the last of the keys; the free places of a static cache are not counted.
            Return the same object for the same sizes (`functools.cache`), so that it is built once.

    Raises:
        ImportError: Transformers is not installed, or older than 5.2.
        TypeError: `graph` is not a function, or `name` not a string.
        ValueError: Transformers treats `name` in a way of its own.

    The implementation itself raises NotImplementedError for an argument that would change the result and that it
    does not know, and ValueError or TypeError for what `graph` returns that is no graph of these sizes, and for
    a mask or a `position_bias` that does not fit the queries and keys.

    Example:
        >>> from graphattn import WindowGraph
        >>> def window(num_queries, num_keys, module):
        ...     return WindowGraph(num_queries, (128, 0), num_keys=num_keys, offset=num_keys - num_queries)
        >>> register("window128", window)  # doctest: +SKIP
        >>> model.set_attn_implementation("window128")  # doctest: +SKIP
    """
    if not isinstance(name, str):
        raise TypeError(f"`name` must be a string, got {type(name).__name__}.")
    if not re.fullmatch(r"[\w.-]+", name) or any(word in name for word in _RESERVED):
        raise ValueError(
            "`name` must be of letters, digits, `_`, `.` and `-`, without"
            f" {', '.join(f'{word!r}' for word in _RESERVED)}, which Transformers treats in ways of its own, got"
            f" {name!r}."
        )
    if graph is not None and not callable(graph):
        raise TypeError(
            f"`graph` must be a function (num_queries, num_keys, module) -> Graph, got {type(graph).__name__}."
        )
    try:
        from transformers import (  # pyright: ignore[reportMissingImports]
            AttentionInterface,
            AttentionMaskInterface,
        )
        from transformers.masking_utils import sdpa_mask  # pyright: ignore[reportMissingImports]
        from transformers.utils import output_capturing  # pyright: ignore[reportMissingImports]

        recorded = output_capturing._active_collector
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "graphattn.integrations.huggingface needs Transformers 5.2 or newer:"
            " pip install 'transformers>=5.2'."
        ) from error
    kept = WeakIdKeyDictionary()  # mask, or graph where there is none -> what it leaves of the graphs

    def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
        if not options.get("output_attentions"):
            options["output_attentions"] = _records_attention(recorded, module)
        return _attention(
            module, query, key, value, attention_mask, dropout, scaling, graph=graph, kept=kept, **options
        )

    AttentionInterface.register(name, attention)
    # Without a mask function of the same name models would pass no mask at all.
    AttentionMaskInterface.register(name, sdpa_mask)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    *,
    graph: Callable[[int, int, Any], Graph] | None,
    kept: WeakIdKeyDictionary,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What `AttentionInterface` asks for: `[B, heads, L, dim]` in, `([B, L, heads, dim], weights)` out."""
    unknown = [name for name, x in options.items() if x is not None and name not in _HARMLESS]
    if unknown:
        raise NotImplementedError(
            f"graphattn does not know what {', '.join(f'`{name}`' for name in unknown)} of"
            f' {type(module).__name__} means for attention. Use attn_implementation="eager".'
        )
    batch, heads, num_queries, _ = query.shape
    num_keys = key.size(2)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = mask is None and num_queries > 1 and bool(is_causal)

    for argument, x in (("attention_mask", mask), ("position_bias", position_bias)):
        _check_broadcasts(argument, x, (batch, heads, num_queries, num_keys))
    # A bool mask for all heads takes edges away, any other is added to the scores.
    added = [] if position_bias is None else [position_bias]
    allowed = mask if mask is not None and mask.dtype == torch.bool and mask.size(1) == 1 else None
    if mask is not None and allowed is None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        added.append(mask)
    terms = added if allowed is None else [*added, allowed]
    # Sequences that have edges or biases of their own lie side by side along the nodes; otherwise they are a batch.
    packed = any(x.size(0) > 1 and x.stride(0) != 0 for x in terms)
    sequences = batch if packed else 1
    chosen = None
    if graph is not None:
        held = num_keys
        if is_causal and 1 <= num_queries < num_keys:
            held = num_queries if causal else _held(mask, num_queries, num_keys)
        chosen = _checked(graph(num_queries, held, module), num_queries, held)
    edges = _edges(kept, chosen, allowed, causal, sequences, num_queries, num_keys, query.device)

    bias = None
    if added:
        edges = edges.to_sparse()
        source, target = edges.to_edge_index()
        for x in added:
            x = x[:sequences].expand(sequences, -1, num_queries, num_keys)
            x = x[target // max(num_queries, 1), :, target % max(num_queries, 1), source % max(num_keys, 1)]
            bias = x if bias is None else bias + x
        bias = None if bias is None else bias.to(query.dtype)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if packed:
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    scores: dict[str, Any] = {"bias": bias, "scale": scaling, "softcap": softcap}
    share = None
    if s_aux is None:
        out: Any = graph_attention(query, key, value, edges, dropout_p=dropout, **scores)
    else:  # a key more for every query, with this score and no value: exp(lse) / (exp(lse) + exp(s_aux)) is left
        _check_sinks(s_aux, heads)
        out, lse = graph_attention(query, key, value, edges, dropout_p=dropout, return_lse=True, **scores)
        share = torch.sigmoid(lse - s_aux).unsqueeze(-1)
        out = (out * share).to(out.dtype)
    out = out.reshape(batch, num_queries, heads, -1)
    if not options.get("output_attentions"):
        return out, None
    weights = attention_weights(query, key, edges, **scores)
    weights = _dense(weights, edges, packed, (batch, num_queries, num_keys, heads))
    if share is not None:
        weights = weights * share.reshape(batch, num_queries, heads, 1).transpose(1, 2)
    return out, weights.to(out.dtype)


def _records_attention(recorded: Any, module: Any) -> bool:
    """Whether the call of the model that `module` is in was asked for `output_attentions`.

    Models may keep the argument to themselves (GPT-2, OPT): then only what hooks record in this call tells.
    """
    if torch.compiler.is_compiling() and not recorded.compiling:  # the call of the model lies outside
        records = None
    else:
        records = recorded.get()
    if records is None:
        return bool(getattr(getattr(module, "config", None), "output_attentions", False))
    return any("attentions" in name for name in records)


def _check_broadcasts(name: str, x: Any, shape: tuple[int, int, int, int]) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.dtype == torch.bool):
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"`{name}` must be None or a tensor, bool (True = may attend) or floating point (added to the"
            f" scores), got {got}."
        )
    if x.dim() != 4 or any(size not in (1, full) for size, full in zip(x.shape, shape)):
        raise ValueError(
            f"`{name}` must have shape [batch, heads, queries, keys] = {list(shape)}, any of them 1, got"
            f" {list(x.shape)}."
        )


def _check_sinks(x: Any, heads: int) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"`s_aux` must be None or a floating point tensor, a score for each head, got {got}.")
    if x.shape != (heads,):
        raise ValueError(f"`s_aux` must have shape [heads] = [{heads}], got {list(x.shape)}.")


def _held(mask: Tensor | None, num_queries: int, num_keys: int) -> int:
    """How many keys there are up to the last query: a static cache has places that no token has taken yet.

    Only the mask tells: under causality a token that is no padding attends to itself and to nothing after it.
    """
    if mask is None:  # one query, which attends to all there is
        return num_keys
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    allowed = allowed.expand(*mask.shape[:2], num_queries, num_keys)
    last = (allowed * torch.arange(1, num_keys + 1, device=mask.device)).amax(-1)
    held = (last - torch.arange(num_queries, device=mask.device)).amax() + num_queries - 1
    if torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg(
            held >= num_keys,
            "graphattn: compiled code cannot see how full a static cache is, which `graph` needs to know. Call the"
            " model uncompiled, or use a dynamic cache.",
        )
        return num_keys
    return min(max(int(held), num_queries), num_keys)


def _checked(graph: Any, num_queries: int, num_keys: int) -> Graph:
    if not isinstance(graph, Graph):
        raise TypeError(f"`graph` must return a Graph, got {type(graph).__name__}. Convert it with as_graph.")
    if (graph.num_queries, graph.num_keys) != (num_queries, num_keys):
        raise ValueError(
            f"`graph` must return a graph of {num_keys} keys and {num_queries} queries, got {graph}. Build it from"
            " the sizes that the function is called with."
        )
    return graph


def _edges(
    kept: WeakIdKeyDictionary,
    chosen: Graph | None,
    allowed: Tensor | None,
    causal: bool,
    sequences: int,
    num_queries: int,
    num_keys: int,
    device: torch.device,
) -> Graph:
    """The edges that both the graph and the model's mask have, of as many sequences side by side."""
    if chosen is None:
        graph: Graph = CompleteGraph(num_queries, num_keys=num_keys, causal=causal).to(device)
        causal = False
    else:
        graph = chosen if chosen.device == device else chosen.to(device)
    if allowed is None and sequences == 1 and not causal and graph.num_keys == num_keys:
        return graph
    # Layers share their mask: what it leaves of a graph is kept as long as the mask lives.
    anchor = chosen if allowed is None else allowed
    version = None
    if isinstance(anchor, Tensor):
        version = None if torch.compiler.is_compiling() or anchor.is_inference() else anchor._version
    reusable = isinstance(anchor, Graph) or version is not None
    state = (version, None if anchor is chosen else chosen, causal, sequences, num_keys)
    found = kept.get(anchor) if reusable else None
    if found is not None and all(x is y or x == y for x, y in zip(found[0], state)):
        return found[1]

    source, target = graph.to_edge_index()
    keep = torch.ones(sequences, source.numel(), dtype=torch.bool, device=device)
    if allowed is not None:
        keep = allowed[:sequences].expand(sequences, 1, num_queries, num_keys)[:, 0, target, source]
    if causal:
        keep = keep & (source <= target)
    sequence, edge = keep.nonzero(as_tuple=True)
    edge_index = torch.stack([source[edge] + sequence * num_keys, target[edge] + sequence * num_queries])
    edges = SparseGraph.from_edge_index(edge_index, size=(sequences * num_keys, sequences * num_queries))
    if reusable:
        kept[anchor] = state, edges
    return edges


def _dense(weights: Tensor, edges: Graph, packed: bool, size: tuple[int, int, int, int]) -> Tensor:
    """Weights in the edge layout as `[batch, heads, num_queries, num_keys]`, 0 where there is no edge."""
    batch, num_queries, num_keys, heads = size
    source, target = edges.to_edge_index()
    if packed:
        cells = target * num_keys + source % max(num_keys, 1)
        dense = weights.new_zeros(batch * num_queries * num_keys, heads).index_add(0, cells, weights)
    else:
        weights = weights.reshape(batch, -1, heads)[:, edges.slots()]
        cells = target * num_keys + source
        dense = weights.new_zeros(batch, num_queries * num_keys, heads).index_add(1, cells, weights)
    return dense.view(batch, num_queries, num_keys, heads).permute(0, 3, 1, 2)
