"""Reasoning primitives: copying and variable assignment, small tasks of known difficulty. Copying
asks which word followed a word before. Assignment asks for the value of a name, at depth 2 through
two aliases. So these tasks measure computation over the layers, and not knowledge.
Usage: examples = few_shot('assign_basic', 200, shots=5, depth=1)
"""
import random
import string
from dataclasses import dataclass

from nanodepth.common.errors import check_choice
from nanodepth.model import require
from nanodepth.training.plan import seed_for


@dataclass
class Example:
    prompt: str
    options: list[str]      # continuations of the prompt, all different
    answer: int             # which of them is right


# ------------------------------------------------------------------------------------- one question
# A task is a function (rng, depth) -> (question, options, right option). Copying ignores the depth.

# The papers do not print their forms of math and code. These are Saunshi et al.'s (arXiv
# 2409.19044, appendix B), by a public reimplementation that cites it; we did not see the appendix.
TEMPLATES = {               # what comes first, a statement, the question
    'basic': ('Fill in blank:\n\n', '{}={}\n', '{}=____ . ->'),
    'math': ('The following is a set of simple mathematical equations.\n\n', '{}={}\n',
             'What is the numerical value of {}?\nAnswer:'),
    'code': ('The following is a very short Python program. Use the program to resolve the value '
             'of the variable in the question.\n\nProgram:\n', '{} = {}\n',
             '\nQuestion:\nWhat is the value of {}?\nAnswer:'),
}
REAL_WORDS = '''
apple arm baby back ball bank bed bell bird blue boat body book box boy bread brown cake card cat
chair city clock cloud coat cold corn cow cup day desk dog door dress duck earth egg eye face farm
field fire fish floor foot game garden girl glass gold grass green hand hat head hill horse house
ice king lake leaf light lion milk money moon mouth night nose page paper park party pen pig rain
red ring river road rock room rose salt sand school sea ship shoe sky snow song star stone street
sun table time town train tree wall watch water white wind winter wood yard'''.split()


def random_words(rng, n):
    "n different words of three letters."
    words = []
    while len(words) < n:
        word = ''.join(rng.choice(string.ascii_lowercase) for _ in range(3))
        if word not in words:
            words.append(word)
    return words


def copying(rng, words, n=10, again=5):
    """n words, then some of them again: which word is next? In the papers' form it is always one
    of the last words and never a repeated one: knowing only that gives nearly half of the
    answers."""
    start = rng.randrange(n - again)
    shown = ' '.join(words + words[start:start + again])
    options = [f' {word}' for word in words]
    return f'Fill in the blank:\n\n{shown} ____ . ->', options, options[start + again]


def chain(rng, names, values, depth):
    """Statements that give each value a name, then `depth` times pass all values on to new names,
    randomly matched: (statements, {one of the last names: its value}). A model that looks up one
    alias at a time needs depth + 1 looks, and all at once about log2(depth + 1) + 1."""
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
    """n numbers from 1 to 25, none the beginning of another, because the likelihood of ` 1`
    includes that of ` 13`."""
    while True:
        values = [str(v) for v in rng.sample(range(1, 26), n)]
        if not any(a != b and b.startswith(a) for a in values for b in values):
            return values


def ask(rng, chain_, statement, question, first='', space=''):
    "Statements and the question for one of the last names, as a task gives them."
    statements, level = chain_
    asked = rng.choice(list(level))
    return (first + ''.join(statement.format(*s) for s in statements) + question.format(asked),
            [space + v for v in level.values()], space + level[asked])


def assignment(rng, depth, form, n=5):
    first, statement, question = TEMPLATES[form]
    letters = string.ascii_lowercase
    pool = list(letters) if (depth + 1) * n <= 26 else [a + b for a in letters for b in letters]
    values = chain(rng, rng.sample(pool, (depth + 1) * n), values_apart(rng, n), depth)
    return ask(rng, values, statement, question, first, ' ')


def toy_copy(rng, depth, n=8):
    words = [w.capitalize() for w in random_words(rng, n)]
    again = rng.randrange(1, n)
    return ''.join(words + words[:again]), words, words[again]


def toy_assign(rng, depth, n=4):
    require((depth + 1) * n <= 26, f'the toy has letters for depth {26 // n - 1}, not {depth}')
    names = rng.sample(string.ascii_lowercase, (depth + 1) * n)
    return ask(rng, chain(rng, names, rng.sample(string.digits, n), depth), '{}{}', '?{}')


TASKS = {
    'copy_random': lambda rng, depth: copying(rng, random_words(rng, 10)),
    'copy_words': lambda rng, depth: copying(rng, rng.sample(REAL_WORDS, 10)),
    'assign_basic': lambda rng, depth: assignment(rng, depth, 'basic'),
    'assign_math': lambda rng, depth: assignment(rng, depth, 'math'),
    'assign_code': lambda rng, depth: assignment(rng, depth, 'code'),
}
TOY_TASKS = {
    'toy_copy': toy_copy,
    'toy_assign': toy_assign,
}


def few_shot(task, n, *, shots=5, depth=0, seed=0):
    """n examples of a task, each after `shots` others with their answers, fresh ones for each.
    Example i asks the same question whatever the shots are, so that like is compared with like.
    The tasks are Saunshi et al.'s, as in "Do Depth-Grown Models Overcome the Curse of Depth?",
    appendix C, and "From Growing to Looping", section 5.1 and appendix D.1. These do not say which
    depths they average, so here each depth is a task of its own."""
    check_choice('task', task, tasks := TASKS | TOY_TASKS)
    require(shots >= 0 and 0 <= depth < 100 and n > 0, f'shots={shots} must not be negative, '
            f'depth={depth} 0 to 99, and n={n} at least 1')
    make, examples, between = tasks[task], [], '' if task in TOY_TASKS else '\n\n'
    for i in range(n):
        rng = random.Random(seed_for(seed, f'{task} at depth {depth}', i))
        prompt, options, right = make(rng, depth)
        for _ in range(shots):
            question, _, answer = make(rng, depth)
            prompt = question + answer + between + prompt
        rng.shuffle(options)
        examples.append(Example(prompt, options, options.index(right)))
    return examples


def continuation(tokenizer, prompt, text):
    """The tokens by which text continues a prompt. Some tokenizers put a space before any
    text, but not in the middle."""
    before, whole = (tokenizer.encode(t, allowed_special='all') for t in (prompt, prompt + text))
    return (whole[len(before):] if whole[:len(before)] == before and len(whole) > len(before)
            else tokenizer.encode(text))
