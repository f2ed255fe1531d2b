"""Make questions of the reasoning primitives: copying and variable assignment, small tasks of known
difficulty. Copying asks which word followed a word earlier. Assignment asks for the value of a
name; at depth 2 it is found through two aliases. So these tasks measure computation over the
layers, and not knowledge. Usage: examples = few_shot('assign_basic', 200, shots=5, depth=1)
"""
import random
import string
from dataclasses import dataclass

from nanodepth.common.errors import check_choice
from nanodepth.model import require
from nanodepth.training.plan import seed_for


@dataclass
class Example:
    "A question."
    prompt: str
    options: list[str]      # continuations of the prompt, all different
    answer: int             # the index of the right option


# ------------------------------------------------------------------------------------- one question
# A task is a function (rng, depth) -> (question, options, right option). Copying ignores the depth.

# The papers do not print their forms of math and code. These forms are from a public
# reimplementation, which cites Saunshi et al. (arXiv 2409.19044, appendix B). We did not see the
# appendix.
TEMPLATES = {               # {form: (the beginning, a statement, the question)}
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
    "Return n different words of three letters."
    words = []
    while len(words) < n:
        word = ''.join(rng.choice(string.ascii_lowercase) for _ in range(3))
        if word not in words:
            words.append(word)
    return words


def copying(rng, words, n=10, again=5):
    """Return a question that shows n words and then some of them again, and asks for the next word.
    In the papers' form the answer is always one of the last words, and never a repeated one. A
    model that knows only this gets nearly half of the answers right."""
    start = rng.randrange(n - again)
    shown = ' '.join(words + words[start:start + again])
    options = [f' {word}' for word in words]
    return f'Fill in the blank:\n\n{shown} ____ . ->', options, options[start + again]


def chain(rng, names, values, depth):
    """Return (statements, values). First, statements give each value a name. Then, `depth` times,
    they give each name an alias, at random. `values` is {one of the last names: its value}. A model
    that follows one alias at a time needs depth + 1 look-ups, and one that doubles its reach with
    each look-up needs about log2(depth + 1) + 1."""
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
    """Return n numbers from 1 to 25. None of them is the beginning of another one, because the
    likelihood of ` 1` includes that of ` 13`."""
    while True:
        values = [str(v) for v in rng.sample(range(1, 26), n)]
        if not any(a != b and b.startswith(a) for a in values for b in values):
            return values


def question_of(rng, chain_, statement, question, first='', space=''):
    "Return a question about one of the last names of a chain, its options and the right option."
    statements, level = chain_
    name = rng.choice(list(level))
    return (first + ''.join(statement.format(*s) for s in statements) + question.format(name),
            [space + v for v in level.values()], space + level[name])


def assignment(rng, depth, form, n=5):
    "Return a question of variable assignment, in a form of TEMPLATES."
    first, statement, question = TEMPLATES[form]
    letters = string.ascii_lowercase
    pool = list(letters) if (depth + 1) * n <= 26 else [a + b for a in letters for b in letters]
    values = chain(rng, rng.sample(pool, (depth + 1) * n), values_apart(rng, n), depth)
    return question_of(rng, values, statement, question, first, ' ')


def toy_copy(rng, depth, n=8):
    "Return a question of copying, without any words around it."
    words = [w.capitalize() for w in random_words(rng, n)]
    again = rng.randrange(1, n)
    return ''.join(words + words[:again]), words, words[again]


def toy_assign(rng, depth, n=4):
    "Return a question of variable assignment, without any words around it."
    require((depth + 1) * n <= 26, f'the toy has letters for depth {26 // n - 1}, not {depth}')
    names = rng.sample(string.ascii_lowercase, (depth + 1) * n)
    return question_of(rng, chain(rng, names, rng.sample(string.digits, n), depth), '{}{}', '?{}')


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
    """Return n Examples of a task, each after `shots` other questions with their answers, which are
    drawn for each Example. Example i asks the same question for any number of shots, so that scores
    can be compared. The tasks are from Saunshi et al., as in "Do Depth-Grown Models Overcome the
    Curse of Depth?", appendix C, and "From Growing to Looping", section 5.1 and appendix D.1. These
    papers do not tell over which depths they average, so here each depth is a separate task."""
    check_choice('task', task, tasks := TASKS | TOY_TASKS)
    require(shots >= 0, f'shots={shots} must not be negative')
    require(0 <= depth < 100, f'depth={depth} must be from 0 to 99')
    require(n > 0, f'n={n} must be at least 1')
    make, examples = tasks[task], []
    between = '' if task in TOY_TASKS else '\n\n'
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
    """Return the tokens of a text that follows a prompt. (Some tokenizers put a space before a
    text, but not in its middle, so both are tokenized together.)"""
    before, whole = (tokenizer.encode(t, allowed_special='all') for t in (prompt, prompt + text))
    return (whole[len(before):] if whole[:len(before)] == before and len(whole) > len(before)
            else tokenizer.encode(text))
