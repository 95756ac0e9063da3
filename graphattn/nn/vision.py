"""The Vision Transformer on any graph of patches, and how weights of other libraries are read."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Conv2d, LayerNorm, Linear, ModuleList, Parameter
from torch_geometric.nn.inits import reset

from graphattn.encodings import FLOATS
from graphattn.graph import CompleteGraph, Graph, GridGraph, SparseGraph, check_count, check_word
from graphattn.nn.attention import check_heads
from graphattn.nn.conv import check_dense, check_probability
from graphattn.nn.convolution import checked_pair
from graphattn.nn.transformer import GraphTransformerLayer

_KEPT = 8  # graphs of the last image sizes


class VisionTransformer(torch.nn.Module):
    r"""A Vision Transformer: an image is a graph of patches, and the graph decides who attends to whom.

    $$x^0 = [\mathrm{cls}, \mathrm{reg}, \mathrm{patches} \cdot W + P], \qquad x^{l+1} = \mathrm{Layer}_l(x^l),
    \qquad \mathrm{logits} = W_{head}\,\mathrm{pool}(\mathrm{LN}(x^L))$$

    Layers are pre-norm `GraphTransformerLayer`s with GELU. With `radius=None` every token attends to every
    token: the Vision Transformer, n² edges for n patches. With a radius a patch attends to the box of patches
    around it (`GridGraph`, clipped at the border), n·(2·radius + 1)² edges; class and register tokens attend
    to all tokens and all attend to them. The parameters are the same for every graph, so a trained model can be
    made local: load its `state_dict` into one with a radius.

    Images may have any size: the grid of position embeddings is resampled (bicubic, antialiased) where an image
    has another grid of patches than it; on the same grid it is used as it is. A graph is built on the first call
    with a size and kept. `torch.compile` and `torch.export` need no call before, but a model compiled or exported
    without one builds its graph anew in every call.

    Args:
        image_size: height and width that the position embeddings are made for, an int or a pair.
        patch_size: height and width of a patch, an int or a pair.
        num_classes: outputs; 0 for the pooled features themselves.
        in_channels: channels of an image.
        dim: channels of a token.
        depth: number of layers.
        heads: number of heads; divides `dim`.
        mlp_dim: hidden channels of the feed-forward networks.
        radius: None for the complete graph; else the radius of the box, as `GridGraph` takes it.
        pool: "class", the class token, or "mean", the mean over the patches.
        class_token: have a class token.
        registers: number of register tokens, which only carry information between the others.
        norm_pooled: normalise after pooling, not before it (timm's `fc_norm`).
        dropout: probability in [0, 1], as in `GraphTransformerLayer`.
        layer_norm_eps: added to variances in the norms.
        remainder: what to do with an image that is no whole number of patches: "error", "pad" (zeros at the
            bottom and on the right) or "crop" (what is left over there).

    Raises:
        ValueError: a size does not fit (`image_size` to `patch_size`, `dim` to `heads`), a number is too small,
            `dropout` lies outside [0, 1], `pool` or `remainder` is none of the words above, or "class" is asked
            for without a class token.
        TypeError: a size, a number or the radius is not an int, or `dropout` no number.

    Example:
        >>> model = VisionTransformer(32, 8, 10, dim=16, depth=2, heads=2, mlp_dim=32, radius=1)
        >>> model(torch.randn(2, 3, 32, 48)).shape
        torch.Size([2, 10])
        >>> model.patch_graph(4, 6)
        SparseGraph(25 keys -> 25 queries, 209 edges)

    Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021; registers: Darcet et al., Vision Transformers
    Need Registers, ICLR 2024.
    """

    def __init__(
        self,
        image_size: int | tuple[int, int],
        patch_size: int | tuple[int, int],
        num_classes: int,
        *,
        in_channels: int = 3,
        dim: int = 768,
        depth: int = 12,
        heads: int = 12,
        mlp_dim: int = 3072,
        radius: Any = None,
        pool: str = "class",
        class_token: bool = True,
        registers: int = 0,
        norm_pooled: bool = False,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-6,
        remainder: str = "error",
    ) -> None:
        super().__init__()
        check_word("`pool`", pool, ("class", "mean"))
        if pool == "class" and not class_token:
            raise ValueError('`pool` must be "mean" for a model without a class token, got "class".')
        check_word("`remainder`", remainder, ("error", "pad", "crop"))
        check_heads("dim", dim, "heads", heads)
        least = {"num_classes": 0, "in_channels": 1, "depth": 0, "mlp_dim": 1, "registers": 0}
        given = dict(zip(least, (num_classes, in_channels, depth, mlp_dim, registers)))
        for name, n in given.items():
            check_count(f"`{name}`", n, least[name])
        check_probability("dropout", dropout)
        self.image_size = checked_pair("image_size", image_size)
        self.patch_size = checked_pair("patch_size", patch_size)
        self.radius, self.pool, self.norm_pooled, self.remainder = radius, pool, norm_pooled, remainder
        height, width = self._grid(*self.image_size)
        GridGraph((height, width), radius)  # checks the radius
        self._graphs: dict[tuple[int, int, str, str], Graph] = {}

        self.patch_embedding = Conv2d(in_channels, dim, self.patch_size, self.patch_size)
        self.class_token = Parameter(torch.empty(1, dim)) if class_token else None
        self.register_tokens = Parameter(torch.empty(registers, dim)) if registers else None
        self.position_embedding = Parameter(torch.empty(height, width, dim))
        self.layers = ModuleList(
            GraphTransformerLayer(dim, heads, mlp_dim, dropout, "gelu", layer_norm_eps, norm_first=True)
            for _ in range(depth)
        )
        self.norm = LayerNorm(dim, eps=layer_norm_eps)
        self.head = Linear(dim, num_classes) if num_classes else torch.nn.Identity()
        self._draw_tokens()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for module in self.children():
            reset(module)
        self._draw_tokens()

    def _draw_tokens(self) -> None:
        for tokens in (self.class_token, self.register_tokens, self.position_embedding):
            if tokens is not None:
                torch.nn.init.normal_(tokens, std=0.02)

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches: the class token, then the registers."""
        return sum(tokens.size(0) for tokens in self._prefix())

    def _prefix(self) -> list[Tensor]:
        return [tokens for tokens in (self.class_token, self.register_tokens) if tokens is not None]

    def forward(self, images: Tensor, *, return_attention_weights: bool = False) -> Any:
        """Images in, class scores out.

        Args:
            images: `[B, in_channels, H, W]`, H and W multiples of the patch (or see `remainder`).
            return_attention_weights: truthy to get the weights as well.

        Returns:
            `[B, num_classes]`, or `[B, dim]` for `num_classes=0`. With `return_attention_weights`:
            `(out, [weights])`, for each layer `[B, *edge_shape, heads]` in the edge layout of
            `patch_graph(H // patch height, W // patch width)`.

        Raises:
            ValueError: `images` has a wrong shape, or is no whole number of patches (see `remainder`).
            TypeError: `images` is not a dense floating point tensor of the model's dtype.
        """
        x = self.patch_embedding(self._whole_patches(images))
        height, width = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2) + self._positions(height, width).flatten(0, 1)
        prefix = [tokens.expand(x.size(0), -1, -1) for tokens in self._prefix()]
        x = torch.cat([*prefix, x], dim=1)
        graph = self._kept_graph(height, width, x.device)
        weights = []
        for layer in self.layers:
            x = layer(x, graph, return_attention_weights=return_attention_weights)
            if return_attention_weights:
                x, alpha = x
                weights.append(alpha)
        if not self.norm_pooled:
            x = self.norm(x)
        x = x[:, 0] if self.pool == "class" else x[:, self.num_prefix_tokens :].mean(dim=1)
        if self.norm_pooled:
            x = self.norm(x)
        out = self.head(x)
        return (out, weights) if return_attention_weights else out

    def patch_graph(self, height: int, width: int) -> Graph:
        """The graph of an image of `height` x `width` patches.

        Its nodes are the class token, the registers, then the patches row by row. Built anew in every call.
        With a radius and extra tokens it is a `SparseGraph`, sorted by (query, key): O(E log E); else nothing
        is listed.

        Args:
            height: patches down.
            width: patches across.

        Returns:
            The graph that every layer attends on, whose edge layout the weights have.

        Raises:
            ValueError: a number is below 1.
            TypeError: a number is not an int.

        Example:
            >>> sizes = dict(dim=16, depth=1, heads=2, mlp_dim=32)
            >>> VisionTransformer(32, 8, 10, **sizes).patch_graph(4, 4)  # the patches and the class token
            CompleteGraph(17 keys -> 17 queries, 289 edges)
            >>> VisionTransformer(32, 8, 10, **sizes, radius=0).patch_graph(1, 2).to_edge_index().tolist()
            [[0, 1, 2, 0, 1, 0, 2], [0, 0, 0, 1, 1, 2, 2]]
        """
        check_count("`height`", height, 1)
        check_count("`width`", width, 1)
        extra = self.num_prefix_tokens
        nodes = extra + height * width
        if self.radius is None:
            return CompleteGraph(nodes)
        grid = GridGraph((height, width), self.radius)
        if not extra:
            return grid
        # By arithmetic alone, which torch.export can trace: patches, then all -> extra, then extra -> patches.
        every, tokens, patches = torch.arange(nodes), torch.arange(extra), torch.arange(extra, nodes)
        edges = [grid.to_edge_index() + extra, torch.cartesian_prod(every, tokens).T]
        edges = torch.cat([*edges, torch.cartesian_prod(tokens, patches).T], dim=1)
        order = torch.argsort(edges[1] * nodes + edges[0])
        return SparseGraph.from_edge_index(edges[:, order], nodes)

    def _kept_graph(self, height: int, width: int, device: torch.device) -> Graph:
        size = (height, width, str(device), str(self.radius))
        kept = self._graphs.get(size)
        if kept is None:
            kept = self.patch_graph(height, width).to(device)
            if not torch.compiler.is_compiling():  # what a tracer sees is no graph to keep
                self._graphs[size] = kept
                while len(self._graphs) > _KEPT:
                    del self._graphs[next(iter(self._graphs))]
        return kept

    def _positions(self, height: int, width: int) -> Tensor:
        """The position embeddings of a grid, `[height, width, dim]`."""
        stored = self.position_embedding
        if stored.shape[:2] == (height, width):
            return stored
        planes = stored.permute(2, 0, 1).unsqueeze(0)
        planes = planes if stored.dtype == torch.float64 else planes.float()
        planes = F.interpolate(planes, (height, width), mode="bicubic", antialias=True)
        return planes[0].permute(1, 2, 0).to(stored.dtype)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """How many patches an image of this size has, down and across."""
        patch_height, patch_width = self.patch_size
        if self.remainder == "pad":
            return -(-height // patch_height), -(-width // patch_width)
        if min(height // patch_height, width // patch_width) < 1 or (
            self.remainder == "error" and (height % patch_height or width % patch_width)
        ):
            multiple = "at least one patch" if self.remainder == "crop" else "a whole number of patches"
            raise ValueError(
                f"Images must be {multiple} of {patch_height} x {patch_width} in height and width, got"
                f' {height} x {width}. Resize them, or set `remainder` to "pad" or "crop".'
            )
        return height // patch_height, width // patch_width

    def _whole_patches(self, images: Tensor) -> Tensor:
        channels = self.patch_embedding.in_channels
        if not isinstance(images, Tensor) or not images.is_floating_point():
            got = images.dtype if isinstance(images, Tensor) else type(images).__name__
            raise TypeError(f"`images` must be a floating point tensor, got {got}. Scale and convert pixels.")
        if images.dim() != 4 or images.size(1) != channels or 0 in images.shape[2:]:
            raise ValueError(
                f"`images` must have shape [batch, {channels}, height, width], got {list(images.shape)}."
            )
        check_dense("images", images, self.patch_embedding)
        height, width = (n * patch for n, patch in zip(self._grid(*images.shape[-2:]), self.patch_size))
        missing = height - images.size(2), width - images.size(3)
        if max(missing) > 0:
            images = F.pad(images, (0, missing[1], 0, missing[0]))
        return images[:, :, :height, :width]

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Tensor],
        *,
        heads: int,
        image_size: int | tuple[int, int] | None = None,
        radius: Any = None,
        pool: str = "class",
        remainder: str = "error",
    ) -> VisionTransformer:
        """A model with the weights of a Vision Transformer of timm, torchvision or Hugging Face.

        On the complete graph (`radius=None`) it gives the numbers of the model that the weights are from. Sizes
        are read off the weights, LayerNorm's eps follows the library (1e-6; Hugging Face 1e-12). timm's layer
        scales are multiplied into the weights, and position embeddings of class and register tokens added to
        them. Not read are Hugging Face's `pooler` and `mask_token`, which are no part of this model. The
        weights are copied, in the dtype that holds all of theirs.

        Args:
            state_dict: weights by the names of timm's `VisionTransformer`, torchvision's `VisionTransformer`,
                or Hugging Face's `ViTModel` and `ViTForImageClassification`.
            heads: number of heads, which cannot be read off the weights.
            image_size: size of the images that the weights were trained on; needed where their grid of patches
                is no square. If the weights have another number of positions, they are those of a square.
            radius, pool, remainder: as for a new model.

        Raises:
            ValueError: the names are of no known library, some are missing, unexpected or of a wrong shape
                (all are listed), or the grid of position embeddings is unknown.
            TypeError: `state_dict` is not a mapping of names to dense floating point tensors.

        Example:
            >>> import timm  # doctest: +SKIP
            >>> weights = timm.create_model("vit_base_patch16_224", pretrained=True).state_dict()  # doctest: +SKIP
            >>> model = VisionTransformer.from_state_dict(weights, heads=12, radius=3)  # doctest: +SKIP
        """
        weights, options = _translated(state_dict)
        if options["norm_pooled"] and pool == "class":
            raise ValueError(
                '`pool` must be "mean" for weights with `fc_norm`, which normalises the mean of the patches,'
                ' got "class".'
            )
        patch = weights["patch_embedding.weight"]
        patch_size = (patch.size(2), patch.size(3))
        extra = sum(weights[name].size(0) for name in ("class_token", "register_tokens") if name in weights)
        with_extra, grid = _position_grid(
            weights["position_embedding"].size(0), extra, patch_size, image_size
        )
        _split_positions(weights, with_extra, grid)
        with torch.device("meta"):  # no parameters are drawn
            model = cls(
                image_size=(grid[0] * patch_size[0], grid[1] * patch_size[1]),
                patch_size=patch_size,
                num_classes=weights["head.weight"].size(0) if "head.weight" in weights else 0,
                in_channels=patch.size(1),
                dim=patch.size(0),
                heads=heads,
                radius=radius,
                pool=pool,
                class_token="class_token" in weights,
                registers=weights["register_tokens"].size(0) if "register_tokens" in weights else 0,
                remainder=remainder,
                **options,
            )
        model.load_state_dict(weights, assign=True)
        return model


class _Naming(NamedTuple):
    """What a library calls the parts of a Vision Transformer; `{}` is the number of a layer."""

    patches: str
    class_token: str
    positions: str
    registers: str
    layer: str
    norm1: str
    qkv: tuple[str, ...]  # one packed projection, or three: what stands before "weight" and "bias"
    out: str
    norm2: str
    linear1: str
    linear2: str
    scales: tuple[str, ...]
    norm: str
    head: str
    eps: float
    unread: tuple[str, ...] = ()


_TIMM = _Naming(
    patches="patch_embed.proj.",
    class_token="cls_token",
    positions="pos_embed",
    registers="reg_token",
    layer="blocks.{}.",
    norm1="norm1.",
    qkv=("attn.qkv.",),
    out="attn.proj.",
    norm2="norm2.",
    linear1="mlp.fc1.",
    linear2="mlp.fc2.",
    scales=("ls1.gamma", "ls2.gamma"),
    norm="norm.",
    head="head.",
    eps=1e-6,
)
_TORCHVISION = _Naming(
    patches="conv_proj.",
    class_token="class_token",
    positions="encoder.pos_embedding",
    registers="",
    layer="encoder.layers.encoder_layer_{}.",
    norm1="ln_1.",
    qkv=("self_attention.in_proj_",),
    out="self_attention.out_proj.",
    norm2="ln_2.",
    linear1="mlp.0.",
    linear2="mlp.3.",
    scales=(),
    norm="encoder.ln.",
    head="heads.head.",
    eps=1e-6,
)
_TORCHVISION_1 = _TORCHVISION._replace(linear1="mlp.linear_1.", linear2="mlp.linear_2.")  # older files
_HUGGING_FACE = _Naming(
    patches="embeddings.patch_embeddings.projection.",
    class_token="embeddings.cls_token",
    positions="embeddings.position_embeddings",
    registers="",
    layer="layers.{}.",
    norm1="layernorm_before.",
    qkv=("attention.q_proj.", "attention.k_proj.", "attention.v_proj."),
    out="attention.o_proj.",
    norm2="layernorm_after.",
    linear1="mlp.fc1.",
    linear2="mlp.fc2.",
    scales=(),
    norm="layernorm.",
    head="classifier.",
    eps=1e-12,
    unread=("embeddings.mask_token", "pooler.dense.weight", "pooler.dense.bias"),
)
_HUGGING_FACE_4 = _HUGGING_FACE._replace(  # in files of versions before 5
    layer="encoder.layer.{}.",
    qkv=("attention.attention.query.", "attention.attention.key.", "attention.attention.value."),
    out="attention.output.dense.",
    linear1="intermediate.dense.",
    linear2="output.dense.",
)


def _translated(state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights by our names, checked, and options of the model that they need.

    "position_embedding" is still the library's, `[positions, dim]`.
    """
    _check_mapping(state_dict)
    prefix = "vit." if any(name.startswith("vit.") for name in state_dict) else ""
    given = {name.removeprefix(prefix): x.detach() for name, x in state_dict.items()}
    if len(given) < len(state_dict):
        twice = sorted(name for name in given if name in state_dict and prefix + name in state_dict)
        raise ValueError(
            f"`state_dict` must hold one Vision Transformer, got {twice} both with and without {prefix!r}."
        )
    for naming in (_TIMM, _TORCHVISION_1, _TORCHVISION, _HUGGING_FACE, _HUGGING_FACE_4):
        first = naming.layer.format(0)
        if naming is _TORCHVISION_1:
            first += naming.linear1
        if naming.patches + "weight" in given and any(name.startswith(first) for name in given):
            break
    else:
        raise ValueError(
            "`state_dict` must have the names of a Vision Transformer of timm, torchvision or Hugging Face"
            f" with at least one layer, got {sorted(state_dict)[:5]}."
        )

    def leading(name: str) -> int | None:  # of a shape that others depend on; None where there is none
        return given[name].size(0) if name in given and given[name].dim() else None

    dim = leading(naming.patches + "weight")
    mlp_dim = leading(naming.layer.format(0) + naming.linear1 + "weight")
    # The one that holds them all: files may keep norms in float32 beside float16.
    dtypes = [x.dtype for x in given.values() if x.dtype in FLOATS] or [torch.float32]
    dtype = functools.reduce(torch.promote_types, dtypes)
    weights: dict[str, Tensor] = {}
    missing: list[str] = []
    strange: list[str] = []
    wrong: list[str] = []
    rest = {name: x for name, x in given.items() if name not in naming.unread}

    def full_name(name: str) -> str:
        return name if name in state_dict or name.startswith(naming.head) else prefix + name

    def take(ours: str, *theirs: str, shape: tuple[int | None, ...], optional: bool = False) -> None:
        """Move weights of that shape each, None for any size, from `rest` to `weights`."""
        absent = [name for name in theirs if name not in rest]
        if absent:
            if not optional or len(absent) < len(theirs):
                missing.extend(absent)
            return
        parts = [rest.pop(name) for name in theirs]
        for name, x in zip(theirs, parts):
            if x.dtype not in FLOATS or x.layout is not torch.strided:
                strange.append(f"{full_name(name)} of {x.dtype}, {x.layout}")
            elif x.dim() != len(shape) or any(n != (size or n) or n == 0 for n, size in zip(x.shape, shape)):
                wrong.append(f"{full_name(name)} {list(x.shape)}, not {_shape(shape)}")
        if not strange and not wrong:
            weights[ours] = torch.cat([x.to(dtype) for x in parts])

    def in_some_layer(part: str) -> bool:
        return any(name.endswith(part) for name in given)

    def take_both(ours: str, theirs: str, *shape: int | None) -> None:
        take(ours + "weight", theirs + "weight", shape=shape)
        take(ours + "bias", theirs + "bias", shape=shape[:1])

    take_both("patch_embedding.", naming.patches, dim, None, None, None)
    take("class_token", naming.class_token, shape=(1, 1, dim), optional=naming is _TIMM)
    take("register_tokens", naming.registers, shape=(1, None, dim), optional=True)
    take("position_embedding", naming.positions, shape=(1, None, dim))
    rows = None if dim is None else 3 * dim // len(naming.qkv)
    depth = 0
    while any(name.startswith(naming.layer.format(depth)) for name in rest):
        ours, theirs = f"layers.{depth}.", naming.layer.format(depth)
        take_both(ours + "norm1.", theirs + naming.norm1, dim)
        qkv = [theirs + name for name in naming.qkv]
        take(ours + "self_attn.in_proj_weight", *(name + "weight" for name in qkv), shape=(rows, dim))
        take(
            ours + "self_attn.in_proj_bias",
            *(name + "bias" for name in qkv),
            shape=(rows,),
            optional=not in_some_layer(naming.qkv[0] + "bias"),
        )
        take_both(ours + "self_attn.out_proj.", theirs + naming.out, dim, dim)
        take_both(ours + "norm2.", theirs + naming.norm2, dim)
        take_both(ours + "linear1.", theirs + naming.linear1, mlp_dim, dim)
        take_both(ours + "linear2.", theirs + naming.linear2, dim, mlp_dim)
        for scaled, name in zip(("self_attn.out_proj.", "linear2."), naming.scales):
            take(ours + name, theirs + name, shape=(dim,), optional=not in_some_layer(name))
            gamma = weights.pop(ours + name, None)
            for kind in ("weight", "bias"):
                if gamma is not None and ours + scaled + kind in weights:
                    x = weights[ours + scaled + kind]
                    weights[ours + scaled + kind] = x * gamma.view(-1, *[1] * (x.dim() - 1))
        depth += 1
    norm_pooled = naming is _TIMM and "fc_norm.weight" in rest
    take_both("norm.", "fc_norm." if norm_pooled else naming.norm, dim)
    if any(name.startswith(naming.head) for name in rest):
        take_both("head.", naming.head, leading(naming.head + "weight"), dim)
    if missing or rest:
        raise ValueError(
            "`state_dict` must hold one Vision Transformer and nothing else; missing:"
            f" {[full_name(name) for name in missing] or 'none'}, unexpected:"
            f" {sorted(full_name(name) for name in rest) or 'none'}."
        )
    if strange:
        raise TypeError(
            f"`state_dict` must hold dense tensors of {', '.join(map(str, FLOATS))}, got {'; '.join(strange)}."
        )
    if wrong:
        raise ValueError(f"`state_dict` must fit one Vision Transformer, got {'; '.join(wrong)}.")

    for i in range(depth):  # a projection without a bias is one with a bias of 0
        weight = weights[f"layers.{i}.self_attn.in_proj_weight"]
        weights.setdefault(f"layers.{i}.self_attn.in_proj_bias", weight.new_zeros(weight.size(0)))
    for name in ("class_token", "register_tokens", "position_embedding"):
        if name in weights:
            weights[name] = weights[name][0]
    options = {
        "depth": depth,
        "mlp_dim": mlp_dim,
        "norm_pooled": norm_pooled,
        "layer_norm_eps": naming.eps,
    }
    return weights, options


def _check_mapping(state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"`state_dict` must map names to tensors, got {type(state_dict).__name__}. Pass what"
            " model.state_dict() returns."
        )
    for name, x in state_dict.items():
        if not isinstance(name, str) or not isinstance(x, Tensor):
            raise TypeError(
                f"`state_dict` must map names to tensors, got {name!r}: {type(x).__name__}. Pass what"
                " model.state_dict() returns."
            )
    devices = {str(x.device) for x in state_dict.values()}
    if len(devices) > 1:
        raise ValueError(f"`state_dict` must be on one device, got {sorted(devices)}.")


def _shape(sizes: tuple[int | None, ...]) -> str:
    return f"[{', '.join('any' if n is None else str(n) for n in sizes)}]"


def _position_grid(
    positions: int, extra: int, patch_size: tuple[int, int], image_size: Any
) -> tuple[bool, tuple[int, int]]:
    """Whether the extra tokens have position embeddings too, and the grid of the others."""
    candidates = {True: positions - extra, False: positions}  # of which the second is rare
    if image_size is not None:
        height, width = checked_pair("image_size", image_size)
        grid = height // patch_size[0], width // patch_size[1]
        for with_extra, patches in candidates.items():
            if grid[0] * grid[1] == patches:
                return with_extra, grid
    squares = {
        with_extra: math.isqrt(patches)
        for with_extra, patches in candidates.items()
        if patches > 0 and math.isqrt(patches) ** 2 == patches
    }
    if not squares or (len(squares) == 2 and extra):
        got = "None" if image_size is None else f"{image_size!r}"
        raise ValueError(
            f"`image_size` must be the size of the images that the {positions} position embeddings ({extra} class"
            f" and register tokens) are for, where that is not clear from their number, got {got}."
        )
    with_extra, side = next(iter(squares.items()))
    return with_extra, (side, side)


def _split_positions(weights: dict[str, Tensor], with_extra: bool, grid: tuple[int, int]) -> None:
    """Make the position embeddings a grid, and add those of class and register tokens to the tokens."""
    positions = weights["position_embedding"]
    if with_extra:
        for name in ("class_token", "register_tokens"):
            if name in weights:
                own, positions = positions.split(
                    [weights[name].size(0), positions.size(0) - weights[name].size(0)]
                )
                weights[name] = weights[name] + own
    weights["position_embedding"] = positions.reshape(*grid, -1).clone()
