"""The claims for a checkpoint, on a published one: `make real`, three minutes, not in make test.

`make smollm2` leaves SmolLM2-135M-Instruct in out/smollm2. Its weights have four bits each, which
may cost a point of a score.
"""
import hashlib

import pytest
import torch
from helpers import ROOT, asked_of

from nanodepth.models.checkpoint import load_model
from nanodepth.scoring.rows import ScoreOptions, Subject
from nanodepth.text.tokenizer import get_tokenizer

PATH = str(ROOT / 'out/smollm2')
TEXT = ('The capital of France is Paris. In 1984,  12 x 7 is 84;\n\n    def f(x):\n\treturn '
        'x[1:20]  # naïve ½ 東京\n')
# sha256 sums, as they were at a8c26fc: every number on the pages is of these
WEIGHTS = '08587497151051bb'
PYDOC = {'out/smollm2/pydoc.txt': '74d0773e08745aec',
         'data/pydoc/train_00000.bin': '02d34f39eb5d825a',
         'data/pydoc/val_000.bin': 'efcfe9ede6fd15cc'}


def test_weights_and_tokens_are_what_they_were():
    from safetensors.torch import load_file
    weights = hashlib.sha256()
    for name, t in sorted(load_file(f'{PATH}/model.safetensors').items()):
        weights.update(name.encode())
        weights.update(t.view(torch.uint8).numpy())
    assert weights.hexdigest().startswith(WEIGHTS)
    tokenizer = get_tokenizer(PATH)
    assert [tokenizer.decode([token]) for token in tokenizer.encode('a  12')] == [
        'a', '  ', '1', '2']
    sums = {path: hashlib.sha256((ROOT / path).read_bytes()).hexdigest()[:16] for path in PYDOC}
    if sums['out/smollm2/pydoc.txt'] != PYDOC['out/smollm2/pydoc.txt']:
        pytest.skip('another Python has another text')
    assert sums == PYDOC


@torch.no_grad()
def test_logits_and_greedy_text_are_those_of_transformers():
    from transformers import AutoModelForCausalLM
    ours, tokenizer = load_model(PATH).float(), get_tokenizer(PATH)
    theirs = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()
    tokens = torch.tensor([tokenizer.encode(TEXT)])
    assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-3
    prompt = tokens[:, :5]
    theirs.generation_config.eos_token_id = None        # ours goes on behind the end of a text
    text = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40,
                           do_sample=False)
    assert torch.equal(ours.generate(prompt, 40, temperature=0), text)
    assert tokenizer.decode(text[0, 5:8].tolist()).startswith(' Paris')


@pytest.mark.parametrize('task', ['questions_piqa', 'questions_openbookqa', 'questions_mmlu'])
def test_answers_are_those_of_lm_evals_own_model(task):
    "Question by question: where two options are as likely to a rounding error, one may differ."
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    subject = Subject(PATH, ScoreOptions(tasks=task, limit=100, device='cpu', dtype='float32'))
    theirs = HFLM(PATH, dtype='float32', batch_size=16, device='cpu')
    results = lm_eval.simple_evaluate(theirs, tasks=subject.theirs[0], limit=100,
                                      task_manager=subject.theirs[1])
    samples = sorted(results['samples'][task], key=lambda each: each['doc_id'])
    for measure, score in asked_of(subject).items():
        wanted = [each[measure.split()[1]] for each in samples]
        assert sum(a != b for a, b in zip(score.answers, wanted, strict=True)) <= 1, measure
