"""Write a checkpoint as a Hugging Face folder, as it is or in another order. With one folder, print
what it is.

Usage:
    nanodepth export out/lidas                # says what is in it
    nanodepth export out/lidas out/lidas_hf   # for transformers
    nanodepth export SmolLM-360M out/deeper --loop=8-4x2-20   # layers 8 to 11 twice
"""
from dataclasses import dataclass

from nanodepth.common.errors import Refused
from nanodepth.common.options import read
from nanodepth.engine.checkpoint import load_model
from nanodepth.engine.hf import save_hf
from nanodepth.engine.hf_recurrent import save_raven
from nanodepth.engine.way import Ways, read_way


@dataclass(kw_only=True)
class Options(Ways):
    WORDS = ['run', 'target']
    run: str                                # a folder that train.py wrote, or a Hugging Face one
    target: str | None = None               # the folder to write
    # of a recurrent model, which is written in the format of its authors: another first state in
    # each forward from now on
    fresh: bool = False


def main(argv=None):
    options = read(Options, argv, __doc__)
    way = read_way(options)
    if way.dials:
        raise Refused(f'{way}: a folder holds layers and their order, and no code that loops a '
                      'window: from nanodepth import looped')
    with way.apply(load_model(options.run)) as model:
        export(options, model)


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
              'transformers with trust_remote_code=True')
        if ours:
            print(f"their own code does not know {', '.join(ours)}")
    elif options.target:
        save_hf(model, options.target, tokenizer=options.run)
        print(f"{options.target}: {deep} layers of their own; "
              f"transformers.AutoModelForCausalLM.from_pretrained('{options.target}') opens it")
