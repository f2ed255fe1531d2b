"""One setting of the wrapper against none, by lm-eval: does looping help this model?

The idea: the same documents are scored twice, plain and looped, with one model in memory. Two scores have errors of their own, but they share
what is hard about the documents; so the error that counts is that of the change, each document against itself.

Paper: "Training-Free Looped Transformers", section 3 (scores side by side). Here: with errors, which the paper does not print; some of its gains
of one or two points would lie within them.

Usage:
    python wrapper.py HF_FOLDER --method=rk --K=3 --tasks=arc_easy      # the table, and out/evals/NAME_looped.json
    rows = side_by_side('out/lidas', 'primitive_toy_assign_d3', dict(window='mid4', K=3))
"""
import json
import sys
from pathlib import Path

from common.columns import columns
from report.logs import mean, standard_error
from wrapper import looped


def side_by_side(path, tasks, settings, *, limit=None, chat=False, **options):
    """[{task, metric, plain, looped, change and their standard errors}] by lm-eval. The error of a change is that of its mean over
    documents, each against itself: far smaller than that of two scores, which share what is hard about the documents."""
    from tools.evaluate import harness, open_model, rows_of
    lm = open_model(path, **options)
    score = lambda: harness(lm, tasks, limit=limit, log_samples=True, apply_chat_template=chat)
    with looped(lm.model, **settings):
        looped_scores = score()         # first: what cannot be looped says so before an hour is spent
    plain, rows = score(), []
    for before, after in zip(rows_of(plain), rows_of(looped_scores), strict=True):
        pairs = [(a.get(after['metric'].partition(' ')[0]), b.get(after['metric'].partition(' ')[0])) for a, b in zip(
            *(sorted((s for s in r['samples'].get(after['task'], []) if s['filter'] == after['filter']), key=lambda s: s['doc_id']) for r in (plain, looped_scores)))]
        changes = [float(b) - float(a) for a, b in pairs if isinstance(a, (int, float)) and isinstance(b, (int, float))]
        if not changes or abs(mean(changes) - (after['value'] - before['value'])) > 1e-9:
            changes = []                # not a mean over documents: a perplexity, a group of tasks
        rows.append({key: before[key] for key in ('task', 'shots', 'metric')} | dict(
            plain=before['value'], plain_stderr=before['stderr'], looped=after['value'], looped_stderr=after['stderr'],
            change=after['value'] - before['value'], change_stderr=standard_error(changes) if len(changes) > 1 else None, documents=len(changes) or None))
    return rows


def compare(args, settings):
    "python wrapper.py MODEL --tasks=...: the table, and the numbers as JSON."
    out = args.out or Path('out/evals') / f'{Path(args.model).name}_looped.json'
    try:
        from tools.evaluate import explain
        rows = side_by_side(args.model, args.tasks, settings, limit=args.limit, chat=args.chat, batch_size=args.batch_size, dtype=args.dtype, device=args.device)
    except (ValueError, OSError) as error:          # the hub's errors are of the second kind
        print(f'wrapper.py: {explain(error, args.tasks)}', file=sys.stderr)
        raise SystemExit(2) from None
    cell = lambda value, error: f'{value:.4f}' + ('' if error is None else f' ± {error:.4f}')
    print(columns([['task', 'shots', 'metric', 'plain', 'looped', 'change'],
                   *([r['task'], str(r['shots']), r['metric'], cell(r['plain'], r['plain_stderr']), cell(r['looped'], r['looped_stderr']),
                      cell(r['change'], r['change_stderr'])] for r in rows)]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(dict(model=args.model, limit=args.limit, settings=settings, rows=rows), indent=1))
    print(f'numbers: {out}')
