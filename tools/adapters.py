"""Our models, and Hugging Face's with their middle looped, as lm-eval knows models.

The idea: the harness asks three things of a model: the log-likelihood of a continuation, that of a
whole text, and text that goes on until a stop. Each is a dozen lines over an `LM`; for other
families lm-eval's own `hf` model does it, and only its forward is looped.

Paper: "Training-Free Looped Transformers", section 3.1 (lm-eval, log-likelihoods and generation).
Here: `nanodepth` for runs of ours, looped, retrofitted or wrapped, `nanodepth-hf` for Hugging Face
checkpoints; both take what wrapper.patch takes.

Usage:
    lm = open_model('out/lidas')  # the one that fits; evaluate.harness(lm, tasks) scores it
    adapter()(path, loop='3-2x2-3'), hf_adapter()(path, window='3-5', K=3)
"""
import functools
import inspect
from pathlib import Path

import torch
from tqdm import tqdm

from common.errors import Refused
from common.files import read_json
from data.tokenizer import (
    END_OF_TEXT,
    get_tokenizer,
    on_hub,
    readable,
    start_of_document,
    tokenizer_file,
)
from data.tokens import draw
from engine.checkpoint import load_model, set_depth
from engine.launch import pick_device
from wrapper import SOLVERS, patch


@torch.no_grad()
def log_likelihoods(model, pairs, batch_size, device, max_length):
    """[(log-likelihood, is it the greedy choice)] of each (context, continuation), lists of tokens.
    Long ones first, padded on the right, where no token sees it; only the continuation's places go
    through the head."""
    found, inputs = [None] * len(pairs), {}
    # what is too long loses its beginning; equal inputs are read once
    for i, (context, continuation) in enumerate(pairs):
        row = (context + continuation)[-max_length - 1:]
        if continuation:
            inputs.setdefault(tuple(row[:-1]), []).append((i, row[1:][-len(continuation):]))
        # it has become one token with the end of its context
        else:
            found[i] = 0.0, True
    inputs = sorted(inputs.items(), key=lambda item: -len(item[0]))
    for at in tqdm(range(0, len(inputs), batch_size), desc='log-likelihoods', unit='batch',
                   disable=len(inputs) <= batch_size):
        rows, asked = zip(*inputs[at:at + batch_size])
        # (B, T)
        tokens = torch.tensor([row + (0,) * (len(rows[0]) - len(row)) for row in rows],
                              device=device)
        hidden = model.norm(model.hidden(tokens))  # (B, T, C)
        for row, continuations, h in zip(rows, asked, hidden):
            for i, continuation in continuations:
                targets = torch.tensor(continuation, device=device)  # (N,)
                logits = model.head(h[len(row) - len(targets):len(row)]).float()  # (N, V)
                value = logits.log_softmax(-1).gather(-1, targets[:, None]).sum().item()
                found[i] = value, bool((logits.argmax(-1) == targets).all())
    return found


def generate(model, prompts, tokenizer, device, *, tokens, stops, end, temperature, seed):
    """Texts that go on from prompts (lists of equally many tokens), each until a stop, a token of
    `end`, or `tokens` tokens."""
    def text(row):
        ids = row[len(prompts[0]):].tolist()
        place = next((i for i, token in enumerate(ids) if token in end), None)
        ended, said = place is not None, readable(tokenizer,
                                                  [token for token in ids[:place]
                                                   if token not in special])
        cut = min([said.find(stop) for stop in stops if stop and stop in said], default=-1)
        return (said if cut < 0 else said[:cut]), ended or cut >= 0

    special = {tokenizer.encode_single_token(token) for token in tokenizer.special_tokens_set}
    generator = torch.Generator(device).manual_seed(seed)
    out = model.generate(torch.tensor(prompts, device=device), tokens, temperature=temperature,
                         generator=generator,
                         stop=lambda rows: all(text(row)[1] for row in rows))
    return [text(row)[0] for row in out]


def texts_of(lm, asked, silent):
    "The texts of (prompt, tokens, temperature, stops), those alike in a batch."
    texts, groups = [None] * len(asked), {}
    for i, (ids, *settings) in enumerate(asked):
        groups.setdefault((len(ids), *settings), []).append((i, ids))
    parts = [(key, group[at:at + lm.batch_size]) for key, group in groups.items()
             for at in range(0, len(group), lm.batch_size)]
    for (_, most, temperature, stops), part in tqdm(parts, desc='texts', unit='batch',
                                                    disable=silent):
        said = generate(lm.model, [ids for _, ids in part], lm.tokenizer, lm.device, tokens=most,
                        stops=stops, end=lm.end, temperature=temperature,
                        seed=draw(0, 'evaluate', part[0][0]))
        for (i, _), text in zip(part, said):
            texts[i] = text
    return texts


class Answers:
    "What lm-eval asks of one of our models; adapter() makes a model of the harness of it."

    def __init__(self, pretrained, loop=None, r=None, batch_size=8, device='auto', dtype='auto',
                 max_length=None, add_bos_token=None,
                 max_batch_size=None, **wrapped):
        super().__init__()
        if str(device).startswith('cuda') and not torch.cuda.is_available():
            device = 'auto'         # lm-eval's command line asks for cuda:0 by itself
        self._device = pick_device(device or 'auto')
        self.model = load_model(pretrained, self._device)
        if dtype != 'auto':
            self.model.to(getattr(torch, str(dtype)))
        set_depth(self.model, loop=str(loop) if loop else None, r=None if r is None else int(r))
        self.tokenizer = get_tokenizer(pretrained)
        self.batch_size = 8 if str(batch_size).startswith('auto') else int(batch_size)
        self.max_length = int(max_length or self.model.config.context)
        # a token, a set, a list
        self.begin, self.end, self.first = ends(pretrained, self.tokenizer)
        if wrapped:
            patch(self.model, **from_text(wrapped))
        if add_bos_token is not None:
            self.first = [self.begin] if str(add_bos_token).lower() == 'true' else []

    @property
    def eot_token_id(self):
        return min(self.end)

    @property
    def prefix_token_id(self):
        return self.begin

    def tok_encode(self, string, add_special_tokens=None, **_):
        from lm_eval.models.utils import has_bos_prefix
        ids = self.tokenizer.encode(string, allowed_special='all')
        begun = (has_bos_prefix(string, self.tokenizer.decode([self.begin]))
                 if add_special_tokens is None else not add_special_tokens)
        return ids if begun else [*self.first, *ids]

    def _loglikelihood_tokens(self, requests, **_):
        pairs = [(list(context) or [self.begin], list(continuation))
                 for _, context, continuation in requests]
        return log_likelihoods(self.model, pairs, self.batch_size, self.device, self.max_length)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        from lm_eval import utils
        windows = [[utils.make_disjoint_window(w) for w in utils.get_rolling_token_windows(
            token_list=self.tok_encode(r.args[0]), prefix_token=self.begin,
            max_seq_len=self.max_length, context_len=1)] for r in requests]
        found = iter(
            self._loglikelihood_tokens([(None, *w) for group in windows for w in group]))
        return [sum(next(found)[0] for _ in group) for group in windows]

    def generate_until(self, requests, disable_tqdm=False):
        from lm_eval.models.utils import normalize_gen_kwargs
        asked = []
        for request in requests:
            context, settings = request.args
            settings = normalize_gen_kwargs(settings, 256)
            room = self.max_length - settings['max_gen_toks']       # none: the window slides
            ids = self.tok_encode(context) or [self.begin]
            asked.append((ids[-(room if room > 0 else self.max_length):],
                          settings['max_gen_toks'], settings.get('temperature') or 0.0,
                          tuple(settings.get('until') or [])))
        return texts_of(self, asked, disable_tqdm)

    @property
    def tokenizer_name(self):           # asked for where a chat template is
        return self.apply_chat_template()

    def apply_chat_template(self, *_, **__):
        raise Refused("chat templates are the business of transformers: nanodepth.py export, and "
                      "use lm-eval's model `hf`")


@functools.cache
def adapter():
    "The class that lm-eval knows as `nanodepth`, made on demand: lm-eval is no core package."
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise Refused(f'this needs lm-eval (pip install "lm-eval[hf]"): {error}') from None

    @register_model('nanodepth')
    class Nanodepth(Answers, TemplateLM):
        pass
    return Nanodepth


@functools.cache
def hf_adapter():
    """lm-eval's own `hf`, any family, with its middle looped: `nanodepth-hf`, which takes what
    wrapper.patch takes too."""
    adapter()
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    settings = ({*inspect.signature(patch).parameters} - {'model', 'options'}
                | {o for f in SOLVERS.values() for o in [*inspect.signature(f).parameters][3:]})

    @register_model('nanodepth-hf')
    class NanodepthHF(HFLM):
        def __init__(self, pretrained, device='auto', **options):
            wrapped = {name: options.pop(name) for name in settings & options.keys()}
            device = ('auto' if str(device).startswith('cuda') and not torch.cuda.is_available()
                      else device)
            super().__init__(pretrained, device=str(pick_device(device or 'auto')), **options)
            if wrapped:
                patch(self.model, **from_text(wrapped))

        def _model_call(self, inps, attn_mask=None, labels=None):
            """Log-likelihoods need no cache, and cache='last' would run the window once more for
            one."""
            with torch.no_grad(), torch.autocast(self.device.type, self.mixed_precision_dtype,
                                                 enabled=self.mixed_precision_dtype is not None):
                return self.model(inps, use_cache=False).logits

    return NanodepthHF


def from_text(settings):
    """patch's arguments as lm-eval's command line hands them over: it has read 'none' as None, and
    lists are written 0.6/0.4."""
    def read(name, value):
        if name == 'cache' and value is None:
            return 'none'
        return ([float(part) for part in value.split('/')] if isinstance(value, str)
                and '/' in value else value)
    return {name: read(name, value) for name, value in settings.items()}


def theirs(path):
    "Is this a Hugging Face folder, or a name on the hub?"
    return on_hub(path) or (Path(path) / 'config.json').exists()


def open_model(path, *, batch_size=8, dtype='auto', device='auto', **options):
    """A checkpoint as lm-eval sees it: a run of ours by our adapter, a Hugging Face folder or name
    by lm-eval's own."""
    return ((hf_adapter() if theirs(path) else adapter())(str(path), batch_size=batch_size,
                                                          dtype=dtype, device=device, **options))


def ends(path, tokenizer):
    """(the token before a text that stands alone, the tokens that end a text, those that every text
    begins with): a Hugging Face checkpoint says so in its files, a run of ours ends and begins with
    an end of text."""
    usual, file = start_of_document(tokenizer), tokenizer_file(path)
    names, end = {}, set()
    for name in ('tokenizer_config.json', 'generation_config.json', 'config.json') if file else ():
        about = read_json(file.parent / name) if (file.parent / name).exists() else {}
        for key in ('bos_token', 'eos_token'):
            token = (about[key].get('content') if isinstance(about.get(key), dict)
                     else about.get(key))
            if token in tokenizer.special_tokens_set:
                names[key] = tokenizer.encode_single_token(token)
        stops = about.get('eos_token_id')
        end |= set(stops if isinstance(stops, list) else [stops] if isinstance(stops, int) else [])
    end |= {names['eos_token']} if 'eos_token' in names else set()
    if not end:
        end = ({tokenizer.encode_single_token(END_OF_TEXT)}
               if END_OF_TEXT in tokenizer.special_tokens_set else set(usual[:1]) or {0})
    return (names.get('bos_token', names.get('eos_token', min(end))), end,
            getattr(tokenizer, 'starts', []) if theirs(path) else usual)
