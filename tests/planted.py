"""Bugs planted one at a time: the tests must catch each.

The idea: a test that cannot fail says nothing. Each line below breaks one mechanism in a copy of
the repo, and names the test file that must fail for it.

Usage:
    python tests/planted.py                 # all of them, 10 minutes; exit 1 if one goes unnoticed
"""
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUGS = [        # file, what stands there, what is planted, who must notice
    ('model.py', 'causal = S == T', 'causal = False', 'test_model.py'),
    ('model.py', 'b * cos + a * sin', 'b * cos - a * sin', 'test_model.py'),
    ('model.py', 'depths.rsqrt()', '(depths + 1).rsqrt()', 'test_model.py'),
    ('grow.py', "'lidas'", "'lidaz'", 'test_grow.py'),
    ('loop.py', 'return order[:start] + block * times + order[start + length:]',
     'return order[:start] + block * (times + 1) + order[start + length:]', 'test_loop.py'),
    ('retrofit.py', 'math.log(mean) - 1 / 8', 'math.log(mean)', 'test_plan.py'),
    ('retrofit.py', 'and i >= first_learned):', 'and True):', 'test_retrofit.py'),
    ('wrapper.py', 'return lerp(x, anchor, check_share(beta))',
     'return lerp(anchor, x, check_share(beta))',
     'test_solvers.py'),
    ('variants/window.py', 'made > 1 else first', 'made > 2 else first', 'test_wrapper.py'),
    ('probe.py', 'for d in range(s + 1, len(self.order)):', 'for d in range(s, len(self.order)):',
     'test_probe.py'),
    ('variants/solvers.py', 'slopes.append(wide(g(y)) - wide(y))', 'slopes.append(wide(g(y)))',
     'test_solvers.py'),
    ('variants/caches.py', 'taken = real if k == 1 else layers[self.place(d, k)]', 'taken = real',
     'test_wrapper.py'),
    ('engine/plan.py', 'backprop_depth=min(depth, mean))', 'backprop_depth=depth)', 'test_plan.py'),
    ('engine/plan.py', 'return (step + 1) / c.warmup_steps', 'return step / c.warmup_steps',
     'test_plan.py'),
    ('engine/optimizers.py', 'a, b, c = 3.4445, -4.7750, 2.0315', 'a, b, c = 3.4445, -4.7750, 2.1',
     'test_optimizers.py'),
    ('engine/checkpoint.py', 'broken := archive.testzip()', 'broken := None', 'test_checkpoint.py'),
    ('engine/checkpoint.py', 'not torch.isfinite(t).all()', 'False', 'test_trust.py'),
    ('engine/hf.py', "'attn_norm': 'input_layernorm', 'mlp_norm': 'post_attention_layernorm'",
     "'mlp_norm': 'input_layernorm', 'attn_norm': 'post_attention_layernorm'", 'test_hf.py'),
    ('engine/raven.py', "['mlp.gate', 'mlp.up']", "['mlp.up', 'mlp.gate']", 'test_raven.py'),
    ('engine/measure.py', 'values[i] = value', 'values[i] = -value', 'test_primitives.py'),
    ('engine/measure.py', 'v[e.answer].item()', 'v.max().item()', 'test_primitives.py'),
    ('engine/measure.py', 'right = math.nan', 'pass', 'test_primitives.py'),
    ('data/tokens.py', "targets = np.where(shard['.mask'][start + 1:start + n] > 0, targets, -1)",
     'pass', 'test_tokens.py'),
    ('commands/play.py', 'parse_tasks(TASKS, QUESTIONS)', 'parse_tasks(TASKS, QUESTIONS + 1)',
     'test_play.py'),
    ('data/phop/prepare.py', 'if i:\n            after', 'if i > 1:\n            after',
     'test_phop.py'),
    ('data/corpus.py', "split = 'val' if for_validation(text, every) else 'train'",
     "split = 'train' if for_validation(text, every) else 'val'", 'test_corpus.py'),
    ('report/logs.py', "line['step'] <= keep_up_to", "line['step'] < keep_up_to", 'test_trust.py'),
    ('report/tables.py', '/ (n - 1) / n)', '/ n / n)', 'test_sample_plot.py'),
    ('study/results.py', 'set.intersection(*measured)', 'set.union(*measured)', 'test_study.py'),
    ('study/results.py', 'described | whole', 'described', 'test_study.py'),
    ('engine/world.py', 'else t.to(self.device)', 'else t', 'test_train.py'),
    ('study/claims.py', 'ps[i] * (len(ps) - k)', 'ps[i]', 'test_claims.py'),
    ('variants/exit.py', 'return 1 - now.max(-1)', 'return now.max(-1)', 'test_retrofit.py'),
    ('variants/hosts.py', 'if self.inside and self.kept:', 'if False:', 'test_wrapper_hf.py'),
    ('engine/world.py', 'timeout=PATIENCE', 'timeout=None', 'test_ranks.py'),
    ('engine/checkpoint.py', "name.removeprefix('lm.')", 'name', 'test_checkpoint.py'),
    ('engine/plan.py', 'if is_missing and name in given:', 'if False:', 'test_trust.py'),
    ('common/options.py', "if is_text and lists and", 'if False and', 'test_trust.py'),
    ('study/results.py', 'values[seed] - off[seed]', 'values[seed]', 'test_study.py'),
    ('study/jobs.py', 'if self.order != lm.order', 'if not self.order', 'test_study.py'),
    ('config/retrofit_dense.py', 'steps = 216', 'steps = 250', 'test_cost.py'),
    ('study/records.py', 'max(p_text, p_right) < ALPHA', 'p_right < ALPHA', 'test_record.py'),
    ('commands/play.py', 'if n < depth:', 'if False:', 'test_play.py'),
    ('train.py', '(share * world.size).backward()', 'share.backward()', 'test_train.py'),
    ('retrofit.py', 'adapter.to(self.embed.weight)', 'adapter', 'test_retrofit.py'),
    ('retrofit.py', "getattr(cache, 'r', r) != r", 'False', 'test_retrofit.py'),
    ('engine/examine.py', 'part * batches', '0', 'test_sweep.py'),
    ('engine/measure.py', 'float(b) - float(a)', 'float(a) - float(b)', 'test_evaluate.py'),
    ('engine/ways.py', '(evaluations - 1 + chain)', '(evaluations + chain)', 'test_ways.py'),
    ('engine/ways.py', '    model.mean = before', '    pass', 'test_ways.py'),
    ('commands/sweep.py', 'totals.max(1)', 'totals[:, 0]', 'test_sweep.py'),
    ('engine/harness.py', 'error if is_number(error)', '0 if is_number(error)',
     'test_evaluate.py'),
    ('model.py', "if __name__ == 'model':", "if __name__ == 'x':", 'test_package.py'),
    ('engine/harness.py', 'range(i, n', 'range(0, n', 'test_sweep.py'),
]


def main():
    missed = []
    for file, good, bad, test in BUGS:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / 'repo'
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns('.git', '.venv', 'out',
                                                                      '__pycache__'))
            path = copy / file if (copy / file).exists() else copy / 'nanodepth' / file
            text = path.read_text()
            assert good in text, f'{file} has no {good!r} any more: mend this list'
            path.write_text(text.replace(good, bad, 1))
            ended = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-x', f'tests/{test}'],
                                   cwd=copy, capture_output=True, text=True)
        noticed = ended.returncode == 1
        print(f'{"noticed" if noticed else "MISSED "}  {file}: {bad[:60]}', flush=True)
        missed += [] if noticed else [(file, bad)]
    print(f'{len(BUGS) - len(missed)} of {len(BUGS)} noticed')
    raise SystemExit(bool(missed))


if __name__ == '__main__':
    main()
