"""A model as lm-eval asks it. This file alone imports lm-eval at its top, so nothing imports this
one before a task of lm-eval's is asked.

Usage:
    lm = Asked(answer, tokenizer, path)         # scoring/lm_eval_scores.py makes it
"""
import itertools

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from tqdm import tqdm
from transformers import AutoTokenizer

from nanodepth.common.errors import Refused, refusing, say
from nanodepth.common.files import read_json
from nanodepth.scoring.likelihoods import continued, likelihoods
from nanodepth.models.checkpoint import is_hugging_face
from nanodepth.text.tokenizer import local_folder, marks_of, start_of_document


class Asked(TemplateLM):
    "A model of ours or Hooked, in whatever way it runs now."

    def __init__(self, answer, tokenizer, path, max_length=None, chat=False):
        super().__init__()
        self.has_cut = False        # has it been said that prompts are cut?
        self.answer, self.words, self.path = answer, tokenizer, path
        self.max_length = min(max_length or answer.config.context, answer.config.context)
        self.starts = getattr(tokenizer, 'starts', None)
        if self.starts is None:         # a tokenizer of tiktoken's
            self.starts = start_of_document(tokenizer)
        self.begin, self.end = marks_of(path, tokenizer)
        asks = generation_of(path)
        self.ends = {self.end, *other_ends(asks)} - {None}
        if asks.get('repetition_penalty') not in (None, 1) or asks.get('no_repeat_ngram_size'):
            say(f'{path} asks for a penalty on repetition in generated text, which lm-eval\'s own '
                'hf would obey: here the likeliest token is taken')
        if chat:
            with refusing(ValueError, why=lambda error: f'{path} has no tokenizer of '
                          f"transformers' ({error})"):
                self.tokenizer = AutoTokenizer.from_pretrained(local_folder(path),
                                                               trust_remote_code=False)
            if not self.tokenizer.chat_template:
                raise Refused(f'{path} has no chat template: leave --chat out')

    eot_token_id = property(lambda self: self.end)
    prefix_token_id = property(lambda self: self.end if self.begin is None else self.begin)
    tokenizer_name = property(lambda self: str(self.path))

    def tok_encode(self, string, add_special_tokens=None, **_):
        ids = self.words.encode(string, allowed_special='all')
        n = len(self.starts)
        if add_special_tokens is False or ids[:n] == self.starts:
            return ids
        return [*self.starts, *ids]

    def loglikelihood(self, requests, disable_tqdm=True):
        return super().loglikelihood(requests, disable_tqdm=True)

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt)

    def _loglikelihood_tokens(self, requests, **_):
        asked = {}          # {prompt: [(the number of the request, its continuation)]}
        for i, (_, prompt, text) in enumerate(requests):
            most = max(1, self.max_length + 1 - len(text))
            asked.setdefault(tuple(prompt[-most:]), []).append((i, text))
        found = likelihoods(self.answer, [list(prompt) for prompt in asked],
                            [[text for _, text in texts] for texts in asked.values()])
        answers = [None] * len(requests)
        for texts, (values, greedy) in zip(asked.values(), found):
            if values.isnan().any():
                raise Refused('the model gives logits that are not numbers: it has no score')
            for (i, _), value, is_greedy in zip(texts, values.tolist(), greedy.tolist()):
                answers[i] = value, is_greedy
        return answers

    def loglikelihood_rolling(self, requests, **_):
        totals = []
        for request in requests:
            windows = map(utils.make_disjoint_window, utils.get_rolling_token_windows(
                token_list=self.tok_encode(*request.args), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1))
            answers = self._loglikelihood_tokens([(None, *window) for window in windows])
            totals.append(sum(value for value, _ in answers))
        return totals

    def generate_until(self, requests, **_):
        return [self.generated(*request.args)
                for request in tqdm(requests, 'answers', unit='answer', leave=False)]

    def generated(self, prompt, how):
        "The greedy continuation, up to the first of the stop signs or of the model's own ends."
        if how.get('do_sample') or how.get('temperature'):
            raise Refused(f'a task asks for sampled text ({how}), and only the likeliest is '
                          'given here')
        until = how.get('until') or []
        signs = [until] if isinstance(until, str) else list(until)
        most = next((how[name] for name in MOST_TOKENS if name in how), 256)
        if most >= self.max_length:
            raise Refused(f'a task asks for answers of up to {most} tokens, but the context is '
                          f'{self.max_length}: no room is left for its prompt')
        tokens = self.tok_encode(prompt)
        read = tokens[-(self.max_length - most):]
        if len(read) < len(tokens) and not self.has_cut:
            self.has_cut = True
            say(f'{self.path}: a prompt has {len(tokens)} tokens, and its answer may have {most}, '
                f'but the context is {self.max_length}: of such prompts the beginning is left out')

        def is_done(tokens):
            return not self.ends.isdisjoint(tokens) or any(
                sign in self.text_of(tokens) for sign in signs)
        tokens = continued(self.answer, read, most, is_done)
        text = self.text_of(list(itertools.takewhile(lambda t: t not in self.ends, tokens)))
        for sign in filter(None, signs):
            text = text.partition(sign)[0]
        return text

    def text_of(self, tokens):
        "Tokens as text, without special ones."
        if hasattr(self.words, 'inner'):
            return self.words.inner.decode(tokens, skip_special_tokens=True)
        special = {self.words.encode_single_token(t) for t in self.words.special_tokens_set}
        return self.words.decode([token for token in tokens if token not in special])


# lm-eval's names for the most tokens of an answer
MOST_TOKENS = 'max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens'


def generation_of(path):
    """What another family's folder says of generated text: as transformers, by config.json where no
    file is there. Nothing, of a run of ours."""
    if not is_hugging_face(path):
        return {}
    folder = local_folder(path)
    file = folder / 'generation_config.json'
    return read_json(file if file.exists() else folder / 'config.json')


def other_ends(asks):
    "The tokens that end a text by what a folder says, such as a chat model's end of a turn."
    ends = asks.get('eos_token_id')
    return ends if isinstance(ends, list) else [ends]
