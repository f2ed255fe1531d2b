"""Test nanodepth/commands (compare has its own file): what train --dry_run, cut, export, sample and
probe print and write, and that a mistake is refused in one line."""
import math
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, flags, log_of, ranks, save_run, state_of
from tool_helpers import refused

from nanodepth import probe
from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import probe as page, train as command
from nanodepth.commands.train import empty, planned
from nanodepth.common.errors import Refused, refusals
from nanodepth.common.options import read
from nanodepth.grow import prop_schedule
from nanodepth.model import LM, ModelConfig, Pass
from nanodepth.models.checkpoint import cost_of, load_model, spent_on, state_of as state_of_any
from nanodepth.models.hf import save_hf
from nanodepth.report import logs
from nanodepth.report.tables import read_rows
from nanodepth.retrofit import core_of, surgery
from nanodepth.scoring import harness
from nanodepth.scoring.lens import TunedLens
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.train import train
from nanodepth.training.loader import Loader
from nanodepth.training.plan import Config, changes

lm_eval = pytest.importorskip('lm_eval')
pytestmark = pytest.mark.usefixtures('undrawn')


# (command, its arguments, files each of which must stop it): in a folder for a model any file, and
# in a folder for a dataset a file that would be written over or read with it
COMMANDS = [
    ('export', ['{run}', '{out}'], ['README.md', 'model.safetensors']),
    ('cut', ['{run}', '1-1-1', '--out={out}'], ['notes.txt', 'tokenizer.json']),
    ('evaluate', ['{run}', '--tasks=toy_copy', '--out={out}/e.csv'], ['e.csv']),
    ('prepare', ['{text}', '--out={out}'],
     ['train.json', 'val.json', 'val_000.bin', 'train_000.mask', 'ckpt.pt'])]


MINE = 'three weeks of notes'


def prepare(argv):
    "Run data/text/prepare.py."
    with refusals('prepare'):
        runpy.run_path(str(ROOT / 'data/text/prepare.py'))['main'](argv)


@pytest.mark.parametrize('name, argv, file', [
    (name, argv, file) for name, argv, files in COMMANDS for file in files])
def test_a_command_does_not_write_over_files(name, argv, file, tiny, tmp_path, capsys):
    run, out, text = tmp_path / 'run', tmp_path / 'out', tmp_path / 'notes.txt'
    save_run(run, tiny(vocab_size=257, n_layer=3, context=64))
    text.write_text('\n\n'.join(f'{i} ' * 900 for i in range(20)))
    out.mkdir()
    (out / file).write_text(MINE)
    argv = [word.format(run=run, out=out, text=text) for word in argv]
    with pytest.raises(SystemExit) as end:
        prepare(argv) if name == 'prepare' else nanodepth(name, argv)
    said = capsys.readouterr()
    assert end.value.code == 2 and said.err.startswith(f'{name}: ') and not said.out
    assert str(out) in said.err and [path.name for path in out.iterdir()] == [file]
    assert (out / file).read_text() == MINE


def train_as_a_command(config):
    "Train as `nanodepth train` does, and end the process."
    nanodepth('train', flags(config))


def test_train_in_two_processes(config, tmp_path):
    "A run that is refused ends both, with one line."
    good = ranks(config(steps=3, warmup_steps=0, decay_steps=1), main=train_as_a_command)
    assert good.codes == [0, 0], good.stderr
    bad = ranks(config('bad', grad_accum=3), main=train_as_a_command)
    assert bad.codes == [2, 2] and 'is not a multiple of 2 processes x grad_accum=3' in bad.stderr


# {name: [config and flags]} of the runs that docs/FIGURES.md gives commands for
RUNS = {name: [f'config/{config}.py', *flags.split()] for name, config, flags in re.findall(
    r'^\| (\w+) \| (\w+) \| `(.*)` \|', (ROOT / 'docs/FIGURES.md').read_text(), re.M)}


@pytest.mark.parametrize('name', RUNS)
def test_each_run_in_figures_can_be_planned(name, capsys, monkeypatch, tiny):
    parent = tiny(n_layer=8, context=4096)
    if 'retrofit' in name and not name.endswith('dense'):
        parent = surgery(parent, '2-4-2')
    monkeypatch.setattr(command, 'open_path', lambda path, classes=(): ({}, parent))
    changes = ['--vocab_size=257']
    if 'smollm' in name or 'retrofit' in name:          # shorter, because planning takes seconds
        changes = ['--steps=2000', '--warmup_steps=20', '--decay_steps=300']
    nanodepth('train', [*RUNS[name], *changes, '--dry_run'])
    assert re.search(r'in all [\d,.]+ petaFLOPs; [\d,]+ steps', capsys.readouterr().out)


def test_the_ordinary_partner_of_a_retrofit_has_its_mean_flops(tmp_path, data):
    parent = LM(ModelConfig(n_layer=8, context=64, head_dim=64))
    save_run(tmp_path / 'dense', parent)

    def flops(name, *more):
        "Return the FLOPs per token of a row, summed over all steps."
        c = read(Config, [str(ROOT / f'config/{name}.py'), f'--data={data}',
                          f'--init_from={tmp_path / "dense"}', *more])
        return command.planned(c) / (c.batch_size * c.context)
    recurrent = [flops('retrofit', f'--seed={seed}') for seed in range(6)]
    assert len({*recurrent}) == 6           # each draws its own r
    assert sum(recurrent) / 6 == pytest.approx(flops('retrofit_dense'), rel=0.02)


@pytest.mark.parametrize('parent, fields', [
    ('', dict(grow='lidas', n_layer=6)), ('plain', dict(grow='lidas', n_layer=8)),
    ('', dict(n_layer=4, loop='1-2x3-1', cooldown_loop='1-2x4-1')),
    ('cut', dict(curriculum=0.5, backprop_depth=2))], ids=str)
def test_flops_planned_are_those_logged(parent, fields, config, recurrent, tiny, tmp_path):
    "The runs grow, begin a loop late, or draw the r of a core in each step."
    save_run(tmp_path / 'plain', tiny(vocab_size=257, context=16))
    c = config(init_from=parent and str(tmp_path / parent), **fields)
    train(c)
    assert command.planned(c) == log_of(c)[-1]['flops'] > 0


def test_the_dry_run_of_a_branch_counts_its_own_steps(config, capsys):
    train(config(decay_steps=0))
    c = config('branch', steps=30, branch_from=config().out_dir)
    capsys.readouterr()
    nanodepth('train', [*flags(c), '--dry_run'])
    said = capsys.readouterr().out
    assert '12 to 30' in said and 'petaFLOPs; 18 steps of 4 x 16 = 64 tokens' in said


def test_cost_of_a_published_parent_is_unknown(tmp_path, tiny, config):
    save_hf(tiny(vocab_size=257, n_layer=5), tmp_path / 'hf', tokenizer='bytes')
    nanodepth('cut', [str(tmp_path / 'hf'), '1-2-1', f'--out={tmp_path / "cut"}'])
    for name, parent in (('child', 'hf'), ('grandchild', 'child')):
        train(config(name, init_from=str(tmp_path / parent)), command.open_parent)
    states = {name: state_of_any(tmp_path / name) for name in ('hf', 'cut', 'child', 'grandchild')}
    assert all(math.isnan(cost_of(state)) for state in states.values())
    own = states['child']['flops']          # of the training since then
    assert [spent_on(state) for state in states.values()] == [0, 0, own, 2 * own]
    assert logs.log_of(tmp_path / 'grandchild')[-1]['flops'] == 2 * own > 0


def test_dry_run_prints_tokens_flops_and_minutes(capsys, data):
    model = LM(ModelConfig(vocab_size=257, head_dim=64, tie_embeddings=False))
    flops = 10_000_000 * 16 * 64 * model.flops_per_token(context=64)
    nanodepth('train', ['config/baseline.py', f'--data={data}', '--steps=10_000_000',
                        '--batch_size=16', '--dry_run'])
    said = capsys.readouterr().out
    assert (f'in all {flops / 1e15:,.3f} petaFLOPs; 10,000,000 steps of 16 x 64 = 1,024 tokens'
            in said)
    assert f'{flops / (0.4 * 989e12) / 60:,.1f} minutes on one H100' in said


@pytest.mark.parametrize('grows, ordinary, parameters, grown, full, lengths', [
    ('360m_lidas', '360m_baseline', 361_821_120, 476_147.897, 613_527.488,
     [4722, 9444, 14166, 18888, 23611, 28333, 33055, 37781]),
    ('1b7_lidas', '1b7_baseline', 1_711_376_384, 3_736_608.182, 4_813_222.102,
     [8095, 16190, 24285, 32380, 40476, 48574])])
def test_growth_configs_cost_what_table_7_lists(grows, ordinary, parameters, grown, full, lengths):
    'The table is in "Do Depth-Grown Models Overcome the Curse of Depth?".'
    run, deep = (read(Config, [f'config/smollm_{name}.py']) for name in (grows, ordinary))
    assert empty(run, run.n_layer).num_params() == parameters
    assert round(planned(run) / 1e15, 3) == grown and round(planned(deep) / 1e15, 3) == full
    assert prop_schedule(170_000, len(lengths)) == lengths
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    assert [change.step for change in changes(run)] == starts[1:]
    assert all(change.copies for change in changes(run))


def test_cut_unties_a_looped_run(config, tmp_path):
    "The new model computes what the looped one does, and each repeat has its own layer."
    c, cut = config(n_layer=3, loop='1-1x2-1'), str(tmp_path / 'untied')
    train(c)
    looped = load_model(c.out_dir)
    assert looped.order == [0, 1, 1, 2] and len(looped.layers) == 3
    nanodepth('cut', [c.out_dir, '--untie', f'--out={cut}'])
    with pytest.raises(Refused, match='has only weights, or is of an earlier version'):
        train(config('untied', n_layer=3, loop='1-1x2-1'))
    tokens, untied = torch.arange(9)[None], load_model(cut)
    assert torch.equal(untied(tokens), looped(tokens)) and len(untied.layers) == 4
    assert state_of(cut)['inherited_flops'] == state_of(c)['flops'] > 0


def test_probe_writes_pictures_and_numbers(tiny, data, tmp_path, capsys):
    model, out = tiny(vocab_size=257), tmp_path / 'page'
    models = dict(plain=model, loop=tiny(vocab_size=257, n_layer=2, order=[0, 1, 0, 1]),
                  cut=surgery(model, '1-2-1', r=2))
    runs = [save_run(tmp_path / name, model, data) for name, model in models.items()]
    nanodepth('probe', [*runs, f'--out={out}', '--count=4', '--length=10', '--n=6', '--batches=1',
                        '--lens_steps=3', '--tasks=toy_assign/1', '--device=cpu'])
    said, about = capsys.readouterr()
    for name in page.PROBES:
        assert (out / f'{name}.png').exists()
        assert f'{name}: {page.PROBES[name].__doc__.splitlines()[0]}' in said
        rows = read_rows(out / f'{name}.csv')
        missing = 'cut' if name in ('swap', 'skip', 'reverse') else None
        assert {row['run'] for row in rows} == {'plain', 'loop', 'cut'} - {missing}
    assert 'loop: 4 layers deep (0 1 0 1), ' in about and 'swap leaves out cut' in about
    for name, sizes in (('swap', {0, 1, 2}), ('skip', {0, 1, 2}), ('reverse', {0, 2, 4})):
        assert {row['size'] for row in read_rows(out / f'{name}.csv')} == sizes
    score = {row['run']: row['score'] for row in read_rows(out / 'depth_score.csv')}
    tokens = Loader(data, 4, 16, 'val', seed=1).batch(0)[0][:4, :10]
    assert score['plain'] == pytest.approx(probe.depth_score(model, tokens)[0], rel=1e-5)
    assert f'plain: depth score {score["plain"]:.3f}' in said


def test_the_heat_maps_show_what_their_titles_name(tiny):
    model, tokens = tiny(), torch.arange(12)[None]
    rows = page.heatmap_attn(SimpleNamespace(model=model, tokens=tokens))
    titles = [f'{which} tokens, {how}' for which in ('future', 'all')
              for how in ('propagated', 'local')]
    assert [row['setting'] for row in rows] == [title for title in titles for _ in range(6)]
    wanted = {title: probe.future_effects(model, tokens, part='attn', future='future' in title,
                                          propagate='propagated' in title) for title in titles}
    for row in rows:
        assert row['change'] == wanted[row['setting']][row['erased'], row['observed']]


def test_a_lens_is_trained_on_rows_that_are_not_its_examples(data, tiny, tmp_path, monkeypatch):
    "Of 49 rows in batches of 4, 40 examples take 10 batches, so nine rows are left to train on."
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=16), data)
    trained = []

    def train_lens(model, rows, *_, batches, **how):
        for step in batches:
            trained.extend(map(tuple, rows.batch(step)[0].tolist()))
        return TunedLens(4, 32)

    def opened(count):
        return page.opened(run, page.Options(models=[run], count=count, n=2, batches=1, tasks='',
                                             device='cpu'))
    monkeypatch.setattr(page, 'train_lens', train_lens)
    subject = opened(40)
    assert page.early_exit(subject)
    examples = [*map(tuple, subject.tokens.tolist())]
    assert len({*trained}) == 9 and len(examples) == 40 and not {*trained} & {*examples}
    assert page.early_exit(opened(49)) == []


COMPARE = ['compare', 'config/baseline.py', 'config/lidas.py', '--more=--data={data}',
           '--out={out}']


# (a command line, words that the refusal must have). `nowhere` is not a folder, so a row with it is
# refused before any model is opened.
REFUSALS = [
    (['evaluate', '{run}'], 'does not record what it was trained on'),
    (['evaluate', '{run}', '--data=nowhere'], 'data/text/prepare.py FILES --out=nowhere'),
    (['evaluate', 'nowhere', '--tasks=f1_triviaq'], "did you mean 'f1_triviaqa'?"),
    (['evaluate', 'nowhere', '--tasks=wrapped,knowledge'], 'is in two of wrapped, knowledge'),
    (['evaluate', 'nowhere', '--tasks=toy_assign/3-1'], 'several as toy_assign/0-3'),
    (['evaluate', 'nowhere', '--measures=log_probs'], "did you mean 'log_prob'?"),
    (['evaluate', '{core}', '--tasks=toy_copy', '--r=0'], 'r=0 is too small'),
    (['evaluate', '{run}', '--tasks=toy_copy', '--also=--r=2'], 'has no recurrent core to run'),
    (['evaluate', '{run}', '--tasks=arc_easy'], "Couldn't reach 'allenai/ai2_arc'"),
    (['evaluate', '{run}', 'nowhere', '--tasks=toy_copy', '--shots=9'], 'no checkpoint at nowhere'),
    (['evaluate', '{run}', '--tasks=toy_copy', '--x=K', '--K=2'], 'draws over several values'),
    (['evaluate', '{run}', '--tasks=toy_copy', '--shots=9'], 'but the context'),
    (['evaluate', 'nowhere', '--shots=0,2', '--x=shots'], '--x=shots is for --tasks'),
    (['cut', '{run}', '--untie', '--dense'], 'or --untie alone'),
    (['evaluate', '{run}', '--tasks=toy_copy', '--against=other'], "--against='other' is not one"),
    (['evaluate', 'HuggingFaceTB/SmolLM-135M', '--tasks=toy_copy'], 'hub did not give it'),
    ([*COMPARE, '--seed=3'], 'a setting of a run belongs in an arm, in quotes'),
    ([*COMPARE[:3], '--more=--seed 1'], 'compare has --seeds and --out'),
    ([*COMPARE[:3], '--more=--data={data},nowhere'], 'no data in nowhere'),
    ([*COMPARE[:2], *COMPARE[1:], '--seeds=1'], 'two arms would have one name'),
    ([*COMPARE, 'other/baseline.py --steps=482'],
     'two different arms would be called baseline --steps=482')]


@pytest.fixture
def places(data, tmp_path, tiny, monkeypatch):
    "The folders that rows name as {data}, {out}, {run} and {core}."
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'config').symlink_to(ROOT / 'config')
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other/baseline.py').write_text('lr = 1e-9\n')
    # reading all tasks of lm-eval would take ten seconds
    stock = lm_eval.tasks.TaskManager(include_defaults=False, include_path=[
        str(Path(lm_eval.__file__).parent / 'tasks/arc'), str(ROOT / 'data/evals')])
    monkeypatch.setattr(harness, 'TaskManager', lambda **_: stock)
    harness.find.cache_clear()
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=96))
    core = save_run(tmp_path / 'core', surgery(tiny(n_layer=4), '1-2-1'))
    return dict(run=run, core=core, data=data, out=tmp_path / 'out')


@pytest.mark.parametrize('line, words', REFUSALS, ids=str)
def test_a_mistake_is_refused_in_one_line(line, words, places, capsys):
    assert words in refused(capsys, *(word.format(**places) for word in line))
    assert not [*places['out'].rglob('log.jsonl'), *places['out'].rglob('ckpt.pt')]


def test_sample_continues_a_text_with_a_seed_and_a_loop(tmp_path, tiny, capsys):
    run, said = save_run(tmp_path / 'run', tiny(vocab_size=257, n_layer=1)), []
    for more in ('--seed=0', '--seed=0', '--seed=1', '--loop=1x3'):
        nanodepth('sample', [run, '--prompt=a,\\nb', '--tokens=40', more, '--device=cpu'])
        said.append(capsys.readouterr().out)        # 40 tokens are more than the context of 32
    assert said[0] == said[1] != said[2] and '3 layers deep' in said[3]
    assert "--- 'a,\\nb' continues:\na,\nb|" in said[0]


@pytest.mark.parametrize('scaled', [False, True])
@pytest.mark.parametrize('options, layers', [
    ('2-2-1', [0, 1, 3, 4, 5]), ('2-2-1 --layers=0,1/2,3/5', [0, 1, 2, 3, 5]),
    ('2-2-1 --dense --layers=0,2/1,3/5', [0, 2, 1, 3, 5]), ('2-3-1', [*range(6)])])
def test_cut_keeps_the_layers_that_it_lists(options, layers, scaled, tiny, data, tmp_path):
    """With LN-scaling, each layer keeps the scale of its old depth. The tokenizer, the FLOPs and
    the licence are copied, too."""
    parent = tiny(vocab_size=257, n_layer=6, context=16, ln_scaling=scaled)
    base, out = tmp_path / 'base', tmp_path / 'out'
    save_run(base, parent, data, flops=7)
    (base / 'LICENSE').write_text('Do as you like.')
    nanodepth('cut', [str(base), *options.split(), f'--out={out}'])
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        x, run = parent.embed(tokens), Pass(parent, 9)
        for depth in layers:
            x = run(x, [depth], depth)
        assert torch.allclose(load_model(out)(tokens), parent.head(parent.norm(x)), atol=1e-5)
    assert state_of(out)['inherited_flops'] == 7 and get_tokenizer(out).n_vocab == 257
    assert (out / 'LICENSE').exists()


def test_cut_with_the_authors_settings(tiny, tmp_path, capsys):
    base = save_run(tmp_path / 'base', tiny(vocab_size=257))
    nanodepth('cut', [base, '1-2-1', '--authors', f'--out={tmp_path / "theirs"}'])
    assert '| core    | 1 2 ' in capsys.readouterr().out
    theirs = load_model(tmp_path / 'theirs')
    assert theirs.order[1].settings() == dict(r=4, backprop_depth=8, inject='random',
                                              start='authors', state_std=None)
    assert not theirs.config.tie_embeddings and theirs.head.weight is not theirs.embed.weight
    largest = core_of(theirs).adapter.weight.abs().max()
    assert 0.9 / 8 < largest <= 1 / 8           # as torch draws it for a width of 32
    nanodepth('cut', [base, '1-2-1', '--authors', '--inject=add', f'--out={tmp_path / "sum"}'])
    added = load_model(tmp_path / 'sum')
    assert added.order[1].settings()['inject'] == 'add' and added.order[1].start == 'authors'
