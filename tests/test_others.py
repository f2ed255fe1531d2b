"""Files of somebody else, in a folder that a command writes into: none is written over.

Each row is a command, and names that it writes. A folder has a file of each name; all of them are
kept, and what we wrote ourselves is written over without a word.
"""
import runpy

import pytest
from conftest import ROOT, save_run

from nanodepth.__main__ import main as nanodepth
from nanodepth.report.tables import as_csv

pytest.importorskip('lm_eval')
TRAIN = ['--context=16', '--n_embd=32', '--n_head=2', '--head_dim=none', '--n_layer=2', '--steps=4',
         '--warmup_steps=1', '--decay_steps=1', '--eval_batches=1', '--batch_size=4',
         '--device=cpu', '--data={data}']
WORDS = ['tokenizer.json', 'chat_template.jinja', 'generation_config.json', 'added_tokens.json']
COMMANDS = [
    ('export', ['{run}', '{out}'], ['model.safetensors', *WORDS]),
    ('cut', ['{run}', '1-1-1', '--out={out}'], ['run.json', *WORDS]),
    ('train', [*TRAIN, '--out_dir={out}'],
     ['run.json', 'log.jsonl', 'ckpt-4.pt', *WORDS[:-1]]),
    ('prepare', ['{text}', '--out={out}'], ['train.json', 'train_000.bin', 'val_000.bin']),
    ('play', ['{run}', '--open=false', '--out={out}/p.html'], ['p.html']),
    ('plot', ['{trained}', '--out={out}/p.png'], ['p.png', 'p.csv']),
    ('probe', ['{run}', '--data={data}', '--only=norms', '--out={out}', '--device=cpu'],
     ['index.html', 'norms.png', 'norms.csv']),
    ('results', ['{out}/R.md', '--rows={rows}'], ['R.md']),
    ('evaluate', ['{run}', '--tasks=toy_copy', '--n=4', '--device=cpu', '--out={out}/e.csv'],
     ['e.csv', 'e.jsonl'])]
MINE = 'three weeks of notes\n<!-- table growing -->\n<!-- end -->\n'


@pytest.fixture
def places(tmp_path, data, tiny):
    "What a row calls {run}, {trained}, {text} and {rows}: made where it is asked."
    model = tiny(vocab_size=257, n_layer=3, context=64)

    def trained():
        nanodepth('train', [word.format(data=data) for word in TRAIN] + [f'--out_dir={tmp_path}/t'])
        return tmp_path / 't'

    def text():
        (tmp_path / 'notes.txt').write_text('\n\n'.join(f'{i} ' * 900 for i in range(20)))
        return tmp_path / 'notes.txt'

    def rows():
        from extras.test_study import CLAIM
        (tmp_path / 'claims.toml').write_text(CLAIM)
        (tmp_path / 'depth.csv').write_bytes(as_csv([
            {'seed': seed, 'run': run, 'way': way, 'text': 2.0, 'depth 4': 1, 'depth 4 right': 0.5}
            for seed in (1, 2, 3) for run in ('lidas', 'baseline')
            for way in ('ordinary', 'looped')]))
        return tmp_path
    return dict(run=lambda: save_run(tmp_path / 'run', model), trained=trained, text=text,
                rows=rows, data=lambda: data, out=lambda: tmp_path / 'out')


def call(name, argv):
    if name == 'prepare':
        return runpy.run_path(str(ROOT / 'data/text/prepare.py'))['main'](argv)
    nanodepth(name, argv)


@pytest.mark.parametrize('name, argv, files', COMMANDS, ids=str)
def test_no_command_writes_over_what_is_not_its_own(name, argv, files, places, tmp_path, capsys):
    if name in ('play', 'results'):
        pytest.importorskip('nanodepth.extras')
    said = ' '.join(argv)
    made = {key: make() for key, make in places.items() if f'{{{key}}}' in said}
    argv = [word.format(**made) for word in argv]
    out = tmp_path / 'out'
    out.mkdir()
    for file in files:
        (out / file).write_text(MINE)
    call(name, argv)
    said = capsys.readouterr()
    for file in files:
        kept = out / f'{file}.1'
        assert kept.read_text() == MINE and f'kept as {kept}' in said.err + said.out, file
    (out / 'config.json').unlink(missing_ok=True)       # as if it had been stopped before its end
    if name == 'cut':
        (out / 'ckpt.pt').unlink()
    call(name, argv)
    assert not list(out.glob('*.2'))
