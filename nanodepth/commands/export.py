"""Write a checkpoint as a Hugging Face folder, as it is or in another order. With one folder, print
what it is.

Usage:
    nanodepth export out/lidas                # says what is in it
    nanodepth export out/lidas out/lidas_hf   # for transformers
    nanodepth export MODEL.gguf out/model     # of llama.cpp, for every other command
    nanodepth export out/smollm2 out/deeper --loop=8-4x2-18   # layers 8 to 11 twice
"""
from dataclasses import dataclass
from typing import Literal

import torch

from nanodepth.common.errors import Refused
from nanodepth.common.options import read
from nanodepth.models.checkpoint import load_model, open_any
from nanodepth.models.gguf import write_gguf
from nanodepth.models.hf import answer_of, save_hf
from nanodepth.models.hf_recurrent import save_raven
from nanodepth.asking.way import Way, Ways, read_way


@dataclass(kw_only=True)
class Options(Ways):
    WORDS = ['run', 'target']
    run: str                                # a folder that train.py wrote, or a Hugging Face one
    target: str | None = None               # the folder to write
    dtype: Literal['float32', 'bfloat16'] | None = None     # of the weights; None: as they are
    # of a recurrent model, which is written in the format of its authors: another first state in
    # each forward from now on
    fresh: bool = False


def main(argv=None):
    options = read(Options, argv, __doc__)
    way = read_way(options)
    if options.run.endswith('.gguf'):
        return export_gguf(options, way)
    if way.dials:
        raise Refused(f'{way}: a folder holds layers and their order, and no code that loops a '
                      'window: from nanodepth import looped')
    model = load_model(options.run)
    with way.apply(model):
        before = some_logits(model)
        if options.dtype:
            model.to(getattr(torch, options.dtype))
        export(options, model)
    if options.target:
        compare(before, load_model(options.target), options.target)


def export_gguf(options, way):
    "The file as a folder; in other orders that folder can be exported again."
    if not options.target or str(way) != str(Way()):
        raise Refused(f'{options.run}: a GGUF file is first written as it is: nanodepth export '
                      f'{options.run} FOLDER')
    dtype = options.dtype or 'float32'
    model = write_gguf(options.run, options.target, getattr(torch, dtype))
    print(f'{options.target}: {model.num_parameters():,} parameters, {dtype}, with the tokenizer '
          'of the file; every command opens it')
    _, again = open_any(options.target, dtype=dtype)
    compare(some_logits(model), again, options.target)


@torch.no_grad()
def some_logits(model):
    "A model's logits after 16 tokens, drawn once and for all."
    config = answer_of(model).config
    n = min(16, config.context)
    tokens = torch.randint(config.vocab_size, (1, n), generator=torch.Generator().manual_seed(0))
    if not getattr(model, 'recurs', False):
        return answer_of(model)(tokens).float()
    drawn, model.fresh = model.fresh, False         # with fresh noise no two forwards are equal
    logits = model(tokens).float()
    model.fresh = drawn
    return logits


def compare(before, again, target):
    "Say how far the model that was written is from the one that it was."
    after = some_logits(again)
    print(f'{target} was opened again: the logits of {after.shape[1]} tokens differ by at most '
          f'{(after - before).abs().max():.2g}, and the largest is {before.abs().max():.2g}')


def export(options, model):
    c = model.config
    deep = len(model.order)
    print(f'{options.run}: {model.num_params():,} parameters, {len(model.layers)} layers of width '
          f'{c.n_embd} and {c.n_head} heads ({c.n_kv_head} of keys), run {deep} deep, context '
          f'{c.context}, {str(model.norm.weight.dtype)[6:]}')
    if options.fresh and not model.recurs:
        raise Refused(f'--fresh is for a recurrent core, and {options.run} has none')
    if options.target and model.recurs:
        model.fresh = model.fresh or options.fresh
        ours = save_raven(model, options.target, tokenizer=options.run)
        print(f"{options.target}: in the authors' format (huginn_raven); load_model opens it, and "
              'transformers with trust_remote_code=True (its tokenizer with False, too)')
        if ours:
            print(f"their own code does not know {', '.join(ours)}")
    elif options.target:
        save_hf(model, options.target, tokenizer=options.run)
        print(f"{options.target}: {deep} layers of their own; "
              f"transformers.AutoModelForCausalLM.from_pretrained('{options.target}') opens it")
