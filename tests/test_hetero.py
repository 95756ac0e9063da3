"""Whole models on heterogeneous graphs, on sampled batches and on real collections of graphs."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import Batch, HeteroData
from torch_geometric.datasets import TUDataset
from torch_geometric.utils import degree, k_hop_subgraph, trim_to_layer

from graphattn import CompleteGraph, as_graph
from graphattn.nn import GPSConv, GraphMultiheadAttention, GraphTransformer, TransformerConv

WRITES, WRITTEN, CITES = (
    ("author", "writes", "paper"),
    ("paper", "written_by", "author"),
    ("paper", "cites", "paper"),
)


@pytest.fixture(autouse=True)
def one_thread():
    """Hundreds of small steps: a second thread only waits for its turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def library():
    """Papers whose class shows only in what their authors are like, and noise everywhere else."""
    torch.manual_seed(4)
    data = HeteroData()
    papers, authors, classes = 150, 60, 3
    field = torch.arange(authors) % classes
    data["author"].x = F.one_hot(field, 5).float() + 0.5 * torch.randn(authors, 5)
    data["paper"].x = torch.randn(papers, 4)
    data["paper"].y = torch.arange(papers) % classes
    same_field = torch.stack(
        [torch.randint(authors // classes, (papers,)) * classes + data["paper"].y for _ in range(3)]
    )
    data[WRITES].edge_index = torch.stack([same_field.flatten(), torch.arange(papers).repeat(3)])
    data[WRITTEN].edge_index = data[WRITES].edge_index.flip(0)
    data[CITES].edge_index = torch.randint(papers, (2, 200))
    data["paper"].train = torch.rand(papers) < 0.6
    return data


class Homogeneous(nn.Module):
    """For `to_hetero`: written for one node type and one edge type."""

    def __init__(self, conv, width=16):
        super().__init__()
        self.first, self.second = conv((-1, -1), width, heads=2), conv((-1, -1), 3, heads=2, concat=False)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Stacked(nn.Module):
    """The same with `HeteroConv`, one layer for each edge type."""

    def __init__(self, conv, edge_types, width=16):
        super().__init__()
        self.first = pyg.HeteroConv({e: conv((-1, -1), width, heads=2) for e in edge_types})
        self.second = pyg.HeteroConv({e: conv((-1, -1), 3, heads=2, concat=False) for e in edge_types})

    def forward(self, x, edge_index):
        x = {name: h.relu() for name, h in self.first(x, edge_index).items()}
        return self.second(x, edge_index)


def hetero_model(kind, conv, data):
    if kind == "HeteroConv":
        return Stacked(conv, data.edge_types)
    return pyg.to_hetero(Homogeneous(conv), data.metadata())


@pytest.mark.parametrize("kind", ["HeteroConv", "to_hetero"])
def test_papers_are_classified_by_their_authors(kind):
    data = library()
    models = [hetero_model(kind, conv, data) for conv in (TransformerConv, pyg.TransformerConv)]
    for model in models:
        model(data.x_dict, data.edge_index_dict)  # widths are read off the first call
    models[1].load_state_dict(models[0].state_dict())
    losses = [], []
    for model, seen in zip(models, losses):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(25):
            optimizer.zero_grad()
            logits = model(data.x_dict, data.edge_index_dict)["paper"]
            loss = F.cross_entropy(logits[data["paper"].train], data["paper"].y[data["paper"].train])
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # the same training, step by step
    assert losses[0][:5] == pytest.approx(losses[1][:5], rel=1e-4)
    right = models[0](data.x_dict, data.edge_index_dict)["paper"].argmax(1) == data["paper"].y
    assert right[~data["paper"].train].float().mean() > 0.85  # a third by guessing


def test_multihead_attention_to_hetero():
    data = library()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.attention = pyg.Linear(-1, 8), GraphMultiheadAttention(8, 2)

        def forward(self, x, edge_index):
            return self.attention(self.lin(x), edge_index)

    model = pyg.to_hetero(Model(), data.metadata())
    out = model(data.x_dict, data.edge_index_dict)
    papers, authors = model.lin.paper(data["paper"].x), model.lin.author(data["author"].x)
    layers = model.attention
    written = layers["author__writes__paper"](papers, data[WRITES].edge_index, authors)
    cited = layers["paper__cites__paper"](papers, data[CITES].edge_index)
    torch.testing.assert_close(out["paper"], written + cited)


@pytest.mark.field_report("B88")
def test_node_and_edge_types_without_members():
    data = library()
    model = hetero_model("HeteroConv", TransformerConv, data)
    expected = model(data.x_dict, data.edge_index_dict)
    edges = {**data.edge_index_dict, CITES: torch.empty(2, 0, dtype=torch.int64)}
    out = model(data.x_dict, edges)
    assert out["paper"].shape == (150, 3) and out["paper"].isfinite().all()
    assert not torch.equal(out["paper"], expected["paper"])
    nobody = {"paper": data["paper"].x, "author": torch.empty(0, 5)}
    edges = {
        CITES: data[CITES].edge_index,
        WRITES: torch.empty(2, 0).long(),
        WRITTEN: torch.empty(2, 0).long(),
    }
    out = model(nobody, edges)
    assert out["author"].shape == (0, 3) and out["paper"].isfinite().all()


# --- sampled batches ------------------------------------------------------------------------------------


def sampled(edge_index, seeds, hops, num_nodes):
    """What a neighbour sampler that keeps every neighbour returns: nodes and edges hop by hop, seeds first."""
    nodes, edges = seeds.tolist(), []
    counts, edge_counts, frontier = [len(nodes)], [], seeds.tolist()
    for _ in range(hops):
        new, into = [], []
        for target in frontier:
            for e in (edge_index[1] == target).nonzero().flatten().tolist():
                source = int(edge_index[0, e])
                if source not in nodes:
                    nodes.append(source)
                    new.append(source)
                into.append((nodes.index(source), nodes.index(target)))
        edges += into
        counts.append(len(new))
        edge_counts.append(len(into))
        frontier = new
    return torch.tensor(nodes), torch.tensor(edges).t(), counts, edge_counts


class Deep(nn.Module):
    def __init__(self, hops):
        super().__init__()
        self.convs = nn.ModuleList(TransformerConv(6, 3, heads=2) for _ in range(hops))

    def forward(self, x, edge_index, node_counts=None, edge_counts=None):
        for i, conv in enumerate(self.convs):
            if node_counts is not None:
                x, edge_index, _ = trim_to_layer(i, node_counts, edge_counts, x, edge_index)
            x = conv(x, edge_index)
        return x


@pytest.mark.field_report("B108")
def test_a_sampled_batch_gives_the_seeds_their_rows_of_the_whole_graph():
    edge_index, x = torch.randint(60, (2, 150)), torch.randn(60, 6).double()
    model, seeds = Deep(3).double(), torch.tensor([7, 31, 2, 55])
    expected = model(x, edge_index)[seeds]
    nodes, edges, node_counts, edge_counts = sampled(edge_index, seeds, 3, 60)
    assert len(nodes) < 60 and edges.size(1) < 150
    torch.testing.assert_close(model(x[nodes], edges)[:4], expected)
    trimmed = model(x[nodes], edges, node_counts, edge_counts)
    torch.testing.assert_close(trimmed[:4], expected)
    assert len(trimmed) < len(nodes)  # the layers did work on less
    subset, induced, mapping, _ = k_hop_subgraph(seeds, 3, edge_index, relabel_nodes=True, num_nodes=60)
    torch.testing.assert_close(model(x[subset], induced)[mapping], expected)


def test_a_bipartite_block_gives_its_targets_their_rows():
    edge_index, x = torch.randint(40, (2, 120)), torch.randn(40, 8).double()
    for layer in (TransformerConv(8, 4, heads=2).double(), GraphMultiheadAttention(8, 2).double()):
        targets = torch.tensor([3, 30, 11])
        into = torch.isin(edge_index[1], targets)
        sources, source = edge_index[0, into].unique(return_inverse=True)
        target = (edge_index[1, into][:, None] == targets).long().argmax(1)
        block = torch.stack([source, target])
        out = layer((x[sources], x[targets]), block)
        torch.testing.assert_close(out, layer(x, edge_index)[targets])


# --- collections of graphs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mutag(tmp_path_factory):
    """188 molecules; the raw files are copied, because PyG writes beside them."""
    if "GRAPHATTN_DATA" not in os.environ:
        pytest.skip("set GRAPHATTN_DATA to a folder with the real data")
    root = tmp_path_factory.mktemp("tudataset")
    shutil.copytree(Path(os.environ["GRAPHATTN_DATA"], "tudataset/MUTAG/raw"), root / "MUTAG/raw")
    dataset = TUDataset(root, "MUTAG")
    assert (len(dataset), dataset.num_features, dataset.num_classes) == (188, 7, 2)
    return dataset


class Pooled(nn.Module):
    """Graphs in, one row of scores for each out. Attention averages, so atoms are told their degree."""

    def __init__(self, kind):
        super().__init__()
        self.kind, width = kind, 16
        if kind == "GPS":
            self.lin, self.head = nn.Linear(7 + 4, width), nn.Linear(width, 2)
            self.body = GPSConv(width, TransformerConv(width, 8, heads=2), heads=2, norm="layer_norm")
        else:
            self.body = GraphTransformer(7, width, 2, num_layers=2, heads=2, encoding_channels=4)

    def forward(self, data):
        bonds = F.one_hot(degree(data.edge_index[1], data.num_nodes, dtype=torch.int64) - 1, 4).float()
        if self.kind == "GPS":
            x = self.lin(torch.cat([data.x, bonds], dim=1))
            x = self.head(self.body(x, data.edge_index, data.batch))
        else:
            graph = CompleteGraph.from_batch(data.batch) if self.kind == "complete" else data.edge_index
            x = self.body(data.x, graph, bonds)
        return pyg.global_mean_pool(x, data.batch, size=data.num_graphs)


@pytest.mark.parametrize("kind", ["GPS", "edges", "complete"])
def test_molecules_are_classified(mutag, kind):
    order = torch.randperm(188, generator=torch.Generator().manual_seed(0)).tolist()
    train = [Batch.from_data_list([mutag[i] for i in order[k : k + 35]]) for k in range(0, 140, 35)]
    test = [mutag[i] for i in order[140:]]
    model = Pooled(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(20):
        for batch in train:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), batch.y).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        together = model(Batch.from_data_list(test))
        alone = torch.cat([model(Batch.from_data_list([data])) for data in test])
    labels = torch.cat([data.y for data in test])
    assert labels.bincount().max() == 27  # of 48: what always the same answer would reach
    assert (together.argmax(1) == labels).float().mean() > 0.7
    if kind != "GPS":  # whose norm is over all nodes of a batch
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_graphs_reused_across_layers(mutag):
    batch = Batch.from_data_list(list(mutag[:20]))
    graph = as_graph(batch.edge_index, num_nodes=batch.num_nodes)
    assert as_graph(batch.edge_index, num_nodes=batch.num_nodes) is graph
    model = GraphTransformer(7, 16, 2, num_layers=2, heads=2)
    torch.testing.assert_close(model(batch.x, batch.edge_index), model(batch.x, graph))
    torch.testing.assert_close(model(batch.x, batch), model(batch.x, graph))
