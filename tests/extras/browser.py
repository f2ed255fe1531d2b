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
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from conftest import ROOT, save_run  # noqa: E402

from nanodepth.extras import play  # noqa: E402
from nanodepth.text.primitives import few_shot  # noqa: E402
from nanodepth.text.tokenizer import get_tokenizer, start_of_document  # noqa: E402
from nanodepth.scoring.likelihoods import encode  # noqa: E402
from nanodepth.scoring.scores import ask  # noqa: E402
from nanodepth.scoring.way import Way  # noqa: E402
from nanodepth.grow import lidas, untie  # noqa: E402
from nanodepth.model import LM, ModelConfig  # noqa: E402
from nanodepth.retrofit import core_of, surgery  # noqa: E402

ANSWERED = "document.querySelector('#verdict').textContent"
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


def with_more_answers(file):
    text = file.read_text(encoding='utf-8')
    assert text.count('const ANSWERS = {') == 1
    file.write_text(text.replace('const ANSWERS = {', MORE_ANSWERS), encoding='utf-8')


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
    save_run(folder / 'loop', LM(ModelConfig(n_layer=4, order=[0, 1, 2, 1, 2, 3], **shape)))
    save_run(folder / 'retrofit', surgery(LM(ModelConfig(n_layer=8, **shape)), '2-2-2', r=4))
    return [str(folder / name) for name in ('lidas', 'loop', 'retrofit')]


def press(page, selector, by_keys):
    "A click, or Tab until the focus is there, and Enter."
    if not by_keys:
        return page.click(selector)
    for _ in range(120):
        if page.evaluate('selector => document.activeElement.matches(selector)', selector):
            return page.keyboard.press('Enter')
        page.keyboard.press('Tab')
    raise AssertionError(f'{selector} is not reached by Tab')


def open_file(page, file, ready):
    "(the errors that the page will have, the seconds until it is ready)"
    errors, began = [], time.monotonic()
    page.on('pageerror', lambda error: errors.append(str(error)))
    page.goto(file.as_uri(), timeout=120_000)
    page.wait_for_function(ready, timeout=120_000)
    return errors, time.monotonic() - began


def fits(page):
    "Nothing is wider than the window, and what stays at a phone's top leaves half of it."
    assert page.evaluate('document.documentElement.scrollWidth <= innerWidth')
    assert page.evaluate("document.querySelector('#live').offsetHeight < innerHeight / 2")


def scene(page, k, again, by_keys, out):
    "A step, or what it does a second time: an answer in letters that can be read."
    if not again:
        press(page, f'#steps button:nth-child({k})', by_keys)
    press(page, '#scene', by_keys)
    page.wait_for_function(COUNTED, timeout=120_000)
    assert not page.inner_text('#error') and page.inner_text('#verdict')
    fits(page)
    bad = page.evaluate(CONTRAST)
    assert not bad, f'step {k}: contrast below 4.5: {bad}'
    page.evaluate('scrollTo(0, 0)')
    page.screenshot(path=f'{out}-{k}{"b" * again}.png', full_page=True)


def walk(page, file, out, by_keys):
    "Through the six steps; each says what must be seen. The seconds until the first answer."
    errors, seconds = open_file(page, file, ANSWERED)
    place = page.evaluate("document.querySelector('#share').getBoundingClientRect().y")
    page.wait_for_function(COUNTED)
    assert page.evaluate("document.querySelector('#share').getBoundingClientRect().y") == place, (
        'something moved when answers came in')
    tiles = page.locator('#tiles button')
    python = lambda: page.inner_text('#python')
    step = lambda k, again=False: scene(page, k, again, by_keys, out)
    depth = tiles.count()
    step(1)
    assert tiles.count() == depth + 2 and 'order=[' in python()
    step(2)
    assert tiles.count() == depth - 1 and f'{depth - 1} layer runs' in page.inner_text('#cost')
    step(3)
    assert len(page.locator('#stairs b').all_inner_texts()) == 5
    assert all(text.endswith('%') for text in page.locator('#stairs b').all_inner_texts())
    for n in range(2, depth + 1, 2):
        step(4, again=n > 2)
        assert tiles.count() == n and ('was' in tiles.last.inner_text()) == (n > 2), n
    assert 'untie(model' in python()
    step(5)
    assert "'naive'" in python() and tiles.count() == depth
    step(5, again=True)
    assert "'rk'" in python() and f'{depth + 12} layer runs' in page.inner_text('#cost')
    step(6)
    assert tiles.count() == 6 and 'r=1' in python()
    step(6, again=True)
    assert tiles.count() == 12 and page.is_visible('#core')
    assert not errors, errors
    return seconds


def free_play(page, file):
    "By keys: choose two tiles, repeat them, take it back; a typed order; a link is a state."
    page.goto(file.as_uri())
    page.wait_for_function(ANSWERED)
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
    page.fill('#text', '9x')
    page.keyboard.press('Enter')
    page.wait_for_function("document.querySelector('#error').textContent.includes('9x')")
    page.goto('about:blank')
    page.goto(link)
    page.wait_for_function(ANSWERED)
    assert tiles.count() == n + 2 and page.inner_text('#verdict') == seen


def compare(page, run, model, ways, texts, most):
    "Of each text in each way: the logits that the page and PyTorch give, and the likeliest token."
    tokenizer = get_tokenizer(run)
    furthest = 0
    for way in ways:
        how = dict(wrap=way.dials) if way.dials else dict(r=way.r) if way.r else (
            dict(order=way.loop) if way.loop else {})
        found = page.evaluate(ASK, ['logits', dict(model=Path(run).name, how=how, prompts=texts)])
        with way.apply(model), torch.no_grad():
            for text, (likeliest, logits) in zip(texts, found):
                wanted = model(torch.tensor([encode(tokenizer, text, model)]))[0, -1]
                some = wanted[::math.ceil(len(wanted) / 1024)]
                far = (torch.tensor(logits) - some).abs().max().item()
                furthest = max(furthest, far)
                assert far < most and likeliest == wanted.argmax(), (way, text, far)
    return furthest


def parity(page, runs, prompts=200):
    "200 prompts in ten ways of each kind of model: logits, likeliest tokens, right answers."
    furthest = 0
    for run in runs:
        name, model = Path(run).name, play.round_weights(play.load_model(run))
        tokenizer, n = get_tokenizer(run), len(model.layers)
        texts = [e.prompt for e in few_shot('toy_assign', prompts // 2, shots=0, depth=2)]
        texts += [e.prompt for e in few_shot('toy_copy', prompts - len(texts), shots=0)]
        plain = [*range(n)]
        ways = [Way(r=r) for r in range(1, 11)] if core_of(model) else [
            Way(), *(Way(loop=order) for order in (plain[:-1], plain[::-1], plain * 2, plain[1:])),
            Way(window='mid2', K=3), Way(window='0-1', method='naive', K=2),
            Way(window='mid2', method='euler', K=4, T=2), Way(window='1-1', K=2, beta=0.25),
            Way(window='mid2', method='rk', K=2, T=1.5)]
        furthest = max(furthest, compare(page, run, model, ways, texts, 1e-4))
        right = sum(page.evaluate(ASK, ['measure', dict(model=name, how={}, task='toy_assign/3',
                                                        first=i, last=i + 25)])['right']
                    for i in range(0, 100, 25))
        wanted = ask(model, tokenizer, few_shot('toy_assign', 100, shots=0, depth=3)).mean
        assert right == round(100 * wanted), (run, right, wanted)
    return furthest


# ------------------------------------------------------------------------------ a published model

SCRIPTS = ['Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich', 'Съешь же ещё этих мягких булок',
           'Ξεσκεπάζω την ψυχοφθόρα βδελυγμία', 'いろはにほへと ちりぬるを 日本語', '他們為什麼不說中文',
           'صِف خَلقَ خَودٍ كَمِثلِ الشَمسِ', 'ऋषियों को सताने वाले दुष्ट', '키스의 고유조건은 입술끼리']


def walk_published(page, file, out, by_keys):
    "Through its steps. Returns the seconds until it is open, and until a prompt is answered."
    errors, seconds = open_file(page, file, 'document.body.dataset.answered')
    page.wait_for_function(COUNTED, timeout=120_000)
    steps = page.locator('#steps button').count()
    tiles = page.locator('#tiles button')
    depth = tiles.count()
    layers = []
    for k, again in [(1, 0), (2, 0), (3, 0), (3, 1), (4, 0), (4, 1), (5, 0)][:2 * steps - 3]:
        scene(page, k, again, by_keys, out)
        layers.append(tiles.count())
        assert 'sure' in page.inner_text('#verdict')
        assert 'the likeliest from layer' in page.inner_text('#appears')
        assert page.locator('#behind tr').count() == 1 + (layers[-1] + 4 * (k == 4) * again)
    assert layers[:6] == [depth, depth, depth - 1, depth - 1, depth + 4, depth]
    page.fill('#prompt', 'When the sun had set behind the hills, the old man took his dog and walked slowly along the')
    page.wait_for_timeout(500)
    began = time.monotonic()
    page.wait_for_function(COUNTED.replace('counted', 'answered'), timeout=120_000)
    taken = time.monotonic() - began
    page.wait_for_function(COUNTED, timeout=120_000)
    if not by_keys:             # a tile is dragged, and the link brings it back
        before = tiles.count()
        tiles.nth(3).drag_to(tiles.nth(0))
        page.wait_for_function(COUNTED, timeout=120_000)
        assert tiles.nth(0).inner_text() == '3' and tiles.count() == before
        link = page.url
        page.goto('about:blank')
        page.goto(link, timeout=120_000)
        page.wait_for_function(COUNTED, timeout=120_000)
        assert tiles.nth(0).inner_text() == '3' and 'sun had set' in page.input_value('#prompt')
    assert not errors, errors
    return seconds, taken


def parity_published(page, run):
    "Logits of 50 prompts in six ways, and the tokens of 200 texts."
    from transformers import AutoTokenizer
    model = play.round_weights(play.load_model(run).float(), small=True)
    n = len(model.layers)
    plain = [*range(n)]
    ways = [Way(), Way(loop=plain[:-5] + plain[-4:]), Way(loop=plain[:14] + plain[10:]),
            Way(window='mid4', K=2), Way(window='4-7', method='naive', K=2),
            Way(window='mid2', method='euler', K=3)]
    rows = (ROOT / 'data/evals/questions/piqa.jsonl').read_text().splitlines()[:50]
    prompts = [json.loads(row)['goal'] for row in rows]
    furthest = compare(page, run, model, ways, prompts, 1e-3)
    code = Path(play.__file__).read_text(encoding='utf-8').split('\n')
    texts = [*(text for text in SCRIPTS for text in (text, f'  {text}\n\n{text[::-1]} 3.14159')),
             *(f'{i} {10 ** i}{" " * i}{i}\t\r\n \u00a0\u3000x' for i in range(20)),
             *('\n'.join(code[i:i + 3]) for i in range(0, 300, 2)), "I'll can't <|im_start|>user 👩‍👩‍👧 ½ Ⅷ ٣",
             *prompts][:200]
    theirs = AutoTokenizer.from_pretrained(run)
    begin = start_of_document(get_tokenizer(run))       # what our commands put before a text
    found = page.evaluate(ASK, ['tokens', dict(model=Path(run).name, texts=texts)])
    for text, tokens in zip(texts, found, strict=True):
        assert tokens == begin + theirs(text)['input_ids'], text
    return furthest, len(texts)


def main():
    from playwright.sync_api import sync_playwright
    out = Path('out/play')
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as p:
        runs = sys.argv[1:] or random_models(Path(folder))
        file = Path(folder) / 'page.html'
        play.main([*runs, f'--out={file}', '--open=false'])
        with_more_answers(file)
        browser = p.chromium.launch(executable_path=shutil.which('chromium'),
                                    args=['--no-sandbox'])
        open_page = lambda width, scheme: browser.new_context(
            offline=True, viewport=dict(width=width, height=844), color_scheme=scheme).new_page()
        for width, scheme, by_keys in SCREENS:
            first = walk(open_page(width, scheme), file, out / str(width), by_keys)
            print(f'{width} pixels, {scheme}: six steps; the first answer after {first:.2f} s')
        free_play(open_page(1280, 'light'), file)
        page = open_page(1280, 'light')
        open_file(page, file, COUNTED)
        print(f'logits differ by at most {parity(page, runs):.1e}')
        if not PUBLISHED.exists():
            return print('the published model is not there: make smollm2')
        file = Path(folder) / 'smollm2.html'
        play.main([str(PUBLISHED), f'--out={file}', '--open=false'])
        with_more_answers(file)
        for width, scheme, by_keys in SCREENS:
            page = open_page(width, scheme)
            opened, answer = walk_published(page, file, out / f'smollm2-{width}', by_keys)
            if not by_keys:
                continue
            print(f'{width} pixels, {scheme}: a published model; open after {opened:.1f} s, a prompt '
                  f'of 20 tokens is answered in {answer:.1f} s')
        furthest, texts = parity_published(page, str(PUBLISHED))
        print(f'logits differ by at most {furthest:.1e}, tokens of {texts} texts are equal')
        browser.close()


if __name__ == '__main__':
    main()
