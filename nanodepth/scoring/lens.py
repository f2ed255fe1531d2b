"""The tuned lens: what a model would predict if it stopped after a layer. The stream after an early
layer is not yet in the form that the final norm and the head read. So a translator is trained for
each depth. Without translators, this is the logit lens.
Usage: lens = train_lens(model, loader, steps=250)
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from nanodepth.model import spans_in, unrolled


@torch.no_grad()
def streams_behind(model, tokens):
    """Return the stream after each layer: (D, B, T, C). Norm and head turn the stream at depth d
    into the prediction after d + 1 layers, which is the logit lens."""
    streams = []

    def tap(depth, part, x, update):
        if part == 'mlp':
            streams.append(x + update)
        return update
    model.hidden(tokens, tap=tap)
    return torch.stack(streams)


TOKENS_PER_STEP = 256       # the logits of a large vocabulary at all depths cost the most


class TunedLens(nn.Module):
    """The translators of all depths but the last one, which needs none. A translator is
    x + W x + b, and W and b begin at zero, where it is the logit lens. See "Do Depth-Grown Models
    Overcome the Curse of Depth?", section 4.1 and appendix B, and "From Growing to Looping",
    appendix E (after Belrose et al.)."""

    def __init__(self, depth, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(depth - 1, width, width))
        self.bias = nn.Parameter(torch.zeros(depth - 1, width))

    def translate(self, position, x):
        """Return x, the stream after the layer at a position (B, T, C), in the form of the last
        stream."""
        if position == len(self.bias):
            return x
        change = F.linear(x.to(self.weight.dtype), self.weight[position], self.bias[position])
        return (x + change).to(x.dtype)

    def forward(self, streams):
        "Translate the streams of all depths: (D, B, T, C)."
        return torch.stack([self.translate(position, x) for position, x in enumerate(streams)])


def divergence(logits, final):
    """Return KL(final || early), the mean over the tokens. `final` are log-probabilities, and
    `logits` are those of the early prediction."""
    early = logits.float().log_softmax(-1)
    return F.kl_div(early, final, log_target=True, reduction='sum') / final[..., 0].numel()


def train_lens(model, loader, steps=250, lr=1e-3, progress=False, batches=None):
    "Train and return a lens for a model, on some batches of a Loader (None: all) in turn."
    device = next(model.parameters()).device
    lens = TunedLens(len(unrolled(model.order)), model.config.n_embd).to(device)
    steps = steps if len(lens.bias) else 0          # one layer: nothing is early
    batches = batches or range(loader.n_batches)
    optimizer = torch.optim.Adam(lens.parameters(), lr=lr)      # (the papers name none)
    frozen = [p for p in model.parameters() if p.requires_grad]
    for p in frozen:
        # only the translators learn, but gradients pass through norm and head
        p.requires_grad_(False)
    try:
        for step in tqdm(range(steps), 'lens', unit='step', leave=False, disable=not progress):
            tokens, *_ = loader.batch(batches[step % len(batches)])
            streams = streams_behind(model, tokens.to(device))
            if model.config.vocab_size >= 16_384:
                drawn = torch.Generator().manual_seed(step)
                some = torch.randperm(tokens.numel(), generator=drawn)[:TOKENS_PER_STEP].to(device)
                streams = streams.flatten(1, 2)[:, some]
            final = model.head(model.norm(streams[-1])).float().log_softmax(-1)
            optimizer.zero_grad()
            for position, x in enumerate(streams[:-1]):     # one at a time: all logits are too many
                logits = model.head(model.norm(lens.translate(position, x)))
                loss = divergence(logits, final)
                (loss / len(lens.bias)).backward()
            for group in optimizer.param_groups:
                group['lr'] = lr * (1 - step / steps)
            optimizer.step()
    finally:
        for p in frozen:
            p.requires_grad_(True)
    return lens.eval()


@torch.no_grad()
def quality(model, lens, tokens, k=5):
    """Return how close each depth is to the final prediction: the KL divergence, and the overlap of
    the k likeliest tokens, (D,) each. lens=None: the logit lens."""
    streams = streams_behind(model, tokens)
    logits = model.head(model.norm(streams[-1]))
    final = logits.float().log_softmax(-1)
    best = logits.topk(k).indices[..., None, :]
    divergences, overlaps = [], []
    for stream in streams if lens is None else lens(streams):
        early = model.head(model.norm(stream))
        likeliest = early.topk(k).indices[..., None]                            # (B, T, k, 1)
        overlaps.append((likeliest == best).any(-1).float().mean())
        divergences.append(divergence(early, final))
    return torch.stack(divergences), torch.stack(overlaps)


def exit_at(model, position, lens=None):
    """Return a function tokens -> logits that stops after the layer at a position. In an ordinary
    model, an early exit is a prefix of the order."""
    @torch.no_grad()
    def answer(tokens):
        x = (model.hidden(tokens, order=model.order[:position + 1]) if not spans_in(model.order)
             else streams_behind(model, tokens)[position])
        return model.head(model.norm(x if lens is None else lens.translate(position, x)))
    answer.config, answer.parameters = model.config, model.parameters
    return answer
