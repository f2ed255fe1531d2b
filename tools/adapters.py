"""Our models, and Hugging Face's with their middle looped, as lm-eval models.

The idea: the harness asks three things of a model: the log-likelihood of a continuation, that of a
whole text, and text that goes on until a stop. `nanodepth` answers for runs of ours, a dozen lines
each; `nanodepth-hf` is lm-eval's own `hf`, and only its forward is looped. Both take what
wrapper.patch takes.

Paper: "Training-Free Looped Transformers", section 3.1 (lm-eval, log-likelihoods and generation).

Usage:
    lm = open_model('out/lidas')  # the one that fits; evaluate.harness(lm, tasks) scores it
    adapter()(path, loop='3-2x2-3'), hf_adapter()(path, window='3-5', K=3)
"""
import functools
import inspect
import math
from dataclasses import dataclass

import torch
from tqdm import tqdm

from common.errors import Refused, nearest, refusing
from common.fields import fill
from common.files import read_json, reading
from data.tokenizer import (
    END_OF_TEXT,
    get_tokenizer,
    readable,
    start_of_document,
    tokenizer_file,
)
from data.tokens import draw
from engine.checkpoint import is_hugging_face, load_model, refuse_looped, refuse_not_finite
from engine.measure import in_vocabulary, set_depth
from engine.world import pick_device
from wrapper import SOLVERS, patch


class Answers:
    "What lm-eval asks of one of our models."

    def __init__(self, pretrained, loop=None, r=None, batch_size=8, device='auto', dtype='auto',
                 max_length=None, add_bos_token=None, max_batch_size=None, **wrapped):
        super().__init__()
        self._device = usable(device)
        self.model = load_model(pretrained, self._device)
        if dtype != 'auto':
            self.model.to(getattr(torch, str(dtype)))
            refuse_not_finite(self.model, f'{pretrained} as {dtype}')
        set_depth(self.model, loop=str(loop) if loop else None, r=None if r is None else int(r))
        self.tokenizer = get_tokenizer(pretrained)
        self.batch_size = 8 if str(batch_size).startswith('auto') else int(batch_size)
        self.max_length = int(max_length or self.model.config.context)
        self.begin, self.end, self.first = ends(pretrained, self.tokenizer)
        if wrapped:
            patch(self.model, **from_text(wrapped))
        if add_bos_token is not None:
            self.first = [self.begin] if str(add_bos_token).lower() == 'true' else []
        in_vocabulary([self.begin, *self.first], self.model)

    eot_token_id = property(lambda self: min(self.end))
    prefix_token_id = property(lambda self: self.begin)

    def tok_encode(self, string, add_special_tokens=None, **_):
        from lm_eval.models.utils import has_bos_prefix
        ids = in_vocabulary(self.tokenizer.encode(string, allowed_special='all'), self.model)
        begun = (has_bos_prefix(string, self.tokenizer.decode([self.begin]))
                 if add_special_tokens is None else not add_special_tokens)
        return ids if begun else [*self.first, *ids]

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, **_):
        """[(log-likelihood, is it the greedy choice)]. Long ones first, padded on the right, where
        no token sees it; only the continuation's places go through the head."""
        answers = [(0.0, True)] * len(requests)
        inputs = {}
        size = self.batch_size
        self.say_cut(sum(len(context or [0]) + len(continuation) > self.max_length + 1
                         for _, context, continuation in requests), len(requests))
        for i, (_, context, continuation) in enumerate(requests):
            # what is too long loses its beginning; equal inputs are read once
            row = [*(context or [self.begin]), *continuation][-self.max_length - 1:]
            if continuation:        # else it has become one token with the end of its context
                inputs.setdefault(tuple(row[:-1]), []).append((i, row[1:][-len(continuation):]))
        inputs = sorted(inputs.items(), key=lambda item: -len(item[0]))
        for at in tqdm(range(0, len(inputs), size), desc='log-likelihoods', unit='batch',
                       disable=len(inputs) <= size):
            rows, asked = zip(*inputs[at:at + size])
            tokens = torch.tensor([row + (0,) * (len(rows[0]) - len(row)) for row in rows],
                                  device=self.device)                           # (B, T)
            hidden = self.model.norm(self.model.hidden(tokens))                 # (B, T, C)
            for row, continuations, h in zip(rows, asked, hidden):
                for i, continuation in continuations:
                    targets = torch.tensor(continuation, device=self.device)    # (N,)
                    logits = self.model.head(h[len(row) - len(targets):len(row)]).float()  # (N, V)
                    value = logits.log_softmax(-1).gather(-1, targets[:, None]).sum().item()
                    if not math.isfinite(value):
                        raise Refused(f'a log-likelihood is {value}: such a model has no score')
                    answers[i] = value, bool((logits.argmax(-1) == targets).all())
        return answers

    def say_cut(self, cut, total):
        if cut:
            print(f'{cut} of {total} prompts do not fit into {self.max_length} tokens (the '
                  'context, or --max_length): their beginnings are left out, so this is no score '
                  'of the whole prompts')

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        from lm_eval import utils
        windows = [[utils.make_disjoint_window(w) for w in utils.get_rolling_token_windows(
            token_list=self.tok_encode(r.args[0]), prefix_token=self.begin,
            max_seq_len=self.max_length, context_len=1)] for r in requests]
        pieces = iter(self._loglikelihood_tokens([(None, *w) for group in windows for w in group]))
        return [sum(next(pieces)[0] for _ in group) for group in windows]

    def generate_until(self, requests, disable_tqdm=False):
        from lm_eval.models.utils import normalize_gen_kwargs
        texts = [None] * len(requests)
        groups = {}         # those alike make a batch
        cut = 0
        for i, request in enumerate(requests):
            context, settings = request.args
            settings = normalize_gen_kwargs(settings, 256)
            most = settings['max_gen_toks']
            room = self.max_length - most if most < self.max_length else self.max_length
            ids = self.tok_encode(context) or [self.begin]
            cut += len(ids) > room
            ids = ids[-room:]           # no room: the window slides
            key = (len(ids), most, settings.get('temperature') or 0.0,
                   tuple(settings.get('until') or []))
            groups.setdefault(key, []).append((i, ids))
        self.say_cut(cut, len(requests))
        parts = [(key, group[at:at + self.batch_size]) for key, group in groups.items()
                 for at in range(0, len(group), self.batch_size)]
        for (_, *settings), part in tqdm(parts, desc='texts', unit='batch', disable=disable_tqdm):
            places, prompts = zip(*part)
            for i, text in zip(places, self.go_on(prompts, *settings, seed=places[0])):
                texts[i] = text
        return texts

    def go_on(self, prompts, most, temperature, stops, seed):
        """Texts that go on from prompts (lists of equally many tokens), each until a stop, a token
        of `end`, or `most` tokens."""
        special = {self.tokenizer.encode_single_token(token)
                   for token in self.tokenizer.special_tokens_set}

        def text(row):
            ids = row[len(prompts[0]):].tolist()
            end = next((i for i, token in enumerate(ids) if token in self.end), None)
            answer = readable(self.tokenizer, [i for i in ids[:end] if i not in special])
            places = [answer.find(stop) for stop in stops if stop and stop in answer]
            cut = min(places, default=None)
            return answer[:cut], end is not None or cut is not None
        generator = torch.Generator(self.device).manual_seed(draw(0, 'evaluate', seed))
        out = self.model.generate(torch.tensor(prompts, device=self.device), most,
                                  temperature=temperature, generator=generator,
                                  stop=lambda rows: all(text(row)[1] for row in rows))
        return [text(row)[0] for row in out]

    def apply_chat_template(self, *_, **__):
        raise Refused('chat templates are the business of transformers: nanodepth.py export, and '
                      "lm-eval's `hf`")

    tokenizer_name = property(apply_chat_template)          # asked for where a chat template is


def usable(device):
    "lm-eval's command line asks for cuda:0 by default."
    missing = str(device).startswith('cuda') and not torch.cuda.is_available()
    return pick_device('auto' if missing else device or 'auto')


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
    "The class that it knows as `nanodepth-hf`: any family."
    adapter()
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    settings = ({*inspect.signature(patch).parameters} - {'model', 'options'}
                | {o for f in SOLVERS.values() for o in [*inspect.signature(f).parameters][3:]})

    @register_model('nanodepth-hf')
    class NanodepthHF(HFLM):
        def __init__(self, pretrained, device='auto', **options):
            wrapped = {name: options.pop(name) for name in settings & options.keys()}
            known = {*settings, *inspect.signature(HFLM).parameters}
            with refusing(TypeError, why=lambda error: f'{error}' + ''.join(
                    nearest(name, known) for name in options.keys() - known)):
                super().__init__(pretrained, device=str(usable(device)), **options)
            refuse_not_finite(self.model, pretrained)
            if wrapped:
                patch(self.model, **from_text(wrapped))

        def _model_call(self, inps, attn_mask=None, labels=None):
            "Without a cache, for which cache='last' would run the window once more."
            with torch.no_grad(), torch.autocast(self.device.type, self.mixed_precision_dtype,
                                                 enabled=self.mixed_precision_dtype is not None):
                return self.model(inps, use_cache=False).logits
    return NanodepthHF


def from_text(settings):
    """patch's arguments as lm-eval's command line hands them over: it has read 'none' as None, and
    lists are written 0.6/0.4."""
    options = {name: [float(part) for part in value.split('/')] if '/' in str(value) else value
               for name, value in settings.items()}
    return options | ({'cache': 'none'} if options.get('cache', '') is None else {})


def open_model(path, batch_size=8, **options):
    "A checkpoint as lm-eval sees it: ours by our adapter, Hugging Face's by lm-eval's own."
    refuse_looped(path)
    known_as = hf_adapter() if is_hugging_face(path) else adapter()
    return known_as(str(path), batch_size=batch_size, **options)


@dataclass
class Ends:
    "What Hugging Face's files say of how texts begin and end."
    bos_token: str | dict | None = None
    eos_token: str | dict | None = None
    eos_token_id: int | list[int] | None = None


def ends(path, tokenizer):
    """(the token before a text that stands alone, those that end a text, those that every text
    begins with): Hugging Face's files say so, a run of ours begins and ends with an end of text."""
    usual = start_of_document(tokenizer)
    file = tokenizer_file(path)
    names = {}
    end = set()
    for name in ('tokenizer_config.json', 'generation_config.json', 'config.json') if file else ():
        if not (file.parent / name).exists():
            continue
        with reading(file.parent / name):
            specials = fill(Ends, read_json(file.parent / name), file.parent / name, others=True)
            for key, token in dict(bos_token=specials.bos_token,
                                   eos_token=specials.eos_token).items():
                token = token.get('content') if isinstance(token, dict) else token
                if token in tokenizer.special_tokens_set:
                    names[key] = tokenizer.encode_single_token(token)
        stops = specials.eos_token_id
        end |= {*(stops if isinstance(stops, list) else [stops]), names.get('eos_token')} - {None}
    if not end:
        end = ({tokenizer.encode_single_token(END_OF_TEXT)}
               if END_OF_TEXT in tokenizer.special_tokens_set else set(usual[:1]) or {0})
    return (names.get('bos_token', names.get('eos_token', min(end))), end,
            getattr(tokenizer, 'starts', []) if is_hugging_face(path) else usual)
