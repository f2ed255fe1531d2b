"""Reasoning primitives: copying and variable assignment, small tasks whose difficulty is known exactly.

The idea: copying asks for what came after a word before, assignment for the value of a name: at depth 0 it stands one look back,
at depth 1 behind one alias, at depth 2 behind two. Followed one look at a time, depth d takes d + 1 of them, so these tasks
measure computation over the layers, apart from knowledge (a model that resolves all statements at once can do with about
log2(d + 1) + 1). Answers are chosen among given options by log-likelihood, after some examples with answers ("shots").

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix C, and "From Growing to Looping", appendix D.1 (the
forms), section 5.1 (accuracy against shots, fine-tuning); the tasks are Saunshi et al.'s, 2024.
Here: the papers print the forms of copying and of basic assignment, the latter with two spacings of the blank. They don't print
those of math and code, so TEMPLATES are ours; nor say which depths their averages hold, so each depth is told by itself.
Values are drawn so that none begins another (the papers' 1 and 13): the likelihood of ` 1` holds that of ` 13`. Real words are
a fixed list. The `toy_` tasks have the form of data/toy, which small models are trained on.

Usage:
    examples = few_shot('assign_basic', 200, shots=5, depth=1)
    accuracy, (low, high) = score(model, get_tokenizer('out/lidas'), examples)
    python nanodepth.py primitives out/lidas out/baseline --depths=0,1,2          # a table, a picture, a CSV file
    python data/sft/prepare.py --tasks=toy_assign --depths=4 --n=128    # examples to fine-tune on
"""
import argparse
import itertools
import json
import math
import random
import string
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import Refused
from data.tokenizer import get_tokenizer, start_of_document
from data.tokens import draw, write_dataset
from model import LM, KVCache


@dataclass
class Example:
    prompt: str
    options: list[str]      # continuations of the prompt, all different
    answer: int             # which of them is right


# ---------------------------------------------------------------------------------------------- one question
# A task is a function (rng, depth) -> (question, options, right option). Copying takes no notice of the depth.

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
    """n words, a piece of them once more, and what came next? In the papers' form that is always one of the last words and none
    of the piece: whoever knows just that is right in nearly half of the cases."""
    start = rng.randrange(n - again)
    shown = words + words[start:start + again]
    return f'Fill in the blank:\n\n{" ".join(shown)} ____ . ->', [' ' + w for w in words], ' ' + words[start + again]


def chain(rng, names, values, depth):
    """Statements that give values to as many names, and hand all of them on to new names, `depth` times, in a random order:
    (statements, {one of the last names: its value})."""
    n = len(values)
    level = dict(zip(names[:n], values))
    statements = list(level.items())
    for d in range(1, depth + 1):
        sources = rng.sample(list(level), n)
        fresh = dict(zip(names[d * n:(d + 1) * n], sources))
        statements += fresh.items()
        level = {alias: level[name] for alias, name in fresh.items()}
    return statements, level


def values_apart(rng, n):
    "n numbers from 1 to 25, none of which another one begins with."
    while True:
        values = [str(v) for v in rng.sample(range(1, 26), n)]
        if not any(a != b and b.startswith(a) for a in values for b in values):
            return values


def assignment(rng, depth, form, n=5):
    first, statement, question = TEMPLATES[form]
    letters = string.ascii_lowercase
    pool = list(letters) if (depth + 1) * n <= 26 else [a + b for a in letters for b in letters]
    statements, level = chain(rng, rng.sample(pool, (depth + 1) * n), values_apart(rng, n), depth)
    asked = rng.choice(list(level))
    return (first + ''.join(statement.format(*s) for s in statements) + question.format(asked),
            [f' {v}' for v in level.values()], f' {level[asked]}')


def toy_copy(rng, depth, n=8):
    words = [w.capitalize() for w in random_words(rng, n)]
    again = rng.randrange(1, n)
    return ''.join(words + words[:again]), words, words[again]


def toy_assign(rng, depth, n=4, statement='{}{}', question='?{}'):
    if (depth + 1) * n > 26:
        raise Refused(f'the toy has letters for depth {26 // n - 1} at most, not {depth}')
    statements, level = chain(rng, rng.sample(string.ascii_lowercase, (depth + 1) * n), rng.sample(string.digits, n), depth)
    asked = rng.choice(list(level))
    return ''.join(statement.format(*s) for s in statements) + question.format(asked), list(level.values()), level[asked]


def toy_code(rng, depth):
    "The same question with a sign between name and value, which the toy's mix does not have: to fine-tune on."
    return toy_assign(rng, depth, statement='{}={}')


TASKS = {
    'copy_random': lambda rng, depth: copying(rng, random_words(rng, 10)),
    'copy_words': lambda rng, depth: copying(rng, rng.sample(REAL_WORDS, 10)),
    'assign_basic': lambda rng, depth: assignment(rng, depth, 'basic'),
    'assign_math': lambda rng, depth: assignment(rng, depth, 'math'),
    'assign_code': lambda rng, depth: assignment(rng, depth, 'code'),
}
TOY_TASKS = {'toy_copy': toy_copy, 'toy_assign': toy_assign, 'toy_code': toy_code}


def few_shot(task, n, *, shots=5, depth=0, seed=0):
    """n examples of a task, each after `shots` others with their answers, fresh ones for each. Example i asks the same question
    whatever the shots are, so that accuracy against shots compares like with like."""
    make = {**TASKS, **TOY_TASKS}.get(task)
    if make is None:
        raise Refused(f'there is no task {task!r}: {", ".join([*TASKS, *TOY_TASKS])}')
    if shots < 0 or not 0 <= depth < 100 or n < 1:
        raise Refused(f'shots={shots} must not be negative, depth={depth} 0 to 99, and n={n} at least 1')
    examples, between = [], '' if task in TOY_TASKS else '\n\n'
    for i in range(n):
        rng = random.Random(draw(seed, f'{task} at depth {depth}', i))
        prompt, options, right = make(rng, depth)
        for _ in range(shots):
            question, _, answer = make(rng, depth)
            prompt = question + answer + between + prompt
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


SPREAD = 4          # tokens by which the prompts of a batch may differ


@torch.no_grad()
def log_likelihoods(model_like, tokenizer, examples, *, batch=64, share=True):
    """[(options,) of each example]: log-likelihoods of the options after the prompt. `model_like` maps tokens (B, T) to
    logits (B, T, V). One of our models reads each prompt once, and its options share the cache (share=False: they don't).
    Examples with prompts of nearly one length make a batch."""
    start = start_of_document(tokenizer)
    prompts = [[*start, *tokenizer.encode(e.prompt, allowed_special='all')] for e in examples]
    options = [[continuation(tokenizer, e.prompt, o) for o in e.options] for e in examples]
    context = getattr(getattr(model_like, 'config', None), 'context', math.inf)
    longest = max(len(p) + max(map(len, o)) for p, o in zip(prompts, options))
    if longest > context:
        raise Refused(f'a prompt with its answer has {longest} tokens, but the context is {context}')
    device = next((p.device for p in getattr(model_like, 'parameters', list)()), 'cpu')
    values, parts = [None] * len(examples), [[]]
    for i in sorted(range(len(examples)), key=lambda i: (len(options[i]), len(prompts[i]))):
        first = parts[-1][0] if parts[-1] else i
        alike = len(options[i]) == len(options[first]) and len(prompts[i]) - len(prompts[first]) <= SPREAD
        parts = parts if alike and len(parts[-1]) < batch else [*parts, []]
        parts[-1].append(i)
    for part in filter(None, parts):
        n = len(prompts[part[0]])               # what a longer prompt has behind that goes along with each option
        rows = [[prompts[i][n:] + o for o in options[i]] for i in part]
        width = max(len(row) for each in rows for row in each)
        padded = torch.tensor([[row + [0] * (width - len(row)) for row in each] for each in rows], device=device)             # (B, O, W)
        counts = torch.tensor([[[0] * (len(row) - len(o)) + [1] * len(o) + [0] * (width - len(row)) for row, o in zip(each, options[i])]
                               for each, i in zip(rows, part)], device=device)                                                # (B, O, W)
        prompt = torch.tensor([prompts[i][:n] for i in part], device=device)                                                  # (B, T)
        after = (shared if share and isinstance(model_like, LM) else separate)(model_like, prompt, padded)
        found = after.float().log_softmax(-1).gather(-1, padded[..., None])[..., 0]                                           # (B, O, W)
        for i, value in zip(part, found.masked_fill(counts == 0, 0).cpu().double().sum(-1)):
            values[i] = value
    return values


def continuation(tokenizer, prompt, text):
    "The tokens by which text continues a prompt. Some tokenizers begin whatever they are given with a space; not so in the middle."
    before, whole = (tokenizer.encode(t, allowed_special='all') for t in (prompt, prompt + text))
    return whole[len(before):] if whole[:len(before)] == before and len(whole) > len(before) else tokenizer.encode(text)


def separate(model_like, prompt, options):
    "Logits (B, O, W, V) at the options' tokens: every option with the whole prompt before it."
    B, O, W = options.shape
    rows = torch.cat((prompt[:, None].expand(B, O, -1), options), dim=-1)                       # (B, O, T + W)
    return model_like(rows.flatten(0, 1))[:, -W - 1:-1].unflatten(0, (B, O))


class Branched:
    "A slot of a cache, read by O rows for each of its own: they are put together with the prompt once, where they are needed."

    def __init__(self, slot, O):
        self.slot, self.O = slot, O

    def update(self, k, v):                                                                     # (B O, Hkv, W, hd) each
        return tuple(torch.cat((old[:, None].expand(-1, self.O, -1, -1, -1), new.unflatten(0, (-1, self.O))), dim=3).flatten(0, 1)
                     for old, new in ((self.slot.keys, k), (self.slot.values, v)))


def shared(model, prompt, options):
    "The same, with each prompt read once: its cache is handed to all of its options."
    B, O, W = options.shape
    cache = KVCache(len(model.order))
    first = model.head(model.norm(model.hidden(prompt, cache=cache)[:, -1:]))                   # (B, 1, V)
    first = first[:, None].expand(B, O, 1, -1)
    if W == 1:
        return first
    cache.layers = [Branched(slot, O) for slot in cache.layers]
    rest = model(options[..., :-1].flatten(0, 1), cache=cache)                     # (B O, W - 1, V)
    return torch.cat((first, rest.unflatten(0, (B, O))), dim=2)


# ---------------------------------------------------------------------------------------------- examples to train on

def write_examples(folder, tokenizer_name, tasks, depths, n, *, shots=0, seed=0, n_val=500):
    """A dataset for fine-tuning: n examples in equal parts of every task and depth, one padded row each, with loss on the
    answer alone. The validation split has other examples, and marks, so that train.py says which part is learned."""
    tokenizer = get_tokenizer(tokenizer_name)
    if n < 1:
        raise Refused(f'n={n}: at least one example')
    kinds = [f'{task} {depth}' for task in tasks for depth in depths_of(task, depths)]
    start, rows = start_of_document(tokenizer), {}
    for split, total in (('train', n), ('val', n_val)):
        rows[split] = []
        for k, kind in enumerate(kinds):
            task, depth = kind.split()
            count = total * (k + 1) // len(kinds) - total * k // len(kinds)
            for e in few_shot(task, max(count, 1), shots=shots, depth=int(depth), seed=draw(seed, split))[:count]:
                prompt, answer = [*start, *tokenizer.encode(e.prompt)], continuation(tokenizer, e.prompt, e.options[e.answer])
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
                      row=longest, origin=dict(made_by='primitives.py', tasks=tasks, n=len(examples), shots=shots, seed=seed))
    return longest


# ---------------------------------------------------------------------------------------------- the command

def depths_of(task, depths):
    return [0] if 'copy' in task else depths


def pick_tasks(text, context):
    "The tasks' names. `auto` is the papers' where their examples fit into the context, and else the toy's."
    if text == 'auto':
        text = 'toy' if context < 256 else 'papers'
    return {'toy': ['toy_copy', 'toy_assign'], 'papers': list(TASKS)}.get(text) or text.split(',')


def main(argv=None):
    parser = argparse.ArgumentParser(description='Score checkpoints on the reasoning primitives.')
    parser.add_argument('runs', nargs='+', help='folders that train.py wrote, or Hugging Face checkpoints; NAME-SEED are averaged over their seeds')
    parser.add_argument('--tasks', default='auto', help=f'papers ({", ".join(TASKS)}), toy (toy_copy, toy_assign), or some of them and toy_code by name')
    parser.add_argument('--depths', default='0,1,2', help='of assignment: how many aliases stand before the value')
    parser.add_argument('--shots', default='0', help='such as 0,1,2,5: accuracy against shots (the papers score at 5)')
    parser.add_argument('--n', type=int, default=200, help='examples of each task, depth and number of shots')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--loop', help='run the layers in another order, such as 3-2x2-3')
    parser.add_argument('--r', type=int, help='how often a recurrent core runs')
    parser.add_argument('--device', default='auto')
    parser.add_argument('--out', type=Path, default=Path('out/primitives.png'))
    args = parser.parse_args(argv)
    from tqdm import tqdm

    from common.errors import whole_numbers
    from engine.checkpoint import load_model
    from engine.launch import pick_device
    from report.logs import by_seed, run_names, write_csv
    from report.plot import draw_shots, show
    from retrofit import dial
    try:
        depths, shots = whole_numbers('--depths', args.depths), whole_numbers('--shots', args.shots)
        device, rows, left_out, paths = pick_device(args.device), [], {}, run_names(args.runs)
        lines = {name: group for group, names in by_seed({name: name for name in paths}).items() for name in names}
        taught = {name: examples_seen(path) for name, path in paths.items()}
        if any(taught.values()):        # 32/lidas-0, 128/lidas-0: one line, against the number of examples
            lines = {name: Path(line).name for name, line in lines.items()}
        for name, path in tqdm(paths.items(), desc='scoring', unit='run'):
            model, tokenizer = load_model(path, device), get_tokenizer(path)
            dial(model, loop=args.loop, r=args.r)
            for task in pick_tasks(args.tasks, model.config.context):
                for depth, k in itertools.product(depths_of(task, depths), shots):
                    examples = few_shot(task, args.n, shots=k, depth=depth, seed=args.seed)
                    try:
                        accuracy, (low, high) = score(model, tokenizer, examples)
                    except ValueError as error:         # too long for this model
                        left_out[f'{task} at depth {depth} with {k} shots is left out: {error}'] = True
                        continue
                    rows.append(dict(run=name, line=lines[name], examples=taught[name], shots=k,
                                     task=task if 'copy' in task else f'{task} {depth}', n=args.n,
                                     chance=1 / len(examples[0].options), accuracy=accuracy, low=low, high=high))
        if not rows:
            raise Refused(f'nothing could be scored: {next(iter(left_out))}')
    except ValueError as error:
        print(f'primitives.py: {error}', file=sys.stderr)
        raise SystemExit(2) from None
    print(*left_out, sep='\n', end='\n' if left_out else '')
    print_scores(rows)
    write_csv(rows, args.out)
    show(draw_shots, (rows, 'examples' if any(taught.values()) and len(shots) == 1 else 'shots'), args.out)


def examples_seen(path):
    "How many examples of primitives a run was fine-tuned on."
    about = Path(path) / 'run.json'
    origins = json.loads(about.read_text()).get('data', []) if about.exists() else []
    return sum(origin['n'] for origin in origins if origin.get('made_by') == 'primitives.py')


def print_scores(rows):
    "A line for each run and number of shots, a column a task: in %, with the standard error over the seeds, or else the interval."
    from common.columns import columns
    from report.logs import mean, number, standard_error
    tasks = {row['task']: f'{row["task"]}, % (chance {row["chance"]:.0%})' for row in rows}
    lines, keys = [['run', 'fine-tuned on', 'shots', *tasks.values()]], ('line', 'examples', 'shots')
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        lines.append(list(map(str, key)))
        for task in tasks:
            mine = [row for row in rows if row['task'] == task and tuple(row[k] for k in keys) == key]
            scores = [row['accuracy'] for row in mine]
            lines[-1].append('' if not mine else number(mean(scores), standard_error(scores), True) if len(mine) > 1 else
                             f'{100 * scores[0]:.1f} ({100 * mine[0]["low"]:.1f} to {100 * mine[0]["high"]:.1f})')
    print(columns(lines))
