"""The pages of `nanodepth play` in a real browser: their steps by mouse and by keys alone, their
contrasts, their logits against PyTorch's, and a checkpoint's tokens against transformers'.

Needs Chromium on the path and playwright (`make browser` installs the latter). Given runs it shows
those, else small random models; then the published model of `make smollm2`, if it is there. The
pictures are for eyes: out/play/*.png.

Usage:
    python tests/extras/browser.py          # with random models: five minutes
    python tests/extras/browser.py out/lidas out/loop_1_2x3_1 out/retrofit
"""
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from conftest import ROOT, save_run  # noqa: E402

from nanodepth.extras import play  # noqa: E402
from nanodepth.grow import lidas, untie  # noqa: E402
from nanodepth.loop import in_order  # noqa: E402
from nanodepth.model import LM, ModelConfig  # noqa: E402
from nanodepth.retrofit import core_of, surgery  # noqa: E402
from nanodepth.scoring.likelihoods import encode  # noqa: E402
from nanodepth.scoring.rows import of_questions  # noqa: E402
from nanodepth.scoring.way import in_way  # noqa: E402
from nanodepth.text.primitives import few_shot  # noqa: E402
from nanodepth.text.tokenizer import get_tokenizer, start_of_document  # noqa: E402

COUNTED = "document.body.dataset.counted === String(number)"
CONTRAST = Path(__file__).with_suffix('.js').read_text()
# what the worker answers beside: of each prompt the likeliest token and a thousand logits or fewer
MORE_ANSWERS = """const ANSWERS = {
  logits({model: name, how, prompts}) {
    const model = open(name), C = model.n_embd;
    return prompts.map(prompt => {
      const logits = model.head(model.hidden(tokenizer.encode(prompt), checked(model, how).how).slice(-C));
      const each = Math.ceil(logits.length / 1024);
      return [logits.indexOf(logits.reduce((a, b) => Math.max(a, b))), [...logits.filter((_, i) => i % each === 0)]];
    });
  },
  tokens({texts}) { return texts.map(text => tokenizer.encode(text)); },"""
ASK = '([name, body]) => post(name, body)'
PUBLISHED = ROOT / 'out/smollm2'
SCREENS = (390, 'dark', False), (1280, 'light', True)        # by mouse, and by keys alone
TEXTS = ['Zwölf Boxkämpfer jagen Viktor', 'Съешь же ещё этих мягких булок', 'いろはにほへと 日本語',
         'صِف خَلقَ خَودٍ', 'ऋषियों को सताने वाले', "I'll can't <|im_start|>user 👩‍👩‍👧 ½ Ⅷ ٣",
         *(f'{i} {10 ** i}{" " * i}{i}\t\r\n \u00a0\u3000x' for i in range(20))]


def random_models(folder):
    "A model that grew from 2 to 8 layers, with its stages, a loop, and a recurrent one."
    torch.manual_seed(0)
    shape = dict(vocab_size=257, n_embd=32, n_head=2, context=64)
    model, about = LM(ModelConfig(n_layer=2, **shape)), dict(config=dict(grow='lidas', grow_block=2))
    for n in (2, 4, 6):
        save_run(folder / 'lidas', model, names=('ckpt.pt', f'ckpt-{n}.pt'), **about)
        model = untie(model, lidas(n, 2))
    save_run(folder / 'lidas', model, **about)
    growths = [json.dumps(dict(step=n, flops=0, grown=dict(origin=lidas(n, 2)))) for n in (2, 4, 6)]
    (folder / 'lidas/log.jsonl').write_text('\n'.join(growths))
    loop = LM(ModelConfig(n_layer=4, **shape))
    loop.order = [0, 1, 2, 1, 2, 3]
    save_run(folder / 'loop', loop)
    save_run(folder / 'retrofit', surgery(LM(ModelConfig(n_layer=8, **shape)), '2-2-2', r=4))
    return [str(folder / name) for name in ('lidas', 'loop', 'retrofit')]


def page_of(runs, file):
    "The page, whose worker answers more."
    play.main([*runs, f'--out={file}', '--open=false'])
    text = file.read_text(encoding='utf-8')
    assert text.count('const ANSWERS = {') == 1
    file.write_text(text.replace('const ANSWERS = {', MORE_ANSWERS), encoding='utf-8')


def press(page, selector, by_keys):
    "A click, or Tab until the focus is there, and Enter."
    if not by_keys:
        return page.click(selector)
    for _ in range(120):
        if page.evaluate('selector => document.activeElement.matches(selector)', selector):
            return page.keyboard.press('Enter')
        page.keyboard.press('Tab')
    raise AssertionError(f'{selector} is not reached by Tab')


def open_file(page, file):
    "The errors that the page will have."
    errors = []
    page.on('pageerror', lambda error: errors.append(str(error)))
    page.goto(file.as_uri(), timeout=120_000)
    page.wait_for_function(COUNTED, timeout=120_000)
    return errors


def scene(page, k, again, by_keys, out):
    """A step, or what it does a second time: an answer in letters that can be read, nothing wider
    than the window, and what stays at a phone's top leaves half of it."""
    if not again:
        press(page, f'#steps button:nth-child({k})', by_keys)
    press(page, '#scene', by_keys)
    page.wait_for_function(COUNTED, timeout=120_000)
    assert not page.inner_text('#error') and page.inner_text('#verdict')
    assert page.evaluate('document.documentElement.scrollWidth <= innerWidth')
    assert page.evaluate("document.querySelector('#live').offsetHeight < innerHeight / 2")
    bad = page.evaluate(CONTRAST)
    assert not bad, f'step {k}: contrast below 4.5: {bad}'
    page.evaluate('scrollTo(0, 0)')
    page.screenshot(path=f'{out}-{k}{"b" * again}.png', full_page=True)


def walk(page, file, out, by_keys):
    "Through the six steps; each says what must be seen."
    errors = open_file(page, file)
    tiles = page.locator('#tiles button')
    python = lambda: page.inner_text('#python')
    step = lambda k, again=False: scene(page, k, again, by_keys, out)
    depth = tiles.count()
    step(1)
    assert tiles.count() == depth + 2 and 'order=[' in python()
    step(2)
    assert tiles.count() == depth - 1 and f'{depth - 1} layer runs' in page.inner_text('#cost')
    step(3)
    stairs = page.locator('#stairs b').all_inner_texts()
    assert len(stairs) == 5
    assert all(text.endswith('%') for text in stairs)
    for n in range(2, depth + 1, 2):
        step(4, again=n > 2)
        assert tiles.count() == n and ('was' in tiles.last.inner_text()) == (n > 2), n
    assert 'untie(model' in python()
    step(5)
    assert "'naive'" in python() and tiles.count() == depth
    step(5, again=True)
    assert "'rk'" in python() and f'{depth + 12} layer runs' in page.inner_text('#cost')
    step(6)
    assert tiles.count() == 6 and '.r = 1' in python()
    step(6, again=True)
    assert tiles.count() == 12 and page.is_visible('#core')
    assert not errors, errors


def free_play(page, file):
    "By keys: choose two tiles, repeat them, take it back; a link is a state."
    open_file(page, file)
    tiles = page.locator('#tiles button')
    n = tiles.count()
    tiles.nth(n // 2 - 1).focus()
    for key in ('Space', 'ArrowRight', 'Space', 'r'):
        page.keyboard.press(key)
    page.wait_for_function(COUNTED)
    assert tiles.count() == n + 2 and f'{n // 2 - 1}-2x2-{n // 2 - 1}' in page.inner_text('#cost')
    link, seen = page.url, page.inner_text('#verdict')
    tiles.first.focus()
    page.keyboard.press('u')
    assert tiles.count() == n
    page.goto('about:blank')
    page.goto(link)
    page.wait_for_function(COUNTED)
    assert tiles.count() == n + 2 and page.inner_text('#verdict') == seen


def walk_published(page, file, out, by_keys):
    "Through its steps, and a prompt of one's own."
    errors = open_file(page, file)
    tiles = page.locator('#tiles button')
    depth, layers = tiles.count(), []
    for k, again in [(1, 0), (2, 0), (3, 0), (3, 1), (4, 0), (4, 1)]:
        scene(page, k, again, by_keys, out)
        layers.append(tiles.count())
        assert 'sure' in page.inner_text('#verdict')
        assert page.locator('#behind tr').count() == 1 + (layers[-1] + 4 * (k == 4) * again)
    assert layers == [depth, depth, depth - 1, depth - 1, depth + 4, depth]
    page.fill('#prompt', 'When the sun had set behind the hills, the old man took his dog')
    page.wait_for_timeout(500)
    page.wait_for_function(COUNTED, timeout=120_000)
    assert not errors, errors


def compare(page, run, model, ways, texts, most):
    "Of each text in each way: the logits that the page and PyTorch give, and the likeliest token."
    tokenizer = get_tokenizer(run)
    for how in ways:
        found = page.evaluate(ASK, ['logits', dict(model=Path(run).name, how=how, prompts=texts)])
        now = (in_order(model, how['order']) if 'order' in how
               else in_way(model, how.get('wrap', how)))
        with now, torch.no_grad():
            for text, (likeliest, logits) in zip(texts, found):
                wanted = model(torch.tensor([encode(tokenizer, text)]))[0, -1]
                some = wanted[::math.ceil(len(wanted) / 1024)]
                far = (torch.tensor(logits) - some).abs().max().item()
                assert far < most and likeliest == wanted.argmax(), (how, text, far)


def parity(page, run):
    "200 prompts in many ways of a kind of model: logits, likeliest tokens, right answers."
    model, plain = play.round_weights(play.load_model(run)), [*range(len(play.load_model(run).layers))]
    texts = [e.prompt for e in (*few_shot('toy_assign', 100, shots=0, depth=2),
                                *few_shot('toy_copy', 100, shots=0))]
    ways = [dict(r=r) for r in range(1, 11)] if core_of(model) else [
        {}, *(dict(order=order) for order in (plain[:-1], plain[::-1], plain * 2, plain[1:])),
        *(dict(wrap=how) for how in (
            dict(window='mid2', K=3), dict(window='0-1', solver='naive', K=2),
            dict(window='mid2', solver='euler', K=4, T=2), dict(window='1-1', K=2, beta=0.25)))]
    compare(page, run, model, ways, texts, 1e-4)
    right = sum(page.evaluate(ASK, ['measure', dict(model=Path(run).name, how={}, first=i,
                                                    task='toy_assign/3', last=i + 25)])['right']
                for i in range(0, 100, 25))
    wanted, _ = of_questions(model, get_tokenizer(run),
                             few_shot('toy_assign', 100, shots=0, depth=3))
    assert right == sum(wanted.answers), (run, right, wanted.mean)


def parity_published(page, run):
    "Logits of 50 prompts in five ways, and the tokens of texts of every kind."
    from transformers import AutoTokenizer
    model = play.round_weights(play.load_model(run).float(), small=True)
    plain = [*range(len(model.layers))]
    ways = [{}, dict(order=plain[:-5] + plain[-4:]), dict(order=plain[:14] + plain[10:]),
            dict(wrap=dict(window='mid4', K=2)),
            dict(wrap=dict(window='4-7', solver='naive', K=2))]
    rows = (ROOT / 'data/evals/questions/piqa.jsonl').read_text().splitlines()[:50]
    prompts = [json.loads(row)['goal'] for row in rows]
    compare(page, run, model, ways, prompts, 1e-3)
    texts = [*TEXTS, *prompts, *Path(play.__file__).read_text(encoding='utf-8').split('\n')[:120]]
    theirs = AutoTokenizer.from_pretrained(run)
    begin = start_of_document(get_tokenizer(run))       # what our commands put before a text
    found = page.evaluate(ASK, ['tokens', dict(model=Path(run).name, texts=texts)])
    for text, tokens in zip(texts, found, strict=True):
        assert tokens == begin + theirs(text)['input_ids'], text


def main():
    from playwright.sync_api import sync_playwright
    out = Path('out/play')
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which('chromium'),
                                    args=['--no-sandbox'])
        open_page = lambda width=1280, scheme='light': browser.new_context(
            offline=True, viewport=dict(width=width, height=844), color_scheme=scheme).new_page()
        runs, file = sys.argv[1:] or random_models(Path(folder)), Path(folder) / 'page.html'
        page_of(runs, file)
        for width, scheme, by_keys in SCREENS:
            walk(open_page(width, scheme), file, out / str(width), by_keys)
            print(f'{width} pixels, {scheme}: six steps')
        free_play(open_page(), file)
        page = open_page()
        open_file(page, file)
        for run in runs:
            parity(page, run)
        print('logits and right answers are those of PyTorch')
        if PUBLISHED.exists():
            page_of([str(PUBLISHED)], file)
            for width, scheme, by_keys in SCREENS:
                page = open_page(width, scheme)
                walk_published(page, file, out / f'smollm2-{width}', by_keys)
            parity_published(page, str(PUBLISHED))
            print('and so are those of the published model, with the tokens of transformers')
        browser.close()


if __name__ == '__main__':
    main()
