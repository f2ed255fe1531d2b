"""Numbers that were once wrong without a word: a test for each promise that they are right now."""
import dataclasses
import importlib
import itertools
import json
import math
import runpy
import typing
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from conftest import ROOT, byte_level_bpe, flags, ranks, save_run, write_noise
from nanodepth import train as training
from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import probe as probe_command, sweep
from nanodepth.common import losses as losses_file, options
from nanodepth.common.errors import Refused
from nanodepth.model import LM, ModelConfig
from nanodepth.scoring import likelihoods, scores as scoring
from nanodepth.models import checkpoint
from nanodepth.models.hf import Hooked, as_theirs, save_hf
from nanodepth.scoring.scores import Asked, Subject, log_likelihoods
from nanodepth.training import measure as measure_file
from nanodepth.training.measure import losses_of, measure
from nanodepth.scoring.way import Way, name_of
from nanodepth.retrofit import surgery
from nanodepth.text.loader import Loader, write_dataset
from nanodepth.text.primitives import Example
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.wrapper import SOLVERS

BYTES = get_tokenizer('bytes')
EXAMPLES = [Example(prompt, options, 0) for prompt, options in (
    ('abcdefgh', ['ij', 'kl']), ('abcdefgx', ['ij', 'klm']), ('abcdefgh12', ['i', 'kl']),
    ('abc', ['d', 'e']))]


def by_hand(model, example):
    "Each option read behind its prompt in one forward, alone: what lm-eval does."
    forward = lambda tokens: getattr(out := model(tokens), 'logits', out)
    values = []
    for option in example.options:
        prompt, answer = [256, *example.prompt.encode()], option.encode()
        with torch.no_grad():
            chances = forward(torch.tensor([[*prompt, *answer[:-1]]])).log_softmax(-1)[0]
        values.append(sum(chances[len(prompt) - 1 + i, t].item() for i, t in enumerate(answer)))
    return values


# ------------------------------------------------------------------------------------------- scores

def assert_one_score(model):
    "Alone or in a batch."
    for batch in (1, 64):
        for example, got in zip(EXAMPLES, log_likelihoods(model, BYTES, EXAMPLES, batch=batch)):
            assert got.tolist() == pytest.approx(by_hand(model, example), abs=2e-5)


@pytest.mark.parametrize('way', [
    Way(), Way(loop=[0, 1, 1, 2, 3, 2]), Way(window='1-2', method='naive', cache='last'),
    Way(window='1-2', K=6, decode='bypass'),
    Way(window='1-2', method='layer_anchored_frozen'),
    Way(window='1-2', method='euler', tol=0.1), Way(window='1-2', method='anderson')], ids=str)
def test_a_question_has_one_score_whatever_stands_beside_it(tiny, way):
    model = tiny(vocab_size=257, context=64, n_kv_head=2, ln_scaling=True)
    with way.apply(model):
        assert_one_score(model)


def test_an_answer_is_greedy_if_each_token_of_it_is_the_likeliest(tiny):
    model = tiny(vocab_size=257, context=64)
    one, two = model.generate(torch.tensor([[1, 2, 3]]), 2, temperature=0)[0, 3:].tolist()
    [(_, greedy)] = likelihoods.likelihoods(model, [[1, 2, 3]], [
        [[one], [one, two], [one, two - 1], [one - 1, two]]])
    assert greedy.tolist() == [True, True, False, False]


def test_and_so_it_has_in_a_recurrent_model_and_in_other_families(gemma, tiny):
    assert_one_score(surgery(tiny(vocab_size=257, context=64), '1-2-1', inject='linear'))
    for way in (Way(), Way(window='1-2', method='rk', K=3), Way(loop='1-2x2-3')):
        with way.apply(gemma[1]):
            assert_one_score(Hooked(gemma[1]))


def test_no_forward_makes_more_logits_than_fit(gemma, tmp_path, monkeypatch):
    "A score those of its option, a loss those of a row; and the numbers are the same."
    write_noise(tmp_path / 'noise', [])
    val = Loader(tmp_path / 'noise', 4, 32, split='val')
    made = []
    answer = Hooked(gemma[1])
    plain = [v.tolist() for v in log_likelihoods(answer, BYTES, EXAMPLES)]
    loss = measure(answer, val, 2)[0]
    hook = gemma[1].lm_head.register_forward_hook(lambda *parts: made.append(parts[-1].numel()))
    for module in (measure_file, likelihoods):
        monkeypatch.setattr(module, 'LOGITS_AT_ONCE', 6 * 257)
    for got, wanted in zip(log_likelihoods(answer, BYTES, EXAMPLES), plain):
        assert got.tolist() == pytest.approx(wanted, abs=1e-5)
    assert made and max(made) <= 6 * 257
    assert measure(answer, val, 2)[0] == pytest.approx(loss, rel=1e-6)
    assert max(made) == 32 * 257
    hook.remove()
    assert measure(lambda tokens: gemma[1](tokens).logits, val, 2)[0] == pytest.approx(loss)


def test_our_layers_read_all_rows_together_and_only_the_head_is_cut(tiny, tmp_path, monkeypatch):
    write_noise(tmp_path / 'noise', [])
    val = Loader(tmp_path / 'noise', 4, 32, split='val')
    model = tiny(vocab_size=257)
    with torch.no_grad():
        tokens, targets = val.batch(0)
        plain = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction='none')
    heads, layers = [], []
    monkeypatch.setattr(losses_file, 'LOGITS_AT_ONCE', 40 * 257)
    linear = F.linear
    monkeypatch.setattr(F, 'linear', lambda x, w, *b: (heads.append(len(x)) if len(w) == 257 else 0,
                                                      linear(x, w, *b))[1])
    model.layers[0].register_forward_hook(lambda layer, args, out: layers.append(len(out)))
    found, best = losses_of(model, tokens, targets)
    torch.testing.assert_close(found.flatten(), plain)
    assert heads == [40, 40, 40, 8] and layers == [4]
    monkeypatch.setattr(measure_file, 'LAYERS_AT_ONCE', 64)
    assert torch.equal(losses_of(model, tokens, targets)[1], best) and layers == [4, 2, 2]


def test_rows_of_others_begin_as_a_text_does(gemma, tiny, tmp_path):
    "The tokens that begin a text count in no loss, and a row that has them keeps its length."
    write_noise(tmp_path / 'noise', [])
    subject = Subject(gemma[0], Asked(data=str(tmp_path / 'noise'), batches=2, device='cpu'))
    plain = Loader(tmp_path / 'noise', 4, 511, split='val')
    losses = []
    for step in range(2):
        tokens, targets = plain.batch(step)
        with torch.no_grad():
            logits = gemma[1](torch.cat((torch.full((len(tokens), 1), 256), tokens), 1)).logits
        losses.append(torch.nn.functional.cross_entropy(logits[:, 1:].transpose(1, 2), targets))
    assert subject.scores(Way())['loss'].mean == pytest.approx(np.mean(losses), rel=1e-5)
    write_dataset(tmp_path / 'own', 'val', 'bytes', [256, 1, 2, 3, 4, 5, 6, 7, 8])
    tokens, targets, _ = Loader(tmp_path / 'own', 2, 4, split='val', starts=[256]).marked_batch(0)
    assert {(*t, *y) for t, y in zip(tokens.tolist(), targets.tolist())} == {
        (256, 1, 2, 3, 0, 1, 2, 3, 4, -1), (256, 4, 5, 6, 7, -1, 5, 6, 7, 8)}
    ours = save_run(tmp_path / 'ours', tiny(n_layer=2), data=tmp_path / 'own')
    assert scoring.starts_of(ours) == [] and scoring.starts_of(gemma[0]) == [256]


def test_no_note_outlives_the_code_that_made_it(tiny, tmp_path, monkeypatch):
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=64))
    mark = Subject(run, Asked(tasks='toy_copy', device='cpu')).mark
    first, real = mark(), Path.read_bytes
    monkeypatch.setitem(SOLVERS, 'naive', lambda g, x, K: g(x) * 0)
    second = mark()
    changed = ROOT / 'nanodepth/looping/solvers.py'
    monkeypatch.setattr(Path, 'read_bytes',
                        lambda path: real(path) + b'#' * path.samefile(changed))
    scoring.written_code.cache_clear()
    assert first != second != mark() != first


def test_what_is_not_a_number_is_no_accuracy(tiny, data):
    model = tiny(vocab_size=257, context=16)
    val = Loader(data, 4, 16, split='val')

    def broken(tokens):
        return model(tokens) * math.nan
    assert math.isnan(measure(broken, val, 2)[1]['fifth']['accuracy'])
    score = scoring.data_scores(broken, val, 2)['fifth']
    assert math.isnan(score.mean) and score.error is None and {*score.answers} == {None}


def test_a_lens_is_trained_on_rows_that_no_probe_looks_at(data, tiny, tmp_path, monkeypatch):
    "12 batches of 4: 40 examples take 10 of them."
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=16), data)
    trained = []
    real = probe_command.train_lens
    monkeypatch.setattr(probe_command, 'train_lens', lambda model, rows, *_, batches, **how: (
        trained.extend(rows.batch(step)[0] for step in batches),
        real(model, rows, 1, batches=batches))[1])
    looked = []
    monkeypatch.setattr(probe_command, 'quality', lambda model, lens, tokens: (
        looked.append(tokens), (torch.zeros(4), torch.zeros(4)))[1])
    line = [run, '--only=early_exit', f'--out={tmp_path / "p"}', '--device=cpu', '--n=2',
            '--batches=1', '--tasks=']
    nanodepth('probe', [*line, '--count=40'])
    rows = {tuple(row.tolist()) for row in torch.cat(trained)}
    assert len(rows) == 8 and not rows & {tuple(row.tolist()) for row in looked[0]}
    nanodepth('probe', [*line, '--count=48'])       # nothing is left, which the page says


# ------------------------------------------------------------------------------------ data and runs

def test_marks_go_by_name_where_datasets_number_them_otherwise(tmp_path, tiny):
    for name, kinds in (('a', ['copy', 'chain']), ('b', ['chain', 'new'])):
        write_noise(tmp_path / name, kinds)
    for order in ('ab', 'ba'):
        loader = Loader([tmp_path / name for name in order], 4, 16, split='val')
        counted = {kind: 0 for kind in loader.kinds}
        wanted = dict(counted)
        for i in range(48):
            d, _, window = loader.place(i)
            for mark in loader.sets[d].window(window)[2].tolist():
                wanted[loader.sets[d].kinds[mark % 128 - 1]] += 1
        for step in range(12):
            for mark in loader.marked_batch(step)[2].flatten().tolist():
                counted[loader.kinds[mark % 128 - 1]] += 1
        assert counted == wanted and all(counted.values())


@pytest.mark.parametrize('script', ['text', 'toy'])
def test_every_prepare_forgets_both_splits_before_it_writes_one(script, tmp_path, monkeypatch):
    (tmp_path / 't.txt').write_text('\n\n'.join(f'paragraph {i} ' * 40 for i in range(60)))
    main = runpy.run_path(str(ROOT / f'data/{script}/prepare.py'))['main']
    line = [*([str(tmp_path / 't.txt')] if script == 'text' else []), f'--out={tmp_path / "d"}',
            *(['--documents=50', '--text=0'] if script == 'toy' else [])]
    monkeypatch.setitem(main.__globals__, 'library', lambda: iter([('a.py', b'x' * 99)] * 20))
    main(line)

    def killed(*_, **__):
        raise KeyboardInterrupt
    monkeypatch.setitem(main.__globals__, 'write_dataset', killed)
    with pytest.raises(KeyboardInterrupt):
        main(line)
    assert not [*(tmp_path / 'd').glob('*.json')]


def test_changed_shares_of_a_mixture_are_another_run(config, tmp_path):
    for name in 'ab':
        write_noise(tmp_path / 'mix' / name, [])
    (tmp_path / 'mix/mixture.json').write_text(json.dumps(dict(a=0.9, b=0.1)))
    c = config(data=str(tmp_path / 'mix'), steps=8, context=16)
    training.train(c)
    (tmp_path / 'mix/mixture.json').write_text(json.dumps(dict(a=0.1, b=0.9)))
    with pytest.raises(ValueError, match='shares of the data have changed'):
        training.train(c)


def test_every_number_in_a_config_or_an_option_has_its_bounds():
    free = {'seed', 'grow_alpha', 'alpha', 'alphas', 'weights', 'tol'}
    modules = [f'nanodepth.commands.{path.stem}' for path in (ROOT / 'nanodepth/commands').glob(
        '*.py')] + ['nanodepth.train', 'nanodepth.commands.cost', 'nanodepth.text.corpus']
    found = [vars(importlib.import_module(name)) for name in modules]
    found += [runpy.run_path(str(path)) for path in (ROOT / 'data').glob('*/prepare.py')]
    for names in found:
        for kind in filter(None, map(names.get, ('Config', 'Options'))):
            for name, hint in typing.get_type_hints(kind).items():
                inside = [part for choice in options.choices_of(hint)
                          for part in (choice, *typing.get_args(choice))]
                if int in inside or float in inside:
                    assert name in free | {*options.AT_LEAST} | {*options.SHARES}, (kind, name)


# ------------------------------------------------------------------------------------------- memory

def refuse_leftovers():
    "Of the weights before a growth none is alive when the step after it has its next batch."
    old, untie, get_batch, compile = [], training.untie, training.get_batch, torch.nn.Module.compile

    def noted(model, *more):
        old[:] = [weakref.ref(p) for p in model.parameters()]
        return untie(model, *more)

    def counted(*args):
        if any(each() is not None for each in old):
            raise ValueError('an old weight is alive')
        old.clear()
        return get_batch(*args)
    training.untie, training.get_batch = noted, counted
    torch.nn.Module.compile = lambda block: compile(block, backend='aot_eager')     # in seconds


def test_a_growth_lets_go_of_the_old_model(config):
    "Compiled, and under DDP."
    c = config(n_layer=4, grow='lidas', grow_block=2, steps=10, decay_steps=2, compile=True)
    ended = ranks(flags(c), before=refuse_leftovers)
    assert ended.codes == [0, 0], ended.stderr


def test_one_process_checks_a_checkpoint_and_loading_maps_it(config, monkeypatch, tmp_path):
    c = config(steps=4, decay_steps=1)
    training.train(c)
    checked, how = [], []
    monkeypatch.setattr(checkpoint, 'check', lambda folder: checked.append(folder))
    real = torch.load
    monkeypatch.setattr(torch, 'load', lambda *a, **k: (how.append(k), real(*a, **k))[1])
    training.train(dataclasses.replace(c, steps=6))
    assert len(checked) == 1 and how[0]['mmap']
    checkpoint.load(c.out_dir, checked=True)
    assert len(checked) == 1


# --------------------------------------------------------------------------------- the third hunt

def answering(tmp_path, ends):
    "(lm-eval's view of a model that says after a: b, <|im_start|>, d, e, e, ..., its tokens)."
    made = byte_level_bpe(['abc'] * 3, 259, ['<|endoftext|>', '<|im_start|>', '<|im_end|>'])
    V = made.get_vocab_size()
    a, b, d, e = map(made.token_to_id, 'abde')
    model = LM(ModelConfig(vocab_size=V, n_layer=1, n_embd=V + V % 2, n_head=1, head_dim=2,
                           context=64, tie_embeddings=False))
    for p in model.parameters():
        torch.nn.init.zeros_(p) if p.dim() == 2 else torch.nn.init.ones_(p)
    model.embed.weight.data[:, :V] = torch.eye(V)
    for before, after in ((a, b), (b, 1), (1, d), (d, e), (e, e)):
        model.head.weight.data[after, before] = 1
    (tmp_path / 'tok').mkdir()
    made.save(str(tmp_path / 'tok/tokenizer.json'))
    (tmp_path / 'tok/tokenizer_config.json').write_text(json.dumps(dict(eos_token='<|im_end|>')))
    save_hf(model, tmp_path / 'hf', tokenizer=str(tmp_path / 'tok'))
    (tmp_path / 'hf/generation_config.json').write_text(json.dumps(dict(eos_token_id=ends)))
    from lm_eval.api.instance import Instance
    from nanodepth.scoring.lm_eval_model import Asked as Model
    path = str(tmp_path / 'hf')
    asked = Model(model.eval(), as_theirs(model), AutoTokenizer.from_pretrained(path), path)
    return lambda prompt, how: asked.generate_until(
        [Instance('generate_until', {}, (prompt, how), 0)], disable_tqdm=True)[0]


@pytest.mark.parametrize('ends, text', [([2, 1], 'b'), (2, 'bdeeee')])
def test_an_answer_ends_at_each_of_the_models_ends_without_special_tokens(tmp_path, ends, text):
    said = answering(tmp_path, ends)
    for name in ('max_gen_toks', 'max_new_tokens', 'max_tokens'):
        assert said('a', {'until': ['\n'], name: 7}) == text
    assert said('a', dict(until=['e'], max_gen_toks=7)) == text.partition('e')[0]
    assert said('xyz' * 30 + 'a', dict(until=['\n'], max_gen_toks=7)) == text      # cut in front


def test_the_error_of_a_loss_is_that_of_a_mean_over_tokens(tiny):
    "Rows with unequal numbers of targets: the error of a ratio, and the bootstrap's."
    rng = np.random.default_rng(0)
    counts = rng.integers(4, 30, 400)
    hard = rng.gamma(2, 0.5, 400) + (counts > 25)
    rows = torch.tensor(np.stack([hard * counts, counts], 1), dtype=torch.float64)

    def score(rows):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scoring, 'measured', lambda *_: iter([(None, list(rows), {})]))
            return scoring.data_scores(None, None)['loss']
    loss = score(rows)
    mean, n = (hard * counts).sum() / counts.sum(), counts.mean()
    spread = (hard * counts - mean * counts).std(ddof=1) / n
    assert loss.mean == pytest.approx(mean) == np.mean(loss.answers)
    assert loss.error == pytest.approx(spread / 20)
    drawn = [(hard * counts)[i].sum() / counts[i].sum() for i in rng.integers(0, 400, (2000, 400))]
    assert loss.error == pytest.approx(np.std(drawn), rel=0.1)
    equal = torch.tensor(np.stack([hard * 16, np.full(400, 16)], 1))
    assert score(equal).answers == (equal[:, 0] / 16).tolist()      # of equal rows, their means


def test_a_row_of_small_data_counts_once(tiny, tmp_path):
    for split, n in (('train', 600), ('val', 3 * 16 + 1)):
        write_dataset(tmp_path, split, 'bytes', np.random.default_rng(0).integers(97, 123, n))
    loss = scoring.data_scores(tiny(vocab_size=257), Loader(tmp_path, 32, 16, split='val'))['loss']
    assert len(loss.answers) == 3 and len({*loss.answers}) == 3
    assert loss.mean == pytest.approx(measure(tiny(vocab_size=257), Loader(
        tmp_path, 3, 16, split='val'))[0])


def test_several_measures_of_the_same_questions_are_no_more_luck():
    answers = np.random.default_rng(1).choice([-1, 0, 1], 100, p=[0.15, 0.6, 0.25]).tolist()
    one, eight = (sweep.luck([[answers] * n], True).partition('; ')[2] for n in (1, 8))
    assert one == eight


def test_every_order_has_a_name_of_its_own():
    orders = [list(o) for n in (1, 2, 3) for o in itertools.product(range(4), repeat=n)]
    assert len({*map(name_of, orders)}) == len(orders)


def test_a_large_vocabulary_is_summed_exactly():
    torch.manual_seed(0)
    logits = 30 + 0.01 * torch.randn(1, 4, 200_000)
    targets = torch.arange(4)[None]
    losses, _ = losses_of(lambda tokens: logits, targets, targets)
    exact = -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(losses.double(), exact, rtol=0, atol=2e-6)
