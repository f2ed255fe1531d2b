"""What the speed of this repo is measured against: a plain GPT of nanoGPT's form, and transformers'
Llama, at four shapes.

The idea: a peer does the same work in the way that most people know. The GPT's layers have as many
weights as ours (8/3 of the width three times, or 4 twice); transformers' model is ours weight for
weight.

Usage:
    model, loss = ours(SHAPES['125m'])          # or PEERS['transformers'](SHAPES['125m'])
    step = training_step(model, loss, tokens)   # forward, backward, AdamW
"""
from statistics import mean

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import LM, ModelConfig
from retrofit import sample_recurrence
from tools.timing import apart

SHAPES = {
    'toy': dict(vocab_size=257, n_layer=8, n_embd=128, n_head=4, ffn_dim=352, context=64),
    '125m': dict(vocab_size=49152, n_layer=12, n_embd=768, n_head=12, ffn_dim=2048, context=512),
    '30m': dict(vocab_size=49152, n_layer=8, n_embd=512, n_head=8, ffn_dim=1408, context=512),
    '360m': dict(vocab_size=49152, n_layer=32, n_embd=960, n_head=15, ffn_dim=2560, context=2048),
}
BATCH = {'toy': 32, '30m': 4, '125m': 4}           # sequences of a step


class PlainBlock(nn.Module):
    def __init__(self, C, n_head):
        super().__init__()
        self.n_head = n_head
        self.ln1, self.ln2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
        self.qkv, self.o = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.up, self.down = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2)
                   for t in self.qkv(self.ln1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)             # (B, H, T, hd)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln2(x))))                      # (B, T, C)


class PlainGPT(nn.Module):
    def __init__(self, vocab_size, n_layer, n_embd, n_head, context, **_):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, n_embd), nn.Embedding(context, n_embd)
        self.layers = nn.ModuleList(PlainBlock(n_embd, n_head) for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd, bias=False)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places.weight[:tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def ours(shape):
    "A model, and the function of tokens that is its loss."
    model = LM(ModelConfig(**shape))
    return model, lambda tokens: model(tokens, tokens)


def plain(shape):
    model = PlainGPT(**shape)
    return model, lambda tokens: model(tokens, tokens)


def transformers(shape):
    from transformers import LlamaConfig, LlamaForCausalLM
    s = shape
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=s['vocab_size'], num_hidden_layers=s['n_layer'], hidden_size=s['n_embd'],
        num_attention_heads=s['n_head'], num_key_value_heads=s.get('n_kv_head'),
        intermediate_size=s['ffn_dim'], max_position_embeddings=s['context'],
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None))
    return model, lambda tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss


PEERS = dict(transformers=transformers, plain=plain)


def random_tokens(shape, batch, device='cpu'):
    return torch.randint(shape['vocab_size'], (batch, shape['context']), device=device)


def half(device):
    "bfloat16 on a GPU, as in training."
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda')


def training_step(model, loss, tokens):
    "A function that does forward, backward and an update, on the tokens' device."
    model.to(tokens.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        with half(tokens.device):
            value = loss(tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


def random_recurrences(model, tokens):
    "(steps with a random r, as many with r = 5, the ratio of their FLOPs)."
    drawn = [sample_recurrence(4, step, seed=0) for step in range(12)]

    def steps(rs):
        for r in rs:
            with half(tokens.device):
                loss = model(tokens, tokens, r=r, backprop_depth=8)
            loss.backward()
            model.zero_grad()
    flops = [mean(model.flops_per_token(r=r, backprop_depth=8) for r in rs) for rs in (drawn, [5])]
    return lambda: steps(drawn), lambda: steps([5] * len(drawn)), flops[0] / flops[1]


# ------------------------------------------------------------------------------------ peak memory

def peak(name, who):
    "Bytes that two training steps need at most, above what Python and torch take."
    return apart(peak_here, name, who)


def peak_here(name, who):
    def two_steps(shape, batch):
        model, loss = dict(PEERS, ours=ours)[who](shape)
        step = training_step(model, loss, random_tokens(shape, batch))
        step(), step()
        return model
    two_steps(SHAPES['toy'] | dict(n_layer=1, n_embd=32, ffn_dim=32), 1)
    before = most_memory()
    model = two_steps(SHAPES[name], BATCH[name])            # noqa: F841
    return most_memory() - before


def most_memory():
    try:            # Linux hands ru_maxrss on from process to process, but not this
        lines = open('/proc/self/status').readlines()
        return next(int(line.split()[1]) for line in lines if line.startswith('VmHWM')) * 1024
    except OSError:
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss       # bytes on a Mac
