"""Reasoning primitives: copying and variable assignment, small tasks whose difficulty is known exactly.

The idea: copying asks for what came after a word before, assignment for a value that stands one look back (depth 0), behind
one alias (depth 1), behind two, and so on. Depth d cannot be answered in fewer than d + 1 looks, so these tasks measure the
computation that a model does over its layers, apart from what it knows. Answers are chosen among given options by their
log-likelihood, after some examples with answers ("shots").

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix C, and "From Growing to Looping", appendix D.1 (the
forms), section 5.1 (accuracy against shots, fine-tuning); the tasks are Saunshi et al.'s, 2024.
Here: the papers print the forms of copying and of basic assignment, and neither those of math and code, nor the depth of the
averages: the former are ours (TEMPLATES), and depths are always told apart. Real words are a fixed list. The `toy_` tasks
have the form of data/toy, which small models are trained on; their shots are earlier questions about the same statements.

Usage:
    examples = few_shot('assign_basic', 200, shots=5, depth=1)
    accuracy, (low, high) = score(model, get_tokenizer('out/lidas'), examples)
    python primitives.py out/lidas out/baseline --tasks=toy --depths=0,1,2      # a table, a picture, a CSV file
    python primitives.py --write=data/sft --tasks=toy_assign --depths=1,2 --n=128   # examples to fine-tune on
"""
import argparse
import csv
import math
import random
import string
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from model import LM, KVCache
from tokenizer import get_tokenizer, start_of_document
from tokens import draw, write_dataset


@dataclass
class Example:
    prompt: str
    options: list[str]      # continuations of the prompt, all different
    answer: int             # which of them is right


# ---------------------------------------------------------------------------------------------- one question
# A task is a function (rng, depth) -> (question, options, right option).

TEMPLATES = {               # what comes first, a statement, the question
    'basic': ('Fill in blank:\n\n', '{}={}\n', '{}=____ . ->'),
    'math': ('The following is a set of equations:\n\n', '{} = {}\n', 'What is the value of {}? ->'),
    'code': ('The following is a Python program:\n\n', '{} = {}\n', 'print({}) # prints'),
}
REAL_WORDS = '''apple arm baby back ball bank bed bell bird blue boat body book box boy bread brown cake card cat chair city
clock cloud coat cold corn cow cup day desk dog door dress duck earth egg eye face farm field fire fish floor foot game garden
girl glass gold grass green hand hat head hill horse house ice king lake leaf light lion milk money moon mouth night nose page
paper park party pen pig rain red ring river road rock room rose salt sand school sea ship shoe sky snow song star stone
street sun table time town train tree wall watch water white wind window wood yard'''.split()


def random_words(rng, n):
    "n different words of three letters."
    found = []
    while len(found) < n:
        word = ''.join(rng.choice(string.ascii_lowercase) for _ in range(3))
        if word not in found:
            found.append(word)
    return found


def copying(rng, words, n=10, again=5):
    "n words, a piece of them once more, and what came next?"
    start = rng.randrange(n - again)
    shown = words + words[start:start + again]
    return f'Fill in the blank:\n\n{" ".join(shown)} ____ . ->', [' ' + w for w in words], ' ' + words[start + again]


def chain(rng, names, values, depth):
    """Statements that give values to as many names, and pass them on `depth` times, each time to new names in another
    order. (statements, {last name: value}); what a name is given stands in an earlier statement."""
    n = len(values)
    level = dict(zip(names[:n], values))
    statements = list(level.items())
    for d in range(1, depth + 1):
        sources = rng.sample(list(level), n)
        fresh = dict(zip(names[d * n:(d + 1) * n], sources))
        statements += fresh.items()
        level = {alias: level[name] for alias, name in fresh.items()}
    return statements, level


def assignment(rng, depth, form, n=5):
    first, statement, question = TEMPLATES[form]
    letters = string.ascii_lowercase
    pool = list(letters) if (depth + 1) * n <= 26 else [a + b for a in letters for b in letters]
    statements, level = chain(rng, rng.sample(pool, (depth + 1) * n), rng.sample(range(1, 26), n), depth)
    asked = rng.choice(list(level))
    return (first + ''.join(statement.format(*s) for s in statements) + question.format(asked),
            [f' {v}' for v in level.values()], f' {level[asked]}')


TASKS = {
    'copy_random': lambda rng, depth: copying(rng, random_words(rng, 10)),
    'copy_words': lambda rng, depth: copying(rng, rng.sample(REAL_WORDS, 10)),
    'assign_basic': lambda rng, depth: assignment(rng, depth, 'basic'),
    'assign_math': lambda rng, depth: assignment(rng, depth, 'math'),
    'assign_code': lambda rng, depth: assignment(rng, depth, 'code'),
}


# The toy's forms: (rng, depth, shots) -> (question with its shots, options, right option).

def toy_copy(rng, depth, shots, n=8):
    words = [w.capitalize() for w in random_words(rng, n)]
    if shots > n - 2:
        raise ValueError(f'toy_copy has {n} words, so at most {n - 2} shots, not {shots}')
    return ''.join(words + words[:1 + shots]), words, words[1 + shots]


def toy_assign(rng, depth, shots, n=4):
    if (depth + 1) * n > 26:
        raise ValueError(f'toy_assign has letters for depth {26 // n - 1} at most, not {depth}')
    names = rng.sample(string.ascii_lowercase, (depth + 1) * n)
    statements, level = chain(rng, names, rng.sample(string.digits, n), depth)
    asked, value = rng.choice(list(level)), dict(statements)
    for _ in range(depth):              # what every name comes to; an earlier question never gives the value that is asked for
        value = {name: value.get(given, given) for name, given in value.items()}
    others = [name for name in value if value[name] != level[asked]]
    if shots > len(others):
        raise ValueError(f'toy_assign at depth {depth} has at most {len(others)} shots, not {shots}')
    rng.shuffle(others)
    return (''.join(a + b for a, b in statements) + ''.join(f'?{a}{value[a]}' for a in others[:shots]) + '?' + asked,
            list(level.values()), level[asked])


TOY_TASKS = {'toy_copy': toy_copy, 'toy_assign': toy_assign}


def few_shot(task, n, *, shots=5, depth=0, seed=0):
    """n examples of a task, each with `shots` answered questions of its own before it. Example i asks the same question
    whatever the shots are, so that accuracy against shots compares like with like. Copying has no depth."""
    if task not in TASKS and task not in TOY_TASKS:
        raise ValueError(f'there is no task {task!r}: {", ".join([*TASKS, *TOY_TASKS])}')
    if shots < 0 or depth < 0 or n < 1:
        raise ValueError(f'shots={shots} and depth={depth} must not be negative, and n={n} at least 1')
    examples = []
    for i in range(n):
        rng = random.Random(draw(seed, f'{task} at depth {depth}', i))
        if task in TOY_TASKS:
            prompt, options, right = TOY_TASKS[task](rng, depth, shots)
        else:
            prompt, options, right = TASKS[task](rng, depth)
            for _ in range(shots):
                question, _, answer = TASKS[task](rng, depth)
                prompt = f'{question}{answer}\n\n{prompt}'
        rng.shuffle(options)
        examples.append(Example(prompt, options, options.index(right)))
    return examples


# ---------------------------------------------------------------------------------------------- scoring

def score(model_like, tokenizer, examples, **options):
    "(accuracy, its 95% interval): the option with the highest log-likelihood is the choice."
    values = log_likelihoods(model_like, tokenizer, examples, **options)
    right = sum(v.argmax().item() == e.answer for v, e in zip(values, examples))
    return right / len(examples), interval(right, len(examples))


def interval(right, n, z=1.96):
    "Wilson's: of use near 0 and 1 too, where right ± 2 standard errors is not."
    p, width = right / n, z * z / n
    middle, half = (p + width / 2) / (1 + width), z * math.sqrt(p * (1 - p) / n + width / n / 4) / (1 + width)
    return middle - half, middle + half


@torch.no_grad()
def log_likelihoods(model_like, tokenizer, examples, *, batch=64, share=True):
    """[(options,) of each example]: log-likelihoods of the options after the prompt. `model_like` maps tokens (B, T) to
    logits (B, T, V). One of our models reads each prompt once, and its options share the cache (share=False: they don't).
    Examples with prompts of one length make a batch, so that nothing is padded but options."""
    start = start_of_document(tokenizer)
    prompts = [[*start, *tokenizer.encode(e.prompt, allowed_special='all')] for e in examples]
    options = [[tokenizer.encode(o) for o in e.options] for e in examples]
    context = getattr(getattr(model_like, 'config', None), 'context', math.inf)
    longest = max(len(p) + max(map(len, o)) for p, o in zip(prompts, options))
    if longest > context:
        raise ValueError(f'a prompt with its answer has {longest} tokens, but the context is {context}: ask with fewer shots')
    device = next((p.device for p in getattr(model_like, 'parameters', list)()), 'cpu')
    groups, values = {}, [None] * len(examples)
    for i, (p, o) in enumerate(zip(prompts, options)):
        groups.setdefault((len(p), len(o)), []).append(i)
    for group in groups.values():
        for part in (group[at:at + batch] for at in range(0, len(group), batch)):
            width = max(len(o) for i in part for o in options[i])
            padded = torch.tensor([[o + [-1] * (width - len(o)) for o in options[i]] for i in part], device=device)    # (B, O, W)
            prompt = torch.tensor([prompts[i] for i in part], device=device)                                           # (B, T)
            after = (shared if share and isinstance(model_like, LM) else separate)(model_like, prompt, padded)
            found = after.float().log_softmax(-1).gather(-1, padded.clamp(min=0)[..., None])[..., 0]                   # (B, O, W)
            for i, value in zip(part, found.masked_fill(padded < 0, 0).double().sum(-1).cpu()):
                values[i] = value
    return values


def separate(model_like, prompt, options):
    "Logits (B, O, W, V) at the options' tokens: every option with the whole prompt before it."
    B, O, W = options.shape
    rows = torch.cat((prompt[:, None].expand(B, O, -1), options.clamp(min=0)), dim=-1)          # (B, O, T + W)
    return model_like(rows.flatten(0, 1))[:, -W - 1:-1].unflatten(0, (B, O))


def shared(model, prompt, options):
    "The same, with each prompt read once: its cache is handed to all of its options."
    B, O, W = options.shape
    cache = KVCache(len(model.order))
    first = model.head(model.norm(model.hidden(prompt, cache=cache)[:, -1:]))                   # (B, 1, V)
    first = first[:, None].expand(B, O, 1, -1)
    if W == 1:
        return first
    for slot in cache.layers:
        slot.keys, slot.values = (t.repeat_interleave(O, dim=0) for t in (slot.keys, slot.values))
    rest = model(options[..., :-1].clamp(min=0).flatten(0, 1), cache=cache)                     # (B O, W - 1, V)
    return torch.cat((first, rest.unflatten(0, (B, O))), dim=2)


# ---------------------------------------------------------------------------------------------- examples to train on

def write_examples(folder, tokenizer_name, tasks, depths, n, *, shots=0, seed=0, n_val=500):
    """A dataset for fine-tuning: n examples in equal parts of every task and depth, one padded row each, with loss on the
    answer alone. The validation split has other examples, and marks, so that train.py says which part is learned."""
    tokenizer = get_tokenizer(tokenizer_name)
    kinds = [f'{task} {depth}' for task in tasks for depth in depths]
    start, rows = start_of_document(tokenizer), {}
    for split, total in (('train', n), ('val', n_val)):
        rows[split] = []
        for k, kind in enumerate(kinds):
            task, depth = kind.split()
            count = total * (k + 1) // len(kinds) - total * k // len(kinds)
            for e in few_shot(task, max(count, 1), shots=shots, depth=int(depth), seed=draw(seed, split))[:count]:
                prompt, answer = [*start, *tokenizer.encode(e.prompt)], tokenizer.encode(e.options[e.answer])
                rows[split].append((prompt + answer, [0] * len(prompt) + [1] * len(answer), k + 1))
    longest = max(len(tokens) for split in rows.values() for tokens, _, _ in split)
    for split, examples in rows.items():
        tokens, mask, marks = [], [], []
        for ids, counts, kind in examples:
            pad = [0] * (longest - len(ids))
            tokens += ids + pad
            mask += counts + pad
            answer = [kind * c for c in counts] + pad
            answer[counts.index(1)] += 128
            marks += answer
        write_dataset(folder, split, tokenizer_name, tokens, mask=mask, marks=marks if split == 'val' else None, kinds=kinds,
                      row=longest, origin=dict(made_by='primitives.py', n=len(examples), shots=shots, seed=seed))
    return longest


# ---------------------------------------------------------------------------------------------- the command

def pick_tasks(text, data):
    "The tasks' names. `auto` is what the run was trained on: the toy's forms or the papers'."
    if text == 'auto':
        text = 'toy' if Path(str(data)).name == 'toy' else 'papers'
    return {'toy': list(TOY_TASKS), 'papers': list(TASKS)}.get(text) or text.split(',')


def main(argv=None):
    parser = argparse.ArgumentParser(description='Score checkpoints on the reasoning primitives.')
    parser.add_argument('runs', nargs='*', help='folders that train.py wrote; NAME-SEED are averaged over their seeds')
    parser.add_argument('--tasks', default='auto', help=f'papers ({", ".join(TASKS)}), toy ({", ".join(TOY_TASKS)}), or some by name')
    parser.add_argument('--depths', default='0,1,2', help='of assignment: how many aliases stand before the value')
    parser.add_argument('--shots', default='0', help='such as 0,1,2,5: accuracy against shots')
    parser.add_argument('--n', type=int, default=200, help='examples of each task, depth and number of shots')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--loop', help='run the layers in another order, such as 3-2x2-3')
    parser.add_argument('--device', default='auto')
    parser.add_argument('--out', type=Path, default=Path('out/primitives.png'))
    parser.add_argument('--write', type=Path, help='write examples to fine-tune on to this folder, instead of scoring')
    parser.add_argument('--tokenizer', default='bytes', help='of the examples that are written')
    args = parser.parse_args(argv)
    from checkpoint import build_model, load
    from launch import pick_device
    from loop import fit_loop
    from plot import by_seed, draw_shots, mean, run_names, show, standard_error, write_csv
    from tqdm import tqdm
    try:
        depths, shots = (list(map(int, text.split(','))) for text in (args.depths, args.shots))
        if args.write:
            tasks = pick_tasks(args.tasks, 'toy')
            row = write_examples(args.write, args.tokenizer, tasks, depths, args.n, shots=shots[0], seed=args.seed)
            return print(f'{args.write}: {args.n} examples of {", ".join(tasks)} at depth {args.depths}, rows of {row} tokens')
        if not args.runs:
            parser.error('which run? such as out/lidas')
        device, rows, left_out = pick_device(args.device), [], set()
        for name, path in tqdm(run_names(args.runs).items(), desc='scoring', unit='run'):
            state = load(path)
            model, tokenizer = build_model(state, path).to(device).eval(), get_tokenizer(path)
            if args.loop:
                model.config.order = fit_loop(args.loop, len(model.layers))
            for task in pick_tasks(args.tasks, state['config'].get('data')):
                for depth in depths if 'assign' in task else [0]:
                    for k in shots:
                        try:
                            examples = few_shot(task, args.n, shots=k, depth=depth, seed=args.seed)
                            accuracy, (low, high) = score(model, tokenizer, examples)
                        except ValueError as error:
                            if not k:
                                raise
                            left_out.add(f'{k} shots of {task} at depth {depth} are left out: {error}')
                            continue
                        rows.append(dict(run=name, task=f'{task} {depth}' if 'assign' in task else task, shots=k,
                                         n=args.n, chance=1 / len(examples[0].options), accuracy=accuracy, low=low, high=high))
    except ValueError as error:
        print(f'primitives.py: {error}', file=sys.stderr)
        raise SystemExit(2) from None
    print(*sorted(left_out), sep='\n')
    groups = by_seed({name: name for name in run_names(args.runs)})
    for row in rows:        # a line for each task, number of shots and run, or mean over a run's seeds
        name, members = next((name, members) for name, members in groups.items() if row['run'] in members)
        if row['run'] == members[0]:
            mine = [r['accuracy'] for r in rows if r['run'] in members and (r['task'], r['shots']) == (row['task'], row['shots'])]
            spread = f'{row["low"]:.1%} to {row["high"]:.1%}' if len(mine) == 1 else f'± {standard_error(mine):.1%}, {len(mine)} seeds'
            print(f'{name:24} {row["task"]:14} {row["shots"]} shots {mean(mine):7.1%}  ({spread}; chance {row["chance"]:.0%})')
    write_csv(rows, args.out)
    show(draw_shots, (rows, groups), args.out)


if __name__ == '__main__':
    import primitives
    primitives.main()
