"""Hugging Face models with random weights: Transformers' own eager attention is the oracle."""

import functools
import inspect

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import graphattn.integrations.huggingface as huggingface  # noqa: E402
from graphattn import CompleteGraph, GridGraph, SparseGraph, WindowGraph, global_graph, union  # noqa: E402
from graphattn.integrations.huggingface import register  # noqa: E402
from graphattn.nn import RelativeBias  # noqa: E402

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 32, "initializer_range": 0.4, "pad_token_id": 0}


def text_model(kind, **options):
    torch.manual_seed(1)
    match kind:
        case "bert":
            config = transformers.BertConfig(**{**SMALL, **options})
        case "gpt2":  # keeps `output_attentions` from its attention layers, as OPT does
            config = transformers.GPT2Config(
                vocab_size=50,
                n_embd=16,
                n_layer=2,
                n_head=4,
                initializer_range=0.4,
                bos_token_id=1,
                eos_token_id=2,
                **options,
            )
        case "opt":
            sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 32, "init_std": 0.4}
            config = transformers.OPTConfig(vocab_size=50, hidden_size=16, word_embed_proj_dim=16, **sizes)
        case "llama":
            config = transformers.LlamaConfig(num_key_value_heads=2, **{**SMALL, **options})
        case "gemma2":  # grouped heads, softcap, sliding windows in every second layer
            config = transformers.Gemma2Config(
                num_key_value_heads=2,
                head_dim=4,
                sliding_window=3,
                attn_logit_softcapping=0.5,
                query_pre_attn_scalar=2,
                **{**SMALL, **options},
            )
        case "gpt_oss":  # a sink in every head, sliding windows in every second layer
            config = transformers.GptOssConfig(
                num_key_value_heads=2,
                head_dim=4,
                sliding_window=3,
                num_local_experts=2,
                num_experts_per_tok=1,
                **{**SMALL, **options},
            )
        case "t5":  # a bias that is trained
            config = transformers.T5Config(
                vocab_size=50,
                d_model=16,
                d_kv=4,
                d_ff=32,
                num_layers=2,
                num_heads=4,
                initializer_factor=2.0,
                **options,
            )
        case "bart":
            config = transformers.BartConfig(
                vocab_size=50,
                d_model=16,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
                init_std=0.4,
                **options,
            )
    return transformers.AutoModel.from_config(config).eval()


IDS = torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(0))
PADDING = torch.ones(3, 9, dtype=torch.int64)
PADDING[0, 6:] = 0
PADDING[1, :2] = 0


def results(model, implementation, **inputs):
    """The last hidden state, every attention matrix, and every parameter's gradient."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    out = model(**inputs, output_attentions=True)
    hidden = out.last_hidden_state
    valid = inputs.get("attention_mask") if hidden.shape[:2] == IDS.shape else None
    if valid is not None:
        hidden = hidden[valid.bool()]
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    names = [name for name in out if "attentions" in name and out[name]]
    attentions = [matrix for name in names for matrix in out[name]]
    if valid is not None:
        attentions = [matrix.movedim(1, -1)[valid.bool()] for matrix in attentions]
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), attentions, grads


def assert_same(ours, expected):
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=1e-5)
    assert len(ours[1]) == len(expected[1]) > 0
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-5, atol=1e-5)
    assert ours[2].keys() == expected[2].keys()
    for name, grad in expected[2].items():
        torch.testing.assert_close(ours[2][name], grad, rtol=1e-4, atol=1e-5 * (1 + grad.abs().max().item()))


@pytest.fixture
def edges_seen(monkeypatch):
    """The graph of every call of the operator."""
    seen, operator = [], huggingface.graph_attention

    def watched(query, key, value, graph, **options):
        seen.append(graph)
        return operator(query, key, value, graph, **options)

    monkeypatch.setattr(huggingface, "graph_attention", watched)
    return seen


@pytest.mark.field_report("B106")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "opt", "llama", "gemma2", "gpt_oss", "t5", "bart"])
def test_models_give_the_numbers_of_eager_attention(kind, padded, edges_seen):
    register()
    model, inputs = text_model(kind), {"input_ids": IDS}
    if padded:
        inputs["attention_mask"] = PADDING
    if kind in ("t5", "bart"):
        inputs["decoder_input_ids"] = IDS[:, :5]
    expected = results(model, "eager", **inputs)
    assert not edges_seen
    assert_same(results(model, "graphattn", **inputs), expected)
    assert len(edges_seen) == (6 if kind in ("t5", "bart") else 2)
    if kind == "bert" and padded:  # one graph for all layers that share a mask
        assert edges_seen[0] is edges_seen[1]
        assert edges_seen[0].num_edges == 9 * int(PADDING.sum())
    if kind in ("bert", "llama") and not padded:
        assert all(isinstance(graph, CompleteGraph) for graph in edges_seen)


def test_attention_is_recorded_only_where_it_is_asked_for(monkeypatch):
    calls, weights_of = [], huggingface.attention_weights
    monkeypatch.setattr(
        huggingface, "attention_weights", lambda *a, **options: calls.append(1) or weights_of(*a, **options)
    )
    register()
    for model in (text_model("gpt2"), text_model("bert")):
        model.set_attn_implementation("graphattn")
        assert model(input_ids=IDS, output_hidden_states=True).attentions is None and not calls
        asked = model(input_ids=IDS, output_attentions=True)
        model.set_attn_implementation("eager")
        model.config.output_attentions = True
        model.set_attn_implementation("graphattn")
        for recorded in (asked, model(input_ids=IDS)):
            assert [tuple(matrix.shape) for matrix in recorded.attentions] == [(3, 4, 9, 9)] * 2
        assert len(calls) == 4
        calls.clear()


def test_gpt2_attends_to_an_encoder_and_gives_its_weights():
    model = text_model("gpt2", add_cross_attention=True)
    register()
    encoded = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(2))
    for mask in (None, torch.arange(7) < torch.tensor([[7], [4], [1]])):
        inputs = {"input_ids": IDS, "encoder_hidden_states": encoded, "encoder_attention_mask": mask}
        expected = results(model, "eager", **inputs)
        assert_same(results(model, "graphattn", **inputs), expected)
        assert [tuple(matrix.shape) for matrix in expected[1]] == 2 * [(3, 4, 9, 9)] + 2 * [(3, 4, 9, 7)]


def test_a_mask_that_is_added():
    register()
    model = text_model("bert")
    added = torch.randn(3, 1, 9, 9)
    inputs = {"input_ids": IDS, "attention_mask": added}
    outs = []
    for implementation in ("eager", "graphattn"):
        model.set_attn_implementation(implementation)
        outs.append(model(**inputs).last_hidden_state)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)


def masked(model, allowed: Tensor):
    """Eager attention under a mask `[queries, keys]`, True where a query may attend to the key."""
    model.set_attn_implementation("eager")
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    return model(input_ids=IDS, attention_mask=bias.expand(3, 1, 9, 9)).last_hidden_state


@pytest.mark.parametrize(
    "graph",
    [WindowGraph(9, 2), union(WindowGraph(9, 1), global_graph(9, [0]))],
    ids=["window", "window and global"],
)
def test_bert_on_a_graph(graph, edges_seen):
    register("on_graph", lambda num_queries, num_keys, module: graph)
    model = text_model("bert")
    expected = masked(model, graph.to_mask())
    model.set_attn_implementation("on_graph")
    torch.testing.assert_close(model(input_ids=IDS).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    assert edges_seen == [graph, graph]  # nothing listed, nothing copied
    # With padding a token sees what both the graph and the mask let it see: as a sequence of its own.
    out = model(input_ids=IDS, attention_mask=PADDING).last_hidden_state
    prefix = graph.to_mask()[:6, :6]
    register("prefix", lambda num_queries, num_keys, module: SparseGraph.from_mask(prefix))
    model.set_attn_implementation("prefix")
    alone = model(input_ids=IDS[:1, :6]).last_hidden_state
    torch.testing.assert_close(out[:1, :6], alone, rtol=1e-5, atol=1e-5)


def sliding(num_queries, num_keys, module):
    return WindowGraph(num_queries, (2, 0), num_keys=num_keys, offset=num_keys - num_queries)


def cached(model, cache):
    """The argument that a cache is handed over by, which was renamed in 5.24."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


# Padding on either side, and on the right of every sequence, so that the last keys are those of no token.
PADDINGS = {
    "none": torch.ones_like(PADDING),
    "either side": PADDING,
    "right": (torch.arange(9) < 7).long() * PADDING,
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("places", [None, 9, 14])
def test_llama_on_a_sliding_window_generates_from_its_cache(places, padding):
    register("sliding", functools.cache(sliding))
    model = text_model("llama")
    model.set_attn_implementation("sliding")
    whole = model(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(whole, masked(model, sliding(9, 9, None).to_mask()), rtol=1e-5, atol=1e-5)
    model.set_attn_implementation("sliding")
    valid = PADDINGS[padding]
    whole = model(input_ids=IDS, attention_mask=valid).last_hidden_state
    for sizes in ([5, 1, 1, 2], [5, 4]):
        if places is None:
            cache = transformers.DynamicCache(config=model.config)
        else:  # has places that nothing stands in yet
            cache = transformers.StaticCache(config=model.config, max_cache_len=places)
        steps, end = [], 0
        for part in IDS.split(sizes, dim=1):
            end += part.size(1)
            out = model(input_ids=part, attention_mask=valid[:, :end], **cached(model, cache))
            steps.append(out.last_hidden_state)
        steps = torch.cat(steps, dim=1)
        torch.testing.assert_close(steps[valid.bool()], whole[valid.bool()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("places", [None, 14])
def test_compiled_code_refuses_a_graph_on_a_static_cache(places):
    register("sliding", sliding)
    model = text_model("llama")
    model.set_attn_implementation("sliding")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        whole = model(input_ids=IDS).last_hidden_state
        cache = transformers.DynamicCache()
        if places is not None:
            cache = transformers.StaticCache(config=model.config, max_cache_len=places)
        model(input_ids=IDS[:, :5], **cached(model, cache))
        step = {"input_ids": IDS[:, 5:6], "attention_mask": torch.ones(3, 6), **cached(model, cache)}
        if places is None:
            torch.testing.assert_close(
                compiled(**step).last_hidden_state, whole[:, 5:6], rtol=1e-5, atol=1e-5
            )
        else:
            with pytest.raises(RuntimeError, match=r"how full a static cache is.*Call the model uncompiled"):
                compiled(**step)


def test_a_graph_does_not_lift_causality():
    register("two_sided", lambda num_queries, num_keys, module: WindowGraph(num_queries, 2))
    model = text_model("llama")
    expected = masked(model, WindowGraph(9, (2, 0)).to_mask())
    model.set_attn_implementation("two_sided")
    torch.testing.assert_close(model(input_ids=IDS).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


def test_vit_on_its_patch_grid():
    torch.manual_seed(1)
    config = transformers.ViTConfig(
        image_size=12,
        patch_size=3,
        **{k: v for k, v in SMALL.items() if k not in ("vocab_size", "pad_token_id")},
    )
    model, images = transformers.ViTModel(config).eval(), torch.randn(2, 3, 12, 12)
    expected = results(model, "eager", pixel_values=images)
    register()
    assert_same(results(model, "graphattn", pixel_values=images), expected)
    grid = GridGraph((4, 4), 1).to_edge_index() + 1
    local = union(SparseGraph.from_edge_index(grid, 17), global_graph(17, [0]))
    register("patches", lambda num_queries, num_keys, module: local)
    _, attentions, _ = results(model, "patches", pixel_values=images)
    for matrix in attentions:
        assert torch.equal(matrix > 0, local.to_mask().expand_as(matrix))
        torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 4, 17))


def test_dropout_follows_training():
    register()
    model = text_model("bert", attention_probs_dropout_prob=1.0, hidden_dropout_prob=0.0)
    model.set_attn_implementation("graphattn")
    kept = model(input_ids=IDS).last_hidden_state
    dropped = model.train()(input_ids=IDS).last_hidden_state
    assert not torch.allclose(kept, dropped)
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.value.weight.zero_()
            layer.attention.self.value.bias.zero_()
    nothing = model.eval()(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(nothing, dropped)


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (4, 3), (6, 1000), (64, 77)])
def test_relative_bias_has_the_table_of_t5(num_buckets, max_distance, decoder):
    from transformers.models.t5.modeling_t5 import T5Attention

    config = transformers.T5Config(
        d_model=16,
        d_kv=4,
        num_heads=4,
        is_decoder=decoder,
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    expected = theirs.compute_bias(300, 300)[0].permute(1, 2, 0)
    options = {"num_buckets": num_buckets, "max_distance": max_distance, "bidirectional": not decoder}
    for graph in (CompleteGraph(300), WindowGraph(300, (40, 25))):
        ours = RelativeBias(graph, 4, **options)
        ours.load_state_dict({"weight": theirs.relative_attention_bias.weight})
        bias = ours().expand(*graph.edge_shape, 4).flatten(0, 1)[graph.slots()]
        source, target = graph.to_edge_index()
        assert torch.equal(bias, expected[target, source])


# --- the function itself --------------------------------------------------------------------------------


def call(mask=None, graph=None, queries=4, keys=4, **options):
    register("called", graph)
    function = transformers.AttentionInterface()["called"]
    query, key, value = torch.randn(2, 4, queries, 3), torch.randn(2, 2, keys, 3), torch.randn(2, 2, keys, 5)
    module = torch.nn.Module()
    return function(module, query, key, value, mask, is_causal=False, **options), (query, key, value)


def test_masks_of_each_head_and_biases_of_each_sequence():
    mask = torch.rand(2, 4, 4, 6) < 0.7
    mask[..., 0] = True
    bias = torch.randn(2, 4, 4, 6)
    options = {"position_bias": bias, "output_attentions": True, "scaling": 0.3}
    (out, weights), (query, key, value) = call(mask, keys=6, **options)
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = (0.3 * query @ key.mT + bias).masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, scores)
    torch.testing.assert_close(out, (scores @ value).transpose(1, 2))


def test_nothing_to_attend_to():
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    mask[1, :, 2] = False
    (out, weights), _ = call(mask, output_attentions=True)
    assert weights.shape == (2, 4, 4, 4) and not out[1, 2].any() and not weights[1, :, 2].any()
    (out, _), _ = call(keys=0)
    assert out.shape == (2, 4, 4, 5) and not out.any()


def test_sinks_take_weight_as_a_key_without_a_value_would():
    sinks = torch.tensor([-1.0, 0.5, 2.0, 30.0], requires_grad=True)
    mask = torch.rand(2, 1, 4, 6, generator=torch.Generator().manual_seed(5)) < 0.7
    mask[0, :, 1] = False  # all that is left goes to the sink
    (out, weights), (query, key, value) = call(mask, keys=6, s_aux=sinks, output_attentions=True)
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = (query @ key.mT * 3**-0.5).masked_fill(~mask, -torch.inf)
    with_sink = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 4, 1)], dim=-1).softmax(-1)
    torch.testing.assert_close(weights, with_sink[..., :-1])
    torch.testing.assert_close(out, (with_sink[..., :-1] @ value).transpose(1, 2))
    (expected,) = torch.autograd.grad((with_sink[..., :-1] @ value).square().sum(), sinks)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), sinks)[0], expected)


def test_a_changed_mask_is_seen():
    register("changed")
    function = transformers.AttentionInterface()["changed"]
    mask, x = torch.ones(2, 1, 3, 3, dtype=torch.bool), torch.randn(2, 1, 3, 4)
    first, _ = function(torch.nn.Module(), x, x, x, mask)
    mask[0, 0, 0, 1:] = False
    second, _ = function(torch.nn.Module(), x, x, x, mask)
    torch.testing.assert_close(second[0, 0, 0], x[0, 0, 0])
    torch.testing.assert_close(second[1], first[1])


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"window_left": 3}, NotImplementedError, "does not know what `window_left` of Module means"),
        ({"s_aux": 1.0}, TypeError, "`s_aux` must be .* got float"),
        ({"s_aux": torch.ones(4).long()}, TypeError, "`s_aux` must be .* got torch.int64"),
        ({"s_aux": torch.ones(2)}, ValueError, r"`s_aux` must have shape \[heads\] = \[4\], got \[2\]"),
        ({"graph": lambda q, k, m: torch.ones(2, 2)}, TypeError, "`graph` must return a Graph, got Tensor"),
        (
            {"graph": lambda q, k, m: CompleteGraph(3)},
            ValueError,
            "graph of 4 keys and 4 queries, got CompleteGraph",
        ),
        ({"graph": 3}, TypeError, "`graph` must be a function"),
        ({"mask": torch.ones(2, 1, 4, 4).long()}, TypeError, r"`attention_mask` must be .* got torch.int64"),
        (
            {"mask": torch.ones(2, 4)},
            ValueError,
            r"`attention_mask` must have .*\[2, 4, 4, 4\].*got \[2, 4\]",
        ),
        ({"mask": torch.ones(3, 1, 4, 4)}, ValueError, r"`attention_mask` must .*got \[3, 1, 4, 4\]"),
        ({"mask": torch.ones(2, 1, 4, 5).bool()}, ValueError, r"`attention_mask` must .*got \[2, 1, 4, 5\]"),
        ({"position_bias": torch.ones(1, 2, 4, 4)}, ValueError, r"`position_bias` must .*got \[1, 2, 4, 4\]"),
    ],
)
def test_wrong_calls(options, error, message):
    with pytest.raises(error, match=message):
        call(**options)


@pytest.mark.parametrize("name", ["eager", "my_sdpa", "flash2", "paged|x", "org/kernel", "", 3, None])
def test_names_that_transformers_treats_otherwise(name):
    with pytest.raises(TypeError if not isinstance(name, str) else ValueError, match="`name` must be"):
        register(name)


@pytest.mark.parametrize("shape", [(1, 1, 1, 6), (2, 1, 1, 6), (1, 4, 4, 1), (2, 4, 4, 6)])
@pytest.mark.parametrize("kind", ["bool", "added", "position_bias"])
def test_every_mask_that_broadcasts(shape, kind):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    x = x > -1 if kind == "bool" else x
    options = {"position_bias": x} if kind == "position_bias" else {"mask": x}
    (out, weights), (query, key, value) = call(keys=6, output_attentions=True, **options)
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = query @ key.mT * 3**-0.5
    scores = scores.masked_fill(~x, -torch.inf) if kind == "bool" else scores + x
    expected = scores.softmax(-1).nan_to_num()  # a row of -inf has no edge
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(out, (expected @ value).transpose(1, 2))


def test_compiled_models():
    model = text_model("gpt2")
    register()
    model.set_attn_implementation("graphattn")
    with torch.no_grad():
        expected = model(input_ids=IDS, attention_mask=PADDING, use_cache=False).last_hidden_state
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        out = compiled(input_ids=IDS, attention_mask=PADDING, use_cache=False).last_hidden_state
    torch.testing.assert_close(out, expected)


def test_example(tmp_path, capsys):
    from examples import huggingface as example

    out = ["--out", str(tmp_path / "figure.png")]
    rows = example.main(["--length", "40", "--batch", "1", "--radius", "2", "--epochs", "1", *out])
    assert [row.edges for row in rows] == [1600, 40 * 5 - 6, 40 * 5 - 6 + 2 * 37]
    assert all(row.difference < 1e-5 for row in rows)
    printed = capsys.readouterr().out
    assert all(f"{row.graph:<14} {row.edges:>9}" in printed for row in rows)
    with pytest.raises(SystemExit):
        example.main(["--length", "0"])
    assert "--length must be at least 1, got 0" in capsys.readouterr().err

    example.new_bert(32, seed=1).save_pretrained(tmp_path / "bert")
    arguments = ["--root", str(tmp_path / "bert"), "--radius", "2", "--epochs", "1", *out]
    rows = example.main([*arguments, "--length", "32"])
    assert [row.edges for row in rows] == [1024, 32 * 5 - 6, 32 * 5 - 6 + 2 * 29]
    with pytest.raises(SystemExit) as stopped:
        example.main([*arguments, "--length", "33"])
    assert stopped.value.code == 2 and "--length must be at most 32" in capsys.readouterr().err
    for root in (tmp_path / "none", tmp_path):
        with pytest.raises(SystemExit) as stopped:
            example.main(["--root", str(root), *out])
        error = capsys.readouterr().err
        assert stopped.value.code == 1 and str(root) in error and "Traceback" not in error
