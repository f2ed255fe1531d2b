"""How fast is our model, and how much memory does it take? Each number stands beside a peer's.

The idea: seconds say little on another machine, ratios do. Ours and its peers take turns, so that
what else the machine does disturbs both; the median counts, with the middle half of the turns
beside it. The peers are transformers' Llama, which is ours weight for weight, and a plain GPT of
torch's own layers. Each benchmark runs in a process of its own. On a GPU steps are compiled too,
and their note says how much of the GPU's arithmetic they use (MFU).

Usage:
    nanodepth bench --out=docs/bench.md       # all of them, on what there is: 10 minutes
    nanodepth bench training memory           # some of them
"""
import gc
import platform
import re
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from nanodepth.common import losses
from nanodepth.common.errors import check_choice
from nanodepth.common.files import replace
from nanodepth.common.options import read
from nanodepth.engine import cost
from nanodepth.engine.hf import config_json
from nanodepth.engine.processes import peak_flops, pick_device
from nanodepth.model import LM, ModelConfig
from nanodepth.report.tables import columns

SHAPES = {
    'tiny': dict(vocab_size=257, n_layer=4, n_embd=32, n_head=2, ffn_dim=96, context=48),
    'toy': dict(vocab_size=257, n_layer=8, n_embd=128, n_head=4, ffn_dim=352, context=64),
    '125m': dict(vocab_size=49152, n_layer=12, n_embd=768, n_head=12, ffn_dim=2048, context=512),
    '360m': dict(vocab_size=49152, n_layer=32, n_embd=960, n_head=15, n_kv_head=5, ffn_dim=2560,
                 context=2048)}


# -------------------------------------------------------------------------------------------- peers

class PlainGPT(nn.Module):
    "torch's own layers, learned positions: as many weights as ours."

    def __init__(self, vocab_size, n_layer, n_embd, n_head, context, **_):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, n_embd)
        self.places = nn.Embedding(context, n_embd)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, dropout=0, activation='gelu',
                                       batch_first=True, norm_first=True, bias=False)
            for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd, bias=False)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        T = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(T, tokens.device)
        x = self.tokens(tokens) + self.places.weight[:T]                        # (B, T, C)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def transformers(shape):
    from transformers import LlamaConfig, LlamaForCausalLM
    theirs = config_json(ModelConfig(**shape), shape['n_layer'])
    return LlamaForCausalLM(LlamaConfig(**theirs, bos_token_id=None, eos_token_id=None))


MODELS = dict(ours=lambda shape: LM(ModelConfig(**shape)), transformers=transformers,
              plain=lambda shape: PlainGPT(**shape))


def random_tokens(shape, batch, device):
    return torch.randint(shape['vocab_size'], (batch, shape['context']), device=device)


# ------------------------------------------------------------------------------------------- timing

def clock(device, call):
    "Seconds of one call, after whatever the GPU still had to do."
    wait = getattr(torch, device.type).synchronize
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def race(what, device, turns, tokens, calls, note=lambda seconds: ''):
    """A row for each peer, (what, the peer's time over ours, its middle half, note). The calls take
    turns, the first turn not counted; each works on so many tokens."""
    rounds = [[clock(device, call) for call in calls.values()] for _ in range(turns + 1)]
    seconds = dict(zip(calls, zip(*rounds[1:])))
    mine = median(seconds['ours'])
    for peer, theirs in seconds.items():
        if peer != 'ours':
            ratios = [a / b for a, b in zip(theirs, seconds['ours'])]
            low, middle, high = quantiles(ratios, n=4)
            yield (f'{what}, {peer}', f'{middle:.3f}', f'{low:.3f} to {high:.3f}',
                   f'ours {mine:.4g} s, {peer} {median(theirs):.4g} s; '
                   f'{tokens / mine:,.0f} tokens a second{note(mine)}')


def training_step(model, tokens):
    "A function that does forward, backward and an update, on the tokens' device."
    model.to(tokens.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    on_gpu = tokens.device.type == 'cuda'

    def step():
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=on_gpu):
            loss = (model(input_ids=tokens, labels=tokens, use_cache=False).loss
                    if hasattr(model, 'generation_config') else model(tokens, tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


# --------------------------------------------------------------------------------------- benchmarks

def training(device, tiny):
    "A training step, forward, backward and AdamW; on a GPU also compiled, with its MFU."
    sizes = [('360m', 8, 10)] if device.type == 'cuda' else [('toy', 32, 30), ('125m', 4, 3)]
    for name, batch, turns in [('tiny', 2, 2)] if tiny else sizes:
        tokens = random_tokens(SHAPES[name], batch, device)
        with torch.device('meta'):
            flops = MODELS['ours'](SHAPES[name]).flops_per_token() * tokens.numel()
        peak = peak_flops(device)
        for form in ('eager', 'compiled') if device.type == 'cuda' else ('eager',):
            calls = {}
            for who, make in MODELS.items():
                model = make(SHAPES[name])
                calls[who] = training_step(model, tokens)
                if form == 'compiled':      # layer by layer, as train.py does it
                    losses.compile_piece(device.type)
                    for layer in getattr(model, 'layers', None) or model.model.layers:
                        layer.compile()
            yield from race(f'{name}: a step, {form}', device, turns, tokens.numel(), calls,
                            note=lambda s: f', MFU {flops / s / peak:.1%}' if peak else '')
            del calls, model
            gc.collect()


def memory(device, tiny):
    "The peak of a training step, and what --dry_run predicts."
    sizes = [('360m', 8)] if device.type == 'cuda' else [('125m', 4)]
    for name, batch in [('toy', 4)] if tiny else sizes:
        with torch.device('meta'):
            model = MODELS['ours'](SHAPES[name])
        wanted = cost.memory(model, batch * model.config.context, depth=model.config.n_layer,
                             device=device.type, width=2 if device.type == 'cuda' else 4)
        peaks = {who: apart(peak_of, name, batch, who, device) for who in MODELS}
        mine = max(1, peaks.pop('ours'))
        for peer, theirs in (peaks | dict(predicted=sum(wanted.values()))).items():
            yield (f'{name}: peak memory, {peer}', f'{theirs / mine:.3f}', '',
                   f'ours {mine / 1e9:.2f} GB, {peer} {theirs / 1e9:.2f} GB')


def peak_of(name, batch, who, device):
    "Bytes that two training steps need at most, above what Python and torch take."
    def two_steps(shape, batch):
        step = training_step(MODELS[who](shape), random_tokens(shape, batch, device))
        step()
        step()
    two_steps(SHAPES['tiny'], 1)
    before = most_memory(device)
    two_steps(SHAPES[name], batch)
    return most_memory(device) - before


def most_memory(device):
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated()
    # Linux alone; its ru_maxrss would count what the parent process had
    [line] = [line for line in open('/proc/self/status') if line.startswith('VmHWM')]
    return int(line.split()[1]) * 1024


@torch.no_grad()
def generating(device, tiny):
    "Greedy text against transformers' generate."
    n = 32
    sizes = ['360m'] if device.type == 'cuda' else ['toy', '125m']
    for name in ['tiny'] if tiny else sizes:
        model, peer = (MODELS[who](SHAPES[name]).eval().to(device)
                       for who in ('ours', 'transformers'))
        if device.type == 'cuda':
            model, peer = model.bfloat16(), peer.bfloat16()
        prompt = random_tokens(SHAPES[name] | dict(context=16), 1, device)
        theirs = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=n, min_new_tokens=n,
                      do_sample=False, pad_token_id=0)
        yield from race(f'{name}: {n} new tokens', device, 9, n, dict(
            ours=lambda: model.generate(prompt, n, temperature=0),
            transformers=lambda: peer.generate(prompt, **theirs)))


BENCHMARKS = {f.__name__: f for f in (training, memory, generating)}


# ----------------------------------------------------------------------------------------- the rest

def apart(call, *args):
    "call(*args) in a new process."
    with ProcessPoolExecutor(1, get_context('spawn')) as pool:
        return pool.submit(call, *args).result()


def rows_of(name, device, tiny):
    torch.manual_seed(0)
    device = pick_device(device)
    if device.type == 'cuda':
        torch.set_float32_matmul_precision('high')
        # as train.py has it; a growing cache is another matter (processes.pick_device)
        torch.backends.cuda.enable_cudnn_sdp(name == 'training')
    return list(BENCHMARKS[name](device, tiny))


def processor():
    info = Path('/proc/cpuinfo')
    names = re.findall(r'model name\s*: (.*)', info.read_text()) if info.exists() else []
    return names[0] if names else platform.machine()


@dataclass
class Options:
    WORDS = ['names']
    names: list[str] = field(default_factory=list)      # training, memory, generating; none: all
    device: str = 'auto'        # auto: cuda, else mps, else cpu
    tiny: bool = False          # a small model, to see that everything works
    out: Path | None = None     # write the table there too, such as docs/bench.md


def main(argv=None):
    options = read(Options, argv, __doc__)
    for name in options.names:
        check_choice('benchmark', name, BENCHMARKS)
    device = pick_device(options.device)
    machine = (torch.cuda.get_device_name(device) if device.type == 'cuda' else
               f'{processor()} ({torch.backends.cpu.get_cpu_capability()}), '
               f'{torch.get_num_threads()} threads')
    setting = f'{machine}, torch {torch.__version__}, Python {platform.python_version()}'
    table = [['what, against what', 'ratio', 'half of the turns', 'medians']]
    for name in tqdm(options.names or BENCHMARKS, unit='benchmark'):
        table += apart(rows_of, name, options.device, options.tiny)
    text = (f'# Speed\n\n`nanodepth bench` on {setting}, {time.strftime("%Y-%m-%d")}.\n'
            'The ratio is what the peer takes of our time (or memory), turn by turn: above 1, '
            f'we need less.\n\n{columns(table)}\n')
    print(text)
    if options.out:
        replace(options.out, text.encode())
