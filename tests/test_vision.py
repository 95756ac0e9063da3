"""VisionTransformer: a plain ViT, written out below, is the oracle; its weights come under every library's names."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import nn

from graphattn import CompleteGraph, GridGraph, SparseGraph
from graphattn.nn import VisionTransformer

DIM, DEPTH, HEADS, MLP = 12, 2, 3, 20


class PlainViT(nn.Module):
    """Patches, tokens, pre-norm blocks with full attention, pooling, head: Dosovitskiy et al. to the letter."""

    def __init__(self, grid=(4, 4), patch=(4, 4), registers=0, eps=1e-6, pool="class", **options):
        super().__init__()
        torch.manual_seed(1)
        self.grid, self.registers, self.pool, self.options = grid, registers, pool, options
        has_class = options.get("class_token", True)
        self.prefix = has_class + registers
        positions = grid[0] * grid[1] + (self.prefix if options.get("embed_prefix", True) else 0)
        self.patches = nn.Conv2d(3, DIM, patch, patch)
        self.cls = nn.Parameter(torch.empty(1, 1, DIM)) if has_class else None
        self.reg = nn.Parameter(torch.empty(1, registers, DIM)) if registers else None
        self.pos = nn.Parameter(torch.empty(1, positions, DIM))
        bias = options.get("qkv_bias", True)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(DIM, eps),
                    "qkv": nn.Linear(DIM, 3 * DIM, bias=bias),
                    "out": nn.Linear(DIM, DIM),
                    "norm2": nn.LayerNorm(DIM, eps),
                    "fc1": nn.Linear(DIM, MLP),
                    "fc2": nn.Linear(MLP, DIM),
                }
            )
            for _ in range(DEPTH)
        )
        self.scales = nn.ParameterList(
            torch.empty(DIM) for _ in range(2 * DEPTH * options.get("scales", False))
        )
        self.norm = nn.LayerNorm(DIM, eps)
        self.head = nn.Linear(DIM, 5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)
        self.double()

    def forward(self, images, mask=None, positions=None):
        x = self.patches(images).flatten(2).mT
        pos = self.pos if positions is None else positions
        if not self.options.get("embed_prefix", True):
            x = x + pos
        tokens = [t.expand(len(x), -1, -1) for t in (self.cls, self.reg) if t is not None]
        x = torch.cat([*tokens, x], dim=1)
        if self.options.get("embed_prefix", True):
            x = x + pos
        for i, block in enumerate(self.blocks):
            qkv = block["qkv"](block["norm1"](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            h = block["out"](F.scaled_dot_product_attention(*qkv, attn_mask=mask).transpose(1, 2).flatten(2))
            x = x + (h * self.scales[2 * i] if self.scales else h)
            h = block["fc2"](F.gelu(block["fc1"](block["norm2"](x))))
            x = x + (h * self.scales[2 * i + 1] if self.scales else h)
        if self.options.get("fc_norm", False):
            return self.head(self.norm(x[:, self.prefix :].mean(1)))
        x = self.norm(x)
        return self.head(x[:, 0] if self.pool == "class" else x[:, self.prefix :].mean(1))


def both(name, module):
    return {f"{name}.{kind}": x for kind, x in module.state_dict().items()}


def timm(m):
    names = both("patch_embed.proj", m.patches) | {"pos_embed": m.pos} | both("head", m.head)
    names |= both("fc_norm" if m.options.get("fc_norm") else "norm", m.norm)
    names |= {} if m.cls is None else {"cls_token": m.cls}
    names |= {} if m.reg is None else {"reg_token": m.reg}
    for i, block in enumerate(m.blocks):
        for ours, theirs in (
            ("norm1", "norm1"),
            ("qkv", "attn.qkv"),
            ("out", "attn.proj"),
            ("norm2", "norm2"),
            ("fc1", "mlp.fc1"),
            ("fc2", "mlp.fc2"),
        ):
            names |= both(f"blocks.{i}.{theirs}", block[ours])
        if m.scales:
            names |= {f"blocks.{i}.ls{n + 1}.gamma": m.scales[2 * i + n] for n in range(2)}
    return names


def torchvision(m):
    names = both("conv_proj", m.patches) | {"class_token": m.cls, "encoder.pos_embedding": m.pos}
    names |= both("encoder.ln", m.norm) | both("heads.head", m.head)
    for i, block in enumerate(m.blocks):
        layer = f"encoder.layers.encoder_layer_{i}."
        names |= {f"{layer}self_attention.in_proj_{kind}": x for kind, x in block["qkv"].state_dict().items()}
        for ours, theirs in (
            ("norm1", "ln_1"),
            ("out", "self_attention.out_proj"),
            ("norm2", "ln_2"),
            ("fc1", "mlp.0"),
            ("fc2", "mlp.3"),
        ):
            names |= both(layer + theirs, block[ours])
    return names


def hugging_face(m, version=5, prefix="vit."):
    names = both("embeddings.patch_embeddings.projection", m.patches) | both("layernorm", m.norm)
    names |= {"embeddings.cls_token": m.cls, "embeddings.position_embeddings": m.pos}
    attention = "attention.{}_proj" if version == 5 else "attention.attention.{}"
    qkv = "qkv" if version == 5 else ("query", "key", "value")
    for i, block in enumerate(m.blocks):
        layer = f"layers.{i}." if version == 5 else f"encoder.layer.{i}."
        for kind, x in block["qkv"].state_dict().items():
            names |= {f"{layer}{attention.format(n)}.{kind}": part for n, part in zip(qkv, x.chunk(3))}
        for ours, five, four in (
            ("norm1", "layernorm_before", "layernorm_before"),
            ("out", "attention.o_proj", "attention.output.dense"),
            ("norm2", "layernorm_after", "layernorm_after"),
            ("fc1", "mlp.fc1", "intermediate.dense"),
            ("fc2", "mlp.fc2", "output.dense"),
        ):
            names |= both(layer + (five if version == 5 else four), block[ours])
    names = {prefix + name: x for name, x in names.items()}
    return names | both("classifier", m.head)


def images(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype)


# --- weights of other libraries -------------------------------------------------------------------------


def torchvision_1(m):
    """Names before torchvision 0.13 named the parts of an MLP by number."""
    return {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): x
        for name, x in torchvision(m).items()
    }


def test_weights_that_normalise_the_mean_are_not_pooled_by_class():
    state = timm(PlainViT(pool="mean", fc_norm=True))
    with pytest.raises(ValueError, match='`pool` must be "mean" for weights with `fc_norm`'):
        VisionTransformer.from_state_dict(state, heads=HEADS)


def test_a_new_radius_takes_effect_after_a_forward():
    options = {"dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
    model = VisionTransformer(32, 8, 10, **options).eval()
    local = VisionTransformer(32, 8, 10, **options, radius=1).eval()
    local.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert not torch.allclose(model(x), local(x))
    model.radius = 1
    torch.testing.assert_close(model(x), local(x))


@pytest.mark.field_report("B75")
@pytest.mark.parametrize(
    "options, naming",
    [
        ({}, timm),
        ({"registers": 3}, timm),
        ({"registers": 4, "embed_prefix": False}, timm),
        ({"scales": True, "qkv_bias": False}, timm),
        ({"pool": "mean"}, timm),
        ({"pool": "mean", "fc_norm": True}, timm),
        ({"pool": "mean", "class_token": False}, timm),
        ({}, torchvision),
        ({"pool": "mean"}, torchvision),
        ({}, torchvision_1),
        ({"eps": 1e-12}, hugging_face),
        ({"eps": 1e-12, "qkv_bias": False}, lambda m: hugging_face(m, prefix="")),
        ({"eps": 1e-12}, lambda m: hugging_face(m, version=4)),
    ],
)
def test_weights_of_other_libraries(options, naming):
    plain = PlainViT(**options)
    state = naming(plain)
    model = VisionTransformer.from_state_dict(state, heads=HEADS, pool=options.get("pool", "class"))
    x = images(2, 3, 16, 16)
    logits = model(x)
    torch.testing.assert_close(logits, plain(x), rtol=1e-10, atol=1e-10)

    # The gradients, too: of the image, and of parameters that no token or scale was multiplied into.
    theirs = torch.autograd.grad(
        plain(x.requires_grad_()).square().sum(), [x, plain.patches.weight, plain.pos]
    )
    ours = torch.autograd.grad(
        model(x).square().sum(), [x, model.patch_embedding.weight, model.position_embedding]
    )
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours[2].flatten(0, 1), theirs[2][0, -16:], rtol=1e-9, atol=1e-9)

    single = VisionTransformer.from_state_dict(
        {name: tensor.float() for name, tensor in state.items()},
        heads=HEADS,
        pool=options.get("pool", "class"),
    )
    torch.testing.assert_close(single(x.float()), plain(x).float(), rtol=1e-5, atol=1e-5)
    # The model has weights of its own.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(plain(x), logits)


def test_features_without_a_head():
    plain = PlainViT(eps=1e-12)
    state = {name: x for name, x in hugging_face(plain, prefix="").items() if "classifier" not in name}
    pooler = {"pooler.dense.weight": torch.ones(3, 3), "pooler.dense.bias": torch.ones(3)}
    model = VisionTransformer.from_state_dict(
        state | pooler | {"embeddings.mask_token": plain.cls}, heads=HEADS
    )
    plain.head = nn.Identity()
    x = images(2, 3, 16, 16)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-10, atol=1e-10)


def test_a_rectangle_needs_its_size():
    plain = PlainViT(grid=(2, 8), patch=(4, 2))
    state, x = timm(plain), images(2, 3, 8, 16)
    model = VisionTransformer.from_state_dict(state, heads=HEADS, image_size=(8, 16))
    torch.testing.assert_close(model(x), plain(x))
    assert model.position_embedding.shape == (2, 8, DIM)
    # 16 positions are a square as long as nobody says otherwise.
    assert VisionTransformer.from_state_dict(state, heads=HEADS).position_embedding.shape == (4, 4, DIM)
    with pytest.raises(ValueError, match=r"`image_size` must be .* the 7 position embeddings .* got None"):
        VisionTransformer.from_state_dict(timm(PlainViT(grid=(2, 3))), heads=HEADS)


def test_registers_that_leave_the_grid_open():
    # 9 positions are 3 x 3 patches alone, or 2 x 2 with a class token and 4 registers.
    state = timm(PlainViT(grid=(2, 2), registers=4))
    with pytest.raises(ValueError, match="`image_size` must be"):
        VisionTransformer.from_state_dict(state, heads=HEADS)
    x = images(1, 3, 8, 8)
    model = VisionTransformer.from_state_dict(state, heads=HEADS, image_size=8)
    torch.testing.assert_close(model(x), PlainViT(grid=(2, 2), registers=4)(x))


@pytest.mark.field_report("B71")
def test_positions_are_resampled_from_the_stored_grid():
    plain = PlainViT(registers=2)
    model = VisionTransformer.from_state_dict(timm(plain), heads=HEADS, image_size=(24, 32))
    assert model.position_embedding.shape == (4, 4, DIM)
    x = images(2, 3, 24, 32)
    grid = plain.pos[:, 3:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, (6, 8), mode="bicubic", antialias=True).flatten(2).mT
    resampled = torch.cat([plain.pos[:, :3], grid], dim=1)  # class and register tokens keep theirs
    torch.testing.assert_close(model(x), plain(x, positions=resampled))
    # A constant field stays constant, and bicubic weights of a downsampling by 2 are symmetric.
    nn.init.constant_(model.position_embedding, 2.5)
    torch.testing.assert_close(model._positions(3, 7), torch.full((3, 7, DIM), 2.5).double())


@pytest.mark.parametrize("radius", [0, 1, 5])
def test_a_trained_model_made_local(radius):
    plain = PlainViT(registers=1)
    model = VisionTransformer.from_state_dict(timm(plain), heads=HEADS, radius=radius)
    allowed = torch.ones(18, 18, dtype=torch.bool)
    for i in range(16):
        for j in range(16):
            rows, columns = abs(i // 4 - j // 4), abs(i % 4 - j % 4)
            allowed[2 + i, 2 + j] = max(rows, columns) <= radius
    x = images(2, 3, 16, 16)
    torch.testing.assert_close(model(x), plain(x, mask=allowed))
    assert torch.equal(model.patch_graph(4, 4).to_mask(), allowed)
    full = VisionTransformer.from_state_dict(timm(plain), heads=HEADS)
    full.load_state_dict(model.state_dict())  # the graph is no parameter
    torch.testing.assert_close(full(x), plain(x))


def test_graphs_of_few_sizes_are_kept():
    """Images of many sizes: what they need is made again, and gives the same."""
    model = VisionTransformer(8, 2, 3, dim=8, depth=1, heads=2, mlp_dim=8, radius=1).eval()
    images = {n: torch.randn(1, 3, 2 * n, 4) for n in range(1, 13)}
    first = {n: model(x) for n, x in images.items()}
    assert len(model._graphs) == 8
    for n, x in images.items():
        assert torch.equal(model(x), first[n])
    assert len(model._graphs) == 8


def test_graphs():
    options = {"dim": 8, "depth": 1, "heads": 2, "mlp_dim": 8}
    assert isinstance(VisionTransformer(16, 4, 5, **options).patch_graph(4, 4), CompleteGraph)
    assert isinstance(VisionTransformer(16, 4, 5, radius=1, **options).patch_graph(4, 4), SparseGraph)
    alone = VisionTransformer(16, 4, 5, radius=1, pool="mean", class_token=False, **options)
    assert isinstance(alone.patch_graph(4, 4), GridGraph)
    assert alone(torch.randn(2, 3, 16, 16)).shape == (2, 5)


# --- images ---------------------------------------------------------------------------------------------


def small(**options):
    torch.manual_seed(0)
    return VisionTransformer(8, 4, 5, **{"dim": 8, "depth": 2, "heads": 2, "mlp_dim": 8, **options})


@pytest.mark.field_report("B73")
def test_remainders():
    x = images(2, 3, 10, 7, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"whole number of patches of 4 x 4 .* got 10 x 7"):
        small()(x)
    torch.testing.assert_close(small(remainder="crop")(x), small()(x[:, :, :8, :4]))
    torch.testing.assert_close(small(remainder="pad")(x), small()(F.pad(x, (0, 1, 0, 2))))
    with pytest.raises(ValueError, match=r"at least one patch of 4 x 4 .* got 3 x 7"):
        small(remainder="crop")(x[:, :, :3])
    assert small(remainder="pad")(x[:, :, :1, :1]).shape == (2, 5)


def test_rectangles_of_any_size():
    model = VisionTransformer((8, 12), (4, 2), 3, in_channels=1, dim=8, depth=1, heads=2, mlp_dim=8, radius=1)
    assert model.position_embedding.shape == (2, 6, 8)
    for height, width in ((8, 12), (4, 2), (20, 6)):
        assert model(torch.randn(2, 1, height, width)).shape == (2, 3)
    assert model(torch.randn(0, 1, 8, 12)).shape == (0, 3)


def test_attention_weights():
    for options in ({}, {"radius": 0, "registers": 1}):
        model, x = small(**options), images(2, 3, 8, 12, dtype=torch.float32)
        out, weights = model(x, return_attention_weights=True)
        torch.testing.assert_close(out, model(x))
        graph = model.patch_graph(2, 3)
        assert [alpha.shape for alpha in weights] == 2 * [(2, *graph.edge_shape, 2)]
        target = graph.to_edge_index()[1]
        alpha = weights[0].reshape(2, graph.num_edges, 2)
        total = torch.zeros(2, graph.num_queries, 2).index_add(1, target, alpha)
        torch.testing.assert_close(total, torch.ones_like(total))


def test_every_parameter_is_trained_and_drawn_anew():
    model = small(radius=1, registers=1)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters()
    )
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    model.reset_parameters()
    assert not any((parameter == 7.0).any() for parameter in model.parameters())


def test_copies_and_half_precision():
    model, x = small(radius=1), torch.randn(2, 3, 12, 8)
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
    half = copy.deepcopy(model).bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x).float(), expected, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize(
    "options", [{"radius": 1}, {"radius": (0, 2), "registers": 2}, {"radius": None}], ids=str
)
def test_export_with_any_number_of_images(options, called_before):
    model = small(**options).eval()
    x = torch.randn(7, 3, 8, 8)
    expected = copy.deepcopy(model)(x)
    if called_before:
        model(x)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    exported = torch.export.export(model, (x[:3],), dynamic_shapes=(batch,)).module()
    for n in (1, 3, 7):
        torch.testing.assert_close(exported(x[:n]), expected[:n])
    torch.testing.assert_close(model(x), expected)  # tracing left nothing behind


@pytest.mark.parametrize("radius", [None, 1])
@pytest.mark.parametrize("called", [False, True])
def test_compile(radius, called):
    model, x = small(radius=radius), torch.randn(2, 3, 8, 8)
    expected = model(x) if called else copy.deepcopy(model)(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    if not called and Version(torch.__version__) < Version("2.13"):
        with pytest.raises(torch._dynamo.exc.Unsupported):  # cannot make a graph while it traces
            compiled(x)
        return
    torch.testing.assert_close(compiled(x), expected)
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), expected)


# --- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"heads": 3}, "`dim` must be a positive multiple of `heads`, got dim=8 and heads=3"),
        ({"pool": "max"}, '`pool` must be "class" or "mean"'),
        ({"class_token": False}, '`pool` must be "mean" for a model without a class token'),
        ({"remainder": "drop"}, '`remainder` must be "error", "pad" or "crop"'),
        ({"radius": -1}, "`radius`"),
        ({"radius": (1, 1, 1)}, "`radius`"),
    ],
)
def test_wrong_models(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)


@pytest.mark.parametrize("radius", [None, 1])
@pytest.mark.parametrize("shape", [(0, 2), (2, -1), (2, 1.0)])
def test_grids_that_are_none(shape, radius):
    with pytest.raises((ValueError, TypeError), match=r"must be (an int|at least 1 and below 2.*31), got"):
        small(radius=radius).patch_graph(*shape)


@pytest.mark.parametrize("size, patch", [(9, 4), ((8, 6), 4), (2, 4)])
def test_sizes_that_do_not_fit(size, patch):
    with pytest.raises(ValueError, match="whole number of patches"):
        VisionTransformer(size, patch, 5, dim=8, depth=1, heads=2, mlp_dim=8)


@pytest.mark.parametrize(
    ("size", "error", "words"),
    [
        (0, ValueError, "be at least 1"),
        ((8,), ValueError, "be an int or a pair"),
        ((8, 8, 8), ValueError, "be an int or a pair"),
        (8.0, TypeError, "be an int, got float"),
        ("8", TypeError, "be an int, got str"),
        ((True, 8), TypeError, "be an int, got bool"),
    ],
)
def test_sizes_that_are_none(size, error, words):
    with pytest.raises(error, match=f"`image_size` must {words}"):
        VisionTransformer(size, 4, 5)


@pytest.mark.parametrize(
    "x, error, message",
    [
        (
            torch.randn(2, 1, 8, 8),
            ValueError,
            r"`images` must have shape \[batch, 3, height, width\], got \[2, 1",
        ),
        (torch.randn(3, 8, 8), ValueError, "`images` must have shape"),
        (torch.randn(2, 3, 0, 8), ValueError, "`images` must have shape"),
        (
            torch.zeros(2, 3, 8, 8).half(),
            TypeError,
            "`images` must have the dtype .*float32, got torch.float16",
        ),
        (torch.zeros(2, 3, 8, 8).to_sparse(), TypeError, "`images` must be dense"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), TypeError, "`images` must be a floating point tensor"),
        (None, TypeError, "got NoneType"),
    ],
)
def test_wrong_images(x, error, message):
    with pytest.raises(error, match=message):
        small()(x)


def without(state, *names):
    return {name: x for name, x in state.items() if name not in names}


@pytest.mark.field_report("B75")
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: without(s, "norm.bias"), r"missing: \['norm.bias'\], unexpected: none"),
        (lambda s: without(s, "blocks.1.attn.qkv.bias"), r"missing: \['blocks.1.attn.qkv.bias'\]"),
        (
            lambda s: s | {"blocks.0.attn.q_norm.weight": s["norm.bias"]},
            r"unexpected: \['blocks.0.attn.q_norm",
        ),
        (lambda s: s | {"dist_token": s["cls_token"]}, r"missing: none, unexpected: \['dist_token'\]"),
        (lambda s: without(s, "cls_token"), r"17 position embeddings \(0 class and register tokens\)"),
        (lambda s: s | {"cls_token": s["cls_token"][0]}, r"got cls_token \[1, 12\], not \[1, 1, 12\]"),
        (
            lambda s: s | {"blocks.1.mlp.fc1.weight": s["blocks.1.mlp.fc1.weight"][:7]},
            r"got blocks.1.mlp.fc1.weight \[7, 12\], not \[20, 12\]",
        ),
        (
            lambda s: {"a": s["norm.bias"]},
            r"names of a Vision Transformer of timm, torchvision or .* got \['a'\]",
        ),
        (
            lambda s: s | {"blocks.0.ls1.gamma": s["norm.bias"]},
            r"missing: \['blocks.1.ls1.gamma'\]",
        ),
        (lambda s: {}, r"with at least one layer, got \[\]"),
    ],
)
def test_wrong_state_dicts(change, message):
    state = change({name: x.detach() for name, x in timm(PlainViT()).items()})
    with pytest.raises(ValueError, match=message):
        VisionTransformer.from_state_dict(state, heads=HEADS)


def test_a_layer_s_bias_is_missing_only_where_others_have_one():
    state = hugging_face(PlainViT())
    with pytest.raises(ValueError, match=r"missing: .*layers.0.attention.k_proj.bias"):
        VisionTransformer.from_state_dict(without(state, "vit.layers.0.attention.k_proj.bias"), heads=HEADS)
    with pytest.raises(TypeError, match="`state_dict` must map names to tensors"):
        VisionTransformer.from_state_dict({"model": state}, heads=HEADS)
    with pytest.raises(ValueError, match="`dim` must be a positive multiple of `heads`"):
        VisionTransformer.from_state_dict(state, heads=5)


DAMAGE = {
    "one more dimension": lambda x: x.unsqueeze(-1),
    "no dimension": lambda x: x.flatten()[0],
    "one row more": lambda x: torch.cat([x, x[:1]]),
    "no row": lambda x: x[:0],
    "integers": lambda x: x.long(),
    "complex": lambda x: x.to(torch.complex64),
    "sparse": lambda x: x.to_sparse(),
    "a list": lambda x: x.tolist(),
    "on another device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "naming", [lambda: timm(PlainViT(scales=True, registers=2)), lambda: hugging_face(PlainViT(), 4)]
)
def test_every_weight_is_checked(naming, damage):
    state = {name: x.detach() for name, x in naming().items()}
    for name, x in state.items():
        error = TypeError if damage in ("integers", "complex", "sparse", "a list") else ValueError
        # the sizes of the patches' and the first network's weights are those that others must fit
        culprit = name.rsplit(".", 2 if "fc1" in name or "intermediate" in name else 1)[0]
        if damage == "on another device":
            culprit = r"be on one device, got \['cpu', 'meta'\]"
        elif "patch_embed" in name:
            culprit = ""
        with pytest.raises(error, match=f"`state_dict` must .*{culprit}"):
            VisionTransformer.from_state_dict(state | {name: DAMAGE[damage](x)}, heads=HEADS)


def test_weights_of_mixed_precision_lose_nothing():
    m = PlainViT()
    state = {name: x.half() if "norm" not in name else x.float() for name, x in timm(m).items()}
    model = VisionTransformer.from_state_dict(state, heads=HEADS)
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    assert torch.equal(model.norm.weight, m.norm.weight.float())
    state = {name: x.bfloat16() if "norm" in name else x.half() for name, x in timm(m).items()}
    model = VisionTransformer.from_state_dict(state, heads=HEADS)
    assert torch.equal(model.head.weight, m.head.weight.half().float())


def test_namings_do_not_mix():
    state = timm(PlainViT())
    with pytest.raises(ValueError, match=r"missing: none, unexpected: \['classifier.bias'"):
        VisionTransformer.from_state_dict(hugging_face(PlainViT(), prefix="") | state, heads=HEADS)
    twice = hugging_face(PlainViT()) | hugging_face(PlainViT(), prefix="")
    with pytest.raises(ValueError, match=r"embeddings.cls_token'.* both with and without 'vit.'"):
        VisionTransformer.from_state_dict(twice, heads=HEADS)
    with pytest.raises(ValueError, match=r"must have the names .* got \['0.attn.proj.bias'"):
        VisionTransformer.from_state_dict(
            {k.removeprefix("blocks."): x for k, x in state.items()}, heads=HEADS
        )


@pytest.mark.parametrize(
    ("name", "n"), [("depth", -1), ("registers", -1), ("in_channels", 0), ("num_classes", -1), ("depth", 2.0)]
)
def test_numbers_of_things(name, n):
    numbers = {"num_classes": 10, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 32, name: n}
    error, words = (ValueError, "at least") if isinstance(n, int) else (TypeError, "an int, got float")
    with pytest.raises(error, match=f"`{name}` must be {words}"):
        VisionTransformer(32, 8, **numbers)


@pytest.mark.parametrize("name", ["cls_token", "pos_embed"])
def test_weights_that_would_broadcast_are_refused(name):
    state = timm(PlainViT())
    state[name] = state[name][..., :1]
    with pytest.raises(ValueError, match=rf"got {name} \[1, \d+, 1\], not \[1, (1|any), 12\]"):
        VisionTransformer.from_state_dict(state, heads=HEADS)
