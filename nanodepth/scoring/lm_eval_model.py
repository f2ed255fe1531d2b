"""A model as lm-eval asks it. lm-eval's own model for transformers does everything but the
log-likelihoods. Those are ours: they make only the logits that are needed, and one row serves all
options of one token.
Usage: lm = ScoredModel(answer, theirs, tokenizer, path)      # in lm_eval_scores.py
"""
import logging
import math

# Only this file imports lm-eval at its top, so nothing imports it before lm-eval has to be asked.
from lm_eval.models.huggingface import HFLM
from transformers import GenerationConfig

from nanodepth.common.errors import Refused, say
from nanodepth.scoring.likelihoods import likelihoods
from nanodepth.text.tokenizer import generation_of


class ScoredModel(HFLM):
    """`theirs` is transformers' model with the weights of `answer`, the model as the scorer has it;
    both run in one way."""

    def __init__(self, answer, theirs, tokenizer, path, max_length=None):
        asks = generation_of(path)
        if asks.get('repetition_penalty') not in (None, 1) or asks.get('no_repeat_ngram_size'):
            say(f"{path} asks for a penalty on repetition in generated text, which lm-eval's own "
                'hf would obey: here the likeliest token is taken')
        ends = asks.get('eos_token_id')         # several, such as a chat model's end of a turn
        ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        theirs.generation_config = GenerationConfig(eos_token_id=sorted(ends) or None,
                                                    pad_token_id=0)
        logging.disable(logging.WARNING)        # that it was given a model and no name
        context = answer.config.context         # endless where positions have no table: lm-eval's
        most = min(max_length or context, context)
        super().__init__(theirs, tokenizer=tokenizer, batch_size=1,
                         max_length=None if most == math.inf else most)
        logging.disable(logging.NOTSET)
        self.answer = answer

    def loglikelihood(self, requests, disable_tqdm=True):
        return super().loglikelihood(requests, disable_tqdm=True)       # ours says what is left

    def _loglikelihood_tokens(self, requests, **_):
        asked, n_cut = {}, 0        # {prompt: [(the number of the request, its continuation)]}
        for i, (_, prompt, text) in enumerate(requests):
            assert 0 < len(text) <= self.max_length, f'an answer has {len(text)} tokens'
            most = self.max_length + 1 - len(text)
            asked.setdefault(tuple(prompt[-most:]), []).append((i, text))
            n_cut += len(prompt) > most
        if n_cut:
            say(f'{n_cut} of {len(requests)} prompts with an answer are longer than '
                f'{self.max_length} tokens: their beginnings were not read')
        found = likelihoods(self.answer, [list(prompt) for prompt in asked],
                            [[text for _, text in texts] for texts in asked.values()])
        answers = [None] * len(requests)
        for texts, (values, greedy) in zip(asked.values(), found):
            if values.isnan().any():
                raise Refused('the model gives logits that are not numbers: it has no score')
            for (i, _), value, is_greedy in zip(texts, values.tolist(), greedy.tolist()):
                answers[i] = value, is_greedy
        return answers
