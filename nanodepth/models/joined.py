"""Write and read models whose order has Spans: a Core, a Window, or a class of your own. The folder
has the weights under the names of model.py, the order in config.json, and the files of the book
joined into one file, with which transformers opens the folder (trust_remote_code=True). This file
never runs the code of a folder.
Usage: save_joined(model, 'out/hf', tokenizer='out/run')
"""
import ast
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import nanodepth
from nanodepth.common.files import read_json
from nanodepth.common.origin import file_of
from nanodepth.model import LM, ModelConfig, spans_in
from nanodepth.models.hf import filled, write_checkpoint
from nanodepth.training.checkpoint import defined_in, read_order, renamed, written
from nanodepth.wrapper import SOLVERS, Window

FAMILY = 'nanodepth'
CODE = 'modeling_nanodepth'
PARTS = 'model', 'loop', 'grow', 'retrofit', 'wrapper'


def code(model):
    """Return one text of Python: the book's files, the files of other Spans and solvers that the
    model has, and joined_code.py."""
    files = [nanodepth.file_of(name) for name in PARTS]
    for span in spans_in(model.order):
        files.append(file_of_class(type(span)))
        if isinstance(span, Window):
            files.append(Path(SOLVERS[span.solver].__code__.co_filename).resolve())
    files.append(Path(__file__).with_name('joined_code.py'))
    licence = (f'# nanodepth {nanodepth.__version__}: files of its book, joined, under the MIT '
               'licence\n')
    return licence + '\n\n'.join(map(standalone, dict.fromkeys(files)))


def file_of_class(kind):
    "Return the file in which a class is defined."
    file = Path(defined_in(kind))
    return (file if file.is_file() else Path(sys.modules[kind.__module__].__file__)).resolve()


def standalone(file):
    """Return the text of a file without three things: its imports of nanodepth and the book, what
    it does as a script, and entries in tables that PARTS do not have, such as MEASURES."""
    text, absent = file.read_text(encoding='utf-8'), set()
    lines = text.splitlines()
    for node in ast.parse(text).body:
        names = ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                 [node.module] if isinstance(node, ast.ImportFrom) else [])
        ours = {name.partition('.')[0] for name in names} & {'nanodepth', *nanodepth.BOOK}
        if ours and not {name.removeprefix('nanodepth.') for name in names} & {*PARTS}:
            absent |= {alias.asname or alias.name for alias in node.names}
        is_script = isinstance(node, ast.If) and '__name__' in ast.unparse(node.test)
        is_entry = isinstance(node, ast.Assign) and absent & {
            name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        if ours or is_script or is_entry:
            lines[node.lineno - 1:node.end_lineno] = [None] * (node.end_lineno - node.lineno + 1)
    return '\n'.join(line for line in lines if line is not None)


def save_joined(model, folder, tokenizer=None, about=None):
    "Write an LM, in any order, as a folder with the code with which transformers opens it."
    weights = {f'model.{name}': t for name, t in model.state_dict().items()
               if name != 'head.weight' or not model.config.tie_embeddings}
    write_checkpoint(model, folder, weights, dict(
        model_type=FAMILY, architectures=['DepthForCausalLM'], lm=asdict(model.config),
        order=written(model.order),
        auto_map=dict(AutoConfig=f'{CODE}.DepthConfig',
                      AutoModelForCausalLM=f'{CODE}.DepthForCausalLM')),
        tokenizer, {f'{CODE}.py': code(model)}, about)


def load_joined(path):
    "Return the LM of a folder that save_joined has written. The code in the folder is not run."
    from safetensors.torch import load_file
    c = read_json(file_of(path, 'config.json'))
    with torch.device('meta'):
        model = LM(ModelConfig(**c['lm']))
        model.order = read_order(c['order'])
    weights = {name.removeprefix('model.'): t
               for name, t in load_file(file_of(path, 'model.safetensors')).items()}
    if model.config.tie_embeddings:
        weights['head.weight'] = weights['embed.weight']
    return filled(model, renamed(weights))
