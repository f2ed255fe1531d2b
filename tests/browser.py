"""The page of `nanodepth play` in a real browser: keys, typing, links, pictures; logits and
answers against PyTorch's.

Needs Chromium on the path and playwright (`make browser` installs the latter). Given a checkpoint
it shows that, else a small random model; the pictures are for eyes: out/play/*.png.

Usage:
    python tests/browser.py                 # with a random model: half a minute
    python tests/browser.py out/lidas
"""
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from nanodepth.commands import play  # noqa: E402
from nanodepth.data.primitives import few_shot  # noqa: E402
from nanodepth.data.tokenizer import get_tokenizer  # noqa: E402
from nanodepth.engine import checkpoint  # noqa: E402
from nanodepth.engine.measure import encode, score  # noqa: E402
from nanodepth.loop import running  # noqa: E402
from nanodepth.model import LM, ModelConfig  # noqa: E402
from nanodepth.wrapper import looped  # noqa: E402

READY = "document.querySelector('#skill').textContent.includes('right')"


def random_model(folder):
    "An ordinary model of eight layers, random."
    torch.manual_seed(0)
    lm = LM(ModelConfig(vocab_size=257, n_layer=8, n_embd=32, n_head=2, context=64))
    for p in lm.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.2)
    checkpoint.save(folder / 'lm', **checkpoint.describe(lm), step=0, optimizers=[], config={})
    (folder / 'lm/run.json').write_text('{"tokenizer": "bytes"}')
    return str(folder / 'lm')


def walk(page, address, path, folder):
    "Through the page as a reader goes; every step says what must be seen."
    errors = []
    page.on('pageerror', lambda error: errors.append(str(error)))
    began = time.monotonic()
    page.goto(address)
    page.wait_for_function("document.querySelector('#nextplain').children.length")
    first = time.monotonic() - began
    page.wait_for_function(READY)
    blocks = page.locator('#blocks button')
    n = blocks.count()

    # by keys: choose two in the middle, repeat them, move them, undo, leave one out
    blocks.nth(n // 2 - 1).focus()
    for key in ('Space', 'ArrowRight', 'Space', 'r'):
        page.keyboard.press(key)
    assert blocks.count() == n + 2, 'r repeats what is chosen'
    page.wait_for_function(f"{READY} && document.querySelector('#cost').textContent"
                           f".includes('{n + 2} layers')")
    notation = page.inner_text('#cost').split('; ')[1]
    assert notation == f'{n // 2 - 1}-2x2-{n // 2 - 1}', notation
    seen = page.inner_text('#skill')
    link, numbers = page.url, seen
    page.keyboard.press('u')
    assert blocks.count() == n, 'u takes it back'
    page.keyboard.press('Delete')
    assert blocks.count() == n - 1, 'Delete leaves out'
    page.keyboard.press('p')
    assert blocks.count() == n, 'p is the plain model'

    # by typing: a notation, and one that cannot be
    page.fill('#text', f'1-2x3-{n - 3}')
    page.keyboard.press('Enter')
    page.wait_for_function(f"document.querySelectorAll('#blocks button').length === {n + 4}")
    page.fill('#text', '9x')
    page.keyboard.press('Enter')
    page.wait_for_function("document.querySelector('#error').textContent.includes('9x')")
    assert blocks.count() == n + 4, 'a refused order changes nothing'

    # the wrapper, and a link
    page.click('#dials summary')
    page.check('#wrapped')
    page.wait_for_function("document.querySelector('#code').textContent.includes('looped(')")
    page.goto('about:blank')
    page.goto(link)
    page.wait_for_function(READY)
    assert page.inner_text('#skill') == numbers, 'a link is a state'
    assert not errors, errors
    return first


# ------------------------------------------------------------- the page with a model inside

LOGITS = """
ANSWERS.logits = ({model, how, prompts}) => prompts.map(prompt => {
  const stream = open(model).hidden(encode(prompt), checked(open(model), how).how);
  return [...open(model).head(stream.slice(-open(model).n_embd))];
});
"""
ASK = """async ([more, name, body]) => {
  const read = id => document.getElementById(id).textContent;
  if (!window.tested) {
    window.tested = new Worker(URL.createObjectURL(new Blob([read('worker') + more])));
    const raw = Uint8Array.from(atob(read('weights')), c => c.charCodeAt(0)).buffer;
    window.tested.postMessage({name: 'begin', body: {about: JSON.parse(read('about')), raw}});
  }
  window.tested.postMessage({name, body});
  const {data} = await new Promise(done => window.tested.onmessage = done);
  if (data.error) throw Error(data.error);
  return data.answer;
}"""


def ways(n):
    "Ten orders and windows of a model of n layers."
    plain, a, b = [*range(n)], n // 2 - 1, n // 2
    swapped = [*plain[:a], b, a, *plain[b + 1:]]
    return [{}, dict(order=plain[:b] + plain[a:]), dict(order=plain[:a] + plain[b:]),
            dict(order=swapped), dict(order=plain * 2), dict(order=plain[::-1]),
            dict(wrap=dict(window='mid4', method='rk', K=3)),
            dict(wrap=dict(window=f'{a}-{b}', method='naive', K=2)),
            dict(wrap=dict(window=f'0-{a}', method='euler', K=4, T=2)),
            dict(order=plain[:b] + plain[a:], wrap=dict(window=f'{a}-{a}', method='rk', K=2, T=1.5,
                                                        beta=0.25))]


def inside(browser, run, file, prompts=200):
    "The file with a model inside, from the disk and without a network, against PyTorch."
    context = browser.new_context(offline=True, viewport=dict(width=1150, height=900))
    page, errors = context.new_page(), []
    page.on('pageerror', lambda error: errors.append(str(error)))
    began = time.monotonic()
    page.goto(file.as_uri())
    page.wait_for_function("document.querySelector('#after').children.length")
    first = time.monotonic() - began
    page.wait_for_function(READY, timeout=120_000)
    counted = time.monotonic() - began
    began = time.monotonic()
    page.click('#twice')
    page.wait_for_function("document.querySelector('#cost').textContent.includes('1.50')")
    change = time.monotonic() - began

    stages = play.stages_of(run)
    model, tokenizer = play.round_weights(stages[-1][1]), get_tokenizer(run)
    texts = [e.prompt for e in few_shot('toy_assign', prompts // 2, shots=0, depth=2)]
    texts += [e.prompt for e in few_shot('toy_copy', prompts - len(texts), shots=0)]
    ask = lambda name, **body: page.evaluate(ASK, [LOGITS, name, dict(model=stages[-1][0], **body)])
    furthest = 0
    for how in ways(len(model.layers)):
        found = torch.tensor(ask('logits', how=how, prompts=texts))
        wrap = dict(how.get('wrap') or {})
        for text, logits in zip(texts, found):
            tokens = torch.tensor([encode(tokenizer, text, model)])
            with running(model, how.get('order', model.order)), torch.no_grad():
                if wrap:
                    with looped(model, **wrap):
                        wanted = model(tokens)[0, -1]
                else:
                    wanted = model(tokens)[0, -1]
            furthest = max(furthest, (logits - wanted).abs().max().item())
            best, second = wanted.topk(2).values
            assert best - second < 2e-2 or logits.argmax() == wanted.argmax(), (how, text)
    assert furthest < 1e-2, furthest
    whole, lines = play.load_model(run), []
    for depth in range(5):
        right = sum(ask('measure', how={}, task=f'toy_assign/{depth}', slice=i)['right']
                    for i in range(50))
        wanted = 100 * score(whole, tokenizer, few_shot('toy_assign', 100, shots=0, depth=depth))[0]
        assert abs(right - wanted) <= 1, (depth, right, wanted)
        lines.append(f'{right}%')
    assert not errors, errors
    print(f'{file.stat().st_size / 2 ** 20:.1f} MB; the first answer after {first:.2f} s, all '
          f'questions after {counted:.1f} s, a change after {change:.2f} s; logits differ by at '
          f'most {furthest:.1e}; depth 0 to 4: {", ".join(lines)}')


def main():
    from playwright.sync_api import sync_playwright
    out = Path('out/play')
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as p:
        folder = Path(folder)
        run = sys.argv[1] if sys.argv[1:] else random_model(folder)
        file = folder / 'page.html'
        play.main([run, f'--out={file}', '--task=toy_assign/1', '--open=false'])
        browser = p.chromium.launch(executable_path=shutil.which('chromium'), args=['--no-sandbox'])
        for name, width, scheme in (('wide', 1150, 'light'), ('narrow', 420, 'dark')):
            page = browser.new_page(viewport=dict(width=width, height=900), color_scheme=scheme)
            first = walk(page, file.as_uri(), run, folder)
            page.screenshot(path=str(out / f'{name}.png'), full_page=True)
            print(f'{name}: all steps; the first numbers after {first:.2f} s; {out}/{name}.png')
        inside(browser, run, file)
        browser.close()


if __name__ == '__main__':
    main()
