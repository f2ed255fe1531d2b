"The page: what the server says is what the commands say, and nobody else may ask."
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import ROOT

from common.errors import Refused
from data.tokens import Loader
from engine import checkpoint
from engine.measure import parse_tasks, run_scorer
from loop import parse_loop, running
from retrofit import surgery
from tools import play
from wrapper import looped


@pytest.fixture
def served(tiny, data, tmp_path):
    "A server with an ordinary model and a recurrent one, and a function that asks it."
    lm = tiny(vocab_size=257, n_layer=4, context=64)
    about = dict(config=dict(data=str(data), batch_size=4, context=16, grad_accum=1))
    for name, model in dict(lm=lm, deep=surgery(lm, '1-2-1', inject='linear')).items():
        checkpoint.save(tmp_path / name, **checkpoint.describe(model), step=0, optimizers=[],
                        **about)
        (tmp_path / name / 'run.json').write_text('{"tokenizer": "bytes"}')
    server = play.serve([str(tmp_path / 'lm'), str(tmp_path / 'deep')], 'toy_assign/1', 0, 'cpu')
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def ask(name, about=None, method='POST', raw=None, **headers):
        to = http.client.HTTPConnection(*server.server_address, timeout=60)
        body = json.dumps(about).encode() if raw is None else raw
        to.request(method, f'/{name}', body, headers)
        got = to.getresponse()
        said = got.read()
        return got.status, json.loads(said) if said[:1] in b'{[' else said.decode()
    yield ask, tmp_path, server
    server.shutdown()
    server.server_close()


def measured(ask, **about):
    "As the page does it: slice by slice, added up."
    sums, i, of = dict(loss=0, targets=0, right=0, questions=0), 0, 1
    while i < of:
        status, said = ask('measure', about | dict(slice=i))
        assert status == 200, said
        of, i = said.pop('of'), i + 1
        for name, value in said.items():
            sums[name] += value
    loss = sums['loss'] / sums['targets'] if sums['targets'] else None
    return dict(loss=loss, accuracy=sums['right'] / sums['questions'], slices=of)


def test_what_it_says_is_what_the_model_says(served):
    ask, folder, _ = served
    model, order = checkpoint.load_model(folder / 'lm'), [0, 1, 2, 1, 2, 3]
    wrap = dict(window='1-2', method='rk', K=3, beta=0.25)
    prompt, tokens = 'a1b2?a', torch.tensor([[256, *b'a1b2?a']])
    for how, layers in (({}, 4), (dict(order=order), 6), (dict(wrap=wrap), 4 + 2 * 2)):
        status, said = ask('look', dict(model='lm', how=how, prompt=prompt))
        with running(model, how.get('order', [0, 1, 2, 3])), torch.no_grad():
            if 'wrap' in how:
                with looped(model, **wrap):
                    logits = model(tokens)
            else:
                logits = model(tokens)
        likely = logits[0, -1].softmax(-1).topk(8)
        assert status == 200 and said['changed']['layers'] == layers
        assert [p for _, p in said['changed']['next']] == pytest.approx(likely.values.tolist(),
                                                                        abs=1e-4)
        assert said['plain']['layers'] == 4 and said['cost'] == layers / 4
        if 'wrap' not in how:       # behind the last layer the lens is the model
            last, first = said['changed']['behind'][-1]['says'][-1], said['changed']['next'][0]
            assert last == first and len(said['changed']['behind']) == layers
    assert ask('look', dict(model='lm', how=dict(order=order), prompt=prompt))[1]['changed'][
        'notation'] == '1-2x2-1'
    said = ask('look', dict(model='deep', how=dict(r=5), prompt=prompt))[1]['changed']
    deep = checkpoint.load_model(folder / 'deep')
    assert said['layers'] == 1 + 5 * 2 + 1
    assert said['next'][0][1] == pytest.approx(
        deep(tokens, r=5)[0, -1].softmax(-1).max().item(), abs=1e-4)


def test_skill_is_what_the_commands_measure(served):
    ask, folder, _ = served
    path, order = folder / 'lm', parse_loop('1-2x2-1')
    state, model = checkpoint.load(path), checkpoint.load_model(path)
    score = run_scorer(path, state, model, None, play.BATCHES,
                       parse_tasks('toy_assign/1', play.QUESTIONS))
    with running(model, order):
        wanted = score(model)
    said = measured(ask, model='lm', how=dict(order=order), task='toy_assign/1')
    assert said['loss'] == pytest.approx(wanted['loss'], abs=1e-5)
    assert said['accuracy'] == wanted['toy_assign/1']
    with running(model, order), looped(model, '1-2', K=2):
        wanted = score(model)
    said = measured(ask, model='lm', how=dict(order=order, wrap=dict(window='1-2', K=2)),
                    task='toy_assign/1')
    assert said['loss'] == pytest.approx(wanted['loss'], abs=1e-5)
    assert said['slices'] == play.BATCHES + play.QUESTIONS // play.SLICE
    # the model is as it was
    found = ask('look', dict(model='lm', how={}, prompt='ab'))[1]
    assert found['plain']['next'] == found['changed']['next'] and found['cost'] == 1


def test_a_checkpoint_that_names_no_data_is_measured_on_what_is_given(tiny, data, tmp_path):
    model = tiny(vocab_size=257, context=64)
    checkpoint.save(tmp_path / 'lm', **checkpoint.describe(model), step=0, optimizers=[])
    (tmp_path / 'lm/run.json').write_text('{"tokenizer": "bytes"}')
    assert not play.Opened(tmp_path / 'lm', 'cpu').has_data
    one = play.Opened(tmp_path / 'lm', 'cpu', str(data))
    batch = Loader(data, 4, 64, split='val', seed=0, vocab_size=257).batch(0)
    assert one.has_data and torch.equal(one.val.batch(0)[0], batch[0])


IMPOSSIBLE = [
    ('look', dict(model='lx'), "model='lx' is not one of lm, deep; did you mean 'lm'"),
    ('look', dict(model='lm', how=dict(order=[0, 9]), prompt='a'), 'names layer 9'),
    ('look', dict(model='lm', how=dict(order=[0] * 999), prompt='a'), 'more than this page'),
    ('look', dict(model='lm', how={}, prompt='a' * 99), 'has 100 tokens, 1 to 64 fit'),
    ('look', dict(model='lm', how=dict(wrap=dict(K=10 ** 9)), prompt='a'), 'K=1000000000'),
    ('look', dict(model='lm', how=dict(wrap=dict(out='/')), prompt='a'), "no setting 'out'"),
    ('look', dict(model='lm', how=dict(wrap=dict(K=float('inf'))), prompt='a'), 'K must be a w'),
    ('look', dict(model='lm', how=dict(wrap=dict(K=2.9)), prompt='a'),
     'K must be a whole number, not 2.9'),
    ('look', dict(model='lm', how=dict(wrap=dict(T=True)), prompt='a'), 'T must be a number'),
    ('look', dict(model='lm', how=dict(wrap=dict(T=10 ** 400)), prompt='a'), 'T must be a number'),
    ('look', dict(model='lm', how=dict(wrap=dict(beta=10 ** 400)), prompt='a'), 'beta must be'),
    ('measure', dict(model='lm', task='toy_assign,toy_copy'), 'one task at a time'),
    ('measure', dict(model='lm', task='toy_copy', slice=99), 'slice=99 must be below 9'),
    ('look', dict(model='lm', how=dict(wrap=dict(window='9-9')), prompt='a'), "window='9-9'"),
    ('look', dict(model='deep', how=dict(r=0), prompt='a'), 'r=0 must be'),
    ('order', dict(model='lm', text='3-2x2-3'), '8 unique layers, but the model has 4'),
    ('order', dict(model='lm', text='0, 1, x'), "names layer 'x'"),
    ('measure', dict(model='lm', task='toy_assing/1'), "did you mean 'toy_assign'"),
    ('question', dict(task='toy_assign/99'), 'letters for depth'), ('about', [1], 'not names'),
    ('look', dict(model='lm', how=[1]), 'how must be names with values or none')]


def test_what_cannot_be_is_one_line(served):
    ask, _, _ = served
    for name, about, message in IMPOSSIBLE:
        status, said = ask(name, about)
        assert status == 400 and message in said['error'] and '\n' not in said['error'], said


def test_nobody_else_may_ask_and_nothing_else_is_read(served):
    ask, _, server = served
    port = server.server_address[1]
    assert server.server_address[0] == '127.0.0.1'
    assert ask('about', {}, Host='evil.example')[0] == 403
    assert ask('about', {}, Origin='http://evil.example')[0] == 403
    assert ask('', method='GET', Host=f'rebound.example:{port}')[0] == 403
    assert ask('about', {}, Origin=f'http://localhost:{port}')[0] == 200
    assert ask('about', {}, Host='localhost:9999')[0] == 200         # a forwarded port
    for path in ('../README.md', '%2e%2e/README.md', 'etc/passwd', 'play.html'):
        status, said = ask(path, method='GET')
        assert status == 404 and said['error'] == 'there is nothing here', path
    assert ask('__init__', {})[0] == 404
    for raw in (b'', b'no JSON', b'[' * 9000, b'\xff\xfe', b' ' * (play.BODY + 1)):
        assert ask('about', raw=raw)[0] == 400, raw[:10]
    status, page = ask('', method='GET')
    assert status == 200 and page == (ROOT / 'tools/play.html').read_text()
    assert 'http' not in page.split('<style>')[0] and 'src=' not in page        # no download


def test_it_ends_while_a_browser_keeps_a_connection(tiny, tmp_path):
    checkpoint.save(tmp_path / 'lm', **checkpoint.describe(tiny(vocab_size=257)), step=0)
    (tmp_path / 'lm/run.json').write_text('{"tokenizer": "bytes"}')
    page = subprocess.Popen([sys.executable, str(ROOT / 'nanodepth.py'), 'play',
                             str(tmp_path / 'lm'), '--open=false', '--port=0', '--device=cpu'],
                            stdout=subprocess.PIPE, text=True,
                            # a test run in the background ignores Ctrl-C, and hands that down
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    port = int(page.stdout.readline().split(':')[2].split('/')[0])
    with socket.create_connection(('127.0.0.1', port)):
        time.sleep(0.2)
        page.send_signal(signal.SIGINT)
        assert page.wait(60) == 130


def test_a_taken_port_and_an_unknown_run_are_refused(served, tmp_path):
    with pytest.raises(Refused, match='there is no checkpoint at'):
        play.serve([str(tmp_path / 'none')], 'toy_copy', 0)
    with pytest.raises(Refused, match=r'the port \d+ cannot be used .*: choose another --port'):
        play.serve([str(tmp_path / 'none')], 'toy_copy', served[2].server_address[1])


def test_the_page_asks_with_names_that_the_server_knows():
    "A name that the server does not know is refused, so the page must not send one."
    page = play.PAGE.read_text()
    asked = re.search(r'asked = \{(.*?)\};', page)[1]
    names = set(re.findall(r'(\w+): ', asked))
    assert {'model', 'how', 'prompt'} <= names <= play.Request.__dataclass_fields__.keys()
    # what the page notes for itself stays with it
    added = set(re.findall(r'asked\.(\w+) = ', page))
    assert re.search(r'measureSkill\(mine, \{' + ', '.join(added) + r', \.\.\.asked\}\)', page)
