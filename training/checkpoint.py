"""What a run's folder holds: ckpt.pt, kept checkpoints, run.json and log.jsonl.
Usage: model, saved = load('out/lidas')         # or a checkpoint itself, 'out/lidas/ckpt-48.pt'
"""
import ast
import contextlib
import hashlib
import inspect
import json
import os
import shutil
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.serialization import get_unsafe_globals_in_checkpoint

from model import LM, ModelConfig, Refused, Span, require, spans_in
from retrofit import Core
from training.machine import process
from wrapper import Window

ROOT = Path(__file__).resolve().parents[1]      # where the book's files are
DAY = 24 * 3600


def save(folder, model, states, names=('ckpt.pt',), **more):
    """Write all that a resumed run needs, under one or more names. A run resumes from ckpt.pt.
    `states` is what its optimizers remember."""
    rank, size = process()
    require(all(p.isfinite().all() for p in model.parameters()),    # an update may overflow
            f'weights that are not finite are not saved in {folder}')
    if rank == 0:
        first, *others = [Path(folder) / name for name in names]
        saved = dict(model=model.state_dict(), order=written(model.order), optimizers=states,
                     model_config=asdict(model.config), **more)
        with whole(first) as new:
            torch.save(saved, new)
            require(not get_unsafe_globals_in_checkpoint(new), 'no checkpoint of this run could be '
                    'read again: an optimizer or a Span of yours keeps functions, or numbers of '
                    'numpy')
        for path in others:
            with whole(path) as new:
                shutil.copy(first, new)         # (a link would change with what is copied over it)
    if size > 1:
        dist.barrier()          # or torchrun might end the first process while it saves


def try_to_open(folder):
    """Open the first checkpoint of a run once, so that what could not be opened again is told
    before the first step. If it cannot be opened, it is removed."""
    path = ckpt_of(folder)
    try:
        load(folder)
    except Exception as error:
        path.unlink()
        raise Refused('no checkpoint of this run could be opened again: '
                      f'{type(error).__name__}: {error}') from error


def ckpt_of(run):
    "A run's last checkpoint, or one that is named itself."
    return Path(run) if Path(run).is_file() else Path(run) / 'ckpt.pt'


def load(folder):
    "(the model of a checkpoint, what else that says)."
    path = ckpt_of(folder)
    require(path.exists(), f'there is no run in {folder}: {path} is not there')
    # mapped, but on Windows, where a mapped file could not be replaced
    saved = torch.load(path, map_location='cpu', weights_only=True, mmap=os.name == 'posix')
    model = LM(ModelConfig(**saved['model_config']))
    model.order = read_order(saved['order'])
    model.load_state_dict(renamed(saved.pop('model')))
    return model, saved


def renamed(weights):
    "Return a model's weights under today's names. In older checkpoints the model has the adapter."
    return {'spans.0.adapter.weight' if name == 'adapter.weight' else name: weight
            for name, weight in weights.items()}


def as_written(c):
    """Return the settings as files keep them. A function and the class of a Span of your own are
    kept as their source, so that an edit is noticed."""
    config = vars(c) | dict(order=c.order and written(c.order))
    for name, value in vars(c).items():
        if inspect.isclass(value):
            config[name] = value.__name__
        elif callable(value):
            require(inspect.isfunction(value), f'{name}={value}: write a def, which has lines')
            config[name] = source_of(value)
    for kind in [c.core or Core, *map(type, spans_in(c.order or ()))]:
        for parent in kind.__mro__:
            if issubclass(parent, Span) and parent not in (Span, Core, Window):
                config[f'class {parent.__name__}'] = source_of(parent)
    return json.loads(json.dumps(config, default=str))  # as in run.json: tuples become lists


def source_of(thing, above=()):
    """Return the source of a function or class, followed by what it uses of its own file:
    constants, and functions, which may use more. `above` are the things that use this one."""
    text = textwrap.dedent(inspect.getsource(thing))
    functions = [thing] if inspect.isfunction(thing) else vars(thing).values()
    for function in filter(inspect.isfunction, functions):
        for name in sorted(names_in(function.__code__) & function.__globals__.keys()):
            value = function.__globals__[name]
            is_neighbour = getattr(value, '__globals__', None) is function.__globals__
            if isinstance(value, (bool, int, float, str, tuple, list, dict)):
                text += f'\n{name} = {value!r}'
            elif is_neighbour and value not in above:
                text += '\n' + source_of(value, (*above, thing))
    return text


def names_in(code):
    "Return the global names that compiled code uses, including in functions inside it."
    inside = (constant for constant in code.co_consts if inspect.iscode(constant))
    return {*code.co_names}.union(*map(names_in, inside))


def same_source(a, b):
    "Return whether two values of a setting are equal, or are sources of the same code."
    are_sources = all(str(value).lstrip().startswith(('def ', 'class ', '@')) for value in (a, b))
    return a == b or are_sources and code_of(a) == code_of(b)


def code_of(source):
    "Return the code of a source, without comments and docstrings."
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.dump(tree)


def book_hash():
    "Return a hash of the book's files. It may change, and a run records it."
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob('*.py'), *ROOT.glob('training/*.py')]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def written(order):
    "An order as files keep it: numbers, and of a Span the name of its class and its settings."
    return [item if isinstance(item, int) else
            dict(step=type(item).__name__, items=written(item.items), settings=item.settings())
            for item in order]


def read_order(items):
    "The order that `written` gave."
    order = []
    for item in items:
        if not isinstance(item, int):
            kind, within = span_class(item['step']), read_order(item['items'])
            try:
                item = kind(within, **item['settings'])
            except TypeError as error:
                raise Refused(f'a {item["step"]} is not made with these settings (any more): '
                              f'{error}') from None
        order.append(item)
    return order


def span_class(name):
    """The class of Spans with this name. Whoever has one of their own has imported it: no code is
    run because a checkpoint names it."""
    classes = [Span]
    for each in classes:
        classes += each.__subclasses__()
    classes = [each for each in classes if each.__name__ == name]
    require(classes, f'the class {name} of a Span is needed: name its file first, as in '
            'nanodepth mine.py evaluate out/run, or import it')
    # If a notebook's cell was run again, or a script is also imported, the last one counts.
    files = {defined_in(kind) for kind in classes} - {'__main__'}
    require(len(files) <= 1, f'Spans of several files are called {name}: {files}')
    return classes[-1]


def defined_in(kind):
    "Return the file of a class, which its functions know, or its module if it has no function."
    for value in vars(kind).values():
        if inspect.isfunction(value) and '__file__' in value.__globals__:
            return os.path.abspath(value.__globals__['__file__'])
    return kind.__module__


@contextlib.contextmanager
def whole(path):
    """Yield where to write a file. The file takes its name at the end, so no reader ever sees half
    of it."""
    new = path.with_name(f'.{path.name}.{os.getpid()}.unfinished')
    try:
        yield new
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    with open(new, 'rb+') as file:
        os.fsync(file.fileno())         # on the disk before its name is
    os.replace(new, path)


def remove_unfinished(folder):
    "Remove what killed processes have left, if it is so old that no process still writes it."
    for path in folder.glob('.*.unfinished'):
        if time.time() - path.stat().st_mtime > DAY:
            path.unlink()


def open_folder(beginning, datasets):
    """Open a run's folder, new or as it is. It gets run.json, the tokenizer's files, and the log,
    which begins with the lines of the past. Returns the log, open for more."""
    rank, _ = process()
    if rank > 0:
        return open(os.devnull, 'w')
    out, past = Path(beginning.c.out_dir), beginning.past
    out.mkdir(parents=True, exist_ok=True)
    remove_unfinished(out)
    about = datasets[0].about
    with whole(out / 'run.json') as new:
        new.write_text(json.dumps(dict(
            tokenizer=about['tokenizer'], fingerprint=about['fingerprint'], config=past.config,
            torch=torch.__version__, book=past.book,
            data=[dataset.about['origin'] for dataset in datasets]), indent=1))
    copy = beginning.copy_tokenizer
    if not beginning.is_resumed and not (copy and copy(out)):
        copy_tokenizer_files((beginning.origin, past.config['init_from'], datasets[0].folder), out)
    lines = read_log(ckpt_of(beginning.origin).with_name('log.jsonl')) if past.step else []
    with whole(out / 'log.jsonl') as new:
        new.write_text(''.join(json.dumps(line) + '\n' for line in lines
                               if line['step'] <= past.step))
    return open(out / 'log.jsonl', 'a', buffering=1)


def copy_tokenizer_files(sources, out):
    "Copy the files of a tokenizer from the first of some runs and datasets that has them."
    for folder in (ckpt_of(source).parent for source in sources if source):
        if (folder / 'tokenizer.json').exists():
            if folder.samefile(out):
                return
            for pattern in ('*token*.json', 'generation_config.json', '*.jinja'):
                for path in folder.glob(pattern):
                    shutil.copy(path, out)
            return


def read_log(path):
    "The lines of a log.jsonl, if there is one."
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):   # a process that was killed leaves half of one
            lines.append(json.loads(text))
    return lines
