"""Write a checkpoint as a Hugging Face folder, as it is or with its layers in another order.
    nanodepth export out/lidas out/lidas_hf                     # for transformers
    nanodepth export out/smollm2 out/deeper --loop=8-4x2-18     # layers 8 to 11 run twice
"""
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch

from nanodepth.common.errors import Refused
from nanodepth.common.files import new_folder
from nanodepth.common.options import read
from nanodepth.common.whose import copy_licence
from nanodepth.model import unrolled
from nanodepth.models.checkpoint import load_model
from nanodepth.models.hf import save_hf
from nanodepth.models.hf_recurrent import save_raven
from nanodepth.models.authors import AuthorsCore
from nanodepth.retrofit import core_of
from nanodepth.scoring.way import Ways, in_way, in_words, of_window, one_way


@dataclass(kw_only=True)
class Options(Ways):
    run: str                                # a folder that train.py wrote, or a Hugging Face one
    target: str                             # the folder to write
    dtype: Literal['float32', 'bfloat16'] | None = None     # of the weights; None: as they are
    # of a recurrent model, which is written in the format of its authors: another first state in
    # each forward from now on
    fresh: bool = False


def main(argv):
    options = read(Options, argv, ['run', 'target'])
    way = one_way(options)
    if of_window(way):
        raise Refused(f'{in_words(way)}: a checkpoint holds layers and their order, and no code '
                      'that runs a window: from nanodepth import wrapped')
    with new_folder(options.target) as folder:
        model = load_model(options.run)
        if options.fresh and not core_of(model):
            raise Refused(f'--fresh is for a recurrent core, and {options.run} has none')
        with in_way(model, way):
            print(f'{options.run}: {model.num_params():,} parameters, {len(model.layers)} layers, '
                  f'run {len(unrolled(model.order))} deep, {str(model.norm.weight.dtype)[6:]}')
            before = some_logits(model)
            if options.dtype:
                for p in model.parameters():        # tables of positions keep their precision
                    p.data = p.data.to(getattr(torch, options.dtype))
            export(options, model, folder)
            copy_licence(options.run, folder)
        compare(before, load_model(folder), options.target, options.dtype)


@torch.no_grad()
def some_logits(model):
    "A model's logits after 16 tokens, drawn once and for all."
    n = min(16, model.config.context)
    tokens = torch.randint(model.config.vocab_size, (1, n),
                           generator=torch.Generator().manual_seed(0))
    core = core_of(model) or SimpleNamespace()
    drawn = getattr(core, 'fresh', False)
    core.fresh = False                              # with fresh noise no two forwards are equal
    logits = model(tokens).float()
    core.fresh = drawn
    return logits


def compare(before, again, target, dtype=None):
    """Say how far the model that was written is from the one that it was. In the same type it must
    be that model, or nothing is left of it."""
    after = some_logits(again)
    difference, largest = (after - before).abs().max(), before.abs().max()
    if dtype is None and not difference <= 1e-3 * largest:
        raise Refused(f'{target}: opened again, it is another model (its logits differ by '
                      f'{difference:.2g}), so it was not kept')
    if dtype is None:
        print(f'{target} was opened again: the logits of {after.shape[1]} tokens differ by at most '
              f'{difference:.2g}, and the largest is {largest:.2g}')
    else:       # another type rounds otherwise: what is said stays the same, or nearly
        same = (after.argmax(-1) == before.argmax(-1)).float().mean()
        print(f'{target} was opened again, in {dtype}: of {after.shape[1]} likeliest next tokens '
              f'{same:.0%} are the same')


@torch.no_grad()
def compare_text(model, folder):
    """A recurrent folder brings code of its own, and what transformers hands to it differs between
    versions: a few of its likeliest tokens must be ours."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype='float32')
    theirs.generation_config = GenerationConfig()       # our generate knows no end and no penalty
    tokens = torch.randint(model.config.vocab_size, (1, 4),
                           generator=torch.Generator().manual_seed(0))
    some = min(8, model.config.context - 4)
    said = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                           max_new_tokens=some, pad_token_id=0)
    ours = model.float().eval().generate(tokens, some, temperature=0)
    if not torch.equal(said, ours):
        raise Refused(f'transformers writes other text with it than we do ({said[0, 4:].tolist()}, '
                      f'not {ours[0, 4:].tolist()}), so it was not kept: which version of '
                      'transformers is this?')


def fresh_core(core):
    "The Core with another first state in each forward."
    settings = dict(start='normal') | core.settings() | dict(fresh=True)
    return AuthorsCore(core.items, **settings)


def export(options, model, folder):
    "A model of ours, written into a folder that will have the target's name."
    about = dict(parent=Path(options.run).name, order=' '.join(map(str, unrolled(model.order))))
    if core := core_of(model):
        if options.fresh:
            model.order = [fresh_core(item) if item is core else item for item in model.order]
            core = core_of(model)
        ours = save_raven(model, folder, tokenizer=options.run, about=about)
        if not getattr(core, 'fresh', False):       # with fresh noise no two texts are equal
            compare_text(model, folder)
        print(f"{options.target}: in the authors' format (huginn_raven); load_model opens it, and "
              'transformers with trust_remote_code=True')
        if ours:
            print(f"their own code does not know {', '.join(ours)}")
        return
    save_hf(model, folder, tokenizer=options.run, about=about)
    print(f"{options.target}: {len(model.order)} layers of their own; "
          f"transformers.AutoModelForCausalLM.from_pretrained('{options.target}') opens it")
