"""Whatever is asked: a notation, a growth plan, a model's shape, a wrapper's options, a prompt, a
file of JSON. It works and keeps what it promises, or is refused in a line.

Hypothesis makes the cases, always the same ones in a test; tests/torture.py asks for other ones,
and for more.
"""
import json
import math
import os
import random

import pytest
import torch

hypothesis = pytest.importorskip('hypothesis')
from hypothesis import HealthCheck, given, settings, strategies as st  # noqa: E402

from common.errors import Refused
from common.files import read_json
from data.primitives import TASKS, TOY_TASKS, few_shot
from data.tokenizer import encode_document, get_tokenizer
from engine.checkpoint import load_model
from engine.hf import save_hf
from grow import GROWTH, growth_plan
from loop import format_loop, parse_loop
from model import LM, ModelConfig
from train import Config, read_config
from variants.caches import CACHES
from wrapper import SOLVERS, looped

MANY, SEED = int(os.environ.get('CASES', 0)), int(os.environ.get('SEED', 0))
settings.register_profile('ours', max_examples=MANY or 25, derandomize=not MANY, deadline=None,
                          database=None, suppress_health_check=list(HealthCheck))
settings.load_profile('ours')
seeded = hypothesis.seed(SEED) if MANY else lambda test: test
small = st.integers(-2, 12)
numbers = st.one_of(small, st.floats(), st.sampled_from([1e30, 2 ** 70, -1e-30, None, 'x']))


@seeded
@given(st.one_of(st.text('0123456789x- ', max_size=12), st.text(max_size=8),
                 st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), max_size=5).map(
                     lambda parts: '-'.join(f'{size}x{times}' for size, times in parts))))
def test_a_notation_is_an_order_and_back(text):
    try:
        order = parse_loop(text)
    except Refused:
        return
    assert sorted(set(order)) == list(range(max(order) + 1))
    assert parse_loop(format_loop(order)) == order


@seeded
@given(st.sampled_from([*GROWTH]), small, small,
       st.integers(0, 3000), st.floats(-1, 5))
def test_a_growth_plan_ends_at_full_depth(grow, n_layer, block, steps, alpha):
    try:
        plan = growth_plan(grow, n_layer, block, steps, alpha)
    except Refused:
        return
    starts, orders = zip(*plan)
    depths = [n if isinstance(n, int) else len(n) for n in orders]
    assert depths[-1] == n_layer and depths == sorted(set(depths))
    assert starts[0] == 0 and list(starts) == sorted(set(starts)) and starts[-1] < max(steps, 1)


@seeded
@given(st.fixed_dictionaries({}, optional={
    name: numbers for name in ('n_layer', 'n_head', 'head_dim', 'grow_block', 'steps', 'context',
                               'warmup_steps', 'decay_steps', 'lr', 'batch_size', 'curriculum',
                               'rope_theta', 'grow_alpha', 'lr_floor')} | dict(
    grow=st.sampled_from([*GROWTH, None]),
    loop=st.sampled_from(['2x2', '1-2x3', None]))))
def test_settings_are_a_run_or_a_line(values):
    try:
        config = read_config([f'--{name}={value}' for name, value in values.items()])
    except Refused:
        return
    assert config.steps >= 1 and config.warmup_steps + config.decay_steps <= config.steps


@seeded
@given(*[small] * 4, st.sampled_from([None, 0, 1, 2, 3, 4, 7]),
       st.sampled_from([None, 1, 2, 4, 5, 6]))
def test_a_shape_runs_or_is_refused(n_layer, n_embd, n_head, ffn_dim, n_kv_head, head_dim):
    try:
        model = LM(ModelConfig(vocab_size=11, n_layer=n_layer, n_embd=n_embd, n_head=n_head,
                               ffn_dim=ffn_dim, n_kv_head=n_kv_head, head_dim=head_dim, context=6))
    except Refused:
        return
    assert model(torch.arange(6)[None]).isfinite().all()


@pytest.fixture(scope='module')
def six():
    torch.manual_seed(0)
    return LM(ModelConfig(vocab_size=11, n_layer=6, n_embd=8, n_head=2, context=8)).eval()


@seeded
@given(st.data())
@torch.no_grad()
def test_a_wrapper_loops_or_is_refused_and_goes_without_a_trace(six, data):
    draw = lambda strategy: data.draw(strategy)
    window = draw(st.one_of(st.none(), st.tuples(small, small), st.floats(-1, 2),
                            st.sampled_from(['mid4', '1-2', 'mid9', '2-1', 'x'])))
    method = draw(st.sampled_from([*SOLVERS, 'x']))
    options = dict(cache=draw(st.sampled_from([None, *CACHES, 'x'])),
                   decode=draw(st.sampled_from(['full', 'bypass', 1, -1, 'x'])),
                   mode=draw(st.sampled_from([None, 'block', 'layer', 'x'])))
    if draw(st.booleans()):
        options |= dict(T=draw(st.sampled_from([1, 2, 0, -1, math.nan, 1e9])))
    tokens = torch.arange(8)[None]
    plain = six(tokens)
    try:
        with looped(six, window, method, draw(st.integers(-1, 4)),
                    draw(st.sampled_from([None, 0.0, 0.5, 1.0, -1, math.nan])), **options):
            assert six(tokens).shape == plain.shape
    except Refused:
        pass
    assert torch.equal(six(tokens), plain)


@seeded
@given(st.text(), st.integers(1, 5))
def test_any_text_comes_back(text, times):
    tokenizer = get_tokenizer('bytes')
    text = text.encode('utf-8', 'ignore').decode() * times
    assert tokenizer.decode(encode_document(tokenizer, text)) == text


@seeded
@given(st.sampled_from([*TASKS, *TOY_TASKS, 'x']), st.integers(-1, 20), st.integers(-1, 12),
       st.integers(-1, 3))
def test_a_question_has_one_right_answer(task, n, depth, shots):
    try:
        examples = few_shot(task, n, depth=depth, shots=shots)
    except Refused:
        return
    assert len(examples) == n
    assert all(len(set(e.options)) == len(e.options) > e.answer >= 0 for e in examples)


values = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
                      lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(
                          st.sampled_from(['tokenizer', 'kinds', 'shards', 'n', 'model_type',
                                           'hidden_size', 'vocab']), inner, max_size=4)))


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    "A Hugging Face folder, and its descriptions as they are."
    folder = tmp_path_factory.mktemp('hf')
    torch.manual_seed(0)
    model = LM(ModelConfig(vocab_size=257, n_layer=2, n_embd=8, n_head=2, context=8))
    save_hf(model, folder, 'bytes')
    return folder, {name: (folder / name).read_text() for name in ('config.json',
                                                                  'tokenizer.json')}


@seeded
@given(st.sampled_from(['config.json', 'tokenizer.json']), values, st.integers(0, 9999))
def test_a_description_with_another_value_is_read_or_refused(exported, name, value, seed):
    rng = random.Random(seed)
    folder, good = exported
    spec = json.loads(good[name])
    place = spec
    while isinstance(inner := place[key := rng.choice([*place])], dict) and inner:
        if rng.random() < 0.3:
            break
        place = inner
    place[key] = value
    (folder / name).write_text(json.dumps(spec))
    try:
        if name == 'config.json':
            load_model(folder)
        else:
            tokenizer = get_tokenizer(folder)
            tokenizer.decode(tokenizer.encode('ab'))
    except Refused:
        pass
    finally:
        (folder / name).write_text(good[name])


@seeded
@given(st.one_of(values.map(json.dumps), st.text(), st.binary()))
def test_json_is_a_dict_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / 'x.json'
    path.write_bytes(text if isinstance(text, bytes) else text.encode('utf-8', 'surrogatepass'))
    try:
        assert isinstance(read_json(path), dict)
    except Refused:
        pass
