"""A speech recognizer with CTC loss on sequences of unlike lengths, packed for the LSTM.

python speech.py [BUDGET]
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

BUDGET = sys.argv[1] if len(sys.argv) > 1 else None
SYMBOLS, STEPS = 20, 5
torch.manual_seed(7)


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Dropout(0.1))
        self.lstm = nn.LSTM(32, 32, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, SYMBOLS)

    def forward(self, features, lengths):
        packed = pack_padded_sequence(self.front(features), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return F.log_softmax(self.head(out), dim=-1)


def get_batch(k):
    lengths = torch.tensor([40, 33, 38, 25] if k % 2 else [40, 29, 36, 31])
    features = pad_sequence([torch.randn(n, 13) for n in lengths.tolist()], batch_first=True)
    return features, lengths, torch.randint(1, SYMBOLS, (4, 8)), torch.tensor([8, 7, 6, 5])


def loss_fn(model, batch):
    features, lengths, targets, sizes = batch
    return F.ctc_loss(model(features, lengths).transpose(0, 1), targets, lengths, sizes, zero_infinity=True)


model = Recognizer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batch = get_batch(0)
if BUDGET:
    import tightship

    step = tightship.fit(model, loss_fn, optimizer, batch, BUDGET, clip_norm=5.0)
for k in range(STEPS):
    if BUDGET:
        loss = step(batch)
    else:
        loss = loss_fn(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"step {k}: loss {loss.item()!r}")
    batch = get_batch(k + 1)
if BUDGET:
    used = step.measure()
    print(f"planned peak {used['planned_peak']} B, measured {used['measured_peak']} B", file=sys.stderr)
