"""The page: one command over several kinds of models, from the cache the second time, redrawn
without a model."""
import json

import pytest
import torch
from test_sweep import write_run

import nanodepth
import probe
from engine import checkpoint
from tools import probe as page

FEW = ['--count=4', '--length=10', '--n=6', '--batches=1', '--lens_steps=3', '--tasks=toy_assign/1',
       '--device=cpu']


@pytest.fixture
def runs(tmp_path, tiny, data):
    "An ordinary model, a looped one, a retrofitted one, a Hugging Face folder."
    from engine.hf import save_hf
    from retrofit import surgery
    model = tiny(vocab_size=257, n_layer=4, context=64)
    write_run(tmp_path / 'plain', model, data)
    write_run(tmp_path / 'loop', tiny(vocab_size=257, n_layer=2, context=64, order=[0, 1, 0, 1]),
              data)
    cut = surgery(model, '1-2-1', mean=2)
    checkpoint.save(tmp_path / 'cut', **checkpoint.describe(cut),
                    config=dict(data=[str(data)], batch_size=4, context=16), flops=0)
    (tmp_path / 'cut' / 'run.json').write_text(json.dumps(dict(tokenizer='bytes')))
    save_hf(model, tmp_path / 'hf')
    from data.tokenizer import write_tokenizer
    write_tokenizer('bytes', tmp_path / 'hf', 64)
    return {name: str(tmp_path / name) for name in ('plain', 'loop', 'cut', 'hf')}


def test_one_command_one_page(runs, data, tmp_path, capsys):
    out = tmp_path / 'page'
    nanodepth.main('probe', [runs['plain'], runs['loop'], runs['cut'], f'--out={out}', *FEW])
    said = capsys.readouterr().out
    html = (out / 'index.html').read_text()
    for name, p in page.PROBES.items():
        assert ((out / f'{name}.png').stat().st_size > 5000 and f'src="{name}.png"' in html
                and p.title.replace("'", '&#x27;') in html)
        rows = page.read_rows(out / f'{name}.csv')
        assert {row['run'] for row in rows} == ({'plain', 'loop'} if name in ('swap', 'skip',
                'reverse', 'permute', 'repeat') else {'plain', 'loop', 'cut'})
    assert (
        'loop: 4 layers deep, 2 of their own (2x2); depths that share weights: 0 = 2, 1 = 3' in html
        and 'cut is not in swap' in html)
    assert 'cut: 6 layers deep' in said and '| plain | ' in said and 'every position' in html
    score = {row['run']: row['score'] for row in page.read_rows(out / 'depth_score.csv')}
    model = checkpoint.load_model(runs['plain'])
    tokens = page.Subject(runs['plain'], page_args(out)).tokens
    assert score['plain'] == pytest.approx(probe.depth_score(model, tokens)[0], rel=1e-5)


def page_args(out, **more):
    import argparse
    return argparse.Namespace(device='cpu', tasks='toy_assign/1', n=6, examples='val', count=4,
                              length=10, data=None, batches=1, lens_steps=3, block=2,
                              carry_scales=False, out=out, **more)


def test_what_is_known_is_not_measured_again_and_redrawn_without_a_model(runs, tmp_path, capsys,
        monkeypatch):
    out, only = tmp_path / 'page', '--only=norms,swap'
    nanodepth.main('probe', [runs['plain'], f'--out={out}', only, *FEW])
    first = (out / 'swap.csv').read_bytes()
    monkeypatch.setattr(probe, 'residual_norms', None)
    monkeypatch.setattr(probe, 'swap_blocks', None)
    nanodepth.main('probe', [runs['plain'], f'--out={out}', only, *FEW])
    assert (out / 'swap.csv').read_bytes() == first
    for name in runs:
        torch.save({}, tmp_path / 'gone')
    (out / 'swap.png').unlink()
    monkeypatch.setattr(page, 'Subject', None)
    nanodepth.main('probe', ['--redraw', f'--out={out}'])
    assert (out / 'swap.png').exists()
    monkeypatch.undo()
    monkeypatch.setattr(page, 'VERSION', 10 ** 6)              # another definition: measured anew
    monkeypatch.setattr(probe, 'residual_norms', None)
    with pytest.raises(TypeError):
        nanodepth.main('probe', [runs['plain'], f'--out={out}', only, *FEW])
    capsys.readouterr()


def test_the_same_weights_are_not_the_same_model(tmp_path, tiny, data, capsys):
    weights = tiny(vocab_size=257, n_layer=3, context=64).state_dict()
    for name, fields in (('a', {}), ('b', dict(ln_scaling=True)), ('c', dict(n_head=2)),
                         ('d', dict(order=[0, 1, 2, 1]))):
        model = tiny(vocab_size=257, n_layer=3, context=64, **fields)
        model.load_state_dict(weights)
        write_run(tmp_path / name, model, data)
    nanodepth.main('probe', [*(str(tmp_path / name) for name in 'abcd'), '--only=depth_score',
                             f'--out={tmp_path / "p"}', *FEW])
    rows = page.read_rows(tmp_path / 'p' / 'depth_score.csv')
    assert len({row['score'] for row in rows}) == 4
    capsys.readouterr()


def test_changed_data_are_scored_anew(runs, data, tmp_path, capsys):
    import numpy as np

    from data.tokens import write_dataset
    only = ['--only=repeat', '--examples=toy_assign/1', f'--out={tmp_path / "p"}', *FEW]
    nanodepth.main('probe', [runs['plain'], *only])
    before = page.read_rows(tmp_path / 'p' / 'repeat.csv')
    write_dataset(data, 'val', 'bytes', np.arange(800) % 50, marks=np.zeros(800, int),
                  kinds=['fifth'])
    nanodepth.main('probe', [runs['plain'], *only])
    after = page.read_rows(tmp_path / 'p' / 'repeat.csv')
    assert before[0]['loss'] != after[0]['loss'] and before[0]['size'] == 0
    capsys.readouterr()


def test_half_precision_one_layer_and_names_that_are_numbers(tmp_path, tiny, data, capsys):
    write_run(tmp_path / '2024', tiny(vocab_size=257, n_layer=1, context=64), data)
    from engine.hf import save_hf
    save_hf(tiny(vocab_size=257, n_layer=2, context=64).bfloat16(), tmp_path / 'half')
    from data.tokenizer import write_tokenizer
    write_tokenizer('bytes', tmp_path / 'half', 64)
    nanodepth.main('probe', [str(tmp_path / '2024'), '--only=depth_score,early_exit,norms',
                             f'--out={tmp_path / "p"}', *FEW])
    nanodepth.main('probe',
                   [str(tmp_path / 'half'), f'--data={data}', '--only=depth_score,early_exit',
                    f'--out={tmp_path / "p"}', *FEW])
    assert 'half: 2 layers deep' in capsys.readouterr().out


def test_seeds_are_averaged(tmp_path, tiny, data, capsys):
    for seed in range(2):
        write_run(tmp_path / f'run-{seed}', tiny(seed, vocab_size=257, n_layer=3, context=64), data)
    nanodepth.main('probe', [str(tmp_path / 'run-0'), str(tmp_path / 'run-1'), '--only=depth_score',
                             f'--out={tmp_path / "p"}', *FEW])
    assert '| run   | ' in capsys.readouterr().out.replace('±', '|')


def test_a_hugging_face_folder_and_other_examples(runs, data, tmp_path, capsys):
    text = tmp_path / 'some.txt'
    text.write_text('a text that is long enough for some rows of ten bytes each')
    lines = tmp_path / 'gsm8k.jsonl'
    lines.write_text('\n'.join(json.dumps(dict(question=f'What is {i} and {i}?', answer=str(2 * i)))
                               for i in range(5)))
    for source in (str(text), str(lines), 'toy_assign/1', 'val'):
        nanodepth.main('probe', [runs['hf'], f'--data={data}', f'--examples={source}',
                                 '--only=depth_score,norms', f'--out={tmp_path / "p"}', *FEW])
        assert 'hf: 4 layers deep' in capsys.readouterr().out


def test_fields_of_the_papers_data(tmp_path):
    read = lambda **entry: page.text_of(entry, 'f')
    assert (read(question='q', answer='a') == 'q\na' and read(problem='p', solution='s', level='1')
            == 'p\ns')
    assert read(questions=['x', 'y'], requested_rewrite=[]) == 'x' and read(text='t') == 't'
    with pytest.raises(ValueError, match='none of the known fields'):
        read(words='w')


def test_the_last_word_of_a_passage(tiny, tmp_path):
    from data.tokens import Loader, write_dataset
    text = 'one two three four five six seven eight nine ten eleven twelve '
    ids = list(text.encode()) * 8
    write_dataset(tmp_path / 'd', 'val', 'bytes', ids, marks=[1] * len(ids), kinds=['text'])
    val = Loader(tmp_path / 'd', 2, 32, split='val')
    from data.tokenizer import get_tokenizer
    found = page.last_words(val, get_tokenizer('bytes'), 5, 64)
    assert len(found) == 5
    for before, word in found:
        assert (bytes(word).decode().startswith(' ') and ' ' not in bytes(word).decode()[1:]
                and bytes(before + word).decode() in text * 8)
    knows = lambda wrong: lambda tokens: torch.nn.functional.one_hot(
        torch.tensor([[(known(row[:i + 1]) if not wrong else 0) for i in range(len(row))]
                      for row in tokens.tolist()]), 257).float()

    def known(prefix):
        prefix = bytes(t for t in prefix)
        at = (text * 8).encode().find(prefix[-12:])
        return (text * 8).encode()[at + len(prefix[-12:])] if at >= 0 else 0
    assert (page.said(knows(False), found, 'cpu') == 1.0 and page.said(knows(True), found,
            'cpu') == 0.0)


@pytest.mark.parametrize('args, message', [
    (['--only=depth_scor'], "block_similarity, early_exit; did you mean 'depth_score'?"),
    (['--length=40'], 'have 16 tokens, --length=40'),
    (['--examples=nothing'], 'no such file, and no primitive'),
    (['--examples=short.txt'], 'has 5 tokens, but 10 are looked at'),
    (['--examples=short.jsonl'], 'has no text of 10 tokens'),
    (['--batches=0'], '--batches=0 must be at least 1'), ([], None)])
def test_what_is_refused(runs, tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'short.txt').write_text('short')
    (tmp_path / 'short.jsonl').write_text(json.dumps(dict(text='short')))
    with pytest.raises(SystemExit):
        nanodepth.main('probe', [*([runs['plain']] if message else []), *FEW, '--only=norms',
                                 f'--out={tmp_path / "p"}', *args])
    assert (message or 'give the models to look at') in capsys.readouterr().err


def test_a_lens_of_another_model_is_refused(runs, tmp_path, capsys, tiny, data):
    nanodepth.main('lens', [runs['plain'], '--steps=2', '--device=cpu'])
    nanodepth.main('probe', [runs['plain'], '--only=early_exit', f'--out={tmp_path / "p"}', *FEW])
    before = (tmp_path / 'p' / 'early_exit.csv').read_text()
    # another lens, other numbers
    nanodepth.main('lens', [runs['plain'], '--steps=20', '--lr=0.01', '--device=cpu'])
    nanodepth.main('probe', [runs['plain'], '--only=early_exit', f'--out={tmp_path / "p"}', *FEW])
    assert (tmp_path / 'p' / 'early_exit.csv').read_text() != before
    write_run(tmp_path / 'plain', tiny(3, vocab_size=257, n_layer=4, context=64), data)
    with pytest.raises(SystemExit):
        nanodepth.main('probe', [runs['plain'], '--only=early_exit', f'--out={tmp_path / "p"}',
                                 *FEW])
    assert 'is the lens of another model' in capsys.readouterr().err


def test_moved_layers_keep_their_scales_if_asked(tiny):
    "Folded into the norms, the scale goes where the layer goes; unmoved, nothing changes."
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    from engine.hf import fold_scales
    from probe import swap_blocks
    model = tiny(ln_scaling=True)
    folded = fold_scales(model)
    assert not folded.config.ln_scaling and model.config.ln_scaling
    assert torch.allclose(folded(tokens), model(tokens), atol=1e-5)
    swapped = swap_blocks(model.order, 0, 1)
    x = folded.embed(tokens)
    for i in swapped:           # by hand: layer i with the scale that it was trained with
        x = model.run(x, [i], depth=i)
    assert torch.allclose(folded(tokens, order=swapped), model.head(model.norm(x)), atol=1e-5)
    assert not torch.allclose(folded(tokens, order=swapped), model(tokens, order=swapped))
