"""One setting of the wrapper against none, by lm-eval: does looping help this model?

The idea: the same documents are scored twice, plain and looped, with one model in memory. Two
scores have errors of their own, but they share what is hard about the documents; so the error that
counts is that of the change, each document against itself.

Paper: "Training-Free Looped Transformers", section 3 (scores side by side). Here: with errors,
which the paper does not print; some of its gains of one or two points would lie within them.

Usage:
    # the table, and out/evals/NAME_looped.json
    python wrapper.py HF_FOLDER --method=rk --K=3 --tasks=arc_easy
    rows = side_by_side('out/lidas', 'primitive_toy_assign_d3', dict(window='mid4', K=3))
"""
import argparse
import json
from pathlib import Path

from common.columns import columns
from common.errors import parse, refusing
from report.logs import mean, standard_error
from tools.adapters import open_model
from tools.evaluate import explain, harness, rows_of
from tools.little import show_little
from variants.caches import CACHES
from wrapper import SOLVERS, looped


def side_by_side(path, tasks, settings, *, limit=None, chat=False, **options):
    """[{task, metric, plain, looped, change and their standard errors}] by lm-eval. The error of a
    change is that of its mean over documents, each against itself: far smaller than that of two
    scores, which share what is hard about the documents."""
    lm = open_model(path, **options)
    score = lambda: harness(lm, tasks, limit=limit, log_samples=True, apply_chat_template=chat)
    with looped(lm.model, **settings):
        looped_scores = score()       # first: what cannot be looped says so before an hour is spent
    plain, rows = score(), []
    for before, after in zip(rows_of(plain), rows_of(looped_scores), strict=True):
        pairs = [(a.get(after['metric'].partition(' ')[0]),
                  b.get(after['metric'].partition(' ')[0])) for a, b in zip(
            *(
                sorted((s for s in r['samples'].get(after['task'], []) if s['filter']
                        == after['filter']), key=lambda s: s['doc_id'])
                for r in (plain, looped_scores)))]
        changes = [float(b) - float(a) for a, b in pairs if isinstance(a, (int, float))
                   and isinstance(b, (int, float))]
        if not changes or abs(mean(changes) - (after['value'] - before['value'])) > 1e-9:
            changes = []                # not a mean over documents: a perplexity, a group of tasks
        rows.append({key: before[key] for key in ('task', 'shots', 'metric')} | dict(
            plain=before['value'], plain_stderr=before['stderr'], looped=after['value'],
            looped_stderr=after['stderr'],
            change=after['value'] - before['value'], change_stderr=standard_error(changes)
            if len(changes) > 1 else None, documents=len(changes) or None))
    return rows


def compare(args, settings):
    "python wrapper.py MODEL --tasks=...: the table, and the numbers as JSON."
    out = args.out or Path('out/evals') / f'{Path(args.model).name}_looped.json'
    # the hub's are of the second kind
    with refusing(ValueError, OSError, why=lambda error: explain(error, args.tasks)):
        rows = side_by_side(args.model, args.tasks, settings, limit=args.limit, chat=args.chat,
                            batch_size=args.batch_size, dtype=args.dtype, device=args.device)
    cell = lambda value, error: f'{value:.4f}' + ('' if error is None else f' ± {error:.4f}')
    print(columns([['task', 'shots', 'metric', 'plain', 'looped', 'change'],
                   *([r['task'], str(r['shots']), r['metric'], cell(r['plain'], r['plain_stderr']),
                      cell(r['looped'], r['looped_stderr']),
                      cell(r['change'], r['change_stderr'])] for r in rows)]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(dict(model=args.model, limit=args.limit, settings=settings,
                                   rows=rows), indent=1))
    print(f'numbers: {out}')


def main(argv=None):
    parser = argparse.ArgumentParser(
        description='Score a frozen model plain and with its middle looped, side by side. '
                    'nanodepth.py sweep tries many.',
        epilog="A method's own options are given by their names, such as --alphas=0.6,0.4 or "
               '--tol=0.05 (variants/solvers.py).')
    parser.add_argument('model', nargs='?', help='a run of ours, or a Hugging Face folder or name')
    parser.add_argument('--toy', action='store_true',
                        help="the paper's little network: errors against K, and where a "
                        "looped window ends")
    parser.add_argument('--tasks',
                        help='tasks of lm-eval, or lists by name (evaluate.py): knowledge, '
                        'language, primitives ...')
    parser.add_argument('--window', default='mid4',
                        help="3-5, mid4, or a fraction of the depth such as 0.5")
    parser.add_argument('--method', default='rk', help=f'of {", ".join(SOLVERS)}')
    parser.add_argument('--K', type=int, default=3)
    parser.add_argument('--beta', type=float, default=0.5)
    parser.add_argument('--cache', default='first',
                        help=f'of {", ".join(CACHES)}: what later tokens see of looped '
                        'layers (frozen also changes how a text is read)')
    parser.add_argument('--decode', default='full',
                        help='full, bypass, or the number of decode steps that are looped')
    parser.add_argument('--mode', default='block', help='block or layer')
    parser.add_argument('--pin',
                        help='keep the experts of the first evaluation: mixture or indices')
    parser.add_argument('--limit', type=int,
                        help='only so many documents of each task: to try things, not to '
                        'report them')
    parser.add_argument('--batch_size', default='8')
    parser.add_argument('--chat', action='store_true',
                        help='with the chat template of the checkpoint')
    parser.add_argument('--dtype', default='auto')
    parser.add_argument('--device', default='auto')
    parser.add_argument('--out', type=Path,
                        help='the numbers as JSON (default: out/evals/MODEL_looped.json), '
                        'with --toy the picture')
    args, others = parser.parse_known_args(argv)
    if args.toy:
        return show_little(args.out or Path('out/wrapper_toy.png'))
    if not (args.model and args.tasks):
        parser.error(
            'give a model and --tasks (such as --tasks=primitives or --tasks=arc_easy), or --toy')
    settings = ({name: getattr(args, name) for name in ('window', 'method', 'K', 'beta', 'cache',
                                                        'decode', 'mode', 'pin')})
    settings |= {'window': as_number(args.window), 'decode': as_number(args.decode)}
    for other in others:
        name, equals, value = other.partition('=')
        if not (name.startswith('--') and equals):
            parser.error(f'{other}: write --NAME=VALUE')
        settings[name[2:]] = as_number(value)
    compare(args, settings)


def as_number(text):
    "'0.5' to 0.5, '0.6,0.4' to [0.6, 0.4], 'false' to False, and what is no number as it is."
    value = parse(text)
    return list(value) if isinstance(value, tuple) else value
