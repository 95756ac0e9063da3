"""Anything in place of any argument of the public functions: the right number, or an error that names an argument."""

import inspect
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData

from graphattn import (
    CompleteGraph,
    Graph,
    GridGraph,
    SparseGraph,
    WindowGraph,
    accelerate,
    as_graph,
    attention_weights,
    encodings,
    expander_graph,
    global_graph,
    graph_attention,
    nn,
    transforms,
    union,
)
from graphattn.graph import axis_intervals, grid_blocks

ERRORS = (ValueError, TypeError, IndexError, NotImplementedError, RuntimeError)
EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])
GRAPH = SparseGraph.from_edge_index(EDGES, 3)
HUGE = {"2**31": 2**31, "2**63": 2**63, "-2**63-1": -(2**63) - 1, "10**400": 10**400}


def hostile() -> dict[str, Any]:
    return {
        **{repr(x): x for x in (None, True, -1, 0, 1, 3, 1.5, 1e-320, 1e300, "x", b"x", [], (), {}, 1j, ...)},
        **{
            repr(x): x for x in (math.nan, math.inf, -math.inf, [1, "a"], [None], [[]], [0, 1], {1}, {"a": 1})
        },
        **{
            repr(x): x for x in ((1, 2), (None, None), (-1, 2), (2**31, 1), range(3), slice(2), object, float)
        },
        **HUGE,
        "np.int64": np.int64(2),
        "np.float32": np.float32(2),
        "np.nan": np.float64(math.nan),
        "np.bool": np.bool_(True),
        "np.zeros": np.zeros((3, 3)),
        "np.object": np.array([None, 1], dtype=object),
        "third": Fraction(1, 3),
        "huge fraction": Fraction(10**400),
        "decimal": Decimal(1),
        "object": object(),
        "function": lambda *_: None,
        "generator": (i for i in range(3)),
        "scalar": torch.tensor(0.5),
        "integer scalar": torch.tensor(1),
        "no entries": torch.empty(0),
        "no rows": torch.empty(0, 3),
        "line": torch.tensor([0, 1, 2]),
        "falling": torch.tensor([0, 3, 2]),
        "pairs": torch.tensor([[0, 1], [1, 0]]),
        "negative": torch.tensor([[0, -1], [1, 0]]),
        "largest": torch.tensor([[2**63 - 1, 0], [0, -(2**63)]]),
        "largest line": torch.tensor([0, 2**63 - 1]),
        "lowest line": torch.tensor([-(2**63), 2**63 - 1]),
        "int32": torch.tensor([[0, 1], [1, 0]], dtype=torch.int32),
        "uint64": torch.tensor([0, 1], dtype=torch.uint64),
        "features": torch.randn(3, 2, 4),
        "batched": torch.randn(2, 3, 2, 4),
        "float64": torch.randn(3, 2, 4).double(),
        "nan": torch.full((3, 2, 4), math.nan),
        "float8": torch.randn(3, 2, 4).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, 2, 4, dtype=torch.cfloat),
        "mask": torch.ones(3, 3).bool(),
        "matrix": torch.ones(3, 3),
        "vector": torch.ones(3),
        "no columns": torch.ones(2, 0),
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.empty(3, 2, 4, device="meta"),
        "EdgeIndex": EdgeIndex(torch.tensor([[0, 1], [1, 0]])),
        "Data": Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2),
        "Data with a list": Data(edge_index=[[0, 1], [1, 0]], num_nodes=2),
        "Data without edges": Data(num_nodes=2),
        "HeteroData": HeteroData(),
        "networkx": networkx.path_graph(3),
        "scipy": scipy.sparse.eye_array(3).tocsr(),
        "graph": GRAPH,
        "window": WindowGraph(3, 1),
        "grid": GridGraph((2, 2), 1),
        "meta graph": GRAPH.to("meta"),
        "module": torch.nn.Linear(2, 2),
    }


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def data() -> Data:
    return Data(x=normal(3, 4), edge_index=EDGES.clone())


NODES = {"query": normal(3, 2, 4), "key": normal(3, 2, 4), "value": normal(3, 2, 4)}
NUMBERS = {"scale": None, "softcap": None, "dropout_p": 0.0, "return_lse": False}
FEATURES = {"bias": normal(3, 2), "edge_attr": normal(3, 5), "edge_projection": normal(2, 5, 4)}
# Every error of these names an argument.
FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "from_edge_index": (SparseGraph.from_edge_index, {"edge_index": EDGES, "num_nodes": 3}),
    "from_edge_index, size": (SparseGraph.from_edge_index, {"edge_index": EDGES, "size": (3, 3)}),
    "from_csr": (SparseGraph.from_csr, {"rowptr": torch.arange(4), "col": torch.arange(3), "num_keys": 3}),
    "from_mask": (SparseGraph.from_mask, {"mask": torch.eye(3).bool()}),
    "from_networkx": (SparseGraph.from_networkx, {"G": networkx.path_graph(3), "nodelist": [0, 1, 2]}),
    "from_scipy": (SparseGraph.from_scipy, {"A": scipy.sparse.eye_array(3)}),
    "CompleteGraph": (CompleteGraph, {"num_nodes": 3, "num_keys": 3, "causal": False, "offset": 0}),
    "cliques": (CompleteGraph.from_ptr, {"ptr": torch.tensor([0, 2, 3]), "causal": False}),
    "labels": (CompleteGraph.from_batch, {"batch": torch.tensor([0, 0, 1]), "causal": False}),
    "WindowGraph": (WindowGraph, {"length": 3, "radius": 1, "dilation": 1, "num_keys": 3, "offset": 0}),
    "windows": (WindowGraph.from_ptr, {"ptr": torch.tensor([0, 2, 3]), "radius": 1, "dilation": 1}),
    "GridGraph": (GridGraph, {"shape": (2, 2), "radius": 1, "dilation": 1, "border": "clip"}),
    "shifted": (GridGraph, {"shape": (2, 2), "radius": 1, "dilation": 1, "border": "shift"}),
    "expander_graph": (expander_graph, {"num_nodes": 9, "degree": 2, "seed": 0}),
    "global_graph": (global_graph, {"num_nodes": 4, "global_nodes": [0]}),
    "grid_blocks": (grid_blocks, {"shape": (2, 4), "block": 2, "shift": 0}),
    "union": (lambda union: globals()["union"](GRAPH, union), {"union": GRAPH}),
    "as_graph": (
        lambda graph, **options: as_graph(graph, **options),
        {"graph": EDGES, "num_nodes": 3, "size": None, "flow": "source_to_target"},
    ),
    "axis_intervals": (axis_intervals, {"graph": GridGraph((2, 2), 1)}),
    "attention": (graph_attention, NODES | NUMBERS | {"graph": GRAPH}),
    "attention, features": (graph_attention, NODES | NUMBERS | FEATURES | {"graph": GRAPH}),
    "attention, complete": (graph_attention, NODES | NUMBERS | {"graph": CompleteGraph(3), "bias": None}),
    "attention, window": (graph_attention, NODES | NUMBERS | {"graph": WindowGraph(3, 1), "bias": None}),
    "weights": (
        attention_weights,
        {"query": NODES["query"], "key": NODES["key"], "graph": GRAPH, "scale": None, "softcap": None},
    ),
    "weights, features": (
        attention_weights,
        {"query": NODES["query"], "key": NODES["key"], "graph": GRAPH, **FEATURES},
    ),
    "accelerate": (accelerate, {"model": torch.nn.Linear(2, 2)}),
}
# These hand some arguments on to PyTorch or PyG, whose errors name them in their own ways.
LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sinusoidal": (encodings.sinusoidal, {"positions": torch.arange(3), "dim": 4, "base": 10000.0}),
    "laplacian": (
        encodings.laplacian_eigenvectors,
        {
            "graph": GRAPH,
            "k": 2,
            "edge_weight": torch.ones(3),
            "normalization": "sym",
            "directed": "symmetrize",
        },
    ),
    "random_walk": (encodings.random_walk, {"graph": GRAPH, "steps": 2, "edge_weight": torch.ones(3)}),
    "relative_positions": (encodings.relative_positions, {"graph": WindowGraph(3, 1)}),
    "alibi": (encodings.alibi, {"graph": WindowGraph(3, 1), "heads": 2}),
    "eigenvectors of data": (
        lambda k, attr_name: transforms.AddLaplacianEigenvectorPE(k, attr_name)(data()),
        {"k": 2, "attr_name": "pe"},
    ),
    "walks of data": (
        lambda length, name: transforms.AddRandomWalkPE(length, name)(data()),
        {"length": 2, "name": "pe"},
    ),
    "waves of data": (
        lambda dim, name: transforms.AddSinusoidalPE(dim, name)(data()),
        {"dim": 2, "name": "pe"},
    ),
    "GraphMultiheadAttention": (
        nn.GraphMultiheadAttention,
        {"embed_dim": 8, "num_heads": 2, "dropout": 0.0, "kdim": None, "vdim": None},
    ),
    "its forward": (
        nn.GraphMultiheadAttention(8, 2),
        {"query": normal(3, 8), "graph": GRAPH, "key": None, "value": None, "bias": None},
    ),
    "its forward, all": (
        nn.GraphMultiheadAttention(8, 2, kdim=3, vdim=5),
        {
            "query": normal(3, 8),
            "graph": GRAPH,
            "key": normal(3, 3),
            "value": normal(3, 5),
            "bias": normal(3, 2),
        },
    ),
    "GraphTransformerLayer": (
        nn.GraphTransformerLayer,
        {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.1, "activation": "relu"},
    ),
    "layer": (nn.GraphTransformerLayer(8, 2, 16), {"x": normal(3, 8), "graph": GRAPH}),
    "GraphTransformer": (
        nn.GraphTransformer,
        {
            "in_channels": 4,
            "hidden_channels": 8,
            "out_channels": 2,
            "num_layers": 1,
            "heads": 2,
            "dropout": 0.0,
        },
    ),
    "transformer": (
        nn.GraphTransformer(4, 8, 2, 1, 2),
        {"x": normal(3, 4), "graph": GRAPH, "encoding": None},
    ),
    "transformer, encoding": (
        nn.GraphTransformer(4, 8, 2, 1, 2, encoding_channels=3),
        {"x": normal(3, 4), "graph": GRAPH, "encoding": normal(3, 3)},
    ),
    "TransformerConv": (
        nn.TransformerConv,
        {"in_channels": 4, "out_channels": 8, "heads": 2, "dropout": 0.0, "edge_dim": None},
    ),
    "conv": (
        nn.TransformerConv(4, 8, 2, edge_dim=3),
        {"x": normal(3, 4), "edge_index": EDGES, "edge_attr": normal(3, 3)},
    ),
    "GPSConv": (nn.GPSConv, {"channels": 8, "conv": None, "heads": 2, "dropout": 0.0, "norm": "batch_norm"}),
    "gps": (
        nn.GPSConv(8, nn.TransformerConv(8, 8), heads=2, norm="layer_norm"),
        {"x": normal(3, 8), "edge_index": EDGES, "batch": torch.tensor([0, 0, 1])},
    ),
    "VisionTransformer": (
        nn.VisionTransformer,
        {"image_size": 8, "patch_size": 4, "num_classes": 3, "dim": 8, "depth": 1, "heads": 2, "mlp_dim": 16}
        | {"radius": None, "pool": "class"},
    ),
    "vision": (
        nn.VisionTransformer(8, 4, 3, dim=8, depth=1, heads=2, mlp_dim=16),
        {"images": normal(1, 3, 8, 8)},
    ),
    "convolution": (nn.ConvolutionalAttention(2, 3, 3), {"images": normal(1, 2, 5, 4)}),
    "from_conv2d": (nn.ConvolutionalAttention.from_conv2d, {"conv": torch.nn.Conv2d(2, 3, 3)}),
    "LearnedEncoding": (nn.LearnedEncoding, {"num_positions": 5, "dim": 4}),
    "learned": (nn.LearnedEncoding(5, 4), {"positions": torch.arange(3)}),
    "RotaryEncoding": (nn.RotaryEncoding, {"dim": 4}),
    "rotary": (nn.RotaryEncoding(4), {"x": normal(3, 2, 4), "positions": torch.arange(3)}),
    "RelativeBias": (nn.RelativeBias, {"graph": WindowGraph(3, 1), "heads": 2, "num_buckets": None}),
    "RelativeBias, buckets": (
        nn.RelativeBias,
        {"graph": WindowGraph(3, 1), "heads": 2, "num_buckets": 8, "max_distance": 9, "bidirectional": True},
    ),
}
# Values that no memory or patience would suffice for, and those that only warn in other libraries' hands.
NOT_FOR_LAYERS = {*HUGE, "(2147483648, 1)", "1e+300"}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyG, on Data that does not say how many nodes it has
@pytest.mark.parametrize("name", [*FUNCTIONS, *LAYERS])
def test_anything_in_place_of_an_argument(name):
    function, arguments = (FUNCTIONS | LAYERS)[name]
    for argument in arguments:
        for label, value in hostile().items():
            if name in LAYERS and label in NOT_FOR_LAYERS:
                continue
            where = f"{name}, {argument}={label}"
            try:
                result = function(**{**arguments, argument: value})
            except ERRORS as error:
                assert str(error), where
                if name in FUNCTIONS:
                    named = (
                        *arguments,
                        "num_nodes",
                        "Query ids",
                        "Key ids",
                        "EdgeIndex",
                        "Data",
                        "edge_index",
                    )
                    assert any(word in str(error) for word in named), f"{where}: {error!r}"
            except BaseException as error:
                pytest.fail(f"{where}: {error!r}")
            else:
                tensors = result if isinstance(result, tuple) else (result,)
                for x in tensors:
                    if isinstance(x, Tensor) and x.is_floating_point() and x.device.type == "cpu":
                        assert "nan" in label or not x.isnan().any(), where


@pytest.mark.parametrize("name", [*FUNCTIONS, *LAYERS])
def test_one_argument_on_another_device(name):
    """What takes several tensors, or reads one, names the one that is elsewhere."""
    function, arguments = (FUNCTIONS | LAYERS)[name]
    moved = {key: x for key, x in arguments.items() if isinstance(x, (Tensor, Graph))}
    for argument, x in moved.items():
        try:
            result = function(**{**arguments, argument: x.to("meta")})
        except (ValueError, TypeError) as error:
            named = f"`{argument}`" in str(error) or f"of a {argument} " in str(error)
            assert named and "meta" in str(error), f"{argument}: {error!r}"
        else:
            assert len(moved) == 1, argument
            assert not isinstance(result, Tensor) or result.is_meta


@pytest.mark.parametrize("graph", [GRAPH, CompleteGraph(3), WindowGraph(3, 1), CompleteGraph(700)], ids=str)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_tensor_without_memory(graph, name):
    """Sharding frees the storage of parameters between uses; reading it is an error, not a crash."""
    operands = {name: torch.randn(graph.num_keys, 1, 4) for name in ("query", "key", "value")}
    operands[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage was freed"):
        graph_attention(**operands, graph=graph)
    if name != "value":
        with pytest.raises(RuntimeError, match="storage was freed"):
            attention_weights(operands["query"], operands["key"], graph)


def test_every_public_function_of_graphs_and_attention_is_tried():
    tried = {function for function, _ in FUNCTIONS.values()} | {union, as_graph}
    for kind in (SparseGraph, CompleteGraph, WindowGraph, GridGraph):
        for name, member in vars(kind).items():
            if isinstance(member, staticmethod) and name.startswith("from_"):
                assert getattr(kind, name) in tried, name
    for function in (
        graph_attention,
        attention_weights,
        expander_graph,
        global_graph,
        grid_blocks,
        accelerate,
    ):
        assert function in tried
        missing = set(inspect.signature(function).parameters)
        for other, arguments in FUNCTIONS.values():
            missing -= set(arguments) if other is function else set()
        assert not missing, f"{function.__name__}: {missing}"


def test_the_common_type_of_graphs_is_not_a_graph():
    with pytest.raises(TypeError, match="build one of these"):
        Graph()
