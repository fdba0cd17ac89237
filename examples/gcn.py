r"""A graph network of PyTorch Geometric: 100 labelled digits name 1,697 others.

It needs `pip install -c constraints.txt torch-geometric`. There is one graph, whose nodes are the
samples: ranks share the nodes, and each has the whole graph.

geartrain fit examples/gcn.py --max-epochs 40 --seed 1
geartrain fit examples/gcn.py --max-epochs 40 --seed 1 --strategy ddp --devices 2 \
    --data.batch_size 50
"""

from __future__ import annotations

import copy

import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import from_scipy_sparse_matrix, to_undirected

import geartrain as gt


class DigitsGraph(gt.DataModule):
    """The digits of scikit-learn; each has an edge to its most similar ones.

    A batch is the graph with ``nodes``, the numbers of the batch's nodes.

    Args:
        batch_size: nodes in one batch of one process.
        neighbours: edges that each node adds.
    """

    def __init__(self, batch_size: int = 100, neighbours: int = 8) -> None:
        self.batch_size, self.neighbours = batch_size, neighbours

    def setup(self, stage: str) -> None:
        digits = load_digits()
        edges, _ = from_scipy_sparse_matrix(kneighbors_graph(digits.data, self.neighbours))
        self.graph = Data(
            x=torch.tensor(digits.data, dtype=torch.float32) / 16,
            y=torch.tensor(digits.target),
            edge_index=to_undirected(edges),
        )
        order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
        self.labelled, self.unlabelled = order[:100].tolist(), order[100:].tolist()

    def around(self, nodes: list[int]) -> Data:
        """Return the graph with these nodes; its tensors are not copied."""
        graph = copy.copy(self.graph)
        graph.nodes = torch.tensor(nodes)
        return graph

    def train_dataloader(self):
        return DataLoader(
            self.labelled, batch_size=self.batch_size, shuffle=True, collate_fn=self.around
        )

    def val_dataloader(self):
        return DataLoader(self.unlabelled, batch_size=1000, collate_fn=self.around)

    test_dataloader = predict_dataloader = val_dataloader


class GCN(gt.Module):
    """Two graph convolutions, from features ``[nodes, 64]`` to logits ``[nodes, 10]``.

    Args:
        hidden: features between the convolutions.
        lr: Adam's learning rate.

    Source: Kipf and Welling 2017, https://arxiv.org/abs/1609.02907
    """

    def __init__(self, hidden: int = 64, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr
        self.first, self.second = GCNConv(64, hidden), GCNConv(hidden, 10)
        self.dropout = nn.Dropout(0.5)

    def forward(self, graph: Data) -> torch.Tensor:
        hidden = functional.relu(self.first(graph.x, graph.edge_index))
        return self.second(self.dropout(hidden), graph.edge_index)

    def training_step(self, graph, batch_idx):
        loss = functional.cross_entropy(self(graph)[graph.nodes], graph.y[graph.nodes])
        # geartrain would count all nodes of the graph.
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(graph.nodes))
        return loss

    def validation_step(self, graph, batch_idx):
        right = self(graph)[graph.nodes].argmax(dim=1) == graph.y[graph.nodes]
        options = {"sync_dist": True, "batch_size": len(right)}
        self.log("val_acc", right.float().mean(), prog_bar=True, **options)

    test_step = validation_step

    def predict_step(self, graph, batch_idx):
        return self(graph)[graph.nodes].argmax(dim=1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=5e-4)


if __name__ == "__main__":
    gt.cli(GCN, DigitsGraph)
