"""How fast is our model, and how much memory does it take, beside transformers' Llama, which is
ours weight for weight?

The idea: seconds say little on another machine, ratios do. Both take turns, so that what else the
machine does disturbs both; the median counts, and the first turn does not. A token of text reads
every weight once, so its best is what a plain copy reads and writes in that time. On a GPU a
training step is compiled too, its best is the GPU's arithmetic (MFU), and the peak of memory is
noted.

Usage:
    nanodepth bench --out=out/bench.md        # minutes
"""
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from nanodepth.common import losses
from nanodepth.common.files import refuse_unwritable, replace
from nanodepth.common.options import read
from nanodepth.model import LM, ModelConfig
from nanodepth.models.hf import answer_of, config_json
from nanodepth.report.tables import columns
from nanodepth.scoring.likelihoods import log_likelihoods
from nanodepth.text.primitives import few_shot
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.training.processes import peak_flops, pick_device

SHAPES = {
    'tiny': dict(vocab_size=257, n_layer=4, n_embd=32, n_head=2, ffn_dim=96, context=48),
    'toy': dict(vocab_size=257, n_layer=8, n_embd=128, n_head=4, ffn_dim=352, context=64),
    '125m': dict(vocab_size=49152, n_layer=12, n_embd=768, n_head=12, ffn_dim=2048, context=512),
    '360m': dict(vocab_size=49152, n_layer=32, n_embd=960, n_head=15, n_kv_head=5, ffn_dim=2560,
                 context=2048)}


def both(shape, device):
    "{'ours', 'transformers': a model of this shape}."
    from transformers import LlamaConfig, LlamaForCausalLM
    config = ModelConfig(**shape)
    theirs = LlamaForCausalLM(LlamaConfig(**config_json(config, config.n_layer),
                                          bos_token_id=None, eos_token_id=None))
    return dict(ours=LM(config).to(device), transformers=theirs.to(device))


def timed(call, device):
    "The seconds of a call, to the end of what it left to the device."
    wait = getattr(torch, device.type).synchronize
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def copied_bytes(device, n=2 ** 26):
    "How many bytes a second a plain copy of 256 MB reads and writes: the best of ten."
    old = torch.ones(n, device=device)
    new = torch.empty_like(old)
    return 2 * old.nbytes / min(timed(lambda: new.copy_(old), device) for _ in range(10))


def race(what, device, turns, tokens, calls, flops=0, read=0):
    """A line of the table: each call's median, the ratio, and of ours the share of its best and the
    memory on a GPU. read: the bytes that a call reads."""
    seconds, peaks = {name: [] for name in calls}, {}
    for _ in range(turns + 1):
        for name, call in calls.items():
            if device.type == 'cuda':
                torch.cuda.reset_peak_memory_stats()
            seconds[name].append(timed(call, device))
            peaks[name] = torch.cuda.max_memory_allocated() if device.type == 'cuda' else 0
    mine, theirs = (median(seconds[name][1:]) for name in ('ours', 'transformers'))
    peak = copied_bytes(device) if read else peak_flops(device)
    return [what, f'{theirs / mine:.3f}', f'{mine:.4g}', f'{theirs:.4g}', f'{tokens / mine:,.0f}',
            f'{(read or flops) / mine / peak:.1%}' if peak and (read or flops) else '',
            ' / '.join(f'{n / 1e9:.2f}' for n in peaks.values() if n)]


def training_step(model, tokens):
    "A function that does forward, backward and an update by AdamW."
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    theirs = hasattr(model, 'generation_config')

    def step():
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            loss = (model(input_ids=tokens, labels=tokens, use_cache=False).loss if theirs
                    else model(tokens, tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


def training(name, batch, turns, device):
    shape = SHAPES[name]
    tokens = torch.randint(shape['vocab_size'], (batch, shape['context']), device=device)
    models = both(shape, device)
    steps = {who: training_step(model, tokens) for who, model in models.items()}
    flops = models['ours'].flops_per_token() * tokens.numel()
    yield race(f'{name}: a training step', device, turns, tokens.numel(), steps, flops)
    if device.type == 'cuda':       # layer by layer, as train.py does it
        losses.compile_piece('cuda')
        for layer in [*models['ours'].layers, *models['transformers'].model.layers]:
            layer.compile()
        yield race(f'{name}: compiled', device, turns, tokens.numel(), steps, flops)


def readers(name, device):
    "(ours, transformers' Llama) to read and write with; on a GPU in bfloat16."
    models = [model.eval() for model in both(SHAPES[name], device).values()]
    return [model.bfloat16() for model in models] if device.type == 'cuda' else models


@torch.no_grad()
def generating(name, device, n=32):
    "Greedy text, with a KV cache."
    ours, theirs = readers(name, device)
    prompt = torch.randint(257, (1, 16), device=device)
    how = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=n, min_new_tokens=n,
               do_sample=False, pad_token_id=0)
    # a token reads every matrix and norm; of the embedding one row, unless it is the head too
    weights = sum(p.nbytes for p in {*ours.parameters()} - ({ours.embed.weight}
                                                           - {ours.head.weight}))
    calls = dict(ours=lambda: ours.generate(prompt, n, temperature=0),
                 transformers=lambda: theirs.generate(prompt, **how))
    yield race(f'{name}: {n} new tokens', device, 9, n, calls, read=n * weights)


def scoring(name, device, n=64):
    "Questions as evaluate asks them: each option's likelihood after its prompt."
    ours, theirs = readers(name, device)
    tokenizer = get_tokenizer('bytes')
    questions = few_shot('toy_assign', n, shots=1, depth=1)
    tokens = sum(len(question.prompt) for question in questions)
    yield race(f'{name}: {n} questions', device, 5, tokens, dict(
        ours=lambda: log_likelihoods(ours, tokenizer, questions),
        transformers=lambda: log_likelihoods(answer_of(theirs), tokenizer, questions)))


@dataclass
class Options:
    device: str = 'auto'        # auto: cuda, else mps, else cpu
    tiny: bool = False          # a small model, to see that everything works
    out: Path | None = None     # write the table there too, such as out/bench.md


def main(argv=None):
    options = read(Options, argv, __doc__)
    device = pick_device(options.device)
    if options.out:
        refuse_unwritable(options.out)
    torch.set_float32_matmul_precision('high')
    sizes = [('360m', 8, 10)] if device.type == 'cuda' else [('toy', 32, 30), ('125m', 4, 3)]
    table = [['what', 'their time / ours', 'ours, s', 'theirs, s', 'tokens a second', 'of its best',
              'GB, ours / theirs']]
    for name, batch, turns in [('tiny', 2, 2)] if options.tiny else sizes:
        table += [*training(name, batch, turns, device), *generating(name, device),
                  *scoring(name, device)]
    where = torch.cuda.get_device_name(device) if device.type == 'cuda' else (
        f'a CPU ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)')
    text = (f'# Speed\n\n`nanodepth bench` on {where}, torch {torch.__version__}, '
            f'{time.strftime("%Y-%m-%d")}.\n\n{columns(table)}\n')
    print(text)
    if options.out:
        replace(options.out, text.encode())
