"""One setting of the wrapper against none, by lm-eval: does looping help this model?

The idea: the same documents are scored twice, plain and looped, with one model in memory. Two
scores have errors of their own, but they share what is hard about the documents; so the error that
counts is that of the change, each document against itself.

Paper: "Training-Free Looped Transformers", section 3 (scores side by side). Here: with errors
and tests, which the paper does not print; some of its gains of one or two points would lie within
them. Changed arithmetic is a new sample: where text is drawn, only many samples a problem, tested
by problem, say anything.

Usage:
    python wrapper.py HF_FOLDER --K=3 --tasks=arc_easy  # a table, out/evals/NAME_looped.json
    python wrapper.py HF_FOLDER --recipe                # the authors' settings on their 16 tasks
    rows = side_by_side('out/lidas', 'primitive_toy_assign_d3', dict(window='mid4', K=3))
"""
from pathlib import Path

from common.columns import columns
from common.errors import parse, refusing
from report.tables import mean, sign_test, signed_rank_test, standard_error
from tools.adapters import open_model
from tools.evaluate import add_scores, explain, harness, rows_of, scores_in
from tools.little import show_little
from tools.options import RUN, make_parser
from variants.caches import CACHES
from wrapper import SOLVERS, looped

# As the authors' code has it; the paper's text has K = 3, and our defaults follow that.
RECIPE = dict(method='rk', K=6, beta=0.5, cache='first', decode='bypass')


def side_by_side(path, tasks, settings, *, limit=None, chat=False, **options):
    """[{task, metric, plain, looped, change and their standard errors}] by lm-eval. The error of a
    change is that of its mean over documents, each against itself: far smaller than that of two
    scores, which share what is hard about the documents."""
    lm = open_model(path, **options)
    score = lambda: harness(lm, tasks, limit=limit, log_samples=True, apply_chat_template=chat)
    with looped(lm.model, **settings):
        after = score()         # first: a refusal comes before an hour is spent
    before, rows = score(), []
    for plain, other in zip(rows_of(before), rows_of(after), strict=True):
        pairs = zip(documents(before, plain), documents(after, other), strict=True)
        changes = [float(b) - float(a) for a, b in pairs if isinstance(a, (int, float))
                   and isinstance(b, (int, float))]
        change = other['value'] - plain['value']
        if not changes or abs(mean(changes) - change) > 1e-9:
            changes = []        # not a mean over documents: a perplexity, a group of tasks
        rows.append({key: plain[key] for key in ('task', 'shots', 'metric')} | dict(
            plain=plain['value'], plain_stderr=plain['stderr'], looped=other['value'],
            looped_stderr=other['stderr'], change=change,
            change_stderr=standard_error(changes) if len(changes) > 1 else None,
            documents=len(changes) or None, p=test(changes)))
    return rows


def test(changes):
    "The p of no change: exact for right and wrong, by ranks for scores with grades."
    if not changes:
        return None
    graded = any(abs(c) not in (0, 1) for c in changes)
    return (signed_rank_test if graded else sign_test)(changes)


def documents(found, row):
    "What each document gives for a row's metric."
    samples = [s for s in found['samples'].get(row['task'], []) if s['filter'] == row['filter']]
    metric = row['metric'].partition(' ')[0]
    return [s.get(metric) for s in sorted(samples, key=lambda s: s['doc_id'])]


def compare(args, settings):
    "python wrapper.py MODEL --tasks=...: the table, and the numbers as JSON."
    out = args.out or Path('out/evals') / f'{Path(args.model).name}_looped.json'
    scores_in(out)          # what cannot be added to is refused before the work
    # the hub's are of the second kind
    with refusing(ValueError, OSError, ImportError, why=lambda error: explain(error, args.tasks)):
        rows = side_by_side(args.model, args.tasks, settings, limit=args.limit, chat=args.chat,
                            batch_size=args.batch_size, dtype=args.dtype, device=args.device)
    shown = ('plain', 'looped', 'change')
    table = [['task', 'shots', 'metric', *shown, 'p']]
    for row in rows:
        errors = [row[f'{name}_stderr'] for name in shown]
        table.append([row['task'], str(row['shots']), row['metric'],
                      *(f'{row[name]:.4f}' + ('' if error is None else f' ± {error:.4f}')
                        for name, error in zip(shown, errors)),
                      '' if row['p'] is None else f'{row["p"]:.3f}'])
    print(columns(table))
    asked = dict(model=args.model, limit=args.limit, chat=args.chat, settings=settings)
    add_scores(out, [asked | row for row in rows], ['task', *asked])
    print(f'numbers: {out}')


def main(argv=None):
    parser = make_parser(
        __doc__, 'limit', 'dtype', 'device',
        epilog="A method's own options are given by their names, such as --alphas=0.6,0.4 or "
               '--tol=0.05 (variants/solvers.py).',
        recipe=(False, "the authors': K = 6, cache first, decode bypass, 16 tasks"),
        toy=(False, "the paper's little network: errors against K, and where a looped window ends"),
        tasks=(str, 'tasks of lm-eval, or lists by name (evaluate.py): knowledge, language, '
               'primitives ...'),
        window=('mid4', '3-5, mid4, or a fraction of the depth such as 0.5'),
        method=('rk', f'one of {", ".join(SOLVERS)}'), K=(3, 'steps'),
        T=(float, 'the time at which the K steps end (default: 1)'),
        beta=(float, "the share of the plain output (default: the method's own, rk 0.5)"),
        cache=(str, f'one of {", ".join(CACHES)}: what later tokens see of looped layers (default: '
               'first; frozen also changes how a text is read)'),
        decode=('full', 'full, bypass, or the number of decode steps that are looped'),
        mode=(str, 'the window as one block, or layer by layer (default: block)'),
        pin=(str, 'keep the experts of the first evaluation: mixture or indices'),
        batch_size=('8', 'texts read at once'),
        chat=(False, 'with the chat template of the checkpoint'),
        out=(Path, 'the numbers as JSON (default: out/evals/MODEL_looped.json), with --toy the '
             'picture'))
    parser.add_argument('model', metavar='run', nargs='?', help=RUN)
    args, others = parser.parse_known_args(argv)
    if args.toy and others:
        parser.error(f'{others[0]}: --toy takes --out alone')
    if args.toy:
        return show_little(args.out or Path('out/wrapper_toy.png'))
    if args.recipe:
        args.K, args.decode, args.tasks = RECIPE['K'], RECIPE['decode'], args.tasks or 'looped'
    if not (args.model and args.tasks):
        parser.error('give a model and --tasks (such as --tasks=primitives or --tasks=arc_easy), '
                     'or --toy')
    names = 'window', 'method', 'K', 'beta', 'cache', 'decode', 'mode', 'pin'
    settings = {name: getattr(args, name) for name in names}
    settings |= {} if args.T is None else dict(T=args.T)
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
