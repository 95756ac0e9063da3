"""Positional encodings as PyG transforms: alone, in a data set, in a loader, on awkward data."""

import copy

import pytest
import torch
import torch_geometric.transforms
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import Compose, ToSparseTensor

from graphattn.encodings import laplacian_eigenvectors, random_walk, sinusoidal
from graphattn.graph import CompleteGraph, SparseGraph
from graphattn.transforms import AddLaplacianEigenvectorPE, AddRandomWalkPE, AddSinusoidalPE

DTYPES = [torch.float32, torch.float64]
TRANSFORMS = {
    "laplacian_eigenvector_pe": AddLaplacianEigenvectorPE(4),
    "random_walk_pe": AddRandomWalkPE(4),
    "sinusoidal_pe": AddSinusoidalPE(4),
}
EACH = pytest.mark.parametrize(("name", "transform"), TRANSFORMS.items(), ids=TRANSFORMS)


def ring(n: int, **more) -> Data:
    node = torch.arange(n)
    there = torch.stack([node, (node + 1) % n])
    return Data(edge_index=torch.cat([there, there.flip(0)], 1), num_nodes=n, **more)


def encoded(name: str, data: Data) -> torch.Tensor:
    graph = SparseGraph.from_edge_index(data.edge_index, data.num_nodes)
    return {
        "laplacian_eigenvector_pe": lambda: laplacian_eigenvectors(graph, 4),
        "random_walk_pe": lambda: random_walk(graph, 4),
        "sinusoidal_pe": lambda: sinusoidal(torch.arange(data.num_nodes), 4),
    }[name]()


@EACH
def test_attribute(name, transform):
    data = ring(7)
    kept = copy.copy(data)
    out = transform(data)
    assert torch.equal(out[name], encoded(name, data))
    assert name not in data and data.keys() == kept.keys()  # the input is left as it was


@EACH
@pytest.mark.parametrize("dtype", DTYPES)
def test_concatenation(name, transform, dtype):
    transform = type(transform)(4, attr_name=None)
    x = torch.randn(7, 3, dtype=dtype)
    data = ring(7, x=x)
    out = transform(data)
    assert out.x.dtype == dtype and data.x is x and x.shape == (7, 3)
    assert torch.equal(out.x, torch.cat([x, encoded(name, data).to(dtype)], dim=1))
    assert torch.equal(transform(ring(7)).x, encoded(name, data))
    line = transform(ring(7, x=x[:, 0]))
    assert torch.equal(line.x[:, 0], x[:, 0]) and line.x.shape == (7, 5)


@pytest.mark.field_report("B98")
@EACH
def test_integer_features_are_refused(name, transform):
    transform = copy.copy(transform)
    transform.attr_name = None
    with pytest.raises(TypeError, match="attr_name"):
        transform(ring(7, x=torch.ones(7, 1, dtype=torch.int64)))
    with pytest.raises(TypeError, match="dense"):
        transform(ring(7, x=torch.eye(7).to_sparse()))
    with pytest.raises(ValueError, match="shape"):
        transform(ring(7, x=torch.ones(7, 2, 2)))


class Rings(InMemoryDataset):
    def __init__(self, transform):
        super().__init__(None, transform)
        self.data, self.slices = self.collate([ring(n) for n in (3, 8, 1, 2, 5)])


@EACH
def test_dataset_and_loader(name, transform):
    dataset = Rings(transform)
    (batch,) = DataLoader(dataset, batch_size=5)
    assert batch[name].shape == (19, 4)
    expected = [encoded(name, ring(n)) for n in (3, 8, 1, 2, 5)]
    assert torch.equal(batch[name], torch.cat(expected))
    # A batch that is transformed as a whole gives the same, graph by graph.
    (plain,) = DataLoader(Rings(None), batch_size=5)
    whole = transform(plain)
    assert isinstance(whole, Batch) and torch.equal(whole[name], batch[name])


@EACH
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_total(name, transform, n):
    out = transform(Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=n))
    assert out[name].shape == (n, 4) and out[name].isfinite().all()


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support", "ignore:Sparse invariant checks")
@pytest.mark.parametrize("form", ["edge_index", "EdgeIndex", "SparseTensor or csr", "coo", "csc"])
def test_forms_of_adjacency(form):
    """Weighted and directed, so that neither weights nor directions may be lost."""
    edge_index = torch.tensor([[0, 1, 2, 2, 0], [1, 0, 0, 1, 2]])
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    data = Data(edge_index=edge_index, edge_weight=weight, num_nodes=3)
    adjacency = torch.sparse_coo_tensor(edge_index.flip(0), weight, (3, 3))
    given = {
        "edge_index": data,
        "EdgeIndex": Data(
            edge_index=EdgeIndex(edge_index, sparse_size=(3, 3)), edge_weight=weight, num_nodes=3
        ),
        "SparseTensor or csr": ToSparseTensor(attr="edge_weight")(data),
        "coo": Data(adj_t=adjacency, num_nodes=3),
        "csc": Data(adj_t=adjacency.to_sparse_csc(), num_nodes=3),
    }[form]
    # 0 goes to 1 with 1/6 and to 2 with 5/6, 1 to 0, 2 to 0 with 3/7 and to 1 with 4/7.
    walks = AddRandomWalkPE(2)(given).random_walk_pe
    expected = torch.tensor([[0, 1 / 6 + 5 / 6 * 3 / 7], [0, 1 / 6], [0, 5 / 14]])
    torch.testing.assert_close(walks, expected)
    torch.testing.assert_close(
        AddLaplacianEigenvectorPE(2)(given).laplacian_eigenvector_pe,
        laplacian_eigenvectors(SparseGraph.from_edge_index(edge_index), 2, edge_weight=weight),
    )


def test_weights_of_one_column_and_integers():
    column = ring(4, edge_weight=torch.arange(1.0, 9).view(-1, 1))
    whole = ring(4, edge_weight=torch.arange(1, 9))
    assert torch.equal(AddRandomWalkPE(3)(column).random_walk_pe, AddRandomWalkPE(3)(whole).random_walk_pe)
    with pytest.raises(ValueError, match="not negative"):
        AddRandomWalkPE(3)(ring(4, edge_weight=-torch.ones(8)))


def test_sinusoidal_of_positions():
    pos = torch.rand(7, 2)
    assert torch.equal(AddSinusoidalPE(8)(ring(7, pos=pos)).sinusoidal_pe, sinusoidal(pos, 8))
    with pytest.raises(ValueError, match="positions"):
        AddSinusoidalPE(8)(ring(7, pos=torch.rand(7, 2, 2)))


def test_the_graph_is_that_of_the_data_whatever_attention_uses():
    data = ring(6)
    data.attention_graph = CompleteGraph(6)
    assert torch.equal(
        AddLaplacianEigenvectorPE(4)(data).laplacian_eigenvector_pe,
        encoded("laplacian_eigenvector_pe", data),
    )


def test_random_sign():
    data = ring(9)
    fixed = AddLaplacianEigenvectorPE(6)(data).laplacian_eigenvector_pe
    flipped = AddLaplacianEigenvectorPE(6, random_sign=True)
    seen = {tuple((flipped(data).laplacian_eigenvector_pe * fixed).sum(0).sign().tolist()) for _ in range(9)}
    assert len(seen) > 1


def test_compose_repr_and_functional_name():
    both = Compose([AddRandomWalkPE(3), AddSinusoidalPE(2), AddLaplacianEigenvectorPE(1)])
    data = both(ring(5))
    assert (
        data.random_walk_pe.size(1) + data.sinusoidal_pe.size(1) + data.laplacian_eigenvector_pe.size(1) == 6
    )
    assert [repr(t) for t in both.transforms] == [
        "AddRandomWalkPE(walk_length=3, attr_name='random_walk_pe')",
        "AddSinusoidalPE(dim=2, attr_name='sinusoidal_pe')",
        "AddLaplacianEigenvectorPE(k=1, attr_name='laplacian_eigenvector_pe', random_sign=False)",
    ]
    from torch.utils.data import IterDataPipe
    from torch.utils.data.datapipes.iter import IterableWrapper

    pipe = IterableWrapper([ring(5)])
    assert isinstance(pipe, IterDataPipe)
    (piped,) = pipe.add_random_walks(3).add_laplacian_eigenvectors(2).add_sinusoidal(2)
    assert torch.equal(piped.random_walk_pe, data.random_walk_pe)
    # PyG's own names still mean PyG's transforms.
    (theirs,) = IterableWrapper([ring(5)]).add_random_walk_pe(walk_length=3)
    torch.testing.assert_close(theirs.random_walk_pe, data.random_walk_pe)


def test_same_numbers_as_pyg_where_pyg_is_right():
    data = ring(9, x=torch.randn(9, 2))
    data.edge_index = torch.cat([data.edge_index, torch.tensor([[0, 4], [4, 0]])], dim=1)
    theirs = torch_geometric.transforms.AddRandomWalkPE(5)(data).random_walk_pe
    torch.testing.assert_close(AddRandomWalkPE(5)(data).random_walk_pe, theirs)
    theirs = torch_geometric.transforms.AddLaplacianEigenvectorPE(3, is_undirected=True)(data)
    ours = AddLaplacianEigenvectorPE(3)(data).laplacian_eigenvector_pe
    torch.testing.assert_close(ours.abs(), theirs.laplacian_eigenvector_pe.abs(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [AddLaplacianEigenvectorPE, AddRandomWalkPE, AddSinusoidalPE])
def test_bad_input(kind):
    with pytest.raises(ValueError, match="at least 0"):
        kind(-1)
    for wrong in (2.0, "2", None, True):
        with pytest.raises(TypeError, match="must be an int"):
            kind(wrong)
    with pytest.raises(TypeError, match="HeteroData"):
        kind(2)(HeteroData())
    if kind is not AddSinusoidalPE:
        with pytest.raises(ValueError, match="edge_index"):
            kind(2)(Data(num_nodes=3))


def two_paths(**more) -> Batch:
    edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    return Batch.from_data_list([Data(edge_index=edge_index, x=torch.zeros(3, 1), **more) for _ in range(2)])


def test_a_batch_is_encoded_as_it_is_now():
    """Not as it was when its graphs were put together."""
    walks = AddRandomWalkPE(2)
    looped = torch_geometric.transforms.AddSelfLoops()(two_paths())
    # The ends stay or go with 1/2 each, the middle stays or goes either way with 1/3 each.
    path = torch.tensor([[1 / 2, 1 / 4 + 1 / 6], [1 / 3, 1 / 9 + 2 / 6], [1 / 2, 1 / 4 + 1 / 6]])
    torch.testing.assert_close(walks(looped).random_walk_pe, path.repeat(2, 1))

    weighted = two_paths()
    weighted.edge_weight = torch.tensor([1.0, 3, 1, 1] * 2)
    expected = torch.tensor([[0, 3 / 4], [0, 1], [0, 1 / 4]])
    torch.testing.assert_close(walks(weighted).random_walk_pe, expected.repeat(2, 1))

    cut = two_paths()
    cut.edge_index = cut.edge_index[
        :, :3
    ]  # 0 and 1 joined both ways, 1 to 2 one way; the second path has none
    expected = torch.tensor([[0, 1 / 2], [0, 1 / 2], [0, 0], [0, 0], [0, 0], [0, 0]])
    torch.testing.assert_close(walks(cut).random_walk_pe, expected)

    placed = two_paths()
    placed.pos = torch.arange(6.0) + 10
    assert torch.equal(AddSinusoidalPE(2)(placed).sinusoidal_pe, sinusoidal(placed.pos, 2))

    part = two_paths().subgraph(torch.tensor([0, 1, 3, 4]))
    assert torch.equal(walks(part).random_walk_pe, torch.tensor([[0.0, 1.0]]).repeat(4, 1))

    # Nodes of two graphs in turn, put together by hand.
    mixed = Batch(batch=torch.tensor([0, 1, 0, 1]), edge_index=torch.tensor([[0, 2, 1], [2, 0, 3]]))
    expected = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert torch.equal(walks(mixed).random_walk_pe, expected)
    counted = AddSinusoidalPE(2)(mixed).sinusoidal_pe
    assert torch.equal(counted, sinusoidal(torch.tensor([0, 0, 1, 1]), 2))
    mixed.edge_index = torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match="between the graphs"):
        walks(mixed)


@pytest.mark.parametrize("weight", [torch.rand(4, 2), torch.rand(3), [1.0] * 4])
def test_edge_weights_that_do_not_fit(weight):
    data = two_paths()[0]
    data.edge_weight = weight
    with pytest.raises(ValueError, match=r"`data\.edge_weight` must have shape \[4\]"):
        AddRandomWalkPE(2)(data)


def test_positions_that_do_not_fit():
    with pytest.raises(ValueError, match=r"`data\.pos` must have 3 rows"):
        AddSinusoidalPE(4)(Data(x=torch.zeros(3, 1), pos=torch.zeros(2, 2)))


@EACH
def test_a_batch_comes_apart_with_its_encodings(name, transform):
    graphs = [ring(n, x=torch.randn(n, 2)) for n in (3, 8, 1, 2)]
    batch = Batch.from_data_list(graphs)
    out = transform(batch)
    for got, given in zip(out.to_data_list(), graphs):
        assert torch.equal(got[name], encoded(name, given)) and torch.equal(got.x, given.x)
        assert torch.equal(got.edge_index, given.edge_index)
    assert torch.equal(out[1][name], encoded(name, graphs[1]))
    assert name not in batch._slice_dict and name not in batch._inc_dict and name not in batch[0]
    again = Batch.from_data_list(out.to_data_list())
    assert torch.equal(again[name], out[name])
    # Without features the encoding is all there is.
    bare = Batch.from_data_list([ring(n) for n in (3, 8)])
    for got, n in zip(type(transform)(4, attr_name=None)(bare).to_data_list(), (3, 8)):
        assert torch.equal(got.x, encoded(name, ring(n)))


@pytest.mark.parametrize("kind", [AddLaplacianEigenvectorPE, AddRandomWalkPE, AddSinusoidalPE])
def test_names(kind):
    for wrong in (3, b"pe", True, ("pe",)):
        with pytest.raises(TypeError, match="`attr_name` must be a str or None"):
            kind(2, wrong)
    taken = ["", "_store", "x", "pos", "edge_index", "edge_attr", "edge_weight", "adj_t", "batch", "ptr"]
    # In a batch PyG adds to these, or puts them side by side.
    taken += ["num_nodes", "keys", "to", "face", "pe_index", "pe_batch"]
    for wrong in taken:
        with pytest.raises(ValueError, match="`attr_name` must be a name"):
            kind(2, wrong)
    named = kind(2, "where")
    once = named(ring(5, label=torch.tensor([1]), name="ring"))
    twice = kind(3, "where")(once)  # a new encoding takes the place of an old one
    assert once.where.shape == (5, 2) and twice.where.shape == (5, 3)
    for other in ("label", "name"):
        with pytest.raises(ValueError, match=f"`data.{other}` has"):
            kind(2, other)(once)


def test_random_sign_is_a_bool():
    with pytest.raises(TypeError, match="random_sign"):
        AddLaplacianEigenvectorPE(2, random_sign="no")


@pytest.mark.parametrize(
    "batch", [torch.zeros(4, dtype=torch.int64), torch.zeros(3), torch.tensor([0, -1, 0]), [0, 0, 0]], ids=str
)
@pytest.mark.parametrize("kind", [AddLaplacianEigenvectorPE, AddRandomWalkPE, AddSinusoidalPE])
def test_a_batch_that_does_not_fit(kind, batch):
    with pytest.raises(ValueError, match=r"`data\.batch` must"):
        kind(2)(ring(3, x=torch.zeros(3, 1), batch=batch))
