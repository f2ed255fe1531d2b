"""Turn a pretrained model into a depth-recurrent one: a prelude, a core that runs as often as one likes, a coda.

The idea: layers of a residual network work in one shared space, so a block of them can be fed its own output. Early layers
become the prelude, later ones core and coda, those between are dropped; in front of the core, an adapter mixes the prelude's
output e into the state s, so that s_i = core(adapter(s_(i-1), e)) does not forget the input. After some training with a random
number of recurrences, that number is a dial for compute at test time.

Paper: "Teaching Pretrained Language Models to Think Deeper with Retrofitted Recurrence", section 3 (the model, surgery, the
count of FLOPs), 4.2 (the curriculum), appendix B, C.1 (which layers, the additive adapter), E (the cuts).
Here: the paper gives no numbers for the adapter's and the first state's start; ours are normal with std sqrt(2 / (5 width)), its
predecessor's, by `inject='linear'`. What we begin with is `identity`, the projection on e: r = 1 without a dropped layer is the parent
itself, and a short training keeps what the parent knew (LOG.md).
The number of recurrences is Poisson(e^tau) + 1 with a log-normal rate: its mean is one more than the mean that it is named by.

Usage:
    python retrofit.py out/baseline 2-4-2                       # out/baseline_2-4-2: what was kept, what was dropped
    python train.py config/retrofit.py                          # train it
    python retrofit.py out/retrofit --eval --r=1,2,4,8,16       # loss and primitives against r: out/retrofit.png
"""
import argparse
import json
import math
import sys
from pathlib import Path

import torch
import torch.nn as nn

from data.tokens import draw
from loop import fit_loop
from model import KVCache, check_order, continue_text, mean_loss
from variants.cuts import by_influence, cut, prune, screen


class Recurrent(nn.Module):
    """An LM whose layers are run as prelude, r times core, coda: lists of its layers. `mean` is the r that runs when none is
    given. The first state comes from the caller's generator, or from one for each sequence; without, it is a fixed draw for each
    position, so that a token's state does not depend on what it is computed together with."""

    def __init__(self, lm, prelude, core, coda, *, inject='identity', start='normal', mean=4, backprop_depth=8):
        super().__init__()
        for name, value, allowed in (('inject', inject, ('linear', 'identity', 'add')), ('start', start, ('normal', 'zero'))):
            if value not in allowed:
                raise Refused(f'{name}={value!r} must be one of {", ".join(allowed)}')
        if mean < 1 or backprop_depth < 1:
            raise Refused(f'mean={mean} and backprop_depth={backprop_depth} must be at least 1')
        self.lm, self.inject, self.start, self.mean, self.backprop_depth = lm, inject, start, mean, backprop_depth
        self.prelude, self.core, self.coda = (check_order(part, len(lm.layers)) if part else [] for part in (prelude, core, coda))
        if not self.core:
            raise Refused('the core has no layers: there is nothing to repeat')
        C = lm.config.n_embd
        self.std, self.table = math.sqrt(2 / (5 * C)), None
        self.adapter = None if inject == 'add' else nn.Linear(2 * C, C, bias=False)
        with torch.no_grad():
            if inject == 'linear':
                nn.init.normal_(self.adapter.weight, std=self.std)
            elif inject == 'identity':          # of (s, e), e
                self.adapter.weight.copy_(torch.cat((torch.zeros(C, C), torch.eye(C)), dim=1))

    config = property(lambda self: self.lm.config)
    layers = property(lambda self: self.lm.layers)
    norm = property(lambda self: self.lm.norm)
    head = property(lambda self: self.lm.head)
    order = property(lambda self: self.unrolled(self.mean))

    def unrolled(self, r):
        return self.prelude + self.core * r + self.coda

    def cache(self, r):
        "An empty cache for r recurrences: a slot for each position of the unrolled order."
        return KVCache(len(self.unrolled(r)))

    def first_state(self, e, position, generator):
        if self.start == 'zero':
            return torch.zeros_like(e)
        if isinstance(generator, torch.Generator):
            return torch.randn(e.shape, generator=generator, device=generator.device).to(e) * self.std              # (B, T, C)
        if generator is not None:
            return torch.stack([torch.randn(e.shape[1:], generator=g, device=g.device).to(e) for g in generator]) * self.std
        if self.table is None:
            with torch.inference_mode(False):       # training may use it later
                self.table = torch.randn(self.config.context, e.shape[-1], generator=torch.Generator().manual_seed(0))
        return (self.table[position:position + e.shape[1]].to(e) * self.std).expand_as(e)

    def recur(self, s, e, i, cache, tap=None):
        "One recurrence, the i-th from 0 on: adapter, then core."
        x = s + e if self.adapter is None else self.adapter(torch.cat((s, e), dim=-1)).to(e.dtype)          # (B, T, C)
        return self.lm.run(x, self.core, depth=len(self.prelude) + i * len(self.core), cache=cache, tap=tap)

    def hidden(self, tokens, *, r=None, cache=None, generator=None, backprop_depth=None, exit=None, tap=None):
        "The residual stream before the final norm. `exit` is an Exit: then a token may stop earlier than after r recurrences."
        r, most = self.mean if r is None else r, self.backprop_depth if backprop_depth is None else backprop_depth
        if r < 1:
            raise Refused(f'r={r}: the core runs at least once')
        if cache is None and exit is not None:
            cache = self.cache(r)               # a token that stopped is looked at by those that go on
        position = 0 if cache is None else cache.position
        e = self.lm.run(self.lm.embed(tokens), self.prelude, cache=cache, tap=tap)                                   # (B, T, C)
        s = self.first_state(e, position, generator)
        again = (lambda s, i: self.recur(s, e, i, cache, tap)) if exit is None else (lambda s, i: exit.step(self, s, e, i, r, cache))
        with torch.no_grad():                   # truncated back-propagation: all but the last recurrences leave no trace
            for i in range(max(r - most, 0)):
                s = again(s, i)
        if r > most:
            torch.clear_autocast_cache()        # else weights that were cast without a trace would be used again, without a gradient
        for i in range(max(r - most, 0), r):
            s = again(s, i)
        x = self.lm.run(s, self.coda, depth=len(self.prelude) + r * len(self.core), cache=cache, tap=tap)
        if cache is not None:
            cache.position += tokens.shape[1]
        return x

    def forward(self, tokens, targets=None, *, r=None, cache=None, generator=None, backprop_depth=None, exit=None, ignore_index=-1):
        x = self.norm(self.hidden(tokens, r=r, cache=cache, generator=generator, backprop_depth=backprop_depth, exit=exit))
        return self.head(x) if targets is None else mean_loss(x, self.head.weight, targets, ignore_index)

    def generate(self, tokens, max_new_tokens, *, r=None, exit=None, **options):
        r = self.mean if r is None else r

        def forward(fresh, cache):
            return self.head(self.norm(self.hidden(fresh, r=r, cache=cache, exit=exit)[:, -1:]))
        return continue_text(forward, lambda: self.cache(r), self.config.context, tokens, max_new_tokens, **options)

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def parts(self):
        "Parameters of the layers of (prelude, core, coda), as the paper counts: without adapter, embeddings and final norm."
        layer = sum(p.numel() for p in self.layers[0].parameters())
        return tuple(len(part) * layer for part in (self.prelude, self.core, self.coda))

    def effective_params(self, r):
        prelude, core, coda = self.parts()
        return prelude + r * core + coda

    def flops_per_token(self, *, r=None, backprop_depth=None):
        "Training FLOPs of one token in our ledger (LM.flops_per_token), with the recurrences that leave no trace at a third."
        r, most = self.mean if r is None else r, self.backprop_depth if backprop_depth is None else backprop_depth
        adapter = 0 if self.adapter is None else self.adapter.weight.numel()
        head = self.lm.flops_per_token([])
        once = self.lm.flops_per_token(self.core) - head + 6 * adapter
        outside = self.lm.flops_per_token(self.prelude + self.coda)
        return outside + min(r, most) * once + max(r - most, 0) * once // 3

    def flops_paper(self, mean=None):
        "The paper's count of it: 6 for each weight that is trained and 2 for each that only runs, by the mean number of recurrences."
        prelude, core, coda = self.parts()
        mean = self.mean if mean is None else mean
        return 6 * (prelude + coda + min(mean, self.backprop_depth) * core) + 2 * max(mean - self.backprop_depth, 0) * core


def dial(model, *, loop=None, r=None):
    "What --loop and --r ask for: an LM runs its layers in another order, a Recurrent its core r times."
    if isinstance(model, Recurrent):
        if loop:
            raise Refused(f'loop={loop!r} is for ordinary models: a recurrent core is run more often by r')
        if r is not None and r < 1:
            raise Refused(f'r={r}: the core runs at least once')
        model.mean = model.mean if r is None else r
    elif r is not None:
        raise Refused(f'r={r} is for models with a recurrent core, and this one has none: loop runs its layers in another order')
    elif loop:
        model.config.order = fit_loop(loop, len(model.layers))
    return model


# ---------------------------------------------------------------------------------------------- surgery

def surgery(model, shape, **options):
    """An LM as a Recurrent one, with copies of the layers that are kept. `shape` is '4-8-4' (the first four layers, the last four,
    and the eight before those), or the three lists of layers."""
    parts = cut(shape, len(model.layers)) if isinstance(shape, str) else [list(part) for part in shape]
    kept = check_order([i for part in parts for i in part], len(model.layers))
    if len(set(kept)) != len(kept):
        raise Refused(f'the layers {sorted({i for i in kept if kept.count(i) > 1})} stand in more than one place of {parts}')
    if model.order != list(range(len(model.layers))):
        raise Refused('this model has an order of its own: untie it first, and then cut it')
    lm = prune(model, kept)
    place = iter(range(len(kept)))
    return Recurrent(lm, *([next(place) for _ in part] for part in parts), **options)


# ---------------------------------------------------------------------------------------------- how often

def sample_recurrence(mean, step, seed):
    "r of a training step, the same on every rank: Poisson(exp(tau)) + 1, tau normal with std 1/2 such that E[exp(tau)] = mean."
    generator = torch.Generator().manual_seed(draw(seed, 'recurrence', step))
    tau = torch.randn(1, generator=generator, dtype=torch.float64) / 2 + math.log(mean) - 1 / 8
    return int(torch.poisson(tau.exp(), generator=generator).item()) + 1


def recurrence_curriculum(step, steps, mean, warm_fraction, shape='linear'):
    "The distribution's mean at a step: a staircase from 1 to `mean` over the first part of the steps, then `mean`."
    shapes = {'linear': lambda t: t, '1-sqrt': lambda t: 1 - math.sqrt(1 - t)}
    if shape not in shapes:
        raise Refused(f'the curriculum {shape!r} is not known: {", ".join(shapes)}')
    warm = warm_fraction * steps
    if step + 1 >= warm:
        return mean
    return max(1, math.ceil(mean * shapes[shape]((step + 1) / warm) - 1e-9))


# ---------------------------------------------------------------------------------------------- the command

def scalable_start(model):
    "Random weights, for recurrence from scratch: Takase et al.'s, by the width, and the layers' outputs by the unrolled depth too."
    for name, p in model.named_parameters():
        if p.dim() >= 2:
            outputs = name.endswith(('attn.o.weight', 'mlp.down.weight'))
            nn.init.normal_(p, std=model.std / math.sqrt(2 * len(model.order)) if outputs else model.std)
        else:
            nn.init.ones_(p)
    if not model.config.tie_embeddings:
        nn.init.normal_(model.lm.embed.weight)          # as LM's own start has it


def operate(args):
    "python retrofit.py FROM 4-8-4: write the operated checkpoint, and say what it is made of."
    from common.columns import columns
    from common.errors import Refused
    from data.tokenizer import tokenizer_file
    from engine.checkpoint import build_model, describe, exists, load, save
    source, shape = args.paths
    folder, file, state = Path(source), tokenizer_file(source), load(source)
    about = (folder.parent if folder.is_file() else folder) / 'run.json'
    if not file and not about.exists():
        raise Refused(f'{source} does not say which tokenizer it reads: it has neither a tokenizer.json nor a run.json')
    tokenizer = json.dumps(dict(tokenizer=str(file.resolve()))) if file else about.read_text()
    target = args.out or Path('out') / f'{Path(source).name}_{shape}'
    if exists(target):
        raise Refused(f'{target} holds a checkpoint already: choose another --out')
    parent = build_model(state, source).eval()
    parts = cut(shape, len(parent.layers))
    if args.select == 'influence':
        parts = by_influence(parent, shape, sample_tokens(args.data, parent.config))
    elif args.layers:
        parts = [[int(i) for i in filter(None, part.split(','))] for part in args.layers.split('/')]
        if [len(part) for part in parts] != [len(part) for part in cut(shape, len(parent.layers))]:
            raise Refused(f'--layers={args.layers} does not name {shape} layers')
    if args.search:
        return print(screen(parent, shape, sample_tokens(args.data, parent.config, 32)))
    torch.manual_seed(draw(args.seed, 'retrofit'))
    model = surgery(parent.float(), parts, inject=args.inject, start=args.start, mean=args.mean, backprop_depth=args.backprop_depth)
    if args.scratch:
        scalable_start(model)
    body = sum(p.numel() for p in parent.layers.parameters())
    rows = [['part', 'layers of the parent', 'parameters']]
    rows += [[name, ' '.join(map(str, part)), f'{n:,}'] for name, part, n in zip(('prelude', 'core', 'coda'), parts, model.parts())]
    dropped = sorted({*range(len(parent.layers))} - {i for part in parts for i in part})
    rows += [['dropped', ' '.join(map(str, dropped)), f'{body - sum(model.parts()):,}'],
             ['adapter', '', f'{0 if model.adapter is None else model.adapter.weight.numel():,}']]
    print(columns(rows))
    print(f'{sum(model.parts()):,} parameters in layers, {sum(model.parts()) / body:.1%} of the parent; {model.effective_params(args.mean):,} effective '
          f'at r = {args.mean}; {model.flops_paper():,} training FLOPs a token by the paper\'s count, {model.flops_paper() / (6 * body):.2f} times the parent\'s')
    cost = 0 if args.scratch else state.get('flops', 0) + state.get('inherited_flops', 0)
    save(target, **describe(model.lm if args.dense else model), optimizers=[], step=0, flops=0, inherited_flops=cost, config={})
    (target / 'run.json').write_text(tokenizer)
    print(f'{target}: {"the kept layers, each once" if args.dense else "train it with train.py --init_from=" + str(target)}')


def sample_tokens(data, config, n=8):
    "Some validation rows: (n, T)."
    from data.tokens import Loader
    return Loader(data, n, min(config.context, 512), split='val', vocab_size=config.vocab_size).batch(0)[0]


def evaluate_recurrences(args):
    "python retrofit.py RUNS --eval: loss and primitives against r. An ordinary model among them is a line to compare with."
    from tqdm import tqdm

    from common.columns import columns
    from common.errors import whole_numbers
    from engine.checkpoint import build_model, load
    from engine.launch import pick_device
    from loop import asked, looker
    from report.logs import by_seed, mean, number, run_names, standard_error, write_csv
    from report.plot import draw_recurrences, show
    device, examples, rows = pick_device(args.device), asked(args.tasks, args.n), []
    paths, rs = run_names(args.paths), whole_numbers('--r', args.r)
    if min(rs) < 1:
        raise Refused(f'--r={args.r}: the core runs at least once')
    for name, path in tqdm(paths.items(), desc='measuring', unit='run'):
        state = load(path)
        model = build_model(state, path).to(device).eval()
        look = looker(path, state, model, args.data, args.batches, examples)
        for r in rs if isinstance(model, Recurrent) else [0]:
            if r:
                model.mean = r
            body = model.effective_params(r) if r else sum(p.numel() for p in model.layers.parameters()) * len(model.order) // len(model.layers)
            rows.append(dict(run=name, r=r, effective_params=body, **look(model)))
    kinds = [key for key in rows[0] if key not in ('run', 'r', 'effective_params')]
    lines = [['run', 'r', 'effective parameters', *kinds]]
    groups = by_seed({name: name for name in paths})
    for group, names in groups.items():
        for r in dict.fromkeys(row['r'] for row in rows if row['run'] in names):
            mine = [row for row in rows if row['run'] in names and row['r'] == r]
            lines.append([group, str(r or 'ordinary'), f'{mine[0]["effective_params"]:,}',
                          *(number(mean([m[k] for m in mine]), standard_error([m[k] for m in mine]), k != 'loss') for k in kinds)])
    print(columns(lines))
    out = args.out or Path('out') / f'{Path(args.paths[0]).name}.png'
    write_csv(rows, out)
    shown = [kind for kind in kinds if not args.show or kind in args.show.split(',')] or kinds
    show(draw_recurrences, (rows, shown, groups), out)


def main(argv=None):
    parser = argparse.ArgumentParser(description='Cut a checkpoint into prelude, core and coda; or measure one against the number of recurrences.')
    parser.add_argument('paths', nargs='+', help='a checkpoint and a shape, such as out/baseline 2-4-2; with --eval: runs')
    parser.add_argument('--eval', action='store_true', help='loss and primitives against r')
    parser.add_argument('--out', type=Path, help='the folder to write (with --eval: the picture)')
    parser.add_argument('--inject', default='identity', help='how e is mixed into the state: linear (the paper), identity (linear, begun as e), add')
    parser.add_argument('--start', default='normal', help='the first state: normal or zero')
    parser.add_argument('--mean', type=int, default=4, help='recurrences')
    parser.add_argument('--backprop_depth', type=int, default=8, help='gradients go back through the last so many')
    parser.add_argument('--layers', help='explicit lists, such as 0,1/16,17,18,19/20,21')
    parser.add_argument('--select', choices=['late', 'influence'], default='late', help='late: by the shape; influence: ShortGPT, on --data')
    parser.add_argument('--search', action='store_true', help='print the loss of every selection on --data, before any training')
    parser.add_argument('--scratch', action='store_true', help='random weights: recurrence from scratch')
    parser.add_argument('--dense', action='store_true', help='write the kept layers as an ordinary model: the pruned partner')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--data', help='a dataset (with --eval: instead of what the run was trained on)')
    parser.add_argument('--r', default='1,2,4,8,16', help='with --eval: recurrences')
    parser.add_argument('--batches', type=int, default=8, help='with --eval: batches of validation data')
    parser.add_argument('--tasks', default='', help='with --eval: primitives and their depth, such as toy_assign/4')
    parser.add_argument('--n', type=int, default=200, help='with --eval: examples of each')
    parser.add_argument('--show', help='with --eval: what the picture shows, such as loss,toy_assign/4 (default: all)')
    parser.add_argument('--device', default='auto')
    args = parser.parse_args(argv)
    try:
        if args.eval:
            return evaluate_recurrences(args)
        if len(args.paths) != 2 or (args.search or args.select == 'influence') and not args.data:
            parser.error('give a checkpoint and a shape, such as out/baseline 2-4-2 (and --data with --select=influence and --search)')
        operate(args)
    except ValueError as error:
        print(f'retrofit.py: {error}', file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == '__main__':
    from nanodepth import main; main('retrofit')        # noqa: E702
