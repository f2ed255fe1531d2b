"""The claims for a checkpoint, on a published one: `make real`, ten minutes, not in make test.

`make smollm2` leaves SmolLM2-135M-Instruct in out/smollm2. Its weights have four bits each, which
may cost a point of a score.
"""
import itertools

import pytest
import torch
from conftest import ROOT

from nanodepth.models.checkpoint import load_model
from nanodepth.models.hf import save_hf
from nanodepth.asking.lm_eval_scores import evaluate, scores_of
from nanodepth.asking.scoring import Asked, Subject
from nanodepth.asking.way import Way
from nanodepth.probe import depth_score, residual_norms
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.variants.lens import quality
from nanodepth.wrapper import looped, looped_by_hand

PATH = str(ROOT / 'out/smollm2')
TEXT = ('The capital of France is Paris. In 1984,  12 x 7 is 84;\n\n    def f(x):\n\treturn '
        'x[1:20]  # naïve ½ 東京\n')


@pytest.fixture(scope='module')
def ours():
    return load_model(PATH).float()


@pytest.fixture(scope='module')
def theirs():
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()


@pytest.fixture(scope='module')
def tokens():
    return torch.tensor([get_tokenizer(PATH).encode(TEXT)])


@torch.no_grad()
def test_logits_and_greedy_text_are_those_of_transformers(ours, theirs, tokens):
    assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-3
    prompt = tokens[:, :5]
    theirs.generation_config.eos_token_id = None        # ours goes on behind the end of a text
    text = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40,
                           do_sample=False)
    assert torch.equal(ours.generate(prompt, 40, temperature=0), text)
    assert get_tokenizer(PATH).decode(text[0, 5:8].tolist()).startswith(' Paris')


@torch.no_grad()
def test_windows_and_orders_equal_a_run_by_hand(ours, theirs, tokens):
    by_hand = looped_by_hand(ours, tokens, 4, 7, K=3)
    for model in (ours, theirs):
        with looped(model, (4, 7), 'rk', K=3):
            out = model(tokens)
            assert (getattr(out, 'logits', out) - by_hand).abs().max() < 2e-3
    x = ours.embed(tokens)
    rope = ours.cos[:tokens.shape[1], None], ours.sin[:tokens.shape[1], None]
    for i in [*range(12), *range(8, 12), *range(12, 30)]:        # layers 8 to 11 a second time
        x = ours.layers[i](x, rope)
    repeated = ours.head(ours.norm(x))
    with Way(loop='8-4x2-18').apply(ours):
        assert torch.equal(ours(tokens), repeated)
    with Way(loop='8-4x2-18').apply(theirs):
        assert (theirs(tokens, use_cache=False).logits - repeated).abs().max() < 2e-3


@torch.no_grad()
def test_an_export_in_another_order_is_that_order(ours, tokens, tmp_path):
    from transformers import AutoModelForCausalLM
    with Way(loop='8-4x2-18').apply(ours):
        wanted = ours(tokens)
    published = load_model(PATH)
    with Way(loop='8-4x2-18').apply(published):
        save_hf(published, tmp_path / 'deeper', tokenizer=PATH)
    deeper = AutoModelForCausalLM.from_pretrained(tmp_path / 'deeper', dtype=torch.float32)
    assert deeper.config.num_hidden_layers == 34
    bits = load_model(tmp_path / 'deeper')      # as published: in 16 bits
    assert bits.embed.weight.dtype == torch.bfloat16
    assert (deeper(tokens).logits - wanted).abs().max() < 1e-3
    assert get_tokenizer(tmp_path / 'deeper').encode(TEXT) == tokens[0].tolist()


@torch.no_grad()
def test_probes_are_those_of_hooks_on_transformers_layers(ours, theirs, tokens):
    "The depth score's weights, how far a layer turns the stream, and what the logit lens reads."
    tokens, boundaries = tokens[:, :16], (3, 9)
    read = lambda model: model(tokens).logits.softmax(-1)
    plain = read(theirs)
    _, weights = depth_score(ours, tokens, boundaries=boundaries)
    for erased in (0, 11, 12, 29):
        largest = 0.0
        for t in boundaries:
            def without(layer, given, out):
                return torch.cat((given[0][:, :t + 1], out[:, t + 1:]), dim=1)
            hook = theirs.model.layers[erased].register_forward_hook(without)
            moved = (read(theirs) - plain).norm(dim=-1)[:, t + 1:].max().item()
            hook.remove()
            largest = max(largest, moved)
        assert weights[erased].item() == pytest.approx(largest, rel=1e-3, abs=1e-5)

    states = theirs(tokens, output_hidden_states=True).hidden_states[:-1]       # the last is normed
    norms = residual_norms(ours, tokens)
    kl, _ = quality(ours, None, tokens)
    for d, (x, y) in enumerate(itertools.pairwise(states)):
        lengths = x.norm(dim=-1) * y.norm(dim=-1)
        turned = torch.rad2deg(torch.acos((x * y).sum(-1) / lengths)).mean()
        assert norms['layer angle'][d].item() == pytest.approx(turned.item(), rel=1e-2)
        share = ((y - x).norm(dim=-1) / x.norm(dim=-1)).mean()
        assert norms['layer share'][d].item() == pytest.approx(share.item(), rel=1e-3)
        early = theirs.lm_head(theirs.model.norm(y)).log_softmax(-1)
        wanted = (plain * (plain.log() - early)).sum(-1).mean()
        assert kl[d].item() == pytest.approx(wanted.item(), rel=1e-3)


@pytest.mark.parametrize('task', ['questions_piqa', 'questions_openbookqa', 'questions_mmlu'])
def test_answers_are_those_of_lm_evals_own_model(task):
    "Question by question: where two options are as likely to a rounding error, one may differ."
    from lm_eval.models.huggingface import HFLM
    subject = Subject(PATH, Asked(tasks=task, limit=100, device='cpu', dtype='float32'))
    theirs = HFLM(PATH, dtype='float32', batch_size=16, device='cpu')
    wanted = scores_of(evaluate(theirs, [task], {}, limit=100, log_samples=True))
    for measure, score in subject.scores(Way()).items():
        assert sum(a != b for a, b in zip(score.answers, wanted[measure].answers)) <= 1, measure
