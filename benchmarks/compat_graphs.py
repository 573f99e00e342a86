"""Graphs: layers of torch_geometric, on graphs of one size and of another in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from compat import Row, Training, trained
from torch import nn
from torch.nn import functional as F

TITLE = "Graphs"
FEATURES, CLASSES = 16, 5


def rows() -> Iterator[Row]:
    models = {"GCN": {}, "GraphSAGE": {}, "GIN": {}, "GAT": {"heads": 2}, "PNA": _pna(), "EdgeCNN": {}}
    for name, options in models.items():
        yield Row(f"{name}, nodes", ("torch_geometric",), partial(trained, partial(_nodes, name, options)))
    changing = partial(_nodes, "GraphSAGE", {}, changing=True)
    yield Row("GraphSAGE, as many edges as come", ("torch_geometric",), partial(trained, changing))
    yield Row("GIN, whole graphs", ("torch_geometric",), partial(trained, _graphs))
    yield Row("TransformerConv with edges' features", ("torch_geometric",), partial(trained, _transformer))
    yield Row("GATv2 with batch norm and JumpingKnowledge", ("torch_geometric",), partial(trained, _jumping))
    yield Row("GPSConv, local and global attention", ("torch_geometric",), partial(trained, _gps))
    yield Row("RGCNConv, several relations", ("torch_geometric",), partial(trained, _relations))
    yield Row("GAE, links", ("torch_geometric",), partial(trained, _links))


def _pna() -> dict[str, Any]:
    degrees = torch.tensor([0, 4, 8, 8, 4])
    return {"aggregators": ["mean", "max"], "scalers": ["identity", "attenuation"], "deg": degrees}


def graph(nodes: int, step: int, edges: int = 120) -> dict[str, torch.Tensor]:
    """No edge leads from a node to itself."""
    g = torch.Generator().manual_seed(step)
    sources = torch.randint(nodes, (edges,), generator=g)
    targets = (sources + torch.randint(1, nodes, (edges,), generator=g)) % nodes
    return {
        "x": torch.randn(nodes, FEATURES, generator=g),
        "edge_index": torch.stack([sources, targets]),
        "y": torch.randint(CLASSES, (nodes,), generator=g),
    }


def _training(model: nn.Module, call: Callable[[nn.Module, Any], torch.Tensor], batch: Any) -> Training:
    return Training(model, lambda model, b: F.cross_entropy(call(model, b), b["y"]), batch)


def _nodes(name: str, options: dict[str, Any], changing: bool = False) -> Training:
    from torch_geometric.nn import models

    net = getattr(models, name)(FEATURES, 32, 2, CLASSES, dropout=0.2, norm="batch_norm", **options)
    batch = (lambda k: graph(40, k, 140 - 10 * k)) if changing else partial(graph, 40)
    return _training(net, lambda model, b: model(b["x"], b["edge_index"]), batch)


class Whole(nn.Module):
    """A class for each graph of a batch."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GIN, global_add_pool

        self.net, self.pool = GIN(FEATURES, 32, 2, dropout=0.2), global_add_pool
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graphs: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.net(x, edges), graphs, size=4))


def _graphs() -> Training:
    """Data objects, put together by torch_geometric."""

    def batch(step: int) -> Any:
        from torch_geometric.data import Batch, Data

        parts = [graph(10, 4 * step + k, 30) for k in range(4)]
        return Batch.from_data_list([Data(**p | {"y": p["y"][:1]}) for p in parts]).to_dict()

    return _training(Whole(), lambda model, b: model(b["x"], b["edge_index"], b["batch"]), batch)


def _transformer() -> Training:
    from torch_geometric.nn import TransformerConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = TransformerConv(FEATURES, 16, heads=2, edge_dim=4, dropout=0.1, beta=True)
            self.two = TransformerConv(32, CLASSES, heads=1, edge_dim=4)

        def forward(self, x: torch.Tensor, edges: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
            return self.two(F.relu(self.one(x, edges, kinds)), edges, kinds)

    def batch(step: int) -> Any:
        b = graph(40, step)
        return b | {"kinds": torch.randn(120, 4, generator=torch.Generator().manual_seed(step))}

    return _training(Net(), lambda model, b: model(b["x"], b["edge_index"], b["kinds"]), batch)


def _jumping() -> Training:
    from torch_geometric.nn import GAT

    net = GAT(
        FEATURES, 32, 3, CLASSES, v2=True, heads=2, dropout=0.2, norm="batch_norm", jk="cat"
    )  # fmt: skip
    return _training(net, lambda model, b: model(b["x"], b["edge_index"]), partial(graph, 40))


def _gps() -> Training:
    from torch_geometric.nn import GINConv, GPSConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            feed = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, FEATURES))
            self.conv = GPSConv(FEATURES, GINConv(feed), heads=2, dropout=0.1)
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(x, edges))

    return _training(Net(), lambda model, b: model(b["x"], b["edge_index"]), partial(graph, 40))


def _relations() -> Training:
    from torch_geometric.nn import RGCNConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = RGCNConv(FEATURES, 16, 3), RGCNConv(16, CLASSES, 3)

        def forward(self, x: torch.Tensor, edges: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
            return self.two(F.relu(self.one(x, edges, kinds)), edges, kinds)

    def batch(step: int) -> Any:
        kinds = torch.randint(3, (120,), generator=torch.Generator().manual_seed(step))
        return graph(40, step) | {"kinds": kinds}

    return _training(Net(), lambda model, b: model(b["x"], b["edge_index"], b["kinds"]), batch)


def _links() -> Training:
    from torch_geometric.nn import GAE, SAGEConv

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = SAGEConv(FEATURES, 32), SAGEConv(32, 16)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return self.two(F.relu(self.one(x, edges)), edges)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden = model.encode(batch["x"], batch["edge_index"])
        return model.recon_loss(hidden, batch["edge_index"], batch["others"])

    return Training(
        GAE(Encoder()), loss, lambda k: graph(40, k) | {"others": graph(40, k + 50)["edge_index"]}
    )
